"""What every source of documents offers, and one such source: any random-access source plus an array of lengths.

A pipeline plans by `lengths` alone, and asks for tokens only of the pieces of documents that a host trains on. Tokens
arrive as int32, end to end in an array that the caller owns, so a sequence is put together without a copy between.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

_CHUNK = 1 << 16  # lengths looked at together; small enough to stay in a core's cache
_LARGEST_ID = int(np.iinfo(np.int32).max)


class Documents(Protocol):
    """Documents by number, each a run of token ids. Picklable: worker processes get a copy, which opens its own files.

    lengths: (documents,) of an integer dtype, may be memory-mapped: tokens of each whole document; 0 is an empty one.
    fingerprint: short text that differs where other tokens, or the same in another order, would be served.
    tokenizer: "bytes", "sha256:" and 16 hexadecimal digits of the tokenizer's file, or None where it is not known.
    vocab_size: every token id is below it; None where it is not known.
    """

    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...

    def read(self, document: np.ndarray, start: np.ndarray, length: np.ndarray, out: np.ndarray) -> None:
        """Put tokens [start, start + length) of each document into `out`, end to end, in the order asked for.

        document, start, length: (pieces,) int64. out: (sum of length,) int32.
        Raises ValueError naming the file, the document and both numbers where what is stored disagrees with `lengths`.
        """
        ...

    def describe(self) -> str:
        """One sentence: how many documents and tokens, and where from."""
        ...


class SourceDocuments:
    """Documents of any random-access source (`len(source)`, `source[i]`), such as those of `grain.sources`, or a list.

    source: element i is document i: a 1-d array of integers, or bytes that hold such an array (say of which `dtype`),
        or a mapping with either under the key `tokens`. Picklable if worker processes are to read it.
    lengths: (documents,) integers: tokens of each element. Kept as it is, not copied, so it may be memory-mapped; a
        worker process maps such a file again.
    fingerprint: text that stands for these tokens in this order. None: made from the lengths, all of them and nothing
        else, so it cannot tell a source from another that has the same lengths; 100 million take about a second.
    tokenizer, vocab_size: see `Documents`. Ids that are not below a vocab_size given here are refused when read.

    An element is read whole, also for a piece of it; pieces of one document in one `read` share that.
    Raises ValueError where `lengths` are not integers of at least 0, or not as many as the source has elements.
    """

    def __init__(
        self,
        source: Any,
        lengths: np.ndarray,
        *,
        fingerprint: str | None = None,
        tokens: str = "tokens",
        dtype: Any = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
    ):
        lengths = lengths if isinstance(lengths, np.ndarray) else np.asarray(lengths)
        if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and lengths.size):
            raise ValueError(
                f"lengths must be a 1-d array of integers, got shape {lengths.shape} and dtype {lengths.dtype}"
            )
        if len(source) != len(lengths):
            raise ValueError(f"the source has {len(source)} documents, but there are {len(lengths)} lengths")
        if lengths.size and lengths.min() < 0:
            first = int(np.argmax(lengths < 0))
            raise ValueError(f"lengths[{first}] ({lengths[first]}) must be at least 0")
        if dtype is not None and np.dtype(dtype).kind not in "iu":
            raise ValueError(f"dtype ({np.dtype(dtype)}) must be one of integers")
        check_vocab_size(vocab_size)
        self.lengths = lengths
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.fingerprint = _fingerprint(lengths) if fingerprint is None else fingerprint
        self._source = source
        self._key = tokens
        self._dtype = None if dtype is None else np.dtype(dtype)

    def read(self, document: np.ndarray, start: np.ndarray, length: np.ndarray, out: np.ndarray) -> None:
        """As `Documents.read`. Raises ValueError naming the element, the rule and both numbers."""
        name = self._name()
        check_documents(name, len(self.lengths), document)
        check_pieces(name, self.lengths[document], document, start, length, out)
        ends = np.cumsum(length)
        number, tokens = -1, np.empty(0, np.int32)
        for i in np.argsort(document, kind="stable").tolist():
            if not length[i]:
                continue
            if number != document[i]:
                number = int(document[i])
                tokens = self._element(number)
                if len(tokens) != self.lengths[number]:
                    raise ValueError(
                        f"{name}: element {number} holds {len(tokens)} tokens, but lengths[{number}] is "
                        f"{self.lengths[number]}"
                    )
                check_tokens(name, number, 0, tokens, self.vocab_size)
            out[ends[i] - length[i] : ends[i]] = tokens[start[i] : start[i] + length[i]]

    def describe(self) -> str:
        """One sentence: how many documents and tokens, and where from."""
        tokens = int(self.lengths.sum(dtype=np.int64))
        return f"{len(self.lengths):,} documents, {tokens:,} tokens in a source ({self._name()})"

    def _name(self) -> str:
        return type(self._source).__name__

    def _element(self, number: int) -> np.ndarray:
        """Element `number` of the source as a 1-d array of integers."""
        where = f"{self._name()}: element {number}"
        element = self._source[number]
        if isinstance(element, Mapping):
            if self._key not in element:
                raise ValueError(f"{where} has no {self._key!r}, only {sorted(map(str, element))}")
            element = element[self._key]
        if isinstance(element, bytes | bytearray | memoryview):
            if self._dtype is None:
                raise ValueError(f"{where} is {len(element)} bytes: name the dtype of the tokens in them (dtype=...)")
            if len(element) % self._dtype.itemsize:
                raise ValueError(
                    f"{where} is {len(element)} bytes, which must be a multiple of {self._dtype}'s "
                    f"{self._dtype.itemsize}"
                )
            return np.frombuffer(element, self._dtype)
        element = np.asarray(element)
        if element.ndim != 1 or (element.dtype.kind not in "iu" and element.size):
            raise ValueError(
                f"{where} must be a 1-d array of integers, got shape {element.shape} and dtype {element.dtype}"
            )
        return element

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"lengths": place_in_file(self.lengths)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"lengths": from_file(state["lengths"])})


def place_in_file(array: np.ndarray) -> np.ndarray | tuple[Any, ...]:
    """An array as it should be pickled: where it lies, if it is a memory-mapped file or a part of one."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not (isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap) and array.flags.c_contiguous):
        return array
    if root.filename is None or root.mode == "c":
        return array
    offset = root.offset + array.ctypes.data - root.ctypes.data
    return os.path.abspath(root.filename), array.dtype, offset, array.shape


def from_file(place: np.ndarray | tuple[Any, ...]) -> np.ndarray:
    """What `place_in_file` stands for."""
    if isinstance(place, np.ndarray):
        return place
    filename, dtype, offset, shape = place
    return np.memmap(filename, dtype, "r", offset, shape)


def check_documents(name: str, documents: int, document: np.ndarray) -> None:
    """Refuse numbers of documents outside 0 to documents - 1. Raises ValueError naming the first one."""
    wrong = (document < 0) | (document >= documents)
    if wrong.any():
        number = document[np.argmax(wrong)]
        raise ValueError(f"{name}: document {number} was asked for, but they are 0 to {documents - 1}")


def check_pieces(
    name: str, stored: np.ndarray, document: np.ndarray, start: np.ndarray, length: np.ndarray, out: np.ndarray
) -> None:
    """Refuse pieces that reach outside their documents, and an `out` that is not made for them.

    stored: (pieces,) integers, tokens of each piece's whole document; the others as in `Documents.read`.
    """
    stored = stored.astype(np.int64)
    wrong = (start < 0) | (length < 0) | (start > stored) | (length > stored - start)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"{name}: tokens {start[i]} to {int(start[i]) + int(length[i])} of document {document[i]} were asked for, "
            f"but it has {stored[i]}"
        )
    tokens = int(np.sum(length, dtype=np.int64))
    if out.shape != (tokens,) or out.dtype != np.int32:
        raise ValueError(f"out must be int32 of shape ({tokens},), got {out.dtype} of shape {out.shape}")


def check_tokens(name: str, document: int, start: int, tokens: np.ndarray, vocab_size: int | None = None) -> None:
    """Refuse token ids that are negative, above int32, or not below `vocab_size`.

    tokens: those of `document` from its token `start` on, of any integer dtype.
    Raises ValueError naming the document, the place in it, the id and the rule.
    """
    rule = f"from 0 to {_LARGEST_ID} (int32)" if vocab_size is None else f"from 0 to vocab_size - 1 ({vocab_size - 1})"
    largest = _LARGEST_ID if vocab_size is None else vocab_size - 1
    limits = np.iinfo(tokens.dtype) if tokens.dtype.kind in "iu" else None
    if not tokens.size or (limits is not None and limits.min == 0 and limits.max <= largest):
        return
    if tokens.min() < 0 or tokens.max() > largest:
        at = int(np.argmax((tokens < 0) | (tokens > largest)))
        raise ValueError(f"{name}: token {start + at} of document {document} is {tokens[at]}, but ids must be {rule}")


def check_vocab_size(vocab_size: int | None) -> None:
    """Refuse a vocabulary that no int32 token id can belong to, or that is none. Raises ValueError."""
    if vocab_size is not None and not 1 <= vocab_size <= _LARGEST_ID + 1:
        raise ValueError(f"vocab_size ({vocab_size}) must be from 1 to {_LARGEST_ID + 1}")


def _fingerprint(lengths: np.ndarray) -> str:
    """Of all lengths, whatever their dtype."""
    digest = hashlib.sha256(b"lengths\n")
    for begin in range(0, len(lengths), _CHUNK):
        digest.update(lengths[begin : begin + _CHUNK].astype("<i8"))
    return digest.hexdigest()[:16]
