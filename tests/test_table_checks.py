"""Tables that point outside of a rank's buffers are refused on the host, and what plans make never does."""

import dataclasses

import numpy as np
import operator_base as base
import pytest

import libra_jax
from libra_jax.plan import Plan
from libra_jax.table_checks import check_tables

SPEC = libra_jax.PoolSpec(
    seq_len=512, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=16, block=32, waves=3, window=200
)
Q_SLOT, BLOCK, FIRST_PAGE, NUM_PAGES, PAGE_BASE = range(5)


def plan(seed: int = 0, policy: str = "pooled") -> Plan:
    rng = np.random.default_rng(seed)
    return libra_jax.plan_pool(base.skewed_lengths(rng, 2, 512), SPEC, policy=base.POLICIES[policy])


def damaged(name: str, index: tuple[int, ...], value: int) -> Plan:
    good = plan()
    table = getattr(good.tables, name).copy()
    table[index] = value
    return dataclasses.replace(good, tables=dataclasses.replace(good.tables, **{name: table}))


@pytest.mark.parametrize("policy", sorted(base.POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_what_a_plan_makes_passes(seed: int, policy: str) -> None:
    check_tables(plan(seed, policy).tables)


HOME, ROOM = SPEC.home_blocks, SPEC.room
DAMAGE = {
    "query slot": ("entries", (0, 0, 0, Q_SLOT), HOME + ROOM.blocks),
    "negative query slot": ("entries", (1, 1, 2, Q_SLOT), -1),
    "block": ("entries", (0, 1, 0, BLOCK), SPEC.blocks_per_sequence),
    "first page": ("entries", (0, 1, 0, FIRST_PAGE), -1),
    "number of pages": ("entries", (1, 0, 0, NUM_PAGES), SPEC.blocks_per_sequence + 1),
    "place in pages": ("entries", (0, 0, 0, PAGE_BASE), 2 * HOME + ROOM.pages),
    "page": ("pages", (1, 1, 5), HOME + ROOM.pages),
    "negative page": ("pages", (1, 1, 5), -2),
    "first visible": ("first_visible", (0, 0, 7), SPEC.seq_len),
    "wave offset": ("wave_offsets", (0, 0, 3), HOME + ROOM.blocks + 1),
    "falling wave offset": ("wave_offsets", (0, 0, 1), HOME + ROOM.blocks),
    "sent block": ("send_blocks", (0, 0, 0), HOME),
    "sent page": ("send_pages", (0, 0, 0), HOME),
    "returned page": ("return_pages", (0, 0, 0), ROOM.pages),
    "row to sum": ("sum_rows", (0, 0, 0), ROOM.sent_pages),
    "sent block offset": ("send_block_offsets", (0, 0, 0, 1), HOME + 1),
    "received block offset": ("recv_block_offsets", (0, 0, 0, 1), ROOM.blocks + 1),
    "sent page offset": ("send_page_offsets", (1, 0, 1, 4), ROOM.sent_pages + 1),
    "received page offset": ("recv_page_offsets", (1, 0, 0, 2), -1),
    "returned page offset": ("returned_page_offsets", (1, 0, 0, 2), ROOM.sent_pages + 1),
    "sum offset": ("sum_offsets", (1, 0, 3), ROOM.sent_pages + 1),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_number_that_points_outside_is_refused_with_its_place_and_range(what: str) -> None:
    name, index, value = DAMAGE[what]
    with pytest.raises(ValueError, match=r"the plan is damaged: .* is -?\d+, it must lie in -?\d+ to \d+"):
        libra_jax.stack_plans([plan(), damaged(name, index, value)])


def test_a_run_of_pages_past_the_table_or_past_its_own_block_is_refused() -> None:
    good = plan().tables
    rows = good.pages.shape[-1]
    where = np.argwhere(good.entries[..., NUM_PAGES] > 1)[0]
    index = tuple(int(i) for i in where)
    with pytest.raises(ValueError, match=f"the end of an entry's place in pages .* 0 to {rows}"):
        libra_jax.stack_plans([damaged("entries", (*index, PAGE_BASE), rows - 1)])
    block = int(good.entries[index][BLOCK])
    with pytest.raises(ValueError, match="last page past their block"):
        libra_jax.stack_plans([damaged("entries", (*index, FIRST_PAGE), block)])


def test_a_query_slot_executed_twice_is_refused() -> None:
    slot = int(plan().tables.entries[0, 0, 0, Q_SLOT])
    with pytest.raises(ValueError, match=f"rank 0 executes query slot {slot} 2 times, it must be once"):
        libra_jax.stack_plans([damaged("entries", (0, 0, 1, Q_SLOT), slot)])


def test_a_table_of_another_shape_or_type_is_refused() -> None:
    good = plan()
    for table in (good.tables.pages[..., :-1], good.tables.pages.astype(np.int64)):
        with pytest.raises(ValueError, match=r"table pages is int\d+ .*, the spec wants int32"):
            check_tables(dataclasses.replace(good.tables, pages=table))
