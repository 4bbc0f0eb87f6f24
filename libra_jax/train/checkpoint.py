"""Checkpoints of a run: model, optimizer, step, data position and the config that made them, through Orbax.

A checkpoint appears under its step's number only when it is whole: Orbax writes to a temporary folder and renames it.
A folder that is not whole all the same (copied halfway, say) is set aside, and the newest whole one is used.
Step 0 is what `libra import` writes: weights alone, which bind the shape of the model and nothing else of a run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orbax.checkpoint import v1 as ocp

from libra_jax.train.config import CheckpointConfig, refuse_changes

_COMMITTED = "_CHECKPOINT_METADATA"  # Orbax writes this file last


class Checkpoints:
    """The checkpoints of one run folder. A context manager: leaving it waits for what is being written.

    set_aside: what folders that looked like checkpoints and were not whole are called now.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder.absolute()
        self.set_aside = _set_aside_unfinished(self.folder)
        # orbax annotates what its own policies take more narrowly than the protocols they are for.
        save: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(config.every)
        keep: Any = ocp.training.preservation_policies.LatestN(config.keep)
        self._checkpointer = ocp.training.Checkpointer(
            str(self.folder),
            save_decision_policy=save,
            preservation_policy=keep,
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _quiet_logs(), contextlib.suppress(*([] if error is None else [Exception])):
            self._checkpointer.close()  # what failed to be saved fails again here, and must not hide `error`

    @property
    def latest_step(self) -> int | None:
        """Step of the newest whole checkpoint, None where there is none."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: Any, data: Any, values: dict[str, Any], *, last: bool = False) -> bool:
        """Saves if it is time to (or `last`), and waits until it is on disk. True if it saved.

        data: the Grain iterator that gave the batches up to `step`. values: as from `config.fixed_values`.
        """
        parts = {"state": state, "data": data, "values": values}
        with _quiet_logs():
            return self._checkpointer.save_checkpointables(step, parts, force=last)

    def refuse_changes(self, values: dict[str, Any]) -> None:
        """Raises ValueError naming what differs if the run was made with other `values`; see `config`."""
        if self.latest_step is not None:
            saved = self._checkpointer.load_checkpointables(self.latest_step, {"values": None})["values"]
            if self.latest_step == 0:
                values = {part: {n: v for n, v in values[part].items() if n in saved[part]} for part in saved}
            refuse_changes(saved, values, str(self.folder.parent))

    def restore(self, shapes: Any, data: Any) -> Any:
        """The state of the newest whole checkpoint, there must be one; moves `data` to the position saved with it.

        shapes: of the state, with types and shardings.
        """
        return self._checkpointer.load_checkpointables(self.latest_step, {"state": shapes, "data": data})["state"]

    def restore_imported(self, shapes: Any) -> Any:
        """The weights of step 0, there must be one. shapes: of the parameters, with types and shardings."""
        parts = {"state": {"params": shapes}}
        return self._checkpointer.load_checkpointables(0, parts)["state"]["params"]


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Keeps Orbax's threads from logging a traceback each for an error that is raised here anyway."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _set_aside_unfinished(folder: Path) -> list[str]:
    found = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.name.isdigit() and not (path / _COMMITTED).is_file():
                aside = path.with_name(f"{path.name}.unfinished-{time.time_ns()}")
                found.append(path.rename(aside).name)
    return found
