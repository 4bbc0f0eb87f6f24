"""What benchmarks/data.py measures, one case at a time, each meant for a process of its own: a function of files and
numbers that returns plain values. Processor time beside wall time: what other programs do counts little in the first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data_files import VOCABULARY
from libra_jax import plan as plan_module
from libra_jax.data import Corpus, MegatronDocuments, PackedDocuments, PoolSampler, PreparedDocuments, StepBatches
from libra_jax.data import batches as batches_module
from libra_jax.data import packing as packing_module
from libra_jax.data import pool_size as pool_size_module
from libra_jax.data import sampler as sampler_module
from libra_jax.data.batches import BatchIterator, check_step
from libra_jax.data.prepared import Manifest
from libra_jax.spec import PoolSpec

Row = dict[str, Any]
STEP_PARTS = (
    (PackedDocuments, "_window", "packing"),
    (PoolSampler, "step_sequences", "order"),
    (PoolSampler, "work", "work"),
    (sampler_module, "place", "place"),
    (PoolSampler, "document_lengths", "lists"),
    (pool_size_module, "plan_pool", "plans"),
    (plan_module, "build_tables", "tables"),
    (pool_size_module, "stack_plans", "stack"),
    (plan_module, "check_tables", "check"),
    (MegatronDocuments, "read", "read"),
    (PreparedDocuments, "read", "read"),
    (batches_module, "describe_documents", "arrays"),
)
START_PARTS = (
    (packing_module, "deal_windows", "deal"),
    (PackedDocuments, "_count", "count"),
    (PackedDocuments, "_key", "key"),
)
STEP_PART_NAMES = tuple(dict.fromkeys(part for *_, part in STEP_PARTS))


class Parts:
    """Seconds by part: while `measured`, each of the functions counts what it takes, less what others in it take."""

    def __init__(self, functions: Sequence[tuple[Any, str, str]], clock: Callable[[], float] = time.process_time):
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._functions, self._clock = functions, clock
        self._inner: list[float] = []  # of the functions that run now, the outermost first: what others in it took

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, part in self._functions:
                stack.enter_context(mock.patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            began = self._clock()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                took = self._clock() - began
                self.seconds[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return run


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This process on one core, and what it starts; off Linux, on those it has."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Stopwatch:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __call__(self) -> tuple[float, float]:
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def open_megatron(
    prefix: Path, spec: PoolSpec, pools: int, micro_steps: int = 1, rows: range | None = None
) -> StepBatches:
    return _steps(MegatronDocuments.open(prefix, vocab_size=VOCABULARY), spec, pools, micro_steps, rows, VOCABULARY)


def open_prepared(folder: Path, spec: PoolSpec, pools: int, micro_steps: int = 1) -> StepBatches:
    documents = PreparedDocuments.open(folder)
    return _steps(documents, spec, pools, micro_steps, None, documents.vocab_size)


def _steps(
    documents: Any, spec: PoolSpec, pools: int, micro_steps: int, rows: range | None, vocab_size: int | None
) -> StepBatches:
    packed = PackedDocuments(documents.lengths, spec.seq_len)
    sampler = PoolSampler([packed], spec, pools=pools, micro_steps=micro_steps, last_step="drop")
    return StepBatches([Corpus("corpus", documents, packed)], sampler, rows=rows, vocab_size=vocab_size)


def throughput(path: Path, spec: PoolSpec, micro_steps: int, least_tokens: int) -> Row:
    """One core makes steps of two pools and `micro_steps`, at least so many tokens, from the start of an epoch.

    Whole windows are measured, so that packing one counts for all steps that it serves.
    """
    with one_core():
        opener = open_prepared if path.is_dir() else open_megatron
        opener(path, spec, 2, micro_steps)[0]  # warms up
        batches = opener(path, spec, 2, micro_steps)
        (packed,) = (corpus.packed for corpus in batches.corpora)
        size = batches.sampler.sequences_per_step
        window = min(packed.rules["window_sequences"], len(packed))
        windows = -(-least_tokens // (window * spec.seq_len))
        steps = max(windows * window // size, 1)
        parts, watch = Parts(STEP_PARTS), Stopwatch()
        with parts.measured():
            for step in range(steps):
                batches[step]
        wall, processor = watch()
    tokens = steps * size * spec.seq_len
    milliseconds = {name: 1e3 * parts.seconds[name] / steps for name in STEP_PART_NAMES}
    return {
        "tokens/s": tokens / processor,
        "by wall": tokens / wall,
        "ms a step": 1e3 * processor / steps,
        **milliseconds,
        "rest": 1e3 * processor / steps - sum(milliseconds.values()),
        "steps": steps,
    }


# --------------------------------------------------------------------------------------------------- many documents


def anonymous_bytes() -> int:
    """What this process holds that is not a mapped file. 0 off Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def start_up(lengths_path: Path, spec: PoolSpec, index: Path, position: int) -> Row:
    """A sampler of mapped lengths, its index made where there is none; then one step, and five others far apart.

    position: the step to ask for first; -1: the last one of the first epoch.
    """
    before, watch, parts = anonymous_bytes(), Stopwatch(), Parts(START_PARTS)
    with parts.measured():
        lengths = np.load(lengths_path, mmap_mode="r")
        packed = PackedDocuments(lengths, spec.seq_len, index=index)
        sampler = PoolSampler([packed], spec, pools=2, micro_steps=2)
        len(sampler)
    wall, processor = watch()
    held = anonymous_bytes() - before
    first = sampler.steps_per_epoch - 1 if position < 0 else position
    cold, touched = _timed_step(sampler, first)
    back = -1 if position < 0 else 1
    later = [_timed_step(sampler, first + back * 97 * i)[0] for i in range(1, 6) if first + back * 97 * i >= 0]
    held_documents = sum(len(sampler.document_lengths(n)) for n in sampler.step_sequences(first).tolist())
    return {
        "documents": len(lengths),
        "sequences": len(packed),
        "windows": len(packed.counts),
        "wall s": wall,
        "processor s": processor,
        **{f"{name} s": parts.seconds[name] for name in ("deal", "count", "key")},
        "held bytes": held,
        "index bytes": index.stat().st_size,
        "step": first,
        "cold ms": 1e3 * cold,
        "later ms": 1e3 * statistics.median(later or [cold]),
        "touched": touched,
        "in the step": held_documents,
    }


def _timed_step(sampler: PoolSampler, step: int) -> tuple[float, int]:
    """Processor seconds of `sampler[step]`, and how many documents' lengths were looked at for it."""
    looked: list[int] = []
    items = PackedDocuments._items

    def counted(self: PackedDocuments, window: int) -> Any:
        found = items(self, window)
        looked.append(len(found.document))
        return found

    with mock.patch.object(PackedDocuments, "_items", counted):
        began = time.process_time()
        sampler[step]
        return time.process_time() - began, sum(looked)


def pickled_bytes(lengths_path: Path, spec: PoolSpec, index: Path) -> int:
    """What a worker process is sent of a sampler."""
    packed = PackedDocuments(np.load(lengths_path, mmap_mode="r"), spec.seq_len, index=index)
    return len(pickle.dumps(PoolSampler([packed], spec, pools=2, micro_steps=2)))


# -------------------------------------------------------------------------------------------------------- many hosts


def host(prefix: Path, spec: PoolSpec, hosts: int, number: int, step: int) -> Row:
    """One host of many, with a pool of its own: its part of a step, from a cold start, and a digest of the whole."""
    with one_core():
        size = spec.pool_size
        watch = Stopwatch()
        batches = open_megatron(prefix, spec, hosts, rows=range(number * size, (number + 1) * size))
        start = watch()
        parts, watch = Parts(STEP_PARTS), Stopwatch()
        with parts.measured():
            batch = batches[step]
        wall, processor = watch()
        check_step(batch)
    slots = batch["sequence_ids"]
    milliseconds = {name: 1e3 * parts.seconds[name] for name in STEP_PART_NAMES}
    return {
        "host": number,
        "start s": start[1],
        "wall ms": 1e3 * wall,
        "step ms": 1e3 * processor,
        **milliseconds,
        "rest": 1e3 * processor - sum(milliseconds.values()),
        "slots": hashlib.sha256(np.ascontiguousarray(slots, "<i8")).hexdigest()[:16],
        "own": slots.reshape(-1)[batch["rows"]].tolist(),
    }


# ----------------------------------------------------------------------------------------------------------- waiting


def waiting(prefix: Path, spec: PoolSpec, micro_steps: int, workers: int, steps: int, tokens_per_second: float) -> Row:
    """How long a consumer waits that takes a step every (tokens of a step / tokens_per_second) seconds.

    One core has it all. Reading ahead starts as long before the first step as a step takes.
    """
    with one_core():
        batches = open_megatron(prefix, spec, 2, micro_steps)
        seconds = batches.sampler.sequences_per_step * spec.seq_len / tokens_per_second
        iterator = BatchIterator(batches, workers=workers)
        iterator.start_prefetch()
        time.sleep(seconds)
        waited = []
        for _ in range(steps):
            waited.append(next(iterator)["waited_seconds"])
            time.sleep(seconds)
        iterator.close()
    late = [wait > 0.01 * seconds for wait in waited]
    return {
        "read ahead by": f"{workers} process" if workers else "a thread",
        "step ms": 1e3 * seconds,
        "steps": steps,
        "waited": sum(late),
        "share": sum(late) / steps,
        "first ms": 1e3 * waited[0],
        "share without the first": sum(late[1:]) / max(steps - 1, 1),
        "longest later ms": 1e3 * max(waited[1:], default=0.0),
        "median ms": 1e3 * statistics.median(waited),
    }


# ----------------------------------------------------------------------------------------------------------- prepare


def prepared(source: Path, tokenizer: str, out: Path, workers: int) -> tuple[float, float, Manifest]:
    """`libra prepare` of a file, as a user starts it: wall seconds, processor seconds of all processes, what it made.

    Raises CalledProcessError where the command fails.
    """
    command = [sys.executable, "-m", "libra_jax.cli", "prepare", str(source), "--tokenizer", tokenizer]
    before, began = _children_seconds(), time.perf_counter()
    subprocess.run([*command, "--out", str(out), "--workers", str(workers)], check=True, capture_output=True)
    return time.perf_counter() - began, _children_seconds() - before, PreparedDocuments.open(out).manifest


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
