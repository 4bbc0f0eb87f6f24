"""A pipeline's stages give what one device gives: sums and gradients of a toy, and of whole steps of the model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train_base import LENGTHS, TINY, TINY_MOE, pack

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.train.config import AttentionConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.mesh import make_mesh, place_batch
from libra_jax.train.pipeline import Schedule, first_return, kept_inputs, sums_and_gradients
from libra_jax.train.step import compile_step, plan_state

LAYERS, ROWS, WIDTH = 4, 4, 6


def toy(layers: jax.Array, shared: Any, x: jax.Array, batch: Any, first: Any, last: Any) -> Any:
    """Embedding, tanh layers, squared error: stages differ at both ends, and all have a loss of their own weights."""
    x = lax.cond(first, lambda: shared["embedding"][batch["tokens"]], lambda: x)
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)

    def error(x: jax.Array) -> jax.Array:
        return jnp.sum((x @ shared["head"] - batch["wanted"]) ** 2)

    loss = lax.cond(last, error, lambda x: jnp.zeros(()), x)
    targets = jnp.where(last, jnp.sum(batch["tokens"] >= 0), 0).astype(jnp.int32)
    weights = jnp.sum(layers**2)
    return x, loss + weights, {"loss": loss, "targets": targets, "weights": weights}


@functools.cache
def toy_problem(count: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(count)
    layers = rng.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32)
    shared = {"embedding": rng.standard_normal((9, WIDTH)), "head": rng.standard_normal((WIDTH, 2))}
    batches = {"tokens": rng.integers(0, 9, (count, ROWS)), "wanted": rng.standard_normal((count, ROWS, 2))}
    narrow = jax.tree.map(lambda a: a.astype(np.int32 if a.dtype.kind == "i" else np.float32), (shared, batches))
    return layers, *narrow


def piped(stages: int, schedule: Schedule, problem: Any) -> Any:
    mesh = jax.make_mesh(
        (stages, 2), ("pp", "dp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: 2 * stages]
    )
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("dp")))
    run = jax.jit(lambda *problem: sums_and_gradients(toy, *problem, x, mesh, schedule))
    return jax.tree.map(np.asarray, run(*problem))


@pytest.mark.parametrize(
    ("stages", "count", "schedule"),
    [(2, 1, "1f1b"), (2, 5, "1f1b"), (4, 3, "1f1b"), (4, 9, "1f1b"), (2, 3, "gpipe"), (4, 5, "gpipe")],
)
def test_sums_and_gradients_are_those_without_stages(stages: int, count: int, schedule: Schedule) -> None:
    layers, shared, batches = toy_problem(count)
    sums, (d_layers, d_shared), each = piped(stages, schedule, (layers, shared, batches))

    def whole(layers: jax.Array, shared: Any) -> Any:
        nothing = jnp.zeros((ROWS, WIDTH))
        runs = [toy(layers, shared, nothing, {k: v[i] for k, v in batches.items()}, True, True) for i in range(count)]
        return sum(total for _, total, _ in runs), [parts for *_, parts in runs]

    (_, parts), (want_layers, want_shared) = jax.value_and_grad(whole, (0, 1), has_aux=True)(layers, shared)
    np.testing.assert_allclose(each["loss"], [p["loss"] for p in parts], rtol=1e-5)
    np.testing.assert_array_equal(each["targets"], [ROWS] * count)
    assert each["finite"].all()
    for name, value in sums.items():
        np.testing.assert_allclose(value, sum(p[name] for p in parts), rtol=1e-5)
    for got, want in zip(
        jax.tree.leaves((d_layers, d_shared)), jax.tree.leaves((want_layers, want_shared)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_micro_batch_that_is_not_finite_is_known_by_its_number() -> None:
    layers, shared, batches = toy_problem(5)
    wanted = batches["wanted"].copy()
    wanted[3, 1] = np.nan
    *_, each = piped(2, "1f1b", (layers, shared, {**batches, "wanted": wanted}))
    assert each["finite"].tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_stage_keeps_more_inputs_than_there_is_room_for(schedule: Schedule) -> None:
    for stages in (2, 3, 5):
        for count in (1, 2, 4, 7, 20):
            turn, most = first_return(schedule, count, stages), 0
            for stage in range(stages):
                forward = {m: m + stage for m in range(count)}
                back = {m: turn + m + stages - 1 - stage for m in range(count)}
                assert all(forward[m] <= back[m] for m in range(count))
                for tick in range(turn + count + stages):
                    most = max(most, sum(forward[m] <= tick <= back[m] for m in range(count)))
            assert kept_inputs(schedule, count, stages) == most
            assert schedule == "gpipe" or most <= 2 * stages - 1


def steps_of(mesh_of: MeshConfig, model: Qwen3Config, micro_steps: int) -> tuple[list[float], Any]:
    """Losses and gradient norms of three steps, and the weights after them."""
    config = TrainConfig(
        model=model,
        data=DataConfig(paths=("none",)),
        mesh=mesh_of,
        attention=AttentionConfig(block=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        seq_len=64,
        micro_steps=micro_steps,
        steps=3,
    )
    mesh = make_mesh(mesh_of, jax.devices()[: mesh_of.devices])
    sequences = micro_steps * mesh_of.sequences
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (sequences, 64))
    batch = pack((LENGTHS * 3)[:sequences], tokens, config.spec, micro_steps)
    blueprint = plan_state(config, mesh)
    run = compile_step(config, mesh, blueprint, batch.arrays, batch.plans)
    state, found = blueprint.init(), []
    for _ in range(3):
        state, numbers = run(state, *place_batch(mesh, batch.arrays, batch.plans))
        found += [float(numbers["loss"]), float(numbers["grad_norm"])]
    for leaf in jax.tree.leaves(state["params"]["layers"]):
        first = {
            shard.index[0].start or 0 for shard in leaf.addressable_shards if shard.device == mesh.devices.flat[-1]
        }
        assert first == {model.num_layers - model.num_layers // mesh_of.pp}, "a stage has its own layers alone"
    return found, jax.tree.map(np.asarray, state["params"])


FOUR = dataclasses.replace(TINY, num_layers=4, tied_embeddings=True)
MOE = dataclasses.replace(TINY_MOE, num_layers=4, z_loss=1e-3)


@pytest.mark.parametrize(
    ("model", "mesh", "micro_steps"),
    [
        (FOUR, MeshConfig(1, 2, 1, pp=4), 3),
        (MOE, MeshConfig(1, 2, 1, tp=2, pp=2, schedule="gpipe"), 2),
    ],
    ids=["four stages", "experts, tp"],
)
def test_training_is_that_without_stages(model: Qwen3Config, mesh: MeshConfig, micro_steps: int) -> None:
    alone = dataclasses.replace(mesh, tp=1, pp=1)
    want, expected = steps_of(alone, model, micro_steps)
    got, params = steps_of(mesh, model, micro_steps)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    for (path, a), b in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(expected), strict=True):
        # AdamW divides a gradient by its own size: one near 0 moves as far as any other.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


def test_layers_that_stages_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.num_layers \(4\) must be a multiple of mesh.pp \(3\)"):
        TrainConfig(FOUR, DataConfig(paths=("none",)), MeshConfig(pp=3), AttentionConfig(block=8), seq_len=64)


def test_a_pipeline_has_equal_micro_steps_unless_told_otherwise() -> None:
    def across(pp: int, **data: Any) -> str | None:
        data = DataConfig(paths=("none",), **data)
        mesh = MeshConfig(pp=pp)
        return TrainConfig(FOUR, data, mesh, AttentionConfig(block=8), seq_len=64).step_data.across

    assert (across(1), across(2), across(2, across="pools")) == ("pools", "all", "pools")
