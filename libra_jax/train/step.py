"""One optimizer step, compiled once for a whole run, or once for each pool size that its steps may take.

Takes the state, a batch of micro-steps and their plans; gives the next state and a few numbers. Gradients of the
micro-steps are added up by a scan, and divided once by the number of targets in the whole step, so that neither the
number of micro-steps nor how documents were packed changes loss or gradients beyond rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.models.axes import token_spec
from libra_jax.models.qwen3 import Qwen3
from libra_jax.tables import PlanTables, table_shapes
from libra_jax.train import pipeline
from libra_jax.train.config import TrainConfig
from libra_jax.train.mesh import batch_shardings, regrouped, state_shardings
from libra_jax.train.optimizer import all_finite, learning_rate, make_optimizer, nothing_skipped, update_state
from libra_jax.train.xla import compiler_options

State = dict[str, Any]
"""{"params": nested dict of float32 arrays, "optimizer": optax state, "step": int32, steps done, those whose update was
left out included, "skipped": {"total", "in_a_row"} int32, how many these are}."""
ARRAYS = "tokens", "targets", "positions"
"""What the step takes of a batch, beside its plans."""
LossSum = Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A run's state before it is made. graph: the model for `nnx.merge`; shapes: of the state, with shardings;
    init(): makes it, sharded, from the config's seed alone."""

    graph: Any
    shapes: State
    init: Callable[[], State]


def begin_state(optimizer: optax.GradientTransformation, params: Any) -> State:
    """The state of a run that has done no step yet."""
    state = {"params": params, "optimizer": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
    return state | {"skipped": nothing_skipped()}


def plan_state(config: TrainConfig, mesh: Mesh) -> Blueprint:
    """What the state of a run looks like and how to make it; nothing is allocated yet."""
    spec = config.spec
    optimizer = make_optimizer(config.optimizer, config.steps)

    def build() -> Qwen3:
        return Qwen3(config.model, spec, mesh, rngs=nnx.Rngs(config.seed))

    def init() -> State:
        params = nnx.to_pure_dict(nnx.state(build(), nnx.Param))
        return begin_state(optimizer, params)

    graph, _ = nnx.split(nnx.eval_shape(build))
    shapes = jax.eval_shape(init)
    shardings = state_shardings(mesh, shapes, config.model)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    return Blueprint(graph, shapes, jax.jit(init, out_shardings=shardings))


def state_from(config: TrainConfig, shapes: State, params: Any) -> State:
    """The state of a run that has these weights and no step done; it takes the arrays of `params` over.

    shapes: of the state, with shardings (`plan_state`). params: lying as they say.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)

    def begin(params: Any) -> State:
        return begin_state(optimizer, params)

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(begin, donate_argnums=0, out_shardings=shardings)(params)


def mean_loss_and_gradients(
    loss_sum: LossSum, params: Any, micro_batches: Any
) -> tuple[dict[str, jax.Array], Any, dict[str, jax.Array]]:
    """Token-weighted means over all micro-steps, the gradient of what is minimised, and what each micro-step gave.

    loss_sum(params, micro_batch) -> (sum of what is minimised float32, sums: {"loss": float32, "targets": int32, ...}).
    micro_batches: arrays with a leading micro-step axis. Returns {name: sum / targets}, but "targets" as it is. Means
    and gradients are 0 where there is no target at all. Last come (micro_steps,) arrays: "loss" and "targets", sums of
    the micro-step, and "finite", whether all of its gradients and what it minimises are.
    """

    def add(total: Any, micro_batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        (value, sums), gradients = jax.value_and_grad(loss_sum, has_aux=True)(params, micro_batch)
        alone = {name: sums[name] for name in ("loss", "targets")} | {"finite": all_finite((value, gradients))}
        return jax.tree.map(jnp.add, total, (sums, gradients)), alone

    first = jax.tree.map(lambda x: x[0], micro_batches)
    _, shapes = jax.eval_shape(loss_sum, params, first)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), jax.tree.map(jnp.zeros_like, params)
    (sums, gradients), each = jax.lax.scan(add, nothing, micro_batches)
    return *_means(sums, gradients), each


def _means(sums: dict[str, jax.Array], gradients: Any) -> tuple[dict[str, jax.Array], Any]:
    targets = sums.pop("targets")
    share = 1 / jnp.maximum(targets, 1).astype(jnp.float32)
    means, gradients = jax.tree.map(lambda x: x * share, (sums, gradients))
    return {**means, "targets": targets}, gradients


def pipelined_loss_and_gradients(
    config: TrainConfig, graph: Any, mesh: Mesh, params: Any, arrays: Any, plans: Any
) -> tuple[dict[str, jax.Array], Any, dict[str, jax.Array]]:
    """What `mean_loss_and_gradients` gives, from the stages of a pipeline. Arguments as of `make_step`."""

    def stage(layers: Any, shared: Any, x: Any, micro_batch: Any, first: Any, last: Any) -> Any:
        arrays, plans = micro_batch
        return nnx.merge(graph, {**shared, "layers": layers}).stage(x, **arrays, plans=plans, first=first, last=last)

    shared = {name: part for name, part in params.items() if name != "layers"}
    shape = *arrays["tokens"].shape[1:], config.model.hidden_size
    x = jax.ShapeDtypeStruct(shape, config.model.compute_dtype, sharding=NamedSharding(mesh, token_spec(mesh)))
    sums, (layers, rest), each = pipeline.sums_and_gradients(
        stage, params["layers"], shared, (arrays, plans), x, mesh, config.mesh.schedule
    )
    gradients = {name: layers if name == "layers" else rest[name] for name in params}
    return *_means(sums, gradients), each


def model_loss_sum(graph: Any) -> LossSum:
    """loss_sum(params, (arrays, plans)) of one micro-step; see `Qwen3.loss_sum`. graph: of the run's `Blueprint`."""

    def loss_sum(params: Any, micro_batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        arrays, plans = micro_batch
        model = nnx.merge(graph, params)
        return model.loss_sum(arrays["tokens"], arrays["targets"], arrays["positions"], plans)

    return loss_sum


def make_step(config: TrainConfig, graph: Any, mesh: Mesh) -> Callable[[State, Any, Any], tuple[State, Any]]:
    """step(state, arrays, plans) -> (state, metrics), to be compiled by `compile_step`.

    arrays: those in `ARRAYS`, (micro_steps, sequences, seq_len) int32. plans: PlanTables with leading
    (micro_steps, pools, dp, cp). metrics: {"loss", "grad_norm", "learning_rate", "targets"} scalars, and what else
    the model's `loss_sum` says; losses and grad_norm are of the weights that came in. "skipped", the state's two
    numbers after this step; "micro_steps", as from `mean_loss_and_gradients`.

    Where a gradient or a loss is not finite, or float32 cannot hold the gradients' norm, nothing is updated; see
    `update_state`.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate(config.optimizer, config.steps)
    loss_sum = model_loss_sum(graph)

    def step(state: State, arrays: Any, plans: Any) -> tuple[State, Any]:
        if config.mesh.pp > 1:
            means, gradients, each = pipelined_loss_and_gradients(config, graph, mesh, state["params"], arrays, plans)
        else:
            means, gradients, each = mean_loss_and_gradients(loss_sum, state["params"], (arrays, plans))
        norm = optax.tree.norm(gradients)
        losses = {name: value for name, value in means.items() if name != "targets"}
        after = update_state(optimizer, state, gradients, jnp.all(each["finite"]) & all_finite((norm, losses)))
        metrics = {
            **means,
            "grad_norm": norm,
            "learning_rate": schedule(state["step"] - state["skipped"]["total"]),
            "skipped": after["skipped"],
            "micro_steps": each,
        }
        return after, metrics

    return step


def step_shapes(config: TrainConfig) -> tuple[dict[str, jax.ShapeDtypeStruct], PlanTables]:
    """Shapes of a step's arrays and of its plans' tables, which are the same for every batch."""
    spec, mesh = config.spec, config.mesh

    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((config.micro_steps, *shape), jnp.int32)

    arrays = {name: numbers(mesh.sequences, spec.seq_len) for name in ARRAYS}
    ranks = mesh.pools, spec.pool_size, spec.cp
    return arrays, PlanTables(spec=spec, **{name: numbers(*ranks, *s) for name, s in table_shapes(spec).items()})


@dataclasses.dataclass(frozen=True)
class Program:
    """The step of a run for one pool size. run(state, arrays, plans) -> (state, metrics), see `make_step`; arrays and
    plans lie on `mesh` (`mesh.place_batch`). Compiled: it donates the state and refuses any other shape or layout."""

    mesh: Mesh
    run: Callable[[State, Any, Any], tuple[State, Any]]


def compile_program(config: TrainConfig, mesh: Mesh, blueprint: Blueprint, pool_size: int) -> Program:
    """The program for steps in pools of `pool_size`, one of `config.mesh.sizes`; no batch is needed for it.

    mesh, blueprint: of the run. Programs of all sizes take and give the state as it lies there: what one returns is
    handed to another without a copy.
    """
    if pool_size == config.mesh.pool_size:
        return Program(mesh, compile_step(config, mesh, blueprint, *step_shapes(config)))
    other = config.at_pool_size(pool_size)
    mesh = regrouped(mesh, other.mesh)
    shapes = jax.tree.map(lambda x: x.sharding, blueprint.shapes)
    blueprint = plan_state(other, mesh)
    for leaf, sharding in zip(jax.tree.leaves(blueprint.shapes), jax.tree.leaves(shapes), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), f"{leaf.sharding} and {sharding}"
    return Program(mesh, compile_step(other, mesh, blueprint, *step_shapes(other)))


def compile_step(
    config: TrainConfig,
    mesh: Mesh,
    blueprint: Blueprint,
    arrays: Any,
    plans: Any,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The step as one compiled program. It donates the state and refuses any other shape: it cannot recompile.

    arrays, plans: of any one step, or their shapes. options: XLA's, beside those of the run (`train.xla`).
    """
    states = jax.tree.map(lambda x: x.sharding, blueprint.shapes)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = batch_shardings(mesh, arrays, plans)
    jitted = jax.jit(
        make_step(config, blueprint.graph, mesh),
        donate_argnums=0,
        in_shardings=(states, *shardings),
        out_shardings=(states, everywhere),
    )
    # Shapes alone: jit refuses NumPy arrays that it would have to spread over several processes.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays, plans))
    chosen = compiler_options(mesh.devices.flat[0].platform, config.xla)
    return jitted.lower(blueprint.shapes, *shapes).compile(compiler_options={**chosen, **(options or {})})
