"""The Triton kernels on the tables of real plans: every rank of a pool in Triton's interpreter, its received blocks and
pages put where the tables say, the results of all ranks brought together."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from libra_kernels import PADDING, Tiles
from libra_kernels.triton import page_readers
from operator_base import POLICIES
from tile_problems import Case, Dense, Tables, by_unit, make_tables, random_dense
from tile_problems import page_readers as readers_by_definition
from tile_runs import FLOAT32, Results, assert_as_good_as_plain_jax, assert_same_bits, poisoned, run_slots

from libra_jax.plan import plan_pool
from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables

CP = 2


def units_by_slot(tables: PlanTables, send: str) -> np.ndarray:
    """(N, slots) which unit lies in each slot of each rank, -1 where none does: at home, and what is received."""
    spec, n = tables.spec, tables.spec.ranks
    items, offsets = getattr(tables, f"send_{send}s"), getattr(tables, f"send_{send}_offsets")
    landing, room = getattr(tables, f"recv_{send}_offsets"), getattr(spec.room, f"{send}s")
    units = np.full((n, spec.home_blocks + room), -1)
    for rank in range(n):
        sequence, part = divmod(rank, spec.cp)
        for slot in range(spec.home_blocks):
            head, block = divmod(slot, spec.blocks_per_rank)
            lane = sequence * spec.num_kv_heads + head
            units[rank, slot] = lane * spec.blocks_per_sequence + part * spec.blocks_per_rank + block
    for sender in range(n):
        for x in range(spec.exchanges):
            for to in range(n):
                first, last = offsets[sender, x, to : to + 2]
                for i, slot in enumerate(items[sender, first:last]):
                    units[to, spec.home_blocks + landing[to, x, sender] + i] = units[sender, slot]
    return units


def runs(readers: np.ndarray) -> np.ndarray:
    """(L, 2, 2) pairs of first and one past last, all empty ones written alike."""
    pairs = readers.reshape(-1, 2, 2)
    return np.where(pairs[..., :1] < pairs[..., 1:], pairs, 0)


def run_plan(case: Case, dense: Dense, waves: int, policy: str) -> Results:
    """What all ranks leave, by unit; dk and dv summed over the ranks."""
    spec = PoolSpec(
        seq_len=case.seq_len, pool_size=len(case.lengths), cp=CP, num_heads=case.kv_heads * case.group,
        num_kv_heads=case.kv_heads, head_dim=case.head_dim, block=case.block, waves=waves, window=case.window,
        capacity=100.0,
    )  # fmt: skip
    plan = plan_pool(case.lengths, spec, policy=POLICIES[policy])
    assert plan.stats.fallback is None
    tables = plan.tables.map(lambda x: x.reshape(spec.ranks, *x.shape[2:]))
    q_units, page_units = units_by_slot(tables, "block"), units_by_slot(tables, "page")
    q, d_out, k, v = (by_unit(case, x) for x in (dense.q, dense.d_out, dense.k, dense.v))
    first = tables.first_visible.reshape(spec.pool_size, 1, spec.blocks_per_sequence, spec.block)
    first = np.broadcast_to(first, (spec.pool_size, spec.num_kv_heads, *first.shape[2:])).reshape(-1, spec.block)

    def placed(units: np.ndarray, values: np.ndarray, empty: np.ndarray) -> np.ndarray:
        array = np.broadcast_to(empty, (len(units), *values.shape[1:])).copy()
        array[units >= 0] = values[units[units >= 0]]
        return array

    nothing = poisoned((1,), q.dtype)
    out, dq = poisoned((*q.shape[:3], v.shape[-1]), q.dtype), poisoned(q.shape, q.dtype)
    lse = poisoned((*q.shape[:3], 2), FLOAT32)
    dk, dv = np.zeros(k[:, :, 0].shape, FLOAT32), np.zeros(v[:, :, 0].shape, FLOAT32)
    for rank in range(spec.ranks):
        mine, keys = q_units[rank], page_units[rank]
        first_visible = placed(mine, first, np.array(PADDING, np.int32))
        entries, pages = tables.entries[rank], tables.pages[rank]
        bounds = tables.wave_offsets[rank]
        rows = []
        for start, stop in itertools.pairwise(bounds):
            tiles = Tiles(*(jax.numpy.asarray(x) for x in (entries, pages, first_visible, start, stop)))
            readers = np.asarray(page_readers(tiles))
            by_definition = readers_by_definition(entries, first_visible, len(pages), start, stop)
            assert np.array_equal(runs(readers), runs(by_definition))
            rows.append((int(start), int(stop), readers))
        slots = Dense(
            placed(mine, q, nothing), placed(keys, k[:, :, 0], nothing), placed(keys, v[:, :, 0], nothing),
            placed(mine, d_out, nothing),
        )  # fmt: skip
        gradients = np.zeros(slots.k.shape, FLOAT32), np.zeros(slots.v.shape, FLOAT32)
        got, _ = run_slots(case, slots, gradients, Tables(entries, pages, first_visible, mine, keys, rows))
        ran = entries[bounds[0] : bounds[-1], 0]
        for whole, part in zip((out, lse, dq), got[:3], strict=True):
            whole[mine[ran]] = part[ran]
        for whole, part in zip((dk, dv), got[3:], strict=True):
            np.add.at(whole, keys[keys >= 0], part[keys >= 0])
    return Results(out, lse, dq, dk, dv)


@pytest.mark.parametrize("window", [None, 100])
def test_plans(window):
    case = Case([[384], [100, 1, 150, 60]], 384, group=2, kv_heads=2, window=window)
    dense = random_dense(case)
    home = run_plan(case, dense, 1, "at_home")
    assert_as_good_as_plain_jax(case, home, dense)
    for waves, policy in ((1, "pooled"), (2, "random"), (4, "pooled")):
        got = run_plan(case, dense, waves, policy)
        assert_as_good_as_plain_jax(case, got, dense)
        assert_same_bits(got, home, ("out", "lse", "dq"))


@pytest.mark.parametrize("seed", range(4))
def test_readers_of_random_tables(seed):
    """With inactive entries that hold garbage, blocks of padding, several runs of a lane."""
    case = Case([[130, 1, 61], [-70, 90], []], 192, window=(None, 50)[seed % 2])
    tables = make_tables(case, np.random.default_rng(seed), waves=3, wide=seed == 3, later=seed)
    for start, stop, by_definition in tables.waves:
        whole = (tables.entries, tables.pages, tables.first_visible, np.int32(start), np.int32(stop))
        readers = np.asarray(jax.jit(page_readers)(Tiles(*(jax.numpy.asarray(x) for x in whole))))
        assert np.array_equal(runs(readers), runs(by_definition))
