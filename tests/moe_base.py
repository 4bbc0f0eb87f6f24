"""What the tests of the experts share: random layers with padding, one compiled loss and gradient for each layout, and
a dense mixture in float64, in which every token goes through every expert."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

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
"""Weight of the load-balancing loss in gradients: large enough to be seen."""


class Layer(NamedTuple):
    """x (N, S, D), real (N, S), router (D, E), experts, and the cotangent (N, S, D) of the output."""

    x: Any
    real: Any
    router: Any
    experts: Any
    cotangent: Any


class Outcome(NamedTuple):
    """Output, load-balancing loss, statistics; by name, the gradients of sum(out * cotangent) + BALANCE * that loss."""

    out: Any
    balance: Any
    statistics: Statistics
    gradients: dict[str, Any]


def experts_of(weights: Iterable[Any]) -> Experts:
    """gate, up and down, of whatever kind: arrays of NumPy, shapes, specs."""
    return Experts(*cast(list[jax.Array], list(weights)))


def random_layer(
    config: MoEConfig, seed: int, lengths: tuple[int, ...] = (16, 9, 0, 13), whole: bool = False, width: int = WIDTH
) -> Layer:
    """whole: numbers of the router's product are whole and small, so that logits are exact and often equal."""
    rng = np.random.default_rng(seed)
    number = config.num_experts, width, config.intermediate_size
    x, router = rng.standard_normal((len(lengths), TOKENS, width)), rng.standard_normal((width, number[0]))
    if whole:
        x, router = rng.integers(-1, 2, x.shape), rng.integers(-1, 2, router.shape)
    weights = (0.5 * rng.standard_normal(shape) for shape in (number, number, (number[0], number[2], width)))
    real = np.arange(TOKENS)[None] < np.array(lengths)[:, None]
    layer = Layer(x, real, router, experts_of(weights), rng.standard_normal(x.shape))
    return jax.tree.map(lambda a: a if a.dtype == bool else a.astype(np.float32), layer)


def compiled(
    config: MoEConfig, mesh_shape: tuple[int, int, int], dtype: str = "float32", transport: str | None = None
) -> Callable[[Layer], Outcome]:
    """The layer on a mesh of CPU devices. x is handed over in dtype; everything comes back on the host."""
    return _compiled(config, mesh_shape, dtype, transport)


@functools.cache
def _compiled(
    config: MoEConfig, mesh_shape: tuple[int, int, int], dtype: str, transport: str | None
) -> Callable[[Layer], Outcome]:
    mesh = make_mesh(*mesh_shape)

    @jax.jit
    def both(layer: Layer) -> Outcome:
        def values(x: Any, router: Any, experts: Experts) -> Any:
            out, statistics = mixture_of_experts(x, layer.real, router, experts, config, mesh, transport=transport)
            return (out, load_balancing_loss(statistics)), statistics

        x = layer.x.astype(dtype)
        (out, balance), pull, statistics = jax.vjp(values, x, layer.router, layer.experts, has_aux=True)
        d_x, d_router, d_experts = pull((layer.cotangent.astype(dtype), jnp.float32(BALANCE)))
        return Outcome(out, balance, statistics, {"x": d_x, "router": d_router, **d_experts._asdict()})

    def run(layer: Layer) -> Outcome:
        where = Layer(
            SEQUENCE_SPEC, SEQUENCE_SPEC, spread_spec(layer.router.shape, mesh),
            jax.tree.map(lambda w: expert_spec(w.shape, config, mesh), layer.experts), SEQUENCE_SPEC,
        )  # fmt: skip
        placed = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), layer, where)
        return jax.tree.map(np.asarray, both(placed))

    return run


def dense(layer: Layer, config: MoEConfig) -> Outcome:
    """Every token through every expert in float64, times its factor or 0. statistics: (E,), (E,) and a number."""
    with jax.enable_x64(True):
        x = np.where(layer.real[..., None], layer.x, 0)
        arguments = (x, layer.router, *layer.experts, np.where(layer.real[..., None], layer.cotangent, 0))
        chosen = choices(layer, config)
        return jax.tree.map(np.asarray, _dense(*(a.astype(np.float64) for a in arguments), layer.real, chosen))


@jax.jit
def _dense(x: Any, router: Any, gate: Any, up: Any, down: Any, cotangent: Any, real: Any, chosen: Any) -> Outcome:
    def values(x: Any, router: Any, gate: Any, up: Any, down: Any) -> Any:
        probabilities = jax.nn.softmax(jnp.einsum("nsd,de->nse", x, router), axis=-1)
        factors = jnp.where(chosen, probabilities, 0.0)
        factors = factors / jnp.where(real, factors.sum(-1), 1.0)[..., None]
        opened = jnp.einsum("nsd,edf->nsef", x, gate)
        hidden = opened / (1 + jnp.exp(-opened)) * jnp.einsum("nsd,edf->nsef", x, up)
        out = jnp.einsum("nsef,efd,nse->nsd", hidden, down, factors)
        counts, tokens = chosen.sum((0, 1)).astype(jnp.float64), jnp.maximum(real.sum(), 1).astype(jnp.float64)
        sums = jnp.where(real[..., None], probabilities, 0.0).sum((0, 1))
        balance = router.shape[1] * jnp.sum(counts / tokens * sums / tokens)
        return (out, balance), Statistics(counts, sums, real.sum())

    (out, balance), pull, sums = jax.vjp(values, x, router, gate, up, down, has_aux=True)
    gradients: dict[str, Any] = dict(
        zip(("x", "router", "gate", "up", "down"), pull((cotangent, jnp.float64(BALANCE))), strict=True)
    )
    return Outcome(out, balance, sums, gradients)


def choices(layer: Layer, config: MoEConfig) -> np.ndarray:
    """(N, S, E) bool: the k largest logits of every real token; of equal ones, those of the first experts."""
    x = np.where(layer.real[..., None], layer.x, 0).astype(np.float64)
    ranks = np.argsort(np.argsort(-(x @ layer.router.astype(np.float64)), axis=-1, kind="stable"), axis=-1)
    return (ranks < config.experts_per_token) & layer.real[..., None]


def assert_close(got: Outcome, want: Outcome, tolerance: float = 2e-5) -> None:
    """Output, loss and gradients within tolerance of the largest number in each; counts equal."""
    np.testing.assert_allclose(got.balance, want.balance, rtol=tolerance, atol=tolerance)
    pairs = {"out": (got.out, want.out)} | {name: (got.gradients[name], g) for name, g in want.gradients.items()}
    for name, (a, b) in pairs.items():
        atol = tolerance * max(np.abs(b).max(), 1.0)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=atol, err_msg=name)
    sums = [np.asarray(s).sum((0, 1, 2)) for s in got.statistics]
    np.testing.assert_array_equal(sums[0], want.statistics.counts)
    np.testing.assert_allclose(sums[1], want.statistics.probabilities, rtol=tolerance, atol=tolerance)
    assert sums[2] == want.statistics.tokens
