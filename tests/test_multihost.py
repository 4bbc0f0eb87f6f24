"""`libra train` in several processes of this machine, started with the variables that srun sets.

Whatever happens to one of them, the others end in bounded time, and the job, started again, ends with the curve of one
that was left alone, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_base import TINY

from libra_jax.data import VOCAB_SIZE, DataConfig
from libra_jax.train.checkpoint import whole_steps
from libra_jax.train.config import (
    AttentionConfig,
    CheckpointConfig,
    LaunchConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)

ENDLESS = 1_000_000
"""Steps of a run that is interrupted: it cannot be faster than what interrupts it."""
NEVER = 600.0


def job_config(folder: Path, name: str, devices: int) -> TrainConfig:
    """Two pools on two or four devices, one in each process."""
    return TrainConfig(
        model=dataclasses.replace(TINY, vocab_size=VOCAB_SIZE, num_layers=1),
        data=DataConfig(paths=(str(folder / "text"),)),
        mesh=MeshConfig(2, devices // 2, 1, cpu_devices=devices),
        attention=AttentionConfig(block=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=100),
        checkpoint=CheckpointConfig(every=2),
        launch=LaunchConfig(step_timeout_seconds=NEVER),
        seq_len=256,
        steps=ENDLESS,
        run_dir=str(folder / name),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jobs")
    (path / "text").mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        (path / "text" / f"{i}.txt").write_text("the cat sat " * int(rng.integers(1, 10)))
    for name, devices in {"alone": 2, "broken": 2, "fails": 2, "four alone": 4, "four": 4}.items():
        (path / f"{name}.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from pathlib import Path\nfrom test_multihost import job_config\n"
            f"def config():\n    return job_config(Path({str(path)!r}), {name!r}, {devices})\n"
        )
    return path


@dataclasses.dataclass
class Job:
    """Processes that `srun` has started, and where each prints."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]
    curve: Path

    def printed(self, index: int) -> str:
        return self.outputs[index].read_text(errors="replace")

    def wait(self, seconds: float = 120.0) -> list[int]:
        return [process.wait(seconds) for process in self.processes]

    def wait_for_steps(self, steps: int, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not (self.curve.exists() and self.curve.read_text().count("\n") >= steps):
            ended = [process.poll() for process in self.processes]
            assert ended == [None] * len(ended) and time.monotonic() < end, (ended, self.printed(0), self.printed(1))
            time.sleep(0.005)


@contextlib.contextmanager
def srun(folder: Path, name: str, count: int, *flags: str, **changed: str) -> Iterator[Job]:
    """`srun --ntasks COUNT libra train ...` on one node: what it sets, as `man srun` lists it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    others = "XLA_FLAGS", "SLURM", "OMPI"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    environment |= {
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_TASKS_PER_NODE": str(count),
        "SLURM_NTASKS": str(count),
        "SLURM_NODEID": "0",
    }
    job = Job([], [], folder / name / "metrics.jsonl")
    command = [sys.executable, "-m", "libra_jax.cli", "train", str(folder / f"{name}.py"), "--multihost", *flags]
    try:
        for index in range(count):
            job.outputs.append(folder / f"{name}.{index}.out")
            own = {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} | changed
            with job.outputs[-1].open("wb") as file:
                job.processes.append(
                    subprocess.Popen(
                        command, env=environment | own, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        yield job
    finally:
        for process in job.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def curve_of(path: Path) -> list[dict[str, Any]]:
    """Records without what clocks and memory say."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    vary = re.compile("second|mfu|peak_bytes")
    return [{name: value for name, value in record.items() if not vary.search(name)} for record in records]


def left_alone(folder: Path, name: str, count: int, steps: int) -> list[dict[str, Any]]:
    with srun(folder, name, count, "--steps", str(steps)) as job:
        assert job.wait() == [0] * count, job.printed(0) + job.printed(1)
    assert f"in {count} processes, 1 devices in this one" in job.printed(0) and "Summary" in job.printed(0)
    for index in range(1, count):
        said = [line for line in job.printed(index).splitlines() if "[Gloo]" not in line]
        assert said == [], "only the first process prints"
    curve = curve_of(job.curve)
    assert [record["step"] for record in curve] == list(range(1, steps + 1))
    assert curve[-1]["loss"] < curve[0]["loss"] - 1
    return curve


def ends(job: Job, index: int, within_seconds: float) -> int:
    begin = time.monotonic()
    status = job.processes[index].wait(NEVER)
    assert time.monotonic() - begin < within_seconds
    return status


def kill_one(folder: Path, name: str, count: int) -> None:
    with srun(folder, name, count) as job:
        job.wait_for_steps(4)
        job.processes[-1].kill()
        assert ends(job, 0, 300) not in (0, 75)
    said = job.printed(0)
    if "stopped sending heartbeats" in said and "libra: process 0" not in said:
        return  # no exchange was under way that could fail: JAX's own service missed the process, and ended this one
    assert re.search(r"libra: process 0 of \d: .*step \d+.*another process is gone", said), said
    assert re.search(r"newest whole checkpoint is that of step \d+", said), said


def hang_one(folder: Path, name: str, count: int) -> None:
    with srun(folder, name, count, "--launch.step-timeout-seconds", "5") as job:
        job.wait_for_steps(6)
        job.processes[-1].send_signal(signal.SIGSTOP)
        assert ends(job, 0, 300) == 74
    message = re.search(r"process 0 of \d: nothing has come to an end for 5 s, waiting for (.*)\n", job.printed(0))
    assert message and re.search(r"step \d+", message[1]), job.printed(0)


def preempt_one(folder: Path, name: str) -> None:
    """As a batch system does it: SIGTERM to the process groups, of which workers that read data are no part."""
    with srun(folder, name, 2, "--data.workers", "1") as job:
        job.wait_for_steps(8)
        for process in job.processes:
            os.killpg(process.pid, signal.SIGTERM)
        assert job.wait() == [75, 75], job.printed(0) + job.printed(1)
    saved = re.search(rf"stopped by SIGTERM after step (\d+) of {ENDLESS}, which is saved. To go on: ", job.printed(0))
    assert saved and max(whole_steps(folder / name / "checkpoints")) == int(saved[1])


def finish(folder: Path, name: str, count: int) -> list[dict[str, Any]]:
    """Goes on for four steps more, and ends. Returns the curve."""
    steps = max(whole_steps(folder / name / "checkpoints")) + 4
    with srun(folder, name, count, "--steps", str(steps)) as job:
        assert job.wait() == [0] * count, job.printed(0) + job.printed(1)
    assert "going on from step" in job.printed(0)
    assert max(whole_steps(folder / name / "checkpoints")) == steps
    return curve_of(job.curve)


def test_two_processes_of_which_one_is_killed_and_then_both_are_preempted(folder: Path) -> None:
    kill_one(folder, "broken", 2)
    preempt_one(folder, "broken")
    curve = finish(folder, "broken", 2)
    assert curve == left_alone(folder, "alone", 2, len(curve))


def test_four_processes_of_which_one_is_killed_and_then_one_hangs(folder: Path) -> None:
    kill_one(folder, "four", 4)
    hang_one(folder, "four", 4)
    curve = finish(folder, "four", 4)
    assert curve == left_alone(folder, "four alone", 4, len(curve))


def test_what_one_process_cannot_do_ends_all_of_them_with_its_number(folder: Path) -> None:
    """The run folder is in the way of the first one; the second finds nothing wrong itself."""
    (folder / "fails").write_text("a file")
    with srun(folder, "fails", 2) as job:
        assert job.wait(300) == [2, 1], job.printed(0) + job.printed(1)
    assert "libra: process 0 of 2: the run folder" in job.printed(0) and "cannot be written" in job.printed(0)
    assert "libra: process 1 of 2: process 0 could not hold the run folder" in job.printed(1)
