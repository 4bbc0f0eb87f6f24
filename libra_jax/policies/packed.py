"""Policies that keep the loader's sequences: where these go, and how a pool shares their attention.

Host side: NumPy only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from libra_jax.assignments import Policy as Assignment
from libra_jax.assignments import at_home, head_parallel
from libra_jax.links import Links
from libra_jax.placement import place
from libra_jax.plan import TOLERANCE
from libra_jax.planner import pooled
from libra_jax.policies import sharding
from libra_jax.policies.base import Exchange, Group, RunShape, Sequences, StepPlan, check_step
from libra_jax.policies.distca import distca
from libra_jax.policies.paper import paper_placer
from libra_jax.policies.travel import travel
from libra_jax.spec import PoolSpec
from libra_jax.workload import block_pages, sequence_seconds

Order = Literal["all", "pools"] | None
"""How sequences come to micro-steps and pools: as `place` says, or None: as they were packed."""


def planned_group(sequences: Sequences, spec: PoolSpec, assignment: Assignment) -> Group:
    """A pool whose blocks an assignment deals to ranks, whether or not the spec has room for that plan."""
    start = time.process_time()
    first_page, num_pages = pages_of(sequences, spec)
    executor = assignment(first_page, num_pages, spec, np.ones(spec.ranks))
    seconds = time.process_time() - start
    return Group(
        tuple(tuple(sequence) for sequence in sequences),
        spec,
        "plan",
        spec.tokens_per_rank,
        executor=executor,
        planning_seconds=seconds,
    )


def pages_of(sequences: Sequences, spec: PoolSpec) -> tuple[np.ndarray, np.ndarray]:
    """(P, nb) first page and number of pages of every block."""
    pages = [block_pages(sequence, spec) for sequence in sequences]
    return np.stack([each.first_page for each in pages]), np.stack([each.num_pages for each in pages])


@dataclasses.dataclass(frozen=True)
class Pools:
    """Pools of sequences whose attention an assignment shares among a pool's ranks.

    assignment: which rank executes which block. pool_size: sequences of a pool; None: all that are side by side.
    order: how sequences come to pools. waves, relays, room: of `PoolSpec` and `RunShape.spec`; with room None plans
    that do not fit are replaced by the head-parallel one. exchange: "plan" or "ping_pong", of `base.Exchange`.
    told_links: the assignment takes `links=`, and is told the run's.
    """

    assignment: Callable[..., np.ndarray]
    pool_size: int | None = 1
    order: Order = None
    waves: int = 4
    relays: bool = False
    room: float | None = None
    exchange: Exchange = "plan"
    told_links: bool = False

    def step(self, sequences: Sequences, run: RunShape) -> StepPlan:
        """Raises ValueError where pools of `pool_size` do not divide the sequences side by side."""
        check_step(sequences, run)
        size = self.pool_size or run.dp
        if run.dp % size:
            raise ValueError(f"pool_size ({size}) must divide dp ({run.dp})")
        spec = run.spec(size, waves=self.waves, relays=self.relays, room=self.room)
        start = time.process_time()
        dealt = slots(sequences, spec, run, self.order)
        placing = (time.process_time() - start) / (dealt.shape[0] * dealt.shape[1])
        return StepPlan([
            [self._group([sequences[i] for i in pool], spec, run.links, placing) for pool in micro_step]
            for micro_step in dealt
        ])  # fmt: skip

    def _group(self, sequences: Sequences, spec: PoolSpec, links: Links, placing_seconds: float) -> Group:
        assignment = functools.partial(self.assignment, links=links) if self.told_links else self.assignment
        group = planned_group(sequences, spec, assignment)
        seconds = group.planning_seconds + placing_seconds
        group = dataclasses.replace(group, exchange=self.exchange, planning_seconds=seconds)
        if self.room is None and group.executor is not None:
            found = travel(group.executor, *pages_of(sequences, spec), spec)
            if found.lack is not None:
                fallback = planned_group(sequences, spec, head_parallel)
                return dataclasses.replace(fallback, planning_seconds=group.planning_seconds)
            return dataclasses.replace(group, counts=found.counts)
        return group


def slots(sequences: Sequences, spec: PoolSpec, run: RunShape, order: Order) -> np.ndarray:
    """(micro_steps, pools, pool_size) numbers of sequences."""
    pools = run.dp // spec.pool_size
    if order is None:
        return np.arange(len(sequences)).reshape(run.micro_steps, pools, spec.pool_size)
    work = [sequence_seconds(sequence, spec, run.cost) for sequence in sequences]
    return place(work, spec.pool_size, pools, order)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Context parallelism alone: each sequence's tokens dealt to its own ranks, keys and values brought to them.

    by: "sequence" or "document", see `sharding`. exchange: of keys and values.
    """

    by: Literal["sequence", "document"]
    exchange: Exchange = "all_gather"
    order: Order = None

    def step(self, sequences: Sequences, run: RunShape) -> StepPlan:
        check_step(sequences, run)
        spec = run.spec(1)
        return StepPlan([
            [self._group(sequences[int(pool[0])], spec) for pool in micro_step]
            for micro_step in slots(sequences, spec, run, self.order)
        ])  # fmt: skip

    def _group(self, sequence: Sequence[int], spec: PoolSpec) -> Group:
        if self.by == "sequence":
            parts = sharding.by_sequence(sequence, spec.cp, spec.seq_len)
        else:
            parts = sharding.by_document(sequence, spec.cp)
        tokens = max(spec.tokens_per_rank, int(sharding.held(parts, spec.cp).max()))  # rank 0 has what has few tokens
        return Group((tuple(sequence),), spec, self.exchange, tokens, parts=parts)


def ulysses(order: Order = None) -> Pools:
    """Heads dealt to the ranks of each sequence (DeepSpeed Ulysses, arXiv 2309.14509). One all-to-all before attention
    and one after: nothing runs beside them. Known limit: with more ranks than kv heads a head's blocks are shared by
    several ranks, which then send its pages more than once. Room for this plan and no other."""
    return Pools(head_parallel, order=order, waves=1, room=0.0)


def plain_context_parallel() -> Pools:
    """Every rank computes the consecutive tokens that it holds, and fetches the keys and values that they see."""
    return Pools(at_home, room=ROOMY)


def disaggregated(tolerance: float = 0.1, server_ranks: int | None = None, pool_size: int | None = None) -> Pools:
    """DistCA (arXiv 2510.18121): all sequences side by side are one pool, and a second micro-batch computes while the
    first one's blocks and pages travel. See `distca` for what was read into it.

    server_ranks: see there; None: 8, a node's, or as many below 8 as go into the pool and a sequence's ranks evenly.
    """

    def servers(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
        size = server_ranks or math.gcd(8, spec.ranks)
        if server_ranks is None and size % spec.cp and spec.cp % size:
            size = math.gcd(size, spec.cp)
        return distca(tolerance, size)(first_page, num_pages, spec, speed)

    return Pools(servers, pool_size, waves=1, room=ROOMY, exchange="ping_pong")


def libra_of_the_paper(pool_size: int = 8, cap: float = 1.02) -> Pools:
    """VRSP over the whole step and the paper's tile placer, one level of exchange. See `paper`."""
    return Pools(paper_placer(cap), pool_size=pool_size, order="all", room=ROOMY)


def libra(
    pool_size: int = 8, *, order: Order = "pools", tolerance: float = TOLERANCE, waves: int = 6, relays: bool = True
) -> Pools:
    """Libra as it is built here: what `plan_pool` tries first, with the room that a spec has."""
    assignment = functools.partial(pooled, raised=tolerance)
    return Pools(assignment, pool_size=pool_size, order=order, waves=waves, relays=relays, told_links=True)


ROOMY = 1000.0
"""Room for every plan: what other systems set aside is not known."""
