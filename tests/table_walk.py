"""A plan's tables, checked by following every item from its home to its executor and back with plain loops.

The walk reads only what `PlanTables` documents; what must be visited is computed from a dense mask, not from our code.
Pages are followed through relays, and so are their gradients: each rank that reads a page adds its number to the page's
gradient, and at home the numbers must be those of all its readers, each once.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from libra_jax.plan import Plan
from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables

Unit = tuple[int, int, int]
"""(sequence, kv head, block), of a block or a page."""


class Held(NamedTuple):
    """What stands in one slot of a rank: which page or block, and the exchange that brought it. Of a passed page also
    its relay, and the slot among the relay's received pages."""

    unit: Unit
    arrived: int
    relay: int = -1
    relay_slot: int = -1


class Walked(NamedTuple):
    """executed: (rank, wave) of each unit. work: (N,) pages visited. pages, passed: by rank, what it received from
    homes and from relays, by slot."""

    executed: dict[Unit, tuple[int, int]]
    work: np.ndarray
    pages: list[dict[int, Held]]
    passed: list[dict[int, Held]]


def walk_plan(plan: Plan, lengths: list[list[int]]) -> Walked:
    """`walk`, and what the plan says of its tables: executors, waves and statistics."""
    walked = walk(plan.tables, lengths)
    for unit, (rank, wave) in walked.executed.items():
        assert plan.executor[unit] == rank and plan.wave[unit] == wave
    _statistics(plan, walked)
    return walked


def walk(tables: PlanTables, lengths: list[list[int]]) -> Walked:
    """Follows the tables of one pool, (dp, cp) in front, and asserts the first invariant of the README: every block is
    executed once, every page a tile may see is there in time, nothing is sent that is not used, and every gradient
    comes home once."""
    spec = tables.spec
    tables = tables.map(lambda table: table.reshape(spec.ranks, *table.shape[2:]))
    blocks = _sent_from_home(
        spec, tables.send_blocks, tables.send_block_offsets, tables.recv_block_offsets, tables.block_landings
    )
    pages = _sent_from_home(
        spec, tables.send_pages, tables.send_page_offsets, tables.recv_page_offsets, tables.page_landings
    )
    passed = _passed_on(spec, tables, pages)
    for held, room in (
        (blocks, spec.room.blocks),
        (pages, spec.room.pages),
        (passed, spec.room.passed_pages),
    ):
        for slots in held:
            assert sorted(slots) == list(range(len(slots))) and len(slots) <= room, "slots fill without gaps"
    for rank in range(spec.ranks):
        had = [held.unit for held in (*pages[rank].values(), *passed[rank].values())]
        assert len(set(had)) == len(had), "a page comes to a rank twice"
        assert not any(_home(unit, spec)[0] == rank for unit in had), "a page is sent to its home"

    executed, work, last_use = _execute(spec, tables, blocks, pages, passed, lengths)
    assert len(executed) == spec.pool_size * spec.num_kv_heads * spec.blocks_per_sequence
    _gradients(spec, tables, pages, passed, last_use)
    return Walked(executed, work, pages, passed)


def _unit_at_home(rank: int, slot: int, spec: PoolSpec) -> Unit:
    """What stands in a home slot."""
    sequence, part = divmod(rank, spec.cp)
    head, block = divmod(int(slot), spec.blocks_per_rank)
    return sequence, head, part * spec.blocks_per_rank + block


def _home(unit: Unit, spec: PoolSpec) -> tuple[int, int]:
    """(rank, slot) of a unit at home."""
    sequence, head, block = unit
    part, place = divmod(block, spec.blocks_per_rank)
    return sequence * spec.cp + part, head * spec.blocks_per_rank + place


def _moves(spec, sent, received, landings, ranks):
    """(exchange, source, target, place sent from, place landed in) of every item that one set of tables moves among
    `ranks` neighbouring ranks. Both sides, and the landings, must agree."""
    for x in range(spec.exchanges):
        for source in range(spec.ranks):
            first = source // ranks * ranks
            for to in range(ranks):
                target, came_from = first + to, source - first
                begin, end = map(int, sent[source, x, to : to + 2])
                start, stop = map(int, received[target, x, came_from : came_from + 2])
                assert end - begin == stop - start >= 0
                assert landings[source, x, to] == start
                assert source != target or begin == end, "a rank sends to itself"
                for step in range(end - begin):
                    yield x, source, target, begin + step, start + step


def _sent_from_home(spec, send, sent, received, landings) -> list[dict[int, Held]]:
    held = [{} for _ in range(spec.ranks)]
    for x, source, target, place, slot in _moves(spec, sent, received, landings, spec.ranks):
        assert slot not in held[target]
        held[target][slot] = Held(_unit_at_home(source, send[source, place], spec), x)
    return held


def _passed_on(spec: PoolSpec, tables: PlanTables, pages: list[dict[int, Held]]) -> list[dict[int, Held]]:
    passed: list[dict[int, Held]] = [{} for _ in range(spec.ranks)]
    for x, relay, target, place, slot in _moves(
        spec, tables.relay_page_offsets, tables.passed_page_offsets, tables.passed_page_landings, spec.node_ranks
    ):
        came = int(tables.relay_pages[relay, place])
        assert pages[relay][came].arrived < x, "a relay passes on what has not come yet"
        assert slot not in passed[target]
        unit = pages[relay][came].unit
        assert _home(unit, spec)[0] // spec.node_ranks != relay // spec.node_ranks, "a page goes back to its own node"
        passed[target][slot] = Held(unit, x, relay, came)
    return passed


def _execute(spec, tables, blocks, pages, passed, lengths):
    """Every entry, in order. last_use: by rank, for each received and passed page, (kind, slot), the exchange of the
    last wave that reads it."""
    visits = [visited_pages(sequence, spec) for sequence in lengths]
    home_blocks, after = spec.home_blocks, spec.home_blocks + spec.room.pages
    executed, work, last_use = {}, np.zeros(spec.ranks, int), [{} for _ in range(spec.ranks)]
    for rank in range(spec.ranks):
        assert tables.wave_offsets[rank, 0] == 0
        waiting = dict(blocks[rank])
        for wave in range(spec.waves):
            exchange = wave - (spec.waves > 1)
            for entry in range(tables.wave_offsets[rank, wave], tables.wave_offsets[rank, wave + 1]):
                q_slot, block, first_page, num_pages, base = map(int, tables.entries[rank, entry])
                if q_slot < home_blocks:
                    unit = _unit_at_home(rank, q_slot, spec)
                else:
                    unit, arrived, *_ = waiting.pop(q_slot - home_blocks)
                    assert arrived == exchange
                assert unit[2] == block and unit not in executed
                executed[unit] = (rank, wave)
                assert list(range(first_page, first_page + num_pages)) == visits[unit[0]][block]
                work[rank] += num_pages
                for j in range(num_pages):
                    slot, page = int(tables.pages[rank, base + j]), (unit[0], unit[1], first_page + j)
                    if slot < home_blocks:
                        assert _unit_at_home(rank, slot, spec) == page
                        continue
                    kind, slot = ("pages", slot - home_blocks) if slot < after else ("passed", slot - after)
                    held = (pages if kind == "pages" else passed)[rank][slot]
                    assert held.unit == page and held.arrived <= exchange, "a page is read that is not there"
                    last_use[rank][kind, slot] = exchange
        assert not waiting, "a received block is not executed"
    handed_on = {(held.relay, held.relay_slot) for slots in passed for held in slots.values()}
    for rank in range(spec.ranks):
        for slot in pages[rank]:
            assert ("pages", slot) in last_use[rank] or (rank, slot) in handed_on, "a received page is not used"
        for slot in passed[rank]:
            assert ("passed", slot) in last_use[rank], "a passed page is not used"
    return executed, work, last_use


class Gradient(NamedTuple):
    """Part of a page's gradient on its way: the page, who has added to it, and the exchange that brought it here. At a
    relay also the slot there of the page it belongs to."""

    unit: Unit
    readers: Counter
    arrived: int
    slot: int = -1


def _gradients(spec, tables, pages, passed, last_use) -> None:
    """Gradients of passed pages go back to the relay after the last wave that reads the page, are added there once, and
    go home with the relay's own: every reader's part comes home once."""
    came_back: list[dict[int, Gradient]] = [{} for _ in range(spec.ranks)]
    for x, reader, relay, place, row in _moves(
        spec, tables.return_passed_offsets, tables.relay_gradient_offsets, tables.relay_gradient_landings,
        spec.node_ranks,
    ):  # fmt: skip
        slot = int(tables.return_passed[reader, place])
        held = passed[reader][slot]
        assert last_use[reader]["passed", slot] == x and held.relay == relay and row not in came_back[relay]
        came_back[relay][row] = Gradient(held.unit, Counter([reader]), x, held.relay_slot)
    assert sum(map(len, came_back)) == sum(map(len, passed)), "a passed page's gradient does not go back"
    assert all(sorted(rows) == list(range(len(rows))) for rows in came_back)

    at_home: list[dict[int, Gradient]] = [{} for _ in range(spec.ranks)]
    added: list[list[int]] = [[] for _ in range(spec.ranks)]
    for x, source, home, place, row in _moves(
        spec, tables.return_page_offsets, tables.returned_page_offsets, tables.gradient_landings, spec.ranks
    ):
        slot, last = int(tables.return_pages[source, place]), spec.exchanges - 1
        held, readers = pages[source][slot], Counter()
        rows = _rows(tables.relay_sum_offsets, tables.relay_sum_rows, source, place)
        if ("pages", slot) in last_use[source]:
            readers[source] += 1
            assert last_use[source]["pages", slot] <= x
            assert rows or last_use[source]["pages", slot] == x
        for returned in (came_back[source][r] for r in rows):
            assert returned.slot == slot and returned.unit == held.unit
            assert returned.arrived < x or x == last, "a gradient goes home before all of it has come back"
            readers += returned.readers
        added[source] += rows
        assert row not in at_home[home] and held.unit == _unit_at_home(home, _home(held.unit, spec)[1], spec)
        at_home[home][row] = Gradient(held.unit, readers, x)
    assert [sorted(rows) for rows in added] == [sorted(rows) for rows in came_back], "not added once at the relay"

    want: dict[Unit, Counter] = {}
    for rank in range(spec.ranks):
        for kind, slot in last_use[rank]:
            unit = (pages if kind == "pages" else passed)[rank][slot].unit
            want.setdefault(unit, Counter())[rank] += 1
    got: dict[Unit, Counter] = {}
    for rank in range(spec.ranks):
        added_rows = []
        for slot in range(spec.home_blocks):
            rows = _rows(tables.sum_offsets, tables.sum_rows, rank, slot)
            unit = _unit_at_home(rank, slot, spec)
            assert all(at_home[rank][row].unit == unit for row in rows)
            for row in rows:
                got.setdefault(unit, Counter()).update(at_home[rank][row].readers)
            added_rows += rows
        assert sorted(added_rows) == sorted(at_home[rank])
    assert got == want, "a gradient is lost, or comes home twice"


def _rows(offsets: np.ndarray, rows: np.ndarray, rank: int, place: int) -> list[int]:
    """What one place of a rank adds up. In ascending order."""
    found = [int(row) for row in rows[rank, offsets[rank, place] : offsets[rank, place + 1]]]
    assert found == sorted(found)
    return found


def _statistics(plan: Plan, walked: Walked) -> None:
    spec, stats = plan.spec, plan.stats
    assert np.array_equal(stats.work, walked.work)
    busiest = walked.work.max() / walked.work.mean() if walked.work.any() else 1.0
    assert stats.imbalance == pytest.approx(busiest)
    sent, received = np.zeros(spec.ranks, int), np.zeros(spec.ranks, int)
    query = spec.block * spec.group * spec.head_dim * spec.item_bytes
    for unit, (rank, _) in walked.executed.items():
        home, _ = _home(unit, spec)
        if home != rank:  # queries there, outputs back; equally wide here
            for source, target in ((home, rank), (rank, home)):
                sent[source] += query
                received[target] += query
    page = spec.block * 2 * spec.head_dim * spec.item_bytes
    for held in (walked.pages, walked.passed):
        for rank, slots in enumerate(held):
            for item in slots.values():
                sent[_home(item.unit, spec)[0] if item.relay < 0 else item.relay] += page
                received[rank] += page
    assert np.array_equal(stats.sent_bytes, sent) and np.array_equal(stats.received_bytes, received)


def visited_pages(lengths: list[int], spec: PoolSpec) -> list[list[int]]:
    """Per block the pages from the first to the last that any of its rows may see, by a dense mask."""
    segment = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segment = np.concatenate([segment, np.zeros(spec.seq_len - segment.size, int)])
    query, key = np.arange(spec.seq_len)[:, None], np.arange(spec.seq_len)[None, :]
    mask = (segment[:, None] == segment[None, :]) & (segment > 0)[:, None] & (key <= query)
    if spec.window is not None:
        mask &= query - key < spec.window
    out = []
    for rows in mask.reshape(-1, spec.block, spec.seq_len):
        columns = np.flatnonzero(rows.any(axis=0)) // spec.block
        # A block visits its own page even when only earlier rows of it are real: ranges end at the block itself.
        out.append(list(range(columns.min(), columns.max() + 1)) if columns.size else [])
    return out
