"""A slow builder of a plan's tables with relays, in plain Python, one item after the other.

Takes who executes what, and when; chooses relays by chance among all that the tables allow: any rank of a node, whether
it reads the page or not, for any of the readers, as early or as late as can be. So the device side meets tables that
the planner would not write, and the planner's have something to be held against.
"""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import numpy as np
from table_walk import Unit, visited_pages

from libra_jax.plan import plan_pool
from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables, table_shapes
from libra_jax.workload import document_starts


class Move(NamedTuple):
    """One item on its way in one exchange."""

    exchange: int
    source: int
    target: int
    unit: Unit


def delayed(wave: np.ndarray, spec: PoolSpec, seed: int) -> np.ndarray:
    """The waves (P, K, nb), with some blocks moved to later ones."""
    rng = np.random.default_rng(seed)
    later = np.where(rng.random(wave.shape) < 0.5, rng.integers(0, spec.waves, wave.shape), 0)
    return np.maximum(wave, later).astype(np.int32)


def tables_with_relays(lengths: list[list[int]], spec: PoolSpec, policy, seed: int) -> PlanTables:
    """Tables of one pool, (dp, cp) in front; executors and first waves are those of `plan_pool` without relays."""
    plan = plan_pool(lengths, dataclasses.replace(spec, ranks_per_node=None), policy=policy)
    return build(lengths, spec, plan.executor, delayed(plan.wave, spec, seed), seed)


def build(lengths: list[list[int]], spec: PoolSpec, executor: np.ndarray, wave: np.ndarray, seed: int) -> PlanTables:
    """executor, wave: (P, K, nb). Every read of a page that can come through a relay may do so."""
    chance, last = random.Random(seed), spec.exchanges - 1
    visits = [visited_pages(sequence, spec) for sequence in lengths]
    units: list[Unit] = [(p, head, block) for p, head, block in np.ndindex(executor.shape)]
    home = {unit: unit[0] * spec.cp + unit[2] // spec.blocks_per_rank for unit in units}
    slot = {u: u[1] * spec.blocks_per_rank + u[2] % spec.blocks_per_rank for u in units}

    def first_wave_at_home(unit: Unit) -> bool:
        """Whether a block reads the rows of the home pages: in wave 0, with all that it reads at home."""
        return wave[unit] == 0 and executor[unit] == home[unit]

    # Which exchanges feed the waves in which a rank reads a page that it is not home to.
    uses: dict[tuple[int, Unit], list[int]] = {}
    for unit in units:
        for page in visits[unit[0]][unit[2]]:
            key = int(executor[unit]), (unit[0], unit[1], page)
            if home[key[1]] != key[0]:
                uses.setdefault(key, []).append(int(wave[unit]) - 1)
    assert all(min(exchanges) >= 0 for exchanges in uses.values())

    block_moves = [Move(int(wave[u]) - 1, home[u], int(executor[u]), u) for u in units if executor[u] != home[u]]
    page_moves, page_returns, passed_moves, passed_returns = [], [], [], []
    for page in units:
        for first in range(0, spec.ranks, spec.node_ranks):
            node = range(first, first + spec.node_ranks)
            readers = {rank: uses[rank, page] for rank in node if (rank, page) in uses}
            arrives = {rank: min(x) for rank, x in readers.items()}
            returns = {rank: max(x) for rank, x in readers.items()}
            late = [rank for rank in readers if arrives[rank] >= 1]
            if len(readers) > 1 and late and home[page] not in node and chance.random() < 0.9:
                relay = chance.choice(list(readers) if chance.random() < 0.7 else list(node))
                for rank in late:
                    if rank != relay and chance.random() < 0.9:
                        x, back = chance.randint(1, arrives.pop(rank)), returns.pop(rank)
                        passed_moves.append(Move(x, relay, rank, page))
                        passed_returns.append(Move(back, rank, relay, page))
                        arrives[relay] = min(arrives.get(relay, last), chance.randint(0, x - 1))
                        returns[relay] = max(returns.get(relay, 0), min(back + 1, last))
                if relay in returns:
                    returns[relay] = chance.randint(returns[relay], last) if relay not in readers else returns[relay]
            page_moves += [Move(x, home[page], rank, page) for rank, x in arrives.items()]
            page_returns += [Move(x, rank, home[page], page) for rank, x in returns.items()]

    n, node_ranks = spec.ranks, spec.node_ranks
    blocks, pages, gradients = (_lay_out(moves, n, spec) for moves in (block_moves, page_moves, page_returns))
    passed, returned = (_lay_out(moves, node_ranks, spec) for moves in (passed_moves, passed_returns))
    tables = {name: np.zeros((n, *shape), np.int32) for name, shape in table_shapes(spec).items()}
    received_at = [{move.unit: i for i, move in enumerate(pages.received[rank])} for rank in range(n)]
    passed_at = [{move.unit: i for i, move in enumerate(passed.received[rank])} for rank in range(n)]

    longest = [max((len(pages) for pages in sequence), default=0) for sequence in visits]
    lightest_first = sorted(range(spec.pool_size), key=lambda p: longest[p])
    for rank in range(n):

        def write(name: str, values: list[int], rank: int = rank, at: int = 0) -> None:
            assert at + len(values) <= tables[name].shape[1], f"no room in {name}"
            tables[name][rank, at : at + len(values)] = values

        mine = sorted(
            (u for u in units if executor[u] == rank), key=lambda u: (wave[u], lightest_first.index(u[0]), *u[1:])
        )
        write("wave_offsets", [sum(wave[u] < w for u in mine) for w in range(spec.waves + 1)])
        shared = sorted({(u[0], u[1], page) for u in mine if not first_wave_at_home(u) for page in visits[u[0]][u[2]]})
        row = {page: spec.home_blocks + i for i, page in enumerate(shared)}
        write("pages", list(range(spec.home_blocks)))
        write(
            "pages",
            [
                slot[page] if home[page] == rank
                else spec.home_blocks + received_at[rank][page] if page in received_at[rank]
                else spec.home_blocks + spec.room.pages + passed_at[rank][page]
                for page in shared
            ],
            at=spec.home_blocks,
        )  # fmt: skip
        came = {move.unit: i for i, move in enumerate(blocks.received[rank])}
        for i, unit in enumerate(mine):
            sees = visits[unit[0]][unit[2]]
            begin = (unit[0], unit[1], sees[0]) if sees else unit
            base = 0 if not sees else slot[begin] if first_wave_at_home(unit) else row[begin]
            q_slot = slot[unit] if home[unit] == rank else spec.home_blocks + came[unit]
            tables["entries"][rank, i] = q_slot, unit[2], begin[2], len(sees), base

        write("send_blocks", [slot[move.unit] for move in blocks.sent[rank]])
        write("send_pages", [slot[move.unit] for move in pages.sent[rank]])
        write("return_pages", [received_at[rank][move.unit] for move in gradients.sent[rank]])
        write("relay_pages", [received_at[rank][move.unit] for move in passed.sent[rank]])
        write("return_passed", [passed_at[rank][move.unit] for move in returned.sent[rank]])
        for name, wanted, landed in (
            ("sum", [u for u in sorted(units, key=slot.__getitem__) if home[u] == rank], gradients.received[rank]),
            ("relay_sum", [move.unit for move in gradients.sent[rank]], returned.received[rank]),
        ):
            rows = [[i for i, move in enumerate(landed) if move.unit == unit] for unit in wanted]
            ends = np.cumsum([0, *map(len, rows)]).tolist()
            write(f"{name}_rows", [row for added in rows for row in added])
            size = tables[f"{name}_offsets"].shape[1]
            write(f"{name}_offsets", ends + [ends[-1]] * (size - len(ends)))

    visible = [document_starts(np.asarray(sequence), spec.seq_len, spec.window) for sequence in lengths]
    tables["first_visible"] = np.concatenate(visible).reshape(n, spec.tokens_per_rank).astype(np.int32)
    for layout, sent, received, landings in (
        (blocks, "send_block_offsets", "recv_block_offsets", "block_landings"),
        (pages, "send_page_offsets", "recv_page_offsets", "page_landings"),
        (gradients, "return_page_offsets", "returned_page_offsets", "gradient_landings"),
        (passed, "relay_page_offsets", "passed_page_offsets", "passed_page_landings"),
        (returned, "return_passed_offsets", "relay_gradient_offsets", "relay_gradient_landings"),
    ):
        tables[sent], tables[received] = layout.sent_offsets, layout.received_offsets
        tables[landings] = _landings(layout.received_offsets)
    tables["result_landings"] = _landings(blocks.sent_offsets)
    return PlanTables(spec=spec, **{k: v.reshape(spec.pool_size, spec.cp, *v.shape[1:]) for k, v in tables.items()})


class Layout(NamedTuple):
    """Moves by rank in the order in which they leave and in which they land, and where each peer's begin."""

    sent: list[list[Move]]
    received: list[list[Move]]
    sent_offsets: np.ndarray
    received_offsets: np.ndarray


def _lay_out(moves: list[Move], ranks: int, spec: PoolSpec) -> Layout:
    """ranks: so many neighbouring ranks exchange with each other."""
    sent = [sorted(m for m in moves if m.source == rank) for rank in range(spec.ranks)]  # (exchange, _, target, unit)
    received = [sorted(m for m in moves if m.target == rank) for rank in range(spec.ranks)]
    offsets = np.zeros((2, spec.ranks, spec.exchanges, ranks + 1), np.int32)
    for rank, x, peer in np.ndindex(spec.ranks, spec.exchanges, ranks + 1):
        before = (x, rank // ranks * ranks + peer)
        offsets[0, rank, x, peer] = sum((m.exchange, m.target) < before for m in sent[rank])
        offsets[1, rank, x, peer] = sum((m.exchange, m.source) < before for m in received[rank])
    return Layout(sent, received, *offsets)


def _landings(offsets: np.ndarray) -> np.ndarray:
    """(N, X, M + 1) where what each rank gets begins -> (N, X, M) where what it sends does, at the other end."""
    ranks = offsets.shape[2] - 1
    out = np.zeros((*offsets.shape[:2], ranks), np.int32)
    for rank, x, peer in np.ndindex(out.shape):
        first = rank // ranks * ranks
        out[rank, x, peer] = offsets[first + peer, x, rank - first]
    return out
