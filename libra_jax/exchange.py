"""Moves items between the ranks of a pool: one packed collective for everything that travels at one time.

The collective runs over the mesh axes ("dp", "cp"), so its groups are pools and its cost does not depend on how many
pools there are; where relays pass pages on, a second one runs among the ranks of each node. Items leave from an outbox
and land in an inbox, flat buffers of unsigned integers with a room for each kind of item (`Box`). Floating point would
not do: XLA may widen bfloat16 on the way and is free to change the bits of what is not a number.

Transports, all with the same bits: "ragged" sends exact bytes straight to their places, GPUs' default; "all_to_all" and
"ppermute" are padded to what a pair of ranks may send at most, and run everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

POOL_AXES = ("dp", "cp")
RAGGED_PLATFORMS = {"gpu"}
"""Where XLA has a ragged_all_to_all."""


class Kind(NamedTuple):
    """One kind of item that travels: how many there is room for, and the arrays that make up one of them."""

    room: int
    like: tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class Box:
    """How the rooms of several kinds lie one after the other in a flat buffer (rows, unit) of unsigned integers.

    A row is the largest run of words that divides every kind's items, so that offsets in rows can name any item.
    """

    kinds: tuple[Kind, ...]
    word: jnp.dtype

    @functools.cached_property
    def words(self) -> tuple[int, ...]:
        """Words of one item of each kind."""
        return tuple(
            sum(math.prod(array.shape) * array.dtype.itemsize for array in kind.like) // self.word.itemsize
            for kind in self.kinds
        )

    @functools.cached_property
    def unit(self) -> int:
        """Words of a row."""
        return math.gcd(*self.words)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The row where each kind's room begins, and the end of the last."""
        rows = (kind.room * self.rows(index) for index, kind in enumerate(self.kinds))
        return tuple(itertools.accumulate(rows, initial=0))

    def rows(self, kind: int) -> int:
        """Rows of one item of a kind."""
        return self.words[kind] // self.unit

    def with_rooms(self, *rooms: int) -> Box:
        """A box for the same kinds with other rooms; its rows have the same width."""
        return Box(tuple(Kind(room, kind.like) for room, kind in zip(rooms, self.kinds, strict=True)), self.word)

    def empty(self) -> jax.Array:
        """A buffer that nothing has been written to: what it holds is not to be read."""
        return lax.empty((self.starts[-1], self.unit), self.word)

    def items(self, buffer: jax.Array, kind: int) -> jax.Array:
        """A kind's room as (room, words)."""
        rows = buffer[self.starts[kind] : self.starts[kind + 1]]
        return rows.reshape(self.kinds[kind].room, self.words[kind])

    def put(self, buffer: jax.Array, kind: int, items: jax.Array) -> jax.Array:
        """The buffer with a kind's room replaced by items (room, words)."""
        return lax.dynamic_update_slice_in_dim(buffer, items.reshape(-1, self.unit), self.starts[kind], 0)

    def read(self, buffer: jax.Array, kind: int) -> list[jax.Array]:
        """A kind's room as arrays (room, ...)."""
        return unpack(self.items(buffer, kind), self.kinds[kind].like)

    def pick(self, buffer: jax.Array, kind: int, index: jax.Array) -> list[jax.Array]:
        """The items (M,) of a kind as arrays (M, ...), without a copy of the others."""
        rows = self.rows(kind)
        row = self.starts[kind] + index[:, None] * rows + jnp.arange(rows, dtype=index.dtype)[None, :]
        return unpack(buffer.at[row].get(mode="clip").reshape(index.shape[0], -1), self.kinds[kind].like)

    def write(self, buffer: jax.Array, kind: int, arrays: Sequence[jax.Array]) -> jax.Array:
        """The buffer with a kind's room replaced by arrays (room, ...), cast to the kind's types."""
        like = self.kinds[kind].like
        cast = [array.astype(want.dtype) for array, want in zip(arrays, like, strict=True)]
        return self.put(buffer, kind, pack(cast, self.word))

    def write_all(self, buffer: jax.Array, kinds: Mapping[int, Sequence[jax.Array]]) -> jax.Array:
        for kind, arrays in kinds.items():
            buffer = self.write(buffer, kind, arrays)
        return buffer


class Part(NamedTuple):
    """The items of one kind that one exchange moves, among the N ranks of a pool, or of a node.

    kind: index into `Box.kinds`, of the outbox they leave and of the inbox they land in.
    send_offsets: (N + 1,) int32; items send_offsets[d] to send_offsets[d + 1] of the outbox go to rank d.
    recv_offsets: (N + 1,) int32; what rank s sends lands in places recv_offsets[s] to recv_offsets[s + 1] of the inbox.
    landings: (N,) int32; the place in rank d's inbox where what this rank sends it begins.
    pair_room: the most items that any rank sends to any other.
    """

    kind: int
    send_offsets: jax.Array
    recv_offsets: jax.Array
    landings: jax.Array
    pair_room: int


def exchange(
    parts: Sequence[Part],
    outbox: jax.Array,
    inbox: jax.Array,
    leaving: Box,
    landing: Box,
    *,
    transport: str,
    node_ranks: int | None = None,
) -> jax.Array:
    """Sends every part from `outbox`, laid out as `leaving`, to the ranks its offsets name, in one collective.

    node_ranks: so many neighbouring ranks of the pool exchange among themselves, and the parts' tables are for these
        (rank r is the r % node_ranks-th of its node); None: all ranks of the pool do.

    Returns `inbox`, laid out as `landing`, with what arrived. Runs inside shard_map over `POOL_AXES`; every rank of the
    pool calls it with the same layouts. Not to be differentiated: ragged_all_to_all's transpose is wrong for slices of
    size 0.
    """
    return _TRANSPORTS[transport](parts, outbox, inbox, leaving, landing, _groups(node_ranks))


def resolve_transport(
    transport: str | None, device: Any = None, ranks: int | None = None, *, all_at_once: bool = True
) -> str:
    """The transport that will run; None: what suits the device (None: the default one) and the ranks of a pool.

    all_at_once: whether all devices of the mesh do the same exchanges at the same time. Two ranks have nothing to gain
    from all_to_all, in which each also sends to itself: between processes (gloo) it took three times as long. But all
    CPU devices of a mesh meet at a permutation, and where some do not come the others would wait forever.

    Raises ValueError when the name is unknown.
    """
    if transport is None:
        device = jax.devices()[0] if device is None else device
        return "ragged" if device.platform == "gpu" else "ppermute" if ranks == 2 and all_at_once else "all_to_all"
    if not isinstance(transport, str) or transport not in _TRANSPORTS:
        raise ValueError(f"transport ({transport!r}) must be None or one of {sorted(_TRANSPORTS)}")
    if transport == "ragged" and device is not None and device.platform not in RAGGED_PLATFORMS:
        raise ValueError(
            f"transport 'ragged' runs on GPUs, not on {device.platform} devices, for which XLA has no "
            f"ragged_all_to_all: use 'all_to_all' or 'ppermute', or None, which chooses"
        )
    return transport


def pack(arrays: Sequence[jax.Array], word: jnp.dtype) -> jax.Array:
    """Arrays (M, ...) of any types of at least the word's size, side by side as rows (M, words) of their bits."""
    words = [lax.bitcast_convert_type(array, word) for array in arrays]
    return jnp.concatenate([w.reshape(w.shape[0], math.prod(w.shape[1:])) for w in words], axis=1)


def unpack(rows: jax.Array, like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The arrays that `pack` put into rows (M, words): (M, ...), each item shaped and typed as in `like`."""
    out, start = [], 0
    for array in like:
        per_word = array.dtype.itemsize // rows.dtype.itemsize
        shape = (rows.shape[0], *array.shape) + ((per_word,) if per_word > 1 else ())
        width = math.prod(array.shape) * per_word
        out.append(lax.bitcast_convert_type(rows[:, start : start + width].reshape(shape), array.dtype))
        start += width
    return out


def word_for(dtype: jnp.dtype) -> jnp.dtype:
    """The unsigned integer that carries this floating-point type."""
    return jnp.dtype({2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(dtype).itemsize])


_Groups = list[list[int]] | None
"""Ranks that exchange with each other, as places in the pool; None: all of them."""


def _groups(node_ranks: int | None) -> _Groups:
    if node_ranks is None:
        return None
    return [list(range(first, first + node_ranks)) for first in range(0, lax.axis_size(POOL_AXES), node_ranks)]


def _ragged(
    parts: Sequence[Part], outbox: jax.Array, inbox: jax.Array, leaving: Box, landing: Box, groups: _Groups
) -> jax.Array:
    """Every pair of ranks has one slice for each part; a pair's slices stand side by side in the tables."""
    slices = []
    for part in parts:
        rows = leaving.rows(part.kind)
        slices.append((
            part.send_offsets[:-1] * rows + leaving.starts[part.kind],
            jnp.diff(part.send_offsets) * rows,
            part.landings * rows + landing.starts[part.kind],
            jnp.diff(part.recv_offsets) * rows,
        ))  # fmt: skip
    tables = (jnp.stack(column, axis=1).reshape(-1) for column in zip(*slices, strict=True))
    return lax.ragged_all_to_all(outbox, inbox, *tables, axis_name=POOL_AXES, axis_index_groups=groups)


def _padded(
    parts: Sequence[Part],
    outbox: jax.Array,
    inbox: jax.Array,
    leaving: Box,
    landing: Box,
    groups: _Groups,
    *,
    swap: Callable[[jax.Array, _Groups], jax.Array],
    in_rounds: bool,
) -> jax.Array:
    """swap: what leaves (M, words) to what arrives (M, words). A row has room for `pair_room` items of every part.

    Rows are ranks, M = N. in_rounds: M = N - 1, row j is for the j-th rank after the next, and comes from the j-th
    before the last.
    """
    ranks = jnp.arange(parts[0].landings.shape[0], dtype=jnp.int32)
    to_rank = row_from = ranks
    if in_rounds:
        n, me = ranks.shape[0], lax.axis_index(POOL_AXES)
        me = me if groups is None else me % n
        to_rank = (me + 1 + ranks[:-1]) % n
        row_from = (me - 1 - ranks) % n  # for the rank itself there is no such row, and nothing to read
    packed = jnp.concatenate([_outgoing(part, leaving.items(outbox, part.kind), to_rank) for part in parts], axis=1)
    arrived, start = swap(packed, groups), 0
    for part in parts:
        width = part.pair_room * landing.words[part.kind]
        room = _land(part, arrived[:, start : start + width], landing.items(inbox, part.kind), row_from)
        inbox = landing.put(inbox, part.kind, room)
        start += width
    return inbox


def _outgoing(part: Part, items: jax.Array, to_rank: jax.Array) -> jax.Array:
    """(M, pair_room * words): the items for each of some ranks, followed by what comes next, which nobody reads."""
    place = part.send_offsets[to_rank][:, None] + jnp.arange(part.pair_room, dtype=jnp.int32)[None, :]
    return items.at[place].get(mode="clip").reshape(place.shape[0], -1)


def _land(part: Part, arrived: jax.Array, room: jax.Array, row_from: jax.Array) -> jax.Array:
    """The room (places, words) with what every rank sent written to its place. arrived: (M, pair_room * words), what
    rank s sent in row row_from[s]."""
    offsets = part.recv_offsets
    place = jnp.arange(room.shape[0], dtype=jnp.int32)
    sender = jnp.searchsorted(offsets, place, side="right").astype(jnp.int32) - 1
    sender = jnp.clip(sender, 0, offsets.shape[0] - 2)
    items = arrived.reshape(-1, room.shape[1])
    received = items.at[row_from[sender] * part.pair_room + place - offsets[sender]].get(mode="clip")
    mine = (place >= offsets[0]) & (place < offsets[-1])
    return jnp.where(mine[:, None], received, room)


def _all_to_all(packed: jax.Array, groups: _Groups) -> jax.Array:
    return lax.all_to_all(packed, POOL_AXES, split_axis=0, concat_axis=0, axis_index_groups=groups)


def _ppermute(packed: jax.Array, groups: _Groups) -> jax.Array:
    """N - 1 rounds; in round j every rank sends to the j-th after it and hears from the j-th before it."""
    n = packed.shape[0] + 1
    groups = [list(range(n))] if groups is None else groups
    rounds = [
        lax.ppermute(
            packed[j - 1 : j], POOL_AXES, [(group[i], group[(i + j) % n]) for group in groups for i in range(n)]
        )
        for j in range(1, n)
    ]
    return jnp.concatenate(rounds)


_TRANSPORTS: dict[str, Callable[..., jax.Array]] = {
    "ragged": _ragged,
    "all_to_all": functools.partial(_padded, swap=_all_to_all, in_rounds=False),
    "ppermute": functools.partial(_padded, swap=_ppermute, in_rounds=True),
}
