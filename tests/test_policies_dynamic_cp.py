"""Megatron-LM's dynamic context parallelism as a policy: rounds by hand, and what holds for every step."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra_jax.policies import sharding
from libra_jax.policies.base import RunShape, changed
from libra_jax.policies.dynamic_cp import DynamicCP, rounds, size_of


def small_run(seq_len=64, dp=2, cp=2, micro_steps=1, block=4):
    return RunShape(seq_len, dp, cp, micro_steps, num_heads=4, num_kv_heads=2, head_dim=8, block=block)


def dealt(documents, ranks, most, slack=0.05):
    """Of each round (ranks, documents) of each set."""
    return [[(each.size, each.documents) for each in sets] for sets in rounds(documents, ranks, most, slack)]


# ------------------------------------------------------------------------------------------------ by hand


def test_a_document_takes_the_smallest_power_of_two_that_holds_it():
    lengths = [1, 64, 65, 128, 129, 256, 257, 512]
    assert [size_of(length, 8, 64) for length in lengths] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert [size_of(length, 6, 64) for length in (256, 257, 384)] == [4, 6, 6]  # all of them, where 8 are not there


def test_rounds_by_hand():
    # 4 ranks of 64 tokens. Cost over ranks: 8192 4608 | 4096 2304 1024 576 256 64, half of it 10560: buckets are 128 |
    # 96 64 48 | 32 24 16 8. 128 and 96 take all ranks; nothing has a place then. In the next round all have one size:
    # four ranks get 64, 48, 32 and 24, then 16 and 8 go to the least loaded with room (576, 832).
    first, second = dealt([8, 16, 24, 32, 48, 64, 96, 128], 4, 64)
    assert first == [(2, [128]), (2, [96])]
    assert second == [(1, [64]), (1, [48]), (1, [32]), (1, [24, 16, 8])]


def test_one_document_of_each_bucket_is_asked_for_a_place():
    # 3 ranks of 64. Costs 8192 4608 4096, buckets of at most 9293: 128 | 96 64. One rank is free beside 128, but next
    # is 96; so 128 gets all three.
    assert dealt([128, 96, 64], 3, 64) == [[(3, [128])], [(2, [96]), (1, [64])]]
    # 5 ranks, three sizes: 256 | 66 | 1, the last apart because three buckets are wanted, though it costs nothing.
    assert dealt([256, 66, 1], 5, 64) == [[(4, [256]), (1, [1])], [(5, [66])]]


def test_a_set_takes_no_more_than_its_ranks_hold():
    # 60 does not fit with 60; 4 does, on the first of equal ranks.
    assert dealt([60, 60, 60, 4], 2, 64) == [[(1, [60]), (1, [60])], [(1, [60]), (1, [4])]]
    assert dealt([60, 60, 4], 2, 64) == [[(1, [60, 4]), (1, [60])]]
    assert dealt([60, 60, 5], 2, 64) == [[(1, [60]), (1, [60])], [(2, [5])]]


def test_only_sets_that_were_doubled_have_several_documents_on_several_ranks():
    # A document that needs two ranks of 32 has more than 32 of their 64 tokens, so no other one of them has room.
    assert dealt([40, 36, 33], 4, 32) == [[(2, [40]), (2, [36])], [(4, [33])]]
    # 30 has a rank to itself, 20 and 12 share the other one.
    assert dealt([30, 20, 12], 2, 32) == [[(1, [30]), (1, [20, 12])]]
    # Two ranks of 32 have 40 (800 each), two have 27 (729): alike to a half, so 2 is left, and gets all ranks.
    assert dealt([40, 27, 27, 2], 4, 32, slack=0.5) == [[(2, [40]), (1, [27]), (1, [27])], [(4, [2])]]


def test_a_round_ends_when_all_ranks_are_alike_once_a_smaller_size_came():
    # 6 on two ranks (18 each), 4 and 4 (16 each). To a fifth that is alike, and 1 and 1 wait; to a twentieth it is not.
    assert dealt([6, 4, 4, 1, 1], 4, 5, slack=0.2) == [[(2, [6]), (1, [4]), (1, [4])], [(2, [1]), (2, [1])]]
    assert dealt([6, 4, 4, 1, 1], 4, 5, slack=0.05) == [[(2, [6]), (1, [4, 1]), (1, [4, 1])]]
    # With one size only a round does not end for that: 4 4 and 1 1 are as many ranks have.
    assert dealt([4, 4, 1, 1], 2, 5, slack=0.2) == [[(1, [4, 1]), (1, [4, 1])]]


def test_ranks_with_nothing_to_do_join_the_smallest_sets():
    assert dealt([10], 8, 64) == [[(8, [10])]]
    # 1 1 1 on 8 ranks: the first of the smallest is doubled until none is left: 2 1 1, 2 2 1, 2 2 2, 4 2 2.
    assert dealt([9, 8, 7], 8, 64) == [[(4, [9]), (2, [8]), (2, [7])]]
    # 3 ranks: of 1 and 1 the first is doubled. 5 ranks: 2 and 2, and nothing to double with one.
    assert dealt([9, 8], 3, 64) == [[(2, [9]), (1, [8])]]
    assert dealt([9, 8], 5, 64) == [[(2, [9]), (2, [8])]]


def test_groups_of_a_step():
    run = small_run(seq_len=128)  # 64 tokens a rank
    plan = DynamicCP().step([[128], [96, 20, 8, 4]], run)
    sizes = [[(group.ranks, group.documents, group.tokens) for group in groups] for groups in plan.micro_steps]
    assert sizes == [[(2, [128], 64), (2, [96], 48)], [(2, [20], 10), (1, [8], 8), (1, [4], 4)]]
    for group in (group for groups in plan.micro_steps for group in groups):
        assert (group.exchange, group.spec.cp, group.spec.seq_len) == ("ring", group.ranks, 64 * group.ranks)
        assert group.sequences == (tuple(group.documents),)
    # Each document is a zigzag of its own.
    pairs = sharding.pairs(plan.micro_steps[0][0].parts, 2)
    assert pairs.tolist() == [128 * 129 // 4] * 2


def test_scope_says_whose_documents_share_rounds():
    run = small_run(micro_steps=2)
    sequences = [[64], [], [32, 32], [64]]
    batch, own = (DynamicCP(scope=scope).step(sequences, run) for scope in ("batch", "micro_step"))
    assert [sorted(group.documents for group in groups) for groups in own.micro_steps] == [[[64]], [[32], [32], [64]]]
    assert [sorted(group.documents for group in groups) for groups in batch.micro_steps] == [[[64], [64]], [[32], [32]]]


def test_a_step_without_documents_has_no_round():
    assert DynamicCP().step([[], []], small_run()).micro_steps == []


# ------------------------------------------------------------------------------------------------ what always holds


@given(
    documents=st.lists(st.integers(1, 256), max_size=40),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    most=st.sampled_from([16, 64, 256]),
    slack=st.sampled_from([0.0, 0.05, 0.5]),
)
@settings(deadline=None, max_examples=150)
@example(documents=[256] * 3 + [1] * 20, ranks=16, most=16, slack=0.05)
def test_every_document_is_in_one_set_of_one_round_and_ranks_are_used_once(documents, ranks, most, slack):
    documents = [length for length in documents if length <= most * ranks]
    every = rounds(documents, ranks, most, slack)
    assert Counter(length for sets in every for each in sets for length in each.documents) == Counter(documents)
    for sets in every:
        assert sum(each.size for each in sets) <= ranks
        for each in sets:
            assert each.documents and each.tokens == sum(each.documents) <= each.size * most
            assert each.size == ranks or each.size & (each.size - 1) == 0
            assert all(size_of(length, ranks, most) <= each.size for length in each.documents)
            assert each.load == pytest.approx(sum(length**2 for length in each.documents) / each.size)
        if ranks & (ranks - 1) == 0:
            assert sum(each.size for each in sets) == ranks


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_a_step_keeps_its_documents_and_every_token_is_on_one_rank(data, seed):
    run = small_run(
        seq_len=96,
        dp=data.draw(st.integers(1, 4)),
        cp=data.draw(st.sampled_from([1, 2, 3, 4])),
        micro_steps=data.draw(st.integers(1, 3)),
        block=data.draw(st.sampled_from([1, 4])),
    )
    random, sequences = np.random.default_rng(seed), []
    for _ in range(run.sequences):
        cuts = np.sort(random.integers(0, 97, random.integers(0, 6)))
        sequences.append([int(length) for length in np.diff(cuts) if length])
    policy = DynamicCP(scope=data.draw(st.sampled_from(["batch", "micro_step"])))
    plan = policy.step(sequences, run)
    assert not any(changed(plan, sequences)) and plan.waiting == ()
    for groups in plan.micro_steps:
        assert sum(group.ranks for group in groups) <= run.ranks
        for group in groups:
            held = sharding.held(group.parts, group.ranks)
            assert held.max() == group.tokens and held.sum() == sum(group.documents) <= group.spec.seq_len
            dealt = np.bincount(group.parts.document, group.parts.end - group.parts.begin)
            assert dealt.tolist() == group.documents


# ------------------------------------------------------------------------------------------------ refused


def test_ranks_that_cannot_hold_a_sequence_are_refused():
    with pytest.raises(ValueError, match=r"max_tokens \(8\) on all ranks \(4\) must hold .* seq_len \(64\)"):
        DynamicCP(max_tokens=8).step([[64], []], small_run())


def test_a_scope_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"scope \('step'\) must be batch or micro_step"):
        DynamicCP(scope="step").step([[64], []], small_run())
