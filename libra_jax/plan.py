"""From an assignment of blocks to ranks to the tables of fixed shape that the device side runs from.

`plan_pool` is the host's whole path for one pool: lengths -> pages per block -> a policy says which rank executes
each block -> waves -> tables and statistics. It runs in the input pipeline; `stack_plans` joins the pools of a step.
NumPy only. Whole arrays at a time: a pool of eight 256K sequences has 131,072 (block, kv head) pairs.

Letters as in `spec`, and: W waves, X exchanges, "unit" = one block of one lane, lane = p * K + kv head.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from libra_jax import planner
from libra_jax.spec import PoolSpec
from libra_jax.workload import PADDING, block_pages, check_lengths, document_starts

Ints = npt.NDArray[np.int32]
Policy = Callable[[np.ndarray, np.ndarray, PoolSpec, np.ndarray], np.ndarray]
"""policy(first_page (P, nb), num_pages (P, nb), spec, speed (N,)) -> executor (P, K, nb): see `planner`."""


@dataclasses.dataclass(frozen=True)
class PlanTables:
    """What one rank needs to know, for every rank. int32 arrays of fixed shape behind leading axes.

    Leading axes are (dp, cp) in a `Plan` and (pools, dp, cp) after `stack_plans`; shard them as the batch is. A
    pytree whose only static part is `spec`. H home blocks (= home pages), RB / RP / SP rooms for received blocks,
    received pages and sent pages (`PoolSpec.room`).

    Slots: a block or page at home stands in slot kv_head * blocks_per_rank + block % blocks_per_rank; what is received
    follows from slot H on, in the order (exchange, sender, lane, block).

    entries: (H + RB, 5) executed blocks, ordered by (wave, lane, block); columns as in `libra_kernels.Tiles`.
    wave_offsets: (W + 1,) wave w executes entries wave_offsets[w] to wave_offsets[w + 1].
    pages: (2 H + RP,) page slots that entries point into. The first H rows are the home pages themselves.
    first_visible: (seq_len / cp,) lowest position each home token may see, `PADDING` for padding.
    send_blocks: (H,) home slots in sending order; send_block_offsets: (X, N + 1) which of them go where.
    recv_block_offsets: (X, N + 1) where they land, as received blocks.
    send_pages: (SP,), send_page_offsets, recv_page_offsets: the same for pages.
    return_pages: (RP,) received pages in the order in which their gradients go home, each in the exchange of the last
        wave that uses it; return_page_offsets: (X, N + 1); returned_page_offsets: (X, N + 1) where they land at home.
    sum_offsets: (H + 1,), sum_rows: (SP,): for each home page the returned rows to add to it, in ascending order.
    """

    spec: PoolSpec
    entries: Ints
    wave_offsets: Ints
    pages: Ints
    first_visible: Ints
    send_blocks: Ints
    send_block_offsets: Ints
    recv_block_offsets: Ints
    send_pages: Ints
    send_page_offsets: Ints
    recv_page_offsets: Ints
    return_pages: Ints
    return_page_offsets: Ints
    returned_page_offsets: Ints
    sum_offsets: Ints
    sum_rows: Ints

    @classmethod
    def table_names(cls) -> list[str]:
        """Names of the array fields, in order."""
        return [field.name for field in dataclasses.fields(cls) if field.name != "spec"]

    def map(self, function: Callable[[Ints], np.ndarray]) -> Self:
        """The same tables with `function` applied to every array."""
        return dataclasses.replace(self, **{name: function(getattr(self, name)) for name in self.table_names()})


@dataclasses.dataclass(frozen=True)
class PlanStats:
    """What a plan costs. Bytes are a forward pass's, dispatch and return together, in `spec.dtype`.

    work: (N,) pages visited by each rank.
    imbalance: the slowest rank's time over the time with perfect balance; max/mean of `work` when speeds are equal.
        1.0 is perfect.
    sent_bytes, received_bytes: (N,). Four bytes a token for first-visible positions are not counted.
    ulysses_bytes: what one rank sends when every sequence's heads are dealt to its CP group.
    fallback: why the head-parallel plan was used instead of the policy's, or None.
    """

    work: np.ndarray
    imbalance: float
    sent_bytes: np.ndarray
    received_bytes: np.ndarray
    ulysses_bytes: int
    fallback: str | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One pool's plan: who executes what (executor, wave: (P, K, nb)), the tables, and what it costs."""

    spec: PoolSpec
    executor: np.ndarray
    wave: np.ndarray
    tables: PlanTables
    stats: PlanStats


def plan_pool(
    lengths: Sequence[Sequence[int]],
    spec: PoolSpec,
    speed: Sequence[float] | np.ndarray | None = None,
    *,
    policy: Policy = planner.pooled,
) -> Plan:
    """Plans one pool: `lengths` holds, for each of its sequences, the lengths of the documents in it, in order.

    speed: relative speeds of the pool's ranks, (N,), rank p * cp + c; None: all equal.
    policy: decides which rank executes which block; see `planner`.

    Deterministic. A plan that needs more room than `spec.capacity` gives is replaced by the head-parallel one and
    says so in `stats.fallback`. Raises ValueError for lengths that are not positive whole numbers or do not fit in
    seq_len, for the wrong number of sequences, and for speeds that are not positive.
    """
    if len(lengths) != spec.pool_size:
        raise ValueError(f"lengths of {len(lengths)} sequences were given for a pool of {spec.pool_size}")
    checked = [check_lengths(sequence, spec.seq_len, sequence=p) for p, sequence in enumerate(lengths)]
    speeds = _check_speed(speed, spec)
    per_block = [block_pages(sequence, spec) for sequence in checked]
    first_page = np.stack([b.first_page for b in per_block])
    num_pages = np.stack([b.num_pages for b in per_block])
    first_visible = np.stack([document_starts(sequence, spec.seq_len, spec.window) for sequence in checked])

    executor = check_executor(policy(first_page, num_pages, spec, speeds), num_pages, spec)
    work = _Workload(spec, first_page, num_pages, first_visible)
    wave = assign_waves(executor, work)
    routes = _route(executor, wave, work)
    fallback = _lack_of_room(routes, spec)
    if fallback is not None:
        executor = planner.head_parallel(first_page, num_pages, spec, speeds)
        wave = assign_waves(executor, work)
        routes = _route(executor, wave, work)
        assert _lack_of_room(routes, spec) is None, "the head-parallel plan must fit every valid spec"
    stats = _statistics(executor, routes, work, speeds, fallback)
    return Plan(spec, executor, wave, _tables(executor, wave, routes, work), stats)


def stack_plans(plans: Sequence[Plan]) -> PlanTables:
    """Tables of several pools with leading axes (pools, dp, cp), ready to shard with the batch."""
    if not plans:
        raise ValueError("stack_plans needs at least one plan, got 0")
    for i, plan in enumerate(plans):
        if plan.spec != plans[0].spec:
            raise ValueError(f"plans of one step share a spec: plan 0 has {plans[0].spec}, plan {i} has {plan.spec}")
    register_pytree()
    stacked = {name: np.stack([getattr(plan.tables, name) for plan in plans]) for name in PlanTables.table_names()}
    return PlanTables(spec=plans[0].spec, **stacked)


def check_batch(plans: PlanTables, segment_ids: np.ndarray, padding_id: int = 0) -> None:
    """Refuses, on the host, plans that were made for other documents than the batch holds.

    segment_ids: (sequences, seq_len) int; a token's document, equal for neighbours of one document. `padding_id`
    marks padding, which must come last in a sequence. Raises ValueError naming the first sequence and token that
    disagree.
    """
    spec = plans.spec
    segment_ids = np.asarray(segment_ids)
    planned = np.asarray(plans.first_visible).reshape(-1, spec.seq_len)
    if segment_ids.shape != planned.shape:
        raise ValueError(f"the batch holds segment ids {segment_ids.shape}, the plans are for {planned.shape}")
    padding = segment_ids == padding_id
    if (padding[:, :-1] & ~padding[:, 1:]).any():
        row = int(np.argmax((padding[:, :-1] & ~padding[:, 1:]).any(axis=1)))
        raise ValueError(f"padding (segment id {padding_id}) must come last: sequence {row} has tokens after it")
    position = np.arange(spec.seq_len, dtype=np.int32)
    new = np.ones(segment_ids.shape, bool)
    new[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = np.maximum.accumulate(np.where(new, position, 0), axis=1)
    if spec.window is not None:
        first = np.maximum(first, position - (spec.window - 1))
    first = np.where(padding, PADDING, first)
    if not np.array_equal(first, planned):
        row, token = (int(i) for i in np.argwhere(first != planned)[0])
        name = {PADDING: "padding"}
        raise ValueError(
            f"the plans are not this batch's: in sequence {row}, token {token} may see keys from "
            f"{name.get(int(first[row, token]), int(first[row, token]))} in the batch, but from "
            f"{name.get(int(planned[row, token]), int(planned[row, token]))} in the plan"
        )


def register_pytree() -> None:
    """Makes `PlanTables` a pytree once jax is there; importing jax here would make the host side pay for it."""
    global _registered
    if _registered or "jax" not in sys.modules:
        return
    import jax.tree_util  # already imported by somebody: costs nothing

    jax.tree_util.register_dataclass(PlanTables, data_fields=PlanTables.table_names(), meta_fields=["spec"])
    _registered = True


_registered = False


class _Workload(NamedTuple):
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


class _Routes(NamedTuple):
    """One kind of item (blocks or pages) on its way from its home to an executor and back.

    Per item, ordered by (lane, block): its unit number (the page of that number, for pages), its home, its executor,
    the exchange that brings it and the one that takes the result back.
    """

    unit: np.ndarray
    home: np.ndarray
    executor: np.ndarray
    arrives: np.ndarray
    returns: np.ndarray


class _Runs(NamedTuple):
    """Maximal runs of neighbouring units with one executor and one wave that share a page table.

    first, last: unit numbers. base: row of `pages` where the first page of the first unit stands; -1 while unknown.
    """

    first: np.ndarray
    last: np.ndarray
    base: np.ndarray


class _Routing(NamedTuple):
    blocks: _Routes
    pages: _Routes
    runs: _Runs
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


def assign_waves(executor: np.ndarray, work: _Workload) -> np.ndarray:
    """(P, K, nb) int: the wave that executes each unit.

    With one wave everything waits for the exchange. With more, wave 0 is what needs none, and the rest of a rank's
    units follow in (lane, block) order, cut by work into shares that double from wave to wave: wave 0 can be small,
    so the exchange that it hides has to be small too.
    """
    spec = work.spec
    if spec.waves == 1:
        return np.zeros(executor.shape, np.int32)
    local = work.local(executor)
    if spec.waves == 2:
        return np.where(local, 0, 1).astype(np.int32).reshape(executor.shape)
    rest = np.flatnonzero(~local)
    rest = rest[_stable_order(executor.reshape(-1)[rest])]
    pages = work.lanes(work.num_pages)[rest].astype(np.int64)
    rank = executor.reshape(-1)[rest]
    total = np.bincount(rank, pages, minlength=spec.ranks)
    before = np.cumsum(pages) - pages - (np.cumsum(total) - total)[rank]
    share = (before + 0.5 * pages) / total[rank]
    ends = np.cumsum(2.0 ** np.arange(spec.exchanges))
    wave = np.zeros(executor.size, np.int32)
    wave[rest] = 1 + np.searchsorted(ends[:-1] / ends[-1], share, side="right")
    return wave.reshape(executor.shape)


def _route(executor: np.ndarray, wave: np.ndarray, work: _Workload) -> _Routing:
    """What has to travel for this assignment: each block once, each page once to every rank that reads it."""
    spec = work.spec
    ex, exchange, home = executor.reshape(-1), (wave - (spec.waves > 1)).reshape(-1), work.home()
    moved = np.flatnonzero(ex != home)
    blocks = _Routes(moved, home[moved], ex[moved], exchange[moved], exchange[moved])

    # Runs of neighbours that share executor, wave and lane. A run's pages are one interval: a block visits the pages
    # from the first it may see up to its own, and the first never falls from one block to the next.
    nb = spec.blocks_per_sequence
    active = work.lanes(work.num_pages) > 0
    local = work.local(executor)
    starts = np.ones(ex.size, bool)
    starts[1:] = (ex[1:] != ex[:-1]) | (exchange[1:] != exchange[:-1]) | (local[1:] != local[:-1])
    starts[1:] |= active[1:] != active[:-1]
    starts[::nb] = True
    first = np.flatnonzero(starts)
    last = np.append(first[1:], ex.size) - 1
    keep = active[first]
    first, last = first[keep], last[keep]
    # A local run reads home pages in their own order: the head of the page table, which lists the home pages.
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
    in_rank = _rank_within(row_rank, spec.ranks)
    base[far] = spec.home_blocks + in_rank[np.searchsorted(flat, pair * nb + begin)]

    remote = home[row_unit] != row_rank
    pages = _Routes(
        row_unit[remote],
        home[row_unit[remote]],
        row_rank[remote].astype(np.int32),
        first_use.reshape(-1)[flat[remote]].astype(np.int32),
        last_use.reshape(-1)[flat[remote]].astype(np.int32),
    )
    return _Routing(blocks, pages, _Runs(first, last, base), (row_rank, spec.home_blocks + in_rank, row_unit))


def _lack_of_room(routing: _Routing, spec: PoolSpec) -> str | None:
    """Which room of the spec the plan exceeds, in words; None when it fits."""
    room, n = spec.room, spec.ranks

    def pairs(items: _Routes, exchange: np.ndarray) -> int:
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


def _statistics(
    executor: np.ndarray, routing: _Routing, work: _Workload, speed: np.ndarray, fallback: str | None
) -> PlanStats:
    spec, n = work.spec, work.spec.ranks
    pages = work.lanes(work.num_pages)
    rank_work = np.bincount(executor.reshape(-1), pages, minlength=n).astype(np.int64)
    ideal = rank_work.sum() / speed.sum()
    out_bytes = spec.block * spec.group * spec.value_dim * spec.item_bytes
    query_bytes = spec.block_bytes - out_bytes
    left = np.bincount(routing.blocks.home, minlength=n)
    came = np.bincount(routing.blocks.executor, minlength=n)
    return PlanStats(
        work=rank_work,
        imbalance=float((rank_work / speed).max() / ideal) if ideal else 1.0,
        sent_bytes=left * query_bytes
        + came * out_bytes
        + np.bincount(routing.pages.home, minlength=n) * spec.page_bytes,
        received_bytes=came * query_bytes
        + left * out_bytes
        + np.bincount(routing.pages.executor, minlength=n) * spec.page_bytes,
        ulysses_bytes=spec.home_blocks * (spec.block_bytes + spec.page_bytes) * (spec.cp - 1) // spec.cp,
        fallback=fallback,
    )


def _tables(executor: np.ndarray, wave: np.ndarray, routing: _Routing, work: _Workload) -> PlanTables:
    spec = work.spec
    n, home_blocks, room = spec.ranks, spec.home_blocks, spec.room
    home_slot = work.home_slot()
    blocks, pages = _transport(routing.blocks, spec, home_slot), _transport(routing.pages, spec, home_slot)

    # Entries: every unit once, on its executor.
    q_slot = home_slot.copy()
    q_slot[routing.blocks.unit] = home_blocks + blocks.landing
    first_page = work.lanes(work.first_page)
    page_base = np.zeros(executor.size, np.int32)
    run_length = routing.runs.last - routing.runs.first + 1
    in_run = _expand(routing.runs.first, run_length)
    run_first = np.repeat(routing.runs.first, run_length)
    page_base[in_run] = np.repeat(routing.runs.base, run_length) + first_page[in_run] - first_page[run_first]
    order = _stable_order(wave.reshape(-1), executor.reshape(-1))
    rank = executor.reshape(-1)[order]
    columns = np.stack(
        [
            q_slot[order],
            (order % spec.blocks_per_sequence).astype(np.int32),
            first_page[order],
            work.lanes(work.num_pages)[order],
            page_base[order],
        ],
        axis=1,
    )
    entries = np.zeros((n, home_blocks + room.blocks, 5), np.int32)
    entries[rank, _rank_within(rank, n)] = columns
    per_wave = np.bincount(executor.reshape(-1) * spec.waves + wave.reshape(-1), minlength=n * spec.waves)
    wave_offsets = _offsets(per_wave.reshape(n, spec.waves))

    # Page table: the home pages, then what the runs with remote pages read.
    page_slot = np.zeros((n, 2 * home_blocks + room.pages), np.int32)
    page_slot[:, :home_blocks] = np.arange(home_blocks)
    row_rank, row, row_unit = routing.page_rows
    slot = home_slot[row_unit]
    remote = work.home()[row_unit] != row_rank
    slot[remote] = home_blocks + pages.landing
    page_slot[row_rank, row] = slot

    # Sums at home: returned rows grouped by the home page they belong to.
    by_slot = _stable_order(pages.returned, home_slot[routing.pages.unit], routing.pages.home)
    by_slot_home = routing.pages.home[by_slot]
    sum_rows = np.zeros((n, room.sent_pages), np.int32)
    sum_rows[by_slot_home, _rank_within(by_slot_home, n)] = pages.returned[by_slot]
    copies = np.bincount(routing.pages.home * home_blocks + home_slot[routing.pages.unit], minlength=n * home_blocks)

    tables = PlanTables(
        spec=spec,
        entries=entries,
        wave_offsets=wave_offsets,
        pages=page_slot,
        first_visible=np.ascontiguousarray(work.first_visible.reshape(n, spec.tokens_per_rank), np.int32),
        send_blocks=_rows(blocks.send_slots, home_blocks),
        send_block_offsets=blocks.send_offsets,
        recv_block_offsets=blocks.recv_offsets,
        send_pages=_rows(pages.send_slots, room.sent_pages),
        send_page_offsets=pages.send_offsets,
        recv_page_offsets=pages.recv_offsets,
        return_pages=_rows(pages.return_rows, room.pages),
        return_page_offsets=pages.return_offsets,
        returned_page_offsets=pages.returned_offsets,
        sum_offsets=_offsets(copies.reshape(n, home_blocks)),
        sum_rows=sum_rows,
    )
    return tables.map(lambda table: table.reshape(spec.pool_size, spec.cp, *table.shape[1:]))


class _Transport(NamedTuple):
    """Positions of one kind of item on its way. `*_slots` and `*_rows` are (rank, position, value) triples."""

    landing: np.ndarray
    """Position of each item among what its executor receives."""
    returned: np.ndarray
    """Position of each item's result among what its home gets back."""
    send_slots: tuple[np.ndarray, np.ndarray, np.ndarray, int]
    return_rows: tuple[np.ndarray, np.ndarray, np.ndarray, int]
    send_offsets: np.ndarray
    recv_offsets: np.ndarray
    return_offsets: np.ndarray
    returned_offsets: np.ndarray


def _transport(items: _Routes, spec: PoolSpec, home_slot: np.ndarray) -> _Transport:
    n, x = spec.ranks, spec.exchanges

    def ordered(exchange: np.ndarray, near: np.ndarray, far: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each item's position at rank `near` in the order (exchange, far, lane, block), and the (N, X, N + 1) offsets."""
        order = _stable_order(far, exchange, near)
        position = np.empty(order.size, np.int32)
        position[order] = _rank_within(near[order], n)
        count = np.bincount((near.astype(np.int64) * x + exchange) * n + far, minlength=n * x * n).reshape(n, x * n)
        flat = _offsets(count)
        # Row x: N + 1 offsets that start where exchange x starts.
        return position, flat[:, np.arange(x)[:, None] * n + np.arange(n + 1)]

    sent, send_offsets = ordered(items.arrives, items.home, items.executor)
    landing, recv_offsets = ordered(items.arrives, items.executor, items.home)
    back, return_offsets = ordered(items.returns, items.executor, items.home)
    returned, returned_offsets = ordered(items.returns, items.home, items.executor)
    return _Transport(
        landing=landing,
        returned=returned,
        send_slots=(items.home, sent, home_slot[items.unit], n),
        return_rows=(items.executor, back, landing, n),
        send_offsets=send_offsets,
        recv_offsets=recv_offsets,
        return_offsets=return_offsets,
        returned_offsets=returned_offsets,
    )


def _rows(triples: tuple[np.ndarray, np.ndarray, np.ndarray, int], size: int) -> np.ndarray:
    """(N, size) int32 with value at [rank, position], 0 elsewhere."""
    rank, position, value, ranks = triples
    table = np.zeros((ranks, size), np.int32)
    table[rank, position] = value
    return table


def _stable_order(*keys: np.ndarray) -> np.ndarray:
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


def _rank_within(rank: np.ndarray, ranks: int) -> np.ndarray:
    """For ranks in ascending order: the position of each item among the items of its rank."""
    count = np.bincount(rank, minlength=ranks)
    return (np.arange(rank.size) - np.repeat(np.cumsum(count) - count, count)).astype(np.int32)


def _offsets(count: np.ndarray) -> np.ndarray:
    """(N, M) counts -> (N, M + 1) int32 offsets from 0."""
    out = np.zeros((count.shape[0], count.shape[1] + 1), np.int32)
    np.cumsum(count, axis=1, out=out[:, 1:])
    return out


def _expand(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """[first[0], first[0] + 1, ... (length[0] of them), first[1], ...]"""
    total = int(length.sum())
    return np.arange(total) + np.repeat(first - (np.cumsum(length) - length), length)


def _check_speed(speed: Sequence[float] | np.ndarray | None, spec: PoolSpec) -> np.ndarray:
    """(N,) float64 with mean 1."""
    if speed is None:
        return np.ones(spec.ranks)
    speeds = np.asarray(speed, np.float64)
    if speeds.shape != (spec.ranks,):
        raise ValueError(f"speed has shape {speeds.shape}; the pool has {spec.ranks} ranks")
    if not (np.isfinite(speeds).all() and (speeds > 0).all()):
        bad = int(np.argmax(~(np.isfinite(speeds) & (speeds > 0))))
        raise ValueError(f"speed[{bad}] ({speeds[bad]}) must be finite and greater than 0")
    return speeds / speeds.mean()
