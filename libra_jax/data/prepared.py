"""A folder made by `libra prepare`: its manifest, and its documents.

    DIR/manifest.json                          what is in it, and what it was made from
    DIR/lengths.npy                            (documents,) uint32: tokens of each, with its end-of-document token
    DIR/documents-00000-of-00003.array_record  one record a document: its tokens, little-endian uint16 or uint32
    DIR/packing-262144.npz                     for this and other sequence lengths: packed sequences by window
    DIR/tokenizer.json                         a copy, where the tokenizer is a file
    DIR/inputs.jsonl                           the files it was made from: path, size_bytes, mtime_ns
    DIR/problems.jsonl                         the records that were left out, where there are any

Opening compares shards with the manifest by their sizes, and lengths by their hashes; tokens are read when asked for.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import threading
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from libra_jax.data.sources import check_documents, check_pieces

FORMAT = "libra-prepared"
VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
"""What the name of a folder ends with until it is whole."""
LENGTHS = "lengths.npy"
TOKENIZER = "tokenizer.json"
INPUTS = "inputs.jsonl"
PROBLEMS = "problems.jsonl"
SEQUENCE_LENGTHS = (2**15, 2**17, 2**18, 2**20)

OPEN_SHARDS = 32
"""Most shards that are open at once. Each holds a file, and 20 bytes of memory a document; a shard of a million
documents takes 0.06 s to open."""


_INSIDE: dict[str, dict[str, Any]] = {
    "tokenizer": {"name": str, "sha256": str | None, "vocab_size": int, "end_of_document": int},
    "left_out": {"empty": int, "bad": dict[str, int]},
}
_COUNTED = {"sequences": int, "fill": float, "longer_documents": int}
"""What `Manifest.tokenizer`, `left_out` and each of `sequences` must have in them, at least."""


def from_json[T](kind: type[T], values: Any) -> T:
    """A dataclass of what JSON gave for its fields, all of them. Raises ValueError, naming the first that is not so;
    numbers are never negative."""
    if not isinstance(values, dict):
        raise ValueError(f"it must hold an object, and holds {values!r:.60}")
    _check_fields(values, typing.get_type_hints(kind))
    try:
        return kind(**values)
    except TypeError as error:  # a field there is not
        raise ValueError(str(error)) from error


def _check_fields(values: Mapping[str, Any], hints: Mapping[str, Any], where: str = "") -> None:
    for name, hint in hints.items():
        if name not in values:
            raise ValueError(f"{where}{name} is missing")
        if not _is(values[name], hint):
            must = getattr(hint, "__name__", hint) if typing.get_origin(hint) is None else hint
            raise ValueError(f"{where}{name} is {values[name]!r:.60}, and must be of type {must}")


def _is(value: Any, hint: Any) -> bool:
    kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return True
    if kind is types.UnionType:
        return any(_is(value, one) for one in inside)
    if kind in (int, float):
        return type(value) in (int, kind) and value >= 0
    if kind is dict:
        return isinstance(value, dict) and all(_is(one, inside[1]) for one in value.values())
    if kind in (tuple, list):
        return isinstance(value, kind) and all(_is(one, inside[0]) for one in value)
    return isinstance(value, kind)


def packing_index(folder: str | os.PathLike, seq_len: int) -> Path:
    """Where the numbers of packed sequences of this length are (`PackedDocuments(ready=)`), if they were counted."""
    return Path(folder, f"packing-{seq_len}.npz")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of documents. bytes: its size. sha256: of its tokens. lengths_sha256: of its part of the lengths."""

    name: str
    documents: int
    tokens: int
    bytes: int
    sha256: str
    lengths_sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What manifest.json says. Counts are of documents and of tokens, end-of-document tokens included.

    longest: tokens of the longest document. dtype: "uint16" or "uint32". records: all there were in the inputs, which
    are the documents, the empty ones, and the bad ones by reason. sequences: for some sequence lengths, how many packed
    sequences there are, how full, and how many documents are longer and are split. inputs: how many files and bytes,
    and the sha256 of inputs.jsonl. settings: the options that decide what is in the folder.
    """

    documents: int
    tokens: int
    longest: int
    dtype: str
    tokenizer: dict[str, Any]
    fingerprint: str
    records: int
    left_out: dict[str, Any]
    sequences: dict[str, dict[str, float]]
    inputs: dict[str, Any]
    settings: dict[str, Any]
    shards: tuple[Shard, ...]

    def save(self, path: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Self:
        """Raises FileNotFoundError or ValueError where there is no manifest that this version can read."""
        path = Path(folder, MANIFEST)
        if not path.is_file():
            hint = ""
            unfinished = os.path.normpath(folder) + UNFINISHED
            if Path(unfinished).is_dir():
                hint = f"; {unfinished} is there: start its `libra prepare` again to finish it"
            raise FileNotFoundError(f"{path}: no such file, so this is no folder made by `libra prepare`{hint}")
        try:
            content = json.loads(path.read_bytes())
            found = content.pop("format"), content.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a manifest of `libra prepare`: {error!r}") from error
        if found != (FORMAT, VERSION):
            raise ValueError(f"{path}: format {found[0]!r} version {found[1]!r}, must be {FORMAT!r} version {VERSION}")
        try:
            manifest, shards = cls._checked(content)
            fingerprint = fingerprint_of(manifest.tokenizer, manifest.dtype, shards)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if fingerprint != manifest.fingerprint:
            raise ValueError(f"{path} is damaged: fingerprint {manifest.fingerprint}, its shards give {fingerprint}")
        for name in ("documents", "tokens"):
            total, stated = sum(getattr(shard, name) for shard in shards), getattr(manifest, name)
            if total != stated:
                raise ValueError(f"{path} is damaged: {stated:,} {name}, its shards have {total:,}")
        return manifest

    @classmethod
    def _checked(cls, content: dict[str, Any]) -> tuple[Self, tuple[Shard, ...]]:
        """The manifest, and its shards. Raises ValueError for fields of other types, or none."""
        if not isinstance(content.get("shards"), list):
            raise ValueError(f"shards must be a list, and is {content.get('shards')!r:.60}")
        shards = tuple(from_json(Shard, shard) for shard in content["shards"])
        manifest = from_json(cls, {**content, "shards": shards})
        for name, hints in _INSIDE.items():
            _check_fields(getattr(manifest, name), hints, f"{name}: ")
        for seq_len, counts in manifest.sequences.items():
            if not seq_len.isdecimal():
                raise ValueError(f"sequences: {seq_len!r} must be a number of tokens")
            _check_fields(counts, _COUNTED, f"sequences of {seq_len} tokens: ")
        if manifest.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype ({manifest.dtype!r}) must be 'uint16' or 'uint32'")
        for shard in shards:
            if Path(shard.name).name != shard.name:
                raise ValueError(f"shard {shard.name!r} must be the name of a file in this folder")
        return manifest, shards

    def __str__(self) -> str:
        return f"{self.documents:,} documents, {self.tokens:,} tokens, the longest {self.longest:,}"


def fingerprint_of(tokenizer: dict[str, Any], dtype: str, shards: tuple[Shard, ...]) -> str:
    """16 hex digits over the tokenizer, and every shard's tokens and lengths."""
    digest = hashlib.sha256(json.dumps([tokenizer, dtype], sort_keys=True).encode())
    for shard in shards:
        digest.update(f"\n{shard.documents} {shard.tokens} {shard.sha256} {shard.lengths_sha256}".encode())
    return digest.hexdigest()[:16]


class PreparedDocuments:
    """Documents of a prepared folder. They can be pickled; files are opened when first read, also by a new process.

    lengths: (documents,) uint32, mapped from disk. fingerprint: over tokens, their order, and where documents and
    shards are cut. tokenizer: "bytes", or "sha256:" and 16 digits of the tokenizer file's hash. vocab_size: tokens are
    below it.
    """

    def __init__(self, folder: str | os.PathLike, manifest: Manifest, lengths: np.ndarray) -> None:
        self.folder = Path(folder)
        self.manifest = manifest
        self.lengths = lengths
        self.fingerprint = manifest.fingerprint
        sha256 = manifest.tokenizer["sha256"]
        self.tokenizer: str | None = "bytes" if sha256 is None else f"sha256:{sha256[:16]}"
        self.vocab_size: int | None = manifest.tokenizer["vocab_size"]
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._first = np.cumsum([0, *(shard.documents for shard in manifest.shards)])
        self._forget_files()

    @classmethod
    def open(cls, folder: str | os.PathLike) -> Self:
        """Raises FileNotFoundError or ValueError, with the file and both numbers, where the folder is not as its
        manifest says. What is inside the shards is looked at when it is read."""
        manifest = Manifest.load(folder)
        for shard in manifest.shards:
            path = Path(folder, shard.name)
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file; the manifest lists {shard.documents:,} documents in it")
            size = path.stat().st_size
            if size != shard.bytes:
                raise ValueError(f"{path} has {size:,} bytes, the manifest says {shard.bytes:,}")
        lengths = _open_lengths(folder, manifest)
        _check_lengths(Path(folder, LENGTHS), lengths, manifest)
        return cls(folder, manifest, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def describe(self) -> str:
        """One sentence: documents, tokens, where from."""
        return f"{self.manifest}, prepared with {self.manifest.tokenizer['name']} in {self.folder}"

    def read(self, document: np.ndarray, start: np.ndarray, length: np.ndarray, out: np.ndarray) -> None:
        """Tokens [start, start + length) of each document, end to end, into `out`.

        document, start, length: (pieces,) int64. out: (sum(length),) int32. Pieces of one document are read together.
        Raises ValueError for a piece that is not in its document, and, with the shard and the record, where what is
        stored is damaged or disagrees with `lengths`.
        """
        document, start, length = (np.asarray(values, np.int64) for values in (document, start, length))
        check_documents(str(self.folder), len(self.lengths), document)
        check_pieces(str(self.folder), self.lengths[document], document, start, length, out)
        ends = np.cumsum(length)
        order = np.argsort(document, kind="stable")
        shards = np.searchsorted(self._first, document[order], side="right") - 1
        columns = (document, start, length, ends - length)
        pieces = zip(shards.tolist(), *(values[order].tolist() for values in columns), strict=True)
        last, tokens = -1, np.empty(0, self._dtype)
        for shard, index, first, count, at in pieces:
            if count and index != last:
                tokens, last = self._document(shard, index), index
            out[at : at + count] = tokens[first : first + count]

    def _document(self, shard: int, index: int) -> np.ndarray:
        """All tokens of a document."""
        record = index - int(self._first[shard])
        path = self.folder / self.manifest.shards[shard].name
        with self._lock:
            reader = self._reader(shard, path)
            try:
                reader.seek(record)  # reading a list of records takes time with the size of the shard
                data = reader.read()
            except (RuntimeError, IndexError, ValueError) as error:
                del self._readers[shard]  # it stays broken
                raise ValueError(f"{path}: record {record:,} (document {index:,}) is damaged: {error}") from error
        expected = int(self.lengths[index]) * self._dtype.itemsize
        if len(data) != expected:
            raise ValueError(
                f"{path}: record {record:,} (document {index:,}) has {len(data):,} bytes, and must have {expected:,}: "
                f"{LENGTHS} says {self.lengths[index]:,} tokens"
            )
        return np.frombuffer(data, self._dtype)

    def _reader(self, shard: int, path: Path) -> Any:
        """The open shard, which is the last one to be closed now. Raises ValueError where it does not open."""
        if self._process != os.getpid():  # forked: the files are the parent's
            self._forget_files()
        reader = self._readers.get(shard)
        if reader is None:
            from array_record.python.array_record_module import ArrayRecordReader

            while len(self._readers) >= OPEN_SHARDS:
                self._readers.popitem(last=False)[1].close()
            documents = self.manifest.shards[shard].documents
            try:
                reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
                there = reader.num_records()
            except RuntimeError as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            if there != documents:
                raise ValueError(f"{path} has {there:,} records, the manifest says {documents:,} documents")
            self._readers[shard] = reader
        self._readers.move_to_end(shard)
        return reader

    def _forget_files(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()  # a reader goes to a record and reads it: no other thread may come between
        self._readers: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def __getstate__(self) -> tuple[Path, Manifest]:
        return self.folder.absolute(), self.manifest

    def __setstate__(self, state: tuple[Path, Manifest]) -> None:
        folder, manifest = state
        there = Manifest.load(folder)
        if there.fingerprint != manifest.fingerprint:
            raise ValueError(f"{folder} has changed: fingerprint {there.fingerprint}, it was {manifest.fingerprint}")
        self.__init__(folder, manifest, _open_lengths(folder, manifest))


def _open_lengths(folder: str | os.PathLike, manifest: Manifest) -> np.ndarray:
    path = Path(folder, LENGTHS)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; it holds the tokens of {manifest.documents:,} documents")
    try:
        lengths = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header can be anything
        raise ValueError(f"{path} is damaged: {error}") from error
    if lengths.dtype != np.uint32 or lengths.shape != (manifest.documents,):
        raise ValueError(
            f"{path} holds {lengths.dtype} of shape {lengths.shape}, "
            f"the manifest says uint32 of shape ({manifest.documents},)"
        )
    return lengths


def _check_lengths(path: Path, lengths: np.ndarray, manifest: Manifest) -> None:
    first = 0
    longest = 0
    for shard in manifest.shards:
        part = np.asarray(lengths[first : first + shard.documents])
        tokens = int(part.sum(dtype=np.int64))
        if tokens != shard.tokens:
            raise ValueError(f"{path}: {tokens:,} tokens in {shard.name}, the manifest says {shard.tokens:,}")
        sha256 = hashlib.sha256(part).hexdigest()
        if sha256 != shard.lengths_sha256:
            raise ValueError(
                f"{path} is damaged: its lengths of {shard.name} have the sha256 {sha256[:16]}..., "
                f"the manifest says {shard.lengths_sha256[:16]}..."
            )
        longest = max(longest, int(part.max(initial=0)))
        first += shard.documents
    if longest != manifest.longest:
        raise ValueError(f"{path}: the longest document has {longest:,} tokens, the manifest says {manifest.longest:,}")
