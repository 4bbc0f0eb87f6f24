"""The reader of prepared folders: the tokens that are in the text, and every kind of damage refused by name."""

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.data import prepared
from libra_jax.data.prepare import PrepareOptions, prepare, summary
from libra_jax.data.prepared import Manifest, PreparedDocuments

TEXTS = [f"{i} " * (i % 40) + "é" for i in range(200)] + ["giant " * 20_000] + ["", "a"] * 10
TOKENS = [[*text.encode(), 256] for text in TEXTS if text]  # by hand: the bytes of the text, and the end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepared")
    (path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare([path / "a.jsonl"], PrepareOptions("bytes", path / "out", workers=1, shard_tokens=2000))
    assert len(list((path / "out").glob("*.array_record"))) >= 5
    return path / "out"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def read(documents: PreparedDocuments, pieces: list[tuple[int, int, int]]) -> list[int]:
    document, start, length = np.array(pieces, np.int64).reshape(-1, 3).T
    out = np.full(length.sum(), -1, np.int32)
    documents.read(document, start, length, out)
    return out.tolist()


def whole(documents: PreparedDocuments) -> list[int]:
    return read(documents, [(i, 0, n) for i, n in enumerate(documents.lengths.tolist())])


@settings(deadline=None)
@given(st.data())
def test_pieces_are_those_of_the_text(folder: Path, data: st.DataObject) -> None:
    documents = PreparedDocuments.open(folder)
    pieces = []
    for document in data.draw(st.lists(st.integers(0, len(TOKENS) - 1), max_size=30)):
        start = data.draw(st.integers(0, len(TOKENS[document])))
        pieces.append((document, start, data.draw(st.integers(0, len(TOKENS[document]) - start))))
    assert read(documents, pieces) == [token for i, at, n in pieces for token in TOKENS[i][at : at + n]]


def test_what_a_source_of_documents_says(folder: Path, copy: Path) -> None:
    documents = PreparedDocuments.open(folder)
    assert documents.lengths.tolist() == [len(tokens) for tokens in TOKENS] and len(documents) == len(TOKENS)
    assert isinstance(documents.lengths, np.memmap) and documents.lengths.dtype == np.uint32
    assert (documents.tokenizer, documents.vocab_size) == ("bytes", 257)
    count = sum(map(len, TOKENS))
    assert f"{len(TOKENS)} documents, {count:,} tokens" in documents.describe() and str(folder) in documents.describe()
    assert PreparedDocuments.open(copy).fingerprint == documents.fingerprint


def test_fingerprints_differ_where_tokens_their_order_or_their_documents_do(tmp_path: Path) -> None:
    found = set()
    for i, texts in enumerate((["ab", "c"], ["c", "ab"], ["ab", "d"], ["a", "bc"], ["ab"])):
        (tmp_path / f"{i}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        prepare([tmp_path / f"{i}.jsonl"], PrepareOptions("bytes", tmp_path / str(i), workers=1))
        found.add(PreparedDocuments.open(tmp_path / str(i)).fingerprint)
    assert len(found) == 5


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(len(TOKENS), 0, 1)], f"document {len(TOKENS)} was asked for, but they are 0 to {len(TOKENS) - 1}"),
        ([(-1, 0, 1)], "document -1 was asked for"),
        ([(0, 0, 1), (1, 2, 4)], f"tokens 2 to 6 of document 1 were asked for, but it has {len(TOKENS[1])}"),
        ([(0, -1, 1)], "tokens -1 to 0 of document 0"),
    ],
)
def test_pieces_outside_are_refused(folder: Path, pieces: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(PreparedDocuments.open(folder), pieces)
    with pytest.raises(ValueError, match="out must be int32 of shape"):
        PreparedDocuments.open(folder).read(np.array([0]), np.array([0]), np.array([2]), np.empty(1, np.int32))


# --- damage


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_lengths(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    np.save(path, change(np.load(path).copy()))


def shard(folder: Path, index: int = 1) -> Path:
    return sorted(folder.glob("*.array_record"))[index]


def shift(lengths: np.ndarray) -> np.ndarray:
    lengths[3] += 1
    return lengths


def npz_as_lengths(folder: Path) -> None:
    with (folder / "lengths.npy").open("wb") as file:
        np.savez(file, lengths=np.ones(211, np.uint32))


def edit_shard(folder: Path, **changes: object) -> None:
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    edit(folder / "manifest.json", shards=[{**shards[0], **changes}, *shards[1:]])


def swap(lengths: np.ndarray) -> np.ndarray:
    lengths[2:4] += np.array([1, -1], np.int32).astype(np.uint32)  # the same sum
    return lengths


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: no such file, so this is no folder made by"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is not a manifest"),
    (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is not a manifest"),
    (lambda folder: edit(folder / "manifest.json", version=7), "version 7, must be 'libra-prepared' version 1"),
    (lambda folder: edit(folder / "manifest.json", format="x"), "format 'x' version 1, must be"),
    (lambda folder: edit(folder / "manifest.json", documents=3), "damaged: 3 documents, its shards have 211"),
    (lambda folder: edit(folder / "manifest.json", fingerprint="x"), "damaged: fingerprint x, its shards give"),
    (lambda folder: edit(folder / "manifest.json", shards=[{}]), "damaged"),
    (lambda folder: edit(folder / "manifest.json", longest=None), "damaged: longest is None, and must be of type int"),
    (lambda folder: edit(folder / "manifest.json", documents=True), "damaged: documents is True"),
    (lambda folder: edit(folder / "manifest.json", tokens="many"), "damaged: tokens is 'many'"),
    (lambda folder: edit(folder / "manifest.json", tokenizer={}), "damaged: tokenizer: name is missing"),
    (
        lambda folder: edit(folder / "manifest.json", left_out={"empty": 0, "bad": [1]}),
        r"damaged: left_out: bad is \[1",
    ),
    (
        lambda folder: edit(folder / "manifest.json", sequences={"8": {}}),
        "damaged: sequences of 8 tokens: sequences is",
    ),
    (lambda folder: edit(folder / "manifest.json", shards=None), "damaged: shards must be a list"),
    (lambda folder: edit(folder / "manifest.json", more=1), "damaged: .*'more'"),
    (lambda folder: edit_shard(folder, name=7), "damaged: name is 7, and must be of type str"),
    (lambda folder: edit_shard(folder, name="../x"), "damaged: shard '../x' must be the name of a file"),
    (lambda folder: edit_shard(folder, bytes=None), "damaged: bytes is None"),
    (lambda folder: edit_shard(folder, bytes=-1), "damaged: bytes is -1"),
    (lambda folder: (folder / "lengths.npy").unlink(), "lengths.npy: no such file; it holds the tokens of 211"),
    (lambda folder: os.truncate(folder / "lengths.npy", 300), "lengths.npy is damaged"),
    (lambda folder: os.truncate(folder / "lengths.npy", 5), "lengths.npy is damaged"),
    (npz_as_lengths, "lengths.npy is damaged"),
    (lambda folder: (folder / "lengths.npy").write_bytes(b"PK\x03\x04"), "lengths.npy is damaged"),
    (
        lambda folder: edit_lengths(folder / "lengths.npy", swap),
        r"lengths.npy is damaged: its lengths of documents-00000-of-\d+.array_record have the sha256 \w{16}.* says \w",
    ),
    (lambda folder: edit_lengths(folder / "lengths.npy", lambda x: x[1:]), r"shape \(210,\), the manifest .*\(211,\)"),
    (lambda folder: edit_lengths(folder / "lengths.npy", np.float32), "holds float32 .* the manifest says uint32"),
    (lambda folder: edit_lengths(folder / "lengths.npy", shift), r"lengths.npy: [\d,]+ tokens in documents-00000-of-"),
    (lambda folder: shard(folder).unlink(), r"documents-00001-of-\d+.array_record: no such file"),
    (
        lambda folder: os.truncate(shard(folder), 999),
        r"documents-00001-of-\d+.array_record has 999 bytes, the man.*says",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message[:30] for _, message in DAMAGE])
def test_a_damaged_folder_does_not_open(copy: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        PreparedDocuments.open(copy)


def test_a_folder_that_is_not_finished_says_so(copy: Path) -> None:
    copy.rename(copy.with_name("x.unfinished"))
    with pytest.raises(FileNotFoundError, match=r"x\.unfinished is there: start its `libra prepare` again"):
        PreparedDocuments.open(copy.with_name("x"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_other_value_anywhere_in_a_manifest_is_a_value_error_or_is_not_read(
    folder: Path, data: st.DataObject
) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    at, inside, key = content, content, ""
    while isinstance(at, dict | list) and at:
        inside, key = at, data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        at = inside[key]
        if data.draw(st.booleans()):
            break
    inside[key] = data.draw(st.sampled_from([None, [], {}, "x", -1, 1.5, 10**30, True, [None], {"a": None}]))
    with tempfile.TemporaryDirectory() as other:
        for path in folder.iterdir():
            os.symlink(path, Path(other, path.name))
        Path(other, "manifest.json").unlink()
        Path(other, "manifest.json").write_text(json.dumps(content))
        try:
            documents = PreparedDocuments.open(other)
        except (ValueError, FileNotFoundError) as error:
            assert other in str(error)
        else:
            assert documents.describe() and summary(documents.manifest, Path(other))
            assert whole(documents) == [token for tokens in TOKENS for token in tokens]


def test_a_record_of_another_length_is_refused_when_read(copy: Path) -> None:
    edit_lengths(copy / "lengths.npy", swap)
    manifest = Manifest.load(copy)
    first = manifest.shards[0]
    sha256 = hashlib.sha256(np.load(copy / "lengths.npy")[: first.documents].tobytes()).hexdigest()
    shards = (dataclasses.replace(first, lengths_sha256=sha256), *manifest.shards[1:])
    fingerprint = prepared.fingerprint_of(manifest.tokenizer, manifest.dtype, shards)
    dataclasses.replace(manifest, shards=shards, fingerprint=fingerprint).save(copy / "manifest.json")
    documents = PreparedDocuments.open(copy)
    size = 2 * len(TOKENS[2])
    message = rf"documents-00000-of-.*record 2 \(document 2\) has {size} bytes, and must have {size + 2}"
    with pytest.raises(ValueError, match=message):
        whole(documents)


def test_another_shard_of_the_same_size_is_refused_when_read(copy: Path) -> None:
    size = shard(copy).stat().st_size
    writer = ArrayRecordWriter(str(shard(copy)), "group_size:1,zstd:1")
    writer.write(b"ab")
    writer.close()
    assert shard(copy).stat().st_size == size  # ArrayRecord's blocks are of 64 KiB
    with pytest.raises(ValueError, match=r"documents-00001-of.* has 1 records, the manifest says \d+ documents"):
        whole(PreparedDocuments.open(copy))
    shard(copy).write_bytes(os.urandom(size))
    with pytest.raises(ValueError, match=r"documents-00001-of.* (has 0 records|cannot be read)"):
        whole(PreparedDocuments.open(copy))


def test_a_flipped_bit_never_gives_other_tokens(copy: Path) -> None:
    rng = np.random.default_rng(0)
    expected = [token for tokens in TOKENS for token in tokens]
    path = shard(copy)
    content = path.read_bytes()
    refused = 0
    for at in rng.choice(np.flatnonzero(np.frombuffer(content, np.uint8)), 150):  # the rest fills up blocks
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.integers(8)
        path.write_bytes(flipped)
        try:
            assert whole(PreparedDocuments.open(copy)) == expected
        except ValueError as error:
            assert path.name in str(error)
            refused += 1
    assert refused > 30
    path.write_bytes(content)
    assert whole(PreparedDocuments.open(copy)) == expected


# --- processes, threads, open files


def test_it_travels_to_other_processes_and_opens_its_files_there(copy: Path) -> None:
    documents = PreparedDocuments.open(copy)
    expected = whole(documents)
    assert len(pickle.dumps(documents)) < 10_000  # not the lengths
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(whole, (documents,)) == expected
    sent = pickle.dumps(documents)
    (copy / "a.jsonl").write_text('{"text": "x"}')
    prepare([copy / "a.jsonl"], PrepareOptions("bytes", copy.parent / "other", workers=1))
    shutil.rmtree(copy)
    (copy.parent / "other").rename(copy)
    with pytest.raises(ValueError, match=r"copy has changed: fingerprint .*, it was "):
        pickle.loads(sent)


def test_threads_read_at_once_and_few_files_are_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "OPEN_SHARDS", 2)
    documents = PreparedDocuments.open(folder)
    expected = whole(documents)

    def shards_open() -> int:
        opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        return sum(Path(path).parent == folder and path.endswith(".array_record") for path in opened)

    assert shards_open() == 2
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: whole(documents), range(16)))
    assert all(result == expected for result in results)
    assert shards_open() == 2


def test_the_manifest_is_the_same_after_a_round_trip(folder: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(folder)
    manifest.save(tmp_path / "manifest.json")
    assert (tmp_path / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
