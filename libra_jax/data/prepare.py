"""`libra prepare INPUT... --tokenizer FILE|bytes --out DIR`: text -> tokens on disk, once.

Reads JSONL, Parquet and text files (record_batches.py), tokenises them in worker processes, and writes one folder that
serves every sequence length (prepared.py says what is in it). What comes out depends on the inputs and the options
alone: not on the number of workers, nor on how often the run was interrupted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

import numpy as np

from libra_jax.data import prepare_folder, prepared
from libra_jax.data.durable import PrepareStopped
from libra_jax.data.orphans import end_with_parent
from libra_jax.data.prepare_folder import UnfinishedFolder
from libra_jax.data.prepare_progress import Progress
from libra_jax.data.prepare_state import difference, inputs_listing
from libra_jax.data.prepared import Manifest
from libra_jax.data.record_batches import batches
from libra_jax.data.records import INPUT_SUFFIXES, Batch, InputFile, Position, Problem, list_inputs, texts_of
from libra_jax.data.tokenization import Tokenizer, TokenizerFailed

SHARD_DOCUMENTS = 2**20
"""A shard ends here, too: one that is open takes 20 bytes of memory a document."""
BATCH_BYTES = 2**22
_SHOWN_PROBLEMS = 5
_PASSED_OVER = "they end with none of --suffixes, or are links to folders"


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Tokenise text once, for training at any sequence length.

    Interrupted, the same command goes on where it was. DIR appears when it is whole. Documents are kept whole: what
    becomes of one that is longer than a sequence is chosen when a model is trained. A line of JSONL that is blank is no
    record, and is not counted.
    """

    tokenizer: str
    """A tokenizer.json of Hugging Face, or bytes: one token a byte."""
    out: Path
    """The folder to make."""
    text_column: str = "text"
    """Where the text is: a column of Parquet files, a key of JSONL's objects."""
    end_of_document: str | None = None
    """Token to put after each document; None: <|endoftext|>, </s>, <|end_of_text|> or <eos>, the first there is."""
    parse_special_tokens: bool = False
    """Read special tokens that a text spells out as such; otherwise they are ordinary text."""
    on_error: Literal["stop", "skip"] = "stop"
    """A record or file that cannot be read: stop there, or leave it out, count it and list it in DIR/problems.jsonl."""
    workers: int | None = None
    """Processes that tokenise; None: one for each core. The result is the same for any number."""
    shard_tokens: int = 2**28
    """About so many tokens to a file; also how far apart the points are from which an interrupted run goes on."""
    suffixes: tuple[str, ...] = INPUT_SUFFIXES
    """What a file in a folder must end with to be read, in capitals or not; .gz or .zst may follow. Others are counted.
    A file that is named itself is read whatever it ends with, as text."""


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """What a worker makes of a batch: documents end to end, and how its units divide.

    tokens: (sum(lengths),) of the tokenizer's dtype. lengths: (documents,) uint32.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    blank: int
    empty: int
    problems: list[Problem]


def run(inputs: Sequence[str | os.PathLike], options: PrepareOptions) -> int:
    """Make the folder, or find that it is there; a summary on stdout. Returns 0.

    inputs: files and folders. Raises ValueError or OSError for what cannot be asked for, before anything is done, and
    PrepareStopped for a run that could not go on.
    """
    manifest, passed_over = _prepare(inputs, options)
    print(summary(manifest, options.out, passed_over))
    return 0


def prepare(inputs: Sequence[str | os.PathLike], options: PrepareOptions) -> Manifest:
    """As `run`, without the summary."""
    return _prepare(inputs, options)[0]


def _prepare(inputs: Sequence[str | os.PathLike], options: PrepareOptions) -> tuple[Manifest, int]:
    """The manifest, and how many files were passed over."""
    workers = _usable_cores() if options.workers is None else options.workers
    for name, value in (("workers", workers), ("shard-tokens", options.shard_tokens)):
        if value < 1:
            raise ValueError(f"--{name} ({value}) must be at least 1")
    if options.on_error not in ("stop", "skip"):
        raise ValueError(f"--on-error ({options.on_error}) must be stop or skip")
    out = Path(os.path.abspath(options.out))
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"--out ({os.fsencode(out)!r}) must be UTF-8: shards have no other names") from error
    files, passed_over = list_inputs(inputs, options.suffixes)
    tokenizer = Tokenizer.open(options.tokenizer, options.end_of_document, options.parse_special_tokens)
    _refuse_out_among_inputs(out, inputs)
    listing = inputs_listing(files)
    settings = {
        "tokenizer": {name: value for name, value in dataclasses.asdict(tokenizer).items() if name != "file"},
        "text_column": options.text_column,
        "shard_tokens": options.shard_tokens,
        "inputs": {
            "files": len(files),
            "bytes": sum(file.size_bytes for file in files),
            "sha256": hashlib.sha256(listing).hexdigest(),
        },
    }
    if os.path.lexists(out):
        return _already_there(out, settings, files, options.on_error), passed_over
    folder = UnfinishedFolder(out, settings, tokenizer, files)
    try:
        if folder.state.bad_records and options.on_error == "stop":
            raise ValueError(
                f"{folder.path} was begun with --on-error skip and has left out {folder.state.bad_records:,} records: "
                "go on with --on-error skip, or remove that folder to start from the beginning"
            )
        _fill(folder, files, options, workers)
        return _finish(folder, files), passed_over
    finally:
        folder.close()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse_out_among_inputs(out: Path, inputs: Sequence[str | os.PathLike]) -> None:
    for given in map(Path, inputs):
        if given.is_dir() and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(given)):
            raise ValueError(f"--out ({out}) is inside the input folder {given}: a later run would read it as input")


def _already_there(out: Path, settings: dict[str, Any], files: Sequence[InputFile], on_error: str) -> Manifest:
    """The manifest of DIR where it is what was asked for. Raises ValueError or FileNotFoundError where it is not."""
    if not (out / prepared.MANIFEST).is_file():
        raise ValueError(f"{out} is there already, and was not made by `libra prepare`; give another --out")
    manifest = prepared.PreparedDocuments.open(out).manifest
    then = {**manifest.settings, "tokenizer": manifest.tokenizer, "inputs": manifest.inputs}
    differs = difference(then, settings, out / prepared.INPUTS, files)
    if differs:
        raise ValueError(
            f"{out} is there already, made with other options or inputs: {differs}. Give another --out, or remove it"
        )
    bad = sum(manifest.left_out["bad"].values())
    if bad and on_error == "stop":
        raise ValueError(f"{out} is there already, made with --on-error skip: {bad:,} records are left out of it")
    prepare_folder.remove_leftover(out)
    print(f"{out} is already prepared", file=sys.stderr)
    return manifest


def _fill(folder: UnfinishedFolder, files: Sequence[InputFile], options: PrepareOptions, workers: int) -> None:
    """Tokenise what is not yet in the folder."""
    state = folder.state
    batch_bytes = max(1, min(BATCH_BYTES, options.shard_tokens // 8))
    source = batches(files, state.position, options.text_column, batch_bytes)
    total_bytes = sum(file.size_bytes for file in files)
    with (
        _workers(workers, folder.worker_tokenizer, options.text_column) as submit,
        Progress(total_bytes, state.documents, state.tokens) as progress,
    ):
        for batch, done in _in_order(source, submit, workers):
            _take(folder, batch, done, options.on_error)
            if folder.shard_tokens >= options.shard_tokens or folder.shard_documents >= SHARD_DOCUMENTS:
                folder.commit(batch.end)
            progress.show(batch.read_bytes, len(done.lengths), len(done.tokens))
    folder.commit(Position(len(files)))


def _take(folder: UnfinishedFolder, batch: Batch, done: Tokenized, on_error: str) -> None:
    state = folder.state
    for problem in done.problems:
        if on_error == "stop":
            raise PrepareStopped(f"{problem}\n--on-error skip leaves out what cannot be read, counts and lists it")
        if folder.new_problems < _SHOWN_PROBLEMS:
            print(f"left out: {problem}", file=sys.stderr)
        elif folder.new_problems == _SHOWN_PROBLEMS:
            print("left out: more, which are counted at the end", file=sys.stderr)
        folder.problem(problem)
    folder.add(done.tokens, done.lengths)
    state.units += batch.units
    state.blank += done.blank
    state.empty += done.empty


def _in_order(
    source: Iterable[Batch], submit: Callable[[Batch], concurrent.futures.Future[Tokenized]], workers: int
) -> Iterator[tuple[Batch, Tokenized]]:
    """Every batch with what it becomes, in order; a few are on their way, by number and by size."""
    waiting: deque[tuple[Batch, concurrent.futures.Future[Tokenized]]] = deque()
    size = 0
    for batch in source:
        waiting.append((batch, submit(batch)))
        size += batch.size_bytes
        while waiting and (len(waiting) > 2 * workers or size > 2 * workers * BATCH_BYTES):
            first, future = waiting.popleft()
            size -= first.size_bytes
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


@contextlib.contextmanager
def _workers(
    workers: int, tokenizer: Tokenizer, column: str
) -> Iterator[Callable[[Batch], concurrent.futures.Future[Tokenized]]]:
    """A function that has a batch tokenised: in another process, or, where there is to be one, in this one."""
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are the only parallelism

    def here(batch: Batch) -> concurrent.futures.Future[Tokenized]:
        done: concurrent.futures.Future[Tokenized] = concurrent.futures.Future()
        done.set_result(tokenize(batch, tokenizer, column))
        return done

    executor = None
    others = set(multiprocessing.active_children())
    try:
        if workers == 1:
            yield here
            return
        executor = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer, column)
        )

        def there(batch: Batch) -> concurrent.futures.Future[Tokenized]:
            if batch.kind == "problem":
                return here(batch)
            old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is for this process
            try:
                return executor.submit(_tokenize_in_worker, batch)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old)

        yield there
    except (BrokenProcessPool, MemoryError) as error:
        raise PrepareStopped(
            f"out of memory, or a worker process was killed, often for want of memory ({error}). The same command goes "
            f"on after the last whole shard; fewer --workers ({workers}) need less memory"
        ) from error
    finally:
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            executor.shutdown(wait=True)
        if parallelism is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = parallelism


_worker: tuple[Tokenizer, str]


def _start_worker(tokenizer: Tokenizer, column: str) -> None:
    global _worker
    _worker = tokenizer, column
    end_with_parent()


def _tokenize_in_worker(batch: Batch) -> Tokenized:
    return tokenize(batch, *_worker)


def tokenize(batch: Batch, tokenizer: Tokenizer, column: str) -> Tokenized:
    """What a batch becomes. A text that the tokenizer gives up on becomes a problem."""
    if batch.kind == "problem":
        return Tokenized(np.empty(0, tokenizer.dtype), np.empty(0, np.uint32), 0, 0, [batch.payload])
    found = texts_of(batch, column, any_bytes=tokenizer.file is None)
    problems = found.problems
    try:
        encoded = tokenizer.encode(found.texts)
    except TokenizerFailed:
        encoded = []
        for origin, text in zip(found.origins, found.texts, strict=True):
            try:
                encoded += tokenizer.encode([text])
            except TokenizerFailed as error:
                problems.append(Problem(*origin, "the tokenizer failed", str(error)))
        problems.sort(key=lambda problem: problem.number or 0)
    encoded_lengths = np.array([len(tokens) for tokens in encoded], np.uint32)
    lengths = encoded_lengths[encoded_lengths > 0]
    tokens = np.concatenate([np.empty(0, tokenizer.dtype), *encoded])
    empty = found.empty + len(encoded_lengths) - len(lengths)
    return Tokenized(tokens, lengths, found.blank, empty, problems)


def _finish(folder: UnfinishedFolder, files: Sequence[InputFile]) -> Manifest:
    state = folder.state
    accounted = state.documents + state.blank + state.empty + state.bad_records
    assert state.units == accounted, f"{state.units} records, lines and files were read, {accounted} accounted for"
    for file in files:
        try:
            now = os.stat(file.path)
        except OSError as error:
            raise PrepareStopped(f"{file.path} was read, and is gone now: {error.strerror}") from error
        if (now.st_size, now.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            raise PrepareStopped(
                f"{file.path} has changed while it was read: {file.size_bytes:,} bytes, modified at {file.mtime_ns:,} "
                f"ns before, {now.st_size:,} bytes at {now.st_mtime_ns:,} ns now; remove {folder.path} and start again"
            )
    if not state.documents:
        folder.remove()
        raise PrepareStopped(
            f"there is nothing to make {folder.out} of: of {state.units - state.blank:,} records "
            f"{state.empty:,} are empty and {state.bad_records:,} cannot be read{_reasons(state.bad)}"
        )
    return folder.finish()


def _reasons(bad: dict[str, int]) -> str:
    return f" ({', '.join(f'{count:,}: {reason}' for reason, count in sorted(bad.items()))})" if bad else ""


def summary(manifest: Manifest, out: Path, passed_over: int = 0) -> str:
    """What a user should know of a prepared folder: a few lines. passed_over: files in folders that were not read."""
    bad = manifest.left_out["bad"]
    lines = [
        f"{out}: {manifest}",
        f"tokenizer {manifest.tokenizer['name']}, {manifest.tokenizer['vocab_size']:,} tokens in its vocabulary, "
        f"{manifest.tokenizer['end_of_document']} ends a document; "
        f"{len(manifest.shards):,} shards, {sum(shard.bytes for shard in manifest.shards) / 1e6:,.1f} MB",
        f"of {manifest.records:,} records {manifest.left_out['empty']:,} are empty and left out, "
        f"{sum(bad.values()):,} cannot be read and are left out"
        f"{f', all listed in {out / prepared.PROBLEMS}' if bad else ''}",
        *(f"  {count:,}: {reason}" for reason, count in bad.items()),
        *([f"{passed_over:,} files in the named folders are passed over: {_PASSED_OVER}"] if passed_over else []),
        "sequence length    packed sequences    full    documents that are longer",
    ]
    for seq_len, counts in manifest.sequences.items():
        longer, full = counts["longer_documents"], f"{counts['fill']:.1%}"
        lines.append(f"{int(seq_len):15,}    {counts['sequences']:16,}  {full:>6}    {longer:25,}")
    return "\n".join(lines)
