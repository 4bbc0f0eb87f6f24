"""Relays: pages that several ranks of a node read cross to it once, and are passed on inside.

The tables are walked (`table_walk`), both the planner's and those of a builder that passes on whatever it may
(`relay_oracle`); with both the operator gives the bits that it gives without relays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import operator_base as base
import pytest
import relay_oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from table_walk import walk, walk_plan

import libra_jax
from libra_jax import planner
from libra_jax.exchange import POOL_AXES
from libra_jax.plan import plan_pool, stack_plans
from libra_jax.spec import Capacity, PoolSpec
from libra_jax.table_checks import check_tables
from libra_jax.tables import PlanTables

S = 64
POLICIES = {"pooled": planner.pooled, "at_home": planner.at_home, "random": planner.random_plan(3)}


@st.composite
def pools(draw: st.DrawFn) -> tuple[PoolSpec, list[list[int]], int]:
    """A small pool of several nodes, its documents, and a seed. Nodes are parts of CP groups, or hold several."""
    pool_size, cp, node = draw(
        st.sampled_from([(2, 2, 2), (1, 4, 2), (4, 2, 4), (2, 3, 3), (2, 3, 2), (4, 1, 2), (3, 4, 6), (8, 1, 4)])
    )
    blocks, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seq_len = cp * blocks * 4
    spec = PoolSpec(
        seq_len=seq_len, pool_size=pool_size, cp=cp, num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=8, block=4,
        waves=draw(st.integers(3, 6)), window=draw(st.none() | st.integers(1, seq_len)), capacity=100.0,
        ranks_per_node=node,
    )  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    lengths = [base.random_lengths(rng, seq_len) if rng.random() < 0.7 else [seq_len] for _ in range(pool_size)]
    return spec, lengths, draw(st.integers(0, 999))


@given(pools())
@settings(max_examples=60, deadline=None)
def test_pages_and_gradients_come_through_relays_where_they_are_used_and_nothing_else_travels(pool) -> None:
    spec, lengths, seed = pool
    for policy in (planner.pooled, planner.random_plan(seed)):
        plan = libra_jax.plan_pool(lengths, spec, policy=policy)
        assert plan.stats.fallback is None
        check_tables(plan.tables)
        walk_plan(plan, lengths)


@given(pools())
@settings(max_examples=60, deadline=None)
def test_so_they_do_in_whatever_way_the_tables_allow(pool) -> None:
    spec, lengths, seed = pool
    tables = relay_oracle.tables_with_relays(lengths, spec, planner.random_plan(seed), seed)
    check_tables(tables)
    walk(tables, lengths)


def test_a_page_that_all_ranks_of_another_node_read_crosses_once() -> None:
    spec = make_spec(2, 4, 4, waves=4, seq_len=128)
    lengths = [[128], [3] * 40]
    passed, crossed = [], []
    for nodes in (4, None):
        plan = libra_jax.plan_pool(lengths, dataclasses.replace(spec, ranks_per_node=nodes))
        walked = walk_plan(plan, lengths)
        passed.append(sum(map(len, walked.passed)))
        crossed.append(sum(held.unit[0] != rank // 4 for rank in range(8) for held in walked.pages[rank].values()))
    assert passed[0] > 0 == passed[1]
    assert crossed[0] + passed[0] >= crossed[1] > crossed[0]


def make_spec(dp: int, cp: int, node: int, **others) -> PoolSpec:
    fields: dict[str, Any] = {"seq_len": S, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "block": 8}
    fields |= {"capacity": 16.0, "dtype": "float32"}
    return PoolSpec(pool_size=dp, cp=cp, ranks_per_node=node, **(fields | others))


def one_level_of(spec: PoolSpec) -> PoolSpec:
    """Without relays, and with all work in one wave."""
    return dataclasses.replace(spec, ranks_per_node=None, waves=1)


def stacked(lengths: list[list[int]], spec: PoolSpec, policy, seed: int | None) -> PlanTables:
    """Plans of all pools; with a seed, of the slow builder."""
    size, plans = spec.pool_size, []
    for i in range(0, len(lengths), size):
        plan = libra_jax.plan_pool(lengths[i : i + size], spec, policy=policy)
        if seed is not None:
            tables = relay_oracle.tables_with_relays(lengths[i : i + size], spec, policy, seed + i)
            walk(tables, lengths[i : i + size])
            plan = dataclasses.replace(plan, tables=tables)
        plans.append(plan)
    return libra_jax.stack_plans(plans)


@pytest.mark.parametrize(
    ("spec", "pools", "transports"),
    [
        (make_spec(2, 2, 2, waves=3), 1, ("ragged", "all_to_all", "ppermute")),
        (make_spec(1, 4, 2, waves=4, window=37), 1, ("ragged", "all_to_all")),
        (make_spec(4, 2, 4, waves=3, dtype="bfloat16", num_heads=6, v_head_dim=12), 1, ("all_to_all", "ppermute")),
        (make_spec(2, 2, 2, waves=5), 2, ("ragged", "all_to_all")),
    ],
    ids=["node is a CP group", "CP group spans nodes", "node holds CP groups", "five waves, two pools"],
)
def test_relays_change_no_bit_of_output_and_dq_and_transports_none_at_all(spec, pools, transports) -> None:
    """On a mesh with explicit axes where there are several pools."""
    mesh, rng = base.make_mesh(pools, spec.pool_size, spec.cp, pools > 1), np.random.default_rng(spec.waves)
    lengths = base.skewed_lengths(rng, pools * spec.pool_size, S)
    inputs, one_level = base.random_inputs(rng, len(lengths), spec), one_level_of(spec)
    without = base.run(inputs, base.make_plans(lengths, one_level), one_level, mesh, transport="all_to_all")
    want = base.expected(inputs, lengths, spec)
    ways = [(policy, seed) for policy in POLICIES.values() for seed in (None, 5)]
    passed = 0
    for policy, seed in [*ways, (POLICIES["random"], 6), (POLICIES["random"], 7)]:
        plans = stacked(lengths, spec, policy, seed)
        passed += np.diff(plans.passed_page_offsets, axis=-1).sum()
        first, *others = (base.run(inputs, plans, spec, mesh, transport=name) for name in transports)
        base.assert_close(first, want, 2e-5 if spec.dtype == "float32" else 2e-2)
        base.assert_padding_zero(first, lengths, S)
        assert base.same_bits(first.out, without.out) and base.same_bits(first.dq, without.dq)
        again = base.run(inputs, plans, spec, mesh, transport=transports[0])
        for other in [*others, again]:
            for name, a, b in zip(base.Result._fields, first, other, strict=True):
                assert base.same_bits(a, b), name
    assert passed > 10


def test_a_scan_over_checkpointed_layers_has_the_gradients_that_it_has_without_relays() -> None:
    spec, mesh, rng = make_spec(2, 2, 2, waves=4), base.make_mesh(1, 2, 2), np.random.default_rng(5)
    lengths = base.skewed_lengths(rng, 2, S)
    inputs = base.random_inputs(rng, 2, spec)

    def gradients(spec: PoolSpec, plans: PlanTables) -> list[np.ndarray]:
        def loss(q, k, v, cotangent, plans):
            @jax.checkpoint
            def layer(x, _):
                return x + libra_jax.libra_attention(x, k, v, plans, spec=spec, mesh=mesh), None

            return (jax.lax.scan(layer, q, None, length=2)[0] * cotangent).sum()

        with jax.set_mesh(mesh):
            found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*base.on_mesh(inputs, plans, mesh))
        return [np.asarray(x) for x in found]

    plans = stacked(lengths, spec, POLICIES["random"], 6)
    assert np.diff(plans.passed_page_offsets, axis=-1).sum() > 3
    with_relays = gradients(spec, plans)
    without = gradients(one_level_of(spec), base.make_plans(lengths, one_level_of(spec)))
    assert base.same_bits(with_relays[0], without[0])
    for a, b in zip(with_relays[1:], without[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_padding_that_is_not_a_number_goes_through_no_relay() -> None:
    spec, rng = make_spec(2, 2, 2, waves=3), np.random.default_rng(1)
    mesh, lengths = base.make_mesh(1, 2, 2), [[S - 5], [9, 20]]
    inputs = base.random_inputs(rng, 2, spec)
    want = base.expected(inputs, lengths, spec)
    poisoned = base.Inputs(*(x.copy() for x in inputs))
    for array in poisoned:
        for row, documents in enumerate(lengths):
            array[row, sum(documents) :] = np.nan
    plans = stacked(lengths, spec, POLICIES["random"], 5)
    assert plans.passed_page_offsets[..., -1, -1].sum() > 0
    got = base.run(poisoned, plans, spec, mesh, transport="all_to_all")
    base.assert_close(got, want)
    base.assert_padding_zero(got, lengths, S)


@pytest.mark.parametrize(("waves", "pool_wide", "inside"), [(3, 8, 3), (4, 10, 6), (5, 12, 8)])
def test_ragged_exchanges_inside_nodes_join_neighbours_in_a_pool(waves: int, pool_wide: int, inside: int) -> None:
    """Read before XLA has rewritten anything: as many pool-wide ones as without relays, and those of the nodes."""
    spec, mesh = make_spec(2, 2, 2, waves=waves), base.make_mesh(2, 2, 2)
    inputs = base.random_inputs(np.random.default_rng(0), 4, spec)
    arguments = base.on_mesh(inputs, base.make_plans([[S], [3], [30, 34], [1]], spec), mesh)
    traced = jax.jit(base.forward_and_backward(spec, mesh, transport="ragged")).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@ragged_all_to_all(" in line]
    assert sum("dense<[[0, 1, 2, 3], [4, 5, 6, 7]]>" in line for line in calls) == pool_wide
    assert sum("dense<[[0, 1], [2, 3], [4, 5], [6, 7]]>" in line for line in calls) == inside
    assert len(calls) == pool_wide + inside


@pytest.mark.parametrize("transport", ["all_to_all", "ppermute"])
def test_compiled_collectives_stay_inside_the_pool_and_those_of_relays_inside_the_node(transport: str) -> None:
    spec, mesh = make_spec(4, 1, 2, waves=3), base.make_mesh(2, 4, 1)
    inputs = base.random_inputs(np.random.default_rng(0), 8, spec)
    arguments = base.on_mesh(inputs, base.make_plans([[S], *[[3]] * 7], spec), mesh)
    text = jax.jit(base.forward_and_backward(spec, mesh, transport=transport)).lower(*arguments).compile().as_text()
    assert text is not None
    lines = [line for line in base.collectives(text) if "libra_" in line]
    for line in lines:
        size = 2 if "libra_node_" in line else 4
        assert all(len({rank // size for rank in group}) == 1 for group in base.groups_of(line)), line
    scopes = {way for line in lines for way in ("libra_node_dispatch_1", "libra_node_return_1") if way in line}
    assert scopes == {"libra_node_dispatch_1", "libra_node_return_1"} and POOL_AXES == ("dp", "cp")


TWO_NODES = make_spec(2, 4, 4, waves=4, seq_len=2 * S)


def relaying() -> tuple[libra_jax.Plan, list[list[int]]]:
    """A plan of two nodes in which pages are passed on, some of them to several ranks."""
    lengths = [[2 * S], [60, 68]]
    plan = libra_jax.plan_pool(lengths, TWO_NODES, policy=POLICIES["random"])
    assert plan.tables.relay_page_offsets[..., -1, -1].sum() > 20
    return plan, lengths


def changed(plan: libra_jax.Plan, name: str, index: tuple[int, ...], value: int) -> libra_jax.Plan:
    table = getattr(plan.tables, name).copy()
    assert table[index] != value
    table[index] = value
    return dataclasses.replace(plan, tables=dataclasses.replace(plan.tables, **{name: table}))


HOME, ROOM = TWO_NODES.home_blocks, TWO_NODES.room
DAMAGE = {
    "page": ("pages", (0, 0, 1), HOME + ROOM.pages + ROOM.passed_pages, "it must lie in 0 to"),
    "relayed page": ("relay_pages", (0, 0, 0), ROOM.pages, "it must lie in 0 to"),
    "passed page": ("return_passed", (0, 0, 0), -1, "it must lie in 0 to"),
    "row to sum": ("relay_sum_rows", (0, 0, 0), ROOM.relayed_pages, "it must lie in 0 to"),
    "sums": ("relay_sum_offsets", (0, 0, 1), 4, "the steps of relay_sum_offsets .* is 4, it must lie in 0 to 3"),
    "nothing in exchange 0": ("relay_page_offsets", (0, 1, 0, 4), 1, "relay_page_offsets of exchange 0 .* is 1, .* 0"),
    "nothing back either": ("return_passed_offsets", (0, 1, 0, 1), 1, "return_passed_offsets of exchange 0 .* is 1"),
    "offset": ("passed_page_offsets", (1, 0, 1, 4), ROOM.passed_pages + 1, "it must lie in 0 to"),
    "landing": ("passed_page_landings", (1, 2, 1, 0), 9, r"landings of rank 6 in pool 0, exchange 1, to rank 4 is 9"),
    "way back": ("relay_gradient_landings", (0, 1, 1, 3), 9, r"of rank 1 in pool 0, exchange 1, to rank 3 is 9"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_tables_of_relays_are_refused(what: str) -> None:
    name, index, value, words = DAMAGE[what]
    with pytest.raises(ValueError, match=f"the plan is damaged: .*{words}"):
        libra_jax.stack_plans([changed(relaying()[0], name, index, value)])


@pytest.mark.parametrize("name", ["relay_pages", "return_passed", "relay_sum_rows", "return_pages", "pages"])
def test_the_walk_finds_a_wrong_number_in_any_used_row(name: str) -> None:
    """What points at something else of the right kind: `check_tables` cannot tell, the walk must."""
    plan, lengths = relaying()
    used = {
        "relay_pages": plan.tables.relay_page_offsets, "return_passed": plan.tables.return_passed_offsets,
        "relay_sum_rows": plan.tables.relay_sum_offsets, "return_pages": plan.tables.return_page_offsets,
    }  # fmt: skip
    found = 0
    for rank in np.ndindex(2, 4):
        table = getattr(plan.tables, name)[rank]
        if name == "pages":
            rows = np.flatnonzero(table >= HOME + ROOM.pages)
            others = table[rows] - 1
        else:
            rows = np.arange(used[name][rank].max())
            others = table[rows][::-1]
        for row, other in zip(rows, others, strict=True):
            if table[row] != other:
                found += 1
                with pytest.raises((AssertionError, KeyError)):
                    walk(changed(plan, name, (*rank, int(row)), int(other)).tables, lengths)
    assert found > 5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seq_len", "pool", "cp", "node", "light"),
    [
        (32, 4, 2**17, 8, 16, 8, [4096] * 32),  # turns alone need 1,030 relayed pages of 1,024
        (32, 2, 2**18, 8, 8, 8, [2048] * 128),  # ... 2,075 of 2,048
        (32, 4, 2**18, 16, 8, 16, []),
        (32, 4, 2**18, 8, 8, 16, []),
    ],
)
def test_one_document_among_light_ones_is_spread_with_the_default_room(heads, kv_heads, seq_len, pool, cp, node, light):
    spec = PoolSpec(seq_len, pool, cp, heads, kv_heads, 128, waves=6, ranks_per_node=node)
    stats = plan_pool([[seq_len], *[light] * (pool - 1)], spec).stats
    assert stats.fallback is None and stats.imbalance < 1.025


@pytest.mark.parametrize("room", [0.0, 0.1, 0.5, 1.0])
def test_relays_keep_to_their_room_and_the_rest_comes_from_home(room):
    spec = PoolSpec(
        2**12, 4, 4, 8, 4, 64, block=64, waves=4, ranks_per_node=4,
        capacity=Capacity(2.0, 8.0, 16.0, passed_pages=room, relayed_pages=room),
    )  # fmt: skip
    lengths = [[2**12], *[[512] * 8] * 3]
    plan = plan_pool(lengths, spec)
    assert plan.stats.fallback is None and plan.stats.imbalance < 1.1
    for offsets, most in ((plan.tables.passed_page_offsets, spec.room.passed_pages),
                          (plan.tables.relay_page_offsets, spec.room.relayed_pages)):  # fmt: skip
        assert offsets.max() <= most
    walk_plan(plan, lengths)
    stack_plans([plan])


def test_a_plan_without_room_for_relays_or_copies_is_planned_without_them():
    """No relays to speak of, and room for four copies of a page where eight nodes would read it."""
    spec = PoolSpec(
        2**18, 8, 8, 32, 8, 128, waves=6, ranks_per_node=8,
        capacity=Capacity(1.0, 4.0, 4.0, passed_pages=0.0, relayed_pages=0.0),
    )  # fmt: skip
    stats = plan_pool([[2**18], [131_072] * 2, *[[2048] * 128] * 6], spec).stats
    assert stats.fallback is None and stats.imbalance < 1.5
