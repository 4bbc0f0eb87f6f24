"""`libra prepare`: what it makes of every kind of input, against the same files read by plain Python; what it refuses;
and that an interrupted run ends with the same bytes as one that was left alone."""

import base64
import gzip
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra_jax import cli
from libra_jax.data import prepare_progress
from libra_jax.data.prepare import PrepareOptions, PrepareStopped, prepare, run
from libra_jax.data.tokenization import Tokenizer

# --- inputs, and what plain Python reads in them


def write(path: Path, texts: list[str]) -> None:
    """A file of the kind that its name says; a text file holds one text."""
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    if path.name.endswith(".parquet"):
        pq.write_table(
            pa.table({"text": pa.array(texts, pa.string()), "id": range(len(texts))}), path, row_group_size=3
        )
    elif path.name.endswith(".txt"):
        path.write_bytes("".join(texts).encode())
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines, mtime=0))
    elif path.name.endswith(".zst"):
        path.write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    else:
        path.write_bytes(lines)


def stored(folder: Path) -> list[list[int]]:
    """Tokens of every document, by the libraries alone."""
    manifest = json.loads((folder / "manifest.json").read_text())
    records = []
    for shard in manifest["shards"]:
        reader = ArrayRecordReader(str(folder / shard["name"]))
        records += reader.read_all() if reader.num_records() else []
    tokens = [np.frombuffer(record, f"<{np.dtype(manifest['dtype']).str[1:]}").tolist() for record in records]
    assert np.load(folder / "lengths.npy").tolist() == [len(document) for document in tokens]
    return tokens


def texts_in(folder: Path) -> list[str]:
    """Of a folder of byte tokens."""
    documents = stored(folder)
    assert all(tokens[-1] == 256 for tokens in documents)
    return [bytes(tokens[:-1]).decode() for tokens in documents]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def options(out: Path, **changes: object) -> PrepareOptions:
    return PrepareOptions(**{"tokenizer": "bytes", "out": out, "workers": 1, **changes})


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["", "a", "again", "again", "\n", "é\u2028\x00\ud7ff😀", "x" * 5000]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    ),
    max_size=8,
)
KINDS = ("a.jsonl", "b.json", "c.jsonl.gz", "d.jsonl.zst", "e.parquet", "f.txt", "g.txt")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(KINDS), TEXTS), min_size=1, max_size=5), st.sampled_from([1, 50, 2**20]))
def test_every_text_of_every_kind_of_input_in_order(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, list[str]]], shard_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    paths, expected, records = [], [], 0
    for i, (name, texts) in enumerate(files):
        paths.append(folder / f"{i}{name}")
        write(paths[-1], texts)
        whole = ["".join(texts)] if name.endswith(".txt") else texts
        expected += [text for text in whole if text]
        records += len(whole)
    out = folder / "out"
    if not expected:
        with pytest.raises(PrepareStopped, match="nothing to make"):
            prepare(paths, options(out, shard_tokens=shard_tokens))
        assert not out.exists() and not Path(f"{out}.unfinished").exists()
        return
    manifest = prepare(paths, options(out, shard_tokens=shard_tokens))
    assert texts_in(out) == expected
    assert (manifest.records, manifest.left_out) == (records, {"empty": records - len(expected), "bad": {}})
    lengths = [len(text.encode()) + 1 for text in expected]
    assert (manifest.documents, manifest.tokens, manifest.longest) == (len(lengths), sum(lengths), max(lengths))
    assert not Path(f"{out}.unfinished").exists()
    if shard_tokens == 1:
        assert len(manifest.shards) >= len(expected) / 2


def test_folders_are_walked_by_name_and_what_is_passed_over_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b/2.txt", "b/10.md", "a.py", "c.jsonl", ".hidden.txt", ".git/x.txt", "image.png", "d.txt.gz"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"in {name}"
        path.write_bytes(json.dumps({"text": text}).encode() if name == "c.jsonl" else text.encode())
    (tmp_path / "in/d.txt.gz").write_bytes(gzip.compress(b"in d.txt.gz"))
    prepare([tmp_path / "in"], options(tmp_path / "out"))
    assert texts_in(tmp_path / "out") == [
        f"in {name}" for name in ("a.py", "b/10.md", "b/2.txt", "c.jsonl", "d.txt.gz")
    ]
    capsys.readouterr()
    run([tmp_path / "in"], options(tmp_path / "out"))
    assert "1 files in the named folders are passed over" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no file in this folder ends with one of \.xml; 6 end otherwise"):
        prepare([tmp_path / "in"], options(tmp_path / "xml", suffixes=(".xml",)))
    (tmp_path / "in/c.jsonl").rename(tmp_path / "in/C.JSONL")
    (tmp_path / "in/d.txt.gz").rename(tmp_path / "in/D.Txt.GZ")
    prepare([tmp_path / "in"], options(tmp_path / "capitals"))
    assert sorted(texts_in(tmp_path / "capitals")) == sorted(texts_in(tmp_path / "out"))
    prepare([tmp_path / "in/image.png", tmp_path / "in/a.py"], options(tmp_path / "named"))
    assert texts_in(tmp_path / "named") == ["in image.png", "in a.py"]


@pytest.mark.parametrize("pack", [None, "gzip", "zstd"])
def test_lines_of_every_shape(tmp_path: Path, pack: str | None) -> None:
    long = "long " * 60_000
    lines = [b"\xef\xbb\xbf" + json.dumps({"text": "first"}).encode() + b"\r\n", b"\n", b"  \r\n"]
    lines += [json.dumps({"text": long}).encode() + b"\n", b'{"text": "a\\nb"}\n', b"\n", b'{"text": "last"}']
    path = tmp_path / f"x.jsonl{ {None: '', 'gzip': '.gz', 'zstd': '.zst'}[pack] }"
    path.write_bytes(b"".join(lines) if pack is None else pa.compress(b"".join(lines), codec=pack, asbytes=True))
    text = tmp_path / "y.txt"
    text.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    for shard_tokens in (8, 2**20):
        out = tmp_path / f"out{shard_tokens}"
        manifest = prepare([path, text], options(out, shard_tokens=shard_tokens))
        assert texts_in(out) == ["first", long, "a\nb", "last", "one\r\ntwo"]
        assert manifest.records == 5


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.binary()]
)
def test_text_columns_of_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["zwei", "ö", "zwei", ""]
    column = pa.array([text.encode() for text in texts], kind) if kind == pa.binary() else pa.array(texts).cast(kind)
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "body": column}), tmp_path / "x.parquet")
    prepare([tmp_path / "x.parquet"], options(tmp_path / "out", text_column="body"))
    assert texts_in(tmp_path / "out") == ["zwei", "ö", "zwei"]


def test_the_same_bytes_from_any_number_of_workers(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [f"document {i} " * (i % 50) for i in range(3000)])
    write(tmp_path / "b.parquet", ["x" * 70_000, *map(str, range(500))])
    results = []
    for workers in (1, 2, 3):
        prepare(
            [tmp_path], options(tmp_path.parent / f"{tmp_path.name}-{workers}", workers=workers, shard_tokens=200_000)
        )
        results.append(contents(tmp_path.parent / f"{tmp_path.name}-{workers}"))
    assert results[0] == results[1] == results[2]
    assert len([name for name in results[0] if name.endswith(".array_record")]) > 3


def test_manifest_and_summary_say_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl", ["x" * (2**15 - 1), "x" * 2**15, "x" * 2**17, "", ""])
    assert run([tmp_path / "a.jsonl"], options(tmp_path / "out")) == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    tokens = 2**15 + 2**15 + 1 + 2**17 + 1
    assert manifest["sequences"] == {
        "32768": {"sequences": 7, "fill": 0.8572, "longer_documents": 2},  # pieces of 1 token lie together
        "131072": {"sequences": 2, "fill": 0.75, "longer_documents": 1},
        "262144": {"sequences": 1, "fill": 0.75, "longer_documents": 0},
        "1048576": {"sequences": 1, "fill": 0.1875, "longer_documents": 0},
    }
    assert manifest["tokens"] == tokens and manifest["left_out"] == {"empty": 2, "bad": {}}
    printed = capsys.readouterr().out
    assert f"3 documents, {tokens:,} tokens, the longest {2**17 + 1:,}" in printed
    assert "of 5 records 2 are empty" in printed and "passed over" not in printed


# --- tokenizers


def bpe(path: Path, special: str = "<|endoftext|>") -> Path:
    """A byte-level BPE tokenizer of Hugging Face's library, with everything on that must be switched off."""
    import tokenizers as tk

    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    alphabet = tk.pre_tokenizers.ByteLevel.alphabet()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["[CLS]", special, "[PAD]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the cat and the hat"] * 3, trainer)
    tokenizer.post_processor = tk.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=2, pad_token="[PAD]")
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_takes_documents_whole_and_gives_them_back(tmp_path: Path) -> None:
    import tokenizers as tk

    file = bpe(tmp_path / "tokenizer.json")
    texts = ["the cat sat on the mat " * 40, "ä😀\u2028 <|endoftext|> and [CLS]", "a"]
    write(tmp_path / "a.jsonl", texts)
    manifest = prepare([tmp_path / "a.jsonl"], options(tmp_path / "out", tokenizer=str(file), workers=2))
    library = tk.Tokenizer.from_file(str(file))
    library.no_truncation()
    library.no_padding()
    documents = stored(tmp_path / "out")
    assert documents[0] == [*library.encode(texts[0], add_special_tokens=False).ids, 1]
    assert 1 not in documents[1][:-1] and 0 not in documents[1]  # spelled out in a text, they are text
    assert [library.decode(tokens[:-1], skip_special_tokens=False) for tokens in documents] == texts
    ours = Tokenizer.open(str(tmp_path / "out/tokenizer.json"))
    assert [ours.decode(np.array(tokens)) for tokens in documents] == texts
    assert (tmp_path / "out/tokenizer.json").read_bytes() == file.read_bytes()
    assert manifest.tokenizer["vocab_size"] == library.get_vocab_size() and manifest.tokenizer["end_of_document"] == 1
    prepare([tmp_path / "a.jsonl"], options(tmp_path / "parsed", tokenizer=str(file), parse_special_tokens=True))
    assert stored(tmp_path / "parsed")[1].count(1) == 2 and stored(tmp_path / "parsed")[1].count(0) == 1


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["a"])
    file, other = bpe(tmp_path / "t.json"), bpe(tmp_path / "other.json", special="[SEP]")
    (tmp_path / "no.json").write_text('{"a": 1}')
    for changes, message in (
        ({"tokenizer": str(other)}, "has none of <|endoftext|>, </s>, <|end_of_text|>, <eos>: name the token"),
        ({"tokenizer": str(file), "end_of_document": "</s>"}, "'</s>' is not among the 276 tokens of"),
        ({"tokenizer": "bytes", "end_of_document": "</s>"}, "ends a document with its own token 256"),
        ({"tokenizer": str(tmp_path / "no.json")}, "is not a tokenizer.json"),
        ({"tokenizer": str(tmp_path / "gone.json")}, "there is no file"),
        ({"tokenizer": str(tmp_path)}, "is a folder; name the file"),
        ({"on_error": "other"}, r"--on-error \(other\) must be stop or skip"),
        ({"workers": 0}, r"--workers \(0\)"),
        ({"shard_tokens": 0}, r"--shard-tokens \(0\)"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message.replace("|", r"\|")):
            prepare([tmp_path / "a.jsonl"], options(tmp_path / "out", **changes))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "no.json", "other.json", "t.json"]
    prepare([tmp_path / "a.jsonl"], options(tmp_path / "out", tokenizer=str(other), end_of_document="[SEP]"))
    assert stored(tmp_path / "out")[0][-1] == 1


def test_a_text_that_the_tokenizer_gives_up_on_is_named(tmp_path: Path) -> None:
    import tokenizers as tk

    tokenizer = tk.Tokenizer(tk.models.WordLevel({"a": 0, "b": 1, "</s>": 2}))  # no token for unknown words
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    write(tmp_path / "a.jsonl", ["a b", "a c", "   ", "b"])
    asked = options(tmp_path / "out", tokenizer=str(tmp_path / "t.json"), on_error="skip")
    manifest = prepare([tmp_path / "a.jsonl"], asked)
    assert stored(tmp_path / "out") == [[0, 1, 2], [1, 2]]
    assert manifest.left_out == {"empty": 1, "bad": {"the tokenizer failed": 1}}
    problem = json.loads((tmp_path / "out/problems.jsonl").read_text())
    assert (problem["unit"], problem["number"]) == ("line", 2)


def test_a_tokenizer_that_panics_is_refused_or_its_texts_are_named(tmp_path: Path) -> None:
    """The library's panics are no Exception."""
    content = json.loads(bpe(tmp_path / "t.json").read_text())
    write(tmp_path / "a.jsonl", ["a b"])
    for charsmap, message in (
        (b"?", "t.json is not a tokenizer.json of Hugging Face: .*precompiled_charsmap"),
        (b"\x08\x00\x00\x00" + b"\xff" * 8, "a.jsonl, line 1: the tokenizer failed .*out of bounds"),
    ):
        content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
        (tmp_path / "t.json").write_text(json.dumps(content))
        with pytest.raises((ValueError, PrepareStopped), match=message):
            prepare([tmp_path / "a.jsonl"], options(tmp_path / "out", tokenizer=str(tmp_path / "t.json")))


# --- what cannot be read


BAD_LINES = [
    (b"{not json", "not JSON"),
    (b'{"text": 1} {}', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'["text"]', "not a JSON object"),
    (b'{"txt": "a", "id": 1}', "no text column"),
    (b"{}", "no text column"),
    (b'{"text": null}', "text is not a string"),
    (b'{"text": ["a"]}', "text is not a string"),
    (b'{"text": "\xff\xfe"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "not Unicode"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=lambda value: str(value)[:20])
def test_a_bad_line_stops_the_run_or_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": ""}\n{"text": "two"}')
    with pytest.raises(PrepareStopped, match=f"a.jsonl, line 3: {reason}.*\n.*--on-error skip"):
        prepare([path], options(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    manifest = prepare([path], options(tmp_path / "out", on_error="skip"))
    assert texts_in(tmp_path / "out") == ["one", "two"]
    assert (manifest.records, manifest.left_out) == (4, {"empty": 1, "bad": {reason: 1}})
    assert f"left out: {path}, line 3: {reason}" in capsys.readouterr().err
    problem = json.loads((tmp_path / "out/problems.jsonl").read_text())
    assert (problem["file"], problem["unit"], problem["number"]) == (str(path), "line", 3)
    with pytest.raises(ValueError, match="made with --on-error skip: 1 records are left out"):
        prepare([path], options(tmp_path / "out"))


def test_bad_rows_and_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invalid = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffb"))
    pq.write_table(pa.table({"text": invalid}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"body": ["a"] * 7}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_bytes(b"\xff\xfea\x00")
    pq.write_table(pa.table({"body": pa.array([], pa.string())}), tmp_path / "f.parquet")
    write(tmp_path / "g.jsonl", ["the end"])
    twice = [pa.array(["a", "b"]), pa.array(["c", "d"]), pa.array([1, 2])]
    pq.write_table(pa.Table.from_arrays(twice, names=["text", "text", "n"]), tmp_path / "h.parquet")
    pq.write_table(pa.Table.from_arrays(twice, names=["n", "n", "m"]), tmp_path / "i.parquet")
    file = bpe(tmp_path.parent / "tokenizer-of-bad-rows.json")
    out = tmp_path.parent / "bad-rows"
    manifest = prepare([tmp_path], options(out, tokenizer=str(file), on_error="skip"))
    bad = {"not UTF-8": 2, "text is not a string": 1, "no text column": 9, "text column holds no strings": 2}
    bad["two text columns"] = 2
    assert manifest.left_out == {"empty": 0, "bad": bad}
    assert (manifest.documents, manifest.records) == (5, 21)
    problems = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    named = [(Path(problem["file"]).name, problem["unit"], problem["number"]) for problem in problems]
    assert named == [
        ("a.parquet", "row", 1), ("b.parquet", "row", 1), ("c.parquet", None, None), ("d.parquet", None, None),
        ("e.txt", None, None), ("h.parquet", None, None), ("i.parquet", None, None),
    ]  # fmt: skip
    assert "there are body (string)" in problems[2]["detail"]
    assert "2 are named 'text', and one must be" in problems[5]["detail"]
    prepare([tmp_path / "e.txt"], options(tmp_path / "as-bytes"))
    assert stored(tmp_path / "as-bytes") == [[0xFF, 0xFE, ord("a"), 0, 256]]
    for i in range(20):
        (tmp_path / f"{i}.jsonl").write_text("?\n" * 5)
    capsys.readouterr()
    prepare([*tmp_path.glob("*.jsonl")], options(tmp_path / "many", on_error="skip"))
    err = capsys.readouterr().err
    assert err.count("left out: ") == 6 and "left out: more, which are counted at the end" in err
    assert len((tmp_path / "many/problems.jsonl").read_text().splitlines()) == 100


def broken_files(folder: Path) -> list[tuple[str, bytes | None, int]]:
    """(name, content, least records that are still to be had) of files that break off."""
    texts = [f"line {i} {random.Random(i).random()}" for i in range(20_000)]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    packed, zstd = gzip.compress(lines), pa.compress(lines, codec="zstd", asbytes=True)
    rows = pa.table({"text": [f"row {i}" for i in range(300)]})
    pq.write_table(rows, folder / "p", row_group_size=100, compression="none")
    parquet = (folder / "p").read_bytes()
    at = parquet.rindex(b"row 250") - 60
    (folder / "p").unlink()
    return [
        ("a.jsonl.gz", packed[:-100], 15_000),
        ("a.jsonl.zst", zstd[: len(zstd) * 9 // 10], 10_000),
        ("b.jsonl.gz", b"this is not gzip", 0),
        ("c.parquet", parquet[:-50], 0),
        ("d.parquet", parquet[:at] + b"\xff" * 40 + parquet[at + 40 :], 200),
        ("e.jsonl", None, 0),
        ("f.txt", None, 0),
        ("g.txt.gz", packed[:-100], 0),
        ("h.txt.gz", b"", 0),
        ("i.jsonl.zst", b"", 0),
    ]


@pytest.mark.parametrize("index", range(10))
def test_a_stream_that_breaks_off_is_named_and_what_came_before_is_kept(tmp_path: Path, index: int) -> None:
    name, content, least = broken_files(tmp_path)[index]
    path = tmp_path / name
    if content is None:
        path.symlink_to("/proc/self/mem")  # reading its beginning is an I/O error, for root as well
    else:
        path.write_bytes(content)
    write(tmp_path / "z.jsonl", ["the end"])
    inputs = [path, tmp_path / "z.jsonl"]
    why = "" if content else ".*it is empty, not even a header" if content == b"" else ".*Input/output error"
    with pytest.raises(PrepareStopped, match=f"{name}: cannot be read further .after {why}"):
        prepare(inputs, options(tmp_path / "out"))
    manifest = prepare(inputs, options(tmp_path / "out", on_error="skip", shard_tokens=2**30))
    texts = texts_in(tmp_path / "out")
    unit = "row" if "parquet" in name else "line"
    assert texts[-1] == "the end" and len(texts) > least
    assert all(text.startswith(f"{unit} {i}") for i, text in enumerate(texts[:-1]))
    lost = 300 - len(texts[:-1]) if name == "d.parquet" else 1
    assert manifest.left_out["bad"] == {"cannot be read further": lost}
    prepare(inputs, options(tmp_path / "small", on_error="skip", shard_tokens=20_000))
    assert texts_in(tmp_path / "small") == texts  # what is kept does not depend on where batches are cut


# --- what is refused before anything runs


def test_inputs_that_are_not_there_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in.jsonl", ["a"])
    (tmp_path / "empty/.hidden").mkdir(parents=True)
    (tmp_path / "empty/.hidden/x.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    (tmp_path / "has-link").mkdir()
    (tmp_path / "has-link/x.PARQUET").symlink_to("nowhere")
    out = ["--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    for inputs, message in (
        ([], "no INPUT"),
        (["in.jsonl", "gone.jsonl"], "gone.jsonl: no such file or folder"),
        (["empty"], "empty: no file in this folder ends with one of .jsonl, .json, .parquet, .py"),
        (["in.jsonl", "./in.jsonl"], "would be read twice"),
        (["pipe.jsonl"], "pipe.jsonl is a pipe, a socket or a device"),
        (["/dev/null"], "/dev/null is a pipe, a socket or a device"),
        (["link.jsonl"], "link.jsonl is a link to nothing"),
        (["has-link"], "has-link/x.PARQUET is a link to nothing"),
        (["empty", "."], "empty: no file in this folder"),
        (["."], "is a link to nothing"),
    ):
        assert cli.main(["prepare", *(str(tmp_path / name) for name in inputs), *out]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    left = ["empty", "has-link", "in.jsonl", "link.jsonl", "pipe.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    for name in left[1], left[3], left[4]:
        os.rename(tmp_path / name, tmp_path / f"empty/.hidden/{name}")
    assert cli.main(["prepare", str(tmp_path), *out]) == 2
    assert "is inside the input folder" in capsys.readouterr().err


def test_names_that_are_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / os.fsdecode(b"in\xff")
    folder.mkdir()
    for i, name in enumerate(KINDS):
        write(tmp_path / name, [name, "more"])
        (tmp_path / name).rename(folder / os.fsdecode(b"%d\xfe" % i + os.fsencode(name)))
    write(tmp_path / "x.txt.gz", ["?"])
    (tmp_path / "x.txt.gz").rename(folder / os.fsdecode(b"x\xff.txt.gz"))
    (folder / os.fsdecode(b"y\xff.jsonl")).write_text("?")
    (folder / os.fsdecode(b"z\xff.zst")).write_text("?")
    expected = [text for name in KINDS[:5] for text in (name, "more")] + [f"{name}more" for name in KINDS[5:]]
    file = os.fsdecode(b"t\xff.json")
    bpe(tmp_path / "t.json").rename(tmp_path / file)
    for workers, tokenizer in ((1, "bytes"), (2, "bytes"), (2, str(tmp_path / file))):
        out = tmp_path / f"out-{workers}-{len(tokenizer)}"
        asked = options(out, tokenizer=tokenizer, workers=workers, on_error="skip", shard_tokens=1)
        assert run([folder], asked) == 0 and run([folder], asked) == 0
        if tokenizer == "bytes":
            assert [text for text in texts_in(out) if "?" not in text] == expected
        problem = json.loads((out / "problems.jsonl").read_text())
        assert os.fsencode(problem["file"]).endswith(b"in\xff/y\xff.jsonl")
        listed = [json.loads(line)["path"] for line in (out / "inputs.jsonl").read_text().splitlines()]
        assert set(listed) == {str(path) for path in folder.iterdir() if not path.name.startswith("z")}
    assert capsys.readouterr().out.encode()
    with pytest.raises(ValueError, match=r"--out .*no\\xff.* must be UTF-8"):
        prepare([folder], options(tmp_path / os.fsdecode(b"no\xff")))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("no")]


def test_where_nothing_is_left_no_list_of_it_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("?\n" * 9 + "[]\n\n")
    args = ["prepare", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert cli.main([*args, "--on-error", "skip", "--workers", "1"]) == 1
    err = capsys.readouterr().err
    assert "problems.jsonl" not in err and err.count("left out: ") == 6
    assert "of 10 records 0 are empty and 10 cannot be read (9: not JSON, 1: not a JSON object)" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_command_makes_a_folder_finds_it_again_and_refuses_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.jsonl", ["a", "b"])
    write(tmp_path / "b.jsonl", ["c"])
    out = tmp_path / "out"
    args = ["prepare", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--out", str(out), "--workers", "1"]
    assert cli.main(args) == 0
    assert "2 documents, 4 tokens" in capsys.readouterr().out
    made = contents(out)
    Path(f"{out}.unfinished").mkdir()  # of a run that was stopped at its very end
    assert cli.main([*args, "--workers", "2"]) == 0
    captured = capsys.readouterr()
    assert "already prepared" in captured.err and "2 documents, 4 tokens" in captured.out
    assert not Path(f"{out}.unfinished").exists()
    os.utime(tmp_path / "b.jsonl", ns=(5, 5))
    for changed, message in (
        ([*args, "--text-column", "body"], "text column was 'text' and is 'body' now"),
        ([*args, "--shard-tokens", "7"], "shard tokens was 268435456 and is 7 now"),
        ([*args, "--tokenizer", str(bpe(tmp_path / "t.json"))], "tokenizer name was 'bytes' and is 't.json' now"),
        ([*args[:2], str(tmp_path / "b.jsonl"), *args[2:]], "there were 1 input files and there are 2 now"),
        ([args[0], str(tmp_path / "b.jsonl"), *args[2:]], "a.jsonl and is"),
    ):
        assert cli.main(changed) == 2
        assert message in capsys.readouterr().err
    os.utime(tmp_path / "a.jsonl", ns=(7, 7))
    assert cli.main(args) == 2
    assert "the time of its last change was" in capsys.readouterr().err
    write(tmp_path / "a.jsonl", ["longer than it was"])
    assert cli.main(args) == 2
    assert "its size was" in capsys.readouterr().err
    assert contents(out) == made
    other = tmp_path / "other"
    other.mkdir()
    assert cli.main([*args[:-3], str(other)]) == 2
    assert "was not made by `libra prepare`" in capsys.readouterr().err


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        cli.main(["prepare", "--help"])
    printed = capsys.readouterr().out
    assert exit_status.value.code == 0
    for words in ("INPUT...", "--tokenizer", "--out", "--on-error {stop,skip}", "the same command goes on"):
        assert words in printed


def test_progress_has_an_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(prepare_progress, "_LINE_SECONDS", 0.0)
    write(tmp_path / "a.jsonl", ["x" * 10_000] * 300)
    prepare([tmp_path / "a.jsonl"], options(tmp_path / "out", shard_tokens=400_000))
    line = capsys.readouterr().err.splitlines()[30]
    assert line.startswith("1 of 3 MB, ") and " tokens, " in line and line.endswith(" s left")
