"""Problems for tile kernels, with tables built by plain loops from what `libra_kernels.tiles` says of them.

Shares no code with the planner. Letters as in `tiles.py`; a lane is one (sequence, key/value head), a unit one block
of a lane and, at the same number, the page of keys beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import oracle
from libra_kernels import PADDING

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
SPARE = 2
"""Query and page slots that no entry uses."""
GARBAGE = 2**30 + 12345
"""What table rows hold that must not be read."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Packed sequences and the numbers of their attention. lengths: documents of each sequence; a negative one is a
    gap of padding. rows, keys: most rows and keys of a kernel's tile. overlap: `Launch.overlap`."""

    lengths: Sequence[Sequence[int]]
    seq_len: int
    block: int = 64
    group: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    dtype: str = "bfloat16"
    rows: int = 128
    keys: int = 64
    overlap: bool = True
    seed: int = 0

    @property
    def blocks(self) -> int:
        return self.seq_len // self.block

    @property
    def lanes(self) -> int:
        return len(self.lengths) * self.kv_heads

    @property
    def logit_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def segment_ids(self) -> np.ndarray:
        ids = np.zeros((len(self.lengths), self.seq_len), np.int32)
        for row, documents in zip(ids, self.lengths, strict=True):
            at = 0
            for number, length in enumerate(documents):
                row[at : at + abs(length)] = number + 1 if length > 0 else 0
                at += abs(length)
            assert at <= self.seq_len
        return ids


class Dense(NamedTuple):
    """q (N, S, H, D), k (N, S, K, D), v (N, S, K, E) and the output's cotangent (N, S, H, E); padding is zero."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray


class Tables(NamedTuple):
    """The tables of one rank, where each unit went, and each wave's start, stop and readers (`triton_kernels.py`)."""

    entries: np.ndarray
    pages: np.ndarray
    first_visible: np.ndarray
    q_slot: np.ndarray
    page_slot: np.ndarray
    waves: list[tuple[int, int, np.ndarray]]


def random_dense(case: Case) -> Dense:
    """Standard normal numbers in the case's dtype."""
    rng, lead = np.random.default_rng(case.seed), (len(case.lengths), case.seq_len)
    heads, value_dim = case.kv_heads * case.group, case.value_dim or case.head_dim
    real = (case.segment_ids() > 0)[:, :, None, None]
    shapes = ((heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, value_dim), (heads, value_dim))
    return Dense(*(np.where(real, rng.standard_normal((*lead, *s)), 0).astype(DTYPES[case.dtype]) for s in shapes))


def make_tables(
    case: Case, rng: np.random.Generator, *, waves: int = 1, shuffle: bool = True, wide: bool = False, later: int = 0
) -> Tables:
    """Tables for a case, in an order drawn from `rng`.

    waves: each block runs in a random one of them. shuffle: blocks and pages in random slots. wide: every block visits
    all pages of its lane, needed or not. later: blocks by which every sequence starts later.
    """
    units, size = case.lanes * case.blocks, case.block
    first, ids = _first_visible(case), case.segment_ids()

    def slots() -> np.ndarray:
        return rng.permutation(units + SPARE)[:units] if shuffle else np.arange(units)

    q_slot, page_slot = slots(), slots()
    first_visible = rng.integers(-GARBAGE, GARBAGE, (units + SPARE, size)).astype(np.int32)
    low, count = np.zeros(units, int), np.zeros(units, int)
    for unit in range(units):
        lane, block = divmod(unit, case.blocks)
        rows = first[lane // case.kv_heads, block * size : (block + 1) * size]
        first_visible[q_slot[unit]] = np.where(rows < PADDING, rows + later * size, PADDING)
        if ids[lane // case.kv_heads, block * size : (block + 1) * size].any():
            low[unit] = rows.min() // size
            count[unit] = block + 1 - low[unit]
        if wide:
            low[unit], count[unit] = 0, case.blocks

    # Entries that share pages: those of one lane in one wave. Blocks without pages stand on their own.
    wave_of = rng.integers(waves, size=units)
    entries: list[list[int]] = []
    pages: list[int] = []
    bounds = []
    for wave in range(waves):
        inactive(entries, pages, rng)
        start, groups = len(entries), [[int(u)] for u in np.flatnonzero((wave_of == wave) & (count == 0))]
        for lane in range(case.lanes):
            mine = lane * case.blocks + np.arange(case.blocks)
            groups.append([int(u) for u in mine[(wave_of[mine] == wave) & (count[mine] > 0)]])
        for g in rng.permutation(len(groups)):
            if not groups[g]:
                continue
            lane = groups[g][0] // case.blocks
            begin, end = min(low[u] for u in groups[g]), max(low[u] + count[u] for u in groups[g])
            for unit in groups[g]:
                base = len(pages) + low[unit] - begin
                entries.append([q_slot[unit], unit % case.blocks + later, low[unit] + later, count[unit], base])
            pages += [page_slot[lane * case.blocks + page] for page in range(begin, end)]
        bounds.append((start, len(entries)))
    inactive(entries, pages, rng)
    table, page_table = np.array(entries, np.int32), np.array(pages, np.int32)
    readers = [page_readers(table, first_visible, len(pages), start, stop) for start, stop in bounds]
    return Tables(
        table, page_table, first_visible, q_slot, page_slot,
        [(start, stop, r) for (start, stop), r in zip(bounds, readers, strict=True)],
    )  # fmt: skip


def inactive(entries: list[list[int]], pages: list[int], rng: np.random.Generator) -> None:
    """Up to two entries and rows of `pages` that nothing may look at."""
    entries += [[GARBAGE] * 5] * int(rng.integers(3))
    pages += [GARBAGE] * int(rng.integers(3))


def page_readers(entries: np.ndarray, first_visible: np.ndarray, rows: int, start: int, stop: int) -> np.ndarray:
    """(L, 4) for the entries start to stop, from the definition."""
    block, readers = first_visible.shape[1], np.zeros((rows, 4), np.int32)
    for row in range(rows):
        visit, whole = [], []
        for x in range(start, stop):
            slot, number, first_page, num_pages, base = (int(n) for n in entries[x])
            if base <= row < base + num_pages:
                page = first_page + row - base
                visit.append(x)
                if number > page and first_visible[slot].max() <= page * block:
                    whole.append(x)
        for column, run in ((0, visit), (2, whole)):
            if run:
                assert run == list(range(run[0], run[-1] + 1)), "readers must be neighbours"
                readers[row, column : column + 2] = run[0], run[-1] + 1
    return readers


def _first_visible(case: Case) -> np.ndarray:
    """(N, S) the first key each token may see, from the dense mask."""
    visible = oracle.visibility(case.segment_ids(), case.window)
    return np.where(visible.any(axis=2), visible.argmax(axis=2), PADDING).astype(np.int32)


def by_unit(case: Case, x: np.ndarray) -> np.ndarray:
    """(N, S, K * P, W) -> (lanes * blocks, B, P, W)"""
    n, _, heads, width = x.shape
    x = x.reshape(n, case.blocks, case.block, case.kv_heads, heads // case.kv_heads, width)
    return x.transpose(0, 3, 1, 2, 4, 5).reshape(case.lanes * case.blocks, case.block, -1, width)
