"""The folder of a run, which one run at a time may hold."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from libra_jax.train.together import together


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


@contextlib.contextmanager
def hold_together(path: Path) -> Iterator[RunFolder]:
    """The run folder, which the first of all processes makes and holds for all of them."""
    with contextlib.ExitStack() as stack:
        folder = RunFolder(path)
        with together(f"hold the run folder {path}"):
            if jax.process_index() == 0:
                folder = stack.enter_context(hold_folder(path))
        yield folder


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[RunFolder]:
    """Makes the run folder and holds it. OSError if it cannot be written, ValueError if another process holds it.

    Where an error leaves a folder that this has made with nothing of a run in it, it is removed.
    """
    made = not path.exists()
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
        try:
            yield RunFolder(path)
        except BaseException:
            if made and not any(entry.is_file() for entry in path.rglob("*") if entry.name != "lock"):
                shutil.rmtree(path, ignore_errors=True)
            raise
