"""Refuses, on the host, tables that would make a kernel or an exchange read or write outside of its buffers.

On a device nothing is checked: a kernel adds what it finds in a table to an address. `stack_plans` comes through here,
so tables that were damaged on their way from the planner (in a file, by a bug) end with a message and not with other
documents' numbers in the result. NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables, table_shapes
from libra_jax.workload import PADDING

_Q_SLOT, _BLOCK, _FIRST_PAGE, _NUM_PAGES, _PAGE_BASE = range(5)  # as in `libra_kernels.tiles`


def check_tables(tables: PlanTables) -> None:
    """Raises ValueError when a table has another shape than the spec says, or holds a number that points outside.

    tables: NumPy, behind any leading axes. The message names the table, the rank (its place in the leading axes), the
    row, the number found there, and the range it must lie in.
    """
    spec = tables.spec
    for name, shape in table_shapes(spec).items():
        table = getattr(tables, name)
        if table.shape[-len(shape) :] != shape or table.dtype != np.int32:
            raise ValueError(f"the plan's table {name} is {table.dtype} {table.shape}, the spec wants int32 {shape}")
    leading = {name: getattr(tables, name).shape[: -len(shape)] for name, shape in table_shapes(spec).items()}
    if len(set(leading.values())) > 1:
        raise ValueError(f"the plan's tables are of different numbers of ranks: leading axes {leading}")
    for name, table, low, high in _ranges(tables, spec):
        if table.size and (table.min() < low or table.max() > high):
            where = np.argwhere((table < low) | (table > high))[0]
            found = int(table[tuple(where)])
            raise ValueError(
                f"the plan is damaged: {name} at {tuple(map(int, where))} is {found}, it must lie in {low} to {high}"
            )
    _check_slots_once(tables, spec)
    _check_ranks_agree(tables, spec)


def _ranges(tables: PlanTables, spec: PoolSpec) -> Iterator[tuple[str, np.ndarray, int, int]]:
    """(what, numbers, lowest, highest) of everything that addresses are formed from."""
    home, room, relays = spec.home_blocks, spec.room, spec.node_ranks > 1
    entries = tables.entries
    run = entries[..., _PAGE_BASE] + entries[..., _NUM_PAGES].astype(np.int64)
    last_page = entries[..., _FIRST_PAGE] + entries[..., _NUM_PAGES].astype(np.int64) - 1 - entries[..., _BLOCK]
    yield "entries' query slot", entries[..., _Q_SLOT], 0, home + room.blocks - 1
    yield "entries' block", entries[..., _BLOCK], 0, spec.blocks_per_sequence - 1
    yield "entries' first page", entries[..., _FIRST_PAGE], 0, spec.blocks_per_sequence - 1
    yield "entries' number of pages", entries[..., _NUM_PAGES], 0, spec.blocks_per_sequence
    yield "entries' place in pages", entries[..., _PAGE_BASE], 0, tables.pages.shape[-1] - 1
    yield "the end of an entry's place in pages", run, 0, tables.pages.shape[-1]
    yield "entries' last page past their block", last_page, -spec.blocks_per_sequence, 0
    yield "pages", tables.pages, 0, home + room.pages + (room.passed_pages if relays else 0) - 1
    visible = np.where(tables.first_visible == PADDING, 0, tables.first_visible)
    yield "first_visible", visible, 0, spec.seq_len - 1
    yield "send_blocks", tables.send_blocks, 0, home - 1
    yield "send_pages", tables.send_pages, 0, home - 1
    yield "return_pages", tables.return_pages, 0, room.pages - 1
    yield "sum_rows", tables.sum_rows, 0, room.sent_pages - 1
    yield "relay_pages", tables.relay_pages, 0, room.pages - 1
    yield "return_passed", tables.return_passed, 0, room.passed_pages - 1
    yield "relay_sum_rows", tables.relay_sum_rows, 0, room.relayed_pages - 1
    # Exchange 0 inside nodes does not take place, and a page comes back from each other rank of a node at most once.
    yield "relay_page_offsets of exchange 0", tables.relay_page_offsets[..., 0, :], 0, 0
    yield "return_passed_offsets of exchange 0", tables.return_passed_offsets[..., 0, :], 0, 0
    yield "the steps of relay_sum_offsets", np.diff(tables.relay_sum_offsets, axis=-1), 0, spec.node_ranks - 1
    for name, size in (
        ("wave_offsets", home + room.blocks),
        ("send_block_offsets", home),
        ("recv_block_offsets", room.blocks),
        ("send_page_offsets", room.sent_pages),
        ("recv_page_offsets", room.pages),
        ("return_page_offsets", room.pages),
        ("returned_page_offsets", room.sent_pages),
        ("sum_offsets", room.sent_pages),
        ("relay_page_offsets", room.relayed_pages),
        ("passed_page_offsets", room.passed_pages),
        ("return_passed_offsets", room.passed_pages),
        ("relay_gradient_offsets", room.relayed_pages),
        ("relay_sum_offsets", room.relayed_pages),
    ):
        offsets = getattr(tables, name)
        yield name, offsets, 0, size
        yield f"the steps of {name}", np.diff(offsets, axis=-1), 0, size
    for name, size in (
        ("block_landings", room.blocks),
        ("page_landings", room.pages),
        ("result_landings", home),
        ("gradient_landings", room.sent_pages),
        ("passed_page_landings", room.passed_pages),
        ("relay_gradient_landings", room.relayed_pages),
    ):
        yield name, getattr(tables, name), 0, size


def _check_slots_once(tables: PlanTables, spec: PoolSpec) -> None:
    """No query slot of a rank is executed twice, or two programs would write one block; and all are executed."""
    slots = spec.home_blocks + spec.room.blocks
    entries = tables.entries.reshape(-1, *tables.entries.shape[-2:])
    executed = tables.wave_offsets.reshape(-1, tables.wave_offsets.shape[-1])[:, -1]
    begin, pool = tables.wave_offsets[..., 0], executed.reshape(-1, spec.ranks).sum(axis=1)
    if begin.any() or (pool != spec.ranks * spec.home_blocks).any():
        raise ValueError(
            f"the plan is damaged: its waves begin at entry {int(begin.max())} and execute {pool.tolist()} blocks of "
            f"each pool, it must be 0 and {spec.ranks * spec.home_blocks}"
        )
    rank = np.repeat(np.arange(executed.size), executed)
    row = np.arange(rank.size) - np.repeat(np.cumsum(executed) - executed, executed)
    slot = entries[rank, row, _Q_SLOT]
    times = np.bincount(rank * slots + slot, minlength=executed.size * slots)
    if times.size and times.max() > 1:
        rank, slot = divmod(int(times.argmax()), slots)
        raise ValueError(
            f"the plan is damaged: rank {rank} executes query slot {slot} {int(times.max())} times, it must be once"
        )


def _check_ranks_agree(tables: PlanTables, spec: PoolSpec) -> None:
    """Every rank sends as much as the other expects, to where it expects it. A collective of unequal sizes hangs."""
    for sent, received, landing, ranks in (
        ("send_block_offsets", "recv_block_offsets", "block_landings", spec.ranks),
        ("recv_block_offsets", "send_block_offsets", "result_landings", spec.ranks),
        ("send_page_offsets", "recv_page_offsets", "page_landings", spec.ranks),
        ("return_page_offsets", "returned_page_offsets", "gradient_landings", spec.ranks),
        ("relay_page_offsets", "passed_page_offsets", "passed_page_landings", spec.node_ranks),
        ("return_passed_offsets", "relay_gradient_offsets", "relay_gradient_landings", spec.node_ranks),
    ):
        # (pools or nodes, from, X, to) and (pools or nodes, to, X, from)
        here, there = (getattr(tables, name).reshape(-1, ranks, spec.exchanges, ranks + 1) for name in (sent, received))
        landings = getattr(tables, landing).reshape(-1, ranks, spec.exchanges, ranks)
        for name, mine, theirs in (
            (f"the steps of {sent}", np.diff(here, axis=-1), np.diff(there, axis=-1)),
            (landing, landings, there[..., :-1]),
        ):
            differ = np.argwhere(mine != theirs.swapaxes(1, 3))
            if differ.size:
                group, rank, x, to = (int(i) for i in differ[0])
                pool, first = divmod(group * ranks, spec.ranks)
                raise ValueError(
                    f"the plan is damaged: {name} of rank {first + rank} in pool {pool}, exchange {x}, to rank "
                    f"{first + to} is {int(mine[group, rank, x, to])}, but {received} of rank {first + to} say "
                    f"{int(theirs[group, to, x, rank])}"
                )
