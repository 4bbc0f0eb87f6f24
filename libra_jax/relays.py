"""What relays do in the windows of a pass: pass pages on inside their node, and get these pages' gradients back.

A page that several ranks of a node read crosses between nodes once, to its relay. The relay passes it on in a second
collective, in sub-groups of the pool that are its nodes, which runs in the same window as the pool's and has an outbox
and an inbox of its own: neither waits for the other. Gradients of passed pages come back to the relay the same way, are
added to the relay's own, and go home with them.

Exchange x of a node runs in the windows of exchange x of the pool, and can only pass on what the pool brought before:
so exchange 0 is empty and does not take place. Letters as in `spec` and `tables`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from libra_jax.exchange import Box, Kind, Part, exchange
from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables

PASSED, RETURNED = range(2)
"""Kinds of items: pages on their way to those that read them, their gradients on the way back."""

_UNROLLED = 8


class Buffers(NamedTuple):
    """What leaves, what was passed on, and what came back. None where nothing is there yet, or not needed any more."""

    outbox: jax.Array | None = None
    inbox: jax.Array | None = None
    home: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Relays:
    """The exchanges inside nodes in one pass.

    dispatched, returning: outboxes of exchanges that pass pages on, and of those that only take gradients back.
    received, home: where passed pages land, and where gradients do. A collective has one buffer on either side: with
    more than four waves, when some exchanges do both, the first outbox has room for both, and there is one inbox.
    """

    tables: PlanTables
    transport: str
    with_gradients: bool
    dispatched: Box
    received: Box
    returning: Box
    home: Box

    @property
    def one_inbox(self) -> bool:
        return self.received == self.home

    def exchanges(self, coming: int | None, going: int | None) -> tuple[int | None, int | None]:
        """The node's exchanges that pass pages on and that take gradients back in a window; None where none does.

        coming, going: the pool's exchanges of the window.
        """
        return coming or None, (going or None) if self.with_gradients else None

    def put_out(
        self,
        buffers: Buffers,
        coming: int | None,
        going: int | None,
        received: Callable[[], jax.Array],
        gradients: Callable[[], Sequence[jax.Array]],
    ) -> Buffers:
        """The buffers of a window before its exchange, with all that leaves in the outbox.

        received: the pages that the pool's exchanges brought before, as rows (RP, words). gradients: of the pages by
        slot. Both are called only where they are needed.
        """
        spec, tables, (passing, returning) = self.tables.spec, self.tables, self.exchanges(coming, going)
        leaving = self.dispatched if passing else self.returning
        outbox = buffers.outbox if passing else None  # the next one is written over the last
        outbox = leaving.empty() if outbox is None and (passing or returning) else outbox
        if outbox is not None and passing:
            outbox = leaving.put(outbox, PASSED, received().at[tables.relay_pages].get(mode="clip"))
        if outbox is not None and returning:
            slots = tables.return_passed + spec.home_blocks + spec.room.pages
            outbox = leaving.write(outbox, RETURNED, [d.at[slots].get(mode="clip") for d in gradients()])
        inbox, home = buffers.inbox, buffers.home
        if passing and inbox is None:
            inbox = self.received.empty()
        if coming is None:  # nothing is passed on any more, and what was, the last wave has read
            home, inbox = inbox if self.one_inbox and home is None else home, None
            home = self.home.empty() if returning and home is None else home
        return Buffers(outbox, inbox, home)

    def exchange(self, buffers: Buffers, coming: int | None, going: int | None) -> Buffers:
        """The buffers after a window's exchange."""
        passing, returning = self.exchanges(coming, going)
        parts = ([self._pass_on(passing)] if passing else []) + ([self._give_back(returning)] if returning else [])
        if not parts:
            return buffers
        leaving, landing = (self.dispatched, self.received) if passing else (self.returning, self.home)
        inbox = buffers.inbox if passing else buffers.home
        assert buffers.outbox is not None and inbox is not None
        arrived = exchange(
            parts, buffers.outbox, inbox, leaving, landing,
            transport=self.transport, node_ranks=self.tables.spec.node_ranks,
        )  # fmt: skip
        return buffers._replace(**({"inbox": arrived} if passing else {"home": arrived}))

    def pages(self, buffers: Buffers) -> list[list[jax.Array]]:
        """The passed pages, by array; nothing where none can be there yet."""
        return [] if buffers.inbox is None else [self.received.read(buffers.inbox, PASSED)]

    def add_returned(self, gradients: Sequence[jax.Array], buffers: Buffers, going: int) -> list[jax.Array]:
        """Gradients (RP, ...) float32, in the order in which they go home, with those added that came back to the
        relay; for exchange `going`, one after the other in table order. Rows that do not go home now may be anything.
        """
        tables, spec = self.tables, self.tables.spec
        came_back = buffers.home if buffers.home is not None or not self.one_inbox else buffers.inbox
        if came_back is None or (going < 2 and going < spec.exchanges - 1):
            return list(gradients)
        most = spec.node_ranks - 1  # a page comes back once from each other rank of the node, at most
        return add_rows(
            gradients, came_back, self.home, RETURNED, tables.relay_sum_offsets, tables.relay_sum_rows, most
        )

    def _pass_on(self, x: int) -> Part:
        tables = self.tables
        return Part(
            PASSED, tables.relay_page_offsets[x], tables.passed_page_offsets[x], tables.passed_page_landings[x],
            tables.spec.room.pair_passed,
        )  # fmt: skip

    def _give_back(self, x: int) -> Part:
        tables = self.tables
        return Part(
            RETURNED, tables.return_passed_offsets[x], tables.relay_gradient_offsets[x],
            tables.relay_gradient_landings[x], tables.spec.room.pair_passed,
        )  # fmt: skip


def relays_of(
    tables: PlanTables, transport: str, page: Sequence[jax.ShapeDtypeStruct], word: jnp.dtype, *, gradients: bool
) -> Relays | None:
    """The relays of a pass in which pages are made up of such arrays; None where pools have none.

    gradients: whether the pass has gradients of pages, which travel as pages do.
    """
    spec = tables.spec
    if spec.node_ranks == 1:
        return None
    passed, relayed, both = spec.room.passed_pages, spec.room.relayed_pages, gradients and spec.waves > 4
    box = Box((Kind(0, tuple(page)),) * 2, word)
    return Relays(
        tables, transport, gradients,
        dispatched=box.with_rooms(relayed, passed if both else 0),
        received=box.with_rooms(passed, relayed if both else 0),
        returning=box.with_rooms(0, passed),
        home=box.with_rooms(passed if both else 0, relayed),
    )  # fmt: skip


def page_slots(spec: PoolSpec) -> int:
    """Home pages, received and passed ones; a pool of one rank has only the first, one without relays no passed."""
    received = spec.room.pages if spec.ranks > 1 else 0
    return spec.home_blocks + received + (spec.room.passed_pages if spec.node_ranks > 1 else 0)


def add_rows(
    sums: Sequence[jax.Array],
    buffer: jax.Array,
    box: Box,
    kind: int,
    offsets: jax.Array,
    rows: jax.Array,
    most: int | None = None,
) -> list[jax.Array]:
    """Arrays (M, ...) plus items of a kind, one after the other: to place i are added those that
    rows[offsets[i]:offsets[i + 1]] name. most: no place has more; None: unknown, and the tables are asked."""
    start, count = offsets[:-1], jnp.diff(offsets)

    def add_next(j: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        returned = box.pick(buffer, kind, rows.at[start + j].get(mode="clip"))
        more = (j < count)[:, None, None]
        return [s + jnp.where(more, r.astype(s.dtype), 0) for s, r in zip(sums, returned, strict=True)]

    if most is None:
        return lax.fori_loop(0, count.max(), add_next, list(sums))
    return lax.fori_loop(0, most, add_next, list(sums), unroll=min(most, _UNROLLED))
