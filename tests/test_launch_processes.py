"""Who a process of a run is: what launchers say, what is missing or contradicts, and what scripts hand over."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from libra_jax import cli
from libra_jax.cli import load_config
from libra_jax.train import together
from libra_jax.train.config import MeshConfig, every_value
from libra_jax.train.launch import Launch, find_launch, several_were_started, share_of
from libra_jax.train.xla import check_options, compiler_options, describe_options, read_options

SCRIPTS = Path(__file__).parents[1] / "configs" / "launch"

SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "node[01-04]", "SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}  # fmt: skip
PER_GPU = SLURM | {
    "SLURM_STEP_TASKS_PER_NODE": "8(x3),4", "SLURM_STEP_NUM_TASKS": "28", "SLURM_NTASKS": "28", "SLURM_NODEID": "3",
    "SLURM_PROCID": "27", "SLURM_LOCALID": "3",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
}  # fmt: skip
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("environment", "given", "expected"),
    [
        (SLURM, {}, Launch("slurm", 2, 4)),
        (PER_GPU, {}, Launch("slurm", 27, 28, devices=(3,))),
        (PER_GPU | {"CUDA_VISIBLE_DEVICES": "0"}, {}, Launch("slurm", 27, 28)),  # bound to its GPU by the launcher
        (PER_GPU | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {}, Launch("slurm", 27, 28, devices=(3,))),
        (PER_GPU, {"devices": [6, 7]}, Launch("slurm", 27, 28, devices=(6, 7))),
        (SLURM | OPENMPI, {}, Launch("openmpi", 5, 8, devices=(1,))),  # mpirun inside a SLURM job
        (KUBERNETES | SLURM, {}, Launch("slurm", 2, 4)),
        (KUBERNETES, {"coordinator": "a-0.b:1", "num_processes": 4}, Launch("kubernetes", 3, 4, "a-0.b:1")),
        ({}, {"coordinator": "a:1", "num_processes": 2, "process_id": 1}, Launch("explicit", 1, 2, "a:1")),
    ],
)  # fmt: skip
def test_each_launcher_is_read(environment: dict[str, str], given: dict[str, Any], expected: Launch) -> None:
    assert find_launch("auto", environment, **given) == expected
    assert find_launch(expected.method, environment, **given) == expected


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("method", "environment", "given", "message"),
    [
        ("auto", {}, {}, "finds no launcher: neither SLURM .* --coordinator HOST:PORT --num-processes N"),
        ("mpi", {}, {}, "--multihost mpi: must be one of auto, slurm, openmpi, kubernetes, explicit"),
        ("slurm", without(SLURM, "SLURM_STEP_NODELIST"), {}, "slurm: SLURM_STEP_NODELIST is not set; .* srun"),
        ("slurm", SLURM | {"SLURM_PROCID": "x"}, {}, "SLURM_PROCID \\('x'\\) must be a whole number"),
        ("slurm", SLURM | {"SLURM_PROCID": "4"}, {}, "number of a process \\(4\\) .* below how many there are \\(4\\)"),
        ("slurm", SLURM | {"SLURM_NTASKS": "8"}, {}, "SLURM_STEP_NUM_TASKS \\(4\\) and SLURM_NTASKS \\(8\\) contra"),
        ("slurm", SLURM | {"SLURM_LOCALID": "1"}, {}, "SLURM_LOCALID \\(1\\) .* below the tasks of its node \\(1\\)"),
        ("slurm", SLURM | {"SLURM_NODEID": "4"}, {}, "SLURM_NODEID \\(4\\) must be below the 4 nodes"),
        ("slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "?"}, {}, "TASKS_PER_NODE \\(\\?\\) is no list such as 8"),
        ("slurm", SLURM | {"SLURM_STEP_NUM_NODES": "9"}, {}, "NUM_NODES \\(9\\) must be at most SLURM_NTASKS \\(4\\)"),
        ("slurm", SLURM, {"num_processes": 3}, "--num-processes 3 contradicts slurm, which has 4"),
        ("slurm", SLURM, {"process_id": 3}, "--process-id 3 contradicts slurm, which says 2"),
        ("slurm", PER_GPU | {"CUDA_VISIBLE_DEVICES": "0,1"}, {}, "\\(0,1\\) has 2 GPUs, too few for process number 3"),
        ("openmpi", SLURM, {}, "openmpi: OMPI_COMM_WORLD_SIZE, .* are not set; .* mpirun"),
        ("openmpi", OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, {}, "LOCAL_RANK \\(4\\) .* below .*SIZE \\(4\\)"),
        ("openmpi", without(OPENMPI, "OMPI_MCA_orte_hnp_uri"), {}, "Open MPI 5 .* --coordinator HOST:PORT"),
        ("kubernetes", without(KUBERNETES, "JOB_COMPLETION_INDEX"), {}, "JOB_COMPLETION_INDEX is not set; .*Indexed"),
        ("kubernetes", KUBERNETES, {"num_processes": 4}, "give --coordinator HOST:PORT"),
        ("explicit", {}, {"coordinator": "a:1"}, "explicit: --num-processes N, --process-id I must be given"),
        ("explicit", {}, {"coordinator": "a"}, "--coordinator a must be HOST:PORT"),
        ("explicit", {}, {"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "at least one process"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_named_with_its_value(
    method: str, environment: dict[str, str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_launch(method, environment, **given)


def test_cpu_devices_are_shared_out_among_the_processes() -> None:
    mesh = MeshConfig(2, 4, 1, cpu_devices=8)
    assert share_of(mesh, Launch("slurm", 0, 4)).cpu_devices == 2
    assert share_of(MeshConfig(2, 4, 1), Launch("slurm", 0, 4)).cpu_devices is None
    with pytest.raises(ValueError, match=r"mesh.cpu_devices \(8\) .* a multiple of how many there are \(3\)"):
        share_of(mesh, Launch("slurm", 0, 3))


def test_processes_that_were_started_together_are_not_taken_for_runs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert several_were_started(PER_GPU) == "SLURM_STEP_NUM_TASKS=28"
    assert several_were_started(OPENMPI) == "OMPI_COMM_WORLD_SIZE=8"
    assert several_were_started({"SLURM_STEP_NUM_TASKS": "1"}) is several_were_started({}) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.chdir(SCRIPTS.parents[1])
    assert cli.main(["train", "demo"]) == 2
    assert "SLURM_STEP_NUM_TASKS=2 processes were started together; --multihost" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-processes", "2"], "--num-processes says who is who .* needs --multihost"),
        (["--multihost", "--process-id", "x"], "--process-id 'x': must be like 0"),
        (["--multihost", "--coordinator"], "--coordinator needs a value, such as node001:6006"),
        (["--multihost", "--steps", "3"], "--multihost finds no launcher"),
        (["--multihost=explicit", "--coordinator=a:1", "--process-id=0"], "explicit: --num-processes N must be given"),
        (["--multihost", "slurp"], "--multihost slurp: must be one of"),
    ],
)
def test_mistakes_in_flags_are_answered_before_anything_starts(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(SCRIPTS.parents[1])
    assert cli.main(["train", "demo", *args]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_options_of_xla_and_what_goes_before_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_memory_limit_slop_factor=90 --other")
    limit, scheduler = (
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "xla_gpu_enable_latency_hiding_scheduler",
    )
    assert compiler_options("gpu", []) == {scheduler: True, limit: 2}, "XLA_FLAGS go before what Libra sets"
    assert compiler_options("gpu", [f"{limit}=4", "--a=false"]) == {scheduler: True, limit: 4, "a": False}
    assert compiler_options("cpu", []) == {}
    line = describe_options("gpu", [f"{limit}=4"])
    assert line == f"XLA: {scheduler}=true {limit}=4; XLA_FLAGS: --xla_gpu_memory_limit_slop_factor=90 --other"
    assert read_options(["a=1", "b=0.5", "c=x=y"]) == {"a": 1, "b": 0.5, "c": "x=y"}
    for wrong in ("a", "=1", "a="):
        with pytest.raises(ValueError, match="must be NAME=VALUE"):
            read_options([wrong])
    monkeypatch.undo()  # XLA ends the process for flags that it does not know
    check_options(["xla_cpu_enable_fast_math=true"])
    with pytest.raises(ValueError, match="xla: xla_no_such_thing=1 is nothing that this XLA takes"):
        check_options(["xla_no_such_thing=1"])


def flags_of(text: str) -> set[str]:
    """Flags of `libra train` in a script: what stands behind it up to the end of the command."""
    joined = text.replace("\\\n", " ")
    commands = [line.partition("libra train")[2] for line in joined.splitlines() if not line.startswith("#")]
    return {flag for command in commands for flag in re.findall(r"(?<!\S)(--[a-z-]+)", command)}


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_use_flags_that_exist(script: Path) -> None:
    subprocess.run(["bash" if "bash" in script.read_text()[:20] else "sh", "-n", str(script)], check=True)
    flags = flags_of(script.read_text())
    assert "--multihost" in flags and flags <= {"--multihost", *cli.LAUNCH_FLAGS}
    method = re.search(r"--multihost (\w+)", script.read_text())
    assert method is not None and method[1] in script.name


def test_explicit_script_starts_one_process_on_each_host(tmp_path: Path) -> None:
    """With an `ssh` that only says what it was to run."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@"\n')
    ssh.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTS": "a b c"}
    command = ["sh", str(SCRIPTS / "explicit.sh"), "demo", "--steps", "7"]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    for number, host in enumerate("abc"):
        asked = (tmp_path / f"process-{number}.log").read_text().split()
        assert asked[:2] == ["-tt", host] and asked[asked.index("demo") + 1 :] == [
            "--steps", "7", "--multihost", "explicit", "--coordinator", "a:6006", "--num-processes", "3",
            "--process-id", str(number),
        ]  # fmt: skip


def test_the_kubernetes_job_is_one_whole(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((SCRIPTS / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": name} and service["metadata"]["name"] == pod["subdomain"]
    command = pod["containers"][0]["command"]
    assert command[:2] == ["libra", "train"]
    given, overrides = cli._launch_options(command[3:])
    launch = find_launch(given.pop("multihost"), KUBERNETES, **given)
    assert launch == Launch("kubernetes", 3, spec["completions"], f"{name}-0.{pod['subdomain']}:6006")
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert overrides == ["--run-dir=/shared/runs/first"]


def test_processes_with_different_settings_are_refused_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = every_value(load_config("demo"))
    there = {**here, "optimizer.learning_rate": 0.5}
    assert here["optimizer.learning_rate"] != 0.5 and len(here) > 50

    def of_both(mine: np.ndarray) -> np.ndarray:
        """What two processes see, the other one with `there`."""
        names = sorted(there)
        if mine.shape == ():
            return np.array([mine, together._number(names)])
        return np.stack([mine, [together._number(there[name]) for name in names]])

    monkeypatch.setattr(together.jax, "process_count", lambda: 2)
    monkeypatch.setattr(together.multihost_utils, "process_allgather", of_both)
    with pytest.raises(ValueError, match=r"learning_rate is 0.01 in process 0, and process 0 and process 1 differ"):
        together.same_config(here)
    together.same_config(there)
