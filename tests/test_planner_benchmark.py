"""The benchmark's own arithmetic: modelled steps, bytes and rooms of plans, tables of what was asked."""

import dataclasses
import functools

import numpy as np
import pytest

from benchmarks import frontier
from benchmarks.planner import Options, asked_rows, raised_by
from benchmarks.pools import CORPORA, SETTINGS, bytes_moved, measure, room_needed, row_of, sample_batches
from benchmarks.step_model import (
    TABLE,
    all_alike,
    as_drawn,
    best_of,
    kernels,
    mean_of,
    planned_step,
    slots_of,
    step_seconds,
)
from libra_jax import CostModel, Links, PoolSpec, plan_pool, planner
from libra_jax.modelled import PlanSeconds, plan_counts
from libra_jax.models.qwen3 import QWEN3_8B, Qwen3Config
from libra_jax.simulate.step import head_seconds, layer_products, token_seconds

SPEC = PoolSpec(512, 4, 2, 4, 2, 8, block=16, waves=4, capacity=100.0, ranks_per_node=4)


def batch(sequences, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.multinomial(480, rng.dirichlet(np.full(3, 0.5))).clip(1).tolist() for _ in range(sequences)]


def test_products_and_norms_are_all_of_the_model():
    model = QWEN3_8B
    norms = model.num_layers * (2 * model.hidden_size + 2 * model.head_dim) + model.hidden_size
    matrices = model.num_layers * layer_products(model)[0] + 2 * model.vocab_size * model.hidden_size
    assert matrices + norms == model.num_parameters


def test_seconds_of_matrix_products():
    # One layer of width 2, MLP 3, 2 + 1 heads of 4: 2 * 2 * 4 * 3 + 3 * 2 * 3 = 66 parameters. A token: 2 FLOPs each
    # forward, 4 backward, 2 again for all but the 6 of the last product.
    model = Qwen3Config(7, 2, 3, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
    assert token_seconds(model, TABLE) == pytest.approx((2 * 66 / 635e12, (4 * 66 + 2 * 60) / 635e12))
    assert head_seconds(model, TABLE) == pytest.approx(8 * 14 / 635e12)


def test_kernels_run_at_the_given_rate():
    model, usual = kernels(500e12), CostModel()
    page = 2 * 128 * 128 * 128  # FLOPs of one product of a page
    assert model.forward(1) == pytest.approx(2 * page / 500e12)
    assert model.backward(1) == pytest.approx(5 * page / 500e12)
    assert model.block_seconds / model.page_seconds == pytest.approx(usual.block_seconds / usual.page_seconds)
    assert model.launch_seconds == usual.launch_seconds


def pool(forward, backward, kernel=0.0, ideal=0.0):
    none = np.zeros((2, 1), np.int64)
    return PlanSeconds(forward, backward, kernel, 2 * kernel, ideal, 2 * ideal, none, none, none, none)


def test_a_step_waits_for_the_slowest_pool_of_each_micro_step_and_pass():
    pools = [[pool(5, 7, 3, 1), pool(4, 10, 2, 2)], [pool(1, 2, 1, 0.5), pool(1, 1, 0.5, 0.5)]]
    model = dataclasses.replace(QWEN3_8B, num_layers=3)
    step = step_seconds(pools, SPEC, model)
    assert step.attention == 5 + 10 + 1 + 2
    assert step.ideal == 3 * 1.5 + 3 * 0.5
    assert step.between_pools == (3 * 2 + 3 * 0.5) - step.ideal
    assert step.inside_pools == (3 * 3 + 3 * 1) - 7.5
    assert step.exposed == 18 - 12
    rest = 2 * 256 * (3 * sum(token_seconds(model, TABLE)) + head_seconds(model, TABLE))
    assert step.step == pytest.approx(3 * 18 + rest)
    assert step.ideal_step == pytest.approx(3 * 6 + rest)
    assert step.attention_efficiency == 6 / 18
    assert step.efficiency == pytest.approx(step.ideal_step / step.step)


def test_mean_and_best_of_steps():
    fast, slow = (step_seconds([[pool(x, x, 1, 1)]], SPEC) for x in (2, 4))
    assert mean_of([fast, slow]).attention == 6
    assert best_of([[fast, slow, fast], [slow, fast, fast]]) == [fast, fast, fast]


@pytest.mark.parametrize("slots", [slots_of, all_alike, as_drawn])
@pytest.mark.parametrize("pool_size", [4, 8, 16])
def test_every_sequence_once(slots, pool_size):
    spec = PoolSpec(512, pool_size, 2, 4, 2, 8, block=16)
    got = slots(batch(32), spec, kernels())
    assert got.shape == (2, 16 // pool_size, pool_size)
    assert sorted(got.reshape(-1).tolist()) == list(range(32))


def test_planned_steps_are_never_better_than_ideal():
    at_home = functools.partial(plan_pool, policy=planner.at_home)
    steps = [planned_step(batch(16), SPEC, plan, kernels(), Links(4)) for plan in (plan_pool, at_home)]
    for step in steps:
        assert 0 < step.efficiency <= 1
        assert 0 < step.attention_efficiency <= step.efficiency
        assert min(step.between_pools, step.inside_pools, step.exposed) >= -1e-12
    assert steps[0].ideal == pytest.approx(steps[1].ideal)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_and_rooms_are_those_of_the_plan(seed):
    plan = plan_pool(batch(4, seed), SPEC, policy=planner.random_plan(seed))
    assert plan.stats.fallback is None
    counts, unit = plan_counts(plan.tables), plan.stats.ulysses_bytes
    moved = bytes_moved(plan, counts, Links(4))
    assert moved["bytes mean"] == pytest.approx(plan.stats.sent_bytes.mean() / unit)
    assert moved["sent"] == pytest.approx(plan.stats.sent_bytes.max() / unit)
    assert moved["received"] == pytest.approx(plan.stats.received_bytes.max() / unit)
    assert 0 < moved["across sent"] <= moved["sent"]
    one_node = bytes_moved(plan, counts, Links(8))
    assert one_node["across sent"] == one_node["across received"] == 0
    needs = room_needed(counts, SPEC)
    assert needs["passed"] > 0
    home = np.arange(SPEC.blocks_per_sequence) // SPEC.blocks_per_rank + 2 * np.arange(4)[:, None]
    came = np.bincount(plan.executor[plan.executor != home[:, None]], minlength=8)
    assert needs["blocks"] == came.max() / SPEC.home_blocks


def test_measure_and_rows():
    pools = [batch(4, seed) for seed in range(3)]
    measured = measure(pools, SPEC, plan_pool, kernels(), Links(4), frontier.one_slow(8, 0))
    row = row_of(measured)
    assert row["pools"] == 3 and len(row["imbalance"]) == 2 and len(row["pages"]) == 3
    assert measured.values["time"].min() >= 1
    assert frontier.speed_row("corpus", "one slow", measured)["within"].endswith("of 3")
    speeds = frontier.one_slow(8, 0)(1)
    assert sorted(speeds) == [0.5] + [1.0] * 7
    spread = frontier.spread(1000, 0)(1)
    assert 0.965 <= spread.min() < 0.966 and 1.034 < spread.max() <= 1.035


def test_asked_rows_take_the_worst_and_count_those_that_do():
    rooms = {name: [0.1, 0.2, 3.5] for name in ("blocks", "pages", "copies", "passed", "relayed")}
    common = {"room": "default", "level": "two levels", "tokens": "1M", "fallback": 0, "set aside": [1, 4, 6]}
    figures = {name: [1.0, 1.3] for name in ("imbalance", "sent", "received")} | {
        name: [0.5] for name in ("bytes mean", "plan ms")
    }
    plans = [common | figures | rooms, common | figures | rooms | {"imbalance": [1.03, 1.01], "plan ms": [61.0]}]
    rows = {row["what"]: row for row in asked_rows(plans, [], Options())}
    assert rows["imbalance, median"]["1M, two levels"] == "1.030 (1/2)"
    assert rows["planning ms, median"]["asked"] == "<= 15 / 60"
    assert rows["planning ms, median"]["1M, two levels"] == "61.000 (1/2)"
    assert rows["busiest sender, 99%"]["1M, two levels"] == "1.300 (0/2)"
    assert rows["imbalance, median"]["256K, one level"] == "-"
    steps = [{"plan": "pools of 8 or 16, chosen by step", "tokens": "256K", "efficiency": x} for x in ("0.9", "0.95")]
    rows = {row["what"]: row for row in asked_rows([], steps, Options())}
    assert rows["modelled efficiency, worst corpus"]["256K, two levels"] == "0.900"
    assert rows["modelled efficiency, best corpus"]["256K, two levels"] == "0.950"


def test_frontier_is_drawn(tmp_path):
    pools = [batch(4, seed) for seed in range(2)]
    points = frontier.frontier("256K", "corpus", pools, SPEC, raised_by(Links(4)), kernels(), Links(4))
    assert [point.raised for point in points] == list(frontier.RAISED)
    assert points[-1].median("imbalance") > points[0].median("imbalance")
    frontier.frontier_png(tmp_path / "frontier.png", points)
    assert (tmp_path / "frontier.png").stat().st_size > 10_000


@pytest.mark.parametrize("setting", SETTINGS)
def test_batches_are_full_steps(setting):
    batches = sample_batches(CORPORA[0], setting, 1, 0)
    assert len(batches) == 1 and len(batches[0]) == setting.global_batch
    assert all(sum(sequence) == setting.seq_len for sequence in batches[0])
