"""The tile attention operation and the one switch between its implementations.

`tile_forward` and `tile_backward` take blocks, pages and tables (`tiles.py`) and run the entries of one wave. An
implementation asked for by name runs or says why it cannot; only `None` chooses by itself.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from libra_kernels import reference, triton, xla
from libra_kernels.tiles import TileOptions, Tiles

_IMPLEMENTATIONS: dict[str, types.ModuleType] = {"reference": reference, "triton": triton, "xla": xla}


def check_implementation(implementation: str | None, device: Any = None) -> None:
    """Raises ValueError when the name is unknown, or cannot run on `device` (a jax device, of a topology perhaps)."""
    if implementation is None:
        return
    if not isinstance(implementation, str) or implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation ({implementation!r}) must be None or one of {sorted(_IMPLEMENTATIONS)}")
    if implementation == "triton" and device is not None and triton.compute_capability_of(device) is None:
        raise ValueError(
            f"implementation 'triton' runs on NVIDIA GPUs, not on {device.platform} devices ({device.device_kind}): "
            f"use 'xla', or None, which takes the GPU kernels wherever the program is compiled for a GPU"
        )


def why_not_triton(options: TileOptions, q: Any, v: Any) -> str | None:
    """Why `triton` cannot run for blocks q (Q, B, G, D) and pages v (K, B, E), arrays or their shapes; None: it can."""
    return triton.reason_not_to_run(options, q, v)


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
    out: (Q, B, G, E) in q's dtype, and lse: (Q, B, G, 2) float32, are returned with the executed slots replaced. They
    may have more slots than q (and in `tile_backward` dk and dv more than k and v). Slots of q, k and v that the
    entries do not name are not read: they may hold anything. lse
    is the log-sum-exp in two parts that add up to it, the row's largest logit and the rest (0 to the logarithm of
    the number of keys): one float32 number would leave weights of 1e-3 relative error where logits are in the tens of
    thousands. A row that sees nothing has output 0 and log-sum-exp -inf. Other slots keep what they held.

    implementation: "reference", "xla" or "triton". None: `triton` where the program is compiled for an NVIDIA GPU and
        the kernels take these shapes and dtypes, otherwise `xla`; one program lowers for both.

    Raises ValueError when the one that is named cannot run.
    """
    _check(q, k, v, tiles)
    run = _chosen(implementation, "forward", options, q, v)
    return run(q, k, v, tiles, out, lse)


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
    entries, so the same tables give the same bits. implementation: as in `tile_forward`.
    """
    _check(q, k, v, tiles)
    run = _chosen(implementation, "backward", options, q, v)
    return run(q, k, v, d_out, lse, delta, tiles, dq, dk, dv)


def _chosen(
    implementation: str | None, direction: str, options: TileOptions, q: jax.Array, v: jax.Array
) -> Callable[..., Any]:
    """The function that will run, its options bound."""

    def function(name: str) -> Callable[..., Any]:
        whole = getattr(_IMPLEMENTATIONS[name], direction)
        return lambda *arrays: whole(*arrays, options)

    check_implementation(implementation)
    if implementation not in (None, "triton"):
        return function(implementation)
    reason = triton.reason_not_to_run(options, q, v)
    if implementation is None:
        if reason is not None:
            return function("xla")
        return lambda *arrays: lax.platform_dependent(*arrays, cuda=function("triton"), default=function("xla"))
    if reason is None and options.compute_capability is None:
        check_implementation("triton", jax.devices()[0])
    if reason is not None:
        raise ValueError(f"implementation 'triton' cannot run this: {reason}")
    return function("triton")


def _check(q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles) -> None:
    assert q.ndim == 4 and k.ndim == 3 and v.ndim == 3, (q.shape, k.shape, v.shape)
    assert k.shape[:2] == v.shape[:2] and q.shape[1] == k.shape[1] and q.shape[3] == k.shape[2]
    assert tiles.first_visible.shape == q.shape[:2], (tiles.first_visible.shape, q.shape)
    assert tiles.entries.dtype == tiles.pages.dtype == jnp.int32
