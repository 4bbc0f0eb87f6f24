"""What has to travel for an assignment of blocks to ranks: which blocks, which pages, and in which exchange.

Between a policy's answer (`planner`) and the tables (`tables`): chooses the relays of pages that several ranks of
another node read, cuts each rank's work into waves, finds every page that a rank reads but is not home to, once per
rank, and says whether it all fits in the room that the spec sets aside. NumPy, run by run (`intervals`).

"unit" = one block of one lane, numbered (p * K + kv head) * blocks_per_sequence + block; also the page of that number.
Letters as in `spec`, and: W waves, X exchanges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from libra_jax.intervals import covering, expand, stable_order, starts_within
from libra_jax.spec import PoolSpec

HOME, DIRECT, PASSED = range(3)
"""Where a rank has a page from: it is home to it, its home sent it, or a relay passed it on."""


class PoolWork(NamedTuple):
    """The pool's documents as the tables need them: (P, nb), (P, nb), (P, seq_len)."""

    spec: PoolSpec
    first_page: np.ndarray
    num_pages: np.ndarray
    first_visible: np.ndarray

    def near(self) -> np.ndarray:
        """(P, nb) bool: blocks whose pages are all at the blocks' own home."""
        width = self.spec.blocks_per_rank
        block = np.arange(self.spec.blocks_per_sequence)
        return (self.first_page // width == block // width) | (self.num_pages == 0)

    def pages_of(self, runs: Runs) -> np.ndarray:
        """(runs,) int64: the pages that each run visits."""
        before = np.concatenate([[0], np.cumsum(self.num_pages, dtype=np.int64)])
        at = runs.lane // self.spec.num_kv_heads * self.spec.blocks_per_sequence + runs.begin
        return before[at + runs.length] - before[at]


class Runs(NamedTuple):
    """Neighbouring blocks of a lane with one home, one executor and one wave. In the order of their units.

    unit: of the first block. length: blocks. lane, begin: that unit's lane and block. rank: the executor. home: rank.
    first_page: that of the first block; the run reads pages first_page to begin + length - 1 (a block visits the pages
        from the first it may see up to its own, and the first never falls from one block to the next).
    active: not padding. local: at home, with all pages at home. wave: (0 while not yet chosen).
    """

    unit: np.ndarray
    length: np.ndarray
    lane: np.ndarray
    begin: np.ndarray
    rank: np.ndarray
    home: np.ndarray
    first_page: np.ndarray
    active: np.ndarray
    local: np.ndarray
    wave: np.ndarray


class Copies(NamedTuple):
    """Runs of neighbouring items (blocks or pages) that go from one rank to another, and their results back.

    unit: of the first; in ascending order. length: items. source, target: ranks. arrives, returns: the exchange that
    brings them, and that which takes their results (outputs, or gradients of pages) back.
    """

    unit: np.ndarray
    length: np.ndarray
    source: np.ndarray
    target: np.ndarray
    arrives: np.ndarray
    returns: np.ndarray


class PageRows(NamedTuple):
    """Rows of the page tables, past the home pages: runs of neighbouring pages of one lane that a rank reads.

    In the order (rank, row). rank, row: whose table, and the row of the first. unit, length: the pages. kind: HOME,
    DIRECT or PASSED. copy: the number of the copy in `Routing.pages` or `Routing.passed` that brings them; -1 at home.
    """

    rank: np.ndarray
    row: np.ndarray
    unit: np.ndarray
    length: np.ndarray
    kind: np.ndarray
    copy: np.ndarray


class Routing(NamedTuple):
    """All that `tables` writes down. base: (runs,) row of the page table where each run's first page stands."""

    runs: Runs
    base: np.ndarray
    blocks: Copies
    pages: Copies
    """From home."""
    passed: Copies
    """From a relay, to the ranks of its node."""
    relay_copy: np.ndarray
    """For each of `passed`, the number of the copy in `pages` that brings the same pages to the relay."""
    page_rows: PageRows


class Relays(NamedTuple):
    """Who passes which pages on. Elements: runs of neighbouring pages of a lane, for a node that is home to none.

    point: (elements,) node * all pages + unit of the first page, ascending. rank: the relay of the pages from there to
    the next point; -1 where there is none, because at most one rank of the node reads them.
    reads: per read of passed pages (reader * all pages + unit of the first, the same of the last + 1), ascending.
    """

    point: np.ndarray
    rank: np.ndarray
    reads: tuple[np.ndarray, np.ndarray]


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


def rank_work(runs: Runs, work: PoolWork) -> np.ndarray:
    """(N, 2) int64: pages that each rank visits, and blocks it executes that are not all padding."""
    pages = np.bincount(runs.rank, work.pages_of(runs), work.spec.ranks)
    blocks = np.bincount(runs.rank, np.where(runs.active, runs.length, 0), work.spec.ranks)
    return np.stack([pages, blocks], axis=-1).astype(np.int64)


def runs_of(executor: np.ndarray, work: PoolWork, wave: np.ndarray | None = None) -> Runs:
    """The longest runs of an assignment (P, K, nb), and of waves (P, K, nb) where they are known."""
    spec = work.spec
    nb, width = spec.blocks_per_sequence, spec.blocks_per_rank
    near, active = work.near(), work.num_pages > 0
    ends = (near[:, 1:] != near[:, :-1]) | (active[:, 1:] != active[:, :-1])
    ends[:, width - 1 :: width] = True
    starts = np.ones(executor.shape, bool)
    starts[..., 1:] = (executor[..., 1:] != executor[..., :-1]) | ends[:, None]
    if wave is not None:
        starts[..., 1:] |= wave[..., 1:] != wave[..., :-1]
    unit = np.flatnonzero(starts)
    count = np.diff(unit, append=executor.size)
    lane, begin = np.divmod(unit, nb)
    sequence, rank = lane // spec.num_kv_heads, executor.reshape(-1)[unit]
    home = (sequence * spec.cp + begin // width).astype(np.int32)
    return Runs(
        unit,
        count,
        lane,
        begin,
        rank,
        home,
        work.first_page[sequence, begin].astype(np.int64),
        active[sequence, begin],
        near[sequence, begin] & (rank == home),
        np.zeros(unit.size, np.int32) if wave is None else wave.reshape(-1)[unit],
    )


def choose_relays(runs: Runs, work: PoolWork) -> Relays | None:
    """Relays for the pages that two or more ranks of a node read and that none of the node is home to; None where
    there are none.

    One of the readers is the relay: it needs the page anyway. Readers take turns, about a quarter of a part at a time.
    Where that is more than the room of one of them, the longest runs are given out first, each to the reader with the
    least to pass on, and what then still finds no room comes straight from home.
    """
    spec = work.spec
    if spec.ranks_per_node is None:
        return None
    node, nb, width, size = spec.node_ranks, spec.blocks_per_sequence, spec.blocks_per_rank, _units(spec)
    reads = np.flatnonzero(runs.active & ~runs.local)
    rank, low, high, _ = _union(*_read(runs, reads, nb))
    turn = next(pages for pages in range(max(width // 4, 1), 0, -1) if width % pages == 0)
    rank, low, high = _cut(rank, low, high, turn)
    away = _home_of(low, spec) // node != rank // node
    rank, low, high = rank[away], low[away], high[away]
    offset = (rank // node).astype(np.int64) * size
    point = np.unique(np.concatenate([offset + low, offset + high]))
    which, element = covering(offset + low, offset + high, point)
    order = stable_order(element)
    element, reader = element[order], rank[which[order]]
    readers = np.bincount(element, minlength=point.size)
    several = np.flatnonzero(readers > 1)
    if not several.size:
        return None
    first, length, page = np.cumsum(readers) - readers, np.diff(point, append=0), point % size
    relay = np.full(point.size, -1, np.int32)
    relay[several] = reader[first[several] + (page // turn + page // nb)[several] % readers[several]]

    def held(owner: np.ndarray, runs: np.ndarray) -> int:
        return int(np.bincount(owner, length[runs], 1).max())

    passed = (relay[element] >= 0) & (relay[element] != reader)
    room = spec.room
    over = held(relay[element[passed]], element[passed]) > room.relayed_pages
    if over or held(reader[passed], element[passed]) > room.passed_pages:
        relay = _relays_within_room(several, first, readers, reader, length, spec)
        passed = (relay[element] >= 0) & (relay[element] != reader)
        if not passed.any():
            return None
    element, reader = element[passed], reader[passed]
    begin = reader * np.int64(size) + page[element]
    order = np.argsort(begin)
    return Relays(point, relay, (begin[order], (begin + length[element])[order]))


def _relays_within_room(
    several: np.ndarray, first: np.ndarray, readers: np.ndarray, reader: np.ndarray, length: np.ndarray, spec: PoolSpec
) -> np.ndarray:
    """(elements,) relays such that no rank passes on, or gets from relays, more than `spec.room` has; -1: none.

    several: the elements that more than one rank reads. The readers of element e are reader[first[e]] and the
    readers[e] - 1 after it. length: pages.
    """
    relay = np.full(length.size, -1, np.int32)
    relayed, passed = np.zeros(spec.ranks, np.int64), np.zeros(spec.ranks, np.int64)
    for e in several[np.argsort(-((readers - 1) * length)[several], kind="stable")]:
        who = reader[first[e] : first[e] + readers[e]]
        # The reader with the least to pass on; of equal ones that with the most to get from others.
        chosen = who[np.lexsort((-passed[who], relayed[who]))[0]]
        others = who[who != chosen]
        if relayed[chosen] + others.size * length[e] > spec.room.relayed_pages:
            continue
        if passed[others].max() + length[e] > spec.room.passed_pages:
            continue
        relay[e] = chosen
        relayed[chosen] += others.size * length[e]
        passed[others] += length[e]
    return relay


def assign_waves(executor: np.ndarray, work: PoolWork, relays: Relays | None = None) -> np.ndarray:
    """(P, K, nb) int: the wave that executes each unit.

    With one wave everything waits for the exchange. With two, wave 0 is what needs none. With more, ranks keep step:
    an exchange is over when the last rank has come to it, so a wave ends at the same fraction of its work on every
    rank (`wave_ends`). A rank works first on what needs no exchange, in wave 0 and on into later ones if there is more
    of it, then on blocks from elsewhere, and last on blocks of its own, whose outputs have no way home to go. What
    reads passed pages (`relays`: as `choose_relays` gives them) comes after what does not, and not before wave 2.
    """
    spec = work.spec
    if spec.waves == 1:
        return np.zeros(executor.shape, np.int32)
    runs = runs_of(executor, work)
    if spec.waves == 2:
        return np.repeat(np.where(runs.local, 0, 1).astype(np.int32), runs.length).reshape(executor.shape)
    waits = _reads_passed(runs, relays, spec)
    before = np.concatenate(
        [[0], np.cumsum(work.num_pages, dtype=np.int64)]
    )  # pages of all blocks before, head by head
    at = runs.lane // spec.num_kv_heads * spec.blocks_per_sequence + runs.begin
    pages = before[at + runs.length] - before[at]
    order = stable_order(np.where(runs.local, 0, np.where(runs.rank != runs.home, 1 + waits, 3)), runs.rank)
    total = np.bincount(runs.rank, pages, spec.ranks).astype(np.int64)
    done = np.cumsum(pages[order])  # by all ranks before, and by this one
    start = np.empty_like(pages)  # what a rank has done before a run
    start[order] = done - pages[order] - (np.cumsum(total) - total)[runs.rank[order]]

    # Where each rank's waves end: inside of some run, at the first block whose middle lies beyond.
    ends = wave_ends(spec.waves, spec.ranks_per_node is not None)[:-1]
    busy = np.flatnonzero(total)
    goal = ends * total[busy, None]
    run = order[np.searchsorted(done, goal + (np.cumsum(total) - total)[busy, None], side="right")]
    middle = before[:-1] + 0.5 * work.num_pages.reshape(-1)
    block = np.searchsorted(middle, before[at[run]] + goal - start[run])
    inside = np.clip(block - at[run], 0, runs.length[run] - 1)
    unit = np.unique(np.concatenate([runs.unit, (runs.unit[run] + inside).reshape(-1)]))
    whole = np.searchsorted(runs.unit, unit, side="right") - 1
    first = at[whole] + unit - runs.unit[whole]
    part = (start[whole] - before[at[whole]] + middle[first]) / np.maximum(total, 1)[runs.rank[whole]]
    wave = np.searchsorted(ends, part, side="right")
    wave = np.maximum(wave, np.where(runs.local, 0, 1 + waits)[whole])
    wave = np.where(runs.active[whole], wave, 0).astype(np.int32)
    return np.repeat(wave, np.diff(unit, append=executor.size)).reshape(executor.shape)


def wave_ends(waves: int, relays: bool = False) -> np.ndarray:
    """(W,) the fraction of a rank's work that is done when each wave ends.

    Sizes rise by one to the middle and fall again: the first exchange is small, because there may be little to do
    under it, and so is the last return, which has nothing to go under (docs/log.md: what other sizes cost). With
    relays they rise a wave later, because what is passed on comes a wave later, and nobody should wait for those who
    have nothing else to do.
    """
    size = np.minimum(np.maximum(np.arange(waves), 0.5) if relays else np.arange(waves) + 1, waves - np.arange(waves))
    return np.cumsum(size) / size.sum()


def route(executor: np.ndarray, wave: np.ndarray, work: PoolWork, relays: Relays | None = None) -> Routing:
    """What has to travel for this assignment: each block once, each page once to every rank that reads it.

    executor, wave: (P, K, nb), waves as `assign_waves` gives them with the same relays.
    """
    spec, size = work.spec, _units(work.spec)
    runs = runs_of(executor, work, wave)
    exchange = runs.wave - (spec.waves > 1)
    moved = np.flatnonzero(runs.rank != runs.home)
    blocks = Copies(
        runs.unit[moved], runs.length[moved], runs.home[moved], runs.rank[moved], exchange[moved], exchange[moved]
    )

    # A wave reads a page by one row of the page table (`libra_kernels.Tiles`). In wave 0, where nothing else runs,
    # local runs read the home pages at its head; in other waves they share the rows of the runs that are not local.
    base = np.zeros(runs.unit.size, np.int64)
    head = runs.active & runs.local & (runs.wave == 0) & (spec.waves > 1 or spec.ranks == 1)
    base[head] = home_slots(runs.unit[head] - runs.begin[head] + runs.first_page[head], spec)
    far = np.flatnonzero(runs.active & ~head)
    far = far[stable_order(runs.rank[far])]
    low, high = _read(runs, far, spec.blocks_per_sequence)[1:]
    rank, start, end, union = _union(runs.rank[far], low, high)
    base[far] = spec.home_blocks + starts_within(rank, end - start, spec.ranks)[union] + low - start[union]

    # Elements: pages that lie at one home, are read by the same runs of a node, and have one relay.
    offset = (rank // spec.node_ranks).astype(np.int64) * size
    parts, cut, _ = _cut(np.arange(rank.size), start, end, spec.blocks_per_rank)
    points = [offset[parts] + cut, offset + end, offset[union] + low, offset[union] + high]
    point = np.unique(np.concatenate(points if relays is None else [*points, relays.point]))
    which, element = covering(offset + start, offset + end, point)
    reader, unit = rank[which], point[element] % size
    count = point[element + 1] - point[element]
    # The first and the last exchange whose waves read each element, rank by rank.
    number = np.searchsorted(which, np.arange(rank.size))[union] - element[np.searchsorted(which, union)]
    begin, stop = (number + np.searchsorted(point, offset[union] + edge) for edge in (low, high))
    first, last = np.full(which.size, spec.exchanges, np.int32), np.full(which.size, -1, np.int32)
    for x in range(spec.exchanges):
        read_by = exchange[far] == x
        opened, closed = (np.bincount(edge[read_by], minlength=which.size + 1) for edge in (begin, stop))
        read = np.cumsum(opened - closed)[:-1] > 0
        first[read & (first == spec.exchanges)] = x
        last[read] = x

    source = _home_of(unit, spec)
    kind = np.where(source == reader, HOME, DIRECT)
    arrives, returns, relay_copy = first, last, np.zeros(0, np.int64)
    if relays is not None:
        relay = relays.rank[np.searchsorted(relays.point, point, side="right") - 1][element]
        passed = (relay >= 0) & (relay != reader) & (kind == DIRECT)
        kind[passed] = PASSED
        at_relay = np.full(point.size, -1)
        at_relay[element[relay == reader]] = np.flatnonzero(relay == reader)
        via = at_relay[element[passed]]
        source[passed] = reader[via]
        # What it passes on comes to a relay an exchange earlier, and stays until it has all gradients.
        np.minimum.at(arrives, via, first[passed] - 1)
        np.maximum.at(returns, via, np.minimum(last[passed] + 1, spec.exchanges - 1))
        relay_copy = (np.cumsum(kind == DIRECT) - 1)[via]
    copy = np.full(kind.size, -1)

    def copies(wanted: int) -> Copies:
        chosen = np.flatnonzero(kind == wanted)
        copy[chosen] = np.arange(chosen.size)
        return Copies(*(x[chosen] for x in (unit, count, source, reader, arrives, returns)))

    pages, passed_pages = copies(DIRECT), copies(PASSED)
    row = spec.home_blocks + starts_within(reader, count, spec.ranks)
    return Routing(runs, base, blocks, pages, passed_pages, relay_copy, PageRows(reader, row, unit, count, kind, copy))


def lack_of_room(routing: Routing, spec: PoolSpec) -> str | None:
    """Which room of the spec the plan exceeds, in words; None when it fits."""
    room, n = spec.room, spec.ranks

    def pairs(items: Copies, exchange: np.ndarray) -> int:
        key = (items.source.astype(np.int64) * n + items.target) * spec.exchanges + exchange
        return int(np.bincount(key, items.length).max(initial=0))

    def most(ranks: np.ndarray, items: Copies) -> int:
        return int(np.bincount(ranks, items.length).max(initial=0))

    blocks, pages, passed = routing.blocks, routing.pages, routing.passed
    for name, need, have in (
        ("received blocks", most(blocks.target, blocks), room.blocks),
        ("received pages", most(pages.target, pages), room.pages),
        ("sent pages", most(pages.source, pages), room.sent_pages),
        ("blocks from one rank to another", pairs(blocks, blocks.arrives), room.pair_blocks),
        ("pages from one rank to another", pairs(pages, pages.arrives), room.pair_pages),
        ("page gradients from one rank to another", pairs(pages, pages.returns), room.pair_pages),
        ("passed pages", most(passed.target, passed), room.passed_pages),
        ("relayed pages", most(passed.source, passed), room.relayed_pages),
        ("relayed pages from one rank to another", pairs(passed, passed.arrives), room.pair_passed),
        ("relayed gradients from one rank to another", pairs(passed, passed.returns), room.pair_passed),
    ):
        if need > have:
            return f"the plan needs room for {need} {name}, the spec's capacity gives {have}"
    return None


def home_slots(unit: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """The slot of each unit at its home, and of the page of the same number."""
    lane, block = np.divmod(unit, spec.blocks_per_sequence)
    return lane % spec.num_kv_heads * spec.blocks_per_rank + block % spec.blocks_per_rank


def _home_of(unit: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """The home rank of each unit."""
    lane, block = np.divmod(unit, spec.blocks_per_sequence)
    return (lane // spec.num_kv_heads * spec.cp + block // spec.blocks_per_rank).astype(np.int32)


def _units(spec: PoolSpec) -> int:
    return spec.pool_size * spec.num_kv_heads * spec.blocks_per_sequence


def _read(runs: Runs, chosen: np.ndarray, nb: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Who reads which pages: rank, unit of the first page, unit of the last + 1."""
    lane_begin = runs.unit[chosen] - runs.begin[chosen]
    return runs.rank[chosen], lane_begin + runs.first_page[chosen], runs.unit[chosen] + runs.length[chosen]


def _union(
    rank: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Intervals of each rank joined where they touch: rank, low, high, and for each that came in which it is part of.

    Neither end falls from one interval of a rank to the next; the result is in ascending order of rank.
    """
    order = stable_order(rank)
    rank, low, high = rank[order], low[order], high[order]
    new = np.ones(rank.size, bool)
    new[1:] = (rank[1:] != rank[:-1]) | (low[1:] > high[:-1])
    first = np.flatnonzero(new)
    part_of = np.empty(rank.size, np.int64)
    part_of[order] = np.cumsum(new) - 1
    return rank[first], low[first], high[np.append(first[1:], rank.size) - 1] if rank.size else high, part_of


def _cut(
    owner: np.ndarray, low: np.ndarray, high: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intervals cut at the multiples of `length`: owner, low, high."""
    cells = -(-high // length) - low // length
    cell = expand(low // length, cells).astype(np.int64)
    return (
        np.repeat(owner, cells),
        np.maximum(np.repeat(low, cells), cell * length),
        np.minimum(np.repeat(high, cells), (cell + 1) * length),
    )


def _reads_passed(runs: Runs, relays: Relays | None, spec: PoolSpec) -> np.ndarray:
    """(runs,) bool: which read a page that a relay passes on."""
    if relays is None:
        return np.zeros(runs.unit.size, bool)
    rank, low, high = _read(runs, np.arange(runs.unit.size), spec.blocks_per_sequence)
    offset = rank.astype(np.int64) * _units(spec)
    begin, end = relays.reads
    over = np.searchsorted(end, offset + low, side="right")
    return runs.active & (np.searchsorted(begin, offset + high) > over)
