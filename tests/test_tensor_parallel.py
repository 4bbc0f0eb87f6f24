"""Heads and features spread over mesh axis "tp": the same attention, logits, gradients and training as without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train_base import (
    LENGTHS,
    TINY,
    TINY_MOE,
    assert_logits_of_documents_alone,
    batch_of,
    random_params,
    run,
    tiny_spec,
)

from libra_jax.attention import libra_attention
from libra_jax.data import DataConfig
from libra_jax.layers import LibraAttention
from libra_jax.models.qwen3 import Qwen3, Qwen3Config
from libra_jax.plan import plan_pool, stack_plans
from libra_jax.train.config import AttentionConfig, MeshConfig, TrainConfig
from libra_jax.train.mesh import make_mesh
from libra_jax.train.step import plan_state

SPREAD = dataclasses.replace(TINY_MOE, moe=dataclasses.replace(TINY_MOE.moe, experts="spread"))  # pyright: ignore
MODELS = {"dense": TINY, "gathered experts": TINY_MOE, "spread experts": SPREAD}


def own_heads(**changes: Any) -> Any:
    """The pool of one rank of two that share TINY's heads."""
    return tiny_spec(num_heads=2, num_kv_heads=1, **changes)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_every_rank_works_on_its_own_heads_and_gives_their_bits(explicit: bool) -> None:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((1, 2, 2, 2), ("pool", "dp", "cp", "tp"), axis_types=(kind,) * 4)
    spec, rng = own_heads(), np.random.default_rng(0)
    plans = stack_plans([plan_pool(LENGTHS[:2], spec)])
    q, k, v = (jnp.asarray(rng.standard_normal((2, 64, heads, 8)), jnp.float32) for heads in (4, 2, 2))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mesh: Any, axis: str | None) -> Any:
        out = libra_attention(q, k, v, plans, spec=spec, mesh=mesh, heads_axis=axis)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    def both(mesh: Any, axis: str | None, arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
        with jax.set_mesh(mesh):
            call = jax.jit(jax.grad(lambda *qkv: loss(*qkv, mesh, axis), (0, 1, 2), has_aux=True))
            gradients, out = call(*arrays)
        return [np.asarray(x) for x in (out, *gradients)]

    together = both(mesh, "tp", (q, k, v))
    alone = jax.make_mesh((1, 2, 2), ("pool", "dp", "cp"), axis_types=(kind,) * 3, devices=jax.devices()[:4])
    for half in range(2):
        part = q[:, :, 2 * half : 2 * half + 2], k[:, :, half : half + 1], v[:, :, half : half + 1]
        for got, want in zip(together, both(alone, None, part), strict=True):
            heads = want.shape[2]
            np.testing.assert_array_equal(got[:, :, heads * half : heads * (half + 1)], want)


@pytest.mark.parametrize("mesh_of", [MeshConfig(2, 2, 1, 2), MeshConfig(2, 1, 2, 2)], ids=["pools of 2", "cp 2"])
@pytest.mark.parametrize("model", list(MODELS))
def test_logits_equal_those_of_each_document_alone(model: str, mesh_of: MeshConfig) -> None:
    config, spec, mesh = MODELS[model], own_heads(pool_size=mesh_of.pool_size, cp=mesh_of.cp), make_mesh(mesh_of)
    graph, params = random_params(config, spec, mesh)
    lengths = LENGTHS if mesh_of.sequences == 4 else LENGTHS[1:3]
    batch = batch_of(spec, lengths=lengths)
    assert_logits_of_documents_alone(run(graph, params, batch), params, batch, config, lengths)


@pytest.mark.parametrize("model", list(MODELS))
def test_loss_and_gradients_are_those_without_it(model: str) -> None:
    config = dataclasses.replace(MODELS[model], z_loss=1e-3)

    def loss_and_gradients(mesh_of: MeshConfig, spec: Any) -> Any:
        mesh, batch = make_mesh(mesh_of, jax.devices()[: mesh_of.devices]), batch_of(spec)
        graph, params = random_params(config, spec, mesh)

        @jax.jit
        def call(params: Any, arrays: Any, plans: Any) -> Any:
            def loss(params: Any) -> Any:
                return nnx.merge(graph, params).loss_sum(**arrays, plans=plans)

            return jax.value_and_grad(loss, has_aux=True)(params)

        first = jax.tree.map(lambda x: x[0], (batch.arrays, batch.plans))
        return jax.tree.map(np.asarray, call(params, *first))

    (got, parts), gradients = loss_and_gradients(MeshConfig(2, 2, 1, 2), own_heads(cp=1))
    (want, expected_parts), expected = loss_and_gradients(MeshConfig(2, 2, 1), tiny_spec(cp=1))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), parts, expected_parts)
    for (path, a), b in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


def a_run(mesh: MeshConfig, model: Qwen3Config = TINY, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {"seq_len": 64, "attention": AttentionConfig(block=8)} | changes
    return TrainConfig(model=model, data=DataConfig(paths=("none",)), mesh=mesh, **fields)


@pytest.mark.parametrize("model", list(MODELS))
def test_matrices_and_optimizer_are_spread_over_all_ranks_heads_first(model: str) -> None:
    mesh = make_mesh(MeshConfig(2, 1, 2, 2))
    shapes = plan_state(a_run(MeshConfig(2, 1, 2, 2), MODELS[model]), mesh).shapes
    for path, leaf in jax.tree.leaves_with_path((shapes["params"], shapes["optimizer"])):
        if leaf.ndim > 1 and leaf.size >= 64 * 8:
            share = int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
            assert share * mesh.size == leaf.size, (jax.tree_util.keystr(path), leaf.sharding.spec)
    attention = shapes["params"]["layers"]["attention"]
    for name in ("q_proj", "k_proj", "v_proj"):
        assert attention[name]["kernel"].sharding.spec == PartitionSpec(None, ("pool", "dp", "cp"), "tp", None), name
    assert attention["o_proj"]["kernel"].sharding.spec == PartitionSpec(None, "tp", None, ("pool", "dp", "cp"))


def test_no_rank_gathers_the_matrices_of_other_ranks_heads() -> None:
    mesh_of = MeshConfig(1, 2, 2, 2)
    mesh, spec = make_mesh(mesh_of), own_heads()
    graph, params = random_params(TINY, spec, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, plan_state(a_run(mesh_of), mesh).shapes["params"])
    params = jax.tree.map(jax.device_put, params, shardings)
    batch = batch_of(spec, lengths=LENGTHS[:2])
    first = jax.tree.map(lambda x: x[0], (batch.arrays, batch.plans))
    loss = jax.jit(lambda params, arrays, plans: nnx.merge(graph, params).loss_sum(**arrays, plans=plans)[0])
    text = loss.lower(params, *first).compile().as_text()
    width, inner = TINY.hidden_size, TINY.intermediate_size
    assert f"f32[{width},{inner // 2}]" in text and f"f32[{width},{inner}]" not in text, "half of the MLP's features"
    assert f"f32[{width},2,8]" in text and f"f32[{width},4,8]" not in text, "half of the heads"


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (MeshConfig(1, 1, 1, 4), {}, r"model.num_kv_heads \(2\) must be a multiple of mesh.tp \(4\)"),
        (MeshConfig(1, 1, 1, 3), {}, r"model.num_heads \(4\) must be a multiple of mesh.tp \(3\)"),
        (
            MeshConfig(1, 1, 1, 2), {"model": dataclasses.replace(TINY, intermediate_size=49)},
            r"model.intermediate_size \(49\) must be a multiple of mesh.tp \(2\)",
        ),
        (
            MeshConfig(1, 1, 3, 2), {"seq_len": 27, "attention": AttentionConfig(block=9)},
            r"seq_len \(27\) must be a multiple of mesh.cp \* mesh.tp \(3 \* 2 = 6\)",
        ),
    ],
)  # fmt: skip
def test_what_ranks_cannot_share_is_refused(mesh: MeshConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_run(mesh, **changes)


def test_heads_must_be_those_of_all_ranks() -> None:
    mesh = make_mesh(MeshConfig(1, 2, 2, 2))
    with pytest.raises(ValueError, match=r"num_heads of the model \(4\) and of the pool spec \(4, times 2 ranks"):
        Qwen3(TINY, tiny_spec(), mesh, rngs=nnx.Rngs(0))
    spec = own_heads()
    plans = stack_plans([plan_pool([[64], [64]], spec)])
    q, k = jnp.zeros((2, 64, 2, 8)), jnp.zeros((2, 64, 1, 8))
    with pytest.raises(ValueError, match=r"q has shape \(2, 64, 2, 8\).*heads over 2 ranks of axis 'tp'.*64, 4, 8"):
        libra_attention(q, k, k, plans, spec=spec, mesh=mesh, heads_axis="tp")
    with pytest.raises(ValueError, match=r"heads_axis \('cp'\) must be another axis"):
        libra_attention(q, k, k, plans, spec=spec, mesh=mesh, heads_axis="cp")
    with pytest.raises(ValueError, match=r"the operator needs .*'tensor'"):
        libra_attention(q, k, k, plans, spec=spec, mesh=mesh, heads_axis="tensor")


def test_the_layer_has_the_heads_of_all_ranks() -> None:
    mesh = make_mesh(MeshConfig(1, 2, 2, 2))
    layer = LibraAttention(32, own_heads(), mesh, heads_axis="tp", rngs=nnx.Rngs(0))
    assert layer.q_proj.kernel.shape == (32, 4, 8) and layer.k_proj.kernel.shape == (32, 2, 8)
    plans = stack_plans([plan_pool([[64], [64]], own_heads())])
    x = jax.device_put(jnp.ones((2, 64, 32)), NamedSharding(mesh, PartitionSpec(("pool", "dp"), "cp")))
    out = jax.jit(lambda x, plans: layer(x, jnp.zeros((2, 64), jnp.int32), plans))(x, plans)
    assert out.shape == (2, 64, 32) and bool(jnp.isfinite(out).all())
