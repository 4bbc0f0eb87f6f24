"""A pipeline over mesh axis "pp": layers cut into stages, micro-batches passing through them, forward and back.

Takes a function that runs one stage, and knows nothing of what is in it; gives the sums and the gradients that all
micro-batches would have without stages. One program runs on all stages: at each tick a stage takes at most one
micro-batch forward and one back, hands the first on to the next stage and the gradient of the second to the one before,
and does nothing where the schedule has nothing for it. A stage keeps the input of a micro-batch until it goes back, and
runs again what it needs of the rest.

Letters: M micro-batches, P stages, s a stage, 0 the first. Micro-batch m goes forward through stage s at tick m + s,
and back at tick W + m + (P - 1 - s). "1f1b" has W = P - 1: the last stage turns a micro-batch round as soon as it
comes, and a stage keeps at most 2P - 1 - 2s inputs (like PipeDream-Flush, arXiv 2006.09503, which keeps P - s: here
ticks are in step). "gpipe" (arXiv 1811.06965) has W = M + P - 1: all go forward, then all back, and a stage keeps M
inputs. Where micro-batches cost alike, 1f1b leaves a stage idle for (P - 1) / (M + P - 1) of the time; gpipe for more,
since the last stage has nothing to do while the others go forward (benchmarks/pipeline.py follows both).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.attention import in_context
from libra_jax.models.axes import PIPELINE_AXIS
from libra_jax.train.optimizer import all_finite

Schedule = Literal["1f1b", "gpipe"]

Sums = dict[str, jax.Array]
Stage = Callable[[Any, Any, jax.Array, Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array, Sums]]
"""stage(weights, shared, x, micro_batch, first, last) -> (x of the next stage, what is minimised, sums).

weights: this stage's part. shared: what any stage may use. first, last: bool scalars, whether it is that stage; what is
done in one alone goes under `lax.cond`. Sums add up over stages and micro-batches; with "loss" and "targets".
"""


def first_return(schedule: Schedule, micro_batches: int, stages: int) -> int:
    """W: the tick at which the last stage takes the first micro-batch back."""
    return stages - 1 if schedule == "1f1b" else micro_batches + stages - 1


def kept_inputs(schedule: Schedule, micro_batches: int, stages: int) -> int:
    """Inputs that the first stage keeps at most; no other keeps more."""
    return min(micro_batches, first_return(schedule, micro_batches, stages) + stages)


def sums_and_gradients(
    stage: Stage,
    weights: Any,
    shared: Any,
    micro_batches: Any,
    x: jax.ShapeDtypeStruct,
    mesh: Mesh,
    schedule: Schedule,
) -> tuple[Sums, tuple[Any, Any], dict[str, jax.Array]]:
    """Sums over all micro-batches, the gradients of what is minimised, and what each micro-batch gave.

    weights: a tree of arrays, their leading axis over "pp": the layers, as many to each stage. shared: a tree of
        arrays. micro_batches: a tree of arrays with a leading axis M.
    x: what goes from stage to stage, with a sharding over the mesh's other axes.

    Returns gradients of weights and shared. Last come (M,) arrays: "loss" and "targets", sums of the micro-batch, and
    "finite", whether all of its gradients and what it minimises are.
    """
    axis, home = PIPELINE_AXIS, x.sharding.spec
    count = jax.tree.leaves(micro_batches)[0].shape[0]

    def on_stage(weights: Any, shared: Any, micro_batches: Any) -> Any:
        stages, me = lax.axis_size(axis), lax.axis_index(axis)
        turn = first_return(schedule, count, stages)
        depth = kept_inputs(schedule, count, stages)
        here = NamedSharding(in_context(mesh), home)
        kept_here = NamedSharding(in_context(mesh), PartitionSpec(None, *home))
        first, last = me == 0, me == stages - 1

        def of(number: jax.Array) -> Any:
            return jax.tree.map(lambda a: a[jnp.clip(number, 0, count - 1)], micro_batches)

        def run(weights: Any, shared: Any, x: jax.Array, number: jax.Array) -> Any:
            y, total, sums = stage(weights, shared, x, of(number), first, last)
            return (lax.with_sharding_constraint(y, here), total), sums

        def forward(x: jax.Array, number: jax.Array) -> jax.Array:
            return run(weights, shared, x, number)[0][0]

        def back(x: jax.Array, d_y: jax.Array, number: jax.Array, done: Any) -> Any:
            (_, total), pull, sums = jax.vjp(
                lambda weights, shared, x: run(weights, shared, x, number), weights, shared, x, has_aux=True
            )
            *gradients, d_x = pull((d_y, jnp.ones_like(total)))
            so_far, each = done
            each = {
                "loss": each["loss"].at[number].add(sums["loss"]),
                "targets": each["targets"].at[number].add(sums["targets"]),
                "not_finite": each["not_finite"].at[number].add((~all_finite((total, gradients))).astype(jnp.int32)),
            }
            return d_x, (jax.tree.map(jnp.add, so_far, (sums, tuple(gradients))), each)

        def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
            arrived, d_arrived, kept, done = carry
            number = t - me
            here_now = (number >= 0) & (number < count)
            place = jnp.clip(number, 0, count - 1) % depth
            kept = kept.at[place].set(jnp.where(here_now, arrived, kept[place]))
            # The last stage runs a micro-batch when it takes it back, at this same tick or later.
            x_next = lax.cond(here_now & ~last, forward, lambda x, _: x, arrived, number)
            number = t - turn - (stages - 1 - me)
            returns = (number >= 0) & (number < count)
            d_x, done = lax.cond(
                returns,
                back,
                lambda x, d_y, _, done: (jnp.zeros_like(d_y), done),
                kept[jnp.clip(number, 0, count - 1) % depth],
                d_arrived,
                number,
                done,
            )
            onward = [(i, i + 1) for i in range(stages - 1)]
            arrived = lax.ppermute(lax.with_sharding_constraint(x_next, here), axis, onward)
            d_arrived = lax.ppermute(lax.with_sharding_constraint(d_x, here), axis, [(j, i) for i, j in onward])
            return (arrived, d_arrived, lax.with_sharding_constraint(kept, kept_here), done), None

        nothing = lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), here)
        kept = lax.with_sharding_constraint(jnp.zeros((depth, *x.shape), x.dtype), kept_here)
        _, shapes = jax.eval_shape(run, weights, shared, nothing, jnp.int32(0))
        sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        gradients = jax.tree.map(jnp.zeros_like, (weights, shared))
        each = {
            "loss": jnp.zeros(count, jnp.float32),
            "targets": jnp.zeros(count, jnp.int32),
            "not_finite": jnp.zeros(count, jnp.int32),
        }
        ticks = jnp.arange(turn + count + stages - 1, dtype=jnp.int32)
        (*_, done), _ = lax.scan(tick, (nothing, nothing, kept, ((sums, gradients), each)), ticks)
        ((sums, (d_weights, d_shared)), each) = done
        return lax.psum((sums, d_shared, each), axis), d_weights

    split, whole = PartitionSpec(axis), PartitionSpec()
    (sums, d_shared, each), d_weights = jax.shard_map(
        on_stage,
        mesh=mesh,
        in_specs=(split, whole, whole),
        out_specs=((whole, whole, whole), split),
        axis_names={axis},  # a stage's ranks share its work over the other axes as they would without a pipeline
        check_vma=False,
    )(weights, shared, micro_batches)
    each = {"loss": each["loss"], "targets": each["targets"], "finite": each["not_finite"] == 0}
    return sums, (d_weights, d_shared), each
