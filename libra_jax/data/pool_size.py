"""The pool size of a step, among those that a run has compiled: the least modelled time decides.

A pool spreads the work of its own sequences and no other's. Where one sequence costs more than all that its pool could
share evenly, the pool's ranks stay behind those of other pools, and a larger pool helps; elsewhere it brings nothing
but a longer way for what travels. So the sizes are looked at from the smallest up, and a larger one is taken where it
saves more than a stated share of the time. A step holds the same sequences whatever the size.

Takes a sampler and a step's number; gives slots, plans and times. A pure function of (lengths, seed, step) and of what
the sampler and the choice were made with: every process that asks finds the same, and so does a run that goes on. Host
side: NumPy only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from libra_jax.data.sampler import PoolSampler
from libra_jax.links import Links
from libra_jax.modelled import check_prices, plan_seconds
from libra_jax.plan import TOLERANCE, Plan, PlanTables, check_tolerance, plan_pool, stack_plans
from libra_jax.spec import PoolSpec, spec_differences

Planner = Callable[[Sequence[Sequence[int]], PoolSpec], Plan]

LEAST_SAVING = 0.02


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """The sizes a step chooses from, and how; and how pools are planned.

    specs: shapes of a pool for each further size, beside the sampler's own; they differ from it in pool_size, and in
        what follows from that. Empty: there is nothing to choose, and nothing is modelled.
    least_saving: a larger pool is taken where it saves more than this share of the step's modelled time, that of
        attention alone.
    links: what exchanges are priced with, for plans and for the choice; None: `Links()`. Kernels are priced with the
        sampler's cost model.
    tolerance: of every plan, see `plan_pool`.

    Raises ValueError for a share that is not at least 0 and below 1, and for a tolerance that `plan_pool` refuses.
    """

    specs: tuple[PoolSpec, ...] = ()
    least_saving: float = LEAST_SAVING
    links: Links | None = None
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        check_prices(None, self.links)
        if not 0 <= self.least_saving < 1:
            raise ValueError(f"least_saving ({self.least_saving}) must be at least 0 and below 1")
        check_tolerance(self.tolerance)

    def of(self, sampler: PoolSampler) -> tuple[PoolSpec, ...]:
        """All shapes in ascending order of pool size, the sampler's own among them.

        Raises ValueError where a size cannot hold the sampler's steps, is there twice, or comes with another shape.
        """
        own = sampler.spec
        sequences = sampler.pools * own.pool_size
        for spec in self.specs:
            if sequences % spec.pool_size:
                raise ValueError(
                    f"pool_size ({spec.pool_size}) must divide the sequences of a micro-step, pools * pool_size "
                    f"({sampler.pools} * {own.pool_size} = {sequences})"
                )
            here = dataclasses.replace(spec, pool_size=own.pool_size, ranks_per_node=own.ranks_per_node)
            nodes = {spec.ranks_per_node, own.ranks_per_node} - {None}  # a pool inside a node has no relays
            if here != own or len(nodes) > 1:
                differ = spec_differences(own, here) or f"ranks_per_node {own.ranks_per_node} and {spec.ranks_per_node}"
                raise ValueError(
                    f"pools of {own.pool_size} and {spec.pool_size} sequences must have one shape otherwise, and they "
                    f"differ: {differ}"
                )
        ordered = tuple(sorted((own, *self.specs), key=lambda spec: spec.pool_size))
        named = [spec.pool_size for spec in ordered]
        if len(set(named)) < len(named):
            raise ValueError(f"pool sizes {named} must be named once each, the sampler's own among them")
        return ordered


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """A step as it will be run.

    spec: of the chosen size. slots: (micro_steps, pools, pool_size) int64 sequence numbers. plans: by micro-step, of
        the pools in `pools`, which hold the rows that were asked for.
    modelled_seconds: {pool size: seconds of one layer's attention, forward and backward, in the whole step} of the
        sizes that were planned; {} where there was no choice.
    """

    spec: PoolSpec
    slots: np.ndarray
    plans: list[list[Plan]]
    pools: np.ndarray
    modelled_seconds: dict[int, float]

    @property
    def tables(self) -> PlanTables:
        """The plans' tables, with leading axes (micro_steps, pools, dp, cp)."""
        stacked = stack_plans([plan for pools in self.plans for plan in pools])
        return stacked.map(lambda table: table.reshape(len(self.plans), len(self.pools), *table.shape[1:]))


def plan_step(
    sampler: PoolSampler,
    step: int,
    sizes: PoolSizes,
    planner: Planner | None = None,
    rows: np.ndarray | None = None,
) -> StepPlan:
    """Places a step for every pool size, plans it where a size may save enough, and chooses.

    rows: which of a micro-step's sequences this process holds, counted over pools and places in a pool; only their
        pools are planned, as long as there is no size to choose: the choice looks at all. None: all.

    What a size takes at least follows from placement alone, which is quick: perfect balance inside its pools. The
    smallest size is planned always. A larger one is planned if this least time is shorter, by more than the share, than
    that of the size chosen so far, or if a pool of that had no room for its plan and fell back. It is chosen if the
    modelled time is shorter, too. A larger pool is good for balance between pools; that it might hide its exchanges
    better is not looked for.
    """
    specs = sizes.of(sampler)
    if planner is None:
        planner = functools.partial(plan_pool, tolerance=sizes.tolerance, cost=sampler.cost, links=sizes.links)
    modelled: dict[int, float] = {}

    def planned(slots: np.ndarray, spec: PoolSpec) -> list[list[Plan]]:
        return [[planner([sampler.document_lengths(n) for n in pool], spec) for pool in pools] for pools in slots]

    def held(spec: PoolSpec) -> np.ndarray:
        every = np.arange(sampler.pools * sampler.spec.pool_size) if rows is None else rows
        return np.unique(every // spec.pool_size)

    def less(larger: float, smaller: float) -> bool:
        return larger < smaller * (1 - sizes.least_saving)

    def modelled_time(plans: list[list[Plan]]) -> float:
        return step_seconds([[plan_seconds(plan, sampler.cost, sizes.links).total for plan in p] for p in plans])

    chosen = specs[0]
    slots = sampler.slots(step, chosen.pool_size)
    if len(specs) == 1:
        return StepPlan(chosen, slots, planned(slots[:, held(chosen)], chosen), held(chosen), modelled)
    plans = planned(slots, chosen)
    modelled[chosen.pool_size] = modelled_time(plans)
    for spec in specs[1:]:
        others = sampler.slots(step, spec.pool_size)
        fell_back = any(plan.stats.fallback is not None for pools in plans for plan in pools)
        if not (fell_back or less(_least_seconds(sampler, others, spec), _least_seconds(sampler, slots, chosen))):
            continue
        candidates = planned(others, spec)
        modelled[spec.pool_size] = modelled_time(candidates)
        if less(modelled[spec.pool_size], modelled[chosen.pool_size]):
            chosen, slots, plans = spec, others, candidates
    pools = held(chosen)
    return StepPlan(chosen, slots, [[by_pool[i] for i in pools] for by_pool in plans], pools, modelled)


def _least_seconds(sampler: PoolSampler, slots: np.ndarray, spec: PoolSpec) -> float:
    """What a step takes at least: each pool's work spread evenly over its ranks, and the launches of every rank."""
    launches = sampler.cost.forward(0, 0, spec.waves) + sampler.cost.backward(0, 0, spec.waves)
    return step_seconds(sampler.work(slots).sum(axis=2) / spec.ranks + launches)


def step_seconds(pools: Sequence[Sequence[float]] | np.ndarray) -> float:
    """Seconds of a step from those of its pools, (micro_steps, pools): the pools of a micro-step wait for one another,
    so that the slowest decides, and micro-steps follow one another."""
    return float(sum(float(max(side_by_side)) for side_by_side in pools))
