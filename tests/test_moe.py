"""The mixture of experts against a dense one in float64, wherever experts are; its statistics; what it exchanges."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import moe_base as base
import numpy as np
import operator_base
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from moe_base import INNER, TOKENS, WIDTH, assert_close, compiled, dense, experts_of, random_layer

from libra_jax.attention import SEQUENCE_SPEC
from libra_jax.models.fsdp import spread_spec
from libra_jax.models.grouped import Experts
from libra_jax.models.moe import (
    MixtureOfExperts,
    MoEConfig,
    Statistics,
    expert_spec,
    load_balancing_loss,
    mixture_of_experts,
)
from libra_jax.schedule import read_schedule
from libra_jax.targets import target_mesh

GATHERED, SPREAD = MoEConfig(8, 2, INNER), MoEConfig(8, 2, INNER, experts="spread")
WAYS = [
    (GATHERED, (2, 2, 2), None),
    (SPREAD, (2, 2, 2), None),
    (dataclasses.replace(SPREAD, capacity=0.1), (1, 4, 2), "all_to_all"),
    (dataclasses.replace(SPREAD, capacity=50.0), (4, 2, 1), "ragged"),  # all in one round
]
IDS = ["gathered", "spread-2-2-2", "spread-1-4-2", "spread-4-2-1"]


def lengths_for(mesh: tuple[int, int, int], seed: int = 0) -> tuple[int, ...]:
    """Real tokens of each sequence: none, one, all, or a few, so that ranks and pools are left with padding alone."""
    rng = np.random.default_rng(seed)
    return tuple(int(n) for n in rng.choice([0, 1, TOKENS, 3, 11], max(4, mesh[0] * mesh[1])))


def one_favourite(layer: base.Layer, expert: int) -> base.Layer:
    """All tokens' first choice is one expert, by so much that its factor is nearly 1."""
    router, x = layer.router.copy(), layer.x.copy()
    x[..., 0], router[0, expert] = np.abs(x[..., 0]) + 1, 50
    return layer._replace(x=x, router=router)


@pytest.mark.parametrize(("config", "mesh", "transport"), WAYS, ids=IDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["any", "ties", "favourite", "all the same", "nothing"]))
def test_output_and_gradients_equal_the_dense_mixture(config, mesh, transport, seed: int, kind: str) -> None:
    lengths = (0,) * max(4, mesh[0] * mesh[1]) if kind == "nothing" else lengths_for(mesh, seed)
    layer = random_layer(config, seed, lengths, whole=kind == "ties")
    if kind == "favourite":
        layer = one_favourite(layer, seed % config.num_experts)
    if kind == "all the same":  # also a tie of all experts
        layer = layer._replace(router=np.zeros_like(layer.router))
    got = compiled(config, mesh, transport=transport)(layer)
    assert_close(got, dense(layer, config))
    assert not got.out[~layer.real].any() and not got.gradients["x"][~layer.real].any(), "padding gives and gets zero"


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (MoEConfig(7, 7, 5), 7),  # ranks divide nothing: weights are whole on every rank
        (MoEConfig(6, 1, INNER), WIDTH),  # eight ranks divide the width
        (MoEConfig(4, 4, 5, experts="spread", capacity=0.01), 7),  # whole in every pool; rounds of one token
    ],
    ids=["gathered-all", "gathered-one", "spread-all"],
)
def test_any_number_of_experts_and_choices(config: MoEConfig, width: int) -> None:
    for layer in (
        random_layer(config, 1, width=width),
        one_favourite(random_layer(config, 2, width=width), config.num_experts - 1),
    ):
        assert_close(compiled(config, (2, 2, 2))(layer), dense(layer, config))


def test_pools_that_need_different_numbers_of_rounds_do_not_wait_for_each_other() -> None:
    config = SPREAD
    layer = random_layer(config, 3, (16, 16, 16, 0))
    layer.x[:2, :, 0], layer.x[2:, :, 0] = 5, 0
    layer.router[0, 5] = 50  # the first pool's tokens all go to one expert, the second's do not
    chosen = base.choices(layer, config)
    assert chosen[:2, :, 5].all() and not chosen[2:, :, 5][layer.real[2:]].all()
    assert_close(compiled(config, (2, 2, 2))(layer), dense(layer, config))


@pytest.mark.parametrize("config", [GATHERED, SPREAD], ids=IDS[:2])
def test_padding_may_hold_anything_and_a_second_run_has_the_same_bits(config: MoEConfig) -> None:
    layer = random_layer(config, 4)
    wild = layer._replace(
        x=np.where(layer.real[..., None], layer.x, np.nan).astype(np.float32),
        cotangent=np.where(layer.real[..., None], layer.cotangent, np.nan).astype(np.float32),
    )
    for a, b in zip(*(jax.tree.leaves(compiled(config, (2, 2, 2))(one)) for one in (layer, wild)), strict=True):
        assert operator_base.same_bits(np.asarray(a), np.asarray(b))


def test_bfloat16_multiplies_in_bfloat16_and_adds_in_float32() -> None:
    config = MoEConfig(12, 2, INNER, experts="spread")  # three experts a rank, spread over two pools by their width
    layer = random_layer(config, 5, (16, 16, 16, 16))
    layer = jax.tree.map(lambda a: a if a.dtype == bool else a.astype(jnp.bfloat16).astype(np.float32), layer)
    got, want = compiled(config, (2, 2, 2), "bfloat16")(layer), dense(layer, config)
    assert got.out.dtype == jnp.bfloat16 and got.gradients["gate"].dtype == np.float32
    np.testing.assert_array_equal(got.statistics.counts.sum((0, 1, 2)), want.statistics.counts)
    np.testing.assert_allclose(got.balance, want.balance, rtol=1e-5)
    for name, w in {"out": want.out, **want.gradients}.items():
        g = np.asarray(got.out if name == "out" else got.gradients[name], np.float64)
        assert np.sqrt(((g - w) ** 2).mean() / (w**2).mean()) < 0.01, name


def test_gradients_of_many_tokens_are_added_in_float32() -> None:
    """Every token is the same, so an expert's gradient is their number times one token's; bfloat16 counts to 256."""
    config = MoEConfig(2, 1, 1)
    experts = experts_of(np.ones(s, np.float32) for s in ((2, 1, 1), (2, 1, 1), (2, 1, 1)))
    mesh, tokens = operator_base.make_mesh(1, 1, 1), 1000
    x, real = jnp.ones((1, tokens, 1), jnp.bfloat16), jnp.ones((1, tokens), bool)
    router = jnp.array([[1.0, 0.0]])

    def total(experts: Any) -> jax.Array:
        out, _ = mixture_of_experts(x, real, router, experts, config, mesh)
        return jnp.sum(out.astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))(experts)
    silu = float(jnp.asarray(1 / (1 + np.exp(-1)), jnp.bfloat16))
    assert gradient.down[0, 0, 0] == pytest.approx(tokens * silu, rel=1e-6) and gradient.down[1, 0, 0] == 0


def test_the_load_balancing_loss_is_the_published_one_over_all_tokens() -> None:
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((3, 40, 6))  # layers, tokens, experts
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    slots = np.argsort(-probabilities, axis=-1)[..., :2]

    def published(probabilities: np.ndarray, slots: np.ndarray) -> float:
        """As transformers counts: the mean of each choice's one-hot rows, summed over choices."""
        one_hot = np.eye(6)[slots]
        return 6 * float((one_hot.mean(0) * probabilities.mean(0)[None]).sum())

    ranks = np.array_split(np.arange(40), [1, 1, 30])  # unequal, one without a token
    counts, sums = (
        np.stack([f(r) for r in ranks], axis=1).reshape(3, 2, 2, 1, 6)
        for f in (lambda r: np.eye(6)[slots[:, r]].sum((1, 2)), lambda r: probabilities[:, r].sum(1))
    )
    tokens = np.broadcast_to(np.array([len(r) for r in ranks]).reshape(2, 2, 1), (3, 2, 2, 1))
    statistics = Statistics(*(jnp.asarray(a, t) for a, t in ((counts, "int32"), (sums, "float32"), (tokens, "int32"))))
    by_layer = [published(p, s) for p, s in zip(probabilities, slots, strict=True)]
    assert float(load_balancing_loss(statistics)) == pytest.approx(np.mean(by_layer), rel=1e-6)
    pooled = published(probabilities.reshape(-1, 6), slots.reshape(-1, 2))
    assert float(load_balancing_loss(statistics, across_layers=True)) == pytest.approx(pooled, rel=1e-6)
    first = jax.tree.map(lambda a: a[0], statistics)
    assert float(load_balancing_loss(first)) == pytest.approx(by_layer[0], rel=1e-6)
    assert float(load_balancing_loss(jax.tree.map(jnp.zeros_like, statistics))) == 0


def test_a_checkpointed_scan_of_layers_hands_the_statistics_to_the_loss() -> None:
    """As the decoder does it. Gathered experts, everything kept, and layers' losses by hand: the same gradients."""
    mesh = operator_base.make_mesh(2, 2, 2)
    layers = [random_layer(SPREAD, seed) for seed in (7, 8)]
    real, x = jnp.asarray(layers[0].real), jnp.asarray(layers[0].x)
    weights = jax.tree.map(lambda *a: jnp.stack(a), *((layer.router, layer.experts) for layer in layers))

    def layer(x: jax.Array, weights: Any, config: MoEConfig = SPREAD) -> Any:
        router, experts = weights
        out, statistics = mixture_of_experts(x, real, router, experts, config, mesh)
        return x + out, statistics

    def by_hand(weights: Any) -> jax.Array:
        y, statistics = jax.lax.scan(functools.partial(layer, config=GATHERED), x, weights)
        first, second = (jax.tree.map(lambda a, i=i: a[i], statistics) for i in range(2))
        return jnp.sum(jnp.sin(y)) + (load_balancing_loss(first) + load_balancing_loss(second)) / 2

    def scanned(weights: Any) -> jax.Array:
        y, statistics = jax.lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.sum(jnp.sin(y)) + load_balancing_loss(statistics)

    (a, b), (c, d) = (jax.jit(jax.value_and_grad(f))(weights) for f in (by_hand, scanned))
    assert float(c) == pytest.approx(float(a), rel=1e-6)
    for got, want in zip(jax.tree.leaves(d), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


@functools.cache
def compiled_for_a_gpu(config: MoEConfig) -> str:
    """A checkpointed layer of width 128, 2,048 tokens a rank, on two pools of four H100s; with its gradients where
    experts are spread."""
    mesh, width, tokens = target_mesh("h100", (2, 2, 2), ("pool", "dp", "cp")), 128, 4096

    def lying(shape: Any, dtype: Any, where: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    number, inner = config.num_experts, config.intermediate_size
    shapes = (number, width, inner), (number, width, inner), (number, inner, width)
    experts = experts_of(lying(s, jnp.float32, expert_spec(s, config, mesh)) for s in shapes)
    router = lying((width, number), jnp.float32, spread_spec((width, number), mesh))
    x = lying((4, tokens, width), jnp.bfloat16, SEQUENCE_SPEC)
    real = lying((4, tokens), jnp.bool_, SEQUENCE_SPEC)

    def loss(x: jax.Array, router: jax.Array, experts: Experts, real: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, router: jax.Array, experts: Experts) -> Any:
            return mixture_of_experts(x, real, router, experts, config, mesh)

        out, statistics = layer(x, router, experts)
        return jnp.sum(out.astype(jnp.float32)) + load_balancing_loss(statistics)

    function = loss if config.experts == "gathered" else jax.value_and_grad(loss, (0, 1, 2))
    return str(jax.jit(function).lower(x, router, experts, real).compile().as_text())


A_RANKS_EXPERTS = 128 * 64 * (16 // 4)
"""Numbers in one of the three matrices of a rank's experts, in the next test."""


def test_compiled_for_a_gpu_tokens_travel_in_their_pool_and_not_again_for_the_backward_pass() -> None:
    config = MoEConfig(16, 4, 64, experts="spread")
    exchanges = read_schedule(compiled_for_a_gpu(config))
    travels = [e for e in exchanges if e.kind == "ragged-all-to-all"]
    row, room = 128 * 2, 2048 * 4 // 4
    out_and_back, with_cotangent, gradients = room * row, room * (2 * row + 4), room * (row + 4)
    assert sorted(e.bytes for e in travels) == [out_and_back, out_and_back, gradients, with_cotangent]
    pools = {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert all(set(e.groups) == pools for e in travels)
    counts = [e for e in exchanges if e.kind == "all-gather" and set(e.groups) == pools]
    assert sum(e.bytes for e in counts) == 2 * 4 * 16 * 4, "4 ranks' counts of 16 experts, forward and backward"
    others = [e for e in exchanges if e not in travels and e not in counts and e.bytes > 128 * 16 * 4]
    assert all(set(e.groups) == {(0, 4), (1, 5), (2, 6), (3, 7)} for e in others), "weights come from other pools"
    assert {e.kind for e in others} == {"all-gather", "reduce-scatter"}
    assert max(e.bytes for e in others) <= 3 * 4 * A_RANKS_EXPERTS


def test_compiled_for_a_gpu_gathered_experts_move_weights_only() -> None:
    exchanges = [e for e in read_schedule(compiled_for_a_gpu(MoEConfig(16, 4, 64))) if e.bytes > 128 * 16 * 4]
    assert {e.kind for e in exchanges} == {"all-gather"}
    router = 128 * 16 * 4
    assert sum(e.bytes for e in exchanges) in (3 * 4 * A_RANKS_EXPERTS * 2, 3 * 4 * A_RANKS_EXPERTS * 2 + router)


@pytest.mark.parametrize("experts", ["gathered", "spread"])
def test_the_work_is_that_of_the_chosen_experts(experts: Any) -> None:
    text = compiled_for_a_gpu(MoEConfig(16, 4, 64, experts=experts))
    largest = max(math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", text))
    assert 2048 * 128 <= largest <= 2048 * 128 * 4, (
        "a rank's tokens, at most once for each choice, not under 16 experts"
    )


def test_the_module_has_the_published_parameters_and_calls_the_layer() -> None:
    mesh = operator_base.make_mesh(2, 2, 2)
    model: Any = types.SimpleNamespace(hidden_size=WIDTH, compute_dtype="float32", moe=GATHERED)
    module = MixtureOfExperts(model, mesh, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    shapes = jax.tree.map(lambda a: a.shape, params)
    assert shapes == {
        "router": {"kernel": (WIDTH, 8)}, "gate": (8, WIDTH, INNER), "up": (8, WIDTH, INNER), "down": (8, INNER, WIDTH),
    }  # fmt: skip
    assert all(a.dtype == jnp.float32 and 0.01 < a.std() < 0.03 for a in jax.tree.leaves(params))
    layer = random_layer(GATHERED, 9)
    experts = experts_of(np.asarray(params[name]) for name in Experts._fields)
    layer = layer._replace(router=np.asarray(params["router"]["kernel"]), experts=experts)
    out, statistics = jax.jit(lambda x, real: module(x, real))(layer.x, layer.real)
    want = dense(layer, GATHERED)
    np.testing.assert_allclose(out, want.out, rtol=0, atol=2e-5 * np.abs(want.out).max())
    assert statistics.counts.shape == (2, 2, 2, 8) and statistics.tokens.sum() == layer.real.sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, r"num_experts \(0\) must be at least 1"),
        ({"experts_per_token": 9}, r"experts_per_token \(9\) must be at most num_experts \(8\)"),
        ({"balance_loss": -1.0}, r"balance_loss \(-1.0\)"),
        ({"experts": "everywhere"}, r"experts \('everywhere'\) must be 'gathered' or 'spread'"),
        ({"capacity": 0.0}, r"capacity \(0.0\)"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GATHERED, **changes)


def test_what_does_not_fit_is_refused_with_both_sides() -> None:
    mesh = operator_base.make_mesh(1, 4, 2)
    model: Any = types.SimpleNamespace(hidden_size=WIDTH, moe=dataclasses.replace(SPREAD, num_experts=12))
    with pytest.raises(ValueError, match=r"num_experts \(12\) .* \(4 \* 2 = 8\)"):
        MixtureOfExperts(model, mesh, rngs=nnx.Rngs(0))
    layer = random_layer(SPREAD, 0)
    arguments: Any = layer.router, layer.experts, SPREAD, mesh
    with pytest.raises(ValueError, match=r"real int32\(4, 16\)"):
        mixture_of_experts(layer.x, jnp.ones((4, 16), jnp.int32), *arguments)
    with pytest.raises(ValueError, match=r"router \(8, 8\) must be \(7, 8\)"):
        mixture_of_experts(layer.x[..., :7], layer.real, *arguments)
    with pytest.raises(ValueError, match="transport 'ppermute' cannot carry"):
        mixture_of_experts(layer.x, layer.real, *arguments, transport="ppermute")
