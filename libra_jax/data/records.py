"""Input files of `libra prepare` and the texts in them, or problems with a name.

Takes JSONL, Parquet and plain text files, or folders of them; JSONL and plain text also as .gz or .zst. `list_inputs`
says which files there are; record_batches.py cuts them into batches; `texts_of` finds the texts in a batch, in a worker
process. Every record becomes a text, an empty one, or a problem that names file, line or row, and reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from libra_jax.data.config import TEXT_SUFFIXES
from libra_jax.data.documents import text_files_and_others

Kind = Literal["jsonl", "parquet", "text", "problem"]
Origin = tuple[str, Literal["line", "row"] | None, int | None]

JSONL_SUFFIXES = (".jsonl", ".json")
PARQUET_SUFFIXES = (".parquet",)
INPUT_SUFFIXES = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

_BLOCK_BYTES = 2**16  # of one read; what a broken stream gave before is kept to this many bytes
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file to read, and what it was when the inputs were listed."""

    path: str
    kind: Kind
    compression: str | None
    size_bytes: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class Position:
    """Where reading goes on: in file number `file`, after its first `record` lines or rows.

    offset: of the next line in a JSONL file, in bytes after decompression; 0 elsewhere.
    """

    file: int = 0
    offset: int = 0
    record: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """What could not be read. reason: a few words to count by; detail: more about this one.

    number: the line, from 1, or the row, from 0; None: the file as a whole, or from `detail` on.
    records: how many records are left out for it; a stream that breaks off counts as one.
    """

    file: str
    unit: Literal["line", "row"] | None
    number: int | None
    reason: str
    detail: str = ""
    records: int = 1

    def __str__(self) -> str:
        file = self.file.encode(errors="backslashreplace").decode()  # names need not be UTF-8
        where = file if self.number is None else f"{file}, {self.unit} {self.number:,}"
        return f"{where}: {self.reason}{self.detail and f' ({self.detail})'}"


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some records in a row. start, end: where they begin, and where reading goes on.

    payload: of "jsonl" its lines as bytes; of "parquet" the column's values; of "text" the files; of "problem" that.
    units: lines, rows, files or left out records in it, blank lines included.
    size_bytes: of the payload. read_bytes: of all input files, up to here, as they are on disk.
    """

    kind: Kind
    file: InputFile
    start: Position
    end: Position
    payload: Any
    units: int
    size_bytes: int
    read_bytes: int


Wrong = tuple[str, str]
"""What is wrong with a record: (reason, detail)."""


@dataclasses.dataclass
class Texts:
    """What `texts_of` finds in a batch: its units are texts, empty ones, blank lines, and problems.

    origins: (file, unit, number) of each text, as in a Problem.
    """

    texts: list[bytes] = dataclasses.field(default_factory=list)
    origins: list[Origin] = dataclasses.field(default_factory=list)
    blank: int = 0
    empty: int = 0
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def add(self, origin: Origin, text: bytes | Wrong) -> None:
        if isinstance(text, tuple):
            self.problems.append(Problem(*origin, *text))
        elif text:
            self.texts.append(text)
            self.origins.append(origin)
        else:
            self.empty += 1


class Inputs(NamedTuple):
    """Files to read. passed_over: how many others are in the folders that were named, and links to folders there."""

    files: list[InputFile]
    passed_over: int


def list_inputs(inputs: Sequence[str | os.PathLike], suffixes: Sequence[str] = INPUT_SUFFIXES) -> Inputs:
    """Files to read, in the order given; those of a folder in the order of their names, hidden ones left out.

    Raises ValueError or OSError, by name, for an input that is not there, is neither a file nor a folder, or is listed
    twice, and for a folder that cannot be read or holds no file to read.
    """
    if not inputs:
        raise ValueError("no INPUT: name at least one JSONL, Parquet or text file, or a folder of them")
    endings = [suffix + packed for suffix in suffixes for packed in ("", *COMPRESSIONS)]
    found: dict[str, str] = {}
    files, passed_over = [], 0
    for given in map(Path, inputs):
        if given.is_dir():
            there, others = text_files_and_others(given, endings)
            paths = [path for path in there if not path.name.startswith(".")]
            passed_over += others
            if not paths:
                ends = f"ends with one of {', '.join(suffixes)}{f'; {others:,} end otherwise' if others else ''}"
                raise ValueError(f"{given}: no file in this folder {ends}")
        elif given.is_file():
            paths = [given]
        elif given.exists():
            raise ValueError(
                f"{given} is a pipe, a socket or a device, which gives its text only once: an interrupted run could "
                "not go on. Write it to a file first (compressed ones, .gz or .zst, are read as they are)"
            )
        elif given.is_symlink():
            raise FileNotFoundError(f"{given} is a link to nothing: {os.path.realpath(given)} is not there")
        else:
            raise FileNotFoundError(f"{given}: no such file or folder")
        for path in paths:
            real = os.path.realpath(path)
            if real in found:
                raise ValueError(f"{path} would be read twice: it is in the inputs as {found[real]} already")
            found[real] = str(path)
            files.append(_input_file(path))
    return Inputs(files, passed_over)


def _input_file(path: Path) -> InputFile:
    stat = path.stat()
    name = path.name.lower()
    compression = next((how for suffix, how in COMPRESSIONS.items() if name.endswith(suffix)), None)
    stem = name.rpartition(".")[0] if compression else name
    kind: Kind = "jsonl" if stem.endswith(JSONL_SUFFIXES) else "parquet" if stem.endswith(PARQUET_SUFFIXES) else "text"
    return InputFile(os.path.abspath(path), kind, compression, stat.st_size, stat.st_mtime_ns)


def open_binary(file: InputFile) -> BinaryIO:
    """The file, opened by Python: pyarrow itself opens no file whose name is not UTF-8."""
    return open(file.path, "rb")


def read_blocks(file: InputFile, offset: int) -> Iterator[tuple[bytes, int]]:
    """A file's bytes from `offset` on, decompressed: (block, bytes read from disk so far). Raises OSError.

    Reads of a compressed file always begin at its start and have the same size, so that a stream that breaks off gives
    the same bytes before that wherever reading began.
    """
    if file.compression is None:
        with open(file.path, "rb", buffering=0) as raw:
            raw.seek(offset)
            while block := raw.read(_BLOCK_BYTES):
                offset += len(block)
                yield block, offset
        return
    import pyarrow

    with (
        open_binary(file) as disk,
        pyarrow.PythonFile(disk, mode="r") as raw,
        pyarrow.CompressedInputStream(raw, file.compression) as stream,
    ):
        if not os.fstat(disk.fileno()).st_size:
            raise OSError("it is empty, not even a header")
        while block := stream.read(_BLOCK_BYTES):
            if offset < len(block):
                yield block[offset:], raw.tell()
            offset = max(offset - len(block), 0)


def texts_of(batch: Batch, column: str, any_bytes: bool) -> Texts:
    """Finds the texts of a batch, as UTF-8; what is wrong with a record is found here.

    column: key of a JSONL record. any_bytes: take the bytes of a text file as they are, UTF-8 or not.
    """
    found = Texts()
    if batch.kind == "text":
        for file in batch.payload:
            found.add((file.path, None, None), _file_text(file, any_bytes))
    elif batch.kind == "parquet":
        for row, value in enumerate(batch.payload, batch.start.record):
            text = ("text is not a string", "it is null") if value is None else _checked(value)
            found.add((batch.file.path, "row", row), text)
    else:
        lines = batch.payload.split(b"\n")[: batch.units]
        if batch.start.offset == 0:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        for number, line in enumerate(lines, batch.start.record + 1):
            if line.strip():
                found.add((batch.file.path, "line", number), _json_text(line, column))
            else:
                found.blank += 1
    return found


def _file_text(file: InputFile, any_bytes: bool) -> bytes | Wrong:
    got = bytearray()
    try:
        for block, _ in read_blocks(file, 0):
            got += block
    except OSError as error:
        return "cannot be read further", f"after byte {len(got):,}: {error}"
    text = bytes(got).removeprefix(_BYTE_ORDER_MARK)
    return text if any_bytes else _checked(text)


def _json_text(line: bytes, column: str) -> bytes | Wrong:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return "not UTF-8", _unicode_detail(error)
    except (ValueError, RecursionError) as error:
        array = "; JSONL has one object a line, and this looks like a JSON array" if line.lstrip()[:1] == b"[" else ""
        return "not JSON", f"{error}{array}"
    if not isinstance(record, dict):
        return "not a JSON object", f"it is of type {type(record).__name__}"
    if column not in record:
        there = ", ".join(map(repr, list(record)[:20])) or "no keys at all"
        return "no text column", f"no {column!r} among {there}; --text-column names another"
    text = record[column]
    if not isinstance(text, str):
        return "text is not a string", f"{column!r} is {'null' if text is None else f'of type {type(text).__name__}'}"
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        return "not Unicode", f"half a surrogate pair at character {error.start:,}"


def _checked(text: bytes) -> bytes | Wrong:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return "not UTF-8", _unicode_detail(error)
    return text


def _unicode_detail(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} at {error.start:,}: {error.reason}"
