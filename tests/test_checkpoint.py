"""Checkpoints written in the background, what is kept of them, and how a run ends that is told to."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from run_base import programs_kept, run_config

from libra_jax.train.checkpoint import Checkpoints, SaveFailed, whole_steps
from libra_jax.train.config import CheckpointConfig, TrainConfig
from libra_jax.train.folder import hold_folder
from libra_jax.train.loop import Preempted, RunStopped, train
from libra_jax.train.metrics import MetricsFile, StepRecord
from libra_jax.train.watch import Signals

VALUES = {"config": {"a": 1}, "data": {"b": [2]}}


@dataclasses.dataclass
class Position:
    """What `Checkpoints` asks of a data iterator."""

    step: int = 0

    def get_state(self) -> dict[str, Any]:
        return {"next_step": self.step}

    def set_state(self, state: dict[str, Any]) -> None:
        self.step = state["next_step"]


def sharding() -> NamedSharding:
    return NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))


def advance() -> Any:
    """A step that overwrites the state where it lies."""
    return jax.jit(lambda state: jax.tree.map(lambda x: x * 3 + 1, state), donate_argnums=0)


def first_state() -> dict[str, jax.Array]:
    """Large and small arrays, and numbers that a few steps make very different."""
    rng = np.random.default_rng(0)
    arrays = {"large": rng.standard_normal((8, 300_000)), "small": rng.standard_normal((8, 3))}
    return {
        **{name: jax.device_put(array.astype(np.float32), sharding()) for name, array in arrays.items()},
        "narrow": jax.device_put(jnp.arange(64, dtype=jnp.bfloat16), sharding()),
    }


def test_what_is_saved_is_the_state_of_its_step_although_the_next_steps_overwrite_it(tmp_path: Path) -> None:
    step, state, expected = advance(), first_state(), {}
    with Checkpoints(tmp_path, CheckpointConfig(every=1, keep=9)) as checkpoints:
        for number in range(1, 5):
            state = step(state)
            expected[number] = {name: np.array(array) for name, array in state.items()}
            assert checkpoints.save(number, state, Position(number), VALUES)
            for _ in range(3):  # at once, while the writing has hardly begun
                state = step(state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for number in sorted(expected, reverse=True):
        position = Position()
        with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
            restored = checkpoints.restore(shapes, position)
        assert position.step == number
        for name, array in expected[number].items():
            np.testing.assert_array_equal(np.asarray(restored[name]), array, err_msg=f"step {number}, {name}")
        shutil.rmtree(tmp_path / f"{number}")


def test_a_step_does_not_wait_for_the_writing_and_an_error_comes_up_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, blocked, failing = threading.Event(), threading.Event(), threading.Event()
    rename = os.rename

    def slow(source: Any, target: Any, **more: Any) -> None:
        if Path(target).name == "2":
            blocked.set()
            assert may_go_on.wait(60)
            if failing.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target, **more)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, slow)
    state = first_state()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=1, keep=9))
    checkpoints.save(1, state, Position(1), VALUES)
    checkpoints.wait()
    assert checkpoints.latest_step == 1
    checkpoints.save(2, state, Position(2), VALUES)
    assert blocked.wait(60)
    state = advance()(state)
    assert np.isfinite(np.asarray(state["small"])).all() and checkpoints.latest_step == 1, "2 is still being written"
    failing.set()
    may_go_on.set()
    with pytest.raises(SaveFailed, match=r"the checkpoint of step 2 could not be written: .*No space left"):
        checkpoints.save(3, state, Position(3), VALUES)
    assert checkpoints.latest_step == 1 and whole_steps(tmp_path) == [1]


def test_what_is_kept_is_the_newest_the_best_and_every_nth(tmp_path: Path) -> None:
    losses = {2: 5.0, 4: float("nan"), 6: 1.0, 8: 3.0, 12: 4.0}
    config = CheckpointConfig(every=1, keep=2, keep_best=2, keep_every=5)
    state = {"x": jax.device_put(np.arange(8.0, dtype=np.float32), sharding())}
    with Checkpoints(tmp_path, config) as checkpoints:
        for step in range(1, 15):
            found = {"eval_loss": losses[step]} if step in losses else None
            checkpoints.save(step, state, Position(step), VALUES, metrics=found)
    assert whole_steps(tmp_path) == [5, 6, 8, 10, 13, 14]
    with Checkpoints(tmp_path, config) as checkpoints:  # after another start it still knows which were best
        checkpoints.save(15, state, Position(15), VALUES, metrics={"eval_loss": 0.5})
    assert whole_steps(tmp_path) == [5, 6, 10, 14, 15]


def test_ctrl_c_that_a_callback_swallowed_comes_again_and_sigterm_is_noted() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert not signals.stop_after(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.stop_after(2)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.check() and signals.stop_after(3)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_watchdog_ends_a_process_that_stands_still_and_names_what_it_waited_for() -> None:
    program = (
        "import sys, time\nfrom libra_jax.train.watch import Watchdog\n"
        "with Watchdog('process 1 of 2', 60.0) as dog:\n"
        "    dog.doing('step 6', 2.0)\n    time.sleep(1.5)\n    dog.doing('step 7')\n    time.sleep(1.5)\n"
        "    print('here', flush=True)\n    time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 74 and done.stdout == "here\n"
    assert "libra: process 1 of 2: nothing has come to an end for 2 s, waiting for step 7 (" in done.stderr


def test_a_start_that_fails_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for path in (new, old):
        with pytest.raises(ValueError, match="wrong"), hold_folder(path):
            (path / "packing").mkdir()
            raise ValueError("wrong")
    assert not new.exists() and old.exists()
    with pytest.raises(ValueError, match="wrong"), hold_folder(new):
        (new / "metrics.jsonl").write_text("{}")
        raise ValueError("wrong")
    assert (new / "metrics.jsonl").exists()


def six_steps(folder: Path, name: str) -> TrainConfig:
    return run_config(folder, name, micro_steps=1, steps=6)


def curve(records: list[StepRecord]) -> list[tuple[int, float, float]]:
    return [(record.step, record.loss, record.grad_norm) for record in records]


def test_sigterm_saves_the_step_and_a_failed_background_write_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat " * 900)
    quiet = Console(file=io.StringIO())
    with programs_kept(tmp_path):
        whole = train(six_steps(tmp_path, "whole"), quiet).records
        append = MetricsFile.append

        def told_to_stop(self: MetricsFile, record: Any) -> None:
            if record.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            append(self, record)

        config = six_steps(tmp_path, "stopped")
        with monkeypatch.context() as patch:
            patch.setattr(MetricsFile, "append", told_to_stop)
            with pytest.raises(Preempted) as stopped:
                train(config, quiet)
        saved = re.fullmatch(r"stopped by SIGTERM after step (3|4) of 6, which is saved\.", str(stopped.value))
        assert saved and max(whole_steps(tmp_path / "stopped" / "checkpoints")) == int(saved[1])

        rename = os.rename

        def full(source: Any, target: Any, **more: Any) -> None:
            if Path(target).name == "6":
                raise OSError(errno.ENOSPC, "No space left on device")
            rename(source, target, **more)

        with monkeypatch.context() as patch:
            for name in ("rename", "replace"):
                patch.setattr(os, name, full)
            message = "step 6 could not be saved in .*checkpoint of step 6 could not be written: .*No space left"
            with pytest.raises(RunStopped, match=message + r".* newest whole checkpoint is that of step 4"):
                train(config, quiet)
        assert curve(train(config, quiet).records) == curve(whole)


def test_a_checkpoint_that_is_torn_is_named_with_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, CheckpointConfig(every=1, keep=2)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.ones(3)}, Position(step), {"config": {}, "data": {}})
    shutil.rmtree(folder / "2" / "state")
    with Checkpoints(folder, CheckpointConfig(every=1, keep=2)) as checkpoints:
        shapes = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
        with pytest.raises(ValueError, match=r"checkpoint 2 in .* cannot be read: .*and the run goes on from step 1"):
            checkpoints.restore(shapes, Position(0))
