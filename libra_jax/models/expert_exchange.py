"""Tokens through their experts, on one rank: experts gathered to where tokens are, or tokens sent to where experts are.

Takes a rank's tokens, the experts each has chosen, and the rank's shard of the experts; gives the weighted sum of the
experts' outputs. Forward and backward are written out (`jax.custom_vjp`), and keep the arguments only: weights are
gathered again, tokens travel again.

Spread experts: rank r of a pool's R has experts r·E/R to (r+1)·E/R. Everybody's counts are gathered first (R·E
numbers), so all ranks know all runs, and go through the same number of rounds. A round moves the next `run_items` items
of every pair of ranks and brings their results back: buffers have a fixed size, and yet no item is ever dropped.

Letters: T tokens of a rank, D width, k choices of a token, E experts, R ranks of the pool.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from libra_jax.exchange import POOL_AXES, Box, Kind, Part, exchange, word_for
from libra_jax.models.grouped import Experts, Items, grouped_swiglu, grouped_swiglu_backward


@dataclasses.dataclass(frozen=True)
class Layout:
    """How experts lie, and how tokens get to them.

    num_experts: E. axes: mesh axes over which an expert's shards are gathered. along: dimension of gate, up and down
        (E, ., .) that is spread over `axes`; None: every rank of these axes has the whole.
    ranks: R where experts are spread over the pool, None where they are gathered.
    run_items: items that a rank sends to another in one round, at most. transport: of `exchange`.
    """

    num_experts: int
    axes: tuple[str, ...]
    along: tuple[int | None, int | None, int | None]
    ranks: int | None = None
    run_items: int = 0
    transport: str = "all_to_all"


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def through_experts(
    x: Float[Array, "T D"],
    chosen: Int[Array, "T k"],
    factors: Float[Array, "T k"],
    shards: Experts,
    layout: Layout,
) -> Float[Array, "T D"]:
    """Sum over a token's choices of factor · expert(token), in x's dtype.

    x: in the type to multiply in. chosen: int32, no expert twice for one token; `num_experts` where a token has none,
    and then it gets 0 and moves no gradient. factors: float32. shards: float32, this rank's part of the experts.
    Runs inside `jax.shard_map` over the whole mesh; every rank of a pool calls it. Gradients of shards are float32,
    summed over `layout.axes` where they are spread along them; where not, shard_map sums.
    """
    experts = _gathered(shards, layout, x.dtype)
    sort = _sorted(chosen, layout.num_experts)
    if layout.ranks is None:
        items = Items(sort.order // chosen.shape[1], factors.reshape(-1)[sort.order], jnp.diff(sort.offsets))
        return grouped_swiglu(x, items, experts).astype(x.dtype)
    road = _Road(x, chosen, sort, layout)

    def round_(j: jax.Array, out: jax.Array) -> jax.Array:
        trip = road.trip(j)
        (rows,) = trip.send([x[trip.tokens]])
        (done,) = trip.send_back([grouped_swiglu(rows, trip.items(1.0), experts).astype(x.dtype)])
        return out + trip.sum_at_home(done, factors)

    return road.rounds(round_, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _forward(
    x: jax.Array, chosen: jax.Array, factors: jax.Array, shards: Experts, layout: Layout
) -> tuple[jax.Array, Any]:
    return through_experts(x, chosen, factors, shards, layout), (x, chosen, factors, shards)


def _backward(layout: Layout, kept: Any, d_out: jax.Array) -> tuple[jax.Array, None, jax.Array, Experts]:
    x, chosen, factors, shards = kept
    experts = _gathered(shards, layout, x.dtype)
    sort = _sorted(chosen, layout.num_experts)
    if layout.ranks is None:
        items = Items(sort.order // chosen.shape[1], factors.reshape(-1)[sort.order], jnp.diff(sort.offsets))
        d_x, d_items, d_experts = grouped_swiglu_backward(x, d_out, items, experts)
        d_factors = d_items[sort.places].reshape(factors.shape)
        # Neither is there before the other: whole gradients of experts are not to wait for the end of the step.
        d_x, d_experts = lax.optimization_barrier((d_x.astype(x.dtype), _scattered(d_experts, layout)))
        return d_x, None, d_factors, d_experts
    road = _Road(x, chosen, sort, layout)

    def round_(j: jax.Array, sums: Any) -> Any:
        d_x, d_factors, d_experts = sums
        trip = road.trip(j)
        rows, d_rows, factor = trip.send([x[trip.tokens], d_out[trip.tokens], factors.reshape(-1)[trip.pairs]])
        d_rows, d_items, d_here = grouped_swiglu_backward(rows, d_rows, trip.items(factor), experts)
        d_rows, d_items = trip.send_back([d_rows.astype(x.dtype), trip.unsorted(d_items)])
        d_x = d_x + trip.sum_at_home(d_rows, jnp.ones(factors.shape, jnp.float32))
        d_factors = jnp.where(trip.here, d_items[trip.places], d_factors)
        return d_x, d_factors, jax.tree.map(jnp.add, d_experts, d_here)

    nothing = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), (x, factors, experts))
    d_x, d_factors, d_experts = road.rounds(round_, nothing)
    return d_x.astype(x.dtype), None, d_factors, _scattered(d_experts, layout)


through_experts.defvjp(_forward, _backward)


def _gathered(shards: Experts, layout: Layout, dtype: Any) -> Experts:
    """The experts of this rank, each whole, in dtype: cast first, so half the bytes travel."""

    def one(shard: jax.Array, along: int | None) -> jax.Array:
        shard = shard.astype(dtype)
        return shard if along is None else lax.all_gather(shard, layout.axes, axis=along, tiled=True)

    return Experts(*map(one, shards, layout.along))


def _scattered(gradients: Experts, layout: Layout) -> Experts:
    def one(gradient: jax.Array, along: int | None) -> jax.Array:
        if along is None:
            return gradient
        return lax.psum_scatter(gradient, layout.axes, scatter_dimension=along, tiled=True)

    return Experts(*map(one, gradients, layout.along))


class _Sort(NamedTuple):
    """Pairs (token, choice), numbered token · k + choice, sorted by expert; those without an expert come last.

    order: (T·k,) int32, the pair at each place. places: (T·k,) int32, the place of each pair. offsets: (E + 1,) int32,
    where each expert's pairs begin.
    """

    order: jax.Array
    places: jax.Array
    offsets: jax.Array


def _sorted(chosen: jax.Array, bins: int) -> _Sort:
    """Counts instead of comparing: a token's place under an expert is the number of earlier ones that chose it. (XLA
    has CUB sort many keys, and cannot compile that where there is no GPU.)

    chosen: (tokens, choices) int32, no bin twice for one token; numbers past the bins sort last.
    """
    tokens, choices = chosen.shape
    bin_ = jnp.minimum(chosen, bins)
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    without = jnp.sum(chosen >= bins, axis=1, dtype=jnp.int32)
    chose = jnp.zeros((tokens, bins), jnp.int32).at[token, bin_].set(1, mode="drop", unique_indices=True)
    before = jnp.cumsum(chose, axis=0) - chose
    offsets = _offsets(jnp.sum(chose, axis=0))
    spare = offsets[-1] + (jnp.cumsum(without) - without)[:, None] + jnp.cumsum(chosen >= bins, axis=1) - 1
    among = jnp.take_along_axis(before, jnp.minimum(bin_, bins - 1), axis=1)
    places = jnp.where(bin_ < bins, offsets[bin_] + among, spare).astype(jnp.int32).reshape(-1)
    order = jnp.zeros_like(places).at[places].set(jnp.arange(tokens * choices, dtype=jnp.int32), unique_indices=True)
    return _Sort(order, places, offsets)


class _Road:
    """All that the ranks of a pool have to agree on to move a layer's pairs."""

    def __init__(self, x: jax.Array, chosen: jax.Array, sort: _Sort, layout: Layout) -> None:
        assert layout.ranks is not None
        self.x, self.chosen, self.sort, self.layout = x, chosen, sort, layout
        self.ranks, self.here = layout.ranks, layout.num_experts // layout.ranks
        counts = lax.all_gather(jnp.diff(sort.offsets), POOL_AXES)
        self.counts = counts.reshape(self.ranks, self.ranks, self.here)  # from rank, to rank, its expert
        self.runs = jnp.sum(self.counts, axis=-1, dtype=jnp.int32)

    def rounds(self, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
        """body(0, 1, ...) until the pool's longest run is through: the same number on every rank of the pool."""
        number = (jnp.max(self.runs) + self.layout.run_items - 1) // self.layout.run_items
        return lax.while_loop(
            lambda state: state[0] < number,
            lambda state: (state[0] + 1, body(*state)),
            (jnp.zeros((), jnp.int32), start),
        )[1]

    def trip(self, j: jax.Array) -> _Trip:
        return _Trip(self, j)


class _Trip:
    """One round: items out to their experts' ranks, results back.

    tokens, pairs: (room,), of what leaves this rank, in the order in which it leaves. here: (T, k) bool, pairs that
    leave in this round; places: (T, k), at which.
    """

    def __init__(self, road: _Road, j: jax.Array) -> None:
        layout, me, ranks = road.layout, lax.axis_index(POOL_AXES), road.ranks
        first = j * layout.run_items
        sizes = jnp.clip(road.runs - first, 0, layout.run_items)
        leave, arrive = _offsets(sizes[me]), _offsets(sizes[:, me])
        self.room, self.transport = ranks * layout.run_items, layout.transport
        self.out = Part(0, leave, arrive, (jnp.cumsum(sizes, axis=0) - sizes)[me], layout.run_items)
        self.back = Part(0, arrive, leave, (jnp.cumsum(sizes, axis=1) - sizes)[:, me], layout.run_items)
        place = jnp.arange(self.room, dtype=jnp.int32)

        begin = road.sort.offsets[: -1 : road.here]
        to = _owner(leave, place)
        self.pairs = road.sort.order.at[begin[to] + first + place - leave[to]].get(mode="clip")
        choices = road.chosen.shape[1]
        self.tokens = self.pairs // choices

        rank = jnp.minimum(road.chosen // road.here, ranks - 1)
        in_run = road.sort.places.reshape(road.chosen.shape) - begin[rank] - first
        chose = road.chosen < layout.num_experts
        self.here = chose & (in_run >= 0) & (in_run < layout.run_items)
        self.places = jnp.where(self.here, leave[rank] + in_run, 0)

        come_from = _owner(arrive, place)
        ends = jnp.cumsum(road.counts[:, me], axis=-1)[come_from]
        expert = jnp.sum((first + place - arrive[come_from])[:, None] >= ends, axis=1, dtype=jnp.int32)
        self.sort = _sorted(jnp.where(place < arrive[-1], expert, road.here)[:, None], road.here)

    def items(self, factors: jax.Array | float) -> Items:
        """What has arrived, sorted by expert. factors: (room,) as they arrived, or one for all."""
        factors = jnp.broadcast_to(jnp.asarray(factors, jnp.float32), (self.room,))
        return Items(self.sort.order, factors[self.sort.order], jnp.diff(self.sort.offsets))

    def unsorted(self, values: jax.Array) -> jax.Array:
        """Values of items, in the order in which the items arrived."""
        return values[self.sort.places]

    def send(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays (room, ...), one row for each item that leaves -> one for each that arrives."""
        return self._move(self.out, arrays)

    def send_back(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The other way round."""
        return self._move(self.back, arrays)

    def sum_at_home(self, rows: jax.Array, factors: jax.Array) -> jax.Array:
        """(T, D) float32: for each token the sum of its rows times factors (T, k), in the order of its choices."""
        rows = jnp.where(self.here[..., None], rows[self.places], jnp.zeros((), rows.dtype))
        return jnp.sum(rows.astype(jnp.float32) * factors[..., None], axis=1)

    def _move(self, part: Part, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        like = tuple(jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in arrays)
        narrow = min((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
        box = Box((Kind(self.room, like),), word_for(narrow))
        outbox = box.write(box.empty(), 0, arrays)
        return box.read(exchange([part], outbox, box.empty(), box, box, transport=self.transport), 0)


def _offsets(sizes: jax.Array) -> jax.Array:
    """Where each of so many begins, and the end of the last: (N,) -> (N + 1,)."""
    return jnp.pad(jnp.cumsum(sizes), (1, 0)).astype(jnp.int32)


def _owner(offsets: jax.Array, place: jax.Array) -> jax.Array:
    """The run that each place is in; the last for places after all."""
    owner = jnp.searchsorted(offsets, place, side="right").astype(jnp.int32) - 1
    return jnp.clip(owner, 0, offsets.shape[0] - 2)


def run_items(capacity: float, tokens: int, choices: int, ranks: int) -> int:
    """Items that a rank sends to another in one round: `capacity` times the even share, at least one."""
    return min(max(1, math.ceil(capacity * tokens * choices / ranks)), tokens * choices)
