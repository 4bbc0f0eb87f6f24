"""Many SwiGLU experts on one device, each over its own rows: a grouped matrix product, forward and backward.

Rows come sorted by expert; a scan over experts runs a loop over tiles of that expert's rows, as many as it has. So the
work is that of the rows there are, whatever the router did, and nothing is held but a tile's activations. (What
`lax.ragged_dot` is made into, on CPUs and for NVIDIA GPUs alike, is one dense product with every row under every
expert: E times the work, and E copies of the rows.)

Letters: N rows of activations, M items (a row under an expert), E experts here, D width, F width inside an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_MOST_TILE_ROWS, _FEWEST_TILE_ROWS, _TILES_PER_EXPERT = 1024, 8, 4

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Experts(NamedTuple):
    """Weights of experts: gate and up (E, D, F), down (E, F, D)."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Items(NamedTuple):
    """Which rows go through which experts, sorted by expert.

    rows: (M,) int32, the row of each item; no row twice under one expert. factors: (M,) float32, of its output.
    sizes: (E,) int32, items of each expert; what is left of M after their sum takes no part.
    """

    rows: Int[Array, " M"]
    factors: Float[Array, " M"]
    sizes: Int[Array, " E"]


def grouped_swiglu(x: Float[Array, "N D"], items: Items, experts: Experts) -> Float[Array, "N D"]:
    """Sum over a row's items of factor · down(silu(gate(row)) · up(row)), float32; 0 for a row without an item.

    x, experts: in the type to multiply in; sums are float32. Not to be differentiated: see `grouped_swiglu_backward`.
    """
    tiles = _Tiles(x, items, experts)

    def expert(out: jax.Array, one: tuple[Experts, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        weights, start, size = one

        def tile(out: jax.Array, at: jax.Array, valid: jax.Array) -> jax.Array:
            gate, up = (_product("td,df->tf", tiles.take(x, at, valid), w) for w in weights[:2])
            hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
            return tiles.add(out, at, valid, _product("tf,fd->td", hidden, weights.down) * tiles.factor(at)[:, None])

        return tiles.loop(tile, out, start, size), None

    return lax.scan(expert, jnp.zeros(x.shape, jnp.float32), (experts, tiles.starts, items.sizes))[0]


def grouped_swiglu_backward(
    x: Float[Array, "N D"], d_out: Float[Array, "N D"], items: Items, experts: Experts
) -> tuple[Float[Array, "N D"], Float[Array, " M"], Experts]:
    """Gradients with respect to x, items.factors and experts, all float32, for the cotangent d_out, in x's dtype.

    Activations are computed again, tile by tile. The factor's gradient needs no output of an expert:
    d_out · down(hidden) is down-transposed(d_out) · hidden.
    """
    tiles, dtype = _Tiles(x, items, experts), x.dtype

    def expert(carry: Any, one: tuple[Experts, jax.Array, jax.Array]) -> tuple[Any, Experts]:
        weights, start, size = one

        def tile(carry: Any, at: jax.Array, valid: jax.Array) -> Any:
            (d_x, d_factors), d_weights = carry
            rows, d_rows, factor = tiles.take(x, at, valid), tiles.take(d_out, at, valid), tiles.factor(at)[:, None]
            gate, up = (_product("td,df->tf", rows, w) for w in weights[:2])
            open_ = jax.nn.sigmoid(gate)
            d_hidden = _product("td,fd->tf", d_rows, weights.down)
            d_factor = jnp.sum(d_hidden * (gate * open_ * up), axis=1)
            d_hidden = d_hidden * factor
            hidden = (gate * open_ * up * factor).astype(dtype)
            d_gate = (d_hidden * up * open_ * (1 + gate * (1 - open_))).astype(dtype)
            d_up = (d_hidden * gate * open_).astype(dtype)
            d_here = _product("tf,df->td", d_gate, weights.gate) + _product("tf,df->td", d_up, weights.up)
            sums = Experts(
                d_weights.gate + _product("td,tf->df", rows, d_gate),
                d_weights.up + _product("td,tf->df", rows, d_up),
                d_weights.down + _product("tf,td->fd", hidden, d_rows),
            )
            # Where a tile hangs over the expert's end, the next expert's tiles write after it.
            d_factors = lax.dynamic_update_slice_in_dim(d_factors, jnp.where(valid, d_factor, 0), at, 0)
            return (tiles.add(d_x, at, valid, d_here), d_factors), sums

        nothing = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        return tiles.loop(tile, (carry, nothing), start, size)

    nothing = jnp.zeros(x.shape, jnp.float32), jnp.zeros(tiles.rows.shape, jnp.float32)
    (d_x, d_factors), d_experts = lax.scan(expert, nothing, (experts, tiles.starts, items.sizes))
    return d_x, d_factors[: items.rows.shape[0]], d_experts


class _Tiles:
    """Runs of `size` items of one expert. The last of an expert hangs over; what hangs over is not valid."""

    def __init__(self, x: jax.Array, items: Items, experts: Experts) -> None:
        self.size = tile_rows(items.rows.shape[0], experts.gate.shape[0])
        self.starts = jnp.cumsum(items.sizes) - items.sizes
        self.rows, self.factors = jnp.pad(items.rows, (0, self.size)), jnp.pad(items.factors, (0, self.size))
        self.lanes = jnp.arange(self.size, dtype=jnp.int32)
        self.outside = x.shape[0] + self.lanes

    def loop(self, tile: Callable[..., Any], carry: Any, start: jax.Array, size: jax.Array) -> Any:
        """tile(carry, first item, valid) for every tile of an expert whose `size` items begin at `start`."""

        def step(i: jax.Array, carry: Any) -> Any:
            return tile(carry, start + i * self.size, i * self.size + self.lanes < size)

        return lax.fori_loop(0, (size + self.size - 1) // self.size, step, carry)

    def take(self, x: jax.Array, at: jax.Array, valid: jax.Array) -> jax.Array:
        picked = x.at[lax.dynamic_slice_in_dim(self.rows, at, self.size)].get(mode="clip")
        return jnp.where(valid[:, None], picked, jnp.zeros((), x.dtype))  # the rest may hold anything, NaN too

    def factor(self, at: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(self.factors, at, self.size)

    def add(self, out: jax.Array, at: jax.Array, valid: jax.Array, values: jax.Array) -> jax.Array:
        rows = jnp.where(valid, lax.dynamic_slice_in_dim(self.rows, at, self.size), self.outside)
        return out.at[rows].add(values, mode="drop", unique_indices=True)


def tile_rows(items: int, experts: int) -> int:
    """Rows of a tile: a power of two, a quarter of what an expert gets on average (so the overhang costs an eighth)."""
    share = items // (experts * _TILES_PER_EXPERT)
    return min(max(1 << share.bit_length() >> 1, _FEWEST_TILE_ROWS), _MOST_TILE_ROWS)
