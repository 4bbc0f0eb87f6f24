"""In which order sequences come: epochs, windows, corpora with weights; as cheap far from the start as at it."""

import collections
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from data_base import small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.data import PackedDocuments, PoolSampler
from libra_jax.data.order import EpochOrder, JoinedSequences, ListedSequences, WeightedOrder
from libra_jax.data.sampler import EMPTY


class Counts:
    """Packed sequences of which nothing but their numbers is known."""

    def __init__(self, counts):
        self.counts = np.asarray(counts, np.int64)

    def lengths(self, number):
        return np.ones(1, np.int64)


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any), st.integers(0, 3), st.integers(1, 9))
def test_an_epoch_has_every_sequence_once_window_by_window(counts, seed, stride):
    order, total = EpochOrder(np.array(counts), seed), sum(counts)
    window_of = np.repeat(np.arange(len(counts)), counts)
    for epoch in (0, 1, 7):
        whole = order.take(epoch, 0, total)
        assert sorted(whole.tolist()) == list(range(total))
        windows = window_of[whole]
        assert np.count_nonzero(np.diff(windows)) + 1 == np.count_nonzero(counts), "a window's sequences come together"
        parts = [order.take(epoch, start, start + stride) for start in range(0, total, stride)]
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert pickle.loads(pickle.dumps(order)).take(epoch, 0, total).tolist() == whole.tolist()


def test_epochs_windows_and_seeds_differ():
    order = EpochOrder(np.full(50, 8), 0)
    first, second = (order.take(epoch, 0, 400) for epoch in (0, 1))
    assert first.tolist() != second.tolist()
    assert (first[::8] // 8).tolist() != (second[::8] // 8).tolist(), "windows come in another order"
    assert len({tuple(first[i : i + 8] % 8) for i in range(0, 400, 8)}) > 40, "and so do the sequences of each"
    assert first.tolist() != EpochOrder(np.full(50, 8), 1).take(0, 0, 400).tolist()
    assert first.tolist() != EpochOrder(np.full(50, 8), 0, part=1).take(0, 0, 400).tolist()


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 50), min_size=4, max_size=4),
    st.integers(0, 200),
)
def test_corpora_have_their_shares_after_any_number_of_sequences(sizes, weights, stop):
    """No corpus is more than one sequence from its share, and each serves its own epochs in full."""
    weights = weights[: len(sizes)]
    order = WeightedOrder([Counts([size]) for size in sizes], weights, seed=3)
    numbers = order.take(0, stop)
    first = np.cumsum([0, *sizes])
    part = np.searchsorted(first, numbers, side="right") - 1
    for i, weight in enumerate(weights):
        mine = numbers[part == i] - first[i]
        assert abs(len(mine) - stop * Fraction(weight, sum(weights))) < 1 + stop / 10_000
        assert len(mine) == order.served(stop)[i]
        for epoch in range(0, len(mine), sizes[i]):
            served = mine[epoch : epoch + sizes[i]].tolist()
            assert len(set(served)) == len(served)
    assert order.take(17, 40).tolist() == order.take(0, 60)[17:40].tolist()
    covered = order.covered
    assert (order.epochs(covered) >= 1).all()
    assert (order.epochs(covered - 1) < 1).any()


@pytest.mark.parametrize(
    "weights", [[50] + [1] * 50, [0.7, 0.1, 0.1, 0.1], [1] * 30, [1, 1e-4, 0.3], [1e308, 1.7e308], [5]]
)
def test_shares_are_kept_within_one_sequence_at_every_position(weights):
    """Many corpora of one weight must not come in a block; any stretch is within two."""
    order = WeightedOrder([Counts([7])] * len(weights), weights, seed=0)
    part = order.take(0, 20_003) // 7
    had = np.cumsum(part[:, None] == np.arange(len(weights)), axis=0)
    share = order.weights / order.weights.sum()
    scaled = np.array(weights) / max(weights)
    np.testing.assert_allclose(share, scaled / scaled.sum(), atol=1e-4)
    assert np.abs(had - np.arange(1, 20_004)[:, None] * share).max() < 1
    assert order.served(20_003).tolist() == had[-1].tolist()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0], "1 weights for 2 corpora"),
        ([1.0, 0.0], "above 0"),
        ([1.0, math.nan], "above 0"),
        ([1.0, 1e-6], "the least is 1 in 10,000"),
    ],
)
def test_bad_weights_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        PoolSampler([Counts([3]), Counts([4])], small_spec(), weights=weights)


def test_a_mixture_is_dealt_by_tokens_and_never_mixes_corpora_in_a_sequence():
    """Two corpora, one of long and one of short documents, 3 to 1; the small one starts again many times."""
    rng = np.random.default_rng(0)
    long = PackedDocuments(rng.integers(30, 65, 400), 64, window_sequences=8)
    short = PackedDocuments(rng.integers(1, 9, 60), 64, window_sequences=8)
    sampler = PoolSampler([long, short], small_spec(pool_size=2), pools=2, micro_steps=2, weights=(3, 1))
    served = collections.Counter()
    for step in range(50):
        numbers = sampler.step_sequences(step)
        assert sorted(sampler[step].ravel()) == sorted(numbers)
        assert EMPTY not in numbers
        served.update(numbers.tolist())
        for number in numbers.tolist():
            limit = range(30, 65) if number < len(long) else range(1, 9)
            assert all(length in limit for length in sampler.document_lengths(number))
    of_short = [served[number] for number in range(len(long), len(long) + len(short))]
    assert sum(of_short) == 50 * 8 // 4
    assert max(of_short) - min(of_short) <= 1, "epoch after epoch"
    assert sampler.epochs(50)[1] == pytest.approx(100 / len(short))
    again = PoolSampler([long, short], small_spec(pool_size=4), pools=1, micro_steps=2, weights=(6, 2))
    assert sorted(again[17].ravel()) == sorted(sampler[17].ravel()), "the same step in pools of another size"


def test_without_weights_an_epoch_is_everything_once():
    parts = [PackedDocuments(np.full(n, 40), 64) for n in (30, 7)]
    sampler = PoolSampler(parts, small_spec(pool_size=2), pools=2)
    assert sampler.steps_per_epoch == 10
    seen = np.concatenate([sampler[step].ravel() for step in range(10)])
    assert sorted(seen[seen != EMPTY].tolist()) == list(range(37))


def test_listed_sequences_are_kept_flat():
    lengths = [[3, 4], [], [5], *[[1]] * 300_000]
    listed = ListedSequences(lengths, 64)
    assert [listed.lengths(i).tolist() for i in (0, 1, 2, 300_002)] == [[3, 4], [], [5], [1]]
    assert listed.counts.sum() == len(lengths)
    assert listed.counts.max() == 2
    joined = JoinedSequences([listed, ListedSequences([[9]], 64)])
    assert joined.find(300_003) == (1, 0)
    assert joined.lengths(300_003).tolist() == [9]


def test_steps_are_whole_numbers_of_any_size_and_type():
    parts = [Counts([1000]), Counts([70])]
    for options in ({}, {"weights": (3, 1)}):
        sampler = PoolSampler(parts, small_spec(pool_size=4), pools=2, **options)
        for step in (2**28 - 1, 2**29, 2**31 - 1):
            expected = sampler.step_sequences(step).tolist()
            assert sampler.step_sequences(np.int32(step)).tolist() == expected
            assert sampler[np.int32(step)].tolist() == sampler[step].tolist()
        assert len(sampler.step_sequences(2**50)) == 8
        for wrong in (1.0, "1", True, None):
            with pytest.raises(TypeError):
                sampler.step_sequences(wrong)
        with pytest.raises(IndexError, match=r"step \(-1\) must be 0 or more"):
            sampler.epochs(-1)


def test_a_far_step_looks_at_its_own_sequences_alone():
    """A billion sequences in 20,000 windows; benchmarks.data has the times."""
    sequences = Counts(np.full(20_000, 50_000))
    asked = []
    sequences.lengths = lambda number: asked.append(number) or np.ones(1, np.int64)
    sampler = PoolSampler(sequences, small_spec(pool_size=8), pools=8)
    assert sampler.steps_per_epoch == 15_625_000
    for step in (0, 10**6, 40 * 10**6):
        asked.clear()
        assert sorted(sampler[step].ravel().tolist()) == sorted(asked)
        assert len(set(asked)) == 64
