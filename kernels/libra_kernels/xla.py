"""Tile attention in plain XLA: runs on every backend and visits only the pages a block needs.

Two nested loops, blocks then pages, with the online softmax of FlashAttention (arXiv 2205.14135). The body always
multiplies one block with one page, so its shapes never depend on the plan, and a block's result has the same bits
wherever and in whatever company it is executed. Taking several blocks or pages at once would break that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from libra_kernels.tiles import (
    BLOCK,
    FIRST_PAGE,
    NUM_PAGES,
    PAGE_BASE,
    Q_SLOT,
    TileOptions,
    Tiles,
    cap_logits,
    cap_slope,
)

_f32 = jnp.float32


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, out: jax.Array, lse: jax.Array, options: TileOptions
) -> tuple[jax.Array, jax.Array]:
    """See `api.tile_forward`."""
    slots, block, group, _ = q.shape
    rows = block * group
    q = q.reshape(slots, rows, -1)

    def one_block(x: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        entry = _at(tiles.entries, x)
        slot = entry[Q_SLOT]
        q_rows = _at(q, slot).astype(_f32)
        first = _at(tiles.first_visible, slot)

        def one_page(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            top, total, acc = carry
            page = _at(tiles.pages, entry[PAGE_BASE] + j)
            logits = _logits(q_rows, _at(k, page), options)
            visible = _visible(first, entry[BLOCK], entry[FIRST_PAGE] + j, block, group)
            logits = jnp.where(visible, logits, -jnp.inf)
            new_top = jnp.maximum(top, logits.max(axis=1))
            # A row that has seen nothing yet keeps top = -inf; a zero in its place keeps exp() out of inf - inf.
            shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
            weights = jnp.exp(logits - shift[:, None])
            keep = jnp.exp(top - shift)
            total = total * keep + weights.sum(axis=1)
            acc = acc * keep[:, None] + _matmul(weights, _at(v, page).astype(_f32))
            return new_top, total, acc

        nothing = (
            jnp.full((rows,), -jnp.inf, _f32),
            jnp.zeros((rows,), _f32),
            jnp.zeros((rows, v.shape[-1]), _f32),
        )
        top, total, acc = lax.fori_loop(0, entry[NUM_PAGES], one_page, nothing)
        empty = total == 0.0
        safe_total = jnp.where(empty, 1.0, total)
        rows_out = (acc / safe_total[:, None]).astype(out.dtype)
        rows_lse = jnp.stack([top, jnp.log(safe_total)], axis=1)
        out = _put(out, rows_out.reshape(out.shape[1:]), slot)
        lse = _put(lse, rows_lse.reshape(lse.shape[1:]), slot)
        return out, lse

    return lax.fori_loop(tiles.start, tiles.stop, one_block, (out, lse))


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
    """See `api.tile_backward`."""
    slots, block, group, _ = q.shape
    rows = block * group
    q, d_out = q.reshape(slots, rows, -1), d_out.reshape(slots, rows, -1)

    def one_block(x: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        dq, dk, dv = carry
        entry = _at(tiles.entries, x)
        slot = entry[Q_SLOT]
        q_rows, d_rows = _at(q, slot).astype(_f32), _at(d_out, slot).astype(_f32)
        first = _at(tiles.first_visible, slot)
        top, log_total = jnp.split(_at(lse, slot).reshape(rows, 2), 2, axis=1)
        delta_rows = _at(delta, slot).reshape(rows, 1)

        def one_page(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            dq_rows, dk, dv = carry
            page = _at(tiles.pages, entry[PAGE_BASE] + j)
            k_page, v_page = _at(k, page).astype(_f32), _at(v, page).astype(_f32)
            logits = _logits(q_rows, k_page, options)
            visible = _visible(first, entry[BLOCK], entry[FIRST_PAGE] + j, block, group)
            weights = jnp.where(visible, jnp.exp(logits - top - log_total), 0.0)
            d_weights = _matmul_t(d_rows, v_page)
            d_logits = weights * (d_weights - delta_rows) * cap_slope(logits, options) * options.scale
            # A masked logit may be large enough for 0 * inf above; the mask has the last word.
            d_logits = jnp.where(visible, d_logits, 0.0)
            dq_rows = dq_rows + _matmul(d_logits, k_page)
            dk = _put(dk, _at(dk, page) + _t_matmul(d_logits, q_rows), page)
            dv = _put(dv, _at(dv, page) + _t_matmul(weights, d_rows), page)
            return dq_rows, dk, dv

        dq_rows = jnp.zeros((rows, q.shape[-1]), _f32)
        dq_rows, dk, dv = lax.fori_loop(0, entry[NUM_PAGES], one_page, (dq_rows, dk, dv))
        return _put(dq, dq_rows.reshape(dq.shape[1:]).astype(dq.dtype), slot), dk, dv

    return lax.fori_loop(tiles.start, tiles.stop, one_block, (dq, dk, dv))


def _logits(q_rows: jax.Array, k_page: jax.Array, options: TileOptions) -> jax.Array:
    return cap_logits(_matmul_t(q_rows, k_page.astype(_f32)) * options.scale, options)


def _visible(first: jax.Array, query_block: jax.Array, page: jax.Array, block: int, group: int) -> jax.Array:
    """(block * group, block) bool: which keys of the page each query row may see."""
    key = (page * block + jnp.arange(block, dtype=jnp.int32))[None, :]
    query = (query_block * block + jnp.arange(block, dtype=jnp.int32))[:, None]
    visible = (key >= first[:, None]) & (key <= query)
    return jnp.broadcast_to(visible[:, None, :], (block, group, block)).reshape(block * group, block)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(array, index, 0, keepdims=False)


def _put(array: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(array, value, index, 0)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=_f32)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return _dot(a, b, (1, 0))


def _matmul_t(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b.T"""
    return _dot(a, b, (1, 1))


def _t_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a.T @ b"""
    return _dot(a, b, (0, 0))
