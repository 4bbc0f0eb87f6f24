"""What the tests of the experts share: random layers with padding, one compiled loss and gradient for each layout, and
a dense mixture in float64, in which every token goes through every expert."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from operator_base import make_mesh

from libra_jax.attention import SEQUENCE_SPEC
from libra_jax.models.fsdp import spread_spec
from libra_jax.models.grouped import Experts
from libra_jax.models.moe import MoEConfig, Statistics, expert_spec, load_balancing_loss, mixture_of_experts

SEQUENCES, TOKENS, WIDTH, INNER = 4, 16, 8, 6
BALANCE = 3.0
"""Weight of the load-balancing loss in the tests' loss: large enough to be seen."""


class Layer(NamedTuple):
    """x (N, S, D), real (N, S), router (D, E), experts, and the cotangent (N, S, D) of the output."""

    x: Any
    real: Any
    router: Any
    experts: Experts
    cotangent: Any


class Outcome(NamedTuple):
    """The loss sum(out * cotangent) + BALANCE * load-balancing loss, output, statistics, and gradients by name."""

    loss: Any
    out: Any
    statistics: Statistics
    gradients: dict[str, Any]


def random_layer(config: MoEConfig, seed: int, lengths: tuple[int, ...] = (16, 9, 0, 13), whole: bool = False) -> Layer:
    """whole: numbers of the router's product are whole and small, so that logits are exact and often equal."""
    rng = np.random.default_rng(seed)
    number = config.num_experts, WIDTH, config.intermediate_size
    x, router = rng.standard_normal((len(lengths), TOKENS, WIDTH)), rng.standard_normal((WIDTH, number[0]))
    if whole:
        x, router = rng.integers(-1, 2, x.shape), rng.integers(-1, 2, router.shape)
    weights = (0.5 * rng.standard_normal(shape) for shape in (number, number, (number[0], number[2], WIDTH)))
    real = np.arange(TOKENS)[None] < np.array(lengths)[:, None]
    layer = Layer(x, real, router, Experts(*weights), rng.standard_normal(x.shape))
    return jax.tree.map(lambda a: a if a.dtype == bool else a.astype(np.float32), layer)


@functools.cache
def compiled(config: MoEConfig, mesh_shape: tuple[int, int, int], dtype: str = "float32", transport: str | None = None):
    """(layer) -> Outcome on a mesh of CPU devices."""
    mesh = make_mesh(*mesh_shape)

    def loss(x: Any, router: Any, experts: Experts, layer: Layer) -> Any:
        out, statistics = mixture_of_experts(
            x.astype(dtype), layer.real, router, experts, config, mesh, transport=transport
        )
        # Padding's cotangent is used as it is, so that what is wrong with it arrives.
        value = jnp.sum(jnp.where(layer.real[..., None], out.astype(jnp.float32) * layer.cotangent, 0))
        return value + BALANCE * load_balancing_loss(statistics), (out, statistics)

    @jax.jit
    def both(layer: Layer) -> Outcome:
        call = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        (value, (out, statistics)), (x, router, experts) = call(layer.x, layer.router, layer.experts, layer)
        return Outcome(value, out, statistics, {"x": x, "router": router, **experts._asdict()})

    where = Layer(
        SEQUENCE_SPEC, SEQUENCE_SPEC, spread_spec((WIDTH, config.num_experts), mesh.size),
        Experts(*(expert_spec(s, config, mesh) for s in expert_shapes(config))), SEQUENCE_SPEC,
    )  # fmt: skip

    def run(layer: Layer) -> Outcome:
        placed = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), layer, where)
        return jax.tree.map(np.asarray, both(placed))

    return run


def expert_shapes(config: MoEConfig) -> list[tuple[int, int, int]]:
    number, inner = config.num_experts, config.intermediate_size
    return [(number, WIDTH, inner), (number, WIDTH, inner), (number, inner, WIDTH)]


def dense(layer: Layer, config: MoEConfig) -> Outcome:
    """Every token through every expert in float64, times its factor or 0. statistics: counts and probabilities of all
    tokens, (E,), and their number."""
    chosen = choices(layer, config)

    def loss(x: Any, router: Any, gate: Any, up: Any, down: Any) -> Any:
        probabilities = jax.nn.softmax(jnp.einsum("nsd,de->nse", x, router), axis=-1)
        factors = jnp.where(chosen, probabilities, 0.0)
        factors = factors / jnp.maximum(factors.sum(-1, keepdims=True), 1e-300)
        opened = jnp.einsum("nsd,edf->nsef", x, gate)
        hidden = opened / (1 + jnp.exp(-opened)) * jnp.einsum("nsd,edf->nsef", x, up)
        out = jnp.einsum("nsef,efd,nse->nsd", hidden, down, factors)
        counts, tokens = chosen.sum((0, 1)).astype(np.float64), max(int(layer.real.sum()), 1)
        sums = jnp.where(layer.real[..., None], probabilities, 0.0).sum((0, 1))
        balance = config.num_experts * jnp.sum(counts / tokens * sums / tokens)
        value = jnp.sum(out * np.where(layer.real[..., None], layer.cotangent, 0.0).astype(np.float64))
        return value + BALANCE * balance, (out, Statistics(counts, sums, int(layer.real.sum())))

    with jax.enable_x64(True):
        x = np.where(layer.real[..., None], layer.x, 0)
        weights = (jnp.asarray(a, jnp.float64) for a in (x, layer.router, *layer.experts))
        (value, (out, sums)), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))(*weights)
        names = "x", "router", "gate", "up", "down"
        gradients = {name: np.asarray(g) for name, g in zip(names, gradients, strict=True)}
        return Outcome(float(value), np.asarray(out), jax.tree.map(np.asarray, sums), gradients)


def choices(layer: Layer, config: MoEConfig) -> np.ndarray:
    """(N, S, E) bool: the k largest logits of every real token; of equal ones, those of the first experts."""
    x = np.where(layer.real[..., None], layer.x, 0).astype(np.float64)
    ranks = np.argsort(np.argsort(-(x @ layer.router.astype(np.float64)), axis=-1, kind="stable"), axis=-1)
    return (ranks < config.experts_per_token) & layer.real[..., None]


def assert_close(got: Outcome, want: Outcome, tolerance: float = 2e-5) -> None:
    """Every array within tolerance of the largest number in it."""
    np.testing.assert_allclose(got.loss, want.loss, rtol=tolerance, atol=tolerance)
    pairs = {"out": (got.out, want.out)} | {name: (got.gradients[name], g) for name, g in want.gradients.items()}
    for name, (a, b) in pairs.items():
        atol = tolerance * max(np.abs(b).max(), 1e-3)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=atol, err_msg=name)
