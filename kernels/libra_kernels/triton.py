"""Tile attention on NVIDIA GPUs: the kernels of `triton_kernels.py`, called through jax-triton.

jax-triton is imported at the first call, so that this module can be read, and can say why it will not run, without it.
Works with jax-triton 0.4 (Triton 3.9 and 3.6) and with 0.3 (Triton 3.6); `_call` is the only place that knows of the
difference.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from libra_kernels import launch
from libra_kernels.tiles import BLOCK, FIRST_PAGE, NUM_PAGES, PAGE_BASE, Q_SLOT, TileOptions, Tiles

# What Triton writes by itself can be newer than the assembler that XLA finds. These are old enough for every CUDA that
# jax 0.11 runs with and that knows the device (8.5 is CUDA 12.5, 8.7 is 12.8, 8.8 is 12.9).
_PTX_VERSIONS = {80: 85, 87: 85, 90: 85, 100: 87, 103: 88}


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, out: jax.Array, lse: jax.Array, options: TileOptions
) -> tuple[jax.Array, jax.Array]:
    """See `api.tile_forward`."""
    inputs = (q, k, v, *_tables(tiles), tiles.start, tiles.stop)
    out, lse = _call("forward", q, v, options, inputs, (out, lse), rows=tiles.entries.shape[0])
    return out, lse


def backward(
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
    options: TileOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.tile_backward`. Two kernels: one that owns the queries, one that owns the keys."""
    # One number will do here: 16-bit weights are no finer than the sum of the two parts.
    exponent = (lse[..., 0] + lse[..., 1]) * math.log2(math.e)
    inputs = (q, k, v, d_out, exponent, delta, *_tables(tiles))
    (dq,) = _call("dq", q, v, options, (*inputs, tiles.start, tiles.stop), (dq,), rows=tiles.entries.shape[0])
    dk, dv = _call("dkv", q, v, options, (*inputs, page_readers(tiles)), (dk, dv), rows=tiles.pages.shape[0])
    return dq, dk, dv


def page_readers(tiles: Tiles) -> jax.Array:
    """(L, 4) int32: for each row of `tiles.pages` which of the wave's entries visit it.

    The first of them and one past the last, then the same for those that see the page whole: blocks after it, all of
    whose rows see from its first key on. Both are runs of neighbours (`Tiles`); the first is not below the last where
    there is none. Compares every row with every entry, in one fused reduction.
    """
    block = tiles.first_visible.shape[1]
    entries, index = tiles.entries, jnp.arange(tiles.entries.shape[0], dtype=jnp.int32)
    active = (index >= tiles.start) & (index < tiles.stop)
    begin, base = entries[:, PAGE_BASE], entries[:, PAGE_BASE] - entries[:, FIRST_PAGE]
    end = jnp.where(active, begin + entries[:, NUM_PAGES], 0)
    sees_from = tiles.first_visible.max(axis=1)[entries[:, Q_SLOT]]
    whole_begin = base + jnp.maximum((sees_from + block - 1) // block, entries[:, FIRST_PAGE])
    whole_end = jnp.minimum(base + entries[:, BLOCK], end)
    row = jnp.arange(tiles.pages.shape[0], dtype=jnp.int32)[:, None]
    visits = (row >= begin[None, :]) & (row < end[None, :])
    whole = (row >= whole_begin[None, :]) & (row < whole_end[None, :])

    def both(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return (*map(jnp.minimum, a[:2], b[:2]), *map(jnp.maximum, a[2:4], b[2:4]), a[4] + b[4])

    # One reduction of five numbers, so that nothing of size rows times entries is ever stored.
    none, zero = jnp.int32(entries.shape[0]), jnp.int32(0)
    this, after = index[None, :], index[None, :] + 1
    first, whole_first, last, whole_last, whole_count = lax.reduce(
        (
            jnp.where(visits, this, none), jnp.where(whole, this, none),
            jnp.where(visits, after, zero), jnp.where(whole, after, zero), whole.astype(jnp.int32),
        ),
        (none, none, zero, zero, zero), both, (1,),
    )  # fmt: skip
    # Masking a whole page changes nothing: what is not one run of neighbours is masked throughout.
    whole_last = jnp.where(whole_last - whole_first == whole_count, whole_last, whole_first)
    return jnp.stack([first, last, whole_first, whole_last], axis=1)


def reason_not_to_run(options: TileOptions, q: Any, v: Any) -> str | None:
    """Why these kernels cannot run for blocks q (Q, B, G, D) and pages v (K, B, E), arrays or their shapes.

    Raises ValueError for launch parameters of the user's that do not fit: those were asked for by name.
    """
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'libra-jax[cuda]')"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k and v must be bfloat16 or float16, got {q.dtype}"
    if not options.scale > 0:
        return f"scale ({options.scale}) must be above 0: the largest raw product has to be the largest logit"
    try:
        for which in launch.PASSES:
            _launch(which, options._replace(launches=()), q, v)
    except ValueError as error:
        return str(error)
    for which in launch.PASSES:
        _launch(which, options, q, v)
    return None


def compute_capability_of(device: Any) -> int | None:
    """90 for an H100 (9.0), from a jax device, present or of a topology; None for what is no NVIDIA GPU."""
    text = str(getattr(device, "compute_capability", ""))
    major, _, minor = text.partition(".")
    return int(major) * 10 + int(minor) if major.isdecimal() and minor.isdecimal() else None


def _compute_capability(options: TileOptions) -> int:
    if options.compute_capability is not None:
        return options.compute_capability
    return compute_capability_of(jax.devices()[0]) or 90


def _launch(which: launch.Pass, options: TileOptions, q: Any, v: Any) -> launch.Launch:
    _, block, group, head_dim = q.shape
    return launch.choose(
        which, _compute_capability(options), block=block, group=group, head_dim=head_dim, v_head_dim=v.shape[-1],
        overrides=dict(options.launches),
    )  # fmt: skip


def _tables(tiles: Tiles) -> tuple[jax.Array, jax.Array, jax.Array]:
    return tiles.entries, tiles.pages, tiles.first_visible


def _call(
    which: launch.Pass,
    q: jax.Array,
    v: jax.Array,
    options: TileOptions,
    inputs: tuple[jax.Array, ...],
    results: tuple[jax.Array, ...],
    rows: int,
) -> tuple[jax.Array, ...]:
    """Runs a kernel over `rows` table rows; `results` are updated in place."""
    jt, kernels = _modules()
    _, block, group, head_dim = q.shape
    chosen = _launch(which, options, q, v)
    tiles_of_a_row = block // chosen.keys if which == "dkv" else block * group // chosen.rows
    arguments: dict[str, Any] = dict(
        kernel=getattr(kernels, f"{which}_kernel"),
        grid=(rows * tiles_of_a_row,),
        name=f"libra_{which}",
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        compute_capability=_compute_capability(options),
        input_output_aliases={len(inputs) + i: i for i in range(len(results))},
        **launch.constants(
            chosen, block=block, group=group, head_dim=head_dim, v_head_dim=v.shape[-1],
            scale=options.scale, soft_cap=options.soft_cap,
        ),
    )  # fmt: skip
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    if jt.__version_info__ < (0, 4):
        return tuple(jt.triton_call(*inputs, *results, out_shape=shapes, **arguments))
    with warnings.catch_warnings():
        # Refs, which 0.4 wants for results in place, are unknown to 0.3.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        unread = [0] * len(results)
        backend = {"enable_fp_fusion": True, "ptx_version": _PTX_VERSIONS[_compute_capability(options)]}
        return tuple(jt.triton_call(*inputs, *results, *unread, out_type=shapes, backend_options=backend, **arguments))


@functools.cache
def _modules() -> tuple[Any, Any]:
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "TMA_TF32"):
        # Triton 3.6 lacks this number of the TMA descriptors, which are not used here; without it jax-triton 0.4 takes
        # Triton to have no NVIDIA backend.
        driver.TMA_TF32 = 11  # type: ignore[attr-defined]
    return importlib.import_module("jax_triton"), importlib.import_module("libra_kernels.triton_kernels")
