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

from libra_jax.models.qwen3 import Qwen3
from libra_jax.schedule import OVERLAP_OPTIONS
from libra_jax.tables import PlanTables, table_shapes
from libra_jax.train.config import OptimizerConfig, TrainConfig
from libra_jax.train.mesh import batch_shardings, regrouped, state_shardings

State = dict[str, Any]
"""{"params": nested dict of float32 arrays, "optimizer": optax state, "step": int32, steps done}."""
ARRAYS = "tokens", "targets", "positions"
"""What the step takes of a batch, beside its plans."""
LossSum = Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of update number `count` = 0, 1, ...: the first is peak / warmup_steps, not zero.

    steps: of the whole run; where the cosine ends if the config does not say. Raises ValueError if the warm-up does
    not end before it.
    """
    end = steps if config.decay_steps is None else config.decay_steps
    if config.warmup_steps >= end:
        raise ValueError(
            f"optimizer.warmup_steps ({config.warmup_steps}) must be below the step at which the cosine ends ({end}: "
            f"{'steps' if config.decay_steps is None else 'optimizer.decay_steps'})"
        )

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        warmup = step / max(config.warmup_steps, 1)
        done = jnp.clip((step - config.warmup_steps) / (end - config.warmup_steps), 0, 1)
        cosine = config.final_share + (1 - config.final_share) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * jnp.where(step < config.warmup_steps, warmup, cosine)

    return schedule


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW behind clipping by the global norm. Only the matrices inside the layers decay."""

    def decays(params: Any) -> Any:
        def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
            return len(leaf.shape) >= 3 and any(getattr(key, "key", None) == "layers" for key in path)

        return jax.tree.map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A run's state before it is made. graph: the model for `nnx.merge`; shapes: of the state, with shardings;
    init(): makes it, sharded, from the config's seed alone."""

    graph: Any
    shapes: State
    init: Callable[[], State]


def plan_state(config: TrainConfig, mesh: Mesh) -> Blueprint:
    """What the state of a run looks like and how to make it; nothing is allocated yet."""
    spec = config.spec
    optimizer = make_optimizer(config.optimizer, config.steps)

    def build() -> Qwen3:
        return Qwen3(config.model, spec, mesh, rngs=nnx.Rngs(config.seed))

    def init() -> State:
        params = nnx.to_pure_dict(nnx.state(build(), nnx.Param))
        return {"params": params, "optimizer": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

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
        return {"params": params, "optimizer": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(begin, donate_argnums=0, out_shardings=shardings)(params)


def mean_loss_and_gradients(loss_sum: LossSum, params: Any, micro_batches: Any) -> tuple[dict[str, jax.Array], Any]:
    """Token-weighted means over all micro-steps, and the gradient of what is minimised.

    loss_sum(params, micro_batch) -> (sum of what is minimised float32, sums: {"loss": float32, "targets": int32, ...}).
    micro_batches: arrays with a leading micro-step axis. Returns {name: sum / targets}, but "targets" as it is. Means
    and gradients are 0 where there is no target at all.
    """

    def add(total: Any, micro_batch: Any) -> tuple[Any, None]:
        (_, sums), gradients = jax.value_and_grad(loss_sum, has_aux=True)(params, micro_batch)
        return jax.tree.map(jnp.add, total, (sums, gradients)), None

    first = jax.tree.map(lambda x: x[0], micro_batches)
    _, shapes = jax.eval_shape(loss_sum, params, first)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), jax.tree.map(jnp.zeros_like, params)
    (sums, gradients), _ = jax.lax.scan(add, nothing, micro_batches)
    targets = sums.pop("targets")
    share = 1 / jnp.maximum(targets, 1).astype(jnp.float32)
    means, gradients = jax.tree.map(lambda x: x * share, (sums, gradients))
    return {**means, "targets": targets}, gradients


def make_step(config: TrainConfig, graph: Any) -> Callable[[State, Any, Any], tuple[State, Any]]:
    """step(state, arrays, plans) -> (state, metrics), to be compiled by `compile_step`.

    arrays: those in `ARRAYS`, (micro_steps, sequences, seq_len) int32. plans: PlanTables with leading
    (micro_steps, pools, dp, cp). metrics: {"loss", "grad_norm", "learning_rate", "targets"} scalars, and what else
    the model's `loss_sum` says; losses and grad_norm are of the weights that came in.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate(config.optimizer, config.steps)

    def loss_sum(params: Any, micro_batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        arrays, plans = micro_batch
        model = nnx.merge(graph, params)
        return model.loss_sum(arrays["tokens"], arrays["targets"], arrays["positions"], plans)

    def step(state: State, arrays: Any, plans: Any) -> tuple[State, Any]:
        params = state["params"]
        means, gradients = mean_loss_and_gradients(loss_sum, params, (arrays, plans))
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to a whole-number power
            updates, optimizer_state = optimizer.update(gradients, state["optimizer"], params)
        metrics = {
            **means,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": schedule(state["step"]),
        }
        after = {
            "params": optax.apply_updates(params, updates),
            "optimizer": optimizer_state,
            "step": state["step"] + 1,
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

    arrays, plans: of any one step, or their shapes. options: XLA's, beside those that a GPU needs to overlap.
    """
    states = jax.tree.map(lambda x: x.sharding, blueprint.shapes)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = batch_shardings(mesh, arrays, plans)
    jitted = jax.jit(
        make_step(config, blueprint.graph),
        donate_argnums=0,
        in_shardings=(states, *shardings),
        out_shardings=(states, everywhere),
    )
    # Shapes alone: jit refuses NumPy arrays that it would have to spread over several processes.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays, plans))
    overlap = OVERLAP_OPTIONS if mesh.devices.flat[0].platform == "gpu" else {}
    return jitted.lower(blueprint.shapes, *shapes).compile(compiler_options={**overlap, **(options or {})})
