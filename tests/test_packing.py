"""Documents fill sequences, a window of the corpus at a time: nothing is lost, nothing is there twice."""

import concurrent.futures
import os
import pickle
import sys
import unittest.mock

import numpy as np
import pytest
from data_base import documents_of
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.data import PackedDocuments
from libra_jax.data import packing as packing_module
from libra_jax.data import windows as windows_module
from libra_jax.data.packing import cut
from libra_jax.data.windows import deal_windows

PACKERS = ("first_fit", "best_fit", "concat_and_split")


def served(packed):
    """{document: the tokens served of it, sorted}, of all sequences; and the sequences' sizes."""
    tokens, sizes = {}, []
    for number in range(len(packed)):
        pieces = packed.pieces(number)
        sizes.append(int(pieces.length.sum()))
        for document, start, length in zip(*(column.tolist() for column in pieces), strict=True):
            tokens.setdefault(document, []).extend(range(start, start + length))
    return {document: sorted(places) for document, places in tokens.items()}, sizes


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), max_size=20), st.integers(1, 60))
def test_cut_keeps_every_token_once(lengths, seq_len):
    document, start, length = cut(np.array(lengths, np.int64), seq_len)
    expected = [(d, s, min(seq_len, whole - s)) for d, whole in enumerate(lengths) for s in range(0, whole, seq_len)]
    assert list(zip(document.tolist(), start.tolist(), length.tolist(), strict=True)) == expected


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from([0, 1, 1, 2, 3, 8, 15, 16, 17, 32, 33, 90]), min_size=1, max_size=60),
    st.integers(0, 5),
    st.sampled_from(PACKERS),
    st.sampled_from(["split", "drop", "truncate"]),
    st.none() | st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([2**17, 3]),
)
def test_every_token_is_served_once(lengths, seed, packer, rule, limit, window, held_out, chunks):
    """Documents of 0, 1 and seq_len tokens, longer ones, many windows: what is left comes once, in one split."""
    options = {"packer": packer, "long_documents": rule, "max_documents": limit, "held_out": held_out, "seed": seed}
    with unittest.mock.patch.object(windows_module, "_CHUNKS", chunks):  # few: of many documents each
        check_every_token_is_served_once(lengths, rule, limit, window, held_out, options)


def check_every_token_is_served_once(lengths, rule, limit, window, held_out, options):
    found = {}
    for split in ("train", "held_out") if held_out else ("train",):
        try:
            packed = PackedDocuments(lengths, 16, split=split, window_sequences=window, **options)
        except ValueError as error:
            assert "no token is left" in str(error) or "leaves none" in str(error)
            continue
        tokens, sizes = served(packed)
        assert not set(tokens) & set(found)
        found |= tokens
        assert all(0 < size <= 16 for size in sizes)
        assert limit is None or max(len(d) for d in documents_of(packed)) <= limit
        assert packed.totals.kept_tokens == sum(sizes)
        assert packed.fill == sum(sizes) / (16 * len(packed))
        again = PackedDocuments(lengths, 16, split=split, window_sequences=window, **options)
        backwards = [again.pieces(number) for number in reversed(range(len(again)))][::-1]
        for number, pieces in enumerate(backwards):
            assert [c.tolist() for c in pieces] == [c.tolist() for c in packed.pieces(number)]
    kept = {"split": lambda n: n, "drop": lambda n: n if n <= 16 else 0, "truncate": lambda n: min(n, 16)}[rule]
    if found:  # else everything was refused
        missing = {d for d, n in enumerate(lengths) if kept(n)} - set(found)
        assert not missing or held_out, "with a split that holds nothing, its documents are not served"
        assert found == {d: list(range(kept(n))) for d, n in enumerate(lengths) if kept(n) and d not in missing}


def test_only_concat_and_split_cuts_a_document_that_fits():
    lengths = np.random.default_rng(0).integers(1, 17, 300)
    for packer in PACKERS:
        packed = PackedDocuments(lengths, 16, packer=packer)
        whole = all((packed.pieces(n).length == lengths[packed.pieces(n).document]).all() for n in range(len(packed)))
        assert whole == (packer != "concat_and_split")


def test_a_long_document_is_cut_and_counted():
    """40 tokens in sequences of 16: pieces of 16, 16 and 8; dropped or cut short, the lost tokens are told."""
    split = PackedDocuments([40], 16)
    pieces = [split.pieces(n) for n in range(3)]
    assert sorted((int(p.start[0]), int(p.length[0])) for p in pieces) == [(0, 16), (16, 16), (32, 8)]
    assert split.totals.describe(16, "split").startswith(
        "1 documents are longer than 16 tokens and are cut into pieces"
    )
    short = PackedDocuments([40, 3], 16, long_documents="truncate")
    assert short.totals.describe(16, "truncate").endswith("cut short, 24 tokens left out")
    without = PackedDocuments([40, 3], 16, long_documents="drop")
    assert without.totals.describe(16, "drop").endswith("left out with their 40 tokens")
    assert documents_of(without) == [[1]]
    with pytest.raises(ValueError, match="1 documents in the split 'train', 0 of them empty, 1 longer than seq_len"):
        PackedDocuments([40], 16, long_documents="drop")


def test_limit_of_documents_holds_in_every_sequence():
    """12 documents of one token, at most 5 a sequence: the limit holds for sequences opened later, too."""
    assert [len(s) for s in documents_of(PackedDocuments([1] * 12, 16))] == [12]
    assert sorted(len(s) for s in documents_of(PackedDocuments([1] * 12, 16, max_documents=5))) == [2, 5, 5]


def test_documents_come_in_an_order_that_follows_from_the_seed():
    lengths = np.random.default_rng(0).integers(1, 200, 500)
    first, other = PackedDocuments(lengths, 256), PackedDocuments(lengths, 256, seed=1)
    assert first.fill > 0.9
    assert documents_of(first) != documents_of(other)
    assert documents_of(first) == documents_of(pickle.loads(pickle.dumps(first)))


def test_lengths_in_a_file_are_not_sent_to_workers(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 200, 100_000).astype(np.uint32)
    np.save(tmp_path / "lengths.npy", lengths)
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    for part, whole in ((mapped, lengths), (mapped[500:90_000], lengths[500:90_000])):
        packed = PackedDocuments(part, 4096)
        sent = pickle.dumps(packed)
        assert len(sent) < len(pickle.dumps(PackedDocuments(whole, 4096))) - 0.99 * whole.nbytes
        assert documents_of(pickle.loads(sent))[:50] == documents_of(PackedDocuments(whole, 4096))[:50]


def test_held_out_documents_do_not_depend_on_the_seed():
    lengths = np.random.default_rng(0).integers(1, 50, 1000)
    held_out = [
        set(np.concatenate(documents_of(PackedDocuments(lengths, 64, held_out=share, split="held_out", seed=seed))))
        for seed, share in ((0, 0.05), (1, 0.05), (0, 0.1))
    ]
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == 50
    assert held_out[0] < held_out[2]
    train = set(np.concatenate(documents_of(PackedDocuments(lengths, 64, held_out=0.05))))
    assert train == set(range(1000)) - held_out[0]


def test_memory_is_bounded_by_a_window_not_by_the_corpus(monkeypatch):
    """However many sequences are asked for, no more than the stated number of pieces is remembered."""
    monkeypatch.setattr(packing_module, "_REMEMBERED", 500)
    packed = PackedDocuments(np.full(20_000, 3), 64, window_sequences=8)
    for number in range(0, len(packed), 5):
        packed.pieces(number)
        assert packed._remembered <= 500
        assert packed._remembered == sum(len(pieces.document) for _, pieces in packed._packed.values())
    assert len(packed._packed) > 1


def test_large_corpora_are_dealt_in_chunks_that_stay_together():
    """From 262,144 documents on, neighbours come in one window; every document is in exactly one."""
    lengths = np.full(600_000, 5, np.uint32)
    windows = deal_windows(lengths, 100, 50_001)
    assert windows.chunk == 4
    numbers = [windows.parts(window, lengths)[0] for window in range(len(windows))]
    assert [len(part) for part in numbers] == [10_000] * 60
    assert np.array_equal(np.sort(np.concatenate(numbers)), np.arange(600_000))
    chunks, sizes = np.unique(numbers[3] // 4, return_counts=True)
    assert np.count_nonzero(sizes == 4) == len(sizes)
    assert np.ptp(chunks) > 100_000, "chunks come from all over the corpus"
    odd = deal_windows(lengths, 100, 50_013)  # 10,002 documents and a bit: bounds inside chunks
    numbers = [odd.parts(window, lengths)[0] for window in range(len(odd))]
    assert [len(part) for part in numbers] == [10_002] * 59 + [9_882]
    assert np.array_equal(np.sort(np.concatenate(numbers)), np.arange(600_000))


def test_concat_and_split_leaves_no_window_open():
    """Windows of whole documents would each end in a sequence that is not full."""
    lengths = np.random.default_rng(0).integers(1, 300, 5000)
    packed = PackedDocuments(lengths, 128, packer="concat_and_split", window_sequences=8)
    assert len(packed.counts) == -(-lengths.sum() // 1024)
    assert len(packed) == -(-lengths.sum() // 128)


def test_an_index_is_used_again_and_never_for_other_data(tmp_path, monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 200, 500)
    file = tmp_path / "deep" / "index.npz"
    counted = []
    plain = PackedDocuments._count
    monkeypatch.setattr(PackedDocuments, "_count", lambda self: counted.append(1) or plain(self))

    def made(lengths=lengths, seq_len=256, **options):
        before = len(counted)
        packed = PackedDocuments(lengths, seq_len, index=file, **options)
        assert packed.counts.tolist() == PackedDocuments(lengths, seq_len, **options).counts.tolist()
        return len(counted) - before - 1

    assert made() == 1
    assert made() == 0
    changed = lengths.copy()
    changed[7] += 1
    for other in (
        {"seq_len": 512}, {"seed": 1}, {"packer": "best_fit"}, {"max_documents": 3}, {"held_out": 0.1},
        {"long_documents": "drop"}, {"window_sequences": 2}, {"lengths": changed}, {"lengths": lengths[:-1]},
    ):  # fmt: skip
        assert made(**other) == 1, other
        assert made(**other) == 0, other
        assert made() == 1
    whole = file.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in (4, 6, 8, 30, len(whole) - 20)]
    for damage in (b"", whole[:-30], b"PK\x03\x04nonsense", b"\x93NUMPY\x01\x00", *flipped):
        file.write_bytes(damage)
        assert made(lengths=changed) == 1
        assert made(lengths=changed) == 0
    assert os.listdir(file.parent) == ["index.npz"]


def test_an_index_that_cannot_be_kept_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    expected = PackedDocuments([5] * 100, 16).counts.tolist()
    with pytest.warns(UserWarning, match="index cannot be kept, and will be made again"):
        packed = PackedDocuments([5] * 100, 16, index=tmp_path / "file" / "index")
    assert packed.counts.tolist() == expected


def test_large_corpora_are_counted_by_several_processes(tmp_path, monkeypatch):
    """Or by this one, where others cannot be started."""
    lengths = np.random.default_rng(0).integers(0, 300, 20_000).astype(np.uint32)
    np.save(tmp_path / "lengths.npy", lengths)
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    expected = PackedDocuments(lengths, 256, window_sequences=64).counts.tolist()
    monkeypatch.setattr(packing_module, "_MANY", 1000)
    in_this_process = unittest.mock.Mock(side_effect=PackedDocuments.count_windows, autospec=True)
    monkeypatch.setattr(PackedDocuments, "count_windows", lambda *arguments: in_this_process(*arguments))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert PackedDocuments(mapped, 256, window_sequences=64).counts.tolist() == expected
    assert not in_this_process.called
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert PackedDocuments(mapped, 256, window_sequences=64).counts.tolist() == expected
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert PackedDocuments(mapped, 256, window_sequences=64).counts.tolist() == expected
    assert in_this_process.call_count == 2


def test_threads_may_ask_at_once(monkeypatch):
    """Grain reads map datasets in threads."""
    monkeypatch.setattr(packing_module, "_REMEMBERED", 300)
    packed = PackedDocuments(np.full(5_000, 3), 64, window_sequences=4)
    expected = [packed.pieces(number).document.tolist() for number in range(len(packed))]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        numbers = np.random.default_rng(0).permutation(list(range(len(packed))) * 8).tolist()
        got = list(threads.map(lambda number: packed.pieces(number).document.tolist(), numbers))
    assert got == [expected[number] for number in numbers]
    assert packed._remembered == sum(len(pieces.document) for _, pieces in packed._packed.values())


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([4, -1], {}, ["document 1 has -1 tokens"]),
        ([4.5], {}, ["whole numbers"]),
        ([], {}, ["at least 1"]),
        ([0, 0], {}, ["no token is left", "2 of them empty"]),
        ([[4]], {}, ["(1, 1)"]),
        ([4], {"packer": "next_fit"}, ["next_fit", "best_fit"]),
        ([4], {"max_documents": 0}, ["max_documents (0)"]),
        ([4], {"window_sequences": 0}, ["window_sequences (0)"]),
        ([4], {"long_documents": "shorten"}, ["shorten", "split"]),
        ([4], {"held_out": 1.5}, ["held_out (1.5)"]),
        ([4], {"held_out": 0.5}, ["leaves none"]),
        ([4], {"split": "held_out"}, ["held_out is 0"]),
        ([4], {"split": "test"}, ["'test'"]),
    ],
)
def test_bad_packing_is_refused_by_name(lengths, options, words):
    with pytest.raises(ValueError) as error:
        PackedDocuments(lengths, 16, **options)
    for word in words:
        assert word in str(error.value)
    with pytest.raises(ValueError, match=r"seq_len \(0\)"):
        PackedDocuments([4], 0)
    with pytest.raises(IndexError, match="sequence 1 of 1"):
        PackedDocuments([4], 16).pieces(1)
