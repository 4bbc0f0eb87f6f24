"""The training run: from a config to weights in the run folder, whatever interrupts it on the way.

Started with the folder of an earlier run, it goes on from that run's newest whole checkpoint: same state, same data
position, so the same losses, bit for bit, as one run without a stop. What a user can get wrong is refused, with a
message, before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from libra_jax.data import BatchIterator, StepBatches, open_batches
from libra_jax.data.batches import check_step
from libra_jax.train import metrics
from libra_jax.train.checkpoint import Checkpoints
from libra_jax.train.config import TrainConfig, every_value, fixed_values
from libra_jax.train.folder import RunFolder, hold_together
from libra_jax.train.launch import Launch, join, share_of
from libra_jax.train.mesh import local_rows, make_mesh, place_batch, start_devices
from libra_jax.train.recorder import Recorder
from libra_jax.train.step import ARRAYS, Blueprint, Program, compile_program, plan_state, state_from
from libra_jax.train.terminal import describe, progress_bar, say
from libra_jax.train.together import peer_is_gone, same_config, same_everywhere, together
from libra_jax.train.watch import Signals, Watchdog
from libra_jax.train.xla import check_options


class RunStopped(Exception):
    """The run cannot go on. The message says why, and what is left to go on from."""


class Preempted(Exception):
    """The run was told to stop (SIGTERM) before its last step, and can go on. The message says from where."""


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


def train(config: TrainConfig, console: Console, launch: Launch | None = None) -> Result:
    """Trains until `config.steps` steps are done, or finds that they are.

    launch: this process among several, all of which call this; None: it is the only one. The first writes the run
    folder; the others' results hold no records, and `console` should be quiet in them.

    Raises ValueError or OSError, before the first step, for what does not fit together: mesh and devices, run folder
    and config, data; PeerStopped where another process does. Raises RunStopped when losses or gradients are not finite
    again and again, the disk takes no more or another process is gone; Preempted after SIGTERM.
    """
    start_devices(config.mesh if launch is None else share_of(config.mesh, launch))
    if launch is not None:
        join(launch, config.launch)
    mesh = make_mesh(config.mesh)
    check_options(config.xla)
    name = "" if launch is None else f"process {jax.process_index()} of {jax.process_count()}"
    patience = config.launch.start_timeout_seconds if jax.process_count() > 1 else None
    same_config({**every_value(config), "version of jax": jax.__version__})
    with Watchdog(name, patience) as watchdog, hold_together(Path(config.run_dir)) as folder:
        watchdog.doing("the data to be opened")
        batches = _open_batches(config, mesh, folder)
        values = {"config": fixed_values(config), "data": batches.identity}
        with contextlib.closing(batches), Checkpoints(folder.checkpoints, config.checkpoint) as checkpoints:
            for name in checkpoints.set_aside:
                say(console, f"a checkpoint in {folder.checkpoints} was not whole and is called {name} now")
            done = checkpoints.latest_step
            same_everywhere(
                -1 if done is None else done,
                f"the newest checkpoint in {folder.checkpoints} (-1: none)",
                "the run folder has to lie on a disk that all hosts share",
            )
            checkpoints.refuse_changes(values)
            describe(config, mesh, batches.batches, console)
            done = done or 0
            if done < config.steps:
                _train_steps(config, mesh, folder, batches, checkpoints, values, console, watchdog)
            else:
                say(console, f"this run has done its {done} steps already; --steps {2 * done} goes on with it")
            return _sum_up(config, folder, batches.batches)


def _open_batches(config: TrainConfig, mesh: Mesh, folder: RunFolder) -> BatchIterator:
    """The run's batches. The first process counts what has to be counted and keeps it in the folder for the others."""
    opened: list[BatchIterator] = []
    for turn in [True] if jax.process_count() == 1 else [True, False]:
        with together("open its data"):
            if (jax.process_index() == 0) == turn:
                batches = open_batches(
                    config.step_data,
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
                opened.append(batches)
    return opened[0]


def _sum_up(config: TrainConfig, folder: RunFolder, batches: StepBatches) -> Result:
    if jax.process_index() > 0:
        nothing = np.zeros((0, 0, 0), np.int64)
        return Result(folder, [], nothing, nothing)
    records = metrics.read_metrics(folder.metrics)
    if not records:
        raise ValueError(f"{folder.metrics} is missing or empty, so this run cannot be summed up")
    whole = StepBatches(batches.corpora, batches.sampler, batches.planner, batches.sizes, None, batches.vocab_size)
    last = whole[records[-1].step - 1]
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
    watchdog: Watchdog,
) -> None:
    owed = False  # a checkpoint that was due at a skipped step
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        blueprint = plan_state(config, mesh)
        watchdog.doing("the state to be made or restored")
        done, state = _first_state(config, folder, blueprint, batches, checkpoints, console)
        batches.start_prefetch()  # reads and plans while the program compiles
        if jax.process_index() == 0:
            (folder.path / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        progress = stack.enter_context(progress_bar(console))
        bar = progress.add_task("compiling", total=config.steps, completed=done)
        watchdog.doing("the program to be compiled")
        programs = _compile(config, mesh, blueprint, console)
        recorder = Recorder(config, mesh, blueprint, folder.path, batches.batches, console, done)
        stack.enter_context(recorder)
        progress.update(bar, description="training")
        if signals.check():
            raise Preempted(f"stopped by SIGTERM before step {done + 1}. {_left(checkpoints)}")
        for step in range(done + 1, config.steps + 1):
            recorder.before(step)
            watchdog.doing(f"the batch of step {step}")
            begin = time.perf_counter()
            batch = _next_batch(batches, step, checkpoints)
            arrays, plans = {name: batch[name] for name in ARRAYS}, batch["plans"]
            check_step(batch)
            program = programs[batch["pool_size"]]
            watchdog.doing(f"step {step}")
            with _peers(step, checkpoints):
                placed = place_batch(program.mesh, arrays, plans, batch["rows"], batch["pool_numbers"])
                state, numbers = program.run(state, *placed)
                numbers = jax.device_get(numbers)
                micro_steps, in_a_row = numbers.pop("micro_steps"), int(numbers["skipped"]["in_a_row"])
                record = recorder.measure(step, batch, numbers, time.perf_counter() - begin)
                if stop := recorder.skipped(record, in_a_row, batch, micro_steps):
                    raise RunStopped(f"{stop} {_left(checkpoints)}")
                watchdog.doing(f"the evaluation after step {step}", config.launch.step_timeout_seconds)
                evaluation, last = recorder.evaluate(state["params"], step), step == config.steps
                stopping = signals.stop_after(step) and not last
            watchdog.doing(f"the records and the checkpoint of step {step}")
            with _disk(folder, step, checkpoints):
                recorder.write(record, evaluation)
                if last or stopping or not record.skipped:  # what gives no loss is not to push out the last that did
                    found = None if evaluation is None else {"eval_loss": evaluation.eval_loss}
                    force = last or stopping or owed
                    checkpoints.save(step, state, batches, values, metrics=found, last=force)
            owed = bool(record.skipped) and (owed or step % config.checkpoint.every == 0)
            recorder.show(record, evaluation)
            progress.update(bar, completed=step)
            if stopping or last:
                watchdog.doing(f"the last checkpoint, of step {step}, to be on disk")
                with _disk(folder, step, checkpoints):
                    checkpoints.wait()
            if stopping:
                raise Preempted(f"stopped by SIGTERM after step {step} of {config.steps}, which is saved.")


def _first_state(
    config: TrainConfig,
    folder: RunFolder,
    blueprint: Blueprint,
    batches: BatchIterator,
    checkpoints: Checkpoints,
    console: Console,
) -> tuple[int, Any]:
    """Steps done, and the state after them."""
    done = checkpoints.latest_step
    if done:
        state = checkpoints.restore(blueprint.shapes, batches)
        say(console, f"going on from step {done} of {config.steps}, saved in {folder.checkpoints}")
    elif done == 0:
        state = state_from(config, blueprint.shapes, checkpoints.restore_imported(blueprint.shapes["params"]))
        say(console, f"starting with the weights imported into {folder.checkpoints}")
    else:
        state = blueprint.init()
    return done or 0, state


def _compile(config: TrainConfig, mesh: Mesh, blueprint: Blueprint, console: Console) -> dict[int, Program]:
    """The run's programs by pool size. There will be no others: they refuse what they were not compiled for."""
    sizes, begin = config.mesh.sizes, time.perf_counter()
    for_each = f", for each of {len(sizes)} pool sizes" if len(sizes) > 1 else ""
    say(console, f"compiling (about half a minute for a small model{for_each})")
    programs = {}
    for size in sizes:
        started = time.perf_counter()
        programs[size] = compile_program(config, mesh, blueprint, size)
        if len(sizes) > 1:
            say(console, f"pool size {size}: {time.perf_counter() - started:.1f} s")
    say(console, f"compiled in {time.perf_counter() - begin:.1f} s, once for the whole run")
    return programs


def _next_batch(batches: BatchIterator, step: int, checkpoints: Checkpoints) -> dict[str, Any]:
    try:
        return next(batches)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a worker process has ended
        raise RunStopped(f"the batch of step {step} could not be made: {error}. {_left(checkpoints)}") from error


def _left(checkpoints: Checkpoints) -> str:
    checkpoints.let_finish()
    step = checkpoints.latest_step
    return "There is no checkpoint yet." if step is None else f"The newest whole checkpoint is that of step {step}."


@contextlib.contextmanager
def _disk(folder: RunFolder, step: int, checkpoints: Checkpoints) -> Iterator[None]:
    """Turns what a full or vanished disk raises, whoever notices it, into RunStopped."""
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1 and peer_is_gone(error):
            with _peers(step, checkpoints):
                raise
        raise RunStopped(f"step {step} could not be saved in {folder.path}: {error}. {_left(checkpoints)}") from error


@contextlib.contextmanager
def _peers(step: int, checkpoints: Checkpoints) -> Iterator[None]:
    """Turns what an exchange with a process that is gone raises into RunStopped."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or isinstance(error, RunStopped) or not peer_is_gone(error):
            if not isinstance(error, OSError):
                raise
            raise RunStopped(f"step {step} broke off: {error}. {_left(checkpoints)}") from error
        what = str(error).partition("\n")[0]
        raise RunStopped(
            f"step {step} broke off; most likely another process is gone, whose own output says why ({what}). "
            f"{_left(checkpoints)}"
        ) from error
