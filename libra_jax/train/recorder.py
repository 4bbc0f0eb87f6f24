"""All that a run says of its steps while it goes on: records in files, rows in the terminal, evaluation, a profile.

The loop calls it around every step. In a run of several processes each measures and evaluates, which they do together,
and the first one writes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from libra_jax.data import StepBatches
from libra_jax.train import metrics, skipped
from libra_jax.train.config import TrainConfig
from libra_jax.train.evaluate import describe, open_evaluation
from libra_jax.train.measure import measure_step
from libra_jax.train.metrics import EvaluationRecord, MetricsFile, StepRecord
from libra_jax.train.profile import StepProfile
from libra_jax.train.step import Blueprint
from libra_jax.train.tensorboard import EventFiles


class Recorder:
    """The records of one start of a run, in its folder: metrics.jsonl, evaluation.jsonl, skipped.jsonl, tensorboard and
    profile. A context manager: leaving it closes them.

    data: the run's batches. blueprint: of its state. steps_done: before this start; what earlier ones wrote of later
    steps is dropped. Compiles the program of the evaluation, and raises ValueError where nothing is held out for it.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        blueprint: Blueprint,
        folder: Path,
        data: StepBatches,
        console: Console,
        steps_done: int,
    ) -> None:
        self._config, self._mesh, self._folder, self._data, self._console = config, mesh, folder, data, console
        self._evaluation = None
        if config.evaluation.every:
            self._evaluation = open_evaluation(config, mesh, blueprint, folder / "packing")
            for line in describe(self._evaluation):
                self._say(line)
        self._several = len(config.mesh.sizes) > 1
        self._header_due = True
        self._open = contextlib.ExitStack()
        self._profile = self._open.enter_context(StepProfile(folder / "profile", config.metrics.profile_steps))
        self._writes = jax.process_index() == 0
        if self._writes:
            closing = contextlib.closing
            self._steps = self._open.enter_context(closing(MetricsFile(folder / "metrics.jsonl", steps_done)))
            evaluations = MetricsFile(folder / "evaluation.jsonl", steps_done, EvaluationRecord)
            self._evaluations = self._open.enter_context(closing(evaluations))
            self._events = None
            if config.metrics.tensorboard:
                self._events = self._open.enter_context(closing(EventFiles(folder / "tensorboard", steps_done)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def before(self, step: int) -> None:
        """Has to be called before each step is begun."""
        self._profile.before(step)

    def measure(self, step: int, batch: dict[str, Any], numbers: dict[str, Any], seconds: float) -> StepRecord:
        """The record of a step; nothing is written yet. numbers: what the program gave, on the host."""
        if self._profile.after(step):
            self._say(f"profile of the steps up to {step}: {self._profile.folder}")
        return measure_step(self._config, self._mesh, step, batch, numbers, seconds)

    def skipped(
        self, record: StepRecord, in_a_row: int, batch: dict[str, Any], micro_steps: dict[str, np.ndarray]
    ) -> str | None:
        """Says why a step was skipped, if it was. Returns why the run has to stop, None if it may go on."""
        if not record.skipped:
            return None
        bad = skipped.bad_micro_steps(self._data, batch, micro_steps)
        what = skipped.describe_skipped(record.step, record.loss, record.grad_norm, bad, len(micro_steps["finite"]))
        path = self._folder / "skipped.jsonl"
        if self._writes:
            skipped.note_skipped(path, record.step, bad)
        most = self._config.optimizer.stop_after_skipped
        if in_a_row < most:
            self._say(f"{what} All documents: {path}")
            return None
        row = f"It is number {in_a_row} in a row, and optimizer.stop_after_skipped is {most}" if most > 1 else ""
        return f"{what} {row + ': the' if row else 'The'} run stops here. All documents: {path}."

    def evaluate(self, params: Any, step: int) -> EvaluationRecord | None:
        """The loss on held-out documents, if it is time for it."""
        every = self._config.evaluation.every
        if self._evaluation is None or (step % every and step != self._config.steps):
            return None
        return self._evaluation.run(params, step)

    def write(self, record: StepRecord, evaluation: EvaluationRecord | None) -> None:
        """Puts a step's records on disk."""
        if not self._writes:
            return
        self._steps.append(record)
        if evaluation is not None:
            self._evaluations.append(evaluation)
        for kind in (record, evaluation):
            if self._events is not None and kind is not None:
                self._events.add(kind)

    def show(self, record: StepRecord, evaluation: EvaluationRecord | None) -> None:
        """Prints a step's row, below a header when it is the first."""
        if self._header_due:
            metrics.print_header(self._console, self._several, record.mfu is not None)
            self._header_due = False
        metrics.print_step(self._console, record, self._config.steps, self._several)
        if evaluation is not None:
            metrics.print_evaluation(self._console, evaluation)

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
