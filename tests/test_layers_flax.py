"""`attention_fn` in unmodified flax blocks (nnx and linen), the plan that `use_plan` hands it through jax's and flax's
transformations, and `LibraAttention` against flax's own norm, RoPE and a dense mask."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from operator_base import make_mesh, make_plans

import libra_jax
from libra_jax import layers
from libra_jax.attention import SEQUENCE_SPEC
from libra_jax.layers import LibraAttention, RMSNorm, attention_fn, current_plans, rotary, use_plan
from libra_jax.spec import PoolSpec

pytestmark = pytest.mark.filterwarnings("ignore:use_plan was entered with")  # many small plans in one process

S, FEATURES = 64, 32
BATCHES = [[[64], [9, 1, 30]], [[20, 44], [7] * 9], [[5], [33, 31]]]
LENGTHS = BATCHES[0]


def make_spec(heads=4, kv_heads=2, **others) -> PoolSpec:
    fields = {"seq_len": S, "head_dim": 8, "block": 8, "dtype": "float32"} | others
    return PoolSpec(pool_size=2, cp=2, num_heads=heads, num_kv_heads=kv_heads, **fields)


SPEC = make_spec()
MESH = make_mesh(1, 2, 2)
FN = attention_fn(SPEC, mesh=MESH)


def dense_attention(lengths):
    """What a block has without Libra: flax's way of calling, and a dense mask of the documents."""
    ids = oracle.segments(lengths, S)
    visible, real = jnp.asarray(oracle.visibility(ids)[:, None]), jnp.asarray(ids > 0)[:, :, None, None]

    def dense(query, key, value, *, mask=None, is_causal=True, deterministic=True, dtype=None, **_):
        assert mask is None and is_causal and deterministic
        return jnp.where(real, jax.nn.dot_product_attention(query, key, value, mask=visible), 0)

    return dense


def hidden(seed: int, sequences: int = 2) -> jax.Array:
    x = np.random.default_rng(seed).standard_normal((sequences, S, FEATURES)).astype(np.float32)
    return jnp.asarray(x)


def assert_trees_close(got, want, tolerance=2e-5) -> None:
    (got, structure), (want, other) = (jax.tree.flatten(tree) for tree in (got, want))
    assert structure == other and got
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=tolerance * max(1.0, float(jnp.abs(w).max())), rtol=0)


# Stock transformer blocks, as a flax user writes them. Nothing in them knows of Libra.


class NnxBlock(nnx.Module):
    def __init__(self, attention_fn, *, num_kv_heads=2, normalize_qk=True, rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(FEATURES, rngs=rngs), nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=FEATURES, num_kv_heads=num_kv_heads, normalize_qk=normalize_qk, decode=False,
            attention_fn=attention_fn, rngs=rngs,
        )  # fmt: skip
        self.up, self.down = nnx.Linear(FEATURES, 48, rngs=rngs), nnx.Linear(48, FEATURES, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class LinenBlock(linen.Module):
    attention_fn: object

    @linen.compact
    def __call__(self, x):
        attention = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=self.attention_fn)
        x = x + attention(linen.LayerNorm()(x))
        return x + linen.Dense(FEATURES)(linen.gelu(linen.Dense(48)(linen.LayerNorm()(x))))


def loss_of(y, lengths) -> jax.Array:
    """Of the real tokens only: what flax's layers do to padding is nobody's business."""
    real = jnp.asarray(oracle.segments(lengths, S) > 0)[:, :, None]
    return jnp.sum(jnp.where(real, jnp.sin(y), 0))


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


def nnx_attention(**keywords):
    return nnx.MultiHeadAttention(**{
        "num_heads": 4, "in_features": FEATURES, "num_kv_heads": 2, "decode": False, "attention_fn": FN,
        "rngs": nnx.Rngs(0),
    } | keywords)  # fmt: skip


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


# use_plan.


def mark(x):
    """A stand-in for a layer: reads the plan, so that a plan of another batch shows."""
    return x + jnp.sum(current_plans(SPEC).first_visible).astype(x.dtype)


def marks() -> list[float]:
    return [float(np.asarray(make_plans(lengths, SPEC).first_visible).sum(dtype=np.int32)) for lengths in BATCHES]


def test_outside_of_use_plan_the_error_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"outside of use_plan(?s:.*)with libra_jax.use_plan\(plans\)"):
        nnx_attention()(hidden(4), is_causal=True)


def test_use_plan_nests_and_restores_also_after_an_error():
    first, second = (make_plans(lengths, SPEC) for lengths in BATCHES[:2])
    with use_plan(first) as entered:
        assert entered is first and current_plans(SPEC) is first
        with pytest.raises(ZeroDivisionError), use_plan(second):
            assert current_plans(SPEC) is second
            raise ZeroDivisionError
        assert current_plans(SPEC) is first
    with pytest.raises(RuntimeError):
        current_plans(SPEC)


def test_layers_of_different_specs_each_read_their_own_plan():
    windowed = make_spec(window=8)
    whole_plans, window_plans = make_plans(LENGTHS, SPEC), make_plans(LENGTHS, windowed)
    with use_plan(whole_plans), use_plan(window_plans):
        assert current_plans(SPEC) is whole_plans
        assert current_plans(windowed) is window_plans
        with pytest.raises(ValueError, match=r"block 8 there and 16 here, window 8 there and None here"):
            current_plans(make_spec(block=16))


def test_use_plan_wants_stacked_plans():
    with (
        pytest.raises(TypeError, match=r"Plan: join plans with stack_plans"),
        use_plan(libra_jax.plan_pool(LENGTHS, SPEC)),
    ):
        pass
    with pytest.raises(TypeError, match=r"got dict"), use_plan({}):
        pass


def test_threads_do_not_see_each_others_plans():
    plans = [make_plans(lengths, SPEC) for lengths in BATCHES[:2]]
    meet, seen = threading.Barrier(2), {}

    def work(i):
        with pytest.raises(RuntimeError):  # nothing comes from the thread that started this one
            current_plans(SPEC)
        with use_plan(plans[i]):
            meet.wait(timeout=30)
            seen[i] = current_plans(SPEC) is plans[i]
            meet.wait(timeout=30)

    with use_plan(plans[0]):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {0: True, 1: True}


def test_plans_as_an_argument_serve_all_batches_with_one_compilation():
    """The example of `use_plan`'s docstring."""
    model = LinenBlock(attention_fn(make_spec(4, 4), mesh=MESH))
    params = LinenBlock(dense_attention(LENGTHS)).init(jax.random.key(0), hidden(0))

    @jax.jit
    def loss(params, x, plans):
        with use_plan(plans):
            return model.apply(params, x).mean()

    for lengths in BATCHES:
        got = loss(params, hidden(5), make_plans(lengths, make_spec(4, 4)))
        want = LinenBlock(dense_attention(lengths)).apply(params, hidden(5)).mean()
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert loss._cache_size() == 1


def test_plans_as_constants_are_right_too_and_a_warning_counts_them(monkeypatch):
    step = jax.jit(mark)  # one function, traced under different plans
    all_plans = [make_plans(lengths, SPEC) for lengths in BATCHES]
    monkeypatch.setattr(layers, "_constant_plans", iter(range(2, 100)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plans, want in zip(all_plans[:2], marks(), strict=False):
            with use_plan(plans):
                assert step(0.0) == want
    with pytest.warns(UserWarning, match=r"4 different plans(?s:.*)argument"), use_plan(all_plans[2]):
        assert step(0.0) == marks()[2]
    traced = step._cache_size()
    with use_plan(all_plans[0]):  # the same plan again: nothing is compiled
        assert step(0.0) == marks()[0]
    assert step._cache_size() == traced == 3


def body(x, _):
    return mark(x), None


class Marked(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return mark(x) * self.weight[...]


# Functions made once, as layers are: jax and flax cache what they traced, and the plan must not be part of that.
CACHED = {
    "jit": jax.jit(mark),
    "checkpoint": jax.checkpoint(mark),
    "scan": lambda x: jax.lax.scan(body, x, None, length=1)[0],
    "cond": lambda x: jax.lax.cond(x.sum() < 1e30, mark, mark, x),
    "nnx.jit": functools.partial(nnx.jit(Marked.__call__)),
    "nnx.remat": functools.partial(nnx.remat(Marked.__call__)),
    "nnx.scan": nnx.scan(Marked.__call__, in_axes=(0, nnx.Carry), out_axes=nnx.Carry),
}


def call_cached(name, x):
    if name == "nnx.scan":
        return CACHED[name](nnx.vmap(lambda _: Marked())(jnp.arange(1)), x)
    return CACHED[name](Marked(), x) if name.startswith("nnx") else CACHED[name](x)


@pytest.mark.parametrize("name", list(CACHED))
def test_no_cached_function_keeps_the_plan_it_was_traced_with(name):
    plans = [make_plans(lengths, SPEC) for lengths in BATCHES]
    # Two jitted functions (a training and an evaluation step) share the layer; each has its own tracer for the plan.
    for run, want in zip(plans[:2], marks(), strict=False):

        @jax.jit
        def outer(x, plans):
            with use_plan(plans):
                return call_cached(name, x) + 0 * jax.grad(lambda x: call_cached(name, x).sum())(x)

        assert outer(jnp.zeros(3), run)[0] == want
    # And without jit around: arrays.
    for run, want in zip(plans, marks(), strict=True):
        with use_plan(run):
            assert call_cached(name, jnp.zeros(3))[0] == want


def test_layers_scanned_and_recomputed_read_the_plan_of_the_batch():
    """nnx.scan over stacked blocks, each under nnx.remat, against the blocks one after the other with a dense mask."""

    def build(attention_fn):
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(key):
            return NnxBlock(attention_fn, rngs=nnx.Rngs(key))

        return stack(jax.random.split(jax.random.key(0), 2))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through_layers(x, block):
        return nnx.remat(lambda block, x: block(x))(block, x)

    @nnx.jit
    def gradients(blocks, x, plans):
        with use_plan(plans):
            return nnx.value_and_grad(lambda blocks: loss_of(through_layers(x, blocks), LENGTHS))(blocks)

    x, plans = hidden(6), make_plans(LENGTHS, SPEC)
    got = gradients(build(FN), x, plans)
    assert_trees_close(got, gradients(build(dense_attention(LENGTHS)), x, plans))


# LibraAttention.


def test_rms_norm_is_flax_rms_norm():
    x = hidden(7)
    norm, flax_norm = RMSNorm(FEATURES, epsilon=1e-5), nnx.RMSNorm(FEATURES, epsilon=1e-5, rngs=nnx.Rngs(0))
    norm.scale[...] = flax_norm.scale[...] = jnp.linspace(0.5, 2, FEATURES)
    np.testing.assert_allclose(norm(x), flax_norm(x), atol=2e-6)
    low = norm(x.astype(jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), norm(x), atol=0.03)


def test_rotary_is_flax_rope_document_by_document():
    x = jnp.asarray(np.random.default_rng(8).standard_normal((2, S, 3, 8)), jnp.float32)
    ids = oracle.segments(LENGTHS, S)
    got = rotary(x, jnp.asarray(oracle.restarting_positions(ids)), theta=1000.0)
    rope = nnx.RoPE(theta=1000.0)
    for n, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            want = jax.vmap(rope, in_axes=-2, out_axes=-2)(x[n, start : start + length])
            np.testing.assert_allclose(got[n, start : start + length], want, atol=1e-5)
            start += length


def test_rotary_turns_in_float32_whatever_the_type():
    x = jnp.asarray(np.random.default_rng(9).standard_normal((1, 4, 1, 64)), jnp.bfloat16)
    positions = jnp.array([[0, 4097, 131071, 262143]], jnp.int32)
    exact = rotary(x.astype(jnp.float32), positions, 1e6)
    assert rotary(x, positions, 1e6).dtype == jnp.bfloat16
    np.testing.assert_allclose(rotary(x, positions, 1e6).astype(jnp.float32), exact, atol=0.02)
    half = np.arange(32, dtype=np.float64)
    angle = np.asarray(positions, np.float64)[0, :, None] * 1e6 ** (-half / 32)
    low, high = np.asarray(x, np.float64)[0, :, 0, :32], np.asarray(x, np.float64)[0, :, 0, 32:]
    turned = np.concatenate(
        [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], -1
    )
    np.testing.assert_allclose(exact[0, :, 0], turned, atol=0.06)  # float32 angles of 2.6e5 resolve 0.016


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
