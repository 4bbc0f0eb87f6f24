"""The int32 tables of fixed shape that the device side runs from, one set for every rank.

Written from a `Routing`; read by `attention`. Every shape follows from the spec alone, so a new batch brings new
numbers and no new compilation. NumPy only.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from libra_jax.intervals import covering, expand, offsets, rows, stable_order, starts_within
from libra_jax.routing import DIRECT, PASSED, Copies, PageRows, PoolWork, Routing, home_slots
from libra_jax.spec import PoolSpec

Table = Any
"""An int32 array: NumPy on the host, jax on the device."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlanTables:
    """What one rank needs to know, for every rank. int32 arrays of fixed shape behind leading axes.

    Leading axes are (dp, cp) in a `Plan` and (pools, dp, cp) after `stack_plans`; shard them as the batch is. A
    pytree whose only static part is `spec`. H home blocks (= home pages), RB / RP / SP rooms for received blocks,
    received pages and sent pages (`PoolSpec.room`).

    Slots: a block or page at home stands in slot kv_head * blocks_per_rank + block % blocks_per_rank; what is received
    follows from slot H on, in the order (exchange, sender, lane, block).

    entries: (H + RB, 5) executed blocks, ordered by (wave, sequence, kv head, block), the sequence of the longest
        document last: GPU kernels start from the end. Columns as in `libra_kernels.Tiles`.
    wave_offsets: (W + 1,) wave w executes entries wave_offsets[w] to wave_offsets[w + 1].
    pages: (2 H + RP + QP,) page slots that entries point into. The first H rows are the home pages themselves.
    first_visible: (seq_len / cp,) lowest position each home token may see, `PADDING` for padding.
    send_blocks: (H,) home slots in sending order; send_block_offsets: (X, N + 1) which of them go where.
    recv_block_offsets: (X, N + 1) where they land, as received blocks.
    send_pages: (SP,), send_page_offsets, recv_page_offsets: the same for pages.
    return_pages: (RP,) received pages in the order in which their gradients go home, each in the exchange of the last
        wave that uses it; return_page_offsets: (X, N + 1); returned_page_offsets: (X, N + 1) where they land at home.
    block_landings, page_landings: (X, N) where in rank d's room lands what this rank dispatches to it, that is the
        entry for this rank of d's recv_block_offsets and recv_page_offsets. result_landings, gradient_landings: (X, N)
        the same for what goes home, at d's send_block_offsets and returned_page_offsets. Only the ragged transport
        needs them: there the sender says where its rows land.
    sum_offsets: (H + 1,), sum_rows: (SP,): for each home page the returned rows to add to it, in ascending order.

    Where pools have relays (`spec.ranks_per_node`; M ranks in a node, 1 without; QP / LP rooms for passed and relayed
    pages, 1 without). Passed pages, those that came through a relay, stand in slots from H + RP on. Exchange x, here
    among the ranks of one node, runs beside the pool's exchange x; a page has come to its relay before that.

    relay_pages: (LP,) received pages (0 to RP - 1) that this rank passes on, in sending order; relay_page_offsets:
        (X, M + 1) which of them go to which rank of the node; passed_page_offsets: (X, M + 1) where they land, as
        passed pages; passed_page_landings: (X, M) where in the room of rank m of the node lands what this rank passes.
    return_passed: (QP,) passed pages in the order in which their gradients go back to their relays, each in the
        exchange of the last wave that uses it; return_passed_offsets: (X, M + 1); relay_gradient_offsets: (X, M + 1)
        where they land at the relay, 0 to LP - 1; relay_gradient_landings: (X, M) as above.
    relay_sum_offsets: (RP + 1,), relay_sum_rows: (LP,): for each row of return_pages, what came back to the relay and
        is added to it before it goes home, in ascending order. A row goes home in a later exchange than the last that
        brings any of these, or in the last exchange, whose gradients go to relays first and home after that.
    """

    spec: PoolSpec
    entries: Table
    wave_offsets: Table
    pages: Table
    first_visible: Table
    send_blocks: Table
    send_block_offsets: Table
    recv_block_offsets: Table
    send_pages: Table
    send_page_offsets: Table
    recv_page_offsets: Table
    return_pages: Table
    return_page_offsets: Table
    returned_page_offsets: Table
    block_landings: Table
    page_landings: Table
    result_landings: Table
    gradient_landings: Table
    sum_offsets: Table
    sum_rows: Table
    relay_pages: Table
    relay_page_offsets: Table
    passed_page_offsets: Table
    passed_page_landings: Table
    return_passed: Table
    return_passed_offsets: Table
    relay_gradient_offsets: Table
    relay_gradient_landings: Table
    relay_sum_offsets: Table
    relay_sum_rows: Table

    def __post_init__(self) -> None:
        register_pytree()

    def __setstate__(self, state: dict[str, Any]) -> None:  # unpickled, for example from a planning process
        self.__dict__.update(state)
        register_pytree()

    @classmethod
    def table_names(cls) -> list[str]:
        """Names of the array fields, in order."""
        return [field.name for field in dataclasses.fields(cls) if field.name != "spec"]

    def map(self, function: Callable[[Table], np.ndarray]) -> Self:
        """The same tables with `function` applied to every array."""
        return dataclasses.replace(self, **{name: function(getattr(self, name)) for name in self.table_names()})


def register_pytree() -> None:
    """Makes `PlanTables` a pytree as soon as jax is there. Called whenever tables are made; importing jax here would
    make the host side pay for it. Tables made before jax is imported become pytrees with the next call, at the latest
    when the operator is imported."""
    global _registered
    jax = sys.modules.get("jax")
    # A thread may plan while another imports jax: hands off until that is done.
    if _registered or jax is None or getattr(jax.__spec__, "_initializing", False):
        return
    with _registering:
        if not _registered:
            names = PlanTables.table_names()
            jax.tree_util.register_dataclass(PlanTables, data_fields=names, meta_fields=["spec"])
            _registered = True


_registered = False
_registering = threading.Lock()


def table_shapes(spec: PoolSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each table of one rank, behind the leading axes."""
    n, x, home, room = spec.ranks, spec.exchanges, spec.home_blocks, spec.room
    offsets, inside = (x, n + 1), (x, spec.node_ranks + 1)
    return {
        "entries": (home + room.blocks, 5),
        "wave_offsets": (spec.waves + 1,),
        "pages": (2 * home + room.pages + (room.passed_pages if spec.ranks_per_node else 0),),
        "first_visible": (spec.tokens_per_rank,),
        "send_blocks": (home,),
        "send_block_offsets": offsets,
        "recv_block_offsets": offsets,
        "send_pages": (room.sent_pages,),
        "send_page_offsets": offsets,
        "recv_page_offsets": offsets,
        "return_pages": (room.pages,),
        "return_page_offsets": offsets,
        "returned_page_offsets": offsets,
        "block_landings": (x, n),
        "page_landings": (x, n),
        "result_landings": (x, n),
        "gradient_landings": (x, n),
        "sum_offsets": (home + 1,),
        "sum_rows": (room.sent_pages,),
        "relay_pages": (room.relayed_pages,),
        "relay_page_offsets": inside,
        "passed_page_offsets": inside,
        "passed_page_landings": (x, spec.node_ranks),
        "return_passed": (room.passed_pages,),
        "return_passed_offsets": inside,
        "relay_gradient_offsets": inside,
        "relay_gradient_landings": (x, spec.node_ranks),
        "relay_sum_offsets": (room.pages + 1,),
        "relay_sum_rows": (room.relayed_pages,),
    }


def build_tables(executor: np.ndarray, wave: np.ndarray, routing: Routing, work: PoolWork) -> PlanTables:
    """All tables of a pool. executor, wave: (P, K, nb), and what `routing.route` makes of them."""
    spec = work.spec
    n, home, room = spec.ranks, spec.home_blocks, spec.room
    blocks, pages = _transport(routing.blocks, spec), _transport(routing.pages, spec)
    sent_slots = home_slots(routing.pages.unit, spec)
    sum_offsets, sum_rows = _sums_at_home(routing.pages, pages, spec)
    tables = PlanTables(
        spec=spec,
        entries=_entries(routing, blocks, work),
        wave_offsets=_wave_offsets(executor, wave, spec),
        pages=_page_table(routing.page_rows, pages, _transport(routing.passed, spec, inside=True), spec),
        first_visible=np.ascontiguousarray(work.first_visible.reshape(n, spec.tokens_per_rank), np.int32),
        send_blocks=_listed(
            blocks.sent, routing.blocks.source, home_slots(routing.blocks.unit, spec), routing.blocks, home
        ),
        send_block_offsets=blocks.sent.offsets,
        recv_block_offsets=blocks.landed.offsets,
        send_pages=_listed(pages.sent, routing.pages.source, sent_slots, routing.pages, room.sent_pages),
        send_page_offsets=pages.sent.offsets,
        recv_page_offsets=pages.landed.offsets,
        return_pages=_listed(pages.back, routing.pages.target, pages.landed.position, routing.pages, room.pages),
        return_page_offsets=pages.back.offsets,
        returned_page_offsets=pages.returned.offsets,
        block_landings=_landings(blocks.landed.offsets),
        page_landings=_landings(pages.landed.offsets),
        result_landings=_landings(blocks.returned.offsets),
        gradient_landings=_landings(pages.returned.offsets),
        sum_offsets=sum_offsets,
        sum_rows=sum_rows,
        **_relay_tables(routing, pages, spec),
    )
    return tables.map(lambda table: table.reshape(spec.pool_size, spec.cp, *table.shape[1:]))


class _Transport(NamedTuple):
    """Where the first item of each copy stands, on its way there and back.

    sent: among what its source sends. landed: among what its target receives. back: among the results that the target
    sends back. returned: among those that the source gets back.
    """

    sent: _Places
    landed: _Places
    back: _Places
    returned: _Places


class _Places(NamedTuple):
    """position: of a copy's first item at its rank. order: copies by rank and position. offsets: (N, X, peers + 1)."""

    position: np.ndarray
    order: np.ndarray
    offsets: np.ndarray


def _transport(copies: Copies, spec: PoolSpec, inside: bool = False) -> _Transport:
    """inside: among the ranks of a node, which are the peers."""
    n, x, peers = spec.ranks, spec.exchanges, spec.node_ranks if inside else spec.ranks

    def ordered(exchange: np.ndarray, near: np.ndarray, far: np.ndarray) -> _Places:
        """Positions at rank `near` in the order (exchange, far, lane, block)."""
        order = stable_order(far, exchange, near)
        position = np.empty(order.size, np.int32)
        position[order] = starts_within(near[order], copies.length[order], n)
        cell = (near.astype(np.int64) * x + exchange) * peers + far % peers
        flat = offsets(np.bincount(cell, copies.length, n * x * peers).astype(np.int64).reshape(n, x * peers))
        # Row x: peers + 1 offsets that start where exchange x starts.
        return _Places(position, order, flat[:, np.arange(x)[:, None] * peers + np.arange(peers + 1)])

    sent = ordered(copies.arrives, copies.source, copies.target)
    landed = ordered(copies.arrives, copies.target, copies.source)
    if copies.returns is copies.arrives or x == 1:  # the way back is the way there: nothing new to sort
        return _Transport(sent, landed, back=landed, returned=sent)
    back = ordered(copies.returns, copies.target, copies.source)
    return _Transport(sent, landed, back, ordered(copies.returns, copies.source, copies.target))


def _entries(routing: Routing, blocks: _Transport, work: PoolWork) -> np.ndarray:
    """(N, H + RB, 5): every block once, on its executor."""
    spec, runs = work.spec, routing.runs
    slot = home_slots(runs.unit, spec)
    slot[runs.rank != runs.home] = spec.home_blocks + blocks.landed.position
    lightest_first = np.argsort(np.argsort(work.num_pages.max(axis=1), kind="stable"))
    sequence = runs.lane // spec.num_kv_heads
    order = stable_order(lightest_first[sequence], runs.wave, runs.rank)
    count = runs.length[order]
    block = expand(runs.begin[order], count)
    at = np.repeat((sequence[order] * spec.blocks_per_sequence).astype(np.int32), count) + block
    first_page = work.first_page.reshape(-1)[at].astype(np.int32, copy=False)
    row = np.where(runs.active, routing.base - runs.first_page, 0)[order].astype(np.int32)
    columns = np.empty((block.size, 5), np.int32)
    columns[:, 0] = expand(slot[order], count)
    columns[:, 1] = block
    columns[:, 2] = first_page
    columns[:, 3] = work.num_pages.reshape(-1)[at]
    # From the row of the run's first page on; a block of padding has no pages, and any row will do.
    columns[:, 4] = np.where(columns[:, 3] > 0, np.repeat(row, count) + first_page, 0)
    entries = np.zeros((spec.ranks, spec.home_blocks + spec.room.blocks, 5), np.int32)
    executed = np.bincount(runs.rank, runs.length, spec.ranks).astype(np.int64)
    for rank, end in enumerate(np.cumsum(executed)):
        entries[rank, : executed[rank]] = columns[end - executed[rank] : end]
    return entries


def _wave_offsets(executor: np.ndarray, wave: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """(N, W + 1)"""
    cells = executor.reshape(-1) * spec.waves + wave.reshape(-1)
    return offsets(np.bincount(cells, minlength=spec.ranks * spec.waves).reshape(spec.ranks, spec.waves))


def _page_table(rows_: PageRows, pages: _Transport, passed: _Transport, spec: PoolSpec) -> np.ndarray:
    """(N, 2 H + RP + QP): the home pages, then what the runs with remote pages read."""
    table = np.zeros((spec.ranks, *table_shapes(spec)["pages"]), np.int32)
    home = spec.home_blocks
    table[:, :home] = np.arange(home)
    slot = home_slots(rows_.unit, spec)
    direct, from_relay = rows_.kind == DIRECT, rows_.kind == PASSED
    slot[direct] = home + pages.landed.position[rows_.copy[direct]]
    slot[from_relay] = home + spec.room.pages + passed.landed.position[rows_.copy[from_relay]]
    table[:, home:] = rows(rows_.rank, rows_.length, expand(slot, rows_.length), spec.ranks, table.shape[1] - home)
    return table


def _listed(places: _Places, owner: np.ndarray, first: np.ndarray, copies: Copies, size: int) -> np.ndarray:
    """(N, size): for each owner `first`, first + 1, .. of its copies, in the order of their places."""
    length = copies.length[places.order]
    values = expand(first[places.order], length)
    return rows(owner[places.order], length, values, places.offsets.shape[0], size)


def _sums_at_home(copies: Copies, pages: _Transport, spec: PoolSpec) -> tuple[np.ndarray, np.ndarray]:
    """sum_offsets (N, H + 1) and sum_rows (N, SP): returned rows grouped by the home page they belong to."""
    point = np.unique(np.concatenate([copies.unit, copies.unit + copies.length]))
    which, element = covering(copies.unit, copies.unit + copies.length, point)
    order = stable_order(pages.returned.position[which], element)
    which, element = which[order], element[order]
    several = np.bincount(element, minlength=point.size)
    first = np.flatnonzero(np.append(True, element[1:] != element[:-1])) if element.size else element
    number = np.arange(element.size) - np.repeat(first, several[several > 0])  # among the copies of its element
    length = np.diff(point, append=0)
    unit, home, size = point[element[first]], copies.source[which[first]].astype(np.int64), spec.home_blocks
    count = np.zeros(spec.ranks * size, np.int64)
    count[expand(home * size + home_slots(unit, spec), length[element[first]])] = np.repeat(
        several[several > 0], length[element[first]]
    )
    sums = offsets(count.reshape(spec.ranks, size))
    home = copies.source[which].astype(np.int64)
    begin = home * spec.room.sent_pages + sums[home, home_slots(point[element], spec)] + number
    table = np.zeros(spec.ranks * spec.room.sent_pages, np.int32)
    table[expand(begin, length[element], several[element])] = expand(
        pages.returned.position[which] + point[element] - copies.unit[which], length[element]
    )
    return sums, table.reshape(spec.ranks, -1)


def _relay_tables(routing: Routing, pages: _Transport, spec: PoolSpec) -> dict[str, np.ndarray]:
    """The tables of what relays pass on."""
    copies, via, n, room = routing.passed, routing.relay_copy, spec.ranks, spec.room
    passed = _transport(copies, spec, inside=True)
    # What comes back to a relay, by the row of return_pages that it is added to.
    order = stable_order(passed.returned.position, via)
    via_in_order, count = via[order], copies.length[order]
    several = np.bincount(via_in_order, minlength=routing.pages.unit.size)
    number = np.arange(order.size) - (np.cumsum(several) - several)[via_in_order]
    relay = np.flatnonzero(several)
    added = np.zeros(n * room.pages, np.int64)
    at = routing.pages.target[relay].astype(np.int64) * room.pages + pages.back.position[relay]
    added[expand(at, routing.pages.length[relay])] = np.repeat(several[relay], routing.pages.length[relay])
    sums = offsets(added.reshape(n, room.pages))
    source = copies.source[order].astype(np.int64)
    begin = source * room.relayed_pages + sums[source, pages.back.position[via_in_order]] + number
    sum_rows = np.zeros(n * room.relayed_pages, np.int32)
    sum_rows[expand(begin, count, several[via_in_order])] = expand(passed.returned.position[order], count)
    return {
        "relay_pages": _listed(passed.sent, copies.source, pages.landed.position[via], copies, room.relayed_pages),
        "relay_page_offsets": passed.sent.offsets,
        "passed_page_offsets": passed.landed.offsets,
        "passed_page_landings": _landings(passed.landed.offsets, spec.node_ranks),
        "return_passed": _listed(passed.back, copies.target, passed.landed.position, copies, room.passed_pages),
        "return_passed_offsets": passed.back.offsets,
        "relay_gradient_offsets": passed.returned.offsets,
        "relay_gradient_landings": _landings(passed.returned.offsets, spec.node_ranks),
        "relay_sum_offsets": sums,
        "relay_sum_rows": sum_rows.reshape(n, -1),
    }


def _landings(offsets: np.ndarray, node: int | None = None) -> np.ndarray:
    """(N receivers, X, peers + 1) offsets of the receivers -> (N senders, X, peers): each sender's own.

    node: ranks of a node, which then are each other's peers.
    """
    n, x, peers = offsets.shape[0], offsets.shape[1], offsets.shape[2] - 1
    groups = offsets[:, :, :-1].reshape(n // (node or n), node or n, x, peers)
    return np.ascontiguousarray(groups.transpose(0, 3, 2, 1)).reshape(n, x, peers)
