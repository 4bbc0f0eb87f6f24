"""The step (loss, micro-steps, pools) and the run (exact resume, refusals, messages)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from train_base import TINY, Packed, pack

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import cross_entropy_sum
from libra_jax.train.config import AttentionConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.mesh import batch_shardings, make_mesh
from libra_jax.train.step import compile_step, learning_rate, mean_loss_and_gradients, plan_state


def config_of(pools: int, pool_size: int, cp: int, **changes: Any) -> TrainConfig:
    fields = {
        "model": TINY,
        "data": DataConfig(paths=("text",)),
        "mesh": MeshConfig(pools, pool_size, cp),
        "attention": AttentionConfig(block=8),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        "seq_len": 64,
        "steps": 6,
    }
    return TrainConfig(**fields | changes)


# The loss.


@pytest.mark.parametrize("in_micro_steps", [1, 2], ids=["one-micro-step", "two-micro-steps"])
@pytest.mark.parametrize(("pools", "pool_size"), [(1, 1), (1, 2), (2, 1)], ids=["one-by-one", "one-pool", "two-pools"])
def test_loss_is_the_mean_over_the_targets_of_the_whole_step(pools: int, pool_size: int, in_micro_steps: int) -> None:
    """Two sequences of 8 tokens, cp 2: losses 2, 4, 6, 8 | 10 on the ranks of one, 1 | none on those of the other."""
    sequences = pools * pool_size
    if sequences * in_micro_steps < 2:
        pytest.fail("two sequences need two places") if in_micro_steps > 1 else None
        in_micro_steps = 2
    losses = np.full((2, 8), np.nan)
    losses[0, :4], losses[0, 4], losses[1, 0] = (2, 4, 6, 8), 10, 1
    has_target = ~np.isnan(losses)
    # With two words and logits (0, z), the loss of word 0 is log(1 + exp(z)).
    z = np.log(np.expm1(np.where(has_target, losses, 1.0)))
    logits = np.stack([np.zeros_like(z), z], axis=-1).astype(np.float32)
    targets = np.where(has_target, 0, -1).astype(np.int32)
    places = in_micro_steps * sequences
    logits = np.concatenate([logits, np.zeros((places - 2, 8, 2), np.float32)]) if places > 2 else logits
    targets = np.concatenate([targets, np.full((places - 2, 8), -1, np.int32)]) if places > 2 else targets

    mesh = make_mesh(MeshConfig(pools, pool_size, 2), jax.devices()[: 2 * sequences])
    rows = NamedSharding(mesh, PartitionSpec(None, ("pool", "dp"), "cp"))
    batch = jax.device_put(
        (logits.reshape(in_micro_steps, sequences, 8, 2), targets.reshape(in_micro_steps, sequences, 8)), rows
    )

    def loss_sum(factor: jax.Array, micro_batch: Any) -> tuple[jax.Array, jax.Array]:
        return cross_entropy_sum(micro_batch[0] * factor, micro_batch[1])

    step = jax.jit(lambda factor, batch: mean_loss_and_gradients(loss_sum, factor, batch))
    loss, gradient, number = step(jnp.float32(1), batch)
    assert int(number) == 6
    assert float(loss) == pytest.approx(31 / 6, rel=1e-6)
    by_hand = (z * np.exp(z) / (1 + np.exp(z)))[has_target].sum() / 6  # d/df log(1 + exp(f z)) at f = 1
    assert float(gradient) == pytest.approx(by_hand, rel=1e-6)

    nothing = jax.device_put((batch[0], np.full(batch[1].shape, -1, np.int32)), rows)
    loss, gradient, number = step(jnp.float32(1), nothing)
    assert (float(loss), float(gradient), int(number)) == (0.0, 0.0, 0)


# One model, one set of eight sequences, dealt out in different ways.

LENGTHS = [[64], [1, 20, 3, 9, 1, 5], [40, 24], [], [7, 7, 7], [30, 2, 31], [63], [10, 50]]


def losses_of(config: TrainConfig, steps: int = 3) -> tuple[list[float], list[float], Any]:
    """Losses and gradient norms of a few steps on `LENGTHS` with tokens that a model can learn, and the last state."""
    mesh = make_mesh(config.mesh)
    blueprint = plan_state(config, mesh)
    state, compiled = blueprint.init(), None
    losses, norms = [], []
    for step in range(steps):
        start = np.random.default_rng(step).integers(0, 60, (len(LENGTHS), 1))
        tokens = (start + np.arange(config.seq_len)) % 60
        batch: Packed = pack(LENGTHS, tokens, config.spec, config.micro_steps)
        if compiled is None:
            compiled = compile_step(config, mesh, blueprint, batch.arrays, batch.plans)
        placed = jax.device_put((batch.arrays, batch.plans), batch_shardings(mesh, batch.arrays, batch.plans))
        state, numbers = compiled(state, *placed)
        losses.append(float(numbers["loss"]))
        norms.append(float(numbers["grad_norm"]))
    return losses, norms, state


def test_loss_and_gradient_depend_neither_on_pool_size_nor_on_micro_steps() -> None:
    shapes = {
        "2x2x2, 2 micro-steps": config_of(2, 2, 2, micro_steps=2),
        "1x4x2, 2 micro-steps": config_of(1, 4, 2, micro_steps=2),
        "4x1x2, 2 micro-steps": config_of(4, 1, 2, micro_steps=2),
        "2x4x1, 1 micro-step": config_of(2, 4, 1, micro_steps=1),
        "1x2x4, 4 micro-steps": config_of(1, 2, 4, micro_steps=4),
    }
    results = {name: losses_of(config) for name, config in shapes.items()}
    losses, norms, _ = results["2x2x2, 2 micro-steps"]
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.02) and losses[2] < losses[0]
    for name, (other_losses, other_norms, state) in results.items():
        np.testing.assert_allclose(other_losses, losses, rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(other_norms, norms, rtol=2e-5, err_msg=name)
        assert int(state["step"]) == 3


def test_parameters_and_optimizer_are_spread_over_all_ranks() -> None:
    config = config_of(2, 2, 2)
    blueprint = plan_state(config, make_mesh(config.mesh))
    held = total = 0
    for path, leaf in jax.tree.leaves_with_path(blueprint.init()):
        total += leaf.size
        held += leaf.addressable_shards[0].data.size
        if leaf.size >= 8 and any(n % 8 == 0 for n in leaf.shape[1:] or leaf.shape):
            assert leaf.addressable_shards[0].data.size * 8 == leaf.size, jax.tree_util.keystr(path)
    assert held < total / 8 * 1.02


def test_learning_rate_warms_up_from_the_first_step_and_falls_to_its_final_share() -> None:
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=4, decay_steps=20, final_share=0.1)
    rates = [float(learning_rate(config, 1000)(count)) for count in range(30)]
    np.testing.assert_allclose(rates[:4], [0.125, 0.25, 0.375, 0.5], rtol=1e-6)
    assert rates[3] > rates[4] > rates[18] and rates[11] == pytest.approx(0.5 * 0.55, rel=1e-5)
    np.testing.assert_allclose(rates[19:], 0.05, rtol=1e-6)
    with pytest.raises(ValueError, match=r"warmup_steps \(100\) must be below .* \(60: steps\)"):
        learning_rate(OptimizerConfig(warmup_steps=100), 60)


def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"2 \* 4 \* 2 = 16 devices, and there are 8 \(cpu\)"):
        make_mesh(MeshConfig(2, 4, 2))
    with pytest.raises(ValueError, match=r"1 \* 2 \* 2 = 4 devices, and there are 8"):
        make_mesh(MeshConfig(1, 2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 60}, r"seq_len \(60\) must be a multiple of cp \* block \(2 \* 8 = 16\)"),
        ({"steps": 0}, r"steps \(0\) must be at least 1"),
        ({"micro_steps": 0}, r"micro_steps \(0\) must be at least 1"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config_of(2, 2, 2), **changes)
