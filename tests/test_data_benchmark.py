"""The benchmark of the input pipeline: its corpora are what they are said to be, its clock adds up, and a small run of
every part ends with a report."""

import json
import re
import subprocess

import numpy as np
import pytest

from benchmarks import data, data_cases, data_files
from benchmarks.data import Options, cell, main, short, spec_of
from libra_jax.data import MegatronDocuments
from libra_jax.data.prepare import PrepareOptions, prepare


@pytest.mark.parametrize("corpus", data.CORPORA)
def test_drawn_lengths_add_up_and_are_the_corpus(corpus):
    lengths = data_files.draw_lengths(corpus, 10**7, np.random.default_rng(0))
    assert lengths.sum() == 10**7
    assert lengths.min() >= 1
    quantiles = json.loads((data_files.DISTRIBUTIONS / f"{corpus}.json").read_text())
    median = np.interp(0.5, quantiles["probability"], quantiles["length_tokens"])
    assert np.median(lengths) == pytest.approx(median, rel=0.1)


@pytest.mark.parametrize("documents", [3, 50])
def test_a_megatron_corpus_may_have_more_tokens_than_its_file(tmp_path, documents):
    data_files.write_tokens(tmp_path / "tokens", 1000, 0)
    stored = np.fromfile(tmp_path / "tokens", "<i4")
    assert stored.min() >= 0 and stored.max() < data_files.VOCABULARY
    lengths = np.random.default_rng(1).integers(1, 300, documents)
    data_files.write_megatron(tmp_path / "corpus", tmp_path / "tokens", lengths)
    opened = MegatronDocuments.open(tmp_path / "corpus", vocab_size=data_files.VOCABULARY)
    assert opened.lengths.tolist() == lengths.tolist()
    text = stored.astype("<i4").tobytes()
    for number, length in enumerate(lengths.tolist()):
        tokens = np.empty(length, np.int32)
        opened.read(np.array([number]), np.array([0]), np.array([length]), tokens)
        assert tokens.astype("<i4").tobytes() in text


def test_a_document_longer_than_the_file_is_refused(tmp_path):
    data_files.write_tokens(tmp_path / "tokens", 100, 0)
    with pytest.raises(ValueError, match="holds 100 tokens, a document has 101"):
        data_files.write_megatron(tmp_path / "corpus", tmp_path / "tokens", np.array([101]))


def test_texts_are_cut_from_the_text_at_the_lengths_asked_for():
    text = bytes(range(97, 123)) * 4
    texts = list(data_files.cut_texts(text, np.array([1, 26, 104, 500]), np.random.default_rng(0)))
    assert [len(cut) for cut in texts] == [1, 26, 104, 104]
    assert all(cut.encode() in text for cut in texts)


def test_parts_count_what_others_in_them_do_not():
    """By hand: outer runs from 0 to 10, inner from 2 to 5 and from 6 to 7: 6 and 4 seconds."""
    ticks = iter([0.0, 2.0, 5.0, 6.0, 7.0, 10.0])

    class Work:
        def outer(self):
            return self.inner() + self.inner()

        def inner(self):
            return 1

    parts = data_cases.Parts([(Work, "outer", "o"), (Work, "inner", "i")], lambda: next(ticks))
    with parts.measured():
        assert Work().outer() == 2
    assert parts.seconds == {"o": 6.0, "i": 4.0}
    assert Work().outer() == 2  # the clock has no more ticks: nothing is measured any more


def test_cells_and_names():
    assert cell("tokens/s", 2.5e7) == "25.0 M"
    assert [cell("ms", value) for value in (0.0006, 1.234, 45.67, 1234.5)] == ["0.0006", "1.23", "45.7", "1,234"]
    assert cell("documents", 1000) == "1,000"
    assert [short(n) for n in (512, 2**13, 2**18, 2**20)] == ["512", "8K", "256K", "1M"]


def prepared_here(source, tokenizer, out, workers):
    return 2.0, 1.0, prepare([source], PrepareOptions(tokenizer, out, workers=workers))


def test_libra_prepare_as_a_user_starts_it(tmp_path):
    data_files.write_jsonl(tmp_path / "text.jsonl", ["ab", "äöü"])
    wall, processor, manifest = data_cases.prepared(tmp_path / "text.jsonl", "bytes", tmp_path / "out", 1)
    assert processor > 0 and wall > 0
    assert (manifest.documents, manifest.tokens) == (2, 3 + 7)
    with pytest.raises(subprocess.CalledProcessError):
        data_cases.prepared(tmp_path / "missing.jsonl", "bytes", tmp_path / "other", 1)


def test_every_part_runs_small_and_reports(tmp_path, monkeypatch):
    """In this process, without the ones a case would have; the shapes are too small for the times to say anything."""
    monkeypatch.setattr(data, "fresh", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(data_files, "PACKAGES", ("tyro",))
    monkeypatch.setattr(data_cases, "prepared", prepared_here)
    seq_len = 2048
    options = Options(
        corpora=("short-bulk-long-tail",),
        seq_lens=(seq_len,),
        tokens=2**18,
        measured_tokens=1,
        documents=3000,
        hosts=3,
        wait_steps=2,
        tokens_per_second=32 * seq_len / 0.1,
        text_mb=0.1,
        workers=(1,),
        folder=tmp_path,
        json=tmp_path / "data.json",
        report=tmp_path / "data.md",
    )
    monkeypatch.setattr(data, "spec_of", lambda seq_len, two_level=False: spec_of(seq_len))
    main(options)
    rows = json.loads((tmp_path / "data.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"asked", *Options.parts}
    asked = {row["what"]: row["measured"] for row in rows if row["part"] == "asked"}
    assert asked["24 sequences on 3 hosts: each on exactly one"] == "yes"
    assert asked["3 hosts that start from nothing find the same slots"] == "yes"
    for row in rows:
        if row["part"] == "throughput":
            parts = sum(row[name] for name in data_cases.STEP_PART_NAMES)
            assert 0 < parts < row["ms a step"]
        if row["part"] == "prepare":
            assert row["tokens"] > row["text MB"] * 1e6 / 10
        if "touched" in row:
            assert row["touched"] >= row["in the step"] > 0
    text = (tmp_path / "data.md").read_text()
    assert text.index("## Asked and measured") < text.index("## One core")
    assert len(re.findall("^## ", text, re.MULTILINE)) == len({row["table"] for row in rows})
    assert {path.name for path in tmp_path.iterdir()} == {"data.json", "data.md"}, "what was made is gone"
