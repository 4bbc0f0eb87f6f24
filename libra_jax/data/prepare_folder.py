"""The folder that `libra prepare` works in: whole shards and how far they reach, so that an interrupted run goes on.

    DIR.unfinished/lock          held while a run works here
    DIR.unfinished/state.json    written anew after each shard: what it reaches to, the counts so far
    DIR.unfinished/folder        becomes DIR when everything is there

A shard is written under a temporary name; only when it is on disk, and its lengths and problems are, does the state say
so. Whatever lies behind the state is thrown away by the next run, which therefore ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax.data import prepared
from libra_jax.data.durable import (
    PrepareStopped,
    flush,
    holds,
    locked,
    open_at,
    remove_locked,
    replace,
    stops_on_errors,
    sync,
)
from libra_jax.data.packing import PackedDocuments
from libra_jax.data.prepare_state import (
    FOLDER,
    LENGTHS_HEADER_BYTES,
    STATE,
    State,
    check_shards,
    difference,
    inputs_listing,
    shard_names,
)
from libra_jax.data.prepared import Manifest, Shard
from libra_jax.data.records import InputFile, Position, Problem
from libra_jax.data.tokenization import Tokenizer

SHARD_OPTIONS = "group_size:1,zstd:1"
"""One record to a chunk, so that any can be read alone. zstd:1 makes text's tokens half to a third as large, and still
reads 100 million tokens a second on one core (uncompressed: 240; brotli, the default, writes half as fast); a core
tokenises two million. The checksums of ArrayRecord find damage either way."""

_WRITING = "writing.array_record"
_LOCK = "lock"


class UnfinishedFolder:
    """DIR.unfinished, locked. `add` documents, `commit` them at a position, `finish` to make DIR of it."""

    def __init__(self, out: Path, settings: dict[str, Any], tokenizer: Tokenizer, inputs: Sequence[InputFile]) -> None:
        """Goes on with what is there, or starts anew. Raises ValueError where what is there was begun with other
        settings or inputs, and PrepareStopped where another run is at work on it, or it cannot be written."""
        self.out = out
        self.path = unfinished_path(out)
        self.folder = self.path / FOLDER
        self._tokenizer = tokenizer
        self._inputs = inputs
        self.new_problems = 0
        self._writer: Any = None
        self._lock = -1
        with stops_on_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self.path / _LOCK)
            try:
                if out.exists():
                    raise PrepareStopped(f"another run has just made {out}")
                self._open(settings)
            except BaseException:
                self.close()
                raise

    def _open(self, settings: dict[str, Any]) -> None:
        self.state = State.load(self._state_path) if self._state_path.exists() else State(settings)
        if self.state.position != Position():  # otherwise nothing is lost by starting anew
            differs = difference(self.state.settings, settings, self.folder / prepared.INPUTS, self._inputs)
            if differs:
                raise ValueError(
                    f"{self.path} was begun with other options or inputs: {differs}. Start it as it was begun, or "
                    "remove that folder to start from the beginning"
                )
            check_shards(self.state, self.path)
            self._put_copies()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            self.state = State(settings)
            self._state_path.unlink(missing_ok=True)
            replace(self.folder / prepared.LENGTHS, bytes(LENGTHS_HEADER_BYTES))
            replace(self.folder / prepared.PROBLEMS, b"")
            self._put_copies()
            self.state.save(self._state_path)
        (self.folder / prepared.PROBLEMS).touch()  # removed by a run that was stopped while it finished
        expected = {prepared.INPUTS, prepared.TOKENIZER, prepared.LENGTHS, prepared.PROBLEMS}
        shards = len(self.state.shards)
        expected |= {name for i in range(shards) for name in shard_names(i, shards)}
        for path in self.folder.iterdir():
            if path.name not in expected:
                path.unlink()
        lengths_bytes = LENGTHS_HEADER_BYTES + 4 * self.state.documents
        self._lengths = open_at(self.folder / prepared.LENGTHS, lengths_bytes)
        self._problems = open_at(self.folder / prepared.PROBLEMS, self.state.problems_bytes)
        self._start_shard()

    def _put_copies(self) -> None:
        """What the folder has of the inputs and the tokenizer, where it is not there already."""
        copies = {prepared.INPUTS: inputs_listing(self._inputs)}
        if self._tokenizer.file is not None:
            copies[prepared.TOKENIZER] = content = self._tokenizer.file.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            if sha256 != self._tokenizer.sha256:
                then = f"{self._tokenizer.sha256}"[:16]
                raise ValueError(f"{self._tokenizer.file} has changed: sha256 {then}... before, {sha256[:16]}... now")
        for name, content in copies.items():
            path = self.folder / name
            if not path.is_file() or path.read_bytes() != content:
                replace(path, content)

    @property
    def _state_path(self) -> Path:
        return self.path / STATE

    @property
    def worker_tokenizer(self) -> Tokenizer:
        """The tokenizer from the folder's own copy, which does not change."""
        if self._tokenizer.file is None:
            return self._tokenizer
        return dataclasses.replace(self._tokenizer, file=self.folder / prepared.TOKENIZER)

    def _start_shard(self) -> None:
        self._shard_lengths: list[np.ndarray] = []
        self.shard_documents = 0
        self.shard_tokens = 0
        self._digest = hashlib.sha256()
        self._writer = None

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Documents, end to end: tokens (sum(lengths),) of the tokenizer's dtype, lengths (documents,) uint32."""
        if not lengths.size:
            return
        data = tokens.tobytes()
        self._digest.update(data)
        with stops_on_errors(self.folder / _WRITING):
            if self._writer is None:
                from array_record.python.array_record_module import ArrayRecordWriter

                self._writer = ArrayRecordWriter(str(self.folder / _WRITING), SHARD_OPTIONS)
            at = 0
            for size in (lengths.astype(np.int64) * tokens.itemsize).tolist():
                self._writer.write(data[at : at + size])
                at += size
        self._shard_lengths.append(lengths)
        self.shard_documents += len(lengths)
        self.shard_tokens += len(tokens)

    def problem(self, problem: Problem) -> None:
        """Something that is left out, for good when it is committed."""
        self.new_problems += 1
        bad = self.state.bad
        bad[problem.reason] = bad.get(problem.reason, 0) + problem.records
        with stops_on_errors(self.folder / prepared.PROBLEMS):
            self._problems.write(json.dumps(dataclasses.asdict(problem)).encode() + b"\n")

    def commit(self, position: Position) -> None:
        """Everything added so far is put on disk for good; a run that goes on reads from `position`."""
        self._check_that_it_is_ours()
        with stops_on_errors(self.folder):
            if self.shard_documents:
                self._commit_shard()
            self.state.problems_bytes = self._problems.tell()
            flush(self._problems)
            self.state.position = position
            self.state.save(self._state_path)
        self._start_shard()

    def _commit_shard(self) -> None:
        self._writer.close()
        path = self.folder / _WRITING
        sync(path)
        name = shard_names(len(self.state.shards), len(self.state.shards))[0]
        os.rename(path, self.folder / name)
        sync(self.folder)
        lengths = np.concatenate(self._shard_lengths).astype("<u4")
        self._lengths.write(lengths.tobytes())
        flush(self._lengths)
        shard = Shard(
            name=name,
            documents=self.shard_documents,
            tokens=self.shard_tokens,
            bytes=(self.folder / name).stat().st_size,
            sha256=self._digest.hexdigest(),
            lengths_sha256=hashlib.sha256(lengths.tobytes()).hexdigest(),
        )
        self.state.shards.append(shard)
        self.state.longest = max(self.state.longest, int(lengths.max()))

    def finish(self) -> Manifest:
        """DIR appears, whole. Everything must be committed."""
        state = self.state
        self._check_that_it_is_ours()
        with stops_on_errors(self.folder):
            for i, shard in enumerate(state.shards):
                writing, name = (self.folder / name for name in shard_names(i, len(state.shards)))
                if writing.exists():
                    os.rename(writing, name)
                shards = dataclasses.replace(shard, name=name.name)
                state.shards[i] = shards
            header = {"descr": "<u4", "fortran_order": False, "shape": (state.documents,)}
            self._lengths.seek(0)
            np.lib.format.write_array_header_1_0(self._lengths, header)
            assert self._lengths.tell() == LENGTHS_HEADER_BYTES
            flush(self._lengths)
            if not state.problems_bytes:
                (self.folder / prepared.PROBLEMS).unlink(missing_ok=True)
            manifest = self._manifest(self._packed())
            manifest.save(self.folder / prepared.MANIFEST)
            sync(self.folder / prepared.MANIFEST)
            sync(self.folder)
            try:
                os.rename(self.folder, self.out)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                raise PrepareStopped(f"{self.out} has appeared while {self.folder} was made; remove one") from error
            sync(self.out.parent)
        self.remove()
        return manifest

    def _packed(self) -> dict[str, dict[str, Any]]:
        """Counts packed sequences of the usual lengths, so that no run has to; `Manifest.sequences`."""
        lengths, sequences = np.load(self.folder / prepared.LENGTHS, mmap_mode="r"), {}
        for seq_len in prepared.SEQUENCE_LENGTHS:
            index = prepared.packing_index(self.folder, seq_len)
            packed = PackedDocuments(lengths, seq_len, index=index)
            sync(index)
            counts = {"sequences": len(packed), "fill": round(packed.fill, 4), "longer_documents": packed.totals.long}
            sequences[str(seq_len)] = counts
        return sequences

    def _manifest(self, sequences: dict[str, dict[str, Any]]) -> Manifest:
        state = self.state
        settings = dict(state.settings)
        tokenizer, inputs = settings.pop("tokenizer"), settings.pop("inputs")
        dtype = self._tokenizer.dtype.name
        return Manifest(
            documents=state.documents,
            tokens=state.tokens,
            longest=state.longest,
            dtype=dtype,
            tokenizer=tokenizer,
            fingerprint=prepared.fingerprint_of(tokenizer, dtype, tuple(state.shards)),
            records=state.units - state.blank,
            left_out={"empty": state.empty, "bad": dict(sorted(state.bad.items()))},
            sequences=sequences,
            inputs=inputs,
            settings=settings,
            shards=tuple(state.shards),
        )

    def _check_that_it_is_ours(self) -> None:
        if not holds(self._lock, self.path / _LOCK):
            raise PrepareStopped(f"{self.path} was removed while this run was at work in it; start it again")

    def remove(self) -> None:
        """The folder, when DIR was made of it, or there is nothing to make of it."""
        self._let_go()
        remove_locked(self._lock, self.path / _LOCK)
        self.close()

    def close(self) -> None:
        """Lets go of the lock; what is not committed is thrown away."""
        self._let_go()
        if holds(self._lock, self.path / _LOCK):  # otherwise what is there is another run's
            (self.folder / _WRITING).unlink(missing_ok=True)  # where the disk is full, this is room
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _let_go(self) -> None:
        """Of the open files."""
        self._writer = None
        for file in (getattr(self, "_lengths", None), getattr(self, "_problems", None)):
            if file is not None:
                with contextlib.suppress(OSError):  # what it still had in memory is behind the last commit
                    file.close()


def unfinished_path(out: Path) -> Path:
    return out.with_name(out.name + prepared.UNFINISHED)


def remove_leftover(out: Path) -> None:
    """Of a run that was stopped after DIR had appeared."""
    unfinished = unfinished_path(out)
    if unfinished.is_dir() and not (unfinished / FOLDER).exists():
        with contextlib.suppress(OSError, PrepareStopped):  # another run has it
            lock = locked(unfinished / _LOCK)
            try:
                remove_locked(lock, unfinished / _LOCK)
            finally:
                os.close(lock)
