"""Checkpoints of a run: model, optimizer, step, data position and the config that made them, through Orbax.

They are written in the background: a step waits until its state is on the host, and no longer. A checkpoint appears
under its step's number only when it is whole: Orbax writes to a temporary folder and renames it. A folder that is not
whole all the same (copied halfway, say) is set aside, and the newest whole one is used.
Step 0 is what `libra import` writes: weights alone, which bind the shape of the model and nothing else of a run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from libra_jax.train.config import CheckpointConfig, refuse_changes
from libra_jax.train.together import together

_COMMITTED = "_CHECKPOINT_METADATA"  # Orbax writes this file last
_LAST_WAIT_SECONDS = 20.0


class SaveFailed(Exception):
    """A checkpoint could not be written. The message says of which step, and why."""


class Checkpoints:
    """The checkpoints of one run folder. A context manager: leaving it waits for what is being written.

    set_aside: what folders that looked like checkpoints and were not whole are called now; [] but in process 0.
    In a run of several processes each must make one and call its methods, in the same order.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder.absolute()
        self.set_aside: list[str] = []
        with together("set unfinished checkpoints aside"):
            if jax.process_index() == 0:
                self.set_aside = _set_aside_unfinished(self.folder)
        # orbax annotates what its own policies take more narrowly than the protocols they are for.
        save: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(config.every)
        self._writing: tuple[int, Any] | None = None
        self._checkpointer = ocp.training.Checkpointer(
            str(self.folder),
            save_decision_policy=save,
            preservation_policy=_keeping(config),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and jax.process_count() > 1:
            self.let_finish()
            return
        with _quiet_logs(), contextlib.suppress(*([] if error is None else [Exception])):
            self._checkpointer.close()  # what failed to be saved fails again here, and must not hide `error`

    @property
    def latest_step(self) -> int | None:
        """Step of the newest whole checkpoint, None where there is none."""
        return max(whole_steps(self.folder), default=None)

    def save(
        self,
        step: int,
        state: Any,
        data: Any,
        values: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        last: bool = False,
    ) -> bool:
        """Begins to save if it is time to (or `last`); returns as soon as `state` may be overwritten. True if it does.

        data: the Grain iterator that gave the batches up to `step`. values: as from `config.fixed_values`. metrics:
        {"eval_loss": ...} after an evaluation, which `keep_best` goes by.
        Raises SaveFailed for this checkpoint, and for an earlier one whose writing has failed since.
        """
        self._settle(wait=False)
        if not (last or self._checkpointer.should_save(step)):
            return False
        self._settle(wait=True)
        parts = {"state": detached(state), "position": data.get_state(), "values": values}
        with _naming(step), _quiet_logs():
            found: Any = dict(metrics) if metrics else None
            response = self._checkpointer.save_checkpointables_async(step, parts, force=last, metrics=found)
        self._writing = None if response is None else (step, response)
        return response is not None

    def wait(self) -> None:
        """Returns when all is on disk. Raises SaveFailed if that failed."""
        self._settle(wait=True)

    def let_finish(self) -> None:
        """Something went wrong: waits for what is being written, and asks no more whether that worked.

        With several processes not for long, as others may be gone that would have to do their part.
        """
        end = time.monotonic() + (_LAST_WAIT_SECONDS if jax.process_count() > 1 else math.inf)
        while self._writing is not None and self._checkpointer.is_saving_in_progress() and time.monotonic() < end:
            time.sleep(0.05)
        self._writing = None

    def refuse_changes(self, values: dict[str, Any]) -> None:
        """Raises ValueError naming what differs if the run was made with other `values`; see `config`."""
        latest = self.latest_step
        if latest is not None:
            saved = self._load(latest, {"values": None})["values"]
            if latest == 0:
                values = {part: {n: v for n, v in values[part].items() if n in saved[part]} for part in saved}
            refuse_changes(saved, values, str(self.folder.parent))

    def restore(self, shapes: Any, data: Any) -> Any:
        """The state of the newest whole checkpoint, there must be one; moves `data` to the position saved with it.

        shapes: of the state, with types and shardings.
        """
        parts = self._load(self.latest_step, {"state": shapes, "position": None})
        data.set_state(parts["position"])
        return parts["state"]

    def restore_imported(self, shapes: Any) -> Any:
        """The weights of step 0, there must be one. shapes: of the parameters, with types and shardings."""
        parts = {"state": {"params": shapes}}
        return self._load(0, parts)["state"]["params"]

    def _load(self, step: int | None, parts: dict[str, Any]) -> dict[str, Any]:
        """Raises ValueError with the way out where a checkpoint that looks whole cannot be read all the same."""
        try:
            with _quiet_logs():
                return self._checkpointer.load_checkpointables(step, parts)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            others = [number for number in whole_steps(self.folder) if number != step]
            way = f"the run goes on from step {others[-1]}" if others else "the run begins anew"
            raise ValueError(
                f"checkpoint {step} in {self.folder} cannot be read: {reason} ({type(error).__name__}). It is damaged, "
                f"or another version wrote it. Move {self.folder / str(step)} away, and {way}."
            ) from error

    def _settle(self, wait: bool) -> None:
        """Raises what the checkpoint in the making failed with, as soon as that is known, or waits to know it."""
        if self._writing is None or not (wait or not self._checkpointer.is_saving_in_progress()):
            return
        (step, response), self._writing = self._writing, None
        with _naming(step), _quiet_logs():
            response.result()


def whole_steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, in ascending order."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.isdigit() and (path / _COMMITTED).is_file())
    return sorted(int(path.name) for path in found)


def detached(state: Any) -> Any:
    """A copy of the state on the host's own devices; arrays of other devices as they are.

    The next step overwrites the state where it lies. From a GPU it is copied to the host before a save returns. On a
    CPU device it lies there already, and what writes it reads the very same memory: without a copy XLA must notice that
    and give the step another place.
    """

    def copy(array: Any) -> Any:
        if not isinstance(array, jax.Array) or next(iter(array.devices())).platform != "cpu":
            return array
        shards = [jax.device_put(np.array(shard.data), shard.device) for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

    return jax.tree.map(copy, state)


def _keeping(config: CheckpointConfig) -> Any:
    policies = ocp.training.preservation_policies

    def loss(metrics: Any) -> float:
        value = float(metrics["eval_loss"])
        return math.inf if math.isnan(value) else value

    kept: list[Any] = [policies.LatestN(config.keep)]
    if config.keep_best:
        best = policies.BestN(
            get_metric_fn=loss, reverse=True, n=config.keep_best, keep_checkpoints_without_metrics=False
        )
        kept.append(best)
    if config.keep_every is not None:
        kept.append(policies.EveryNSteps(config.keep_every))
    return policies.AnyPreservationPolicy(kept)


@contextlib.contextmanager
def _naming(step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SaveFailed(f"the checkpoint of step {step} could not be written: {error}") from error


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
