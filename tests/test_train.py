"""A step of training: loss, micro-steps, pools, how its state lies; and the configs that cannot be."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from run_base import config_of, start
from train_base import FAST_LINKS, TINY, TINY_MOE, Packed, pack, tiny_spec

from libra_jax.models.moe import MoEConfig
from libra_jax.models.vocabulary import cross_entropy_sum
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, TrainConfig
from libra_jax.train.mesh import batch_shardings, make_mesh
from libra_jax.train.metrics import MetricsFile, StepRecord, baselines, imbalance, read_metrics
from libra_jax.train.step import (
    compile_step,
    mean_loss_and_gradients,
    plan_state,
)
from libra_jax.workload import CostModel

TWO_SIZES = MeshConfig(2, 2, 2, pool_sizes=(4,), least_saving=0.0, links=FAST_LINKS)


# The loss.


@pytest.mark.parametrize(
    ("micro_steps", "pools", "pool_size"),
    [(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1)],
    ids=["two micro-steps", "one pool", "two pools", "one pool, two micro-steps", "two pools, two micro-steps"],
)
def test_loss_is_the_mean_over_the_targets_of_the_whole_step(micro_steps: int, pools: int, pool_size: int) -> None:
    """Two sequences of 8 tokens, cp 2: losses 2, 4, 6, 8 | 10 on the ranks of one, 1 | none on those of the other."""
    sequences = pools * pool_size
    losses = np.full((micro_steps * sequences, 8), np.nan)
    losses[0, :4], losses[0, 4], losses[1, 0] = (2, 4, 6, 8), 10, 1
    has_target = ~np.isnan(losses)
    # With two words and logits (0, z), the loss of word 0 is log(1 + exp(z)).
    z = np.log(np.expm1(np.where(has_target, losses, 1.0)))
    logits = np.stack([np.zeros_like(z), z], axis=-1).astype(np.float32)
    targets = np.where(has_target, 0, -1).astype(np.int32)
    mesh = make_mesh(MeshConfig(pools, pool_size, 2), jax.devices()[: 2 * sequences])
    rows = NamedSharding(mesh, PartitionSpec(None, ("pool", "dp"), "cp"))
    batch = jax.device_put(
        (logits.reshape(micro_steps, sequences, 8, 2), targets.reshape(micro_steps, sequences, 8)), rows
    )

    def loss_sum(factor: jax.Array, micro_batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        sums = cross_entropy_sum(micro_batch[0] * factor, micro_batch[1])
        return sums.loss, {"loss": sums.loss, "targets": sums.targets}

    step = jax.jit(lambda factor, batch: mean_loss_and_gradients(loss_sum, factor, batch))
    means, gradient, each = step(jnp.float32(1), batch)
    loss = means["loss"]
    assert int(means["targets"]) == 6
    assert float(loss) == pytest.approx(31 / 6, rel=1e-6)
    assert int(each["targets"].sum()) == 6 and float(each["loss"].sum()) == pytest.approx(31, rel=1e-6)
    assert each["finite"].shape == (micro_steps,) and bool(each["finite"].all())
    by_hand = (z * np.exp(z) / (1 + np.exp(z)))[has_target].sum() / 6  # d/df log(1 + exp(f z)) at f = 1
    assert float(gradient) == pytest.approx(by_hand, rel=1e-6)

    nothing = jax.device_put((batch[0], np.full(batch[1].shape, -1, np.int32)), rows)
    means, gradient, _ = step(jnp.float32(1), nothing)
    assert (float(means["loss"]), float(gradient), int(means["targets"])) == (0.0, 0.0, 0)


def test_imbalance_is_the_time_that_micro_steps_take_over_what_even_work_would_take() -> None:
    # Two micro-steps, two pools of two ranks: 8 + 6 pages at the busiest ranks, 4 + 3 on average.
    work = np.array([[[8, 0], [4, 4]], [[1, 2], [3, 6]]])
    assert imbalance(work) == pytest.approx(14 / 7)
    assert imbalance(np.full((1, 2, 2), 5)) == 1 and imbalance(np.zeros((1, 2, 2))) == 1

    # One document over 4 blocks visits 1, 2, 3 and 4 pages; four of one block each visit one. Two kv heads.
    spec = tiny_spec(pool_size=2, cp=2, seq_len=32)
    lengths = [[32], [8, 8, 8, 8]]
    home, ulysses = (baselines(lengths, spec, 1)[name] for name in ("home", "ulysses"))
    np.testing.assert_array_equal(home, [[[2 * 3, 2 * 7, 2 * 2, 2 * 2]]])
    np.testing.assert_array_equal(ulysses, [[[10, 10, 4, 4]]])
    assert imbalance(home) == pytest.approx(14 / 7) and imbalance(ulysses) == pytest.approx(10 / 7)


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
        "8x1x1, plain data parallelism": config_of(8, 1, 1),
        "2x4x1, 1 micro-step": config_of(2, 4, 1, micro_steps=1),
    }
    results = {name: losses_of(config) for name, config in shapes.items()}
    losses, norms, _ = results["2x2x2, 2 micro-steps"]
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.02) and losses[2] < losses[0]
    for name, (other_losses, other_norms, state) in results.items():
        np.testing.assert_allclose(other_losses, losses, rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(other_norms, norms, rtol=2e-5, err_msg=name)
        assert int(state["step"]) == 3


def test_experts_gathered_or_spread_give_one_curve() -> None:
    model = {
        experts: dataclasses.replace(TINY_MOE, moe=dataclasses.replace(TINY_MOE.moe, experts=experts))
        for experts in ("gathered", "spread")
    }
    shapes = {
        "gathered": config_of(2, 2, 2, micro_steps=2, model=model["gathered"]),
        "spread over 4 ranks": config_of(2, 2, 2, micro_steps=2, model=model["spread"]),
    }
    results = {name: losses_of(config) for name, config in shapes.items()}
    losses, norms, _ = results["gathered"]
    assert losses[2] < losses[0]
    for name, (other_losses, other_norms, _) in results.items():
        np.testing.assert_allclose(other_losses, losses, rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(other_norms, norms, rtol=2e-5, err_msg=name)


def test_parameters_and_optimizer_are_spread_over_all_ranks() -> None:
    config = config_of(2, 2, 2)
    blueprint = plan_state(config, make_mesh(config.mesh))
    held = total = 0
    for path, leaf in jax.tree.leaves_with_path(blueprint.shapes):
        here = math.prod(leaf.sharding.shard_shape(leaf.shape))
        total, held = total + leaf.size, held + here
        if any(n % 8 == 0 for n in leaf.shape[1:] or leaf.shape):
            assert here * 8 == leaf.size, jax.tree_util.keystr(path)
    assert total > 10_000 and held < total / 8 * 1.02


MOE_SPREAD = dataclasses.replace(TINY, moe=MoEConfig(8, 2, 16, experts="spread"))
MOE_OF_SIX = dataclasses.replace(TINY, moe=MoEConfig(6, 2, 16, experts="spread"))


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
        (
            {"attention": AttentionConfig(block=8, ranks_per_node=2)},
            r"waves \(2\) must be at least 3 with ranks_per_node \(2\) in a pool of 4",
        ),
        ({"model": MOE_OF_SIX}, r"num_experts \(6\) must be a multiple of .* \(2 \* 2 = 4\)"),
        (
            {"model": MOE_SPREAD, "mesh": MeshConfig(2, 2, 2, pool_sizes=(4,))},
            r"mesh.pool_sizes \(4,\) with .*'spread'",
        ),
        (
            {"mesh": MeshConfig(2, 2, 2, pool_sizes=(4,)), "attention": AttentionConfig(block=8, ranks_per_node=4)},
            r"waves \(2\) must be at least 3 with ranks_per_node \(4\) in a pool of 8",
        ),
        ({"checkpoint": CheckpointConfig(keep_best=1)}, r"checkpoint.keep_best \(1\) goes by evaluations"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config_of(2, 2, 2), **changes)


def test_measured_prices_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    CostModel(page_seconds=1e-6).save(path)
    assert config_of(2, 2, 2).cost == CostModel()
    config = config_of(2, 2, 2, attention=AttentionConfig(block=8, cost_model=str(path)), run_dir=str(tmp_path / "run"))
    assert config.cost.page_seconds == 1e-6
    path.unlink()
    with pytest.raises(OSError, match=r"cost\.json"):
        start(config)


def test_old_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A run that was begun before pool sizes and planning were recorded goes on with its whole curve."""
    path = tmp_path / "metrics.jsonl"
    record = StepRecord(1, 2.0, 1.0, 1e-3, 10, 12, 0.5, 24.0, 1.5, 1.2, 1.01, 0)
    old = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
    assert record.pool_size is None and "pool_size" not in old
    path.write_text(json.dumps(old) + "\n")
    MetricsFile(path, 1).close()
    assert read_metrics(path) == [record]


def test_every_pool_size_has_the_shapes_of_a_run_that_knows_no_other() -> None:
    """Nodes of four ranks: pools of two sequences lie inside of one, pools of four and eight do not."""
    attention = AttentionConfig(block=8, waves=3, ranks_per_node=4)
    config = config_of(4, 2, 2, attention=attention)
    several = dataclasses.replace(config, mesh=MeshConfig(4, 2, 2, pool_sizes=(8, 4)))
    assert several.mesh.sizes == (2, 4, 8) and [s.pool_size for s in several.pool_sizes.specs] == [8, 4]
    assert [several.spec_of(size).ranks_per_node for size in several.mesh.sizes] == [None, 4, 4]
    assert several.at_pool_size(2) == config
    assert several.at_pool_size(8) == config_of(1, 8, 2, attention=attention)
    assert several.spec_of(8) == several.at_pool_size(8).spec
    assert several.step_tokens == several.at_pool_size(8).step_tokens == config.step_tokens
