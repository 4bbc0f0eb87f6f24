"""What has to travel for an assignment of blocks to ranks: which blocks, which pages, and in which exchange.

Between a policy's answer (`planner`) and the tables (`tables`): cuts each rank's work into waves, finds every page that
a rank reads but is not home to, once per rank, and says whether it all fits in the room that the spec sets aside.
NumPy, whole arrays at a time: a pool of eight 256K sequences has 131,072 (block, kv head) pairs.

"unit" = one block of one lane, numbered (p * K + kv head) * blocks_per_sequence + block; also the page of that number.
Letters as in `spec`, and: W waves, X exchanges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from libra_jax.spec import PoolSpec


class PoolWork(NamedTuple):
    """The pool's documents as the tables need them: (P, nb), (P, nb), (P, seq_len)."""

    spec: PoolSpec
    first_page: np.ndarray
    num_pages: np.ndarray
    first_visible: np.ndarray

    def lanes(self, per_sequence: np.ndarray) -> np.ndarray:
        """(P, nb) -> (P * K * nb,): the same for each kv head of a sequence."""
        spec = self.spec
        shape = (spec.pool_size, spec.num_kv_heads, spec.blocks_per_sequence)
        return np.broadcast_to(per_sequence[:, None], shape).reshape(-1)

    def home(self) -> np.ndarray:
        """(P * K * nb,) home rank of every unit, and of the page of the same number."""
        spec = self.spec
        part = np.arange(spec.blocks_per_sequence, dtype=np.int32) // spec.blocks_per_rank
        return self.lanes(part + spec.cp * np.arange(spec.pool_size, dtype=np.int32)[:, None])

    def home_slot(self) -> np.ndarray:
        """(P * K * nb,) slot of every unit at its home."""
        spec = self.spec
        head = spec.blocks_per_rank * np.arange(spec.num_kv_heads, dtype=np.int32)[:, None]
        block = np.arange(spec.blocks_per_sequence, dtype=np.int32) % spec.blocks_per_rank
        return np.broadcast_to(head + block, (spec.pool_size, spec.num_kv_heads, block.size)).reshape(-1)

    def local(self, executor: np.ndarray) -> np.ndarray:
        """(P * K * nb,) bool: units executed at home whose pages are all at home too."""
        spec = self.spec
        block = np.arange(spec.blocks_per_sequence)
        near = (self.first_page // spec.blocks_per_rank == block // spec.blocks_per_rank) | (self.num_pages == 0)
        return self.lanes(near) & (executor.reshape(-1) == self.home())


class Routes(NamedTuple):
    """One kind of item (blocks or pages) on its way from its home to an executor and back.

    Per item, ordered by (lane, block): its unit number (the page of that number, for pages), its home, its executor,
    the exchange that brings it and the one that takes the result back.
    """

    unit: np.ndarray
    home: np.ndarray
    executor: np.ndarray
    arrives: np.ndarray
    returns: np.ndarray


class Runs(NamedTuple):
    """Maximal runs of neighbouring units with one executor and one wave that share a page table.

    first, last: unit numbers. base: row of `pages` where the first page of the first unit stands; -1 while unknown.
    """

    first: np.ndarray
    last: np.ndarray
    base: np.ndarray


class Routing(NamedTuple):
    blocks: Routes
    pages: Routes
    runs: Runs
    page_rows: tuple[np.ndarray, np.ndarray, np.ndarray]
    """rank, row in `pages`, and page (unit number) of every page-table row past the home pages."""


def check_executor(executor: np.ndarray, num_pages: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """A policy's answer as int32 (P, K, nb), refused when it is not an assignment to this pool's ranks."""
    executor = np.asarray(executor)
    shape = (spec.pool_size, spec.num_kv_heads, spec.blocks_per_sequence)
    if executor.shape != shape or executor.dtype.kind not in "iu":
        raise ValueError(f"a policy must return whole numbers {shape}, got {executor.dtype} {executor.shape}")
    if executor.min() < 0 or executor.max() >= spec.ranks:
        raise ValueError(f"ranks {executor.min()} to {executor.max()} were assigned in a pool of {spec.ranks}")
    # All-padding blocks have nothing to compute; they stay where they are.
    home = np.arange(spec.blocks_per_sequence) // spec.blocks_per_rank + spec.cp * np.arange(spec.pool_size)[:, None]
    return np.where((num_pages == 0)[:, None], home[:, None], executor).astype(np.int32)


def rank_work(executor: np.ndarray, num_pages: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """(N, 2) int64: pages that each rank visits, and blocks it executes that are not all padding.

    executor: (P, K, nb); num_pages: (P, nb).
    """
    ranks, each = executor.reshape(-1), np.broadcast_to(num_pages[:, None], executor.shape).reshape(-1)
    pages = np.bincount(ranks, each, minlength=spec.ranks)
    return np.stack([pages, np.bincount(ranks, each > 0, minlength=spec.ranks)], axis=-1).astype(np.int64)


def assign_waves(executor: np.ndarray, work: PoolWork) -> np.ndarray:
    """(P, K, nb) int: the wave that executes each unit.

    With one wave everything waits for the exchange. With two, wave 0 is what needs none. With more, ranks keep step:
    an exchange is over when the last rank has come to it, so a wave ends at the same fraction of its work on every
    rank (`wave_ends`). A rank works first on what needs no exchange, in wave 0 and on into later ones if there is more
    of it, then on blocks from elsewhere, and last on blocks of its own, whose outputs have no way home to go.
    """
    spec = work.spec
    if spec.waves == 1:
        return np.zeros(executor.shape, np.int32)
    local = work.local(executor)
    if spec.waves == 2:
        return np.where(local, 0, 1).astype(np.int32).reshape(executor.shape)
    ranks, pages = executor.reshape(-1), work.lanes(work.num_pages)
    turn = np.where(local, 0, np.where(ranks != work.home(), 1, 2))
    order = stable_order(ranks * 3 + turn)
    ranks, pages = ranks[order], pages[order].astype(np.int64)
    total = np.bincount(ranks, pages, minlength=spec.ranks)
    before = np.cumsum(pages) - pages - (np.cumsum(total) - total)[ranks]
    part = (before + 0.5 * pages) / np.maximum(total, 1)[ranks]
    chosen = np.searchsorted(wave_ends(spec.waves)[:-1], part, side="right")
    chosen = np.where(local[order], chosen, np.maximum(chosen, 1))
    wave = np.empty(executor.size, np.int32)
    wave[order] = np.where(pages > 0, chosen, 0)
    return wave.reshape(executor.shape)


def wave_ends(waves: int) -> np.ndarray:
    """(W,) the fraction of a rank's work that is done when each wave ends.

    Sizes rise by one to the middle and fall again: the first exchange is small, because there may be little to do
    under it, and so is the last return, which has nothing to go under (docs/log.md: what other sizes cost).
    """
    size = np.minimum(np.arange(waves) + 1, waves - np.arange(waves))
    return np.cumsum(size) / size.sum()


def route(executor: np.ndarray, wave: np.ndarray, work: PoolWork) -> Routing:
    """What has to travel for this assignment: each block once, each page once to every rank that reads it."""
    spec = work.spec
    ex, exchange, home = executor.reshape(-1), (wave - (spec.waves > 1)).reshape(-1), work.home()
    moved = np.flatnonzero(ex != home)
    blocks = Routes(moved, home[moved], ex[moved], exchange[moved], exchange[moved])

    # Runs of neighbours that share executor, wave and lane. A run's pages are one interval: a block visits the pages
    # from the first it may see up to its own, and the first never falls from one block to the next.
    nb = spec.blocks_per_sequence
    active = work.lanes(work.num_pages) > 0
    # A wave reads a page by one row of the page table (`libra_kernels.Tiles`). In wave 0, where nothing else runs,
    # local runs read the home pages at its head; in other waves they share the rows of the runs that are not local.
    own_rows = spec.waves > 1 or spec.ranks == 1
    local = work.local(executor) & (wave.reshape(-1) == 0) if own_rows else np.zeros(ex.size, bool)
    starts = np.ones(ex.size, bool)
    starts[1:] = (ex[1:] != ex[:-1]) | (exchange[1:] != exchange[:-1]) | (local[1:] != local[:-1])
    starts[1:] |= active[1:] != active[:-1]
    starts[::nb] = True
    first = np.flatnonzero(starts)
    last = np.append(first[1:], ex.size) - 1
    keep = active[first]
    first, last = first[keep], last[keep]
    first_page = work.lanes(work.first_page)
    page_of = first - first % nb + first_page[first]
    base = np.where(local[first], work.home_slot()[page_of], -1)

    far = np.flatnonzero(base < 0)
    lane, rank = first[far] // nb, ex[first[far]]
    pair_key, pair = np.unique(rank.astype(np.int64) * (spec.pool_size * spec.num_kv_heads) + lane, return_inverse=True)
    pair_rank, pair_lane = np.divmod(pair_key, spec.pool_size * spec.num_kv_heads)
    begin, end = page_of[far] % nb, last[far] % nb + 1
    # (pairs, nb) the first and last exchange whose wave reads the page; `never` where none does.
    never = spec.exchanges
    first_use = np.full((pair_key.size, nb), never, np.int8)
    last_use = np.full((pair_key.size, nb), -1, np.int8)
    for x in range(spec.exchanges):
        runs_x = exchange[first[far]] == x
        step = np.zeros((pair_key.size, nb + 1), np.int32)
        np.add.at(step, (pair[runs_x], begin[runs_x]), 1)
        np.add.at(step, (pair[runs_x], end[runs_x]), -1)
        read = np.cumsum(step[:, :-1], axis=1) > 0
        first_use[read & (first_use == never)] = x
        last_use[read] = x
    flat = np.flatnonzero(last_use >= 0)
    row_pair, row_page = np.divmod(flat, nb)
    row_rank, row_unit = pair_rank[row_pair], pair_lane[row_pair] * nb + row_page
    in_rank = rank_within(row_rank, spec.ranks)
    base[far] = spec.home_blocks + in_rank[np.searchsorted(flat, pair * nb + begin)]

    remote = home[row_unit] != row_rank
    pages = Routes(
        row_unit[remote],
        home[row_unit[remote]],
        row_rank[remote].astype(np.int32),
        first_use.reshape(-1)[flat[remote]].astype(np.int32),
        last_use.reshape(-1)[flat[remote]].astype(np.int32),
    )
    return Routing(blocks, pages, Runs(first, last, base), (row_rank, spec.home_blocks + in_rank, row_unit))


def lack_of_room(routing: Routing, spec: PoolSpec) -> str | None:
    """Which room of the spec the plan exceeds, in words; None when it fits."""
    room, n = spec.room, spec.ranks

    def pairs(items: Routes, exchange: np.ndarray) -> int:
        key = (items.home.astype(np.int64) * n + items.executor) * spec.exchanges + exchange
        return int(np.bincount(key).max(initial=0))

    def most(ranks: np.ndarray) -> int:
        return int(np.bincount(ranks).max(initial=0))

    blocks, pages = routing.blocks, routing.pages
    for name, need, have in (
        ("received blocks", most(blocks.executor), room.blocks),
        ("received pages", most(pages.executor), room.pages),
        ("sent pages", most(pages.home), room.sent_pages),
        ("blocks from one rank to another", pairs(blocks, blocks.arrives), room.pair_blocks),
        ("pages from one rank to another", pairs(pages, pages.arrives), room.pair_pages),
        ("page gradients from one rank to another", pairs(pages, pages.returns), room.pair_pages),
    ):
        if need > have:
            return f"the plan needs room for {need} {name}, the spec's capacity gives {have}"
    return None


def stable_order(*keys: np.ndarray) -> np.ndarray:
    """Order that sorts by the last key, then the one before it, and so on; ties keep their place (as np.lexsort).

    Small non-negative integers only. NumPy sorts 16-bit integers by radix, many times faster than wider ones.
    """
    order = None
    for key in keys:
        narrow = key.astype(np.uint16) if key.size == 0 or key.max() < 2**16 else key
        step = np.argsort(narrow if order is None else narrow[order], kind="stable")
        order = step if order is None else order[step]
    assert order is not None
    return order


def rank_within(rank: np.ndarray, ranks: int) -> np.ndarray:
    """For ranks in ascending order: the position of each item among the items of its rank."""
    count = np.bincount(rank, minlength=ranks)
    return (np.arange(rank.size) - np.repeat(np.cumsum(count) - count, count)).astype(np.int32)
