"""Corpora that were tokenized for Megatron-LM, read as they are: the pair PREFIX.bin and PREFIX.idx.

PREFIX.bin holds token ids end to end. PREFIX.idx (Megatron-LM's `MMapIndexedDataset`, later `IndexedDataset`) says
where each sequence of them begins, how many it has, and which sequences make up a document; all little-endian:

    9 bytes   MMIDIDX and two zero bytes
    uint64    version: 1
    uint8     dtype of the token ids, see `DTYPES`
    uint64    S, sequences
    uint64    D, entries of the document index: documents + 1
    int32     (S,) tokens of each sequence
    int64     (S,) where each sequence begins in PREFIX.bin, in bytes
    int64     (D,) document i is the sequences from entry i up to, and without, entry i + 1
    int8      (S,) a mode for each sequence; only in corpora of several modalities, not read here

Both files are memory-mapped. Opening looks at the whole index once, about a second for 100 million documents.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from libra_jax.data.sources import check_documents, check_pieces, check_tokens, check_vocab_size

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""What the index's code for a dtype means. Token ids are whole numbers: 6 and 7 are refused."""

_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 16  # sequences looked at together; small enough to stay in a core's cache
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16  # of PREFIX.bin, in the fingerprint


class _Index(NamedTuple):
    """The arrays of PREFIX.idx, memory-mapped: lengths (S,) int32, pointers (S,) int64, documents (D,) int64."""

    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class MegatronDocuments:
    """The documents of a PREFIX.bin and PREFIX.idx, in the order of the document index; see `Documents`.

    bin_path, idx_path; bin_bytes, idx_bytes: the files and their sizes when they were opened.
    dtype: of the token ids in the file. sequences, documents: how many. tokens: in all documents.
    one_each: every document is one sequence; `lengths` are then the index's own, memory-mapped, not copied.
    fingerprint: of everything the index says (dtype, documents, lengths, places), the size of PREFIX.bin, and 64
        blocks of 64 KiB of it, evenly spread from its first to its last byte; so of a PREFIX.bin of up to 4 MiB, all.
        It does not depend on names or dates. It cannot see tokens replaced between the blocks of a larger PREFIX.bin
        where no length changes, and the same tokens under another dtype are other documents to it.
    tokenizer, vocab_size: what the user said; the files do not tell. Ids not below vocab_size are refused when read.

    The files must not be written to while they are in use.
    """

    bin_path: Path
    idx_path: Path
    bin_bytes: int
    idx_bytes: int
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int
    one_each: bool
    fingerprint: str
    tokenizer: str | None = None
    vocab_size: int | None = None

    @classmethod
    def open(cls, prefix: str | os.PathLike, *, tokenizer: str | None = None, vocab_size: int | None = None) -> Self:
        """Open PREFIX.bin and PREFIX.idx; `prefix` may also be the path of one of them.

        Raises FileNotFoundError where one is missing, and ValueError naming the file, the rule and both numbers where
        the index is none, is cut short, contradicts itself, or tells of more than PREFIX.bin holds.
        """
        check_vocab_size(vocab_size)
        bin_path, idx_path = _pair(prefix)
        bin_bytes, idx_bytes = bin_path.stat().st_size, idx_path.stat().st_size
        with idx_path.open("rb") as file:
            header = file.read(_HEADER.size)
        code, sequences, entries = _read_header(idx_path, header, idx_bytes)
        dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        index = _map_index(idx_path, sequences, entries)
        digest = hashlib.sha256(header)
        one_each = _check_documents(idx_path, index.documents, sequences, digest)
        tokens = _check_sequences(idx_path, bin_path, bin_bytes, index, dtype.itemsize, one_each, digest)
        _add_blocks(bin_path, bin_bytes, digest)
        return cls(
            bin_path=bin_path,
            idx_path=idx_path,
            bin_bytes=bin_bytes,
            idx_bytes=idx_bytes,
            dtype=dtype,
            sequences=sequences,
            documents=entries - 1,
            tokens=tokens,
            one_each=one_each,
            fingerprint=digest.hexdigest()[:16],
            tokenizer=tokenizer,
            vocab_size=vocab_size,
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, (documents,): int32 in the file where one_each, otherwise summed here, int64."""
        return self._index.lengths if self.one_each else self._summed_lengths

    def read(self, document: np.ndarray, start: np.ndarray, length: np.ndarray, out: np.ndarray) -> None:
        """As `Documents.read`. Raises ValueError for ids that are negative, above int32, or not below vocab_size."""
        name, index, all_tokens = str(self.bin_path), self._index, self._all_tokens
        check_documents(name, self.documents, document)
        first, last = (
            (document, document) if self.one_each else (index.documents[document], index.documents[document + 1] - 1)
        )
        begin, stored = np.zeros(len(document), np.int64), np.zeros(len(document), np.int64)
        some = last >= first  # a document may have no sequence
        begin[some] = index.pointers[first[some]] // self.dtype.itemsize
        end = index.pointers[last[some]] // self.dtype.itemsize + index.lengths[last[some]]
        stored[some] = end - begin[some]
        check_pieces(name, stored, document, start, length, out)

        wide = self.dtype.itemsize > out.itemsize  # ids may be lost in the cast
        at = 0
        for i, (here, tokens) in enumerate(zip((begin + start).tolist(), length.tolist(), strict=True)):
            piece = all_tokens[here : here + tokens]
            if wide:
                check_tokens(name, int(document[i]), int(start[i]), piece, self.vocab_size)
            out[at : at + tokens] = piece
            at += tokens
        if not wide:
            self._check_ids(document, start, length, out)

    def describe(self) -> str:
        """One sentence: how many documents and tokens, where from, and what of PREFIX.bin belongs to no document."""
        unused = self.bin_bytes - self.tokens * self.dtype.itemsize
        rest = f"; {unused:,} bytes of it belong to no document" if unused > 0 else ""
        return f"{self.documents:,} documents, {self.tokens:,} tokens in {self.bin_path} ({self.dtype.name}){rest}"

    def _check_ids(self, document: np.ndarray, start: np.ndarray, length: np.ndarray, out: np.ndarray) -> None:
        """One look at everything that was read; only where something is wrong, piece by piece for its place."""
        if self.dtype.kind == "u" and (self.vocab_size is None or np.iinfo(self.dtype).max < self.vocab_size):
            return
        if not out.size or (out.min() >= 0 and (self.vocab_size is None or out.max() < self.vocab_size)):
            return
        for number, begin, piece in zip(document, start, np.split(out, np.cumsum(length)[:-1]), strict=True):
            check_tokens(str(self.bin_path), int(number), int(begin), piece, self.vocab_size)

    @functools.cached_property
    def _summed_lengths(self) -> np.ndarray:
        return _sum_lengths(self._index)

    @functools.cached_property
    def _index(self) -> _Index:
        _check_size(self.idx_path, self.idx_bytes)
        return _map_index(self.idx_path, self.sequences, self.documents + 1)

    @functools.cached_property
    def _all_tokens(self) -> np.ndarray:
        """PREFIX.bin, memory-mapped; a plain view of it, which is cheaper to slice."""
        _check_size(self.bin_path, self.bin_bytes)
        count = self.bin_bytes // self.dtype.itemsize
        if not count:
            return np.empty(0, self.dtype)
        return np.asarray(np.memmap(self.bin_path, self.dtype, "r", 0, (count,))).view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _pair(prefix: str | os.PathLike) -> tuple[Path, Path]:
    """PREFIX.bin and PREFIX.idx, both there."""
    name = os.fspath(prefix)
    if name.endswith((".bin", ".idx")) and not os.path.exists(f"{name}.idx"):
        name = name[:-4]
    pair = Path(f"{name}.bin"), Path(f"{name}.idx")
    for path, other in (pair, pair[::-1]):
        if not path.is_file():
            there = "is there" if other.is_file() else "is missing, too"
            raise FileNotFoundError(f"{path}: no such file; a Megatron corpus is this and {other.name}, which {there}")
    return pair


def _read_header(idx_path: Path, header: bytes, idx_bytes: int) -> tuple[int, int, int]:
    """Code of the dtype, sequences, and entries of the document index, with the file's size as they demand."""
    if header[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{idx_path}: an index of Megatron's begins with {MAGIC!r}, this file with {header[:9]!r}")
    if len(header) < _HEADER.size:
        raise ValueError(f"{idx_path}: cut short at {len(header)} bytes, its header alone has {_HEADER.size}")
    _, version, code, sequences, entries = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{idx_path}: version must be 1, got {version}")
    if code not in DTYPES:
        raise ValueError(f"{idx_path}: dtype code must be one of {sorted(DTYPES)}, got {code}")
    if "float" in DTYPES[code]:
        raise ValueError(f"{idx_path}: token ids must be whole numbers, but dtype code {code} is {DTYPES[code]}")
    if entries < 1:
        raise ValueError(f"{idx_path}: the document index must have at least 1 entry, got {entries}")
    plain = _HEADER.size + 12 * sequences + 8 * entries
    if idx_bytes not in (plain, plain + sequences):
        raise ValueError(
            f"{idx_path}: {sequences} sequences and {entries} entries of the document index take {plain} bytes "
            f"({plain + sequences} with modes), but the file has {idx_bytes}"
        )
    return code, sequences, entries


def _map_index(idx_path: Path, sequences: int, entries: int) -> _Index:
    """Map the arrays of an index whose size has been checked."""
    at = _HEADER.size
    lengths = np.memmap(idx_path, "<i4", "r", at, (sequences,))
    pointers = np.memmap(idx_path, "<i8", "r", at + 4 * sequences, (sequences,))
    return _Index(lengths, pointers, np.memmap(idx_path, "<i8", "r", at + 12 * sequences, (entries,)))


def _check_documents(idx_path: Path, documents: np.ndarray, sequences: int, digest: Any) -> bool:
    """Whether every document is one sequence. The document index must rise from 0 to the number of sequences."""
    if documents[0] != 0:
        raise ValueError(f"{idx_path}: the document index must begin with sequence 0, not {documents[0]}")
    one_each = True
    for begin in range(0, len(documents) - 1, _CHUNK):
        edges = np.array(documents[begin : begin + _CHUNK + 1])
        steps = np.diff(edges)
        if steps.min() < 0:
            i = int(np.argmax(steps < 0))
            raise ValueError(
                f"{idx_path}: the document index must not fall, but document {begin + i} begins with sequence "
                f"{edges[i]} and the next with {edges[i + 1]}"
            )
        if edges[-1] > sequences:
            i = int(np.argmax(edges > sequences))
            raise ValueError(
                f"{idx_path}: document {begin + i - 1} ends before sequence {edges[i]}, but there are {sequences}"
            )
        if (steps != 1).any():
            one_each = False
            digest.update(f"documents {begin}\n".encode())
            digest.update(edges)
    if documents[-1] != sequences:
        raise ValueError(
            f"{idx_path}: the document index ends before sequence {documents[-1]} and leaves the rest of "
            f"{sequences} sequences to no document"
        )
    return one_each


def _check_sequences(
    idx_path: Path, bin_path: Path, bin_bytes: int, index: _Index, itemsize: int, one_each: bool, digest: Any
) -> int:
    """Tokens of all sequences. Each must lie in PREFIX.bin, those of one document end to end."""
    total = follows = 0  # follows: the byte after the sequence before
    for begin in range(0, len(index.lengths), _CHUNK):
        lengths = np.array(index.lengths[begin : begin + _CHUNK])
        pointers = np.array(index.pointers[begin : begin + _CHUNK])
        if lengths.min() < 0:
            i = int(np.argmax(lengths < 0))
            raise ValueError(f"{idx_path}: sequence {begin + i} has {lengths[i]} tokens, must be at least 0")
        sizes = lengths.astype(np.int64) * itemsize
        bits = np.bitwise_or.reduce(pointers)  # negative if one is; a multiple only if all are
        if bits < 0 or bits % itemsize:
            i = int(np.argmax((pointers < 0) | (pointers % itemsize != 0)))
            raise ValueError(
                f"{idx_path}: sequence {begin + i} begins at byte {pointers[i]} of {bin_path.name}, which must be at "
                f"least 0 and a multiple of a token's {itemsize} bytes"
            )
        beyond = pointers > bin_bytes - sizes
        if beyond.any():
            i = int(np.argmax(beyond))
            raise ValueError(
                f"{bin_path}: {bin_bytes} bytes, but by {idx_path.name} sequence {begin + i} ends at byte "
                f"{int(pointers[i]) + int(sizes[i])}"
            )
        digest.update(lengths)
        ends = np.cumsum(sizes) + follows
        expected = ends - sizes
        if (pointers != expected).any():
            digest.update(f"pointers {begin}\n".encode())
            digest.update(pointers)
            if not one_each:
                expected[1:] = pointers[:-1] + sizes[:-1]
                _check_gaps(idx_path, bin_path, index.documents, begin, pointers, expected)
        follows = int(pointers[-1]) + int(sizes[-1])
        total += int(lengths.sum(dtype=np.int64))
    return total


def _check_gaps(
    idx_path: Path, bin_path: Path, documents: np.ndarray, begin: int, pointers: np.ndarray, expected: np.ndarray
) -> None:
    """Of sequences from `begin` on, only the first of a document may lie elsewhere than behind the one before it."""
    lowest, highest = (bisect.bisect_left(documents, edge) for edge in (begin, begin + len(pointers)))
    gaps = np.setdiff1d(begin + np.flatnonzero(pointers != expected), documents[lowest:highest])
    if gaps.size:
        i = int(gaps[0])
        raise ValueError(
            f"{idx_path}: sequence {i} begins at byte {pointers[i - begin]} of {bin_path.name}, but must follow the "
            f"one before it in its document, which ends at byte {expected[i - begin]}"
        )


def _sum_lengths(index: _Index) -> np.ndarray:
    """Tokens of each document, (documents,) int64, from those of its sequences."""
    tokens = np.empty(len(index.documents) - 1, np.int64)
    for begin in range(0, len(tokens), _CHUNK):
        edges = np.array(index.documents[begin : begin + _CHUNK + 1])
        ends = np.zeros(edges[-1] - edges[0] + 1, np.int64)
        np.cumsum(index.lengths[edges[0] : edges[-1]], out=ends[1:])
        tokens[begin : begin + _CHUNK] = np.diff(ends[edges - edges[0]])
    return tokens


def _add_blocks(path: Path, size: int, digest: Any) -> None:
    """Add a file's size to `digest`, and blocks spread evenly over it, which are all of a short one."""
    digest.update(f"{size} bytes\n".encode())
    with path.open("rb") as file:
        for i in range(_BLOCKS):
            file.seek(i * max(size - _BLOCK_BYTES, 0) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))


def _check_size(path: Path, size: int) -> None:
    now = path.stat().st_size
    if now != size:
        raise ValueError(f"{path} has changed: {size} bytes when it was opened, {now} now")
