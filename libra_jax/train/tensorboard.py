"""Event files for TensorBoard in the run folder: every number of every record, under the name that it has there.

tensorboardX writes them, through its file writer alone: its `SummaryWriter` does so in a thread, where an error, such
as a full disk, is lost and what comes after waits for ever.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]  # protobuf makes it as the module is imported
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from libra_jax.train.metrics import EvaluationRecord, StepRecord


class EventFiles:
    """Writes records as scalars, on disk when `add` returns. Each start of a run adds a file of its own.

    steps_done: what earlier starts wrote of later steps is taken back: TensorBoard shows what follows in its place.
    """

    def __init__(self, folder: Path, steps_done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=steps_done + 1, session_log=start))
        self._writer.flush()

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        kind = "evaluation" if isinstance(record, EvaluationRecord) else "step"
        values = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=float(value))
            for name, value in dataclasses.asdict(record).items()
            if name != "step" and value is not None
        ]
        self._writer.write_event(Event(wall_time=time.time(), step=record.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
