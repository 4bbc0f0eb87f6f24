"""Several processes on one machine (gloo): the operator and the trainer's step give the bits that one process gives,
and what starts the processes ends them, whatever happens.

The one process of the comparison has as many devices and the same collectives. Sums over ranks that XLA adds to the
step (gradients, losses) are gloo's there too: it adds in another order than XLA does inside one process by default.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from libra_jax import processes
from libra_jax.processes import ProcessFailed, run_processes

TESTS = Path(__file__).parent
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
    # A busy machine is not a hung one.
    "XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
}
# (processes, devices in each): cases. A mesh is pools x sequences in a pool x ranks of a sequence (x ranks of a node),
# in the order of the processes: pools lie inside a process where a process has as many devices as they have ranks.
SEVERAL = {
    (2, 4): ("attention-2x2x2", "attention-1x4x2x4", "step-2x2x2"),  # pools inside; nodes of one pool; pools inside
    (4, 1): ("attention-2x1x2", "attention-1x2x2"),  # two pools, each across two processes; one across four
}


def results_of(count: int, devices: int, cases: tuple[str, ...], folder: Path) -> dict[str, np.ndarray]:
    """Every shard of every result, merged over processes; what several hold has to be the same in all of them."""
    folder.mkdir()
    worker = [sys.executable, "-W", "ignore", str(TESTS / "process_worker.py"), str(folder), str(devices), *cases]
    run_processes(worker, count, timeout_seconds=500, environment=ENVIRONMENT)
    merged: dict[str, np.ndarray] = {}
    for index in range(count):
        with np.load(folder / f"{index}.npz") as file:
            for key in file:
                shard = file[key]
                np.testing.assert_array_equal(merged.setdefault(key, shard), shard, err_msg=key)
    return merged


@pytest.mark.parametrize("several", SEVERAL, ids=[f"{count} of {devices} devices" for count, devices in SEVERAL])
def test_several_processes_give_the_bits_of_one(several: tuple[int, int], tmp_path: Path) -> None:
    cases = SEVERAL[several]
    runs = {(1, 8): cases, several: cases}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # what takes long is starting JAX and tracing, on one core
        started = [
            pool.submit(results_of, count, devices, some, tmp_path / f"{count} of {devices}")
            for (count, devices), some in runs.items()
        ]
        one, other = [run.result() for run in started]
    assert other.keys() == one.keys()
    for case in cases:
        names = {key.split()[1] for key in one if key.startswith(case)}
        assert names == {"out", "dq", "dk", "dv"} or ({"loss0", "grad_norm3"} < names and len(names) > 17)
        for name in names:
            assert any(shard.any() for key, shard in one.items() if key.startswith(f"{case} {name} ")), (case, name)
    for key, shard in one.items():
        np.testing.assert_array_equal(other[key], shard, err_msg=key)
        if key.startswith("step-2x2x2 sizes"):
            sizes = set(shard.view(np.int32))
            assert sizes == {2, 4}, "steps in pools of both sizes, chosen by each process for itself"


def python(program: str, count: int, **options) -> list[str]:
    """Runs a program, which finds address, count and index in sys.argv[1:], in `count` processes."""
    return run_processes([sys.executable, "-c", f"import os, sys, time\n{program}"], count, **options)


def test_every_process_gets_its_number_and_its_core_and_its_output_comes_back() -> None:
    core = min(os.sched_getaffinity(0))
    printed = python(
        "print(sys.argv[1:], os.sched_getaffinity(0), os.environ['WORD'])", 3,
        timeout_seconds=60, cores=[core] * 3, environment=os.environ | {"WORD": "word"},
    )  # fmt: skip
    assert len(printed) == 3
    for index, line in enumerate(printed):
        assert re.match(rf"\['127\.0\.0\.1:\d+', '3', '{index}'\] ", line)
        assert line.endswith(f" {{{core}}} word\n")


def test_lines_of_the_first_process_are_handed_on_while_it_runs() -> None:
    seen: list[tuple[str, float]] = []
    program = "print('one', sys.argv[3], flush=True); time.sleep(1); print('two'); print('three', end='')"
    printed = python(
        program, 2, timeout_seconds=60, on_line=lambda line: seen.append((line, time.monotonic()))
    )  # fmt: skip
    assert [line for line, _ in seen] == ["one 0", "two"] and seen[1][1] - seen[0][1] > 0.5
    assert printed == [f"one {index}\ntwo\nthree" for index in range(2)]


def test_when_one_fails_the_others_are_killed_and_its_output_is_shown() -> None:
    program = (
        "print('pid', os.getpid(), flush=True)\n"
        "if sys.argv[3] == '1': sys.exit('something went wrong')\n"
        "import subprocess; print('pid', subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    begin = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"process 1 of 2 ended with 1: (.|\n)*something went wrong") as caught:
        python(program, 2, timeout_seconds=300)
    assert time.monotonic() - begin < 60
    assert "process 0 printed" not in str(caught.value)


def test_time_that_runs_out_ends_all_of_them_and_shows_what_they_printed() -> None:
    program = (
        "import subprocess\nprint('children', os.getpid(), subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)"
    )
    with pytest.raises(ProcessFailed, match=r"2 processes did not end within 2 s") as caught:
        python(program, 2, timeout_seconds=2)
    children = [int(pid) for line in re.findall(r"children (\d+ \d+)", str(caught.value)) for pid in line.split()]
    assert len(children) == 4
    time.sleep(0.1)  # the last ones belong to init now, which has to notice
    alive = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(map(str, children))], capture_output=True, text=True)
    assert all(line.startswith("Z") for line in alive.stdout.split()), alive.stdout


def test_a_port_that_another_program_took_first_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ports = iter([1, 2])
    monkeypatch.setattr(processes, "_free_port", lambda: next(ports))
    program = "sys.exit('Address already in use') if sys.argv[1].endswith(':1') else print('well')"
    assert python(program, 2, timeout_seconds=60) == ["well\n", "well\n"]
