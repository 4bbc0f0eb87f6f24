"""What a training step takes when attention takes what `plan_seconds` says, and how near that is to the ideal.

Qwen3-8B, data parallel 16 (that many sequences side by side, `cp` ranks each), kernels and matrix products at 635
TFLOP/s. Sequences of like cost share a micro-step (`place(across="pools")`). In a micro-step the weights of a layer are
gathered over all ranks, which keeps pools in step layer by layer: a layer's attention takes as long as in the slowest
pool, forward and backward each. The rest of a layer takes as long on every rank. Gathers, scatters, the optimizer and
the pipeline of inputs are left out. Host side only; used by benchmarks/planner.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.pools import PlanPool
from libra_jax.links import Links
from libra_jax.modelled import PlanSeconds, plan_seconds
from libra_jax.models.qwen3 import QWEN3_8B, Qwen3Config
from libra_jax.placement import place
from libra_jax.simulate.constants import constants
from libra_jax.simulate.step import head_seconds, token_seconds
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, sequence_seconds

TABLE = constants("H100")
FLOPS = TABLE["products"].value
SIDE_BY_SIDE = 16
"""Sequences of a micro-step."""
Batch = Sequence[Sequence[int]]
"""The sequences of one optimizer step, each a list of document lengths."""


def kernels(flops: float = FLOPS) -> CostModel:
    """The default cost model with pages at `flops` a second in both passes; blocks cost as many pages as they did."""
    usual = CostModel()
    work = 2 * usual.block**2 * usual.group
    page = work * (usual.head_dim + usual.v_head_dim) / flops
    backward = work * (3 * usual.head_dim + 2 * usual.v_head_dim) / flops
    return dataclasses.replace(
        usual,
        page_seconds=page,
        block_seconds=page * usual.block_seconds / usual.page_seconds,
        backward_page_seconds=backward,
        backward_block_seconds=backward * usual.backward_block_seconds / usual.backward_page_seconds,
    )


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step. All but the last four are one layer's attention, forward and backward, added up
    over micro-steps.

    attention: all of it. ideal: its work spread evenly over all ranks, with no launches.
    between_pools: what a micro-step's heaviest pool has beyond the mean, if its ranks shared that evenly.
    inside_pools: what the busiest ranks' kernels take beyond that, launches included.
    exposed: the rest, exchanges and waiting.
    step, ideal_step: the whole model.
    """

    attention: float
    ideal: float
    between_pools: float
    inside_pools: float
    exposed: float
    step: float
    ideal_step: float

    @property
    def attention_efficiency(self) -> float:
        return self.ideal / self.attention

    @property
    def efficiency(self) -> float:
        return self.ideal_step / self.step


def step_seconds(pools: Sequence[Sequence[PlanSeconds]], spec: PoolSpec, model: Qwen3Config = QWEN3_8B) -> StepSeconds:
    """pools: (micro_steps, pools) of one step, all of one spec."""

    def slowest(*names: str) -> float:
        """The largest of the pools that run side by side, each pass by itself."""
        return sum(max(getattr(pool, name) for pool in micro_step) for micro_step in pools for name in names)

    attention = slowest("forward", "backward")
    kernel = slowest("forward_kernel", "backward_kernel")
    fair = slowest("ideal_forward", "ideal_backward")
    ideal = sum(float(np.mean([pool.ideal for pool in micro_step])) for micro_step in pools)
    products = model.num_layers * sum(token_seconds(model, TABLE)) + head_seconds(model, TABLE)
    rest = len(pools) * spec.tokens_per_rank * products
    return StepSeconds(
        attention=attention,
        ideal=ideal,
        between_pools=fair - ideal,
        inside_pools=kernel - fair,
        exposed=attention - kernel,
        step=model.num_layers * attention + rest,
        ideal_step=model.num_layers * ideal + rest,
    )


def slots_of(batch: Batch, spec: PoolSpec, cost: CostModel | None = None) -> np.ndarray:
    """(micro_steps, pools, pool_size) sequences of a step, those of like cost in one micro-step."""
    seconds = [sequence_seconds(sequence, spec, cost) for sequence in batch]
    return place(seconds, spec.pool_size, SIDE_BY_SIDE // spec.pool_size, across="pools")


def all_alike(batch: Batch, spec: PoolSpec, cost: CostModel | None = None) -> np.ndarray:
    """The same with all pools of the step equal, as a pipeline wants them."""
    seconds = [sequence_seconds(sequence, spec, cost) for sequence in batch]
    return place(seconds, spec.pool_size, SIDE_BY_SIDE // spec.pool_size, across="all")


def as_drawn(batch: Batch, spec: PoolSpec, cost: CostModel | None = None) -> np.ndarray:
    """The same with sequences in the order they came in."""
    return np.arange(len(batch)).reshape(-1, SIDE_BY_SIDE // spec.pool_size, spec.pool_size)


def planned_step(
    batch: Batch,
    spec: PoolSpec,
    plan_pool: PlanPool,
    cost: CostModel | None = None,
    links: Links | None = None,
    slots: Callable[[Batch, PoolSpec, CostModel | None], np.ndarray] = slots_of,
) -> StepSeconds:
    """Places and plans a step, and says what it takes."""
    return step_seconds(
        [
            [plan_seconds(plan_pool([batch[i] for i in pool], spec), cost, links) for pool in micro_step]
            for micro_step in slots(batch, spec, cost)
        ],
        spec,
    )


def mean_of(steps: Sequence[StepSeconds]) -> StepSeconds:
    """The steps of a run as one, field by field: its efficiencies are those of the run, not means of the steps'."""
    names = [field.name for field in dataclasses.fields(StepSeconds)]
    return StepSeconds(**{name: float(np.mean([getattr(step, name) for step in steps])) for name in names})


def best_of(candidates: Sequence[Sequence[StepSeconds]]) -> list[StepSeconds]:
    """For each step the candidate (a pool size) with the least modelled time; the first of equal ones."""
    return [min(options, key=lambda step: step.step) for options in zip(*candidates, strict=True)]
