"""How benchmarks/pipeline.py follows a pipeline: against tables by hand, closed forms and a linear program."""

import dataclasses
import json

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks import pipeline
from benchmarks.pipeline import (
    SCHEDULES,
    Attention,
    Options,
    passes,
    reordered,
    steps_row,
)
from benchmarks.pools import SETTINGS
from benchmarks.step_model import kernels, step_seconds
from libra_jax import Links, plan_pool, planner
from libra_jax.modelled import PlanSeconds, plan_seconds
from libra_jax.simulate.pipeline_events import follow, least_idle, ticks_of
from libra_jax.spec import PoolSpec
from libra_jax.train.pipeline import kept_inputs

HANDED_ON = ("tick", "pass")
SPEC = PoolSpec(512, 4, 2, 4, 2, 8, block=16)


def test_ticks_by_hand():
    # Two stages, three micro-batches: forward and back, tick by tick.
    assert ticks_of("1f1b", 3, 2) == [
        [(0, None), (1, None), (2, 0), (None, 1), (None, 2)],
        [(None, None), (0, 0), (1, 1), (2, 2), (None, None)],
    ]
    assert ticks_of("gpipe", 2, 2) == [
        [(0, None), (1, None), (None, None), (None, None), (None, 0), (None, 1)],
        [(None, None), (0, None), (1, None), (None, 0), (None, 1), (None, None)],
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (1, 4), (3, 2), (8, 4), (5, 9), (32, 9)])
def test_ticks_are_a_schedule_that_keeps_what_the_program_has_room_for(schedule, micro_batches, stages):
    ticks = ticks_of(schedule, micro_batches, stages)
    when = np.full((2, stages, micro_batches), -1)
    for s, t in np.ndindex(stages, len(ticks[0])):
        for kind, m in enumerate(ticks[s][t]):
            if m is not None:
                assert when[kind, s, m] == -1
                when[kind, s, m] = t
    assert when.min() >= 0
    forward, back = when
    assert (np.diff(forward, axis=0) > 0).all() and (np.diff(back, axis=0) < 0).all()
    assert (forward <= back).all()
    kept = [((forward <= t) & (t <= back)).sum(axis=1) for t in range(len(ticks[0]))]
    assert np.max(kept) == np.max(kept, axis=0)[0] == kept_inputs(schedule, micro_batches, stages)


@pytest.mark.parametrize("handed_on", HANDED_ON)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_passes_leave_what_the_formula_says(handed_on, schedule):
    for micro_batches, stages in [(1, 3), (4, 1), (8, 4), (16, 4), (8, 9), (32, 9)]:
        for forward, backward in [(1.0, 2.0), (1.0, 1.0), (2.0, 5.0)]:
            took = np.full((stages, micro_batches), forward), np.full((stages, micro_batches), backward)
            run = follow(*took, schedule, handed_on)
            assert run.end == pytest.approx((micro_batches + stages - 1) * (forward + backward))
            assert run.idle == pytest.approx((stages - 1) / (micro_batches + stages - 1))
            assert run.idle == pytest.approx(least_idle(micro_batches, stages))


@pytest.mark.parametrize(("micro_batches", "stages"), [(2, 2), (4, 2), (8, 4), (32, 9)])
def test_a_last_stage_without_forward_passes(micro_batches, stages):
    # gpipe: the last stage takes its first micro-batch back when the one before has ended its forward passes. 1f1b: the
    # stage before the last takes all back, and all but two forward between the last stage's first and its own last.
    forward, backward = np.ones((stages, micro_batches)), np.full((stages, micro_batches), 3.0)
    forward[-1] = 0
    back = 3 * (micro_batches + stages - 1)
    assert follow(forward, backward, "gpipe").end == micro_batches + stages - 2 + back
    assert follow(forward, backward, "1f1b").end == micro_batches + stages - 3 + back


def test_unlike_passes_by_hand():
    # Two stages; forward 1 and 2, backward 4 and 1. Tick 1 of stage 0 waits for nothing, tick 2 for both.
    forward, backward = np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([[4.0, 1.0], [4.0, 1.0]])
    run = follow(forward, backward, "1f1b")
    #   tick     0      1      2      3
    #   stage 0  F0     F1     B0     B1
    #            0-1    1-3    5-9    9-10
    #   stage 1         B0     B1
    #                   1-5    5-6
    assert run.forward[0].tolist() == [0, 1] and run.backward.tolist() == [[5, 9], [1, 5]]
    assert (run.end, run.busy) == (10, 13)
    assert run.idle == pytest.approx(1 - 13 / 20)
    # Three micro-batches. Tick 2 of stage 0 is F2 (2-3) and B0 (3-13). The last micro-batch could go back from 3 on.
    forward, backward = np.array([[1.0, 1.0, 1.0], [0, 0, 0]]), np.array([[10.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert follow(forward, backward, "1f1b").backward.tolist() == [[3, 13, 14], [1, 2, 13]]
    assert follow(forward, backward, "1f1b", "pass").backward.tolist() == [[3, 13, 14], [1, 2, 3]]


def longest_path(forward, backward, schedule, handed_on):
    """The least end that a linear program finds: nobody begins before what it waits for has ended."""
    stages, micro_batches = forward.shape
    turn = stages - 1 if schedule == "1f1b" else micro_batches + stages - 1
    jobs = []  # (stage, tick, 0 forward or 1 back, micro-batch, seconds)
    for s, m in np.ndindex(stages, micro_batches):
        jobs += [(s, m + s, 0, m, forward[s, m]), (s, turn + m + stages - 1 - s, 1, m, backward[s, m])]
    rows, limits = [], []

    def earlier(i, j):
        row = np.zeros(len(jobs) + 1)
        row[i], row[j] = 1, -1
        rows.append(row)
        limits.append(-jobs[i][-1])

    for i, (s, tick, kind, m, _) in enumerate(jobs):
        earlier(i, len(jobs))
        for j, (other, later, its_kind, its_m, _) in enumerate(jobs):
            if (s == other and (tick, kind) < (later, its_kind)) or (
                handed_on == "pass" and (kind, m) == (its_kind, its_m) and other - s == (-1 if kind else 1)
            ):
                earlier(i, j)
            elif handed_on == "tick" and 0 < later - tick >= abs(other - s):
                earlier(i, j)  # by way of stages that may do nothing in the ticks between
    found = linprog(np.append(np.zeros(len(jobs)), 1.0), np.array(rows), limits)
    assert found.status == 0
    return found.fun


@pytest.mark.parametrize("handed_on", HANDED_ON)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_end_is_the_longest_path(schedule, handed_on):
    rng = np.random.default_rng(0)
    for micro_batches, stages in [(1, 1), (1, 4), (4, 1), (2, 3), (3, 3), (4, 4), (5, 2)]:
        for last in (1, 0):
            forward, backward = rng.exponential(size=(2, stages, micro_batches))
            forward[-1] *= last
            run = follow(forward, backward, schedule, handed_on)
            assert run.end == pytest.approx(longest_path(forward, backward, schedule, handed_on), rel=1e-9)
            assert follow(forward, backward, schedule, "pass").end <= run.end * (1 + 1e-12)


def test_what_passes_take():
    # 36 layers on 4 stages, a layer's attention 2 s forward and 5 s backward in the first micro-step.
    attention = np.array([[2.0, 5.0], [0.0, 1.0]])
    forward, backward = passes(attention, SPEC, 4)
    weights, last = 2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 12_288, 4096 * 12_288  # the MLP's last product
    product, layer = 2 * 256 * weights / 635e12, 2 * 256 * (4 * weights - last) / 635e12
    head = 2 * 256 * 4 * 4096 * 151_936 / 635e12
    assert forward[:, 0] == pytest.approx([9 * (2 + product)] * 3 + [0])
    assert backward[:3, 1] == pytest.approx(9 * (1 + layer))
    assert backward[3, 0] == pytest.approx(9 * (7 + layer) + head)
    # Of one stage it is a step without a pipeline, which runs attention forward once and a pipeline's twice.
    none = np.zeros((2, 1), np.int64)
    pools = [[PlanSeconds(0, float(f + b), 0, 0, 0, 0, none, none, none, none)] for f, b in attention]
    forward, backward = passes(attention, SPEC, 1)
    assert follow(forward, backward, "1f1b").end == pytest.approx(step_seconds(pools, SPEC).step)


def test_rows_of_equal_and_unlike_steps():
    even = np.full((8, 2), 1.0)
    row = steps_row(Attention(even, even), SPEC, 4, 4, "1f1b")
    assert (row["steps"], row["kept"]) == (2, 4)
    assert row["idle"] == row["idle, alike"]
    assert row["over ideal"][0] == pytest.approx(1 / (1 - row["idle"][0]))
    heavy = even.copy()
    heavy[::4] = 10
    unlike = steps_row(Attention(heavy, even), SPEC, 4, 4, "1f1b")
    assert unlike["idle"][0] > unlike["idle, alike"][0]
    assert unlike["over ideal"][0] > row["over ideal"][0] * 3.25
    turned = reordered(Attention(heavy, even), 4, lambda step: np.array([3, 2, 1, 0]))
    assert np.flatnonzero(turned.modelled[:, 0] == 10).tolist() == [3, 7]


def test_pools_cost_what_the_plans_of_plan_pool_do():
    rng = np.random.default_rng(0)
    lengths = [rng.multinomial(480, rng.dirichlet(np.full(3, 0.5))).clip(1)[:2].tolist() for _ in range(4)]
    spec = dataclasses.replace(SPEC, capacity=100.0)
    policies = {"Libra, all": None, "Ulysses": planner.head_parallel, "context parallel": planner.at_home}
    for name, policy in policies.items():
        plan = plan_pool(lengths, spec, policy=policy, cost=kernels(), links=Links())
        seconds = plan_seconds(plan, kernels(), Links())
        ours = pipeline.seconds_of(lengths, spec, pipeline.POLICIES[name].executor)
        assert (ours.forward, ours.backward, ours.ideal) == (seconds.forward, seconds.backward, seconds.ideal)


def test_policies_get_the_same_sequences_and_the_same_work(monkeypatch):
    setting = SETTINGS[0]
    monkeypatch.setattr(type(setting), "spec", lambda self, *heads, two_level=False: SPEC)
    monkeypatch.setattr(pipeline, "sample_sequences", lambda corpus, seq_len, count, seed: [
        np.random.default_rng([seed, i]).multinomial(480, [0.7, 0.2, 0.1]).clip(1).tolist() for i in range(count)
    ])  # fmt: skip
    found = pipeline.planned(setting, "corpus", 4, Options(micro_steps=(2, 4), steps=2))
    assert {name for name, _ in found} == {*pipeline.POLICIES, *pipeline.ORDERS}
    sums = {key: each.ideal.sum() for key, each in found.items()}
    assert list(sums.values()) == pytest.approx([sums["Ulysses", 4]] * len(sums))
    assert all((each.modelled > each.ideal).all() for each in found.values())
    heaviest = found["Libra, pools", 4].ideal.sum(axis=1)
    assert (np.diff(heaviest) <= 0).all()


def test_stages_that_the_trainer_refuses_are_refused():
    with pytest.raises(ValueError, match=r"stages \(8\) must divide the model's layers \(36\)"):
        pipeline.check(Options(stages=(8,)))
    with pytest.raises(ValueError, match=r"drawn \(16\) must be at least the most micro-steps \(32\)"):
        pipeline.check(Options(drawn=16))


def test_the_report_says_what_the_rows_say(monkeypatch, tmp_path):
    even = Attention(np.full((4, 2), 1.25), np.ones((4, 2)))
    kinds = [*pipeline.POLICIES, *pipeline.ORDERS]
    monkeypatch.setattr(pipeline, "planned", lambda *given: {(kind, m): even for kind in kinds for m in (2, 4)})
    paths = {name: tmp_path / name for name in ("json", "report")}
    pipeline.main(Options(stages=(2, 3), micro_steps=(2, 4), drawn=4, long_drawn=0, **paths))
    rows = json.loads(paths["json"].read_text())["rows"]
    assert len(rows) == 3 * len(kinds) * 2 * 2 * 2
    for row in rows:
        assert row["steps"] == 4 // row["micro-steps"]
        assert row["over ideal"][0] == pytest.approx(row["work over ideal"][0] / (1 - row["idle"][0]))
        assert 1.2 < row["work over ideal"][0] < 1.25  # attention takes 1.25 of its ideal, the rest 1
        assert row["idle"] == pytest.approx(row["idle, alike"])
    row = next(row for row in rows if (row["stages"], row["micro-steps"], row["schedule"]) == (3, 4, "1f1b"))
    step, work, idle = (row[name][0] for name in ("over ideal", "work over ideal", "idle"))
    assert f"| 256K | 3 | 4 | 33% | {step:.2f} = {work:.2f}, {100 * idle:.0f}% |" in paths["report"].read_text()
