"""Text files as documents of byte tokens.

A document is one file: its bytes (tokens 0 to 255), then an end-of-document token. Files are listed in an order that
depends on their names alone, and read only when their tokens are asked for. For corpora of some gigabytes at most, as
the list of files is held in memory and their content is hashed when a run starts; `libra prepare` is for larger ones.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from libra_jax.data.config import TEXT_SUFFIXES

END_OF_DOCUMENT = 256
_NOT_TEXT = (
    ".jsonl",
    ".json",
    ".parquet",
    ".gz",
    ".zst",
    ".bz2",
    ".xz",
    ".zip",
    ".npy",
    ".npz",
    ".bin",
    ".idx",
    ".array_record",
)
VOCAB_SIZE = 257
"""256 bytes and the end-of-document token."""
BYTES = "bytes"
"""What this tokenizer is called where a tokenizer is named."""


def encode(data: bytes) -> np.ndarray:
    """Byte tokens of a whole document, (len(data) + 1,) int32: its bytes, then `END_OF_DOCUMENT`."""
    tokens = np.empty(len(data) + 1, np.int32)
    tokens[:-1] = np.frombuffer(data, np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return tokens


def decode(tokens: np.ndarray) -> str:
    """Text of byte tokens; other tokens are left out, bytes that are no UTF-8 become U+FFFD."""
    tokens = np.asarray(tokens)
    return tokens[tokens < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def text_files(folder: str | os.PathLike, suffixes: Sequence[str] = TEXT_SUFFIXES) -> list[Path]:
    """Files below `folder` that end with one of `suffixes`, in capitals or not, ordered by their path relative to it.

    Links to folders, hidden folders and `__pycache__` are left out. Raises OSError naming a folder that cannot be read,
    FileNotFoundError for a link to nothing and ValueError for a pipe or device whose name ends so.
    """
    return text_files_and_others(folder, suffixes)[0]


def text_files_and_others(folder: str | os.PathLike, suffixes: Sequence[str]) -> tuple[list[Path], int]:
    """As `text_files`, and how much is passed over: files that end otherwise, hidden ones not counted, and links to
    folders."""
    endings, found, others = tuple(suffix.lower() for suffix in suffixes), [], 0
    for root, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        others += sum(os.path.islink(os.path.join(root, name)) for name in folders)
        for name in names:
            path, hidden = Path(root, name), name.startswith(".")
            if not name.lower().endswith(endings):
                others += not hidden
            elif path.is_file():
                found.append(path)
            elif hidden:
                continue  # such as an editor's lock, a link to nothing
            elif path.exists():
                raise ValueError(f"{path} is a pipe, a socket or a device, and must be a file")
            else:
                raise FileNotFoundError(f"{path} is a link to nothing: {os.path.realpath(path)} is not there")
    return sorted(found, key=lambda path: path.relative_to(folder).parts), others


def _raise(error: OSError) -> None:
    raise error


def package_folder(name: str) -> Path:
    """Folder of an installed Python package, without importing it. Raises ValueError where there is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"data.packages: {name!r} is not an installed Python package (a folder with modules)")
    return Path(next(iter(found.submodule_search_locations)))


@dataclasses.dataclass(frozen=True, eq=False)
class TextDocuments:
    """Text files as documents; see `sources.Documents`.

    names, files: of every file that is not empty; a name is relative to what was given, so it is the same elsewhere.
    lengths: (files,) int64 tokens of each, its end-of-document token included. empty_files: files left out.
    """

    names: tuple[str, ...]
    files: tuple[Path, ...]
    lengths: np.ndarray
    empty_files: int

    tokenizer = BYTES
    vocab_size = VOCAB_SIZE

    @classmethod
    def open(
        cls,
        paths: Iterable[str | os.PathLike] = (),
        packages: Iterable[str] = (),
        suffixes: Sequence[str] = TEXT_SUFFIXES,
    ) -> Self:
        """List the text files in `paths` (files or folders) and `packages` (import names), in that order.

        Raises FileNotFoundError for a path that is not there, and ValueError for a package that is not installed, a
        file that is named as text and is none, or where nothing is left to read.
        """
        roots = [(Path(path).name, Path(path)) for path in paths]
        roots += [(name, package_folder(name)) for name in packages]
        named: list[tuple[str, Path]] = []
        for name, root in roots:
            if root.is_dir():
                named += [(f"{name}/{path.relative_to(root).as_posix()}", path) for path in text_files(root, suffixes)]
            elif root.is_file():
                if root.name.lower().endswith(_NOT_TEXT):
                    raise ValueError(f"{root} is no plain text: make tokens of it first, with `libra prepare`")
                named.append((name, root))
            else:
                raise FileNotFoundError(f"{root}: no such file or folder")
        sizes = np.array([path.stat().st_size for _, path in named], np.int64)
        kept = np.flatnonzero(sizes)
        if kept.size == 0:
            what = f"{len(named)} empty files" if named else f"no file that ends with one of {list(suffixes)}"
            raise ValueError(f"nothing to read in {[str(root) for _, root in roots]}: {what}")
        return cls(
            names=tuple(named[i][0] for i in kept),
            files=tuple(named[i][1] for i in kept),
            lengths=sizes[kept] + 1,
            empty_files=len(named) - len(kept),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: np.ndarray, start: np.ndarray, length: np.ndarray, out: np.ndarray) -> None:
        """Tokens of pieces, end to end, into `out`. Raises ValueError if the size of a file has changed."""
        at = 0
        for number, first, size in zip(document.tolist(), start.tolist(), length.tolist(), strict=True):
            tokens = _read(self.files[number])
            if len(tokens) != self.lengths[number]:
                raise ValueError(
                    f"{self.files[number]} has changed: {self.lengths[number] - 1} bytes when the run began, "
                    f"{len(tokens) - 1} now"
                )
            out[at : at + size] = tokens[first : first + size]
            at += size

    @property
    def fingerprint(self) -> str:
        """Stands for the files' bytes and their order, wherever they lie.

        Reads every file once, when first asked for: 0.03 s for the demo's 1,037 files of 11 MB; a large corpus takes
        as long as reading it from disk, or 1 s for 1 to 2 GB where that is faster.
        """
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]

    def describe(self) -> str:
        """One sentence on what was found."""
        left_out = f"; {self.empty_files} empty files left out" if self.empty_files else ""
        return f"{len(self.files):,} text files, {int(self.lengths.sum()):,} byte tokens{left_out}"


@functools.lru_cache(maxsize=16)
def _read(path: Path) -> np.ndarray:
    """A file's tokens; kept for a while, because pieces of one file are often asked for one after another."""
    tokens = encode(path.read_bytes())
    tokens.flags.writeable = False
    return tokens
