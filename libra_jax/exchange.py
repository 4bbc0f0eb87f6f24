"""Moves rows between the ranks of a pool: one packed collective for everything that travels in one direction.

The collective runs over the mesh axes ("dp", "cp"), so its groups are pools and its cost does not depend on how many
pools there are. Several kinds of items (blocks, pages) are flattened into rows of unsigned integers and share it.
Floating point would not do: XLA may widen bfloat16 on the way and is free to change the bits of what is not a number.

A transport takes `packed (N, words)`, row d for rank d, and returns row s from rank s. Both transports here are padded
to what a pair of ranks may send at most, and give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

POOL_AXES = ("dp", "cp")


class Part(NamedTuple):
    """One kind of item in an exchange.

    rows: (M, words) unsigned integers, the items that this rank may send.
    source: (L,) int32 rows in sending order, by destination; None: the rows as they stand.
    send_offsets: (N + 1,) int32; source[send_offsets[d]:send_offsets[d + 1]] go to rank d.
    recv_offsets: (N + 1,) int32; what rank s sends lands in rows recv_offsets[s] to recv_offsets[s + 1] of `into`.
    into: (R, words), returned with those rows replaced.
    pair_room: the most items that any rank sends to any other.
    """

    rows: jax.Array
    source: jax.Array | None
    send_offsets: jax.Array
    recv_offsets: jax.Array
    into: jax.Array
    pair_room: int


def exchange(parts: Sequence[Part], *, transport: str) -> list[jax.Array]:
    """Sends every part to the ranks its offsets name, in one collective; returns each part's `into`, filled.

    Runs inside shard_map over `POOL_AXES`. Every rank of the pool calls it with parts of the same shapes.
    """
    live = [part for part in parts if part.pair_room and part.into.shape[0] and part.rows.shape[0]]
    if not live:
        return [part.into for part in parts]
    packed = jnp.concatenate([_outgoing(part) for part in live], axis=1)
    arrived = _TRANSPORTS[transport](packed)
    filled, start = {}, 0
    for part in live:
        width = part.pair_room * part.rows.shape[1]
        filled[id(part)] = _land(part, arrived[:, start : start + width])
        start += width
    return [filled.get(id(part), part.into) for part in parts]


def resolve_transport(transport: str | None) -> str:
    """The transport that will run. Raises ValueError when the name is unknown."""
    if transport is None:
        return "all_to_all"
    if not isinstance(transport, str) or transport not in _TRANSPORTS:
        raise ValueError(f"transport ({transport!r}) must be None or one of {sorted(_TRANSPORTS)}")
    return transport


def pack(arrays: Sequence[jax.Array], word: jnp.dtype) -> jax.Array:
    """Arrays (M, ...) of any types of at least the word's size, side by side as rows (M, words) of their bits."""
    words = [lax.bitcast_convert_type(array, word) for array in arrays]
    return jnp.concatenate([w.reshape(w.shape[0], math.prod(w.shape[1:])) for w in words], axis=1)


def unpack(rows: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays that `pack` put into rows: shaped and typed as `like`, but for the leading axis."""
    out, start = [], 0
    for array in like:
        per_word = array.dtype.itemsize // rows.dtype.itemsize
        shape = (rows.shape[0], *array.shape[1:]) + ((per_word,) if per_word > 1 else ())
        width = array[0].size * per_word
        out.append(lax.bitcast_convert_type(rows[:, start : start + width].reshape(shape), array.dtype))
        start += width
    return out


def word_for(dtype: jnp.dtype) -> jnp.dtype:
    """The unsigned integer that carries this floating-point type."""
    return jnp.dtype({2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(dtype).itemsize])


def _outgoing(part: Part) -> jax.Array:
    """(N, pair_room * words): the rows for each rank, followed by whatever comes next, which nobody reads."""
    place = part.send_offsets[:-1, None] + jnp.arange(part.pair_room, dtype=jnp.int32)[None, :]
    if part.source is not None:
        place = part.source.at[place].get(mode="clip")
    rows = part.rows.at[place].get(mode="clip")
    return rows.reshape(rows.shape[0], -1)


def _land(part: Part, arrived: jax.Array) -> jax.Array:
    """`into` with what every rank sent written to its place; `arrived` is (N, pair_room * words)."""
    offsets = part.recv_offsets
    row = jnp.arange(part.into.shape[0], dtype=jnp.int32)
    sender = jnp.searchsorted(offsets, row, side="right").astype(jnp.int32) - 1
    sender = jnp.clip(sender, 0, offsets.shape[0] - 2)
    items = arrived.reshape(-1, part.into.shape[1])
    received = items.at[sender * part.pair_room + row - offsets[sender]].get(mode="clip")
    mine = (row >= offsets[0]) & (row < offsets[-1])
    return jnp.where(mine[:, None], received, part.into)


def _all_to_all(packed: jax.Array) -> jax.Array:
    return lax.all_to_all(packed, POOL_AXES, split_axis=0, concat_axis=0)


def _ppermute(packed: jax.Array) -> jax.Array:
    """N - 1 rounds; in round k every rank sends to the k-th after it and hears from the k-th before it."""
    n, me = packed.shape[0], lax.axis_index(POOL_AXES)
    arrived = jnp.zeros_like(packed)
    for k in range(1, n):
        outgoing = lax.dynamic_index_in_dim(packed, (me + k) % n, 0)
        incoming = lax.ppermute(outgoing, POOL_AXES, [(rank, (rank + k) % n) for rank in range(n)])
        arrived = lax.dynamic_update_slice_in_dim(arrived, incoming, (me - k) % n, 0)
    return arrived


_TRANSPORTS: dict[str, Callable[[jax.Array], jax.Array]] = {"all_to_all": _all_to_all, "ppermute": _ppermute}
