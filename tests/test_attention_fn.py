"""`attention_fn` in unmodified flax blocks, nnx and linen, against flax with a dense mask; and what it refuses."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from layers_base import (
    FEATURES,
    FN,
    LENGTHS,
    MESH,
    SPEC,
    LinenBlock,
    NnxBlock,
    S,
    assert_trees_close,
    dense_attention,
    hidden,
    loss_of,
    make_spec,
    nnx_attention,
)
from operator_base import make_plans

from libra_jax.layers import attention_fn, use_plan

pytestmark = pytest.mark.filterwarnings("ignore:use_plan was entered with")  # many small plans in one process


@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_nnx_block_with_only_its_attention_fn_swapped(num_kv_heads):
    spec = make_spec(4, num_kv_heads)
    pooled = NnxBlock(attention_fn(spec, mesh=MESH), num_kv_heads=num_kv_heads, rngs=nnx.Rngs(1))
    dense = NnxBlock(dense_attention(LENGTHS), num_kv_heads=num_kv_heads, rngs=nnx.Rngs(1))
    x, plans = hidden(0), make_plans(LENGTHS, spec)

    @nnx.jit
    def gradients(block, x, plans):
        with use_plan(plans):
            return nnx.value_and_grad(lambda block, x: loss_of(block(x), LENGTHS), argnums=(0, 1))(block, x)

    assert_trees_close(gradients(pooled, x, plans), gradients(dense, x, plans))


def test_linen_block_with_only_its_attention_fn_swapped():
    spec = make_spec(4, 4)  # linen has a key/value head for each query head
    pooled, dense = LinenBlock(attention_fn(spec, mesh=MESH)), LinenBlock(dense_attention(LENGTHS))
    x, plans = hidden(1), make_plans(LENGTHS, spec)
    params = dense.init(jax.random.key(0), x)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(block, params, x, plans):
        with use_plan(plans):
            return jax.value_and_grad(lambda params, x: loss_of(block.apply(params, x), LENGTHS), (0, 1))(params, x)

    assert_trees_close(gradients(pooled, params, x, plans), gradients(dense, params, x, plans))
    with use_plan(plans):  # init traces the model, too
        same = jax.eval_shape(pooled.init, jax.random.key(0), x)
    assert jax.tree.map(lambda p: p.shape, same) == jax.tree.map(lambda p: p.shape, params)


def test_bfloat16_modules_give_bfloat16():
    spec = make_spec(4, 4, dtype="bfloat16")
    x, plans = hidden(2).astype(jnp.bfloat16), make_plans(LENGTHS, spec)
    fn = attention_fn(spec, mesh=MESH)
    in_nnx = nnx.MultiHeadAttention(4, FEATURES, dtype=jnp.bfloat16, decode=False, attention_fn=fn, rngs=nnx.Rngs(0))
    in_linen = linen.MultiHeadDotProductAttention(num_heads=4, dtype=jnp.bfloat16, attention_fn=fn)
    with use_plan(plans):
        assert jax.eval_shape(functools.partial(in_nnx, is_causal=True), x).dtype == jnp.bfloat16
        assert jax.eval_shape(in_linen.init_with_output, jax.random.key(0), x)[0].dtype == jnp.bfloat16


def test_modules_that_hold_an_attention_fn_stay_comparable():
    assert attention_fn(make_spec(), mesh=MESH) == FN and hash(attention_fn(make_spec(), mesh=MESH)) == hash(FN)
    assert attention_fn(SPEC, mesh=MESH, soft_cap=2.0) != FN
    first, second = (nnx.graphdef(NnxBlock(attention_fn(SPEC, mesh=MESH), rngs=nnx.Rngs(0))) for _ in range(2))
    assert first == second and hash(first) == hash(second)


# Every keyword that flax passes is named.


class _TakesEverything:
    def __contains__(self, _name):
        return True


def test_every_keyword_that_flax_passes_is_in_the_signature():
    passed: dict[str, set[str]] = {"nnx": set(), "linen": set()}

    def spy(which, query, key, value, **keywords):
        passed[which] |= set(keywords)
        return query

    class LinenSpy:
        __signature__ = type("S", (inspect.Signature,), {"parameters": _TakesEverything()})()

        def __call__(self, *arrays, **keywords):
            return spy("linen", *arrays, **keywords)

    x = hidden(3)
    attention = nnx.MultiHeadAttention(
        4, FEATURES, decode=False, attention_fn=functools.partial(spy, "nnx"), rngs=nnx.Rngs(0)
    )
    attention(x, is_causal=True, input_positions=jnp.zeros((2, S), jnp.int32))
    linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=LinenSpy()).init(
        jax.random.key(0), x, sow_weights=True
    )
    named = set(inspect.signature(FN).parameters)
    assert {"mask", "deterministic", "is_causal", "input_positions"} <= passed["nnx"] <= named
    assert {"mask", "deterministic", "module", "precision"} <= passed["linen"] <= named


# What pooled attention does not do is refused, through the modules as a user would meet it.


def linen_attention(**keywords):
    fn = attention_fn(make_spec(4, 4), mesh=MESH)
    return linen.MultiHeadDotProductAttention(**{"num_heads": 4, "attention_fn": fn} | keywords)


def call_linen(module, **keywords):
    return module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, hidden(4), **keywords)


def test_dense_masks_are_refused():
    mask = nnx.make_causal_mask(jnp.ones((2, S)))
    way_out = r"mask of shape \(2, 1, 64, 64\)(?s:.*)Drop mask=(?s:.*)is_causal=True"
    with pytest.raises(ValueError, match=way_out):
        nnx_attention()(hidden(4), mask=mask)
    with pytest.raises(ValueError, match=way_out):
        call_linen(linen_attention(), mask=mask)
    q, k, v = jnp.ones((2, S, 4, 8)), jnp.ones((2, S, 2, 8)), jnp.ones((2, S, 2, 8))
    with pytest.raises(ValueError, match=r"bias of shape \(2, 4, 64, 64\)"):
        FN(q, k, v, bias=jnp.ones((2, 4, S, S)))


def test_attention_to_later_tokens_is_refused():
    """nnx's own default is is_causal=False: a layer called without it sees later tokens, and would not here."""
    with pytest.raises(ValueError, match=r"is_causal is False(?s:.*)is_causal=True"):
        nnx_attention()(hidden(4))


def test_dropout_is_refused_unless_deterministic():
    way_out = r"dropout_rate is 0.1(?s:.*)dropout_rate=0.0(?s:.*)deterministic=True"
    with pytest.raises(ValueError, match=way_out):
        nnx_attention(dropout_rate=0.1, deterministic=False)(hidden(4), is_causal=True)
    with pytest.raises(ValueError, match=way_out):
        call_linen(linen_attention(dropout_rate=0.1, deterministic=False))
    with use_plan(make_plans(LENGTHS, SPEC)):
        off = functools.partial(nnx_attention(dropout_rate=0.1, deterministic=True), is_causal=True)
        assert jax.eval_shape(off, hidden(4)).shape == (2, S, FEATURES)


def test_decoding_is_refused():
    way_out = r"\(2, 1, 4, 8\)(?s:.*)\(2, 64, [24], 8\)(?s:.*)decoding(?s:.*)dot_product_attention"
    module = nnx_attention(decode=True)
    module.init_cache((2, S, FEATURES))
    with pytest.raises(ValueError, match=way_out):
        module(hidden(4)[:, :1])
    module = linen_attention(decode=True)
    with use_plan(make_plans(LENGTHS, make_spec(4, 4))):
        variables = jax.eval_shape(lambda: call_linen(module))
    with pytest.raises(ValueError, match=way_out):
        jax.eval_shape(lambda v: module.apply(v, hidden(4)[:, :1], mutable=["cache"]), variables)


def test_weights_positions_and_own_einsums_are_refused():
    with pytest.raises(ValueError, match=r"sow_weights"):
        nnx_attention()(hidden(4), is_causal=True, sow_weights=True)
    with pytest.raises(ValueError, match=r"sow_weights"):
        call_linen(linen_attention(), sow_weights=True)
    with pytest.raises(ValueError, match=r"input_positions(?s:.*)rotary(?s:.*)LibraAttention"):
        nnx_attention()(hidden(4), is_causal=True, input_positions=jnp.zeros((2, S), jnp.int32))
    own = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum, "attn_weights_value_einsum_cls": lambda: jnp.einsum}
    with pytest.raises(ValueError, match=r"qk_attn_weights_einsum"):
        call_linen(linen_attention(**own))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (make_spec(8, 2), r"query heads: the module gives 4, PoolSpec.num_heads says 8"),
        (make_spec(4, 1), r"key heads: the module gives 2, PoolSpec.num_kv_heads says 1"),
        (make_spec(head_dim=16), r"query head: the module gives 8, PoolSpec.head_dim says 16"),
        (make_spec(seq_len=128), r"tokens in a sequence: the module gives 64, PoolSpec.seq_len says 128"),
    ],
    ids=["heads", "kv heads", "head_dim", "seq_len"],
)
def test_a_module_of_another_shape_than_the_spec(spec, message):
    with pytest.raises(ValueError, match=message):
        nnx_attention(attention_fn=attention_fn(spec, mesh=MESH))(hidden(4), is_causal=True)


def test_linen_needs_as_many_key_heads_as_query_heads():
    with pytest.raises(ValueError, match=r"linen has one(?s:.*)gives 4, PoolSpec.num_kv_heads says 2"):
        call_linen(linen_attention(attention_fn=FN))


def test_arrays_of_other_axes_types_or_number_of_sequences():
    q, k, v = jnp.ones((2, S, 4, 8)), jnp.ones((2, S, 2, 8)), jnp.ones((2, S, 2, 8))
    with pytest.raises(ValueError, match=r"\(1, 2, 64, 4, 8\)(?s:.*)4 axes"):
        FN(q[None], k[None], v[None])
    with pytest.raises(ValueError, match=r"float32(?s:.*)bfloat16"):
        FN(q, k, v.astype(jnp.bfloat16))
    with use_plan(make_plans(LENGTHS, SPEC)), pytest.raises(ValueError, match=r"\(4, 64, 4, 8\)(?s:.*)\(2, 64, 4, 8\)"):
        FN(*(jnp.concatenate([x, x]) for x in (q, k, v)))
