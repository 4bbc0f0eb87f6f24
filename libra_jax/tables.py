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

from libra_jax.routing import PoolWork, Routes, Routing, rank_within, stable_order
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
    pages: (2 H + RP,) page slots that entries point into. The first H rows are the home pages themselves.
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
        "pages": (2 * home + room.pages,),
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
    spec = work.spec
    n, home_blocks, room = spec.ranks, spec.home_blocks, spec.room
    home_slot = work.home_slot()
    blocks, pages = _transport(routing.blocks, spec, home_slot), _transport(routing.pages, spec, home_slot)

    # Entries: every unit once, on its executor.
    q_slot = home_slot.copy()
    q_slot[routing.blocks.unit] = home_blocks + blocks.landing
    first_page = work.lanes(work.first_page)
    page_base = np.zeros(executor.size, np.int32)
    run_length = routing.runs.last - routing.runs.first + 1
    in_run = _expand(routing.runs.first, run_length)
    run_first = np.repeat(routing.runs.first, run_length)
    page_base[in_run] = np.repeat(routing.runs.base, run_length) + first_page[in_run] - first_page[run_first]
    lightest_first = np.argsort(work.num_pages.max(axis=1), kind="stable")
    units = np.arange(executor.size, dtype=np.int32).reshape(spec.pool_size, -1)[lightest_first].reshape(-1)
    order = units[stable_order(wave.reshape(-1)[units], executor.reshape(-1)[units])]
    rank = executor.reshape(-1)[order]
    columns = np.stack(
        [
            q_slot[order],
            (order % spec.blocks_per_sequence).astype(np.int32),
            first_page[order],
            work.lanes(work.num_pages)[order],
            page_base[order],
        ],
        axis=1,
    )
    entries = np.zeros((n, home_blocks + room.blocks, 5), np.int32)
    entries[rank, rank_within(rank, n)] = columns
    per_wave = np.bincount(executor.reshape(-1) * spec.waves + wave.reshape(-1), minlength=n * spec.waves)
    wave_offsets = _offsets(per_wave.reshape(n, spec.waves))

    # Page table: the home pages, then what the runs with remote pages read.
    page_slot = np.zeros((n, 2 * home_blocks + room.pages), np.int32)
    page_slot[:, :home_blocks] = np.arange(home_blocks)
    row_rank, row, row_unit = routing.page_rows
    slot = home_slot[row_unit]
    remote = work.home()[row_unit] != row_rank
    slot[remote] = home_blocks + pages.landing
    page_slot[row_rank, row] = slot

    # Sums at home: returned rows grouped by the home page they belong to.
    by_slot = stable_order(pages.returned, home_slot[routing.pages.unit], routing.pages.home)
    by_slot_home = routing.pages.home[by_slot]
    sum_rows = np.zeros((n, room.sent_pages), np.int32)
    sum_rows[by_slot_home, rank_within(by_slot_home, n)] = pages.returned[by_slot]
    copies = np.bincount(routing.pages.home * home_blocks + home_slot[routing.pages.unit], minlength=n * home_blocks)

    tables = PlanTables(
        spec=spec,
        entries=entries,
        wave_offsets=wave_offsets,
        pages=page_slot,
        first_visible=np.ascontiguousarray(work.first_visible.reshape(n, spec.tokens_per_rank), np.int32),
        send_blocks=_rows(blocks.send_slots, home_blocks),
        send_block_offsets=blocks.send_offsets,
        recv_block_offsets=blocks.recv_offsets,
        send_pages=_rows(pages.send_slots, room.sent_pages),
        send_page_offsets=pages.send_offsets,
        recv_page_offsets=pages.recv_offsets,
        return_pages=_rows(pages.return_rows, room.pages),
        return_page_offsets=pages.return_offsets,
        returned_page_offsets=pages.returned_offsets,
        block_landings=_landings(blocks.recv_offsets),
        page_landings=_landings(pages.recv_offsets),
        result_landings=_landings(blocks.returned_offsets),
        gradient_landings=_landings(pages.returned_offsets),
        sum_offsets=_offsets(copies.reshape(n, home_blocks)),
        sum_rows=sum_rows,
        **_nothing_passed(spec),
    )
    return tables.map(lambda table: table.reshape(spec.pool_size, spec.cp, *table.shape[1:]))


def _nothing_passed(spec: PoolSpec) -> dict[str, np.ndarray]:
    """The tables of relays where no page goes through one."""
    names = PlanTables.table_names()
    relays = names[names.index("relay_pages") :]
    return {name: np.zeros((spec.ranks, *table_shapes(spec)[name]), np.int32) for name in relays}


class _Transport(NamedTuple):
    """Positions of one kind of item on its way. `*_slots` and `*_rows` are (rank, position, value) triples."""

    landing: np.ndarray
    """Position of each item among what its executor receives."""
    returned: np.ndarray
    """Position of each item's result among what its home gets back."""
    send_slots: tuple[np.ndarray, np.ndarray, np.ndarray, int]
    return_rows: tuple[np.ndarray, np.ndarray, np.ndarray, int]
    send_offsets: np.ndarray
    recv_offsets: np.ndarray
    return_offsets: np.ndarray
    returned_offsets: np.ndarray


def _transport(items: Routes, spec: PoolSpec, home_slot: np.ndarray) -> _Transport:
    n, x = spec.ranks, spec.exchanges

    def ordered(exchange: np.ndarray, near: np.ndarray, far: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each item's position at rank `near` in the order (exchange, far, lane, block), and (N, X, N + 1) offsets."""
        order = stable_order(far, exchange, near)
        position = np.empty(order.size, np.int32)
        position[order] = rank_within(near[order], n)
        count = np.bincount((near.astype(np.int64) * x + exchange) * n + far, minlength=n * x * n).reshape(n, x * n)
        flat = _offsets(count)
        # Row x: N + 1 offsets that start where exchange x starts.
        return position, flat[:, np.arange(x)[:, None] * n + np.arange(n + 1)]

    sent, send_offsets = ordered(items.arrives, items.home, items.executor)
    landing, recv_offsets = ordered(items.arrives, items.executor, items.home)
    if items.returns is items.arrives or x == 1:  # the way back is the way there: nothing new to sort
        back, return_offsets, returned, returned_offsets = landing, recv_offsets, sent, send_offsets
    else:
        back, return_offsets = ordered(items.returns, items.executor, items.home)
        returned, returned_offsets = ordered(items.returns, items.home, items.executor)
    return _Transport(
        landing=landing,
        returned=returned,
        send_slots=(items.home, sent, home_slot[items.unit], n),
        return_rows=(items.executor, back, landing, n),
        send_offsets=send_offsets,
        recv_offsets=recv_offsets,
        return_offsets=return_offsets,
        returned_offsets=returned_offsets,
    )


def _landings(offsets: np.ndarray) -> np.ndarray:
    """(N receivers, X, N + 1 senders) offsets of the receivers -> (N senders, X, N receivers): each sender's own."""
    return np.ascontiguousarray(offsets[:, :, :-1].transpose(2, 1, 0))


def _rows(triples: tuple[np.ndarray, np.ndarray, np.ndarray, int], size: int) -> np.ndarray:
    """(N, size) int32 with value at [rank, position], 0 elsewhere."""
    rank, position, value, ranks = triples
    table = np.zeros((ranks, size), np.int32)
    table[rank, position] = value
    return table


def _offsets(count: np.ndarray) -> np.ndarray:
    """(N, M) counts -> (N, M + 1) int32 offsets from 0."""
    out = np.zeros((count.shape[0], count.shape[1] + 1), np.int32)
    np.cumsum(count, axis=1, out=out[:, 1:])
    return out


def _expand(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """[first[0], first[0] + 1, ... (length[0] of them), first[1], ...]"""
    total = int(length.sum())
    return np.arange(total) + np.repeat(first - (np.cumsum(length) - length), length)
