"""Packing by lengths: the same as first fit, best fit and the cut stream written plainly, and as Grain's packers."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.data.bins import STRATEGIES, count_by_window, pack

KEPT_WHOLE = ("first_fit", "best_fit")


def count_sequences(lengths, capacity, strategy="first_fit", max_items=None):
    """All items as one window."""
    return int(count_by_window(lengths, [0, len(lengths)], capacity, strategy, max_items)[0])


def naive_fit(lengths, capacity, strategy, max_items=None):
    """The sequence of each item, all of them looked at for each."""
    free, held, chosen = [], [], []
    for length in lengths:
        fits = [s for s in range(len(free)) if free[s] >= length and (max_items is None or held[s] < max_items)]
        if not fits:
            free.append(capacity)
            held.append(0)
            fits = [len(free) - 1]
        sequence = fits[0]
        if strategy == "best_fit":
            sequence = min(fits, key=lambda s: (free[s], s))
        free[sequence] -= length
        held[sequence] += 1
        chosen.append(sequence)
    return chosen


def naive_stream(lengths, capacity, max_items=None):
    """(sequence, item, start, length) of each piece, dealt a token at a time."""
    pieces, sequence, used, held = [], 0, 0, 0
    for item, length in enumerate(lengths):
        for token in range(length):
            starts_piece = token == 0 or used == capacity
            if used == capacity or (starts_piece and held == max_items):
                sequence, used, held = sequence + 1, 0, 0
            if starts_piece:
                pieces.append([sequence, item, token, 0])
                held += 1
            pieces[-1][3] += 1
            used += 1
    return [tuple(piece) for piece in pieces]


def pieces_of(packed):
    columns = (packed.sequence, packed.item, packed.start, packed.length)
    assert all(column.dtype == np.int64 for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def problems(draw, longest=None):
    """Few or many to a sequence, near capacity, equal, all ones, and a number of items that binds or does not."""
    capacity = draw(st.integers(1, 60))
    top = min(capacity, draw(st.sampled_from([1, 2, 4, 10, 60])))
    some = st.one_of(st.integers(1, top), st.integers(max(1, capacity - 3), capacity))
    if longest is not None:
        some = st.one_of(some, st.integers(1, longest))
    alike = st.sampled_from(draw(st.lists(some, min_size=1, max_size=4)))
    lengths = draw(st.lists(draw(st.sampled_from([some, st.integers(1, top), alike])), max_size=80))
    return lengths, capacity, draw(st.sampled_from([None, None, 1, 2, 3, 5]))


# ------------------------------------------------------------------------------------------------------- the oracles


@pytest.mark.parametrize("strategy", KEPT_WHOLE)
@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_fits_are_those_of_the_plain_search(strategy, problem):
    lengths, capacity, max_items = problem
    chosen = naive_fit(lengths, capacity, strategy, max_items)
    whole = sorted((sequence, item, 0, lengths[item]) for item, sequence in enumerate(chosen))
    packed = pack(np.array(lengths, np.int64), capacity, strategy, max_items)
    assert pieces_of(packed) == whole
    assert packed.count == len(set(chosen)) == count_sequences(lengths, capacity, strategy, max_items)


@settings(max_examples=300, deadline=None)
@given(problem=problems(longest=300))
def test_stream_is_cut_where_a_token_at_a_time_is_cut(problem):
    lengths, capacity, max_items = problem
    expected = naive_stream(lengths, capacity, max_items)
    packed = pack(np.array(lengths, np.int64), capacity, "concat_and_split", max_items)
    assert pieces_of(packed) == expected
    count = len({sequence for sequence, *_ in expected})
    assert packed.count == count == count_sequences(lengths, capacity, "concat_and_split", max_items)


def test_one_example_by_hand():
    lengths = [5, 4, 3, 5, 2, 1]
    assert pack(lengths, 10, "first_fit").item.tolist() == [0, 1, 5, 2, 3, 4]  # 5 4 1 | 3 5 2
    assert pack([6, 4, 7, 3], 11, "best_fit").item.tolist() == [0, 1, 2, 3]  # 6 4 | 7 3: 4 are left there, 1 here
    assert pack([6, 7, 4], 11, "best_fit").sequence.tolist() == [0, 1, 1]  # first fit would take sequence 0
    assert pieces_of(pack([4, 25, 1], 10, "concat_and_split")) == [
        (0, 0, 0, 4), (0, 1, 0, 6), (1, 1, 6, 10), (2, 1, 16, 9), (2, 2, 0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_token_once_in_windows_as_large_as_real_ones(strategy):
    random = np.random.default_rng(5)
    lengths = np.minimum(random.lognormal(6.5, 2, 30_000).astype(np.int64) + 1, 262_144)
    for max_items in (None, 100):
        packed = pack(lengths, 262_144, strategy, max_items)
        assert np.array_equal(np.bincount(packed.item, packed.length), lengths)
        pieces = np.bincount(packed.sequence)
        assert packed.count == len(pieces) and pieces.min() >= 1 and pieces.max() <= (max_items or len(lengths))
        assert np.bincount(packed.sequence, packed.length).max() <= 262_144
        order = np.lexsort([packed.start, packed.item])
        joined = (np.cumsum(packed.length[order]) - packed.length[order])[np.diff(packed.item[order], prepend=-1) > 0]
        assert np.array_equal(joined, np.cumsum(lengths) - lengths)  # pieces of an item follow each other, from 0
        again = pack(lengths.astype(np.uint32), 262_144, strategy, max_items)
        assert all(np.array_equal(getattr(packed, f.name), getattr(again, f.name)) for f in dataclasses.fields(packed))


# ------------------------------------------------------------------------------------------------------- many windows


@pytest.mark.parametrize("capacity", [7, 300, 70_000, 2**32])  # rooms of 16 and of 32 bits, and one window at a time
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_windows_in_step_count_as_one_by_one(strategy, capacity):
    random = np.random.default_rng(capacity)
    for max_items in (None, 2):
        items = random.integers(0, 40, 700)
        items[[3, 500]] = 300, 0  # a giant among them, and an empty one
        bounds = np.concatenate([[11], 11 + np.cumsum(items)])
        small = random.integers(1, max(2, capacity // 8), bounds[-1] + 5)
        lengths = np.where(random.random(len(small)) < 0.2, random.integers(1, capacity + 1, len(small)), small)
        counts = count_by_window(lengths.astype(np.uint32), bounds, capacity, strategy, max_items)
        for window, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
            part = lengths[begin:end].tolist()
            if strategy in KEPT_WHOLE:
                expected = len(set(naive_fit(part, capacity, strategy, max_items)))
            elif max_items is None:
                expected = -(-sum(part) // capacity)
            else:
                expected = count_sequences(part, capacity, strategy, max_items)
            assert counts[window] == expected


def test_windows_of_very_many_sequences():
    """Every item fills a sequence: more of them than are searched whole for each item."""
    bounds = np.arange(0, 140 * 2500 + 1, 2500)
    for strategy in STRATEGIES:
        assert count_by_window(np.full(bounds[-1], 9), bounds, 9, strategy).tolist() == [2500] * 140
    assert count_by_window(np.ones(0, int), [0], 9).tolist() == []


# --------------------------------------------------------------------------------------------------------- Grain's own


class StandIns:
    def __init__(self, lengths):
        self.lengths = lengths.tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"tokens": np.broadcast_to(np.int8(0), (self.lengths[index],)), "document": index}


def grains_packer(lengths, seq_len, strategy, open_sequences, max_items=None):
    """Grain's dataset of sequences, each with the documents in it (not so for concat-and-split)."""
    import grain

    elements = grain.MapDataset.source(StandIns(lengths)).to_iter_dataset(grain.ReadOptions(num_threads=0))
    if strategy == "concat_and_split":
        tokens = elements.map(lambda element: {"tokens": element["tokens"]})
        return grain.experimental.ConcatThenSplitIterDataset(tokens, length_struct={"tokens": seq_len})
    name = {"first_fit": "FirstFitPackIterDataset", "best_fit": "BestFitPackIterDataset"}[strategy]
    return getattr(grain.experimental, name)(
        elements,
        length_struct={"tokens": seq_len},
        num_packing_bins=open_sequences,
        shuffle_bins=False,
        meta_features=("document",),
        max_sequences_per_bin=max_items,
    )


@pytest.mark.parametrize("max_items", [None, 6])
@pytest.mark.parametrize("strategy", KEPT_WHOLE)
def test_what_grain_holds_open_is_packed_as_grain_packs_it(strategy, max_items):
    """As long as all sequences are open, Grain's packers are online first and best fit, item by item."""
    lengths = np.minimum(np.random.default_rng(2).lognormal(4, 1.5, 600).astype(np.int64) + 1, 1000)
    packed = pack(lengths, 1000, strategy, max_items)
    ours = np.split(packed.item, np.flatnonzero(np.diff(packed.sequence)) + 1)
    theirs = grains_packer(lengths, 1000, strategy, 256, max_items)
    assert [sequence.tolist() for sequence in ours] == [list(map(int, element["document"])) for element in theirs]


def skewed(random, items, seq_len):
    """Few tokens to most, whole sequences to some: sixteenths of a median of 644 and a 99th percentile of 71,000."""
    return np.clip(random.lognormal(np.log(644 / 16), 2.02, items).astype(np.int64), 1, seq_len)


def middling(random, items, seq_len):
    """Seldom short: a few fill a sequence, and what they leave is too little for most."""
    return np.clip(random.normal(250, 75, items).astype(np.int64), 4, seq_len)


@pytest.mark.parametrize("corpus", [skewed, middling])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closed_windows_fill_sequences_as_well_as_grain(strategy, corpus):
    """Windows of 1,024 sequences' tokens, nothing carried to the next, against Grain with 256 sequences open.

    A window stops 1/4096 short of that: what is left free at the ends of its sequences has to go somewhere.
    """
    seq_len, window = 2048, 1024
    lengths = corpus(np.random.default_rng(7), 25_000, seq_len)
    ends = np.cumsum(lengths)
    lengths, ends = lengths[ends <= 2 * window * seq_len], ends[ends <= 2 * window * seq_len]
    bounds = [0]
    while bounds[-1] < len(lengths):
        before = ends[bounds[-1] - 1] if bounds[-1] else 0
        bounds.append(int(np.searchsorted(ends, before + window * seq_len * 4095 // 4096, side="right")))
    if strategy == "concat_and_split":  # one stream, as Grain's is: a window would leave its last sequence open
        bounds = [0, len(lengths)]
    ours = int(count_by_window(lengths, bounds, seq_len, strategy).sum())
    theirs = sum(1 for _ in grains_packer(lengths, seq_len, strategy, 256))
    assert ours <= theirs
    assert lengths.sum() / (ours * seq_len) > 0.98


# -------------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "worst_fit"}, r"strategy \('worst_fit'\) must be one of"),
        ({"capacity": 0}, r"capacity \(0 tokens\) must be at least 1"),
        ({"max_items": 0}, r"max_items \(0\) must be at least 1, or None"),
        ({"lengths": [3, 0]}, r"length 0 \(entry 1\) must be at least 1"),
        ({"lengths": [3, 9, 8]}, r"length 9 \(entry 1\) must be at most capacity \(8\): cut it first"),
        ({"lengths": [2.0]}, r"flat array of whole numbers, not float64 of shape \(1,\)"),
        ({"lengths": [[2]]}, r"flat array of whole numbers, not int64 of shape \(1, 1\)"),
        ({"lengths": [2**62, 2**62], "strategy": "concat_and_split"}, r"add up to 9223372036854775808 tokens"),
    ],
)
def test_arguments_that_break_a_rule_are_named(change, message):
    arguments = {"lengths": [3, 4], "capacity": 8} | change
    lengths, capacity = np.array(arguments.pop("lengths")), arguments.pop("capacity")
    with pytest.raises(ValueError, match=message):
        pack(lengths, capacity, **arguments)
    with pytest.raises(ValueError, match=message):
        count_by_window(lengths, [0, len(lengths)], capacity, **arguments)


def test_bounds_that_break_a_rule_are_named():
    for bounds in ([0, 4], [2, 1], [-1, 2]):
        with pytest.raises(ValueError, match=r"bounds must not fall and must lie in 0 to 3 \(items\), not"):
            count_by_window([1, 1, 1], bounds, 8)
    with pytest.raises(ValueError, match=r"whole numbers, not float64 of shape \(2,\)"):
        count_by_window([1, 1, 1], [0.0, 3.0], 8)
    with pytest.raises(ValueError, match=r"length 9 \(entry 2\)"):
        count_by_window([1, 1, 9], [1, 3], 8)


def test_no_items_are_no_sequences():
    for strategy in STRATEGIES:
        packed = pack([], 8, strategy, 2)
        assert pieces_of(packed) == [] and packed.count == 0 and count_sequences([], 8, strategy, 2) == 0
