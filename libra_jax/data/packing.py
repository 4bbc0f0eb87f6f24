"""Documents packed into sequences, one window of the corpus at a time, by their lengths alone.

`PackedDocuments` numbers the sequences of a corpus and says which pieces of which documents any of them holds. Only the
number of sequences in each window is kept; a window is packed again when one of its sequences is asked for, and the
last ones are remembered. What a window's documents leave over is a sequence that is not full: it is served as it is,
so nothing is lost and nothing is there twice, and no window needs another. For the same reason a window takes a little
less than what fills its sequences: 256 to 1,024 of them, less a 4,096th. That is as full as Grain's packers get them,
which see a stream without windows (tests/test_bins.py). NumPy only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libra_jax.data.bins import STRATEGIES, count_by_window, pack
from libra_jax.data.count_windows import count_in_processes
from libra_jax.data.sources import from_file, place_in_file
from libra_jax.data.windows import Totals, deal_windows

_SLACK = 4096
_MANY = 2**22  # documents of a corpus that is worth starting processes for, at most so many
_PROCESSES = 16
_COUNTED = 2**22  # documents whose windows are counted side by side
_REMEMBERED = 2**22  # pieces of packed windows that are kept, 24 bytes each


class Pieces(NamedTuple):
    """What one sequence holds, in order: tokens [start, start + length) of documents. Each (pieces,) int64."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray


class PackedDocuments:
    """Sequences of at most `seq_len` tokens, packed from documents of these lengths.

    lengths: (documents,) whole numbers, 0 for an empty document, which is left out; may be memory-mapped.
    packer: "first_fit": a document goes into the window's first sequence with room; "best_fit": into the fullest with
        room; "concat_and_split": end to end, cut where a sequence is full.
    long_documents: what becomes of documents longer than seq_len: "split" into pieces of that length, each of them a
        document of its own from there on; "drop"; or "truncate" to the first seq_len tokens. `totals` counts them.
    max_documents: most documents in one sequence; None: no limit.
    seed: of the order in which documents come. The result is a function of the arguments alone.
    held_out, split: see `windows.deal_windows`.
    window_sequences: how many sequences a window's documents fill; None: 256, and more of shorter ones.
    index: file that the numbers of sequences are kept in between runs; made if it is not there, and made anew if it was
        made from something else. Without one they are counted at every start, a quarter of a microsecond a document.
    ready: another such file, which is only read: the one that came with the corpus.

    Raises ValueError naming the rule for what does not fit together, or where nothing is left to serve.

    counts: (windows,) int64 sequences of each window. totals: see `windows.Totals`.
    """

    counts: np.ndarray
    totals: Totals

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        seq_len: int,
        *,
        packer: str = "first_fit",
        long_documents: str = "split",
        max_documents: int | None = None,
        seed: int = 0,
        held_out: float = 0.0,
        split: str = "train",
        window_sequences: int | None = None,
        index: str | os.PathLike | None = None,
        ready: str | os.PathLike | None = None,
    ) -> None:
        if packer not in STRATEGIES:
            raise ValueError(f"packer ({packer!r}) must be one of {STRATEGIES}")
        if seq_len < 1:
            raise ValueError(f"seq_len ({seq_len}) must be at least 1")
        if window_sequences is None:
            window_sequences = max(256, min(1024, 2**25 // seq_len))
        if window_sequences < 1:
            raise ValueError(f"window_sequences ({window_sequences}) must be at least 1")
        if max_documents is not None and max_documents < 1:
            raise ValueError(f"max_documents ({max_documents}) must be at least 1, or None")
        self._document_lengths = np.asarray(lengths) if not isinstance(lengths, np.ndarray) else lengths
        if self._document_lengths.ndim != 1 or not len(self._document_lengths):
            raise ValueError(f"document lengths must be (documents,), at least 1, got {self._document_lengths.shape}")
        self.seq_len, self.packer, self.long_documents, self.max_documents = (
            seq_len, packer, long_documents, max_documents
        )  # fmt: skip
        cuts, room = packer == "concat_and_split", window_sequences * seq_len
        self.windows = deal_windows(
            self._document_lengths,
            seq_len,
            room if cuts else room - room // _SLACK,
            rule=long_documents,
            inside=cuts and long_documents == "split" and max_documents is None,
            seed=seed,
            held_out=held_out,
            split=split,
        )
        self.totals = self.windows.totals
        self.rules: dict[str, Any] = {
            "packer": packer,
            "long_documents": long_documents,
            "max_documents": max_documents,
            "held_out": held_out,
            "split": split,
            "window_sequences": window_sequences,
        }
        self.counts = self._indexed(seed, index, ready)
        self._first = np.concatenate([[0], np.cumsum(self.counts)])
        self._forget()

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_remembered", "_lock")}
        return own | {"_document_lengths": place_in_file(self._document_lengths)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_document_lengths": from_file(state["_document_lengths"])})
        self._forget()

    def _forget(self) -> None:
        """No window is packed."""
        self._packed: OrderedDict[int, tuple[np.ndarray, Pieces]] = OrderedDict()
        self._remembered, self._lock = 0, threading.Lock()

    @property
    def fill(self) -> float:
        """Tokens over room: 1.0 is perfect."""
        return self.totals.kept_tokens / (len(self) * self.seq_len)

    def pieces(self, number: int) -> Pieces:
        """What a sequence holds. number: 0 to len - 1, IndexError beyond."""
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        window = int(np.searchsorted(self._first, number, side="right")) - 1
        bounds, pieces = self._window(window)
        start, stop = bounds[number - self._first[window] :][:2]
        return Pieces(*(column[start:stop] for column in pieces))

    def lengths(self, number: int) -> np.ndarray:
        """Tokens of each document in a sequence, (documents,) int64."""
        return self.pieces(number).length

    def _window(self, window: int) -> tuple[np.ndarray, Pieces]:
        """(sequences + 1,) where each sequence of a window starts among its pieces, and these."""
        with self._lock:  # Grain reads map datasets in threads
            if window not in self._packed:
                self._pack(window)
            self._packed.move_to_end(window)
            return self._packed[window]

    def _pack(self, window: int) -> None:
        """Packs a window, and remembers it in the place of those that were not asked for longest."""
        document, start, length = self._items(window)
        packed = pack(length, self.seq_len, self.packer, self.max_documents)
        assert packed.count == self.counts[window], "packing is a function of its arguments"
        bounds = np.searchsorted(packed.sequence, np.arange(packed.count + 1))
        pieces = Pieces(document[packed.item], start[packed.item] + packed.start, packed.length)
        self._packed[window] = bounds, pieces
        self._remembered += len(packed.item)
        while self._remembered > _REMEMBERED and len(self._packed) > 1:
            _, (_, oldest) = self._packed.popitem(last=False)
            self._remembered -= len(oldest.document)

    def _items(self, window: int) -> Pieces:
        """A window's documents as the rule for long ones leaves them, in the order in which they are packed."""
        document, start, length = self.windows.parts(window, self._document_lengths)
        if self.long_documents == "truncate":
            length = np.minimum(length, self.seq_len)
        keep = length > 0
        if self.long_documents == "drop":
            keep &= length <= self.seq_len
        document, start, length = document[keep], start[keep], length[keep]
        if self.long_documents == "split" and self.packer != "concat_and_split":
            which, further, length = cut(length, self.seq_len)
            return Pieces(document[which], start[which] + further, length)
        return Pieces(document, start, length)

    def _count(self) -> np.ndarray:
        """Sequences of each window, (windows,) int64. Large corpora in files are counted by several processes."""
        counts, cores = None, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        in_file = isinstance(place_in_file(self._document_lengths), tuple)
        if in_file and cores > 1 and self.totals.documents >= _MANY:
            counts = count_in_processes(self, min(cores, _PROCESSES, len(self.windows)))
        return self.count_windows(0, len(self.windows)) if counts is None else counts

    def count_windows(self, first: int, stop: int) -> np.ndarray:
        """Sequences of windows [first, stop), int64, by packing them."""
        together = max(1, _COUNTED * len(self.windows) // self.totals.documents)  # windows counted side by side
        counts = [np.zeros(0, np.int64)]
        for start in range(first, stop, together):
            items = [self._items(window).length for window in range(start, min(start + together, stop))]
            bounds = np.cumsum([0, *map(len, items)])
            flat = np.concatenate(items)
            counts.append(count_by_window(flat, bounds, self.seq_len, self.packer, self.max_documents))
        return np.concatenate(counts)

    def _indexed(self, seed: int, index: str | os.PathLike | None, ready: str | os.PathLike | None) -> np.ndarray:
        """The numbers of sequences, from a file that has them for just these arguments, or counted and then kept."""
        if index is None and ready is None:
            return self._count()
        key = self._key(seed)
        for path in (ready, index):
            with contextlib.suppress(Exception):  # whatever a damaged file gives: it is only kept to save time
                if path is not None:
                    with np.load(path) as found:
                        if str(found["key"]) == key:
                            return found["counts"]
        counts = self._count()
        if index is not None:
            try:
                _keep(Path(index), key, counts)
            except OSError as error:
                warnings.warn(f"{index} cannot be kept, and will be made again: {error}", stacklevel=3)
        return counts

    def _key(self, seed: int) -> str:
        """Stands for everything that the numbers of sequences follow from."""
        what = {"version": 1, "seq_len": self.seq_len, "seed": seed, "totals": self.totals, **self.rules}
        digest = hashlib.sha256(repr(what).encode())
        lengths = self._document_lengths
        for start in range(0, len(lengths), 2**22):
            digest.update(np.ascontiguousarray(lengths[start : start + 2**22]))
        return digest.hexdigest()[:32]


def cut(lengths: np.ndarray, seq_len: int) -> Pieces:
    """Cut documents into pieces of at most seq_len tokens, each document's one after another."""
    lengths = np.asarray(lengths, np.int64)
    pieces = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    start = (np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
    return Pieces(document, start, np.minimum(lengths[document] - start, seq_len))


def _keep(path: Path, key: str, counts: np.ndarray) -> None:
    """Writes an index, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, unfinished = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # hosts may write to one folder
    try:
        os.chmod(file, 0o644)
        with open(file, "wb") as out:
            np.savez(out, key=np.array(key), counts=counts)
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
