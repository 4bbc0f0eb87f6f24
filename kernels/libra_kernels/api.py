"""The tile attention operation and the one switch between its implementations.

`tile_forward` and `tile_backward` take blocks, pages and tables (`tiles.py`) and run the entries of one wave. An
implementation asked for by name runs or says why it cannot; only `None` chooses by itself.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp

from libra_kernels import reference, xla
from libra_kernels.tiles import TileOptions, Tiles

_IMPLEMENTATIONS: dict[str, types.ModuleType] = {"reference": reference, "xla": xla}


def resolve_implementation(implementation: str | None) -> str:
    """The implementation that will run: the one named, or for None the fastest one there is, today `xla`.

    Raises ValueError when the name is unknown.
    """
    if implementation is None:
        return "xla"
    if not isinstance(implementation, str) or implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation ({implementation!r}) must be None or one of {sorted(_IMPLEMENTATIONS)}")
    return implementation


def tile_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    out: jax.Array,
    lse: jax.Array,
    *,
    options: TileOptions,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the entries `tiles.start` to `tiles.stop`, each finished on its own, page by page, ascending.

    q: (Q, B, G, D); k: (K, B, D); v: (K, B, E), all of one dtype; accumulation is float32.
    out: (Q, B, G, E) in q's dtype, and lse: (Q, B, G, 2) float32, are returned with the executed slots replaced. lse
    is the log-sum-exp in two parts that add up to it, the row's largest logit and the rest (0 to the logarithm of
    the number of keys): one float32 number would leave weights of 1e-3 relative error where logits are in the tens of
    thousands. A row that sees nothing has output 0 and log-sum-exp -inf. Other slots keep what they held.
    """
    module = _IMPLEMENTATIONS[resolve_implementation(implementation)]
    _check(q, k, v, tiles)
    return module.forward(q, k, v, tiles, out, lse, options)


def tile_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    tiles: Tiles,
    dq: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
    *,
    options: TileOptions,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `tile_forward` for the same entries.

    d_out: (Q, B, G, E), the output's cotangent; lse: (Q, B, G, 2) float32 from the forward pass; delta:
    (Q, B, G) float32, the sum over E of d_out * out. dq: (Q, B, G, D) is returned with the executed slots replaced. dk:
    (K, B, D) and dv: (K, B, E), float32, are returned with this wave's contributions added, in the order of the
    entries, so the same tables give the same bits.
    """
    module = _IMPLEMENTATIONS[resolve_implementation(implementation)]
    _check(q, k, v, tiles)
    return module.backward(q, k, v, d_out, lse, delta, tiles, dq, dk, dv, options)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles) -> None:
    assert q.ndim == 4 and k.ndim == 3 and v.ndim == 3, (q.shape, k.shape, v.shape)
    assert k.shape[:2] == v.shape[:2] and q.shape[1] == k.shape[1] and q.shape[3] == k.shape[2]
    assert tiles.first_visible.shape == q.shape[:2], (tiles.first_visible.shape, q.shape)
    assert tiles.entries.dtype == tiles.pages.dtype == jnp.int32
