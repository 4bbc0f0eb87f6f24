"""A step of the cluster model: by hand, each loss alone, what holds whatever the numbers, pipelines against an event
queue written anew, and memory against what `libra preflight` found."""

import dataclasses
import heapq
import json
from pathlib import Path

import numpy as np
import pytest
import simulate_base as base

from libra_jax.assignments import at_home
from libra_jax.models.qwen3 import QWEN3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B
from libra_jax.policies import names
from libra_jax.policies.base import Group, RunShape, StepPlan
from libra_jax.policies.dynamic_cp import DynamicCP
from libra_jax.policies.packed import ROOMY, Pools, Sharded, pages_of, ulysses
from libra_jax.policies.travel import travel
from libra_jax.simulate.attention import Network, group_seconds
from libra_jax.simulate.constants import constants, links
from libra_jax.simulate.step import LOSSES, Setting, layer_weights, memory_gib, simulate_step, token_seconds
from libra_jax.simulate.study import Outcome, outcome, spread
from libra_jax.workload import CostModel

THERE, BACK, HEAD = base.THERE, base.BACK, base.HEAD


def step(policy, setting, sequences):
    return simulate_step(policy.step([list(each) for each in sequences], setting.run), setting)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- by hand


def test_a_whole_step_by_hand():
    # Zigzag of one document of 32 tokens on 2 ranks, as in test_simulate_attention: a layer's attention takes
    # 28.4 + 110 ms forward and 57.2 + 220 backward, the products of 16 tokens 16 and 44.8 ms, their head 16 ms.
    setting = base.setting_of()
    close(token_seconds(setting.model, setting.table), (THERE, BACK))
    forward, backward = 0.1384 + 0.016, 0.2772 + 0.0448
    # A layer has 256 + 384 weights in matrices and 2 * 8 + 2 * 8 in norms: 1344 B, half of them the rank's own, to
    # gather in 131.25 + 10 ms, twice, and 2688 B of gradients to sum in 262.5 + 10 ms. The forward pass hides its part.
    assert layer_weights(setting.model) == 672
    assert forward > 0.14125
    exposed = 0.14125 + 0.2725 - backward
    found = step(Sharded("sequence"), setting, [[32]])
    close(found.step, 2 * (forward + backward + exposed) + 0.016)
    # 33 pages' worth of pairs, half of them on each rank, 1 ms and 2 ms each.
    close(found.ideal, 2 * (0.0165 + 0.033 + 0.016 + 0.0448) + 0.016)
    close(found.losses["kernels"], 2 * (0.0284 - 0.0165 + 0.0572 - 0.033))
    close(found.losses["exposed exchange"], 2 * (0.11 + 0.22))
    close(found.losses["gathers"], 2 * exposed)
    for name in ("padding", "between pools", "within pools", "bubble"):
        close(found.losses[name], 0)
    # 6 FLOPs a token and weight: 2 layers of 640 and 20 * 8; 12 a pair, layer and number of a head.
    assert found.flops == 6 * 32 * (2 * 640 + 160) + 12 * 528 * 2 * 8
    assert (found.tokens, found.micro_steps, found.fill, found.heaviest) == (32, 1, 1.0, 1.0)
    assert found.pool_imbalance == found.rank_imbalance == found.micro_step_imbalance == 1
    numbers = found.numbers(setting.gpus, 1e7)
    close(numbers["tokens per gpu second"], 32 / found.step / 2)
    close(numbers["mfu"], found.flops / found.step / 2e7)
    close(sum(numbers[f"lost to {name}"] for name in LOSSES) + numbers["efficiency"], 1)


def test_micro_steps_add_up_and_imbalances_are_means_over_them():
    # Exact kernels, one rank each: 32 tokens are 528 pairs, or 32. Side by side, then one after the other.
    setting = base.exact_setting(dp=2, micro_steps=2)
    sequences = [[32], [1] * 32, [32], [32]]
    found = step(ulysses(), setting, sequences)
    products = 2 * 2 * (32 * (THERE + BACK) + 16 * HEAD)
    close(found.step, products + 2 * 2 * 528 * 3e-3)
    close(found.ideal, products + 2 * (528 + 32 + 2 * 528) / 2 * 3e-3)
    close(found.pool_imbalance, (528 / 280 + 1) / 2)
    close(found.heaviest, 528 / ((3 * 528 + 32) / 4))
    assert found.rank_imbalance == found.pool_imbalance  # the busiest rank over all of them, not over its group's
    assert found.micro_step_imbalance == 1


def test_ranks_that_are_left_over_have_nothing_to_do():
    # 4 ranks, a document of 32 on all of them first, of which one could do with less: here 3 of 4 have none.
    setting = base.exact_setting(dp=4)
    plan = ulysses().step([[32], [], [], []], setting.run)
    whole = simulate_step(plan, setting)
    alone = simulate_step(StepPlan([plan.micro_steps[0][:1]]), setting)
    close(alone.step, whole.step)
    close(alone.ideal, whole.ideal)
    close(alone.pool_imbalance, 4)
    close(alone.losses["between pools"], alone.step - alone.ideal)
    assert (alone.fill, whole.fill) == (1.0, 0.25)


# ---------------------------------------------------------------------------------------------------- each loss alone


def test_padding_alone():
    setting = base.exact_setting()
    found = step(ulysses(), setting, [[16]])
    base.only(found.losses, "padding", 16 * (2 * (THERE + BACK) + HEAD))


def test_kernels_alone():
    # 32 blocks of a token each at 5 and 7 ms, a launch each way, 2 layers.
    cost = dataclasses.replace(base.EXACT, block_seconds=5e-3, backward_block_seconds=7e-3, launch_seconds=0.25)
    found = step(ulysses(), base.exact_setting(cost=cost), [[32]])
    base.only(found.losses, "kernels", 2 * (32 * 12e-3 + 0.25))


def test_between_pools_alone():
    found = step(ulysses(), base.exact_setting(dp=2), [[32], [1] * 32])
    base.only(found.losses, "between pools", 2 * (528 - 280) * 3e-3)


def test_within_pools_alone():
    # Each rank computes what it holds: 136 pairs and 392.
    policy = Pools(at_home, waves=1, room=ROOMY)
    found = step(policy, base.exact_setting(cp=2), [[32]])
    base.only(found.losses, "within pools", 2 * (392 - 264) * 3e-3)
    close(found.rank_imbalance, 392 / 264)


def test_exposed_exchange_alone():
    setting = base.exact_setting(cp=2, wires=base.WIRES, gather_free=True)
    found = step(Sharded("sequence"), setting, [[32]])
    base.only(found.losses, "exposed exchange", 2 * 3 * 0.11)


def test_gathers_alone():
    setting = base.exact_setting(dp=2)
    table = base.setting_of().table
    found = step(ulysses(), dataclasses.replace(setting, table=table), [[32]] * 2)
    # 528 pairs and 32 tokens' products hide 560 ms forward, all of the 141.25; backward 1145.6, all of 413.75.
    base.only(found.losses, "gathers", 0)
    slow = base.setting_of(gather_overlap=0.0).table
    found = step(ulysses(), dataclasses.replace(setting, table=slow), [[32]] * 2)
    base.only(found.losses, "gathers", 2 * (2 * 0.14125 + 0.2725))
    # Replicated weights: gradients are summed once, after the last micro-step, and weights gathered once.
    once = dataclasses.replace(setting, table=slow, sync="step")
    base.only(step(ulysses(), once, [[32]] * 2).losses, "gathers", 2 * (0.14125 + 0.2725))


def test_bubble_alone():
    # Two stages of a layer, one micro-batch: forward, the last stage's forward and backward, the first one's again.
    setting = base.exact_setting(pp=2)
    found = step(ulysses(), setting, [[32]])
    forward, backward = 32 * THERE + 528e-3, 32 * BACK + 2 * 528e-3
    end = forward + (forward + backward + 32 * HEAD) + (forward + backward)
    close(found.step, end)
    base.only(found.losses, "bubble", end / 2)


# ----------------------------------------------------------------------------------------- whatever the numbers are

KEEPING = (
    *("ulysses", "ulysses-sorted", "context-parallel", "zigzag", "per-document", "magi", "dynamic-cp", "distca-ranks"),
    *("libra:1", "libra:2", "libra-all:4", "libra-paper:2"),
)
REST = ("wlb-batch-shuffled", "wlb-micro-shuffled", "wlb-batch-sorted", "wlb-batch-delay-shuffled")


@pytest.fixture(scope="module", params=range(6))
def case(request):
    """(setting, sequences) of a small run, and all policies' results."""
    rng = np.random.default_rng(request.param)
    wires = {**base.WIRES, "inside": 1e5, "across": 2e4, "ranks_per_node": int(rng.choice([2, 4, 8]))}
    setting = base.setting_of(seq_len=64, dp=4, cp=2, micro_steps=2, wires=wires)
    sequences = base.random_step(setting, rng)
    return setting, sequences, {name: step(names.policy(name), setting, sequences) for name in (*KEEPING, *REST)}


def test_losses_are_none_below_nothing_and_add_up(case):
    setting, _, found = case
    for name, result in found.items():
        close(sum(result.losses.values()), result.step - result.ideal)
        assert min(result.losses.values()) >= -1e-9 * result.step, name
        assert tuple(result.losses) == LOSSES
        numbers = result.numbers(setting.gpus, setting.table["peak"].value)
        assert all(np.isfinite(value) for value in numbers.values()), name
        assert 0 < numbers["mfu"] <= 1
        assert min(result.pool_imbalance, result.rank_imbalance, result.micro_step_imbalance) >= 1 - 1e-9
        assert result.across_bytes <= result.busiest_bytes * (1 + 1e-9)


def test_the_ideal_is_the_same_for_all_that_keep_the_documents(case):
    _, sequences, found = case
    for name in KEEPING:
        close(found[name].ideal, found["ulysses"].ideal)
        assert found[name].flops == found["ulysses"].flops
        assert found[name].tokens == sum(map(sum, sequences))


def test_everything_twice_as_fast_takes_half_as_long(case):
    setting, sequences, found = case
    seconds = [field.name for field in dataclasses.fields(CostModel) if field.name.endswith("_seconds")]
    cost = dataclasses.replace(setting.cost, **{name: getattr(setting.cost, name) / 2 for name in seconds})
    rates = {name: 2 * setting.table[name].value for name in ("inside", "across", "products")}
    late = {name: setting.table[name].value / 2 for name in ("inside_latency", "across_latency")}
    node = setting.network.links.ranks_per_node
    fast = base.setting_of(64, 4, 2, 2, cost=cost, wires={**rates, **late, "ranks_per_node": node})
    fast = dataclasses.replace(fast, run=dataclasses.replace(fast.run, token_seconds=setting.run.token_seconds / 2))
    for name in ("ulysses", "zigzag", "magi", "dynamic-cp", "distca-ranks", "libra:2", "wlb-batch-shuffled"):
        half = step(names.policy(name), fast, sequences)
        close(half.step, found[name].step / 2)
        close(half.ideal, found[name].ideal / 2)
        close(list(half.losses.values()), [each / 2 for each in found[name].losses.values()])


def test_without_wires_no_exchange_shows(case):
    """Libra's waves wait for each other all the same: a rank that is behind in one wave holds up the next exchange."""
    _, sequences, _ = case
    free = base.setting_of(64, 4, 2, 2, wires=base.FREE_WIRES)
    for name in ("ulysses", "zigzag", "per-document", "magi", "dynamic-cp", "distca-ranks", "wlb-micro-shuffled"):
        result = step(names.policy(name), free, sequences)
        assert result.losses["exposed exchange"] == pytest.approx(0, abs=1e-9 * result.step)
        assert result.losses["gathers"] == 0
    one_wave = dataclasses.replace(names.policy("libra:2"), waves=1)
    assert step(one_wave, free, sequences).losses["exposed exchange"] == pytest.approx(0, abs=1e-9)


def test_waiting_once_a_step_is_never_slower(case):
    setting, sequences, found = case
    once = dataclasses.replace(setting, sync="step")
    for name in (*KEEPING, *REST):
        if name == "dynamic-cp":
            continue
        result = step(names.policy(name), once, sequences)
        assert result.step <= found[name].step * (1 + 1e-9), name
        close(sum(result.losses.values()), result.step - result.ideal)
        assert min(result.losses.values()) >= -1e-9 * result.step
        close(result.ideal, found[name].ideal)


def test_like_sequences_lose_nothing_between_pools():
    setting = base.setting_of(64, 4, 2, 2)
    for name in ("ulysses", "ulysses-sorted", "zigzag", "per-document", "magi", "libra:1", "libra:2"):
        result = step(names.policy(name), setting, [[40, 20, 4]] * 8)
        assert result.losses["between pools"] == pytest.approx(0, abs=1e-9), name
        assert result.pool_imbalance == pytest.approx(1)
        assert result.heaviest == 1


@pytest.mark.parametrize("seed", range(12))
def test_losses_add_up_for_any_shape(seed):
    """Odd numbers of ranks, nodes that divide nothing, stages, waiting once a step, strides, pods, a sequence that is
    all padding."""
    rng = np.random.default_rng(seed)

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    cp, dp, block, group = int(rng.integers(1, 6)), one_of(1, 2, 3, 4, 6), one_of(1, 4, 8), one_of(1, 2)
    kv_heads = one_of(1, 2)
    setting = base.setting_of(
        cp * block * int(rng.integers(1, 6)),
        dp,
        cp,
        int(rng.integers(1, 4)),
        cost=dataclasses.replace(base.COST, block=block, group=group),
        model=dataclasses.replace(base.MODEL, num_heads=group * kv_heads, num_kv_heads=kv_heads),
        wires={**base.WIRES, "across": 10 ** rng.uniform(2, 7), "ranks_per_node": int(rng.integers(1, 9))},
        pp=one_of(1, 2),
        sync=one_of("layer", "step"),
        strided=one_of(False, True),
        oversubscription=one_of(1, 3),
        pod_nodes=int(rng.integers(1, 4)),
    )
    sequences = base.random_step(setting, rng)
    sequences[0] = one_of(sequences[0], [1])
    sequences[-1] = one_of(sequences[-1], []) if len(sequences) > 1 else sequences[-1]
    ideal = None
    for name in (*names.POLICIES, *(f"{each}:{size}" for each in names.SIZED for size in (1, 2, 3) if dp % size == 0)):
        if name == "distca" or (name == "dynamic-cp" and (setting.pp > 1 or setting.sync == "step")):
            continue  # a node's 8 ranks as a server do not divide these; its groups differ between micro-steps
        result = outcome(name, names.policy(name), [sequences], setting).steps[0]
        assert all(np.isfinite(value) for value in result.numbers(setting.gpus, 1e7).values()), name
        close(sum(result.losses.values()), result.step - result.ideal)
        assert min(result.losses.values()) >= -1e-9 * result.step, name
        assert result.across_bytes <= result.busiest_bytes * (1 + 1e-9), name
        assert min(result.pool_imbalance, result.rank_imbalance, result.micro_step_imbalance) >= 1 - 1e-9, name
        if names.known(name).keeps:
            ideal = ideal or result.ideal
            close(result.ideal, ideal)


def test_one_stage_takes_the_sum_of_its_passes(case):
    setting, sequences, _ = case
    plan = names.policy("magi").step(sequences, setting.run)
    free = dataclasses.replace(setting, table=base.setting_of(wires=base.FREE_WIRES).table)
    total = 0.0
    for groups in plan.micro_steps:
        passes = [group_seconds(group, setting.cost, setting.network).attention for group in groups]
        total += 2 * (max(p[0] for p in passes) + max(p[1] for p in passes) + 32 * (THERE + BACK)) + 32 * HEAD
    close(simulate_step(plan, free).step, total)


def test_groups_with_other_ranks_in_each_micro_step_cannot_be_followed():
    setting = base.setting_of(64, 4, 2, 2)
    sequences = [[64], [64], *[[1] * 64] * 6]
    plan = DynamicCP().step(sequences, setting.run)
    assert len({tuple(group.ranks for group in groups) for groups in plan.micro_steps}) > 1
    simulate_step(plan, setting)
    with pytest.raises(ValueError, match=r'sync="step" .* must have the same groups, but there are 4 groups of 1 rank'):
        simulate_step(plan, dataclasses.replace(setting, sync="step"))
    with pytest.raises(ValueError, match=r"pp \(2\) above 1 .* must have the same groups"):
        simulate_step(plan, dataclasses.replace(setting, pp=2))


def test_a_step_without_documents():
    setting = base.setting_of(64, 4, 2, 2)
    nothing = [[] for _ in range(8)]
    plan = DynamicCP().step(nothing, setting.run)
    assert plan.micro_steps == []
    with pytest.raises(ValueError, match="a step needs at least one micro-step with a group of ranks"):
        simulate_step(plan, setting)
    for name in ("ulysses", "zigzag", "magi", "libra:2", "wlb-batch-delay-shuffled"):
        result = step(names.policy(name), setting, nothing)
        numbers = result.numbers(setting.gpus, 1e7)
        assert all(np.isfinite(value) for value in numbers.values()), name
        assert (result.tokens, result.fill, numbers["mfu"]) == (0, 0, 0)


def test_more_ranks_than_there_are():
    setting = base.setting_of(64, 2, 2)
    plan = ulysses().step([[64]] * 2, setting.run)
    with pytest.raises(ValueError, match=r"groups have 8 ranks, more than dp \* cp \(4\)"):
        simulate_step(StepPlan([plan.micro_steps[0] * 2]), setting)


def test_a_setting_whose_model_does_not_fit():
    setting = base.setting_of()
    with pytest.raises(ValueError, match=r"pp \(3\) must divide the model's layers \(2\)"):
        dataclasses.replace(setting, pp=3)
    with pytest.raises(ValueError, match=r"the run's heads \(1, 1\) x 8 are not the model's \(2, 1\) x 8"):
        dataclasses.replace(setting, model=dataclasses.replace(setting.model, num_heads=2))


# --------------------------------------------------------------------------------------------------------- pipelines


def last_event(forward, backward):
    """Seconds until all is done, by an event queue. forward, backward: [stage][micro-batch] seconds.

    A stage's tick t: micro-batch t - s forward, then t - 2 (S - 1) + s back. It begins when the stage and both
    neighbours are through with tick t - 1.
    """
    stages, number = len(forward), len(forward[0])
    ticks = number + 2 * (stages - 1)

    def takes(s, t):
        there, back = t - s, t - 2 * (stages - 1) + s
        return (forward[s][there] if 0 <= there < number else 0) + (backward[s][back] if 0 <= back < number else 0)

    through = [0] * stages  # ticks
    busy = [True] * stages
    queue = [(takes(s, 0), s) for s in range(stages)]
    heapq.heapify(queue)
    now = 0.0
    while queue:
        now, done = heapq.heappop(queue)
        through[done] += 1
        busy[done] = False
        for s in (done - 1, done, done + 1):
            near = [n for n in (s - 1, s, s + 1) if 0 <= n < stages]
            if s in near and not busy[s] and through[s] < ticks and through[s] == min(through[n] for n in near):
                busy[s] = True
                heapq.heappush(queue, (now + takes(s, through[s]), s))
    assert through == [ticks] * stages
    return now


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("sync", ["layer", "step"])
def test_a_pipelines_end_is_the_last_event(pp, sync):
    model = dataclasses.replace(base.MODEL, num_layers=8)
    rng = np.random.default_rng(pp)
    setting = base.setting_of(64, 3, 2, 5, model=model, pp=pp, sync=sync, gather_free=True)
    sequences = base.random_step(setting, rng)
    plan = Sharded("sequence").step(sequences, setting.run)
    layers, ends = 8 // pp, []
    passes = np.array([
        [group_seconds(group, setting.cost, setting.network).attention for group in groups]
        for groups in plan.micro_steps
    ])  # fmt: skip
    if sync == "layer":
        passes = passes.max(axis=1, keepdims=True)
    for group in range(passes.shape[1]):
        there = [layers * (float(p) + 32 * THERE) for p in passes[:, group, 0]]
        again = [layers * (float(p) + 32 * BACK) for p in passes[:, group, 1]]
        forward = [there] * (pp - 1) + [[0.0] * 5]
        back = [[a + b for a, b in zip(there, again, strict=True)]] * pp
        back = [*back[:-1], [each + 32 * HEAD for each in back[-1]]]
        ends.append(last_event(forward, back))
    close(simulate_step(plan, setting).step, max(ends))


def test_more_micro_steps_make_the_bubble_smaller():
    shares = []
    for micro_steps in (1, 4, 16):
        setting = base.exact_setting(micro_steps=micro_steps, pp=2)
        result = step(ulysses(), setting, [[32]] * micro_steps)
        shares.append(result.losses["bubble"] / result.step)
    assert shares[0] > shares[1] > shares[2] > 0


# ------------------------------------------------------------------------------------------------------------ memory

REPORTS = Path(__file__).parents[1] / "benchmarks" / "reports"


@pytest.mark.parametrize(
    ("report", "model", "dp", "cp", "seq_len", "micro_steps", "waves", "pp", "ratio"),
    [
        ("qwen3_8b_256k", QWEN3_8B, 8, 8, 2**18, 1, 6, 1, 1.04),
        ("qwen3_8b_1m", QWEN3_8B, 8, 16, 2**20, 1, 6, 1, 1.04),
        ("qwen3_30b_a3b_256k", QWEN3_30B_A3B, 8, 8, 2**18, 2, 6, 1, 1.04),
        ("qwen3_235b_a22b_256k", QWEN3_235B_A22B, 16, 16, 2**18, 1, 6, 1, 0.96),
        # Two ranks share a sequence here and the heads there: as much for each but for the attention's room.
        ("qwen3_8b_32k_tp2_pp2", QWEN3_8B, 8, 2, 2**15, 4, 4, 2, 0.92),
    ],
)
def test_memory_is_what_preflight_finds(report, model, dp, cp, seq_len, micro_steps, waves, pp, ratio):
    """ratio: as measured; the model is held to 35%."""
    table = constants("H100")
    run = RunShape(seq_len, dp, cp, micro_steps, model.num_heads, model.num_kv_heads, 128, links=links(table))
    spec = run.spec(8, waves=waves, relays=waves > 4)
    pool = Group(((seq_len,),) * 8, spec, "plan", spec.tokens_per_rank, executor=np.zeros(0, np.int32))
    setting = Setting(model, run, table, run.cost, Network(run.links), pp)
    wanted = json.loads((REPORTS / f"preflight_{report}.json").read_text())["peak_bytes"] / 2**30
    got = memory_gib(StepPlan([[pool] * (dp // 8)] * micro_steps), setting)
    assert got == pytest.approx(wanted, rel=0.35)
    assert got / wanted == pytest.approx(ratio, abs=0.02)


def test_stages_keep_inputs_of_several_micro_batches_and_layers_of_one():
    """8 micro-batches, 4 stages: the first stage keeps 7 inputs of 2 * 8 B a token, and what 2 of 8 layers keep of one:
    an input, an output, queries' log-sum-exp and sum, 16 + 16 + 4 B."""
    model = dataclasses.replace(base.MODEL, num_layers=8)
    found = {}
    for pp in (1, 4):
        setting = base.setting_of(2**16, cp=1, micro_steps=8, model=model, pp=pp, recompute=1, sync="step")
        found[pp] = memory_gib(ulysses().step([[2**16]] * 8, setting.run), setting) * 2**30
    states = model.num_parameters * 16
    close(found[1] - found[4], states * 3 / 4 + 2**16 * ((8 - 2) * 36 - 7 * 16))


def test_ulysses_needs_no_room_for_other_plans():
    """It has the bytes of a spec with as little room as there can be, and its plans fit into that."""
    setting = base.setting_of(2**12, 2, 4, cost=CostModel(), model=dataclasses.replace(base.MODEL, num_kv_heads=1))
    plan = ulysses().step([[2**12], [100] * 40], setting.run)
    wide = dataclasses.replace(ulysses(), room=ROOMY).step([[2**12], [100] * 40], setting.run)
    assert memory_gib(plan, setting) < memory_gib(wide, setting)
    for group in plan.micro_steps[0]:
        assert group.executor is not None
        assert travel(group.executor, *pages_of(group.sequences, group.spec), group.spec).lack is None
    assert simulate_step(plan, setting).step == simulate_step(wide, setting).step


def test_memory_is_that_of_the_fullest_rank():
    """An all-gather's room is the longest sequence's, whichever group has it."""
    setting = base.setting_of(64, 2, 2)
    longest = [memory_gib(Sharded("sequence").step(each, setting.run), setting) for each in ([[64], [1]], [[1], [64]])]
    assert longest[0] == longest[1]


# ------------------------------------------------------------------------------------------------------- many steps


def test_percentiles_and_means_are_over_steps():
    assert spread([3.0] * 5) == (3.0, 3.0, 3.0)
    assert spread(list(range(21))) == (10.0, 1.0, 19.0)


def test_rates_of_a_run_are_of_its_totals():
    """A long step and a short one: efficiency and losses are shares of all seconds, not means of shares."""
    setting = base.exact_setting(dp=2)
    first, second = [[32], [1] * 32], [[1] * 32, [1] * 32]
    found = outcome("ulysses", ulysses(), [first, second], setting)
    long, short = found.steps
    assert long.step > 2 * short.step
    close(found.efficiency, (long.ideal + short.ideal) / (long.step + short.step))
    close(found.seconds_per_token, (long.step + short.step) / 128)
    close(sum(found.losses.values()) + found.efficiency, 1)
    close(found.losses["between pools"], long.losses["between pools"] / (long.step + short.step))
    numbers = found.numbers(setting)
    close(numbers["tokens per gpu second"][0], 128 / (long.step + short.step) / 2)
    close(numbers["mfu"][0], (long.flops + short.flops) / (long.step + short.step) / 2e7)
    close(numbers["efficiency"][0], found.efficiency)
    close(numbers["lost to between pools"][0], found.losses["between pools"])
    rates = sorted(64 / each.step / 2 for each in found.steps)  # percentiles are of steps
    close(numbers["tokens per gpu second"][1:], np.quantile(rates, [0.05, 0.95]))
    mean = numbers["step"][0]
    close(mean, (long.step + short.step) / 2)
    assert isinstance(found, Outcome) and found.documents == 33 + 64 and not any(found.changed)
