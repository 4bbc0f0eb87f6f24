"""The training run: from a config to weights in the run folder, whatever interrupts it on the way.

Started with the folder of an earlier run, it goes on from that run's newest whole checkpoint: same state, same data
position, so the same losses, bit for bit, as one run without a stop. What a user can get wrong is refused, with a
message, before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from libra_jax.data import BatchIterator, StepBatches, open_batches
from libra_jax.data.batches import check_step
from libra_jax.train import metrics
from libra_jax.train.checkpoint import Checkpoints
from libra_jax.train.config import TrainConfig, fixed_values
from libra_jax.train.mesh import local_rows, make_mesh, place_batch, start_devices
from libra_jax.train.step import ARRAYS, Blueprint, Program, compile_program, plan_state, state_from


class RunStopped(Exception):
    """The run cannot go on. The message says why, and what is left to go on from."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run keeps everything. One process at a time may hold it."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has done its steps. records: its whole curve, that of earlier starts included.

    plain_work, libra_work: pages that each rank visits in the last step, (micro_steps, pools, N): every rank working
    on what it holds, sequences as they were packed; and as it was run.
    """

    folder: RunFolder
    records: list[metrics.StepRecord]
    plain_work: np.ndarray
    libra_work: np.ndarray


def train(config: TrainConfig, console: Console) -> Result:
    """Trains until `config.steps` steps are done, or finds that they are.

    Raises ValueError or OSError, before the first step, for what does not fit together: mesh and devices, run folder
    and config, data. Raises RunStopped when a loss is not finite or the disk takes no more.
    """
    start_devices(config.mesh)
    mesh = make_mesh(config.mesh)
    with hold_folder(Path(config.run_dir)) as folder:
        batches = open_batches(
            config.data,
            config.spec,
            config.mesh.pools,
            config.micro_steps,
            config.seed,
            sizes=config.pool_sizes,
            cost=config.cost,
            rows=local_rows(mesh),
            vocab_size=config.model.vocab_size,
            index_folder=folder.path / "packing",
        )
        values = {"config": fixed_values(config), "data": batches.identity}
        with contextlib.closing(batches), Checkpoints(folder.checkpoints, config.checkpoint) as checkpoints:
            for name in checkpoints.set_aside:
                _say(console, f"a checkpoint in {folder.checkpoints} was not whole and is called {name} now")
            checkpoints.refuse_changes(values)
            describe(config, mesh, batches.batches, console)
            done = checkpoints.latest_step or 0
            if done < config.steps:
                _train_steps(config, mesh, folder, batches, checkpoints, values, console)
            else:
                _say(console, f"this run has done its {done} steps already; --steps {2 * done} goes on with it")
            records = metrics.read_metrics(folder.metrics)
            if not records:
                raise ValueError(f"{folder.metrics} is missing or empty, so this run cannot be summed up")
            last = batches.batches[records[-1].step - 1]
            plain = metrics.baselines(last["lengths"], config.spec_of(last["pool_size"]), last["pools"])["home"]
            return Result(folder, records, plain, metrics.planned_work(last["stats"], last["pools"]))


def _train_steps(
    config: TrainConfig,
    mesh: Mesh,
    folder: RunFolder,
    batches: BatchIterator,
    checkpoints: Checkpoints,
    values: dict[str, Any],
    console: Console,
) -> None:
    blueprint = plan_state(config, mesh)
    done = checkpoints.latest_step or 0
    if done:
        state = checkpoints.restore(blueprint.shapes, batches)
        _say(console, f"going on from step {done} of {config.steps}, saved in {folder.checkpoints}")
    elif checkpoints.latest_step == 0:
        state = state_from(config, blueprint.shapes, checkpoints.restore_imported(blueprint.shapes["params"]))
        _say(console, f"starting with the weights imported into {folder.checkpoints}")
    else:
        state = blueprint.init()
    batches.start_prefetch()  # reads and plans while the program compiles
    curve = metrics.MetricsFile(folder.metrics, done)
    (folder.path / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")

    several = len(config.mesh.sizes) > 1
    with contextlib.closing(curve), _progress(console) as progress:
        bar = progress.add_task("compiling", total=config.steps, completed=done)
        programs = _compile(config, mesh, blueprint, console)
        metrics.print_header(console, several)
        progress.update(bar, description="training")
        for step in range(done + 1, config.steps + 1):
            begin = time.perf_counter()
            batch = _next_batch(batches, step, checkpoints)
            arrays, plans = {name: batch[name] for name in ARRAYS}, batch["plans"]
            check_step(batch)
            program = programs[batch["pool_size"]]
            placed = place_batch(program.mesh, arrays, plans, batch["rows"], batch["pool_numbers"])
            state, numbers = program.run(state, *placed)
            numbers = {name: value.item() for name, value in jax.device_get(numbers).items()}
            record = _record(config, step, batch, numbers, time.perf_counter() - begin)
            _refuse_non_finite(record, batch, checkpoints)
            with _disk(folder, step, checkpoints):
                curve.append(record)
                checkpoints.save(step, state, batches, values, last=step == config.steps)
            metrics.print_step(console, record, config.steps, several)
            progress.update(bar, completed=step)


def _compile(config: TrainConfig, mesh: Mesh, blueprint: Blueprint, console: Console) -> dict[int, Program]:
    """The run's programs by pool size. There will be no others: they refuse what they were not compiled for."""
    sizes, begin = config.mesh.sizes, time.perf_counter()
    for_each = f", for each of {len(sizes)} pool sizes" if len(sizes) > 1 else ""
    _say(console, f"compiling (about half a minute for a small model{for_each})")
    programs = {}
    for size in sizes:
        started = time.perf_counter()
        programs[size] = compile_program(config, mesh, blueprint, size)
        if len(sizes) > 1:
            _say(console, f"pool size {size}: {time.perf_counter() - started:.1f} s")
    _say(console, f"compiled in {time.perf_counter() - begin:.1f} s, once for the whole run")
    return programs


def _next_batch(batches: BatchIterator, step: int, checkpoints: Checkpoints) -> dict[str, Any]:
    try:
        return next(batches)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a worker process has ended
        raise RunStopped(f"the batch of step {step} could not be made: {error}. {_left(checkpoints)}") from error


def _record(config: TrainConfig, step: int, batch: Any, numbers: dict[str, Any], seconds: float) -> metrics.StepRecord:
    arrived = metrics.baselines(batch["lengths"], config.spec, config.mesh.pools)
    work = metrics.planned_work(batch["stats"], len(batch["pool_numbers"]))
    tokens = sum(map(sum, batch["lengths"]))
    return metrics.StepRecord(
        step=step,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        imbalance_home=metrics.imbalance(arrived["home"]),
        imbalance_ulysses=metrics.imbalance(arrived["ulysses"]),
        imbalance_libra=metrics.imbalance(work),
        fallbacks=sum(plan.fallback is not None for plan in batch["stats"]),
        pool_size=batch["pool_size"],
        planning_seconds=batch["planning_seconds"],
        waited_seconds=batch["waited_seconds"],
        **numbers,
    )


def _refuse_non_finite(record: metrics.StepRecord, batch: Any, checkpoints: Checkpoints) -> None:
    if math.isfinite(record.loss) and math.isfinite(record.grad_norm):
        return
    raise RunStopped(
        f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}. The run stops here and keeps "
        f"nothing of this step. Its sequences: {batch['sequence_ids'].reshape(-1).tolist()}. {_left(checkpoints)}"
    )


def _left(checkpoints: Checkpoints) -> str:
    step = checkpoints.latest_step
    return "There is no checkpoint yet." if step is None else f"The newest whole checkpoint is that of step {step}."


@contextlib.contextmanager
def _disk(folder: RunFolder, step: int, checkpoints: Checkpoints) -> Iterator[None]:
    """Turns what a full or vanished disk raises, whoever notices it, into RunStopped."""
    try:
        yield
    except Exception as error:
        raise RunStopped(f"step {step} could not be saved in {folder.path}: {error}. {_left(checkpoints)}") from error


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[RunFolder]:
    """Makes the run folder and holds it. OSError if it cannot be written, ValueError if another process holds it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w")
    except OSError as error:
        raise OSError(f"the run folder {path} cannot be written: {error.strerror}; set --run-dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {path}; wait for it, or set --run-dir") from None
        yield RunFolder(path)


def describe(config: TrainConfig, mesh: Mesh, data: StepBatches, console: Console) -> None:
    """Prints what is about to be trained, on what."""
    for corpus in data.corpora:
        for line in corpus.describe():
            _say(console, line)
    sampler = data.sampler
    if sampler.weights is not None:
        total, epochs = sum(sampler.weights), sampler.epochs(config.steps)
        for corpus, weight, times in zip(data.corpora, sampler.weights, epochs, strict=True):
            _say(console, f"{weight / total:.1%} of the tokens from {corpus.name}, seen {times:.2g} times in this run")
    else:
        _say(console, f"{sampler.steps_per_epoch:,} steps an epoch")
    shape, spec, platform = config.mesh, config.spec, mesh.devices.flat[0].platform
    _say(
        console,
        f"Qwen3 with {config.model.num_parameters:,} parameters on {mesh.size} {platform} devices: "
        f"{shape.pools} pools x {shape.pool_size} sequences x {shape.cp} ranks",
    )
    if shape.pool_sizes:
        others = ", ".join(f"{shape.sequences // size} pools x {size} sequences" for size in shape.pool_sizes)
        _say(console, f"or {others}: each step takes the pool size with the least modelled time")
    _say(
        console,
        f"{config.step_tokens:,} tokens a step: {config.micro_steps} micro-steps x {shape.sequences} sequences x "
        f"{spec.seq_len} tokens",
    )


def _say(console: Console, line: str) -> None:
    """Prints one line, however long, as it stands."""
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True)
