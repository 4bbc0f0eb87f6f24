"""Pools as the benchmarks draw them, and what planning one of them gives: sequences of the distributions that ship with
the package, placed in pools, planned, and measured for balance, bytes, room, modelled time and planning time. Host side
only, without jax.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from libra_jax.data.lengths import DISTRIBUTIONS
from libra_jax.links import Links
from libra_jax.modelled import PlanCounts, counted_seconds, plan_counts
from libra_jax.placement import place
from libra_jax.plan import Plan
from libra_jax.spec import Capacity, PoolSpec, head_parallel_capacity
from libra_jax.workload import CostModel, sequence_seconds

CORPORA = ("lognormal-644-71k", "short-bulk-long-tail", "wikipedia")
HEADS = ((32, 8), (32, 4), (64, 4))  # query heads, kv heads
NODE = 8
"""Ranks that share a node."""
WAVES = {False: 4, True: 6}
"""Without relays and with them: what they pass on comes a wave later."""
ROOMS = ("blocks", "pages", "copies", "passed", "relayed")
Batches = list[list[list[int]]]
"""Document lengths of the sequences of every optimizer step."""
PlanPool = Callable[..., Plan]
"""`plan_pool`, with what it is to plan by filled in: takes lengths, spec and speed."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A training run's shapes. Block 128, head_dim 128, bfloat16."""

    name: str
    seq_len: int
    cp: int
    global_batch: int

    def spec(
        self, heads: int, kv_heads: int, room: str = "default", two_level: bool = False, pool_size: int = 8
    ) -> PoolSpec:
        """room: "default", or "asked": 0.8 home blocks of received blocks, 3 of received pages, 3 of copies to send."""
        node = NODE if two_level else None
        spec = PoolSpec(
            self.seq_len,
            pool_size,
            self.cp,
            heads,
            kv_heads,
            128,
            block=128,
            waves=WAVES[two_level],
            ranks_per_node=node,
        )
        if room == "default":
            return spec
        need = head_parallel_capacity(spec)
        asked = Capacity(max(0.8, need.blocks), max(3.0, need.pages), max(3.0, need.sent_pages))
        return dataclasses.replace(spec, capacity=asked)


SETTINGS = (Setting("256K", 262_144, 8, 128), Setting("1M", 1_048_576, 16, 32))


# ---------------------------------------------------------------------------------------------------- what is planned


def sample_sequences(corpus: str, seq_len: int, count: int, seed: int) -> list[list[int]]:
    """`count` sequences, full of documents of lengths drawn from the corpus; one that does not fit is split."""
    quantiles = json.loads((DISTRIBUTIONS / f"{corpus}.json").read_text())
    rng = np.random.default_rng(seed)
    total, ends = count * seq_len, [np.arange(seq_len, count * seq_len + 1, seq_len)]
    position = 0
    while position < total:
        drawn = np.interp(rng.random(65_536), quantiles["probability"], quantiles["length_tokens"])
        ends.append(position + np.cumsum(np.maximum(drawn.astype(np.int64), 1)))
        position = int(ends[-1][-1])
    cuts = np.unique(np.concatenate(ends))
    cuts = cuts[cuts <= total]
    lengths = np.diff(cuts, prepend=0)
    sequence = (cuts - 1) // seq_len
    return [part.tolist() for part in np.split(lengths, np.flatnonzero(np.diff(sequence)) + 1)]


def sample_batches(corpus: str, setting: Setting, pools: int, seed: int) -> Batches:
    """Sequences of as many optimizer steps as have at least that many pools of 8."""
    steps = -(-pools * 8 // setting.global_batch)
    sequences = sample_sequences(corpus, setting.seq_len, steps * setting.global_batch, seed)
    return [sequences[i * setting.global_batch :][: setting.global_batch] for i in range(steps)]


def pools_of(batches: Batches, spec: PoolSpec) -> Iterator[list[list[int]]]:
    """Each step's sequences in pools that cost alike."""
    for batch in batches:
        seconds = [sequence_seconds(sequence, spec) for sequence in batch]
        for slot in place(seconds, spec.pool_size, across="all").reshape(-1, spec.pool_size):
            yield [batch[i] for i in slot]


# ------------------------------------------------------------------------------------------------- what a plan is like


@dataclasses.dataclass
class Measured:
    """One number a pool under each name (see `measure`), and why plans fell back, with how often."""

    values: dict[str, np.ndarray]
    fallbacks: Counter[str]

    @property
    def pools(self) -> int:
        return len(self.values["imbalance"])


def measure(
    pools: Iterable[list[list[int]]],
    spec: PoolSpec,
    plan_pool: PlanPool,
    cost: CostModel,
    links: Links,
    speed: Callable[[int], np.ndarray] | None = None,
) -> Measured:
    """Plans every pool. speed: the speeds (N,) of the ranks of pool i; None: all equal.

    imbalance: of `PlanStats`, the slowest rank's pages over what perfect balance gives. Bytes of a forward pass over
    Ulysses': mean, busiest sender (sent), busiest receiver (received), and of these what crosses nodes. Rooms over home
    blocks, of the busiest rank: blocks and pages received, page copies sent, pages got from relays (passed), pages
    passed on (relayed). time: modelled seconds forward and backward over the ideal. Milliseconds of processor time.
    """
    found: dict[str, list[float]] = {}
    fallbacks: Counter[str] = Counter()
    for number, lengths in enumerate(pools):
        speeds = None if speed is None else speed(number)
        plan, plan_ms = timed(lambda lengths=lengths, s=speeds: plan_pool(lengths, spec, s))
        counts = plan_counts(plan.tables)
        modelled = counted_seconds(counts, spec, cost, links, speeds)
        sample = {
            "imbalance": plan.stats.imbalance,
            **bytes_moved(plan, counts, links),
            **room_needed(counts, spec),
            "time": modelled.total / modelled.ideal if modelled.ideal else 1.0,
            "plan ms": plan_ms,
        }
        for name, value in sample.items():
            found.setdefault(name, []).append(float(value))
        if plan.stats.fallback is not None:
            fallbacks[plan.stats.fallback] += 1
    return Measured({name: np.array(values) for name, values in found.items()}, fallbacks)


def moved_bytes(counts: PlanCounts, spec: PoolSpec) -> np.ndarray:
    """(N senders, N receivers) of a forward pass, dispatch and return together, as in `libra_jax.PlanStats`; what
    relays pass on is sent once more, and received once more."""
    result = spec.block * spec.group * spec.value_dim * spec.item_bytes
    pages = (counts.sent_pages + counts.passed_pages).sum(axis=1) * spec.page_bytes
    blocks = counts.sent_blocks.sum(axis=1)
    return blocks * (spec.block_bytes - result) + blocks.T * result + pages


def bytes_moved(plan: Plan, counts: PlanCounts, links: Links) -> dict[str, float]:
    """Over Ulysses'; of a forward pass."""
    spec = plan.spec
    moved = moved_bytes(counts, spec)
    node = np.arange(spec.ranks) // links.ranks_per_node
    across = np.where(node[:, None] == node, 0, moved)
    unit = max(plan.stats.ulysses_bytes, 1)
    return {
        "bytes mean": moved.sum() / spec.ranks / unit,
        "sent": moved.sum(axis=1).max() / unit,
        "received": moved.sum(axis=0).max() / unit,
        "across sent": across.sum(axis=1).max() / unit,
        "across received": across.sum(axis=0).max() / unit,
    }


def room_needed(counts: PlanCounts, spec: PoolSpec) -> dict[str, float]:
    """What the busiest rank needs of `Capacity`, in units of its home blocks."""
    needs = {
        "blocks": counts.sent_blocks.sum(axis=(0, 1)),
        "pages": counts.sent_pages.sum(axis=(0, 1)),
        "copies": counts.sent_pages.sum(axis=(1, 2)),
        "passed": counts.passed_pages.sum(axis=(0, 1)),
        "relayed": counts.passed_pages.sum(axis=(1, 2)),
    }
    return {name: need.max() / spec.home_blocks for name, need in needs.items()}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """-> result, milliseconds of processor time (what other programs on this machine do counts little)."""
    start = time.process_time()
    result = run()
    return result, 1e3 * (time.process_time() - start)


# -------------------------------------------------------------------------------------------------------------- tables


def row_of(measured: Measured) -> dict[str, Any]:
    """The columns of a table of plans: figures as `summary` picks them, pools, those above 1.02, and fallbacks."""
    row: dict[str, Any] = {name: summary(name, values) for name, values in measured.values.items()}
    over = int((measured.values["imbalance"] > 1.02).sum())
    return row | {"pools": measured.pools, "over 1.02": over, "fallback": sum(measured.fallbacks.values())}


def summary(name: str, values: np.ndarray) -> list[float]:
    """Median and 99th percentile over pools, of rooms 99.9% as well; the mean of mean bytes and of modelled time; the
    median of milliseconds."""
    if name in ("bytes mean", "time"):
        return [float(values.mean())]
    if name.endswith("ms"):
        return [float(np.median(values))]
    return [float(x) for x in np.quantile(values, [0.5, 0.99, 0.999] if name in ROOMS else [0.5, 0.99])]


def cell(name: str, value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    digits = 3 if name in ("imbalance", "time") else 0 if name.endswith("ms") else 2
    return "/".join(f"{x:.{digits}f}" for x in value)


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "corpus" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(*item) for item in row.items()))
    return table
