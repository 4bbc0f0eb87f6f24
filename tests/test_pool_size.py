"""Which pool size a step takes: what it is for, what it may not depend on, and what is refused."""

import dataclasses
import pickle

import numpy as np
import pytest
from data_base import batches_of, dealt, small_spec, take
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.data import PoolSampler, PoolSizes
from libra_jax.data import pool_size as module
from libra_jax.data.batches import BatchIterator
from libra_jax.data.pool_size import plan_step, step_seconds
from libra_jax.links import Links
from libra_jax.modelled import plan_seconds
from libra_jax.plan import check_batch, plan_pool
from libra_jax.spec import PoolSpec
from libra_jax.train.config import MeshConfig
from libra_jax.workload import CostModel

# Long enough for work to count more than latency: a whole sequence takes 6 ms on one GPU, an exchange 10 us.
LONG = PoolSpec(seq_len=32768, pool_size=2, cp=2, num_heads=8, num_kv_heads=2, head_dim=128)

# Prices at which work counts in small shapes, too.
PAGES_ALONE = CostModel(launch_seconds=0.0, backward_launch_seconds=0.0)
FAST = Links(inside=1e15, inside_latency=0.0)


def sized(spec, *sizes):
    return tuple(dataclasses.replace(spec, pool_size=size) for size in sizes)


def pages(lengths):
    """Causal pages of documents that begin and end with blocks of 128."""
    return sum(n // 128 * (n // 128 + 1) // 2 for n in lengths)


def test_a_sequence_that_outweighs_its_pool_gets_a_larger_one_and_even_work_the_smallest():
    """Eight sequences: one document of 32K beside documents of 128 tokens, then eight alike."""
    uneven, even = [[32768]] + [[128] * 256] * 7, [[4096] * 8] * 8
    choose = PoolSizes(sized(LONG, 4, 8), links=dataclasses.replace(FAST, ranks_per_node=16))
    found = plan_step(PoolSampler(uneven, LONG, pools=4), 0, choose)
    assert found.spec.pool_size == 8 and found.slots.shape == (1, 1, 8)
    # The long document's pool has 4, 8 or 16 ranks, which share its pages; a light sequence has 256.
    for size in (4, 8):
        ideal = (pages([32768]) + (size - 1) * 256) / (pages([32768]) + 256) * 2 / size
        assert ideal < found.modelled_seconds[size] / found.modelled_seconds[2] < 1.3 * ideal
    # Over real wires a pool of 8 lies in two nodes, and what crosses takes longer than the work that it spares.
    found = plan_step(PoolSampler(uneven, LONG, pools=4), 0, PoolSizes(sized(LONG, 4, 8)))
    assert found.spec.pool_size == 4 and found.modelled_seconds[8] > found.modelled_seconds[2]

    seen = []

    def planner(lengths, spec):
        seen.append(spec.pool_size)
        return plan_pool(lengths, spec)

    found = plan_step(PoolSampler(even, LONG, pools=4), 0, choose, planner)
    assert found.spec.pool_size == 2 and found.modelled_seconds.keys() == {2}
    assert seen == [2] * 4, "what cannot win is not planned"


def test_the_larger_pool_has_to_save_more_than_the_stated_share():
    uneven = [[32768]] + [[128] * 256] * 3
    sampler = PoolSampler(uneven, LONG, pools=2)
    times = plan_step(sampler, 0, PoolSizes(sized(LONG, 4))).modelled_seconds
    saving = 1 - times[4] / times[2]
    assert 0.3 < saving < 0.55
    for share, size in ((saving - 1e-6, 4), (saving + 1e-6, 2)):
        assert plan_step(sampler, 0, PoolSizes(sized(LONG, 4), share)).spec.pool_size == size


documents = st.lists(st.lists(st.integers(1, 16), max_size=4), min_size=8, max_size=20)


@settings(deadline=None, max_examples=15)
@given(documents, st.integers(1, 2), st.sampled_from(["all", "pools"]), st.sampled_from([0.0, 0.05, 0.3]))
def test_no_larger_size_saves_enough_by_balance_and_by_modelled_time(lengths, micro_steps, across, share):
    """Against every size planned in full. All of them hold the same sequences."""
    spec = small_spec(seq_len=64, pool_size=2, cp=1, block=4)
    sizes = PoolSizes(sized(spec, 1, 4), share, FAST)
    sampler = PoolSampler(lengths, spec, pools=2, micro_steps=micro_steps, across=across, cost=PAGES_ALONE)
    for step in range(sampler.steps_per_epoch):
        found = plan_step(sampler, step, sizes)
        times, balanced = {}, {}
        for other in sized(spec, 1, 2, 4):
            slots = sampler.slots(step, other.pool_size)
            assert slots.shape == (micro_steps, 4 // other.pool_size, other.pool_size)
            assert sorted(slots.ravel()) == sorted(sampler.step_sequences(step))
            work, slowest = sampler.work(slots).sum(axis=2) / other.ranks, []
            for m, side_by_side in enumerate(slots):
                documents = [[sampler.document_lengths(n) for n in pool] for pool in side_by_side]
                plans = [plan_pool(pool, other, cost=PAGES_ALONE, links=FAST) for pool in documents]
                seconds = [plan_seconds(plan, PAGES_ALONE, FAST).total for plan in plans]
                assert all(a >= b * (1 - 1e-12) for a, b in zip(seconds, work[m], strict=True))
                slowest.append(max(seconds))
            times[other.pool_size], balanced[other.pool_size] = sum(slowest), work.max(axis=1).sum()
        chosen = found.spec.pool_size
        assert found.modelled_seconds == {size: times[size] for size in found.modelled_seconds}
        assert chosen in found.modelled_seconds and 1 in found.modelled_seconds
        assert chosen == 1 or times[chosen] < times[1] * (1 - share)
        for size in (size for size in times if size > chosen):
            by_balance = balanced[size] < balanced[chosen] * (1 - share) * (1 - 1e-9)
            assert not by_balance or times[size] >= times[chosen] * (1 - share)
        np.testing.assert_array_equal(found.slots, sampler.slots(step, chosen))


def test_a_step_lasts_as_long_as_the_slowest_pool_of_each_micro_step():
    assert step_seconds([[1.0, 4.0], [2.0, 0.5]]) == 6.0


def test_batches_of_several_sizes_belong_together_and_a_position_finds_the_same_choice():
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(300) < 0.03, 512, rng.integers(1, 128, 300))
    spec = dataclasses.replace(small_spec(seq_len=512), capacity=16.0)
    options = {"pools": 2, "micro_steps": 2, "cost": PAGES_ALONE}
    sizes = PoolSizes(sized(spec, 4, 1), 0.1, FAST)

    def opened():
        return BatchIterator(batches_of(lengths, spec, sizes, dealt, **options))

    first = opened()
    whole = take(first, 6)
    state = first.get_state()
    assert set(state) == {"next_step", "data"}, "the choice follows from the step, nothing of it is saved"
    first.close()
    assert len({batch["pool_size"] for batch in whole}) > 1, [batch["modelled_seconds"] for batch in whole]
    plain = batches_of(lengths, spec, **options)
    for step, batch in enumerate(whole):
        size = batch["pool_size"]
        assert batch["pools"] * size == 4 and batch["sequence_ids"].shape == (2, batch["pools"], size)
        assert batch["plans"].spec == dataclasses.replace(spec, pool_size=size)
        assert batch["plans"].first_visible.shape == (2, batch["pools"], size, 2, 256)
        for m in range(2):
            check_batch(batch["plans"].map(lambda table, m=m: table[m]), batch["segment_ids"][m])
        assert len(batch["stats"]) == 2 * batch["pools"] and batch["planning_seconds"] > 0
        # The same tokens as without a choice, in other slots.
        rows = [np.sort(b["tokens"].reshape(8, 512), axis=0) for b in (batch, plain[step])]
        np.testing.assert_array_equal(*rows)
    assert plain[0]["pool_size"] == 2 and plain[0]["modelled_seconds"] == {}

    second = opened()
    second.set_state(state | {"next_step": 3})
    for before, after in zip(whole[3:], take(second, 3), strict=True):
        assert before["modelled_seconds"] == after["modelled_seconds"]
        np.testing.assert_array_equal(before["sequence_ids"], after["sequence_ids"])
    second.close()


def test_one_size_models_nothing_and_plans_at_the_prices_it_was_given(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "plan_seconds", None)
    monkeypatch.setattr(module, "plan_pool", lambda *_, **prices: seen.append(prices))
    sampler = PoolSampler([[8]] * 2, small_spec(), cost=PAGES_ALONE)
    assert plan_step(sampler, 0, PoolSizes(links=FAST)).modelled_seconds == {}
    assert seen == [{"tolerance": 0.003, "cost": PAGES_ALONE, "links": FAST}]


def test_sizes_can_be_sent_to_another_process():
    sampler, sizes = PoolSampler([[32]] * 8, small_spec(), pools=2), PoolSizes(sized(small_spec(), 4), 0.1, Links(4))
    there = plan_step(*pickle.loads(pickle.dumps((sampler, 0, sizes))))
    here = plan_step(sampler, 0, sizes)
    assert there.modelled_seconds == here.modelled_seconds and there.spec == here.spec


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (sized(small_spec(), 3), r"pool_size \(3\) must divide .* pools \* pool_size \(2 \* 2 = 4\)"),
        (sized(small_spec(), 2), r"pool sizes \[2, 2\] must be named once"),
        (sized(small_spec(cp=4), 4), r"pools of 2 and 4 .* differ: cp 2 there and 4 here"),
    ],
)
def test_sizes_that_do_not_fit_the_steps_are_refused_with_both_numbers(specs, message):
    with pytest.raises(ValueError, match=message):
        batches_of([8] * 8, small_spec(), pools=2, sizes=PoolSizes(specs))


def test_a_share_that_is_none_is_refused():
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"least_saving \({share}\) must be at least 0 and below 1"):
            PoolSizes(least_saving=share)
    with pytest.raises(ValueError, match=r"pool_size \(3\) must divide .*\(1 \* 2 = 2\)"):
        PoolSampler([[8]], small_spec()).slots(0, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pool_sizes": (3,)}, r"mesh.pool_sizes: 3 must divide pools \* pool_size \(2 \* 4 = 8\)"),
        ({"pool_sizes": (16,)}, r"mesh.pool_sizes: 16 must divide .* = 8\)"),
        ({"pool_sizes": (0,)}, r"mesh.pool_sizes: each of them \(0\) must be at least 1"),
        ({"pool_sizes": (8, 4)}, r"\(8, 4\) and pool_size \(4\) must name a size once, and 4 is there twice"),
        ({"least_saving": 1.0}, r"mesh.least_saving \(1.0\) must be at least 0 and below 1"),
    ],
)
def test_a_config_with_sizes_that_cannot_be_is_refused_with_both_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(pools=2, pool_size=4, cp=2, **fields)
