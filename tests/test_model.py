"""Qwen3 against NumPy written from the published equations, one document at a time; loss against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
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

from libra_jax.models.qwen3 import QWEN3_0_6B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B, Qwen3, Qwen3Config
from libra_jax.models.vocabulary import cross_entropy_sum
from libra_jax.spec import PoolSpec
from libra_jax.train.config import MeshConfig
from libra_jax.train.mesh import make_mesh


@pytest.mark.parametrize(
    "config",
    [TINY, dataclasses.replace(TINY, tied_embeddings=True), TINY_MOE],
    ids=["untied", "tied", "mixture of experts"],
)
def test_logits_of_packed_sequences_equal_those_of_each_document_alone(config: Qwen3Config) -> None:
    spec = tiny_spec()
    mesh = make_mesh(MeshConfig(2, 2, 2))
    graph, params = random_params(config, spec, mesh)
    batch = batch_of(spec)
    logits = run(graph, params, batch)
    assert logits.shape == (4, 64, 64) and logits.dtype == np.float32 and np.isfinite(logits).all()
    assert_logits_of_documents_alone(logits, params, batch, config, LENGTHS)

    # Another token in one document: no bit of any other document moves.
    tokens = batch.tokens.copy()
    changed = slice(21, 24)  # the third document of sequence 1
    tokens[0, 1, changed] = (tokens[0, 1, changed] + 1) % config.vocab_size
    again = run(graph, params, dataclasses.replace(batch, tokens=tokens))
    differs = (again != logits).any(-1)
    assert differs[1, changed].all()
    differs[1, changed] = False
    assert not differs.any()


def test_bfloat16_stays_near_float32() -> None:
    mesh = make_mesh(MeshConfig(2, 2, 2))
    logits = {}
    for dtype in ("float32", "bfloat16"):
        spec = tiny_spec(dtype=dtype)
        graph, params = random_params(dataclasses.replace(TINY, compute_dtype=dtype), spec, mesh)
        logits[dtype] = run(graph, params, batch_of(spec))
    assert logits["bfloat16"].dtype == np.float32
    error = np.sqrt(((logits["bfloat16"] - logits["float32"]) ** 2).mean() / (logits["float32"] ** 2).mean())
    assert 0 < error < 0.03


def test_what_a_layer_keeps_for_the_backward_pass_changes_no_gradient() -> None:
    mesh, spec = make_mesh(MeshConfig(2, 2, 2)), tiny_spec()
    batch = batch_of(spec)

    def loss_and_gradients(remat: str) -> tuple[float, Any]:
        graph, params = random_params(dataclasses.replace(TINY, remat=remat), spec, mesh)

        @jax.jit
        def call(params: Any, plans: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                logits = nnx.merge(graph, params)(batch.tokens[0], batch.positions[0], plans)
                return cross_entropy_sum(logits, batch.targets[0])[0]

            return jax.value_and_grad(loss)(params)

        value, gradients = call(params, jax.tree.map(lambda x: x[0], batch.plans))
        return float(value), {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(gradients)}

    everything, expected = loss_and_gradients("none")
    little, gradients = loss_and_gradients("attention")
    assert little == pytest.approx(everything, rel=1e-6)
    for name, gradient in expected.items():
        largest = float(jnp.abs(gradient).max())
        assert largest > 0, name
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-5 * largest, err_msg=name)


@pytest.mark.parametrize(
    ("published", "config"),
    [
        (596_049_920, QWEN3_0_6B),
        (8_190_735_360, QWEN3_8B),
        (30_532_122_624, QWEN3_30B_A3B),
        (235_093_634_560, QWEN3_235B_A22B),
    ],
    ids=["0.6B", "8B", "30B-A3B", "235B-A22B"],
)
def test_parameter_counts_are_the_published_ones(published: int, config: Qwen3Config) -> None:
    spec = PoolSpec(4096, 1, 1, config.num_heads, config.num_kv_heads, config.head_dim)
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    _, state = nnx.split(nnx.eval_shape(lambda: Qwen3(config, spec, mesh, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == config.num_parameters == published


def test_loss_sum_is_that_of_a_plain_softmax_over_the_tokens_that_have_a_target() -> None:
    rng = np.random.default_rng(3)
    logits = (5 * rng.standard_normal((3, 7, 11))).astype(np.float32)
    targets = rng.integers(-1, 11, (3, 7)).astype(np.int32)
    targets[1] = -1
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(-1, keepdims=True)
    rows, columns = np.nonzero(targets >= 0)
    expected = -np.log(shares[rows, columns, targets[rows, columns]]).sum()
    loss, _, number = cross_entropy_sum(jnp.asarray(logits), jnp.asarray(targets))
    assert float(loss) == pytest.approx(expected, rel=1e-6) and int(number) == len(rows)

    none = jnp.full((3, 7), -1)
    loss, _, number = cross_entropy_sum(jnp.asarray(logits), none)
    gradient = jax.grad(lambda logits: cross_entropy_sum(logits, none)[0])(jnp.asarray(logits))
    assert float(loss) == 0 and int(number) == 0 and not np.asarray(gradient).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, r"num_heads \(5\) must be a multiple of num_kv_heads \(2\)"),
        ({"head_dim": 7}, r"head_dim \(7\) must be even"),
        ({"num_layers": 0}, r"num_layers \(0\) must be at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_a_model_and_a_pool_of_other_heads_are_refused() -> None:
    mesh = make_mesh(MeshConfig(2, 2, 2))
    with pytest.raises(ValueError, match=r"num_heads of the model \(4\) and of the pool spec \(8\) must be equal"):
        Qwen3(TINY, tiny_spec(num_heads=8), mesh, rngs=nnx.Rngs(0))


def test_what_is_minimised_is_the_cross_entropy_with_the_weighted_rest() -> None:
    """Of all tokens with a target: the z-loss from the logits themselves, the load balance from the routers' words."""
    moe = dataclasses.replace(TINY_MOE.moe, balance_loss=0.25)
    config, spec = dataclasses.replace(TINY_MOE, z_loss=0.5, moe=moe), tiny_spec()
    mesh = make_mesh(MeshConfig(2, 2, 2))
    graph, params = random_params(config, spec, mesh)
    batch = batch_of(spec)
    logits = run(graph, params, batch).astype(np.float64)
    plans = jax.tree.map(lambda x: x[0], batch.plans)
    arrays = batch.tokens[0], batch.targets[0], batch.positions[0]
    call = jax.jit(lambda params, plans: nnx.merge(graph, params).loss_sum(*arrays, plans))
    total, sums = call(params, plans)
    has_target = batch.targets[0] >= 0
    normal = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.maximum(batch.targets[0], 0)[..., None], -1)[..., 0]
    number = has_target.sum()
    assert int(sums["targets"]) == number
    np.testing.assert_allclose(sums["loss"], (normal - picked)[has_target].sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["z_loss"], (normal**2)[has_target].sum(), rtol=1e-5)
    balance = float(sums["balance_loss"]) / number
    assert 2 <= balance <= 8  # experts_per_token if all are used alike, num_experts if always the same
    np.testing.assert_allclose(total, sums["loss"] + 0.5 * sums["z_loss"] + 0.25 * sums["balance_loss"], rtol=1e-6)
