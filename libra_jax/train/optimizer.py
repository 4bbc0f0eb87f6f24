"""The optimizer: AdamW behind clipping by the global norm, its schedule, and what becomes of a step that is not finite.

Weights and both moments are float32, whatever the model computes in: with `model.compute_dtype` "bfloat16" the weights
are cast where they are used, and the update is made on the float32 ones. Everything is optax's but the cool-down by
1 - sqrt, which it does not have.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from libra_jax.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of update number `count` = 0, 1, ...: the first is peak / warmup_steps, not zero.

    After the warm-up, "cosine" (Loshchilov and Hutter, arXiv 1608.03983) falls to its end at once; "wsd" (warm-up,
    stable, decay: Hu et al., MiniCPM, arXiv 2404.06395) stays at the peak and falls over the last `decay_share` of the
    updates, in a line or as 1 - sqrt of the share done (Hägele et al., arXiv 2405.18392). Both stay at
    `final_share` of the peak from there on.

    steps: of the whole run; where the schedule ends if the config does not say. Raises ValueError if the warm-up does
    not end before it, or before the decay begins.
    """
    end = steps if config.decay_steps is None else config.decay_steps
    named = "steps" if config.decay_steps is None else "optimizer.decay_steps"
    if config.warmup_steps >= end:
        raise ValueError(
            f"optimizer.warmup_steps ({config.warmup_steps}) must be below the step at which the schedule ends ({end}: "
            f"{named})"
        )
    peak, final = config.learning_rate, config.learning_rate * config.final_share
    parts, ends = [], []
    if config.warmup_steps:
        parts.append(optax.linear_schedule(0.0, peak, config.warmup_steps))
        ends.append(config.warmup_steps)
    if config.schedule == "cosine":
        parts.append(optax.cosine_decay_schedule(peak, end - config.warmup_steps, config.final_share))
    else:
        decay = max(round(config.decay_share * end), 1)
        if config.warmup_steps + decay > end:
            raise ValueError(
                f"optimizer.warmup_steps ({config.warmup_steps}) must end before the decay begins, at {end - decay}: "
                f"the last {config.decay_share:.0%} (optimizer.decay_share) of {end} ({named})"
            )
        falls = optax.linear_schedule if config.decay_shape == "linear" else _one_minus_sqrt
        parts += [optax.constant_schedule(peak), falls(peak, final, decay)]
        ends.append(end - decay)
    joined = optax.join_schedules(parts, ends)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        return jnp.asarray(joined(jnp.asarray(count, jnp.float32) + 1), jnp.float32)

    return schedule


def _one_minus_sqrt(begin: float, end: float, steps: int) -> optax.Schedule:
    def schedule(count: Any) -> jax.Array:
        return end + (begin - end) * (1 - jnp.sqrt(jnp.clip(count / steps, 0, 1)))

    return schedule


def decays(params: Any) -> Any:
    """Which parameters the weight decay pulls at: bools, in the shape of the tree.

    Every matrix inside the layers, those of experts and of their router included. Not: scales of norms, which are not
    to shrink; embeddings, whose rows would shrink in every step in which their words do not come; and the output
    matrix, which is the same table where embeddings are tied.
    """

    def decays_here(path: tuple[Any, ...], _: Any) -> bool:
        names = [getattr(key, "key", None) for key in path]
        return "layers" in names and names[-1] != "scale"

    return jax.tree.map_with_path(decays_here, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) on gradients clipped by their global norm; see `decays`."""
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


def nothing_skipped() -> dict[str, jax.Array]:
    """The state's "skipped" of a run that has not begun: updates left out in all, and the newest of them in a row."""
    return {"total": jnp.zeros((), jnp.int32), "in_a_row": jnp.zeros((), jnp.int32)}


def all_finite(tree: Any) -> jax.Array:
    """Whether every number of a tree is finite, a bool scalar."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def update_state(
    optimizer: optax.GradientTransformation, state: dict[str, Any], gradients: Any, finite: jax.Array
) -> dict[str, Any]:
    """The state after one more step: updated, or, where `finite` is False, as it was but for "step" and "skipped".

    Weights, moments and the count that the schedule goes by are then the old ones, to the bit: a run goes on as if this
    step's batch had not been there. state: see `step.State`. finite: bool scalar.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to a whole-number power
        updates, after = optimizer.update(gradients, state["optimizer"], state["params"])
    new = optax.apply_updates(state["params"], updates), after
    old = state["params"], state["optimizer"]
    params, after = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
    left_out = (~finite).astype(jnp.int32)
    skipped = state["skipped"]
    return {
        "params": params,
        "optimizer": after,
        "step": state["step"] + 1,
        "skipped": {"total": skipped["total"] + left_out, "in_a_row": (skipped["in_a_row"] + 1) * left_out},
    }
