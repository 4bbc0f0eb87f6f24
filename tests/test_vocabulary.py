"""The chunked loss and the embedding against plain ones; what they hold of logits and of other ranks' parameters."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from libra_jax.attention import SEQUENCE_SPEC
from libra_jax.models.fsdp import gather, spread_spec
from libra_jax.models.vocabulary import chunked_cross_entropy_sum, cross_entropy_sum, look_up
from libra_jax.schedule import OVERLAP_OPTIONS, read_schedule
from libra_jax.targets import target_mesh
from libra_jax.train.config import MeshConfig
from libra_jax.train.mesh import make_mesh

TOKENS, WIDTH = 96, 16


def problem(words: int, dtype: str, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x (4, TOKENS, WIDTH), table (words, WIDTH), targets; a third of the tokens and one whole sequence have none."""
    rng = np.random.default_rng(seed)
    targets = np.where(rng.random((4, TOKENS)) < 0.66, rng.integers(0, words, (4, TOKENS)), -1)
    targets[2] = -1
    x = jnp.asarray(rng.standard_normal((4, TOKENS, WIDTH)), dtype)
    return x, jnp.asarray(rng.standard_normal((words, WIDTH)), jnp.float32), jnp.asarray(targets, jnp.int32)


def on_mesh(x: jax.Array, table: jax.Array, targets: jax.Array, mesh: jax.sharding.Mesh) -> Any:
    where = SEQUENCE_SPEC, spread_spec(table.shape, mesh), SEQUENCE_SPEC
    return tuple(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, table, targets), where, strict=True))


def lies_as_spread(array: jax.Array, mesh: jax.sharding.Mesh) -> bool:
    return array.sharding.is_equivalent_to(NamedSharding(mesh, spread_spec(array.shape, mesh)), array.ndim)


def plain(x: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
    logits = x.astype(jnp.float32) @ table.astype(x.dtype).astype(jnp.float32).T
    return cross_entropy_sum(logits, targets)[0]


@pytest.mark.parametrize("chunk", [1000, 48, 7, 1])
@pytest.mark.parametrize(("words", "dtype"), [(40, "float32"), (37, "float32"), (40, "bfloat16")])
def test_loss_and_gradients_equal_those_of_all_logits_at_once(chunk: int, words: int, dtype: str) -> None:
    mesh = make_mesh(MeshConfig(2, 2, 2))
    inputs = on_mesh(*problem(words, dtype), mesh)

    def chunked(x, table, targets):
        sums = chunked_cross_entropy_sum(x, table, targets, mesh, chunk=chunk)
        return sums.loss, sums.targets

    (loss, number), gradients = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(*inputs)
    expected, wanted = jax.value_and_grad(plain, (0, 1))(*problem(words, dtype))
    assert int(number) == int((np.asarray(inputs[2]) >= 0).sum()) > 0
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(loss, expected, rtol=1e-6 if dtype == "float32" else 1e-5)
    for got, want in zip(gradients, wanted, strict=True):
        want = np.asarray(want, np.float32)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=tolerance * np.abs(want).max())
    assert not np.asarray(gradients[0])[np.asarray(inputs[2]) < 0].any(), "tokens without a target have no gradient"
    assert lies_as_spread(gradients[1], mesh), "the table's gradient lies as the table does"


def test_padding_may_hold_anything() -> None:
    mesh = make_mesh(MeshConfig(2, 2, 2))
    x, table, targets = problem(40, "float32")
    far = jnp.where((targets < 0)[..., None], 1e30, x)
    losses = [
        jax.jit(lambda *a: chunked_cross_entropy_sum(*a, mesh, chunk=16))(*on_mesh(x, table, targets, mesh))[0]
        for x in (x, far)
    ]
    assert float(losses[0]) == float(losses[1])
    nothing = on_mesh(x, table, jnp.full_like(targets, -1), mesh)
    loss, _, number = jax.jit(lambda *a: chunked_cross_entropy_sum(*a, mesh, chunk=16))(*nothing)
    assert (float(loss), int(number)) == (0.0, 0)


@pytest.mark.parametrize("words", [40, 37])
def test_rows_are_looked_up_and_their_gradients_added_in_float32(words: int) -> None:
    mesh = make_mesh(MeshConfig(2, 2, 2))
    _, table, tokens = problem(words, "bfloat16")
    tokens = jnp.where(tokens < 0, 0, tokens)  # a third of them the same word: 1 + 1 + ... + 1 is lost in bfloat16
    _, table, tokens = on_mesh(jnp.zeros((4, TOKENS, WIDTH)), table, tokens, mesh)
    rows = jax.jit(lambda table: look_up(table, tokens, mesh, jnp.dtype("bfloat16")))
    np.testing.assert_array_equal(rows(table), np.asarray(table.astype(jnp.bfloat16))[np.asarray(tokens)])
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(rows(table).astype(jnp.float32))))(table)
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=words)
    assert counts.max() > 256 / 2
    np.testing.assert_array_equal(gradient, np.broadcast_to(counts[:, None], (words, WIDTH)).astype(np.float32))


def test_gathered_weights_are_rounded_and_norms_are_not() -> None:
    mesh = make_mesh(MeshConfig(2, 2, 2))
    weights = {"kernel": jnp.full((16, 3), 1 + 2**-12), "scale": jnp.full((16,), 1 + 2**-12)}
    weights = jax.tree.map(lambda w: jax.device_put(w, NamedSharding(mesh, spread_spec(w.shape, mesh))), weights)
    whole = jax.jit(lambda w: gather(w, mesh, jnp.dtype("bfloat16")))(weights)
    assert float(whole["kernel"][0, 0]) == 1 and float(whole["scale"][0]) == 1 + 2**-12
    assert all(w.dtype == jnp.float32 for w in whole.values())
    back = jax.jit(jax.grad(lambda w: sum(jnp.sum(x) for x in gather(w, mesh, jnp.dtype("bfloat16")).values())))
    assert all(lies_as_spread(gradient, mesh) for gradient in back(weights).values())


def test_compiled_for_a_gpu_no_rank_holds_more_logits_than_a_chunk() -> None:
    mesh, words, width, tokens, chunk = target_mesh("h100", (2, 2, 2), ("pool", "dp", "cp")), 4096, 256, 8192, 512

    def lying(shape, dtype, where):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    x = lying((4, tokens, width), jnp.bfloat16, SEQUENCE_SPEC)
    table = lying((words, width), jnp.float32, spread_spec((words, width), mesh))
    targets = lying((4, tokens), jnp.int32, SEQUENCE_SPEC)

    def loss(x, table, targets):
        sums = chunked_cross_entropy_sum(x, table, targets, mesh, chunk=chunk)
        return sums.loss, sums.targets

    lowered = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(x, table, targets)
    text = lowered.compile(compiler_options=OVERLAP_OPTIONS).as_text()
    assert not re.search(rf"\[{words},\d\d\d\d,|\[(?:1,)?{tokens // 2},{words}\]", text)
    assert f"[{chunk},{words}]" in text
    kinds = {(e.kind, e.bytes) for e in read_schedule(text) if e.bytes > 1024}
    assert kinds == {("all-gather", words * width * 2), ("reduce-scatter", words * width * 4)}
