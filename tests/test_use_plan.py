"""The plan that `use_plan` hands to layers: nesting, threads, and jax's and flax's transformations and caches."""

from __future__ import annotations

import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers_base import (
    BATCHES,
    FN,
    LENGTHS,
    MESH,
    SPEC,
    LinenBlock,
    NnxBlock,
    assert_trees_close,
    dense_attention,
    hidden,
    loss_of,
    make_spec,
    nnx_attention,
)
from operator_base import make_plans

import libra_jax
from libra_jax import layers
from libra_jax.layers import attention_fn, current_plans, use_plan

pytestmark = pytest.mark.filterwarnings("ignore:use_plan was entered with")  # many small plans in one process


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
