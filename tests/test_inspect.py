"""`libra inspect`: what it reads, what it finds, and what it says when it cannot."""

import dataclasses
import json

import matplotlib.image
import numpy as np
import pytest

from libra_jax.data.lengths import holds_quantiles, read_lengths
from libra_jax.data.skew import inspect
from libra_jax.inspect_corpus import InspectOptions, bucket_names, fitting, run, short
from libra_jax.plots import work_per_rank_png
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel

SPEC = PoolSpec(seq_len=2048, pool_size=4, cp=4, num_heads=4, num_kv_heads=2, head_dim=16, block=32)
LONG_TAIL = np.minimum(np.random.default_rng(0).lognormal(4.5, 1.3, 3000).astype(int) + 1, 2048)


def written(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# ------------------------------------------------------------------------------------------------------ what it reads


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", [3, 5, 8], [3, 5, 8]),
        ("a.npy", np.array([3, 5], np.uint16), [3, 5]),
        ("a.npy", np.array([3.0, 5.0]), [3, 5]),
        ("a.txt", "3 5\n8,13\n", [3, 5, 8, 13]),
        ("a", "3.0\n5e3\n", [3, 5000]),
        ("a.jsonl", '{"text": "abc"}\n\n{"text": ""}\n{"text": "für", "id": 1}\n7\n', [3, 4, 7]),
    ],
)
def test_lengths_are_read(tmp_path, name, content, expected):
    lengths = read_lengths(written(tmp_path, name, content))
    assert lengths.dtype == np.int64
    assert lengths.tolist() == expected


def test_text_is_measured_in_bytes(tmp_path):
    written(tmp_path, "b.md", b"x" * 10)
    written(tmp_path, "a.py", b"y" * 25)
    written(tmp_path, "c.txt", b"")
    written(tmp_path, "d.bin", b"z" * 99)
    assert read_lengths(tmp_path).tolist() == [25, 10]
    assert read_lengths(tmp_path, bytes_per_token=4).tolist() == [6, 2]
    assert read_lengths(tmp_path, suffixes=(".bin",)).tolist() == [99]
    assert read_lengths(tmp_path / "a.py", kind="text").tolist() == [25]


def test_quantiles_are_drawn(tmp_path):
    path = written(tmp_path, "q.json", {"probability": [0, 0.5, 1], "length_tokens": [100, 200, 1000], "name": "x"})
    lengths = read_lengths(path)
    assert abs(np.median(lengths) - 200) < 10
    assert lengths.min() >= 100
    assert lengths.max() <= 1000
    np.testing.assert_array_equal(lengths, read_lengths(path))
    assert (lengths != read_lengths(path, seed=1)).any()
    assert read_lengths(path, least_tokens=10**8).sum() >= 10**8
    assert holds_quantiles(path)
    assert not holds_quantiles(path, "text")
    assert not holds_quantiles(written(tmp_path, "lengths.json", [3, 5]))
    assert not holds_quantiles(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "12\nabc\n", ["line 2", "'abc'", "not a number", "--kind text"]),
        ("a.txt", "", ["holds no document length"]),
        ("a.json", [], ["holds no document length"]),
        ("a.json", "[1, 2", ["Expecting"]),
        ("a.json", [4, -3], ["-3", "entry 1", "at least 1"]),
        ("a.txt", "5\n0\n", ["length 0", "entry 1"]),
        ("a.txt", "5\n2.5\n", ["2.5", "whole number"]),
        ("a.txt", "nan\n", ["nan", "whole number"]),
        ("a.json", ["x"], ["'x'", "whole number"]),
        ("a.json", [True], ["True"]),
        ("a.json", {"lengths": [1]}, ["a list of lengths", "probability", "length_tokens"]),
        ("a.json", {"probability": [0, 1], "length_tokens": [1]}, ["2 entries", "1 in length_tokens"]),
        ("a.json", {"probability": [0, 1], "length_tokens": [9, 1]}, ["length_tokens", "must not fall"]),
        ("a.json", {"probability": [0, 2], "length_tokens": [1, 9]}, ["2, above 1"]),
        ("a.json", {"probability": "x", "length_tokens": [1, 9]}, ["probability", "list of numbers"]),
        ("a.jsonl", "3\n{oops\n", ["line 2", "not JSON"]),
        ("a.jsonl", '{"body": "x"}\n', ["line 1", '"text"']),
        ("a.npy", b"not an array", ["a.npy"]),
        ("a.npy", np.ones((2, 2), int), ["flat list", "(2, 2)"]),
        ("a.txt", b"\xff\xfe\x00", ["neither text nor numbers"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, content, words):
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError) as error:
        read_lengths(path)
    for word in [name, *words]:
        assert word in str(error.value)


def test_missing_and_empty_sources_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json: no such file or folder"):
        read_lengths(tmp_path / "absent.json")
    with pytest.raises(ValueError, match=r"0 files that end with one of .*\.py"):
        read_lengths(tmp_path)
    with pytest.raises(ValueError, match=r"bytes_per_token \(0\)"):
        read_lengths(tmp_path, bytes_per_token=0)
    with pytest.raises(ValueError, match="no text in it"):
        read_lengths(written(tmp_path, "empty.txt", ""), kind="text")


# ------------------------------------------------------------------------------------------------------ what it finds


def test_a_long_tail_is_skewed_and_libra_evens_it_out():
    report = inspect(LONG_TAIL, SPEC, pools=2, micro_steps=2, steps=2)
    assert report.documents == 3000
    assert report.tokens == LONG_TAIL.sum()
    assert report.percentiles["50"] == int(np.median(LONG_TAIL))
    for share in ("documents", "tokens", "work"):
        assert sum(getattr(bucket, share) for bucket in report.buckets) == pytest.approx(1)
    ranks, pools = report.rank_imbalance, report.pool_imbalance
    assert 1 <= ranks["Libra"] < 1.15 < report.sequence_imbalance < ranks["plain CP"]
    assert report.sequence_imbalance <= ranks["Ulysses"] * 1.001
    assert 1 <= pools["bound"] <= pools["Libra"] * (1 + 1e-9)
    assert pools["Libra"] < pools["in order"]
    assert pools["Libra"] <= ranks["Libra"] * 1.001
    for name, value in ranks.items():
        assert report.seconds[name] == pytest.approx(value * report.seconds["perfect balance"])
    assert report.before.shape == report.after.shape == (2, 16)
    assert report.before.sum() == report.after.sum()  # the same sequences, only elsewhere
    assert 0.9 < report.fill <= 1
    assert report.steps == 2


def test_equal_documents_leave_nothing_to_even_out():
    pages_only = CostModel(block_seconds=0, backward_block_seconds=0)
    report = inspect(np.full(64, 2048), SPEC, pools=2, micro_steps=1, steps=2, cost=pages_only)
    assert report.sequence_imbalance == pytest.approx(1)
    assert report.pool_imbalance["in order"] == pytest.approx(1)
    # Causal: the last quarter of a sequence has 7/16 of the work.
    assert report.rank_imbalance["plain CP"] == pytest.approx(4 * 7 / 16, rel=0.02)
    assert report.cut_documents == 0


def test_work_by_length_counts_the_pieces_of_cut_documents():
    report = inspect(np.array([4096, 512, 512]), SPEC, pools=1, micro_steps=1, steps=1)
    pairs = {4096: 2 * (2048 * 2049 // 2), 512: 2 * (512 * 513 // 2)}
    assert report.cut_documents == 1
    assert [bucket.up_to for bucket in report.buckets] == [1024, 4096]
    assert report.buckets[1].work == pytest.approx(pairs[4096] / sum(pairs.values()))
    assert report.buckets[0].documents == pytest.approx(2 / 3)


def test_a_window_and_a_cost_model_change_the_work():
    windowed = inspect(LONG_TAIL, dataclasses.replace(SPEC, window=64), pools=2, steps=1)
    assert windowed.rank_imbalance["plain CP"] < inspect(LONG_TAIL, SPEC, pools=2, steps=1).rank_imbalance["plain CP"]
    slow = dataclasses.replace(CostModel(), page_seconds=2 * CostModel().page_seconds)
    ratio = inspect(LONG_TAIL, SPEC, pools=2, steps=1, cost=slow).seconds["Libra"]
    assert ratio > inspect(LONG_TAIL, SPEC, pools=2, steps=1).seconds["Libra"]


def test_a_corpus_smaller_than_a_step_is_shown_with_empty_sequences():
    report = inspect(np.array([100, 7]), SPEC, pools=2, micro_steps=1, steps=3)
    assert (report.steps, report.sequences) == (1, 1)
    assert report.rank_imbalance["Libra"] >= 1


def test_the_order_of_documents_matters_only_through_the_seed():
    first = inspect(LONG_TAIL, SPEC, pools=2, steps=1)
    assert first.as_dict() == inspect(LONG_TAIL, SPEC, pools=2, steps=1).as_dict()
    assert first.rank_imbalance != inspect(LONG_TAIL, SPEC, pools=2, steps=1, seed=1).rank_imbalance


def test_bad_steps_are_refused():
    with pytest.raises(ValueError, match=r"steps \(0\)"):
        inspect(LONG_TAIL, SPEC, steps=0)


# ------------------------------------------------------------------------------------------------------ what it shows


def options(path, **changes):
    small = {"seq_len": 2048, "pool_size": 4, "cp": 4, "pools": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return InspectOptions(path=path, **(small | {"block": 32, "steps": 1, "png": None} | changes))


def test_run_prints_tables_and_draws(tmp_path, capsys):
    path = written(tmp_path, "lengths.json", LONG_TAIL.tolist())
    assert run(options(path, png=tmp_path / "skew.png")) == 0
    shown = capsys.readouterr()
    for word in ("3,000", "median", "up to 1K", "attention work", "plain CP", "Ulysses", "Libra", "lower bound"):
        assert word in shown.out
    assert str(tmp_path / "skew.png") in shown.err
    image = matplotlib.image.imread(tmp_path / "skew.png")
    assert image.shape[0] > 500
    assert image.shape[1] > 900
    assert image[..., :3].std() > 0.05


def test_run_prints_json_alone_on_stdout(tmp_path, capsys):
    path = written(tmp_path, "lengths.npy", LONG_TAIL)
    run(options(path, json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["spec"]["seq_len"] == 2048
    assert found["documents"] == 3000
    assert set(found["rank_imbalance"]) == {"plain CP", "Ulysses", "Libra"}
    assert {"percentiles", "buckets", "pool_imbalance", "sequence_imbalance", "seconds"} <= set(found)


def test_run_reads_text_and_a_cost_model(tmp_path, capsys):
    for i in range(12):
        written(tmp_path, f"{i}.py", b"x" * (50 * i + 1))
    CostModel(page_seconds=1.0).save(tmp_path / "cost.json")
    run(options(tmp_path, cost=tmp_path / "cost.json", json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 12
    assert found["seconds"]["Libra"] > 0.01
    run(options(tmp_path))
    assert "the others are empty" in capsys.readouterr().out


def test_a_corpus_that_is_too_small_is_told_first_with_options_that_fit(tmp_path, capsys):
    lengths = np.random.default_rng(1).integers(50, 2000, 10)
    path = written(tmp_path, "lengths.npy", lengths)
    few = options(path, seq_len=4096)
    run(few)
    said = capsys.readouterr().out
    assert said.startswith("This corpus is too small for these options")
    assert f"its {lengths.sum():,} tokens fill" in said and "of the 16 slots" in said
    found = fitting(int(lengths.sum()), few)
    assert len(found) == 2
    for line in found:
        assert f"  {line}\n" in said
        words = line.partition("  ")[0].replace("--", "").replace("-", "_").split()
        fits = dataclasses.replace(few, **dict(zip(words[::2], map(int, words[1::2]), strict=True)))
        run(fits)
        assert "too small" not in capsys.readouterr().out
    run(dataclasses.replace(few, json=True))
    shown = capsys.readouterr()
    assert "too small" in shown.err
    assert json.loads(shown.out)["drawn_from_quantiles"] is False
    assert fitting(100, few) == []
    run(options(written(tmp_path, "few.txt", "7 9")))
    assert "set --cp or --block lower" in capsys.readouterr().out


def test_tables_fit_80_columns_and_say_what_was_cut_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run(options(written(tmp_path, "lengths.json", [*LONG_TAIL.tolist(), 2_000_000])))
    said = capsys.readouterr().out
    assert "(cut): 1 document is longer than a sequence" in said
    assert "│ 1M to 4M (cut) " in said and "█" * 14 in said
    assert "…" not in said and max(map(len, said.splitlines())) <= 80
    quantiles = {"probability": [0, 0.5, 1], "length_tokens": [100, 200, 5000]}
    run(options(written(tmp_path, "quantiles.json", quantiles), seed=3))
    said = capsys.readouterr().out
    assert said.startswith("100,000 document lengths drawn from the quantiles in the file, seed 3")
    assert "documents are longer than a sequence" in " ".join(said.split())


def test_run_refuses_with_a_message(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        run(options(tmp_path / "absent"))
    with pytest.raises(ValueError, match="multiple of cp"):
        run(options(tmp_path, seq_len=1000))
    path = written(tmp_path, "lengths.txt", "4 5 six")
    with pytest.raises(ValueError, match=r"lengths\.txt: line 1: 'six'"):
        run(options(path))


def test_lengths_are_named_shortly():
    assert [short(n) for n in (16, 1024, 4096, 2**18, 2**20, 3 * 2**19)] == ["16", "1K", "4K", "256K", "1M", "1.5M"]
    buckets = inspect(LONG_TAIL, SPEC, pools=2, steps=1).buckets
    assert bucket_names(buckets) == ["up to 1K", "1K to 4K"]


def test_picture_of_work_per_rank(tmp_path):
    work = np.array([[4.0, 1, 1, 2], [0, 3, 1, 1]])
    work_per_rank_png(tmp_path / "work.png", work, np.full((2, 4), 13 / 8), "Work")
    image = matplotlib.image.imread(tmp_path / "work.png")[..., :3]
    reds = (image[..., 0] > image[..., 2] + 0.3).sum()
    blues = (image[..., 2] > image[..., 0] + 0.3).sum()
    assert reds > 5000
    assert blues > 5000
    work_per_rank_png(tmp_path / "idle.png", np.zeros((1, 4)), np.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(1, 4\)"):
        work_per_rank_png(tmp_path / "bad.png", work, np.zeros((1, 4)))
