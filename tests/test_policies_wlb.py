"""WLB-LLM as a policy: Algorithm 1 by hand, and what holds for every run of steps."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.policies import sharding
from libra_jax.policies.base import RunShape, changed
from libra_jax.policies.wlb import WLB, kernel_seconds, most_tokens, pack, shard, workloads
from libra_jax.workload import sequence_seconds


def small_run(seq_len=16, dp=2, cp=1, micro_steps=1, block=1, **fields):
    return RunShape(seq_len, dp, cp, micro_steps, num_heads=4, num_kv_heads=2, head_dim=8, block=block, **fields)


def bins_of(plan):
    """Of each micro-step the documents of its bins."""
    return [[group.documents for group in groups] for groups in plan.micro_steps]


def flat(lists):
    return [each for one in lists for each in one]


# ------------------------------------------------------------------------------------------------ by hand


def test_packing_by_hand():
    # At most 10 tokens, cost l * l. 7, 6 and 4 go to empty bins, 4 to the third (16 is least), which then has 8 tokens.
    # 3 would go there too (32 is least) but does not fit; the shortest bin is the second. 2 fits the third.
    documents = [7, 6, 4, 4, 3, 2]
    assert pack(documents, np.square(documents), 3, 10) == ([[7], [6, 3], [4, 4, 2]], [])


def test_only_the_least_loaded_and_the_shortest_bin_are_tried():
    # 8, 5 and 6 fill three bins of at most 10 tokens, loads 1, 9 and 8. 5 does not fit the first, whose load is least,
    # and goes to the second, the shortest. The next 5 fits neither the first nor the third, now the shortest.
    assert pack([8, 5, 6, 5, 5], [1, 9, 8, 8, 8], 3, 10) == ([[8], [5, 5], [6]], [5])
    # 9, 4 and 7 fill three bins, loads 1, 2 and 5. 3 does not fit the first, and goes to the second, the shortest. 1
    # fits the first, whose load still is least.
    assert pack([9, 4, 7, 3, 1], [1, 2, 5, 1, 1], 3, 10) == ([[9, 1], [4, 3], [7]], [])


def test_a_document_is_costed_as_one_rank_s_share_of_attention_and_of_the_linear_layers():
    run = small_run(seq_len=64, cp=2, block=4, token_seconds=3.0)
    spec = run.spec(1)
    alone = [(sequence_seconds([length], spec, run.cost) + 3.0 * length) / 2 for length in (1, 5, 64)]
    assert workloads([1, 5, 64], run, spec).tolist() == alone
    assert workloads([], run, spec).tolist() == []


def test_the_cap_is_in_whole_blocks_on_every_rank():
    run = small_run(seq_len=320, cp=2, block=16)
    assert [most_tokens(cap, run) for cap in (1, 1.05, 1.1, 1.25, 2)] == [320, 320, 352, 384, 640]
    assert most_tokens(1.4, small_run(seq_len=1440, cp=2, block=16)) == 2016  # 1.4 * 1440 is 2015.9999999999998


def test_long_documents_wait_until_there_is_one_for_every_bin():
    # Two bins of at most 16 tokens; documents of 8 and more are long.
    run, policy = small_run(), WLB(cap=1, thresholds=(0.5,), order="sorted")
    first = policy.step([[16], [2] * 8], run)
    assert bins_of(first) == [[[2] * 4, [2] * 4]]
    assert first.waiting == policy.waiting == (16,)
    # Now there are two. 16 fills a bin; 8 and four times 2 the other one; eight of the twelve short ones are left.
    second = policy.step([[8] + [2] * 4, [2] * 8], run)
    assert bins_of(second) == [[[16], [8] + [2] * 4]]
    assert second.waiting == (2,) * 8
    # What is left comes first, before longer ones.
    third = policy.step([[3], [7]], run)
    assert bins_of(third) == [[[2] * 4 + [7], [2] * 4 + [3]]]
    assert third.waiting == ()


def test_a_queue_gives_the_oldest_once_and_each_length_has_its_queue():
    # Thresholds at 4 and 8 of 16 tokens, two bins.
    run, policy = small_run(), WLB(cap=2, thresholds=(0.25, 0.5), order="sorted")
    assert policy.step([[4, 7, 3], [9, 2]], run).waiting == (9,)  # 4 and 7 are two of one queue
    assert policy.step([[5], [10, 6]], run).waiting == ()
    assert policy.step([[5, 5, 4], [8]], run).waiting == (4, 8)  # two of three, the oldest
    # Five of the lower queue now: two go, though four could.
    assert policy.step([[6, 5], [4, 7]], run).waiting == (5, 4, 7, 8)


def test_without_delay_only_what_does_not_fit_waits_and_goes_first_next_time():
    # Two bins of at most 16 tokens. 6 and 6, then 4 to each in turn: both have 14 tokens when the last 4 comes.
    run, policy = small_run(), WLB(cap=1, delay=False, order="sorted")
    plan = policy.step([[4] * 4, [6, 6, 4]], run)
    assert (bins_of(plan), plan.waiting) == ([[[6, 4, 4], [6, 4, 4]]], (4,))
    assert changed(plan, [[4] * 4, [6, 6, 4]]) == (1, 4, 0, 0)
    plan = policy.step([[16], [12]], run)  # 4 to the first bin, so 16 to the second, and 12 to the first
    assert (bins_of(plan), plan.waiting) == ([[[16], [4, 12]]], ())
    assert changed(plan, [[16], [12]]) == (0, 0, 1, 4)


def test_micro_steps_are_packed_on_their_own_or_all_together():
    run = small_run(dp=2, micro_steps=2)
    sequences = [[8, 8], [4] * 4, [2] * 8, [1] * 16]
    own = WLB(scope="micro_step", delay=False).step(sequences, run)
    assert [sorted(flat(bins)) for bins in bins_of(own)] == [[4] * 4 + [8] * 2, [1] * 16 + [2] * 8]
    batch = WLB(delay=False, order="sorted").step(sequences, run)
    # 8 and 8 to two bins, 4s to the others until those weigh as much.
    loads = [workloads(bin_, run, run.spec(1)).sum() for bins in bins_of(batch) for bin_ in bins]
    assert loads == sorted(loads, reverse=True)
    assert max(loads) <= 1.25 * min(loads)
    assert not any(changed(own, sequences)) and not any(changed(batch, sequences))


def test_shuffled_bins_are_the_same_for_one_seed():
    run = small_run(dp=2, micro_steps=4)
    sequences = [[i, 16 - i] for i in range(1, 9)]
    plans = [bins_of(WLB(delay=False, seed=seed).step(sequences, run)) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert sorted(flat(plans[0])) == sorted(flat(plans[2]))


# ------------------------------------------------------------------------------------------------ sharding


def test_long_documents_are_sharded_one_by_one_and_short_ones_as_a_sequence():
    run = small_run(seq_len=4096, cp=4, block=128)
    spec = run.spec(1)
    ways = {
        "sequence": lambda documents: sharding.by_sequence(documents, 4),
        "document": lambda documents: sharding.by_document(documents, 4),
    }
    # 64 documents of 64 tokens: cut one by one each leaves one or two runs of 8 tokens on every rank, over the sequence
    # 16 whole documents. One of 3072 tokens and 8 of 128: over the sequence rank 3 gets chunks 3 and 4 of the long one,
    # rank 0 its first chunk and short documents.
    for documents, better in (([64] * 64, "sequence"), ([3072] + [128] * 8, "document")):
        parts = shard(documents, run, spec, "adaptive")
        seconds = {by: kernel_seconds(way(documents), run, spec) for by, way in ways.items()}
        assert seconds[better] == min(seconds.values()) < max(seconds.values())
        for by, way in ways.items():
            fixed = shard(documents, run, spec, by)
            assert all(map(np.array_equal, fixed, way(documents)))
        assert all(map(np.array_equal, parts, ways[better](documents)))


def test_kernel_seconds_by_hand():
    # One document of 8 blocks on two ranks: one has pages 1 2 and 7 8, the other 3 4 5 6; both of its two kv heads.
    run = small_run(seq_len=1024, cp=2, block=128)
    cost = run.cost.scaled(run.spec(1))
    seconds = kernel_seconds(sharding.by_sequence([1024], 2), run, run.spec(1))
    assert seconds == pytest.approx(2 * (18 * cost.page_seconds + 4 * cost.block_seconds))


# ------------------------------------------------------------------------------------------------ what always holds


@st.composite
def runs_of_steps(draw):
    """(run, policy, steps): sequences of any documents, full or not, for some steps."""
    run = small_run(
        seq_len=32 * draw(st.integers(1, 3)),
        dp=draw(st.integers(1, 3)),
        cp=draw(st.sampled_from([1, 2, 4])),
        micro_steps=draw(st.integers(1, 3)),
        block=draw(st.sampled_from([1, 4])),
        token_seconds=draw(st.sampled_from([0.0, 1e-6])),
    )
    policy = WLB(
        cap=draw(st.sampled_from([1, 1.25, 2])),
        scope=draw(st.sampled_from(["batch", "micro_step"])),
        delay=draw(st.booleans()),
        order=draw(st.sampled_from(["shuffled", "sorted"])),
        sharding=draw(st.sampled_from(["adaptive", "sequence", "document"])),
        thresholds=draw(st.sampled_from([(0.5,), (0.25, 0.5, 1.0), (0.3, 0.9)])),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return run, policy, [[any_sequence(random, run.seq_len) for _ in range(run.sequences)] for _ in range(6)]


def any_sequence(random, seq_len):
    left, sequence = int(random.integers(0, seq_len + 1)) if random.random() < 0.2 else seq_len, []
    longest = int(random.integers(1, seq_len + 1))
    while left:
        sequence.append(int(random.integers(1, min(left, longest) + 1)))
        left -= sequence[-1]
    return sequence


@given(case=runs_of_steps())
@settings(deadline=None, max_examples=60)
def test_no_document_is_lost_or_cut_and_every_bin_keeps_to_the_cap(case):
    run, policy, steps = case
    given_, trained, most = Counter(), Counter(), most_tokens(policy.cap, run)
    for sequences in steps:
        given_ += Counter(length for sequence in sequences for length in sequence)
        plan = policy.step(sequences, run)
        trained += plan.documents
        assert given_ == trained + Counter(plan.waiting)
        assert [len(groups) for groups in plan.micro_steps] == [run.dp] * run.micro_steps
        for group in (group for groups in plan.micro_steps for group in groups):
            assert (group.ranks, group.spec.seq_len, group.exchange) == (run.cp, most, "all_gather")
            assert sum(group.documents) <= most
            held = sharding.held(group.parts, run.cp)
            assert held.sum() == sum(group.documents) and held.max() == group.tokens
            dealt = np.bincount(group.parts.document, group.parts.end - group.parts.begin, len(group.documents))
            assert dealt.tolist() == group.documents


@given(case=runs_of_steps())
@settings(deadline=None, max_examples=30)
def test_what_did_not_fit_goes_first_so_nothing_waits_for_ever(case):
    run, policy, steps = case
    for sequences in steps:
        policy.step(sequences, run)
    empty = [[] for _ in range(run.sequences)]
    for _ in range(len(policy.waiting)):
        policy.step(empty, run)
    bins = run.sequences if policy.scope == "batch" else run.dp
    bounds = [threshold * run.seq_len for threshold in policy.thresholds]
    queues = Counter(np.searchsorted(bounds, length, side="right") for length in policy.waiting)
    assert queues[0] == 0 and all(count < bins for count in queues.values())


def test_bins_with_nothing_have_no_tokens():
    plan = WLB(delay=False).step([[5], []], small_run(cp=2, seq_len=16))
    empty = next(group for group in plan.micro_steps[0] if not group.documents)
    assert (empty.sequences, empty.tokens, empty.parts.rank.size) == (((),), 0, 0)


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("cap", [0.9, 0, float("nan"), float("inf")])
def test_caps_under_which_documents_would_wait_for_ever_are_refused(cap):
    with pytest.raises(ValueError, match=rf"cap \({cap}\) must be at least 1"):
        WLB(cap=cap)


@pytest.mark.parametrize("thresholds", [(0.5, 0.5), (0.5, 0.25), (0.0,), (1.5,)])
def test_thresholds_that_do_not_ascend_are_refused(thresholds):
    with pytest.raises(ValueError, match=r"thresholds .* must ascend, above 0 and at most 1"):
        WLB(thresholds=thresholds)


@pytest.mark.parametrize("name", ["scope", "order", "sharding"])
def test_choices_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} \('pack'\) must be one of "):
        WLB(**{name: "pack"})


def test_sequences_that_are_no_step_of_the_run_are_refused():
    with pytest.raises(ValueError, match=r"dp \* micro_steps sequences \(2 \* 1 = 2\), got 1"):
        WLB().step([[4]], small_run())


def test_no_cp_group_always_gets_the_longest_document():
    """Packing puts it into the first bin; where ranks meet once a step, its group would do the most in all of it."""
    run = RunShape(seq_len=1024, dp=4, cp=1, micro_steps=16, block=128)
    step = [[1024] if i % 4 == 2 else [256] * 4 for i in range(run.sequences)]
    plan = WLB(scope="micro_step", delay=False).step(step, run)
    places = {max(range(4), key=lambda g: max(groups[g].documents, default=0)) for groups in plan.micro_steps}
    assert len(places) > 1
