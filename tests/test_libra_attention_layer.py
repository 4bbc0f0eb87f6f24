"""`LibraAttention` against flax's own norm, RoPE and a dense mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from layers_base import (
    FEATURES,
    LENGTHS,
    MESH,
    SPEC,
    S,
    assert_trees_close,
    dense_attention,
    hidden,
    loss_of,
    make_spec,
)
from operator_base import make_mesh, make_plans

from libra_jax.attention import SEQUENCE_SPEC
from libra_jax.layers import LibraAttention, RMSNorm, use_plan

pytestmark = pytest.mark.filterwarnings("ignore:use_plan was entered with")  # many small plans in one process


def test_rms_norm_is_flax_rms_norm():
    x = hidden(7)
    norm, flax_norm = RMSNorm(FEATURES, epsilon=1e-5), nnx.RMSNorm(FEATURES, epsilon=1e-5, rngs=nnx.Rngs(0))
    norm.scale[...] = flax_norm.scale[...] = jnp.linspace(0.5, 2, FEATURES)
    np.testing.assert_allclose(norm(x), flax_norm(x), atol=2e-6)
    low = norm(x.astype(jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), norm(x), atol=0.03)


def from_flax_parts(layer: LibraAttention, x, positions, lengths, theta):
    """The same layer from flax's RMSNorm, plain products, RoPE at given positions and a dense mask."""
    project = functools.partial(jnp.einsum, "nsf,fhd->nshd")

    def norm(x, ours):
        stock = nnx.RMSNorm(x.shape[-1], epsilon=1e-6, rngs=nnx.Rngs(0))
        stock.scale[...] = ours.scale[...]
        return stock(x)

    def turn(x):
        rope = nnx.RoPE(theta=theta)
        return jax.vmap(lambda x, p: jax.vmap(lambda x: rope(x, p.astype(jnp.float32)), in_axes=1, out_axes=1)(x))(
            x, positions
        )

    q = turn(norm(project(x, layer.q_proj.kernel[...]), layer.q_norm))
    k = turn(norm(project(x, layer.k_proj.kernel[...]), layer.k_norm))
    v = project(x, layer.v_proj.kernel[...])
    out = dense_attention(lengths)(q, k, v)
    return jnp.einsum("nshd,hdf->nsf", out, layer.o_proj.kernel[...])


def test_libra_attention_layer_matches_flax_parts():
    layer = LibraAttention(FEATURES, SPEC, MESH, rope_theta=5000.0, rngs=nnx.Rngs(2))
    layer.q_norm.scale[...] = jnp.linspace(0.5, 1.5, 8)
    layer.k_norm.scale[...] = jnp.linspace(1.5, 0.7, 8)
    x, plans = hidden(10), make_plans(LENGTHS, SPEC)
    positions = jnp.asarray(oracle.restarting_positions(oracle.segments(LENGTHS, S)))

    def gradients(forward):
        loss = lambda layer, x: loss_of(forward(layer, x), LENGTHS)  # noqa: E731
        return nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(layer, x)

    want = gradients(lambda layer, x: from_flax_parts(layer, x, positions, LENGTHS, 5000.0))
    assert_trees_close(gradients(lambda layer, x: layer(x, positions, plans)), want, tolerance=5e-5)

    @nnx.jit
    def both_ways(layer, x, positions, plans):
        with use_plan(plans):
            return layer(x, positions), layer(x, positions, plans)

    by_context, by_argument = both_ways(layer, x, positions, plans)
    assert jnp.array_equal(by_context, by_argument)


def test_libra_attention_layer_has_qwen3_parameters_and_no_more():
    spec = make_spec(4, 2, v_head_dim=6)
    layer = LibraAttention(FEATURES, spec, MESH, rngs=nnx.Rngs(0))
    shapes = {"/".join(map(str, path)): p.shape for path, p in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert shapes == {
        "q_proj/kernel": (FEATURES, 4, 8),
        "k_proj/kernel": (FEATURES, 2, 8),
        "v_proj/kernel": (FEATURES, 2, 6),
        "o_proj/kernel": (4, 6, FEATURES),
        "q_norm/scale": (8,),
        "k_norm/scale": (8,),
    }
    with use_plan(make_plans(LENGTHS, spec)):
        assert jax.eval_shape(layer, hidden(11), jnp.zeros((2, S), jnp.int32)).shape == (2, S, FEATURES)


def test_libra_attention_layer_computes_in_its_own_dtype():
    spec = make_spec(dtype="bfloat16")
    plans, positions = make_plans(LENGTHS, spec), jnp.zeros((2, S), jnp.int32)
    layer = LibraAttention(FEATURES, spec, MESH, rngs=nnx.Rngs(0))
    assert layer.q_proj.kernel[...].dtype == jnp.float32
    assert jax.eval_shape(layer, hidden(12), positions, plans).dtype == jnp.bfloat16
    wide = LibraAttention(FEATURES, spec, MESH, dtype="float32", param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert wide.q_proj.kernel[...].dtype == jnp.bfloat16
    assert jax.eval_shape(wide, hidden(12), positions, plans).dtype == jnp.float32


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_kernel_metadata_shards_parameters_and_changes_no_result(explicit):
    mesh = make_mesh(1, 2, 2, explicit)
    x, plans = hidden(13), make_plans(LENGTHS, SPEC)
    positions = jnp.asarray(oracle.restarting_positions(oracle.segments(LENGTHS, S)))
    plain = LibraAttention(FEATURES, SPEC, MESH, rngs=nnx.Rngs(3))
    want = nnx.jit(lambda layer, *args: layer(*args))(plain, x, positions, plans)
    by_head = {} if explicit else {"out_sharding": PartitionSpec(None, "cp")}
    by_width = {} if explicit else {"out_sharding": PartitionSpec(None, None, "cp")}
    with jax.set_mesh(mesh):
        layer = LibraAttention(
            FEATURES, SPEC, mesh, kernel_metadata=by_head, out_kernel_metadata=by_width, rngs=nnx.Rngs(3)
        )
        if not explicit:
            assert layer.k_proj.kernel[...].sharding.spec == PartitionSpec(None, "cp")
            assert layer.o_proj.kernel[...].sharding.spec == PartitionSpec(None, None, "cp")
        home = NamedSharding(mesh, SEQUENCE_SPEC)
        x, positions = jax.device_put(x, home), jax.device_put(positions, home)
        got = nnx.jit(lambda layer, *args: layer(*args))(layer, x, positions, plans)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_libra_attention_layer_refuses_what_does_not_fit():
    layer = LibraAttention(FEATURES, SPEC, MESH, rngs=nnx.Rngs(0))
    positions = jnp.zeros((2, S), jnp.int32)
    with pytest.raises(ValueError, match=r"x \(2, 64, 16\)(?s:.*)features 32"):
        layer(hidden(0)[..., :16], positions)
    with pytest.raises(ValueError, match=r"positions \(2, 63\)(?s:.*)\(2, 64\)"):
        layer(hidden(0), positions[:, 1:])
    with pytest.raises(ValueError, match=r"positions \(float32\)"):
        layer(hidden(0), positions.astype(jnp.float32))
    with pytest.raises(RuntimeError, match="use_plan"):
        layer(hidden(0), positions)
    with pytest.raises(ValueError, match=r"head_dim \(7\) must be even"):
        LibraAttention(FEATURES, make_spec(head_dim=7), MESH, rngs=nnx.Rngs(0))
