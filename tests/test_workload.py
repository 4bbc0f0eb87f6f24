"""Work against its definition: a dense boolean mask, counted; and the cost model against what it was derived from."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from libra_jax import workload
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, lengths_from_segment_ids

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def dense_mask(lengths, seq_len, window=None):
    """Which key each query sees, from the definition: the same document, not later, at most `window` keys."""
    document = np.zeros(seq_len, int)
    position = 0
    for number, length in enumerate(lengths, start=1):
        document[position : position + length] = number
        position += length
    query, key = np.arange(seq_len)[:, None], np.arange(seq_len)[None, :]
    mask = (document[:, None] == document[None, :]) & (document[:, None] > 0) & (key <= query)
    return mask if window is None else mask & (query - key < window)


def dense_pages(mask, block):
    """First and number of pages of each block, by looking at the mask."""
    blocks = mask.shape[0] // block
    seen = mask.reshape(blocks, block, blocks, block).any(axis=(1, 3))
    first = np.where(seen.any(axis=1), seen.argmax(axis=1), np.arange(blocks))
    return first, np.where(seen.any(axis=1), np.arange(blocks) - first + 1, 0)


@st.composite
def sequences(draw):
    """(lengths, seq_len, block, window) with documents that start and end anywhere."""
    block = draw(st.sampled_from([1, 2, 3, 4, 8]))
    seq_len = block * draw(st.integers(1, 12))
    lengths, left = [], seq_len
    while left and draw(st.integers(0, 5)):
        lengths.append(draw(st.integers(1, left)))
        left -= lengths[-1]
    return lengths, seq_len, block, draw(st.none() | st.integers(1, seq_len + 2))


@settings(deadline=None)
@given(sequences())
def test_pages_pairs_and_starts_match_a_dense_mask(case):
    lengths, seq_len, block, window = case
    mask = dense_mask(lengths, seq_len, window)
    spec = PoolSpec(seq_len=seq_len, pool_size=1, cp=1, block=block, window=window, **HEADS)
    first, number = dense_pages(mask, block)
    pages = workload.block_pages(lengths, spec)
    np.testing.assert_array_equal(pages.first_page, first)
    np.testing.assert_array_equal(pages.num_pages, number)
    assert pages.first_page.dtype == pages.num_pages.dtype == np.int32
    assert workload.causal_pairs(lengths, window) == mask.sum()

    starts = workload.document_starts(lengths, seq_len, window)
    assert starts.dtype == np.int32
    real = mask.any(axis=1)
    np.testing.assert_array_equal(starts[real], mask.argmax(axis=1)[real])
    assert (starts[~real] == workload.PADDING).all()


def test_pages_of_a_long_sequence_need_no_array_per_token():
    spec = PoolSpec(seq_len=2**29, pool_size=1, cp=1, block=2**17, **HEADS)
    assert workload.block_pages([2**28, 2**28], spec).num_pages.sum() == 2 * (2048 * 2049 // 2)


@pytest.mark.parametrize(
    ("lengths", "sequence", "words"),
    [
        ([0, 1, 0, 1], 0, ["entry 0", "sequence 0", "length 0", "at least 1"]),
        ([5, 0], 3, ["entry 1", "sequence 3"]),
        ([20, -3], None, ["-3", "entry 1"]),
        ([40, 30], 1, ["70", "64", "sequence 1", "seq_len"]),
        ([2.5], None, ["2.5", "whole number"]),
        ([3, float("nan")], None, ["nan", "entry 1"]),
        ([float("inf")], None, ["inf", "entry 0"]),
        ([True, 3], None, ["True", "entry 0"]),
        (np.array([True]), 2, ["booleans", "sequence 2"]),
        (["12"], None, ["'12'", "whole number"]),
        ([[1, 2], [3, 4]], None, ["flat list", "(2, 2)"]),
        ([[1, 2], [3]], 4, ["flat list", "sequence 4"]),
        (7, None, ["flat list", "()"]),
        (np.array([2**63 - 1, 2**63 - 1]), None, [str(2**64 - 2), "64"]),
        (np.array([-1], np.int8), None, ["-1"]),
    ],
)
def test_bad_lengths_are_refused_by_name(lengths, sequence, words):
    with pytest.raises(ValueError) as error:
        workload.check_lengths(lengths, 64, sequence)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "lengths", [[], [64], [1] * 64, np.array([3, 4], np.uint8), (5, 6), [3.0, 4], np.array([2.0])], ids=str
)
def test_good_lengths_come_back_as_int64(lengths):
    sizes = workload.check_lengths(lengths, 64)
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [int(x) for x in lengths]


def published_rate(cost, tokens):
    """TFLOP/s as published: counted FLOPs of one causal head, half the square, over the model's time."""
    blocks = tokens // 128
    return 2 * tokens * tokens * 128 / cost.forward(blocks * (blocks + 1) / 2, blocks) / 1e12


def test_default_cost_gives_the_published_rates():
    rates = [published_rate(CostModel(), tokens) for tokens in (2048, 4096, 8192, 16384)]
    np.testing.assert_allclose(rates, [323, 353, 369, 378], rtol=4e-3)


def test_default_cost_is_near_the_measured_document_times():
    """H100 times of one document with 64 heads, in milliseconds, published with DistCA's planner (tp 1, cp 1)."""
    cost = CostModel()
    for tokens, measured in [(128, 0.0304), (1024, 0.13), (8192, 3.6), (32768, 51.9), (65536, 206.3)]:
        blocks = tokens // 128
        modelled = 1e3 * cost.forward(64 * blocks * (blocks + 1) / 2, 64 * blocks, 1)
        assert 0.6 < modelled / measured < 1.35, (tokens, modelled, measured)


def test_cost_scales_with_the_shape():
    small = PoolSpec(seq_len=1024, pool_size=1, cp=1, num_heads=8, num_kv_heads=2, head_dim=64, block=64)
    cost = CostModel().scaled(small)
    assert cost.page_seconds == pytest.approx(CostModel().page_seconds * (64 / 128) ** 2 * 4 * 64 / 128)
    assert cost.block_seconds == pytest.approx(CostModel().block_seconds * (64 / 128) * 4 * 64 / 128)
    assert cost.scaled(small) == cost
    wide = dataclasses.replace(small, head_dim=192, v_head_dim=128)
    ratio = CostModel().scaled(wide).backward_page_seconds / cost.backward_page_seconds
    assert ratio == pytest.approx((3 * 192 + 2 * 128) / (5 * 64))
    again = CostModel().scaled(wide).scaled(small)
    assert dataclasses.astuple(again) == pytest.approx(dataclasses.astuple(cost))


def test_sequence_seconds_grow_with_the_square_of_a_document():
    spec = PoolSpec(seq_len=2**18, pool_size=1, cp=1, num_heads=32, num_kv_heads=8, head_dim=128)
    one = workload.sequence_seconds([2**18], spec)
    many = workload.sequence_seconds([2**10] * 2**8, spec)
    flops = 4 * 2**17 * 2**18 * 32 * 128  # forward; causal, so half the square
    assert one == pytest.approx(flops / 388e12 + 2.5 * flops / 348e12, rel=0.01)
    assert 100 < one / many < 256
    assert workload.sequence_seconds([], spec) == 0.0
    doubled = dataclasses.replace(CostModel(), page_seconds=2 * CostModel().page_seconds)
    assert workload.sequence_seconds([2**18], spec, doubled) > 1.2 * one


def counted_by_token(lengths, seq_len, block, window):
    """(pages, blocks) of one sequence, token by token: which pages hold a key that some token of a block sees."""
    seen = [set() for _ in range(seq_len // block)]
    start = 0
    for length in lengths:
        for token in range(start, start + length):
            for key in range(start if window is None else max(start, token - window + 1), token + 1):
                # A block visits whole pages up to its own, from the first that any of its tokens needs.
                seen[token // block].update(range(key // block, token // block + 1))
        start += length
    return sum(map(len, seen)), sum(1 for pages in seen if pages)


@st.composite
def batches_of_sequences(draw):
    """(lengths of each sequence, seq_len, block, window): documents often of one token, or up to a block's border."""
    block = draw(st.sampled_from([1, 2, 3, 4, 7]))
    seq_len, sequences = block * draw(st.integers(1, 8)), []
    for _ in range(draw(st.integers(0, 5))):
        lengths, used = [], 0
        while used < seq_len and draw(st.integers(0, 6)):
            border = min(-(used + 1) // block * -block, seq_len)
            lengths.append(draw(st.just(1) | st.just(border - used) | st.integers(1, seq_len - used)))
            used += lengths[-1]
        sequences.append(lengths)
    return sequences, seq_len, block, draw(st.none() | st.integers(1, seq_len + 2))


@settings(deadline=None, max_examples=300)
@given(batches_of_sequences())
def test_seconds_of_many_sequences_are_those_of_their_pages_and_blocks(case):
    sequences, seq_len, block, window = case
    spec = PoolSpec(seq_len=seq_len, pool_size=1, cp=1, block=block, window=window, **HEADS)
    # For this shape as it stands, in powers of two, so that the seconds are exact and pages and blocks both readable.
    cost = CostModel(1.0, 2.0**-20, 7.0, 0.5, 2.0**-21, 7.0, block=block, group=2, head_dim=16, v_head_dim=16)
    flat, counts = [length for sequence in sequences for length in sequence], [len(s) for s in sequences]
    counted = [counted_by_token(lengths, seq_len, block, window) for lengths in sequences]
    seconds = workload.sequences_seconds(flat, counts, spec, cost)
    assert seconds.dtype == np.float64 and seconds.shape == (len(sequences),)
    assert seconds.tolist() == [2 * 1.5 * (pages + blocks * 2.0**-20) for pages, blocks in counted]
    assert seconds.tolist() == [workload.sequence_seconds(lengths, spec, cost) for lengths in sequences]


@pytest.mark.parametrize("window", [None, 1, 130, 4096])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int64])
def test_seconds_of_many_long_sequences_have_the_bits_of_their_blocks(window, dtype):
    """200,000 documents, so several parts; sequences of none, of one and of thousands among them."""
    spec = PoolSpec(seq_len=2**18, pool_size=8, cp=8, num_heads=32, num_kv_heads=8, head_dim=128, window=window)
    rng = np.random.default_rng(1)
    counts = np.concatenate([[0, 1, 0, 90_000, 0, 0, 70_000, 1], rng.integers(0, 3000, 30), [0]])
    parts = [rng.multinomial(rng.integers(3000, 2**18 - n), np.ones(n) / n) + 1 for n in counts if n]
    seconds = workload.sequences_seconds(np.concatenate(parts).astype(dtype), counts, spec)
    cost = CostModel().scaled(spec)
    sequences = iter(parts)
    for number, got in zip(counts, seconds.tolist(), strict=True):
        pages = workload.block_pages(next(sequences), spec).num_pages if number else np.zeros(1, int)
        amounts = int(pages.sum()), int(np.count_nonzero(pages))
        assert got == 8 * (cost.forward(*amounts) + cost.backward(*amounts))


@pytest.mark.parametrize(
    ("lengths", "counts", "words"),
    [
        ([3, 4, 5], [1, 1], ["2 documents", "3 lengths"]),
        ([3, 4], [3, -1], ["2 documents", "-1 to 3"]),
        ([3, 4], [2**63 - 1, 2**63 - 1, 4], ["2 documents", f"4 to {2**63 - 1}"]),
        ([3.0, 4.0], [2], ["document lengths", "float64"]),
        ([3, 4], [[2]], ["counts", "(1, 1)"]),
        ([64, 30, 35, 1], [1, 2, 1], ["sequence 1", "65", "seq_len (64)"]),
        ([64, 30, 0], [1, 0, 2], ["entry 1", "sequence 2", "at least 1"]),
        ([2**62, 2**62, 2**62, 2**62], [4], [str(2**64), "64"]),
        (np.array([5, 2**64 - 3], np.uint64), [1, 1], ["sequence 1", str(2**64 - 3)]),
    ],
)
def test_bad_batches_of_lengths_are_refused_by_name(lengths, counts, words):
    spec = PoolSpec(seq_len=64, pool_size=1, cp=1, block=8, **HEADS)
    with pytest.raises(ValueError) as error:
        workload.sequences_seconds(lengths, counts, spec)
    assert all(word in str(error.value) for word in words), error.value


def test_fit_recovers_coefficients():
    rng = np.random.default_rng(0)
    pages, blocks, launches = rng.integers(1, 10_000, 40), rng.integers(1, 500, 40), rng.integers(1, 4, 40)
    seconds = 2e-8 * pages + 3e-7 * blocks + 2e-5 * launches
    np.testing.assert_allclose(workload.fit_coefficients(pages, blocks, launches, seconds), (2e-8, 3e-7, 2e-5))
    noisy = seconds * rng.uniform(0.98, 1.02, 40)
    found = workload.fit_coefficients(pages, blocks, launches, noisy)
    np.testing.assert_allclose(found, (2e-8, 3e-7, 2e-5), rtol=0.15)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_fit_is_the_best_non_negative_one(seed):
    rng = np.random.default_rng(seed)
    pages, blocks, launches = rng.uniform(0, 100, (3, 12))
    seconds = rng.uniform(0.5, 2.0, 12)
    table = np.stack([pages, blocks, launches], axis=1) / seconds[:, None]
    ours = np.array(workload.fit_coefficients(pages, blocks, launches, seconds))
    _, best = nnls(table, np.ones(12))
    assert (ours >= 0).all()
    assert np.linalg.norm(table @ ours - 1) <= best * (1 + 1e-6) + 1e-9


def test_fitted_model_is_for_its_shape():
    spec = PoolSpec(seq_len=1024, pool_size=1, cp=1, num_heads=8, num_kv_heads=2, head_dim=64, block=64)
    pages, blocks, launches = np.array([10, 200, 3000]), np.array([5, 20, 100]), np.array([1, 1, 2])
    forward = (pages, blocks, launches, 1e-6 * pages + 1e-5 * blocks + 1e-4 * launches)
    cost = CostModel.fit(spec, forward)
    assert (cost.block, cost.group, cost.head_dim, cost.v_head_dim) == (64, 4, 64, 64)
    assert cost.page_seconds == pytest.approx(1e-6)
    assert cost.backward_page_seconds / cost.page_seconds == pytest.approx(2.5 * 388 / 348)
    backward = (*forward[:3], 3 * forward[3])
    assert CostModel.fit(spec, forward, backward).backward_launch_seconds == pytest.approx(3e-4)


@pytest.mark.parametrize(
    ("measurements", "words"),
    [
        (([1, 2], [1, 2], [1, 1], [1.0, 2.0]), ["at least 3", "2"]),
        (([1, 2, 3], [1, 2], [1, 1, 1], [1.0, 2.0, 3.0]), ["(3,)", "(2,)"]),
        (([1, 2, 3], [1, 2, 3], [1, 1, 1], [1.0, 0.0, 3.0]), ["measurement 1", "seconds (0)", "above 0"]),
        (([1, -2, 3], [1, 2, 3], [1, 1, 1], [1.0, 2.0, 3.0]), ["measurement 1", "pages (-2)"]),
        (([1, 2, 3], [1, 2, 3], [1, 1, 1], [1.0, 2.0, float("nan")]), ["measurement 2", "nan"]),
    ],
)
def test_bad_measurements_are_refused(measurements, words):
    with pytest.raises(ValueError) as error:
        workload.fit_coefficients(*measurements)
    for word in words:
        assert word in str(error.value)


def test_cost_model_is_saved_and_loaded(tmp_path):
    cost = CostModel(page_seconds=1e-8, block=64)
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not JSON"]),
        ("[1]", ["expected an object", "page_seconds"]),
        ('{"page_seconds": 1}', ["missing", "block_seconds"]),
        (json.dumps(dataclasses.asdict(CostModel()) | {"pages": 1}), ["unknown ['pages']"]),
        (json.dumps(dataclasses.asdict(CostModel()) | {"page_seconds": -1}), ["page_seconds (-1)", "0 or more"]),
        (json.dumps(dataclasses.asdict(CostModel()) | {"page_seconds": float("nan")}), ["page_seconds", "finite"]),
        (json.dumps(dataclasses.asdict(CostModel()) | {"page_seconds": "1"}), ["page_seconds", "'1'"]),
        (json.dumps(dataclasses.asdict(CostModel()) | {"block": 0}), ["block (0)", "at least 1"]),
    ],
)
def test_bad_cost_files_are_refused_by_name(tmp_path, text, words):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        CostModel.load(path)
    for word in ["cost.json", *words]:
        assert word in str(error.value)


def test_missing_cost_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        CostModel.load(tmp_path / "absent.json")


def test_host_side_does_not_import_jax():
    code = "import sys, libra_jax.workload; assert 'jax' not in sys.modules and 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4), st.sampled_from([0, -1]))
def test_lengths_from_segment_ids_are_the_lengths_they_were_made_from(lengths, padding_id):
    ids = np.full((len(lengths), 24), padding_id)
    for row, documents in zip(ids, lengths, strict=True):
        # Neighbours differ; numbers come again and do not rise, as other loaders have them.
        row[: sum(documents)] = np.repeat([7 if i % 2 else 3 for i in range(len(documents))], documents)
    assert lengths_from_segment_ids(ids, padding_id) == lengths


def test_segment_ids_that_are_none_are_refused():
    with pytest.raises(ValueError, match="sequence 1 has tokens after"):
        lengths_from_segment_ids(np.array([[1, 1, 0], [1, 0, 2]]))
    with pytest.raises(ValueError, match="float64"):
        lengths_from_segment_ids(np.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"\(4,\)"):
        lengths_from_segment_ids(np.zeros(4, int))
