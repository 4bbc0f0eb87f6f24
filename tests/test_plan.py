"""Plans and their tables: what travels (`table_walk`), what is refused, what is the same."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_walk import visited_pages, walk_plan

from libra_jax import planner
from libra_jax.links import Links
from libra_jax.modelled import plan_seconds
from libra_jax.plan import MOST_TRIES, check_batch, plan_pool, stack_plans
from libra_jax.routing import wave_ends
from libra_jax.spec import Capacity, PoolSpec, head_parallel_capacity
from libra_jax.tables import PlanTables
from libra_jax.workload import PADDING, CostModel, block_pages


@st.composite
def pools(draw: st.DrawFn) -> tuple[PoolSpec, list[list[int]], int]:
    """A small pool, its documents, and a seed."""
    cp, blocks, block = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 4, 8]))
    kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    spec = PoolSpec(
        seq_len=cp * blocks * block,
        pool_size=draw(st.integers(1, 3)),
        cp=cp,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=8,
        block=block,
        waves=draw(st.integers(1, 4)),
        window=draw(st.none() | st.integers(1, cp * blocks * block)),
        capacity=100.0,
    )
    return spec, [draw(documents(spec.seq_len)) for _ in range(spec.pool_size)], draw(st.integers(0, 99))


@st.composite
def documents(draw: st.DrawFn, seq_len: int) -> list[int]:
    """Document lengths that fill any part of a sequence, none of it included."""
    lengths, left = [], draw(st.integers(0, seq_len))
    while left:
        lengths.append(draw(st.integers(1, left)))
        left -= lengths[-1]
    return lengths


POLICIES = {
    "pooled": lambda seed: planner.pooled,
    "at_home": lambda seed: planner.at_home,
    "head_parallel": lambda seed: planner.head_parallel,
    "random": planner.random_plan,
}


@pytest.mark.parametrize("name", POLICIES)
@given(pools())
@settings(max_examples=60, deadline=None)
def test_every_item_arrives_where_it_is_used_and_nothing_else_travels(name, pool):
    spec, lengths, seed = pool
    plan = plan_pool(lengths, spec, policy=POLICIES[name](seed))
    assert plan.stats.fallback is None
    walk_plan(plan, lengths)


def test_work_by_hand():
    # One document of four blocks: 1 + 2 + 3 + 4 pages a head; two heads.
    spec = PoolSpec(seq_len=32, pool_size=1, cp=2, num_heads=2, num_kv_heads=2, head_dim=8, block=8, dtype="float32")
    at_home = plan_pool([[32]], spec, policy=planner.at_home).stats
    assert list(at_home.work) == [6, 14]
    assert at_home.imbalance == pytest.approx(1.4)
    # The second rank's blocks read both pages of the first, in both heads: 4 pages of 8 tokens, k and v, 8 wide.
    assert list(at_home.sent_bytes) == [4 * 8 * 2 * 8 * 4, 0]
    assert list(at_home.received_bytes) == [0, 4 * 8 * 2 * 8 * 4]
    split = plan_pool([[32]], spec, policy=planner.head_parallel).stats
    assert list(split.work) == [10, 10] and split.imbalance == 1.0
    # Each rank gives one head's two blocks (q out, o back) and pages away: what Ulysses moves.
    assert list(split.sent_bytes) == [split.ulysses_bytes] * 2
    assert split.ulysses_bytes == 2 * (8 * 8 * 4) * 4


def test_a_plan_that_does_not_fit_falls_back_and_says_so():
    spec = PoolSpec(
        seq_len=64, pool_size=2, cp=4, num_heads=4, num_kv_heads=4, head_dim=8, block=8, capacity=Capacity(1, 1, 1)
    )
    plan = plan_pool([[64], [64]], spec, policy=planner.at_home)
    assert plan.stats.fallback is not None
    assert "24" in plan.stats.fallback and "8" in plan.stats.fallback  # received pages needed, and the room
    parallel = planner.head_parallel(*page_arrays([[64], [64]], spec), spec, np.ones(spec.ranks))
    assert np.array_equal(plan.executor, parallel)
    walk_plan(plan, [[64], [64]])


@given(pools())
@settings(max_examples=100, deadline=None)
def test_the_head_parallel_plan_fits_the_least_capacity(pool):
    spec, lengths, seed = pool
    tight = dataclasses.replace(spec, capacity=head_parallel_capacity(spec))
    plan = plan_pool(lengths, tight, policy=planner.random_plan(seed))  # whatever it does, there is a plan
    walk_plan(plan, lengths)


def page_arrays(lengths: list[list[int]], spec: PoolSpec) -> tuple[np.ndarray, np.ndarray]:
    visits = [visited_pages(sequence, spec) for sequence in lengths]
    first = np.array([[pages[0] if pages else b for b, pages in enumerate(sequence)] for sequence in visits])
    return first, np.array([[len(pages) for pages in sequence] for sequence in visits])


def test_speeds_shift_work_and_define_the_imbalance():
    spec = PoolSpec(seq_len=512, pool_size=2, cp=2, num_heads=4, num_kv_heads=4, head_dim=8, block=8)
    lengths, speed = [[512], [256, 256]], [1.0, 1.0, 1.0, 0.5]
    stats = plan_pool(lengths, spec, speed, tolerance=0).stats
    time = stats.work / np.array(speed)
    assert stats.imbalance == pytest.approx(time.max() / (stats.work.sum() / 3.5))
    assert stats.imbalance < 1.02
    assert stats.work[3] < 0.6 * stats.work[0]


@pytest.mark.parametrize(
    ("lengths", "speed", "words"),
    [
        ([[40, 20]], None, ["1", "2"]),
        ([[40, 30], [1]], None, ["70", "64"]),
        ([[20, -3], [1]], None, ["-3"]),
        ([[20, 0], [1]], None, ["0"]),
        ([[20], [1]], [1.0, 1.0], ["2", "4"]),
        ([[20], [1]], [1.0, 1.0, 0.0, 1.0], ["speed", "0.0"]),
        ([[20], [1]], [1.0, 1.0, float("nan"), 1.0], ["speed", "nan"]),
        ([[20], [1]], [1e-308, 1e308, 1.0, 1.0], ["speed", "1e-12"]),
        ([[20], [1]], ["a"] * 4, ["speed", "4 ranks"]),
    ],
)
def test_bad_input_is_refused_by_name(lengths, speed, words):
    spec = PoolSpec(seq_len=64, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=16, block=8)
    with pytest.raises(ValueError) as error:
        plan_pool(lengths, spec, speed)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, ["6", "4"]),
        ({"seq_len": 100}, ["100", "16"]),
        ({"block": 0}, ["block", "0"]),
        ({"waves": -1}, ["waves", "-1"]),
        ({"dtype": "float64"}, ["float64"]),
        ({"window": 0}, ["window", "0"]),
        ({"capacity": Capacity(0.25, 4, 4)}, ["capacity.blocks (0.25)", "cp 2"]),
        ({"capacity": -1}, ["capacity", "-1"]),
        ({"waves": 65}, ["waves", "65", "64"]),
        ({"seq_len": 2**30}, ["seq_len", str(2**30)]),
        ({"capacity": float("nan")}, ["nan"]),
    ],
)
def test_a_bad_spec_is_refused_by_name(change, words):
    good = {"seq_len": 64, "pool_size": 2, "cp": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block": 8}
    PoolSpec(**good)
    with pytest.raises(ValueError) as error:
        PoolSpec(**(good | change))
    assert all(word in str(error.value) for word in words), error.value


def test_a_number_as_capacity_is_no_less_than_the_head_parallel_plan_needs():
    base = {"seq_len": 64, "pool_size": 2, "cp": 4, "num_heads": 4, "num_kv_heads": 1, "head_dim": 16, "block": 8}
    need = head_parallel_capacity(PoolSpec(**base))
    assert need.pages > 1
    least = PoolSpec(**base, capacity=0).capacity
    assert least == Capacity(need.blocks, need.pages, need.sent_pages)
    assert PoolSpec(**base, capacity=5.0).capacity == Capacity(5.0, 5.0, 5.0)
    assert plan_pool([[64], [64]], PoolSpec(**base, capacity=0)).stats.imbalance < 1.6


def test_stacked_plans_share_a_spec_and_keep_their_shapes():
    spec = PoolSpec(seq_len=64, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=16, block=8)
    some = [plan_pool(lengths, spec) for lengths in ([[64], [64]], [[1], []], [[30, 34], [5, 5, 5]])]
    stacked = stack_plans(some)
    for name in PlanTables.table_names():
        table = getattr(stacked, name)
        assert table.dtype == np.int32 and table.shape[:3] == (3, 2, 2), name
    other = dataclasses.replace(spec, window=3)
    with pytest.raises(ValueError, match="plan 1"):
        stack_plans([some[0], plan_pool([[64], [64]], other)])
    with pytest.raises(ValueError, match="at least one"):
        stack_plans([])


def test_check_batch_finds_plans_of_other_documents():
    spec = PoolSpec(seq_len=16, pool_size=2, cp=2, num_heads=2, num_kv_heads=2, head_dim=8, block=4, window=5)
    plans = stack_plans([plan_pool([[5, 3], [16]], spec)])
    ids = np.array([[7] * 5 + [3] * 3 + [0] * 8, [900] * 16])  # any numbers will do
    check_batch(plans, ids)
    check_batch(plans, np.where(ids == 0, -1, ids), padding_id=-1)
    moved = ids.copy()
    moved[0, 5] = 7
    with pytest.raises(ValueError, match=r"sequence 0, token 5 .* 1 in the batch, but from 5 in the plan"):
        check_batch(plans, moved)
    with pytest.raises(ValueError, match=r"\(1, 16\).*\(2, 16\)"):
        check_batch(plans, ids[:1])
    holes = ids.copy()
    holes[1, 3] = 0
    with pytest.raises(ValueError, match="must come last"):
        check_batch(plans, holes)


def test_the_padding_mark_is_the_kernels():
    import libra_kernels

    assert PADDING == libra_kernels.PADDING


def test_plans_made_before_jax_is_imported_become_pytrees_with_the_operator():
    program = """
import libra_jax, sys
spec = libra_jax.PoolSpec(seq_len=16, pool_size=1, cp=1, num_heads=1, num_kv_heads=1, head_dim=8, block=4)
plans = libra_jax.stack_plans([libra_jax.plan_pool([[16]], spec)])
assert "jax" not in sys.modules
import jax
libra_jax.libra_attention
assert len(jax.tree.leaves(plans)) == 29
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_planning_threads_leave_an_import_of_jax_alone():
    program = """
import threading
import libra_jax
spec = libra_jax.PoolSpec(seq_len=16, pool_size=1, cp=1, num_heads=1, num_kv_heads=1, head_dim=8, block=4)
plan, done, errors = libra_jax.plan_pool([[16]], spec), threading.Event(), []
def work():
    try:
        while not done.is_set():
            libra_jax.stack_plans([plan])
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
import jax
done.set()
for thread in threads: thread.join()
assert not errors, errors
assert len(jax.tree.leaves(libra_jax.stack_plans([plan]))) == 29
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_unpickled_tables_are_pytrees_where_jax_is():
    spec = PoolSpec(seq_len=16, pool_size=1, cp=1, num_heads=1, num_kv_heads=1, head_dim=8, block=4)
    program = """
import pickle, sys, jax
plans = pickle.load(sys.stdin.buffer)
assert len(jax.tree.leaves(plans)) == 29 and "libra_jax.attention" not in sys.modules
"""
    plans = pickle.dumps(stack_plans([plan_pool([[16]], spec)]))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, input=plans)


def test_stacked_tables_cannot_be_written_and_policies_cannot_write_the_pages():
    spec = PoolSpec(seq_len=16, pool_size=1, cp=2, num_heads=2, num_kv_heads=2, head_dim=8, block=4)
    with pytest.raises(ValueError, match="read-only"):
        stack_plans([plan_pool([[16]], spec)]).pages[:] = 0

    def careless(first_page, num_pages, spec, speed):
        num_pages[:] = 0
        return planner.at_home(first_page, num_pages, spec, speed)

    with pytest.raises(ValueError, match="read-only"):
        plan_pool([[16]], spec, policy=careless)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda spec, plan: stack_plans(plan), ["stack_plans", "Plan"]),
        (lambda spec, plan: stack_plans([1]), ["stack_plans", "int"]),
        (lambda spec, plan: check_batch(plan, np.zeros((1, 16))), ["stack_plans", "Plan"]),
        (lambda spec, plan: plan_pool(None, spec), ["NoneType"]),
        (lambda spec, plan: plan_pool([[16]], {}), ["dict"]),
        (lambda spec, plan: plan_pool([[16]], spec, policy="pooled"), ["'pooled'"]),
        (lambda spec, plan: Capacity(None, 1, 1), ["capacity.blocks", "None"]),
        (lambda spec, plan: Capacity(True, 1, 1), ["capacity.blocks", "True"]),
        (lambda spec, plan: dataclasses.replace(spec, capacity="large"), ["capacity", "'large'"]),
    ],
)
def test_a_likely_slip_is_answered_in_words(call, words):
    spec = PoolSpec(seq_len=16, pool_size=1, cp=2, num_heads=2, num_kv_heads=2, head_dim=8, block=4)
    with pytest.raises(TypeError) as error:
        call(spec, plan_pool([[16]], spec))
    assert all(word in str(error.value) for word in words), error.value


def test_numbers_and_types_of_numpy_are_taken():
    plain = PoolSpec(seq_len=16, pool_size=1, cp=2, num_heads=2, num_kv_heads=2, head_dim=8, block=4, capacity=1.0)
    numpy = PoolSpec(
        seq_len=np.int64(16), pool_size=1, cp=np.int32(2), num_heads=2, num_kv_heads=2, head_dim=8, block=4,
        capacity=np.float32(1), dtype=np.dtype("float32"), window=10**12,
    )  # fmt: skip
    assert numpy == dataclasses.replace(plain, dtype="float32", window=16)
    assert hash(numpy) == hash(dataclasses.replace(plain, dtype=np.float32, window=99))


@pytest.mark.parametrize("waves", [3, 4, 7])
def test_ranks_keep_step_through_the_waves(waves: int) -> None:
    """A wave ends at the same fraction of every rank's work, to within a block, and wave 0 needs no exchange."""
    spec = PoolSpec(
        seq_len=4096, pool_size=3, cp=2, num_heads=8, num_kv_heads=4, head_dim=8, block=32, waves=waves, capacity=16
    )
    rng = np.random.default_rng(waves)
    lengths = [[4096], rng.multinomial(4096, np.ones(20) / 20).tolist(), [40] * 100]
    plan = plan_pool(lengths, spec)
    assert plan.stats.fallback is None
    pages = np.stack([block_pages(sequence, spec).num_pages for sequence in lengths])[:, None]
    work = np.zeros((spec.ranks, waves))
    np.add.at(work, (plan.executor, plan.wave), np.broadcast_to(pages, plan.executor.shape))
    done = np.cumsum(work, axis=1) / work.sum(axis=1, keepdims=True)
    block = pages.max() / work.sum(axis=1).min()
    np.testing.assert_allclose(done[:, 1:], np.broadcast_to(wave_ends(waves)[1:], done[:, 1:].shape), atol=block)
    assert (done[:, 0] <= wave_ends(waves)[0] + block).all()
    arrived = np.diff(plan.tables.recv_block_offsets, axis=-1).sum(axis=-1).reshape(spec.ranks, -1)
    assert arrived[:, -1].sum() < arrived.sum() / (waves - 1)  # few outputs are left to go home at the end


def light_pool() -> tuple[PoolSpec, list[list[int]]]:
    """Four nodes of two ranks with little to do, one of them a tenth more than the others."""
    spec = PoolSpec(8192, 4, 2, 8, 4, 64, block=64, waves=3, ranks_per_node=2, capacity=10.0)
    return spec, [[900] * 9, [820] * 9, [820] * 9, [820] * 9]


def test_a_plan_may_leave_imbalance_where_moving_takes_longer():
    spec, lengths = light_pool()
    slow = Links(ranks_per_node=2, across=1e8)
    even = plan_pool(lengths, spec, tolerance=0, links=slow)
    chosen = plan_pool(lengths, spec, tolerance=0.2, links=slow)
    assert plan_seconds(chosen, links=slow).total < plan_seconds(even, links=slow).total
    assert even.stats.imbalance < chosen.stats.imbalance <= 1.2 + 0.01


@given(pools())
@settings(max_examples=40, deadline=None)
def test_more_tries_never_cost_modelled_time(pool):
    spec, lengths, _ = pool
    plans = [plan_pool(lengths, spec, tolerance=0.05, tries=tries) for tries in (1, 2, MOST_TRIES)]
    seconds = [plan_seconds(plan).total for plan in plans]
    assert seconds[0] * (1 + 1e-9) >= seconds[1] and seconds[1] * (1 + 1e-9) >= seconds[2]
    walk_plan(plans[-1], lengths)


def test_where_sequences_are_alike_and_long_heads_are_dealt():
    """Eight documents as long as their sequences, two kv heads for four ranks: the tile planner has no room to cut
    lanes as it likes, dealing heads is perfectly even."""
    spec = PoolSpec(4096, 8, 4, 8, 2, 64, block=16, waves=3, ranks_per_node=4)
    plan = plan_pool([[4096]] * 8, spec)
    assert plan.stats.imbalance < 1.01 and plan.stats.fallback is None
    assert not (plan.executor // 4 != np.arange(8)[:, None, None]).any()  # nothing leaves a CP group


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf"), "much"])
def test_tolerance_is_checked(tolerance):
    spec, lengths = light_pool()
    with pytest.raises(ValueError, match="tolerance"):
        plan_pool(lengths, spec, tolerance=tolerance)


@pytest.mark.parametrize("tries", [0, MOST_TRIES + 1, 1.5, True])
def test_tries_are_checked(tries):
    spec, lengths = light_pool()
    with pytest.raises(ValueError, match=f"tries .* from 1 to {MOST_TRIES}"):
        plan_pool(lengths, spec, tries=tries)


@pytest.mark.parametrize("prices", [{"cost": "x"}, {"cost": CostModel}, {"links": Links}, {"links": 5}])
def test_prices_are_checked(prices):
    spec, lengths = light_pool()
    name, value = next(iter(prices.items()))
    for call in (
        lambda: plan_pool(lengths, spec, **prices),
        lambda: plan_pool(lengths, spec, policy=planner.at_home, **prices),
        lambda: plan_seconds(plan_pool(lengths, spec), **prices),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a libra_jax") as error:
            call()
        assert repr(value) in str(error.value)


def test_only_plans_have_modelled_seconds():
    with pytest.raises(TypeError, match="what plan_pool returns, or its tables, got int"):
        plan_seconds(5)  # pyright: ignore[reportArgumentType]
