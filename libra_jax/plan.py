"""A pool's plan: from document lengths to the tables and what they cost.

`plan_pool` is the host's whole path for one pool: lengths -> pages per block (`workload`) -> a policy says which rank
executes each block (`planner`) -> what travels, wave by wave (`routing`) -> tables (`tables`) and statistics. It runs
in the input pipeline; `stack_plans` joins the pools of a step, and `plans_from_segment_ids` does it all for a batch of
another loader's. NumPy only. Letters as in `spec`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from libra_jax import planner
from libra_jax.links import Links
from libra_jax.modelled import check_prices, check_speed, counted_seconds, routed_counts
from libra_jax.planner import Policy
from libra_jax.routing import (
    Copies,
    PoolWork,
    Routing,
    assign_waves,
    check_executor,
    choose_relays,
    lack_of_room,
    rank_work,
    route,
    runs_of,
)
from libra_jax.spec import Capacity, PoolSpec, spec_differences
from libra_jax.table_checks import check_tables
from libra_jax.tables import PlanTables, build_tables
from libra_jax.workload import (
    PADDING,
    CostModel,
    block_pages,
    check_lengths,
    document_starts,
    lengths_from_segment_ids,
    sequence_name,
)


@dataclasses.dataclass(frozen=True, eq=False)
class PlanStats:
    """What a plan costs. Bytes are a forward pass's, dispatch and return together, in `spec.dtype`.

    work: (N,) pages visited by each rank. blocks: (N,) blocks it executes that are not all padding.
    imbalance: the slowest rank's time over the time with perfect balance; max/mean of `work` when speeds are equal.
        1.0 is perfect.
    sent_bytes, received_bytes: (N,). Four bytes a token for first-visible positions are not counted.
    ulysses_bytes: what one rank sends when every sequence's heads are dealt to its CP group.
    fallback: why the head-parallel plan was used instead of the policy's, or None.
    """

    work: np.ndarray
    blocks: np.ndarray
    imbalance: float
    sent_bytes: np.ndarray
    received_bytes: np.ndarray
    ulysses_bytes: int
    fallback: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One pool's plan: who executes what (executor, wave: (P, K, nb)), the tables, and what it costs."""

    spec: PoolSpec
    executor: np.ndarray
    wave: np.ndarray
    tables: PlanTables
    stats: PlanStats


TOLERANCE = 0.003
"""How much more than its share a rank may have to do, by itself."""


def check_tolerance(tolerance: float) -> None:
    """Raises ValueError for what is no tolerance of `plan_pool`."""
    if not (_is_number(tolerance) and 0 <= tolerance < 1e6):
        raise ValueError(f"tolerance ({tolerance!r}) must be a number from 0 to 1e6")


def plan_pool(
    lengths: Sequence[Sequence[int]],
    spec: PoolSpec,
    speed: Sequence[float] | np.ndarray | None = None,
    *,
    policy: Policy | None = None,
    tolerance: float = TOLERANCE,
    tries: int = 1,
    cost: CostModel | None = None,
    links: Links | None = None,
) -> Plan:
    """Plans one pool: `lengths` holds, for each of its sequences, the lengths of the documents in it, in order.

    speed: relative speeds of the pool's ranks, (N,), rank p * cp + c; None: all equal.
    policy: decides which rank executes which block; None: `planner.pooled`, the only one that the rest is for.
    tolerance: ranks may do so much more than their shares, because the last percent of balance costs more exchange
        than waiting for it costs time (benchmarks/planner.py draws what each percent costs).
    tries: plans to make, with shares raised by the tolerance, not at all, and by other parts and multiples of it, up to
        `MOST_TRIES`. Of these, and of the head-parallel plan where that is as even, the one with the least modelled
        time is taken. More tries find 1 to 3% less and take so many times longer.
    cost, links: what time is modelled with (`modelled.plan_seconds`); None is `CostModel()` and `Links()`.

    Deterministic. A plan that needs more room than `spec.capacity` gives is replaced by the head-parallel one and
    says so in `stats.fallback`. Raises ValueError for lengths that are not positive whole numbers or do not fit in
    seq_len, for the wrong number of sequences, and for speeds that are not positive.
    """
    if not isinstance(spec, PoolSpec) or not (policy is None or callable(policy)) or not hasattr(lengths, "__len__"):
        raise TypeError(
            "plan_pool takes a list of lists of lengths, a PoolSpec and a policy function, got "
            f"{type(lengths).__name__}, {type(spec).__name__} and {policy!r}"
        )
    check_tolerance(tolerance)
    if not (isinstance(tries, numbers.Integral) and not isinstance(tries, bool) and 1 <= tries <= MOST_TRIES):
        raise ValueError(f"tries ({tries!r}) must be a whole number from 1 to {MOST_TRIES}")
    check_prices(cost, links)
    if len(lengths) != spec.pool_size:
        raise ValueError(f"lengths of {len(lengths)} sequences were given for a pool of {spec.pool_size}")
    checked = [check_lengths(sequence, spec.seq_len, sequence=p) for p, sequence in enumerate(lengths)]
    speeds = _relative_speed(speed, spec)
    first_page, num_pages = _pool_pages(checked, spec)
    first_visible = np.empty((spec.pool_size, spec.seq_len), np.int32)
    for sequence, row in zip(checked, first_visible, strict=True):
        document_starts(sequence, spec.seq_len, spec.window, out=row)

    work = PoolWork(spec, first_page, num_pages, first_visible)
    if policy is not None:
        routed = _routed(policy(first_page, num_pages, spec, speeds), work)
    else:
        routed = _least_time(work, speeds, tolerance, tries, cost, links)
    fallback = lack_of_room(routed.routes, spec)
    if fallback is not None:
        routed = _routed(planner.head_parallel(first_page, num_pages, spec, speeds), work, relayed=False)
        assert lack_of_room(routed.routes, spec) is None, "the head-parallel plan must fit every valid spec"
        if policy is None and spec.ranks_per_node is not None:
            # What was meant for relays has no room without them. Planned without them from the start it may have.
            executor = planner.pooled(first_page, num_pages, _one_level(spec), speeds, links=links)
            direct = _routed(executor, work, relayed=False)
            if _modelled(direct, work, speeds, cost, links) < _modelled(routed, work, speeds, cost, links):
                routed, fallback = direct, None
    stats = _statistics(routed.routes, work, speeds, fallback)
    tables = build_tables(routed.executor, routed.wave, routed.routes, work)
    return Plan(spec, routed.executor, routed.wave, tables, stats)


class _Routed(NamedTuple):
    executor: np.ndarray
    wave: np.ndarray
    routes: Routing


def _routed(executor: np.ndarray, work: PoolWork, relayed: bool = True) -> _Routed:
    """An assignment with its waves and all that has to travel; without relays where there is no room for them."""
    executor = check_executor(executor, work.num_pages, work.spec)
    relays = choose_relays(runs_of(executor, work), work) if relayed else None
    wave = assign_waves(executor, work, relays)
    routes = route(executor, wave, work, relays)
    if relays is not None and lack_of_room(routes, work.spec) is not None:
        direct = _routed(executor, work, relayed=False)
        if lack_of_room(direct.routes, work.spec) is None:
            return direct
    return _Routed(executor, wave, routes)


_RAISED = (1.0, 0.0, 0.5, 2.0, 0.25, 1.5, 0.75)
MOST_TRIES = len(_RAISED)


def _least_time(
    work: PoolWork, speeds: np.ndarray, tolerance: float, tries: int, cost: CostModel | None, links: Links | None
) -> _Routed:
    """The plan with the least modelled time of those that `plan_pool` tries."""
    pages = work.first_page, work.num_pages, work.spec, speeds
    amounts = list(dict.fromkeys(part * tolerance for part in _RAISED[:tries]))
    plans = [_routed(planner.pooled(*pages, raised=by, links=links), work) for by in amounts]
    # The head-parallel plan moves nothing out of a CP group. It is as even as its sequences are alike, or less.
    pooled, each = _slowest(plans[0].executor, work, speeds), work.num_pages.sum(axis=1)
    if each.max() * work.spec.pool_size * work.spec.num_kv_heads / speeds.sum() <= pooled:
        dealt = planner.head_parallel(*pages)
        if _slowest(dealt, work, speeds) <= pooled:
            plans.append(_routed(dealt, work, relayed=False))
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: _modelled(plan, work, speeds, cost, links))


def _modelled(
    routed: _Routed, work: PoolWork, speeds: np.ndarray, cost: CostModel | None, links: Links | None
) -> float:
    """Modelled seconds of a plan, forward and backward; infinite where the spec has no room for it."""
    if lack_of_room(routed.routes, work.spec) is not None:
        return math.inf
    return counted_seconds(routed_counts(routed.routes, work), work.spec, cost, links, speeds).total


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _slowest(executor: np.ndarray, work: PoolWork, speeds: np.ndarray) -> float:
    """Pages that the slowest rank visits, by its speed."""
    each = np.broadcast_to(work.num_pages[:, None], executor.shape)
    return float((np.bincount(executor.reshape(-1), each.reshape(-1), speeds.size) / speeds).max())


def _one_level(spec: PoolSpec) -> PoolSpec:
    """The same pool without relays, with no more room than it has."""
    names = ("blocks", "pages", "sent_pages", "pair_blocks", "pair_pages")
    room = Capacity(*(getattr(spec.room, name) / spec.home_blocks for name in names))
    return dataclasses.replace(spec, ranks_per_node=None, capacity=room)


def policy_work(lengths: Sequence[Sequence[int]], spec: PoolSpec, policy: Policy) -> np.ndarray:
    """(N, 2) int64: pages that each rank visits and blocks that it executes under a policy, without making a plan.

    lengths: as for `plan_pool`. For comparing policies: nothing is checked against the room of the spec.
    """
    first_page, num_pages = _pool_pages(lengths, spec)
    work = PoolWork(spec, first_page, num_pages, np.zeros(0, np.int32))
    executor = policy(first_page, num_pages, spec, np.ones(spec.ranks))
    executor = check_executor(executor, num_pages, spec)
    return rank_work(runs_of(executor, work), work)


def stack_plans(plans: Sequence[Plan]) -> PlanTables:
    """Tables of several pools with leading axes (pools, dp, cp), ready to shard with the batch.

    Raises ValueError when the plans are of different specs, or a table holds what points outside of a rank's buffers.
    """
    if not isinstance(plans, Sequence) or not all(isinstance(plan, Plan) for plan in plans):
        got = type(plans).__name__ if not isinstance(plans, Sequence) else [type(plan).__name__ for plan in plans]
        raise TypeError(f"stack_plans takes a list of what plan_pool returns, one plan per pool, got {got}")
    if not plans:
        raise ValueError("stack_plans needs at least one plan, got 0")
    for i, plan in enumerate(plans):
        if plan.spec != plans[0].spec:
            differ = spec_differences(plans[0].spec, plan.spec)
            raise ValueError(f"plans of one step share a spec; from plan 0 to plan {i} it changes: {differ}")
    stacked = {name: np.stack([getattr(plan.tables, name) for plan in plans]) for name in PlanTables.table_names()}
    for table in stacked.values():
        table.flags.writeable = False  # what is compiled under `use_plan` may hold them as constants
    tables = PlanTables(spec=plans[0].spec, **stacked)
    check_tables(tables)
    return tables


def plans_from_segment_ids(
    segment_ids: npt.ArrayLike,
    spec: PoolSpec,
    padding_id: int = 0,
    speed: npt.ArrayLike | None = None,
    **options: Any,
) -> PlanTables:
    """Plans for a batch that a loader of your own has packed: what `stack_plans` gives, ready to shard with the batch.

    segment_ids: (sequences, seq_len) whole numbers, which change where a document ends; P neighbouring sequences share
        a pool. With micro-steps, (micro_steps, sequences, seq_len): every table gets a leading micro_steps axis.
    padding_id: 0 as MaxText pads, -1 as Levanter does; see `lengths_from_segment_ids`, and for what else ids may be.
    speed: relative speeds of a pool's ranks, (N,), or of the ranks of every pool, (pools, N); None: all equal.
    options: `plan_pool`'s, all by name: policy, tolerance, tries, cost, links.

    Sequences stay in the order they have. Pools wait for each other, so put sequences together whose pools then cost
    the same, and train on the batch in that order, tokens and all:

        lengths = lengths_from_segment_ids(segment_ids)
        order = place([sequence_seconds(documents, spec) for documents in lengths], spec.pool_size).reshape(-1)
        plans = plans_from_segment_ids(segment_ids[order], spec)

    Raises ValueError with the rule and both numbers where ids have another seq_len than the spec, where pools do not
    come out even, and as `lengths_from_segment_ids` and `plan_pool` do.
    """
    if not isinstance(spec, PoolSpec):
        raise TypeError(f"plans_from_segment_ids takes segment ids and a PoolSpec, got {type(spec).__name__}")
    shape = np.shape(segment_ids)
    if shape[-1:] != (spec.seq_len,):
        raise ValueError(f"segment ids are of shape {shape}: the last axis must be seq_len ({spec.seq_len}) tokens")
    lengths = lengths_from_segment_ids(segment_ids, padding_id)
    size, sequences = spec.pool_size, shape[-2]
    if not lengths or sequences % size:
        each = " in each micro-step" if len(shape) == 3 else ""
        raise ValueError(
            f"segment ids {shape} hold {sequences} sequences{each}: that must be a multiple of pool_size ({size}), "
            "and not 0, as neighbours share a pool"
        )
    pools = sequences // size
    speeds = [speed] * pools
    if speed is not None and np.ndim(speed) == 2:
        speeds = list(np.asarray(speed))
        if len(speeds) != pools:
            raise ValueError(f"speed has {len(speeds)} rows for {pools} pools: it must have one for each")
    plans = [
        plan_pool(lengths[i * size : (i + 1) * size], spec, speeds[i % pools], **options)
        for i in range(len(lengths) // size)
    ]
    tables = stack_plans(plans)
    return tables if len(shape) == 2 else tables.map(lambda table: table.reshape(-1, pools, *table.shape[1:]))


def check_batch(plans: PlanTables, segment_ids: npt.ArrayLike, padding_id: int = 0) -> None:
    """Refuses, on the host, plans that were made for other documents than the batch holds.

    plans: from `stack_plans` or `plans_from_segment_ids`, with or without a leading micro_steps axis.
    segment_ids, padding_id: as for `lengths_from_segment_ids`; sequences of all micro-steps may also lie in one axis.

    Raises ValueError naming the first sequence and token that disagree.
    """
    if not isinstance(plans, PlanTables):
        raise TypeError(f"check_batch takes what stack_plans returns, got {type(plans).__name__}")
    spec = plans.spec
    if not getattr(plans.first_visible, "is_fully_addressable", True):
        raise ValueError("check_batch needs plans as stack_plans returns them, these are spread over several processes")
    shape = np.shape(segment_ids)
    first_visible = np.asarray(plans.first_visible)
    planned = first_visible.reshape(-1, spec.seq_len)
    sequences = *first_visible.shape[:-4], math.prod(first_visible.shape[-4:-2]), spec.seq_len
    if shape not in (sequences, planned.shape):
        raise ValueError(f"the batch holds segment ids {shape}, the plans are for {sequences}")
    lengths = lengths_from_segment_ids(segment_ids, padding_id)
    first = np.stack([document_starts(documents, spec.seq_len, spec.window) for documents in lengths])
    if not np.array_equal(first, planned):
        row, token = (int(i) for i in np.argwhere(first != planned)[0])
        name = {PADDING: "padding"}
        raise ValueError(
            f"the plans are not this batch's: in {sequence_name(row, shape)}, token {token} may see keys from "
            f"{name.get(int(first[row, token]), int(first[row, token]))} in the batch, but from "
            f"{name.get(int(planned[row, token]), int(planned[row, token]))} in the plan"
        )


def _pool_pages(lengths: Sequence[Sequence[int] | np.ndarray], spec: PoolSpec) -> tuple[np.ndarray, np.ndarray]:
    """First page and number of pages of each block of a pool's sequences, both (P, nb)."""
    per_block = [block_pages(sequence, spec) for sequence in lengths]
    first_page, num_pages = np.stack([b.first_page for b in per_block]), np.stack([b.num_pages for b in per_block])
    first_page.flags.writeable = num_pages.flags.writeable = False  # policies read them, and so do the tables
    return first_page, num_pages


def _statistics(routing: Routing, work: PoolWork, speed: np.ndarray, fallback: str | None) -> PlanStats:
    spec, n = work.spec, work.spec.ranks
    visited, executed = rank_work(routing.runs, work).T
    ideal = visited.sum() / speed.sum()
    out_bytes = spec.block * spec.group * spec.value_dim * spec.item_bytes
    query_bytes = spec.block_bytes - out_bytes

    def count(rank: np.ndarray, copies: Copies) -> np.ndarray:
        return np.bincount(rank, copies.length, n).astype(np.int64)

    blocks, pages, passed = routing.blocks, routing.pages, routing.passed
    left, came = count(blocks.source, blocks), count(blocks.target, blocks)
    sent = count(pages.source, pages) + count(passed.source, passed)
    received = count(pages.target, pages) + count(passed.target, passed)
    return PlanStats(
        work=visited,
        blocks=executed,
        imbalance=float((visited / speed).max() / ideal) if ideal else 1.0,
        sent_bytes=left * query_bytes + came * out_bytes + sent * spec.page_bytes,
        received_bytes=came * query_bytes + left * out_bytes + received * spec.page_bytes,
        ulysses_bytes=spec.home_blocks * (spec.block_bytes + spec.page_bytes) * (spec.cp - 1) // spec.cp,
        fallback=fallback,
    )


def _relative_speed(speed: Sequence[float] | np.ndarray | None, spec: PoolSpec) -> np.ndarray:
    """(N,) float64 with mean 1."""
    speeds = check_speed(speed, spec)
    speeds = speeds / speeds.max()
    if speeds.min() < _LEAST_SPEED:
        raise ValueError(
            f"the slowest rank's speed is {speeds.min():g} of the fastest's; at least {_LEAST_SPEED} is taken"
        )
    return speeds / speeds.mean()


_LEAST_SPEED = 1e-12
