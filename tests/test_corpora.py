"""From paths to batches: whatever documents are stored as, the same packing, order, refusals and exact resume."""

import json
import struct

import numpy as np
import pytest
import tokenizers
from data_base import small_spec, take, write

from libra_jax.cli import main as libra
from libra_jax.data import (
    BatchIterator,
    Corpus,
    DataConfig,
    PackedDocuments,
    PoolSampler,
    SourceDocuments,
    StepBatches,
    open_batches,
    open_corpora,
    open_step_batches,
)
from libra_jax.data.documents import END_OF_DOCUMENT, encode
from libra_jax.data.lengths import read_lengths

TEXTS = [f"text number {i}: {'long ' * (i * 7 % 23)}" for i in range(60)]


def text_folder(folder):
    write(folder / "text", {f"{i:03}.txt": text.encode() for i, text in enumerate(TEXTS)})
    return str(folder / "text")


def prepared_folder(folder, capsys=None):
    out = folder / "prepared"
    assert libra(["prepare", text_folder(folder), "--tokenizer", "bytes", "--out", str(out), "--workers", "1"]) == 0
    return str(out)


def megatron_pair(folder):
    """The format by its facts: header, lengths, byte offsets, document index."""
    documents = [encode(text.encode()) for text in TEXTS]
    lengths = np.array([len(tokens) for tokens in documents], np.int32)
    (folder / "pair.bin").write_bytes(np.concatenate(documents).astype(np.uint16).tobytes())
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    index = header + lengths.tobytes() + offsets.tobytes() + np.arange(len(lengths) + 1, dtype=np.int64).tobytes()
    (folder / "pair.idx").write_bytes(index)
    return str(folder / "pair")


KINDS = {"text": text_folder, "prepared": prepared_folder, "megatron": megatron_pair}


def documents_in(batches, steps):
    """Every document that is served, as text."""
    found = []
    for step in range(steps):
        batch = batches[step]
        for tokens, ids in zip(*(batch[name].reshape(-1, 512) for name in ("tokens", "segment_ids")), strict=True):
            found += [tokens[ids == number].tolist() for number in range(1, ids.max() + 1)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_is_the_same_documents_however_it_is_stored(tmp_path, kind):
    spec = small_spec(seq_len=512)
    config = DataConfig(paths=(KINDS[kind](tmp_path),))
    batches = open_step_batches(config, spec, pools=2, micro_steps=2, vocab_size=257)
    served = documents_in(batches, batches.sampler.steps_per_epoch)
    assert sorted(served) == sorted([*text.encode(), END_OF_DOCUMENT] for text in TEXTS)
    text = open_step_batches(DataConfig(paths=(text_folder(tmp_path),)), spec, pools=2, micro_steps=2)
    np.testing.assert_array_equal(batches[1]["tokens"], text[1]["tokens"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_of_any_kind_goes_on_where_it_was(tmp_path, kind):
    config = DataConfig(paths=(KINDS[kind](tmp_path),))

    def opened():
        return open_batches(config, small_spec(seq_len=512), pools=2, index_folder=tmp_path / "index")

    first = opened()
    whole = take(first, 5)
    first.close()
    start = opened()
    take(start, 2)
    state = json.dumps(start.get_state())
    start.close()
    rest = opened()
    rest.set_state(json.loads(state))
    for a, b in zip(whole[2:], take(rest, 3), strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
    rest.close()


def test_a_prepared_folder_brings_the_numbers_of_its_packed_sequences(tmp_path, monkeypatch):
    """Nothing is counted at the usual lengths and settings; elsewhere it is, and kept in the run's folder."""
    config = DataConfig(paths=(prepared_folder(tmp_path),))
    expected = len(open_corpora(config, 512)[0].packed)
    counted = []
    monkeypatch.setattr(PackedDocuments, "_count", lambda self: counted.append(1) or np.array([expected]))
    for seq_len in (2**15, 2**17, 2**18, 2**20):
        assert len(open_corpora(config, seq_len)[0].packed) == 1
    assert not counted
    for seed in (1, 1, 2):
        open_corpora(config, 2**15, seed=seed, index_folder=tmp_path / "run")
    assert len(counted) == 2
    assert len(open_corpora(config, 512, index_folder=tmp_path / "run")[0].packed) == expected
    assert len(counted) == 3


def test_kinds_are_told_apart_by_what_lies_there(tmp_path):
    prepared, pair = prepared_folder(tmp_path), megatron_pair(tmp_path)
    write(tmp_path, {"more.txt": b"more", "other/a.md": b"other"})
    paths = (str(tmp_path / "more.txt"), prepared, str(tmp_path / "other"), pair)
    corpora = open_corpora(DataConfig(paths=paths, packages=("absl",)), 512)
    assert [corpus.name for corpus in corpora] == [prepared, pair, f"{paths[0]}, {paths[2]}, absl"]
    for ending in (".bin", ".idx"):
        (found,) = open_corpora(DataConfig(paths=(pair + ending,)), 512)
        assert found.documents.fingerprint == corpora[1].documents.fingerprint
    weighted = open_corpora(DataConfig(paths=paths, weights=(1, 1, 2, 4)), 512)
    assert [corpus.name for corpus in weighted] == list(paths)


def test_what_is_missing_or_does_not_fit_is_named(tmp_path):
    pair = megatron_pair(tmp_path)
    (tmp_path / "pair.bin").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"pair\.bin"):
        open_corpora(DataConfig(paths=(pair,)), 512)
    (tmp_path / "gone").rename(tmp_path / "pair.bin")
    (tmp_path / "pair.idx").unlink()
    for path in (pair, pair + ".bin", pair + ".idx"):
        with pytest.raises(FileNotFoundError, match=r"pair\.idx"):
            open_corpora(DataConfig(paths=(path,)), 512)
    for name in ("c.jsonl", "c.parquet", "c.jsonl.gz", "c.txt.zst"):
        write(tmp_path, {name: b"{}"})
        with pytest.raises(ValueError, match="is no plain text: make tokens of it first, with `libra prepare`"):
            open_corpora(DataConfig(paths=(str(tmp_path / name),)), 512)
    prepared = prepared_folder(tmp_path)
    write(tmp_path / "prepared", {"README.txt": b"what this is"})
    (tmp_path / "prepared" / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json is missing"):
        open_corpora(DataConfig(paths=(prepared,)), 512)
    (tmp_path / "begun.unfinished").mkdir()
    for name in ("begun", "begun.unfinished"):
        with pytest.raises(FileNotFoundError, match="begun is not finished: the same `libra prepare` again"):
            open_corpora(DataConfig(paths=(str(tmp_path / name),)), 512)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_corpora(DataConfig(paths=(str(tmp_path / "nowhere"),)), 512)
    with pytest.raises(ValueError, match=r"text: no token is left to serve: 60 documents .* longer than seq_len \(4\)"):
        open_corpora(DataConfig(paths=(text_folder(tmp_path),), long_documents="drop"), 4)


def test_another_tokenizer_is_refused_with_both_values(tmp_path):
    """Known vocabularies when the run starts, tokens of unknown ones when they are read; two tokenizers in one run."""
    prepared, pair = prepared_folder(tmp_path), megatron_pair(tmp_path)
    spec = small_spec(seq_len=512)
    with pytest.raises(ValueError, match=r"tokenizer of 257 tokens \(bytes\), and the model's vocabulary has 256"):
        open_step_batches(DataConfig(paths=(prepared,)), spec, vocab_size=256)
    with pytest.raises(ValueError, match=r"document \d+ of .*pair holds token 256, and the model's vocabulary has 256"):
        open_step_batches(DataConfig(paths=(pair,)), spec, vocab_size=256)
    batches = open_step_batches(DataConfig(paths=(pair,)), spec)
    batches.vocab_size = 256  # a token that the look at the start has missed
    with pytest.raises(ValueError, match=r"document \d+ of .*pair holds token 256, and the model's vocabulary has 256"):
        batches[0]
    assert "its tokenizer is not known" in batches.corpora[0].describe()[1]
    words, other = tmp_path / "words.json", str(tmp_path / "other")
    vocabulary = {"text": 0, "<|endoftext|>": 1, "[UNK]": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(words))
    assert libra(["prepare", text_folder(tmp_path), "--tokenizer", str(words), "--out", other, "--workers", "1"]) == 0
    with pytest.raises(ValueError, match=r"one tokenizer: .*prepared with bytes, .*other with sha256:[0-9a-f]{16}$"):
        open_corpora(DataConfig(paths=(prepared, other)), 512)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packer": "best_fit"}, ["packer: 'first_fit' saved, 'best_fit' now"]),
        ({"long_documents": "drop"}, ["long_documents: 'split' saved, 'drop' now"]),
        ({"held_out": 0.1}, ["held_out: 0.0 saved, 0.1 now"]),
        ({"max_documents": 3}, ["max_documents: None saved, 3 now"]),
        ({"last_step": "drop"}, ["last_step: 'pad' saved, 'drop' now"]),
        ({"weights": (2.0,)}, ["weights: None saved, [2.0] now"]),
        ({"across": "all", "prefetch": 1, "suffixes": (".txt", ".rst")}, []),
    ],
)
def test_a_position_is_refused_where_the_data_would_differ_and_only_there(tmp_path, changes, words):
    fields = {"paths": (text_folder(tmp_path),)}
    first = open_batches(DataConfig(**fields), small_spec(seq_len=512), pools=2)
    state = json.loads(json.dumps(first.get_state()))
    second = open_batches(DataConfig(**fields | changes), small_spec(seq_len=512), pools=2)
    if words:
        with pytest.raises(ValueError) as error:
            second.set_state(state)
        assert all(word in str(error.value) for word in words)
    else:
        second.set_state(state)
    first.close()
    second.close()


def test_a_grain_source_with_lengths_is_a_corpus():
    """As docs/data.md has it."""
    source = [np.arange(n) % 50 for n in (30, 7, 12, 64, 5)]
    documents = SourceDocuments(source, np.array([len(tokens) for tokens in source]))
    packed = PackedDocuments(documents.lengths, 64)
    sampler = PoolSampler(packed, small_spec(), pools=1)
    batches = BatchIterator(StepBatches([Corpus("mine", documents, packed)], sampler))
    tokens = np.concatenate([next(batches)["segment_ids"].ravel() for _ in range(sampler.steps_per_epoch)])
    assert (tokens > 0).sum() == 118
    batches.close()


@pytest.mark.parametrize("kind", ["prepared", "megatron"])
def test_lengths_of_stored_corpora_can_be_inspected(tmp_path, kind):
    lengths = read_lengths(KINDS[kind](tmp_path))
    assert sorted(lengths) == sorted(len(text.encode()) + 1 for text in TEXTS)


def test_text_may_be_moved(tmp_path):
    first = open_corpora(DataConfig(paths=(text_folder(tmp_path),)), 512)[0].documents.fingerprint
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert open_corpora(DataConfig(paths=(str(tmp_path / "elsewhere"),)), 512)[0].documents.fingerprint == first


def test_training_never_sees_what_is_held_out(tmp_path):
    config = DataConfig(paths=(text_folder(tmp_path),), held_out=0.2)
    found = {}
    for split in ("train", "held_out"):
        batches = open_step_batches(config, small_spec(seq_len=512), pools=2, split=split)
        found[split] = {tuple(tokens) for tokens in documents_in(batches, batches.sampler.steps_per_epoch)}
        described = batches.corpora[0].describe()[1]
        rest, size = {"train": ("48", "12 documents"), "held_out": ("12", "48 documents")}[split]
        assert described.startswith(size) and f"; {rest} with" in described
    assert len(found["held_out"]) == 12
    assert not found["train"] & found["held_out"]
    assert found["train"] | found["held_out"] == {(*text.encode(), END_OF_DOCUMENT) for text in TEXTS}
