"""Input files of `libra prepare` -> batches of records, in order.

Reads JSONL, Parquet and text files one after another and cuts them into batches of a few MB. Each batch says where the
next one starts, and reading can start again there: what is in a batch depends on the files and on where it starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from libra_jax.data.records import Batch, InputFile, Position, Problem, Wrong, open_binary, read_blocks

BATCH_RECORDS = 2**15  # at most, of rows or files: keeps batches of tiny ones small
_PARQUET_ROWS = 64  # decoded at once: rows may be large


def batches(files: Sequence[InputFile], start: Position, column: str, batch_bytes: int) -> Iterator[Batch]:
    """What is left to read from `start` on, in batches of about `batch_bytes`. The end of one is the start of the next.

    column: of Parquet files. A file that cannot be read further gives a batch of kind "problem"; its records before
    that are in batches as usual.
    """
    done_bytes = sum(file.size_bytes for file in files[: start.file])
    while start.file < len(files):
        file = files[start.file]
        if file.kind == "text":
            batch = _text_batch(files, start, batch_bytes, done_bytes)
            yield batch
            start, done_bytes = batch.end, batch.read_bytes
            continue
        read = _parquet_batches if file.kind == "parquet" else _jsonl_batches
        yield from read(file, start, column, batch_bytes, done_bytes)
        start, done_bytes = Position(start.file + 1), done_bytes + file.size_bytes


def _text_batch(files: Sequence[InputFile], start: Position, batch_bytes: int, done_bytes: int) -> Batch:
    """Text files that follow one another, up to a size; a worker reads them."""
    stop, size = start.file, 0
    while stop < len(files) and files[stop].kind == "text" and stop - start.file < BATCH_RECORDS:
        if size >= batch_bytes:
            break
        size += files[stop].size_bytes
        stop += 1
    chosen = tuple(files[start.file : stop])
    return Batch("text", chosen[0], start, Position(stop), chosen, len(chosen), size, done_bytes + size)


def _jsonl_batches(file: InputFile, start: Position, column: str, batch_bytes: int, done_bytes: int) -> Iterator[Batch]:
    """Whole lines: those that end within `batch_bytes`, or the first one where none does."""
    pending = bytearray()
    searched = 0  # bytes of `pending` that are known to hold no end of line
    disk_bytes = 0

    def take(size: int) -> Batch:
        nonlocal start, searched
        lines = bytes(pending[:size])
        del pending[:size]
        searched = 0
        units = lines.count(b"\n") + (not lines.endswith(b"\n"))
        end = Position(start.file, start.offset + size, start.record + units)
        batch = Batch("jsonl", file, start, end, lines, units, size, done_bytes + min(disk_bytes, file.size_bytes))
        start = end
        return batch

    def ready() -> Iterator[Batch]:
        nonlocal searched
        while len(pending) >= batch_bytes:
            size = 1 + (pending.rfind(b"\n", 0, batch_bytes) if searched < batch_bytes else -1)
            size = size or 1 + pending.find(b"\n", max(searched, batch_bytes))
            if not size:
                searched = len(pending)
                return
            yield take(size)

    problem = None
    try:
        for block, disk_bytes in read_blocks(file, start.offset):  # noqa: B007 (take reads it)
            pending += block
            yield from ready()
    except OSError as error:
        problem = error
    if problem is None:
        if pending:
            yield take(len(pending))
        return
    whole = pending.rfind(b"\n") + 1
    if whole:
        yield take(whole)
    yield _broken(file, start, done_bytes, 1, f"after line {start.record:,}, byte {start.offset:,}: {problem}")


def _broken(file: InputFile, start: Position, done_bytes: int, records: int, detail: str) -> Batch:
    problem = Problem(file.path, None, None, "cannot be read further", detail, records)
    return _problem(file, start, done_bytes, problem)


def _problem(file: InputFile, start: Position, done_bytes: int, problem: Problem) -> Batch:
    end = Position(start.file + 1)
    return Batch("problem", file, start, end, problem, problem.records, 0, done_bytes + file.size_bytes)


def _parquet_batches(
    file: InputFile, start: Position, column: str, batch_bytes: int, done_bytes: int
) -> Iterator[Batch]:
    """Values of the text column, as bytes or None; row groups before `start` are not read."""
    import pyarrow
    from pyarrow import parquet

    broken = (OSError, ValueError, pyarrow.ArrowException)
    with contextlib.ExitStack() as opened:
        try:
            disk = opened.enter_context(open_binary(file))
            source = opened.enter_context(parquet.ParquetFile(disk, page_checksum_verification=True))
            rows = source.metadata.num_rows
            schema = source.schema_arrow
            group_rows = [source.metadata.row_group(group).num_rows for group in range(source.num_row_groups)]
        except broken as error:
            yield _broken(file, start, done_bytes, 1, f"after 0 rows: {error}")
            return
        wrong = _wrong_column(schema, column)
        if wrong is not None:
            if rows:
                yield _problem(file, start, done_bytes, Problem(file.path, None, None, *wrong, rows))
            return
        values: list[bytes | None] = []
        size = 0

        def take() -> Batch:
            nonlocal start, values, size
            end = Position(start.file, 0, start.record + len(values))
            read_bytes = done_bytes + file.size_bytes * end.record // rows
            batch = Batch("parquet", file, start, end, tuple(values), len(values), size, read_bytes)
            start, values, size = end, [], 0
            return batch

        first = 0
        try:
            for group, count in enumerate(group_rows):
                if first + count > start.record + len(values):
                    skip = max(start.record + len(values) - first, 0)
                    for text in _column_values(source, group, column, skip):
                        values.append(text)
                        size += len(text or b"")
                        if size >= batch_bytes or len(values) == BATCH_RECORDS:
                            yield take()
                first += count
            if start.record + len(values) != rows:
                raise OSError(f"there are only {start.record + len(values):,}")
        except broken as error:
            if values:
                yield take()
            detail = f"after {start.record:,} of {rows:,} rows: {error}"
            yield _broken(file, start, done_bytes, rows - start.record, detail)
            return
        if values:
            yield take()


def _wrong_column(schema: Any, column: str) -> Wrong | None:
    """What is wrong with the text column of a file with this schema."""
    from pyarrow import types

    kinds = [field.type for field in schema if field.name == column]
    there = "there are " + ", ".join(f"{field.name} ({field.type})" for field in schema)
    if not kinds:
        return "no text column", f"{there}; --text-column names another"
    if len(kinds) > 1:
        return "two text columns", f"{len(kinds)} are named {column!r}, and one must be: {there}"
    kind = kinds[0].value_type if types.is_dictionary(kinds[0]) else kinds[0]
    return None if _is_text(kind) else ("text column holds no strings", f"{there}; --text-column names another")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def _column_values(source: Any, group: int, column: str, skip: int) -> Iterator[bytes | None]:
    """Values of a row group's text column, as they are stored, without the first `skip`."""
    import pyarrow

    for rows in source.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=[column]):
        values = rows.column(0)
        if pyarrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        yield from values.slice(skip).cast(pyarrow.large_binary()).to_pylist() if skip < len(values) else ()
        skip = max(skip - len(values), 0)
