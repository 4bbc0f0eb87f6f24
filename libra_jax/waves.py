"""The two passes of pooled attention on one rank: waves of tiles, with the exchanges under them.

While wave w computes, one collective brings what wave w + 1 needs and takes home what wave w - 1 made. Only the last
return has nothing left to hide under. XLA keeps to that because of the barriers in `_in_waves`: nothing of a window can
be known before the window before it is over. Where pools have relays, a second collective runs in the same window
inside their nodes (`relays`).

Letters as in `spec`, and: T tokens of one sequence on one rank, H query heads, H' home blocks, "slots" are home blocks
followed by received ones (`tables.PlanTables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from libra_kernels import PADDING, TileOptions, Tiles, tile_backward, tile_forward

from libra_jax.exchange import Box, Kind, Part, exchange, word_for
from libra_jax.relays import Buffers, Relays, add_rows, page_slots, relays_of
from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables


class Static(NamedTuple):
    """What the compiled program depends on besides shapes."""

    spec: PoolSpec
    options: TileOptions
    implementation: str | None
    transport: str


BLOCKS, PAGES, RESULTS, GRADIENTS = range(4)
"""Kinds of items: blocks and pages on their way out; results of blocks and gradients of pages on their way home."""


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tables: PlanTables, static: Static
) -> tuple[jax.Array, jax.Array]:
    """q (T, H, D), k (T, K, D), v (T, K, E) -> output (T, H, E), log-sum-exp (slots, B, G, 2) float32."""
    spec = static.spec
    block, page = (spec.block, spec.group), (spec.block,)
    boxes = _boxes(tables, static, q.dtype, {
        BLOCKS: [((*block, q.shape[-1]), q.dtype), (page, jnp.int32)],
        PAGES: [((*page, x.shape[-1]), x.dtype) for x in (k, v)],
        RESULTS: [((*block, v.shape[-1]), q.dtype)],
    })  # fmt: skip
    slots = spec.home_blocks + (spec.room.blocks if spec.ranks > 1 else 0)
    out = lax.empty((slots, *block, v.shape[-1]), q.dtype)
    lse = jnp.full((slots, *block, 2), -jnp.inf, jnp.float32)
    (out, lse), came_home = _in_waves(_Forward(tables, static), (q, k, v), (out, lse), boxes)
    return _from_blocks(_take_back(out, came_home, boxes.home, tables), spec), lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    tables: PlanTables,
    d_out: jax.Array,
    static: Static,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients dq (T, H, D), dk (T, K, D), dv (T, K, E) in the inputs' dtype."""
    spec = static.spec
    block, page = (spec.block, spec.group), (spec.block,)
    queries, gradients = ((*block, q.shape[-1]), q.dtype), [((*page, x.shape[-1]), x.dtype) for x in (k, v)]
    boxes = _boxes(tables, static, q.dtype, {
        BLOCKS: [queries, (page, jnp.int32), ((*block, v.shape[-1]), q.dtype), (block, jnp.float32)],
        PAGES: gradients,
        RESULTS: [queries],
        GRADIENTS: gradients,
    })  # fmt: skip
    delta = _row_dots(_to_blocks(_zero_padding(d_out, tables), spec), _to_blocks(out, spec), tables)
    dq = lax.empty((lse.shape[0], *block, q.shape[-1]), q.dtype)
    dk, dv = (jnp.zeros((page_slots(spec), *page, x.shape[-1]), jnp.float32) for x in (k, v))
    (dq, dk, dv), came_home = _in_waves(_Backward(tables, static, lse), (q, k, v, d_out, delta), (dq, dk, dv), boxes)
    dk, dv = _sum_at_home([dk, dv], came_home, boxes.home, tables)
    return (
        _from_blocks(_take_back(dq, came_home, boxes.home, tables), spec),
        _from_pages(dk.astype(k.dtype), spec),
        _from_pages(dv.astype(v.dtype), spec),
    )


class _Forward(NamedTuple):
    """What is the forward pass's own. Source: q, k and v as the model has them. State: output and log-sum-exp."""

    tables: PlanTables
    static: Static

    def home(self, source: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """Home blocks and home pages, array by array as the kinds list them."""
        q, k, v = (_zero_padding(x, self.tables) for x in source)
        spec = self.static.spec
        return [_to_blocks(q, spec), _first_visible(self.tables)], [_to_pages(k, spec), _to_pages(v, spec)]

    def compute(self, wave: int, blocks: list[jax.Array], pages: list[jax.Array], state: Any) -> Any:
        """The state with a wave's tiles done; blocks and pages by slot."""
        (q, first), (k, v) = blocks, pages
        return tile_forward(
            q, k, v, _tiles(self.tables, wave, first), *state,
            options=self.static.options, implementation=self.static.implementation,
        )  # fmt: skip

    def results(self, state: Any) -> dict[int, list[jax.Array]]:
        """What can go home, by kind and in sending order."""
        return {RESULTS: [state[0][self.static.spec.home_blocks :]]}

    def gradients(self, state: Any) -> list[jax.Array]:
        """Of the pages, by slot, in this pass."""
        return []


class _Backward(NamedTuple):
    """The backward pass's own. Source: q, k, v and the output's cotangent as the model has them, and delta by block.
    State: dq, and dk and dv in float32."""

    tables: PlanTables
    static: Static
    lse: jax.Array

    def home(self, source: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        *arrays, delta = source
        q, k, v, d_out = (_zero_padding(x, self.tables) for x in arrays)
        spec = self.static.spec
        blocks = [_to_blocks(q, spec), _first_visible(self.tables), _to_blocks(d_out, spec), delta]
        return blocks, [_to_pages(k, spec), _to_pages(v, spec)]

    def compute(self, wave: int, blocks: list[jax.Array], pages: list[jax.Array], state: Any) -> Any:
        (q, first, d_out, delta), (k, v) = blocks, pages
        return tile_backward(
            q, k, v, d_out, self.lse, delta, _tiles(self.tables, wave, first), *state,
            options=self.static.options, implementation=self.static.implementation,
        )  # fmt: skip

    def results(self, state: Any) -> dict[int, list[jax.Array]]:
        dq, dk, dv = state
        home = self.static.spec.home_blocks
        return {RESULTS: [dq[home:]], GRADIENTS: _take([dk, dv], self.tables.return_pages + home)}

    def gradients(self, state: Any) -> list[jax.Array]:
        return list(state[1:])


def _in_waves(work: _Forward | _Backward, source: Any, state: Any, boxes: _Boxes) -> tuple[Any, jax.Array | None]:
    """All waves of a pass. Returns the state, and what came home, laid out as `boxes.home`.

    All that is dispatched is put together before the first wave, and each exchange sends its part of it.
    """
    tables, (spec, *_, transport) = work.tables, work.static
    inside = Buffers()
    outbox: Any = None  # where nothing is there yet, or not needed any more, and in a pool of one rank
    inbox: Any = None
    home: Any = None
    leaving, returning, relays = boxes.dispatched, boxes.returning, boxes.relays
    if spec.ranks > 1:
        inbox = boxes.received.empty()
        with jax.named_scope("libra_dispatch_0"):
            blocks, pages = work.home(source)
            outbox = leaving.write(
                leaving.empty(), BLOCKS, _take(blocks, tables.send_blocks[: leaving.kinds[BLOCKS].room])
            )
            outbox = leaving.write(outbox, PAGES, _take(pages, tables.send_pages))
    if (x := _exchange_of(0, spec)) is not None:  # all work in one wave: there is nothing to hide the exchange under
        with jax.named_scope(f"libra_dispatch_{x}"):
            inbox = exchange(_dispatch(x, tables), outbox, inbox, leaving, boxes.received, transport=transport)
    for wave in range(spec.waves):
        coming, going = _exchange_of(wave + 1, spec), _exchange_of(wave - 1, spec)
        if going is not None:
            with jax.named_scope(f"libra_return_{going}"):
                if coming is None:
                    outbox, leaving = returning.empty(), returning
                outbox = leaving.write_all(outbox, _results(going, work, state, relays, inside))
        with jax.named_scope(f"libra_wave_{wave}"):
            blocks, pages = work.home(source)
            if _exchange_of(wave, spec) is not None:
                blocks = _by_slot(blocks, boxes.received.read(inbox, BLOCKS))
                passed = relays.pages(inside) if relays else []
                pages = _by_slot(pages, boxes.received.read(inbox, PAGES), *passed)
        inside = _put_out(coming, going, work, state, inbox, boxes, inside)
        if coming is None:  # the last wave: nothing is dispatched any more
            inbox, last = None, inbox
            if going is None:
                outbox = None
            else:
                home = last if boxes.one_inbox else boxes.home.empty()
        with jax.named_scope(_scope(coming, going)):
            # All that the wave reads of the inbox, and all that leaves of the state, is read before either is written
            # to. (Inside of the scope: XLA drops the names of ragged exchanges, those of barriers it keeps.)
            blocks, pages, outbox, inbox, home, inside, state = lax.optimization_barrier(
                (blocks, pages, outbox, inbox, home, inside, state)
            )
            if coming is not None:
                parts = _dispatch(coming, tables) + ([] if going is None else _return(going, tables, leaving))
                inbox = exchange(parts, outbox, inbox, leaving, boxes.received, transport=transport)
            elif going is not None:
                parts = _return(going, tables, leaving)
                home = exchange(parts, outbox, home, leaving, boxes.home, transport=transport)
        inside = _inside_nodes(coming, going, relays, inside)
        with jax.named_scope(f"libra_wave_{wave}"):
            state = work.compute(wave, blocks, pages, state)
        # The window ends when both are done. Whatever does not come from here could start early, or late.
        source, outbox, inbox, home, inside, state = lax.optimization_barrier(
            (source, outbox, inbox, home, inside, state)
        )
    if (x := _exchange_of(spec.waves - 1, spec)) is not None:
        inside = _inside_nodes(None, x, relays, _put_out(None, x, work, state, inbox, boxes, inside))
        with jax.named_scope(f"libra_return_{x}"):
            home = boxes.home.empty() if home is None else home
            parts, results = _return(x, tables, returning), _results(x, work, state, relays, inside)
            if len(parts) == 1:  # nothing writes to the state any more, so it is sent from where it stands
                returning, results = returning.with_rooms(0, 0, state[0].shape[0]), {RESULTS: [state[0]]}
                parts = [parts[0]._replace(send_offsets=parts[0].send_offsets + spec.home_blocks)]
            outbox = returning.write_all(returning.empty(), results)
            home = exchange(parts, outbox, home, returning, boxes.home, transport=transport)
    return state, home


def _dispatch(x: int, tables: PlanTables) -> list[Part]:
    """Blocks and pages that exchange x brings to their executors, added to what earlier ones brought."""
    room = tables.spec.room
    return [
        Part(
            BLOCKS, tables.send_block_offsets[x], tables.recv_block_offsets[x], tables.block_landings[x],
            room.pair_blocks,
        ),
        Part(
            PAGES, tables.send_page_offsets[x], tables.recv_page_offsets[x], tables.page_landings[x],
            room.pair_pages,
        ),
    ]  # fmt: skip


def _return(x: int, tables: PlanTables, box: Box) -> list[Part]:
    """The way back: of the blocks that exchange x brought by the dispatch's offsets, the other way round, and of the
    gradients of the pages whose last wave it fed."""
    room = tables.spec.room
    parts = [
        Part(
            RESULTS, tables.recv_block_offsets[x], tables.send_block_offsets[x], tables.result_landings[x],
            room.pair_blocks,
        ),
        Part(
            GRADIENTS, tables.return_page_offsets[x], tables.returned_page_offsets[x], tables.gradient_landings[x],
            room.pair_pages,
        ),
    ]  # fmt: skip
    return [part for part in parts if part.kind < len(box.kinds)]


def _results(
    going: int, work: _Forward | _Backward, state: Any, relays: Relays | None, inside: Buffers
) -> dict[int, list[jax.Array]]:
    """What goes home in exchange `going`, by kind, with what came back to relays added."""
    results = work.results(state)
    if relays is not None and GRADIENTS in results:
        results[GRADIENTS] = relays.add_returned(results[GRADIENTS], inside, going)
    return results


def _put_out(
    coming: int | None,
    going: int | None,
    work: _Forward | _Backward,
    state: Any,
    inbox: Any,
    boxes: _Boxes,
    inside: Buffers,
) -> Buffers:
    """What a window's exchange inside nodes needs, from what is there before the window."""
    if boxes.relays is None:
        return inside
    with jax.named_scope(_scope(*boxes.relays.exchanges(coming, going), "libra_node")):
        return boxes.relays.put_out(
            inside, coming, going, lambda: boxes.received.items(inbox, PAGES), lambda: work.gradients(state)
        )


def _inside_nodes(coming: int | None, going: int | None, relays: Relays | None, inside: Buffers) -> Buffers:
    """A window's exchange inside nodes."""
    if relays is None:
        return inside
    with jax.named_scope(_scope(*relays.exchanges(coming, going), "libra_node")):
        return relays.exchange(lax.optimization_barrier(inside), coming, going)


def _scope(coming: int | None, going: int | None, of: str = "libra") -> str:
    """The name of a window's exchange, for whoever reads a schedule or a profile."""
    names = [] if coming is None else [f"{of}_dispatch_{coming}"]
    return "/".join(names if going is None else [*names, f"{of}_return_{going}"]) or f"{of}_no_exchange"


def _exchange_of(wave: int, spec: PoolSpec) -> int | None:
    """The exchange that feeds a wave; None for the first of several waves, in a pool of one rank, and for no wave."""
    if spec.ranks == 1 or not 0 <= wave < spec.waves:
        return None
    x = wave - (spec.waves > 1)
    return x if x >= 0 else None


class _Boxes(NamedTuple):
    """How the buffers of a pass are laid out.

    dispatched: the outbox that all dispatches leave from. received: the inbox that they land in. returning: the outbox
    of an exchange that only takes results home. home: where results land. relays: the exchanges inside nodes.

    With more than three waves some exchanges dispatch and return at once. A collective has one buffer on either side:
    then the first outbox has room for results too, and there is one inbox, `received` being `home`.
    """

    dispatched: Box
    received: Box
    returning: Box
    home: Box
    relays: Relays | None

    @property
    def one_inbox(self) -> bool:
        return self.received == self.home


def _boxes(
    tables: PlanTables, static: Static, dtype: jnp.dtype, kinds: dict[int, list[tuple[tuple[int, ...], Any]]]
) -> _Boxes:
    """The boxes of a pass, for items made up of arrays of these shapes and types."""
    spec = static.spec
    room, both = spec.room, spec.waves > 3
    likes = (tuple(jax.ShapeDtypeStruct(*array) for array in like) for like in kinds.values())
    box = Box(tuple(Kind(0, like) for like in likes), word_for(dtype))

    def with_rooms(blocks: int, pages: int, results: int, gradients: int) -> Box:
        return box.with_rooms(*(blocks, pages, results, gradients)[: len(kinds)])

    sent_blocks = min(spec.home_blocks, spec.exchanges * (spec.ranks - 1) * room.pair_blocks)
    back, home = (room.blocks, room.pages), (sent_blocks, room.sent_pages)
    return _Boxes(
        dispatched=with_rooms(*home, *(back if both else (0, 0))),
        received=with_rooms(*back, *(home if both else (0, 0))),
        returning=with_rooms(0, 0, *back),
        home=with_rooms(*(back if both else (0, 0)), *home),
        relays=relays_of(tables, static.transport, box.kinds[PAGES].like, box.word, gradients=GRADIENTS in kinds),
    )


def _first_visible(tables: PlanTables) -> jax.Array:
    """(H', B)"""
    spec = tables.spec
    first = tables.first_visible.reshape(1, spec.blocks_per_rank, spec.block)
    return jnp.broadcast_to(first, (spec.num_kv_heads, *first.shape[1:])).reshape(-1, spec.block)


def _zero_padding(x: jax.Array, tables: PlanTables) -> jax.Array:
    """(T, heads, width) with padding rows zeroed: pages are shared, and 0 * NaN would reach real rows."""
    return jnp.where((tables.first_visible < PADDING)[:, None, None], x, 0)


def _take(arrays: Sequence[jax.Array], index: jax.Array) -> list[jax.Array]:
    return [array.at[index].get(mode="clip") for array in arrays]


def _by_slot(*parts: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.concatenate(part) for part in zip(*parts, strict=True)]


def _row_dots(a: jax.Array, b: jax.Array, tables: PlanTables) -> jax.Array:
    """Sums over the last axis of a * b in float32, for blocks (H', B, G, E) -> (H', B, G).

    On CPUs one block after the other: the order in which XLA:CPU adds, and whether it fuses multiply and add, follows
    from the shape, and must not depend on how many blocks a rank is home to (dq has the same bits on every mesh). The
    number of turns is read from the tables, because a loop that is known to turn once is unrolled into its
    surroundings. On GPUs a row is one warp's, whatever the number of rows, and thousands of turns would cost launches.
    """
    turns = tables.wave_offsets[0] + a.shape[0]  # the first offset is 0

    def in_turn(a: jax.Array, b: jax.Array, turns: jax.Array) -> jax.Array:
        def one_block(i: jax.Array, sums: jax.Array) -> jax.Array:
            row_a, row_b = (lax.dynamic_index_in_dim(x, i, 0, keepdims=False).astype(jnp.float32) for x in (a, b))
            return lax.dynamic_update_index_in_dim(sums, jnp.sum(row_a * row_b, axis=-1), i, 0)

        return lax.fori_loop(0, turns, one_block, jnp.zeros(a.shape[:-1], jnp.float32))

    def at_once(a: jax.Array, b: jax.Array, turns: jax.Array) -> jax.Array:
        return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1)

    return lax.platform_dependent(a, b, turns, cpu=in_turn, default=at_once)


def _tiles(tables: PlanTables, wave: int, first_visible: jax.Array) -> Tiles:
    start, stop = tables.wave_offsets[wave], tables.wave_offsets[wave + 1]
    return Tiles(tables.entries, tables.pages, first_visible, start, stop)


def _take_back(slots: jax.Array, came_home: jax.Array | None, box: Box, tables: PlanTables) -> jax.Array:
    """Home results, those of blocks that were executed elsewhere among them."""
    home = slots[: tables.spec.home_blocks]
    if came_home is None:
        return home
    (results,) = box.read(came_home, RESULTS)
    position = jnp.arange(results.shape[0], dtype=jnp.int32)
    came = position < tables.send_block_offsets[-1, -1]
    slot = jnp.where(came, tables.send_blocks[: results.shape[0]], home.shape[0])
    return home.at[slot].set(results, mode="drop")


def _sum_at_home(
    slots: Sequence[jax.Array], came_home: jax.Array | None, box: Box, tables: PlanTables
) -> list[jax.Array]:
    """Home partial gradients (float32) plus the returned ones of each page, one after the other in table order."""
    home = [d[: tables.spec.home_blocks] for d in slots]
    if came_home is None:
        return home
    return add_rows(home, came_home, box, GRADIENTS, tables.sum_offsets, tables.sum_rows)


def _to_blocks(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(T, H, D) -> (K * blocks, B, G, D)"""
    x = x.reshape(spec.blocks_per_rank, spec.block, spec.num_kv_heads, spec.group, -1)
    return x.transpose(2, 0, 1, 3, 4).reshape(spec.home_blocks, spec.block, spec.group, -1)


def _from_blocks(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(K * blocks, B, G, D) -> (T, H, D)"""
    x = x.reshape(spec.num_kv_heads, spec.blocks_per_rank, spec.block, spec.group, -1)
    return x.transpose(1, 2, 0, 3, 4).reshape(spec.tokens_per_rank, spec.num_heads, -1)


def _to_pages(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(T, K, D) -> (K * blocks, B, D)"""
    x = x.reshape(spec.blocks_per_rank, spec.block, spec.num_kv_heads, -1)
    return x.transpose(2, 0, 1, 3).reshape(spec.home_blocks, spec.block, -1)


def _from_pages(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(K * blocks, B, D) -> (T, K, D)"""
    x = x.reshape(spec.num_kv_heads, spec.blocks_per_rank, spec.block, -1)
    return x.transpose(1, 2, 0, 3).reshape(spec.tokens_per_rank, spec.num_kv_heads, -1)
