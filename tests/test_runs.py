"""A whole run: exact resume, other layouts, kill -9, full disks, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from run_base import programs_kept, run_config, start
from train_base import FAST_LINKS

from libra_jax.cli import main as libra
from libra_jax.data import DataConfig, open_batches
from libra_jax.train import loop
from libra_jax.train.checkpoint import Checkpoints, whole_steps
from libra_jax.train.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.folder import hold_folder
from libra_jax.train.loop import RunStopped
from libra_jax.train.mesh import make_mesh
from libra_jax.train.metrics import MetricsFile, StepRecord, read_metrics
from libra_jax.train.step import (
    Program,
    compile_program,
    plan_state,
)

TWO_SIZES = MeshConfig(2, 2, 2, pool_sizes=(4,), least_saving=0.0, links=FAST_LINKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a corpus in `text`; programs that were compiled once are kept there for the tests that follow."""
    path = tmp_path_factory.mktemp("runs")
    (path / "text").mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        (path / "text" / f"{i}.txt").write_text("the cat sat " * int(rng.integers(1, 10)))
    with programs_kept(path):
        yield path


def saved_arrays(config: TrainConfig) -> dict[str, np.ndarray]:
    """The state in the newest checkpoint."""
    blueprint = plan_state(config, make_mesh(config.mesh))
    with (
        Checkpoints(Path(config.run_dir) / "checkpoints", config.checkpoint) as checkpoints,
        contextlib.closing(open_batches(config.data, config.spec, 2, 2)) as batches,
    ):
        state = checkpoints.restore(blueprint.shapes, batches)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(state)}


def places_of(state: Any) -> list[int]:
    """Where in memory each device's share of each array lies."""
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for shard in x.addressable_shards]


def numbers_of(records: list[StepRecord]) -> list[dict[str, Any]]:
    """Records without what differs from one clock to another."""
    measured = {"seconds", "tokens_per_second", "planning_seconds", "waited_seconds", "host_peak_bytes"}
    measured |= {"flops_per_second_per_device"}
    return [{n: v for n, v in dataclasses.asdict(record).items() if n not in measured} for record in records]


def test_a_run_that_stops_and_goes_on_equals_one_that_does_not_bit_for_bit(folder: Path) -> None:
    whole, printed = start(run_config(folder, "whole"))
    assert [record.step for record in whole] == list(range(1, 9)) and "compiled in" in printed
    assert whole[-1].loss < whole[0].loss - 0.5
    assert all(1 <= r.imbalance_libra < r.imbalance_home for r in whole)

    part = run_config(folder, "parts", steps=3)
    assert numbers_of(start(part)[0]) == numbers_of(whole[:3])
    # What a kill can leave behind: steps past the checkpoint, half a line, half a checkpoint.
    run = Path(part.run_dir)
    later = (Path(run_config(folder, "whole").run_dir) / "metrics.jsonl").read_text().splitlines(keepends=True)[3:]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(later)[:-9])
    shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "5.orbax-checkpoint-tmp")
    shutil.copytree(run / "checkpoints" / "3" / "state", run / "checkpoints" / "7" / "state")

    records, printed = start(dataclasses.replace(part, steps=8))
    assert "going on from step 3 of 8" in printed
    assert "was not whole and is called 7.unfinished" in printed
    assert numbers_of(records) == numbers_of(whole)
    one, other = saved_arrays(run_config(folder, "whole")), saved_arrays(part)
    assert one.keys() == other.keys() and len(one) > 30
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array, err_msg=name)
    assert {path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()} == {"6", "8"}

    again, printed = start(dataclasses.replace(part, steps=8))
    assert "has done its 8 steps already; --steps 16 goes on" in printed and "compiled" not in printed
    assert again == records


def test_a_run_of_several_pool_sizes_has_the_curve_of_each_and_compiles_ahead_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs hand the state on where it lies: nothing is copied, moved or compiled once the first step has begun."""
    compiled: list[str] = []
    at_step: list[int] = []
    moved: list[bool] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    def compile_watched(*arguments: Any) -> Program:
        program = compile_program(*arguments)

        def run(state: Any, arrays: Any, plans: Any) -> Any:
            before = places_of(state)
            at_step.append(len(compiled))
            with jax.transfer_guard("disallow"):
                after, numbers = program.run(state, arrays, plans)
            moved.append(places_of(after) != before)
            return after, numbers

        return Program(program.mesh, run)

    jax.monitoring.register_event_duration_secs_listener(listen)
    monkeypatch.setattr(loop, "compile_program", compile_watched)
    curves: dict[str, list[StepRecord]] = {}
    try:
        for name, mesh in {
            "2": MeshConfig(2, 2, 2),
            "4": MeshConfig(1, 4, 2),
            "2 and 4": TWO_SIZES,
        }.items():
            at_step.clear()
            config = run_config(folder, f"pools of {name}", mesh=mesh, steps=6, checkpoint=CheckpointConfig(every=6))
            curves[name], printed = start(config)
            assert len(at_step) == 6 and at_step[0] > 0 and len(set(at_step)) == 1 and len(compiled) == at_step[0], name
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert moved == [False] * 18
    assert re.search(r"pool size 2: .* s\npool size 4: .* s\ncompiled in .* s, once for the whole run", printed)
    assert "or 1 pools x 4 sequences: each step takes" in printed
    sizes = {name: [record.pool_size for record in records] for name, records in curves.items()}
    assert sizes["2"] == [2] * 6 and sizes["4"] == [4] * 6 and set(sizes["2 and 4"]) == {2, 4}
    column = [line.split()[-1] for line in printed.splitlines() if re.match(r" +\d/6 ", line)]
    assert [int(size) for size in column] == sizes["2 and 4"]
    for field, rtol in (("loss", 2e-6), ("grad_norm", 2e-5)):
        one, *others = ([getattr(record, field) for record in records] for records in curves.values())
        for other in others:
            np.testing.assert_allclose(other, one, rtol=rtol)
    for fields in zip(*curves.values(), strict=True):
        assert len({(r.targets, r.tokens, r.imbalance_home, r.imbalance_ulysses) for r in fields}) == 1


def test_a_run_whose_config_or_data_has_changed_is_refused_with_both_values(folder: Path) -> None:
    config = run_config(folder, "fixed", steps=2)
    first, _ = start(config)

    def refused(**changes: Any) -> str:
        with pytest.raises(ValueError) as caught:
            start(dataclasses.replace(config, steps=4, **changes))
        return str(caught.value)

    message = refused(seq_len=128, mesh=MeshConfig(1, 4, 2))
    assert "seq_len: 64 there, 128 now" in message and "--run-dir" in message
    assert "mesh." not in message, "another layout of the devices is no hindrance"
    message = refused(mesh=MeshConfig(1, 2, 4))
    assert "was made with other data" in message and "sequences_per_step: 8 there, 4 now" in message
    assert "model.num_layers: 1 there, 2 now" in refused(model=dataclasses.replace(config.model, num_layers=2))
    assert "seed: 0 there, 1 now" in refused(seed=1)
    file = folder / "text" / "7.txt"
    before = file.read_bytes()
    file.write_bytes(before + b"!")
    message = refused()
    assert "was made with other data" in message and "corpus: " in message
    file.write_bytes(before)

    # How many steps and how often to save may change; the next test changes the learning rate.
    records, _ = start(dataclasses.replace(config, steps=4, checkpoint=CheckpointConfig(every=1, keep=1)))
    assert numbers_of(records[:2]) == numbers_of(first) and len(records) == 4


def test_a_run_goes_on_with_its_devices_in_another_layout(folder: Path) -> None:
    """Saved on 2 pools of 2, 2 ranks each; then one pool of 4; then 4 ranks a sequence and twice the micro-steps; then
    heads shared by two and layers in two stages.

    The same sequences in every step; losses differ by rounding alone.
    """
    model = dataclasses.replace(run_config(folder, "one_layout").model, num_layers=2)
    whole, _ = start(run_config(folder, "one_layout", steps=8, model=model))
    config = run_config(folder, "layouts", steps=2, model=model)
    start(config)
    others = MeshConfig(1, 4, 2), MeshConfig(1, 2, 4), MeshConfig(1, 2, 1, tp=2, pp=2)
    for mesh, micro_steps, steps in zip(others, (2, 4, 4), (4, 6, 8), strict=True):
        records, printed = start(dataclasses.replace(config, mesh=mesh, micro_steps=micro_steps, steps=steps))
        assert f"going on from step {steps - 2} of {steps}" in printed
    assert [r.tokens for r in records] == [r.tokens for r in whole]
    assert [r.targets for r in records] == [r.targets for r in whole]
    np.testing.assert_allclose([r.loss for r in records], [r.loss for r in whole], rtol=1e-5)
    assert [r.pool_size for r in records] == [2, 2, 4, 4, 2, 2, 2, 2]


def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_of_it_is_kept(folder: Path) -> None:
    config = run_config(folder, "burst", steps=2)
    start(config)
    optimizer = OptimizerConfig(learning_rate=1e30, warmup_steps=0, stop_after_skipped=2)
    hot = dataclasses.replace(config, steps=9, optimizer=optimizer)
    with pytest.raises(
        RunStopped,
        match=r"step 5: loss nan, .*: nothing was updated\. micro-step 0: loss nan; sequences \[\d.*, documents \d.* "
        r"of .*text\. micro-step 1: .* It is number 2 in a row, .*stop_after_skipped is 2: the run stops here.*"
        r"The newest whole checkpoint is that of step 2",
    ):
        start(hot)
    records = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3, 4] and records[2].learning_rate > 1e29
    assert [record.skipped for record in records] == [False] * 3 + [True]
    records, _ = start(dataclasses.replace(config, steps=4))
    assert [record.step for record in records] == [1, 2, 3, 4] and all(math.isfinite(r.loss) for r in records)


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(folder, "full", steps=4)
    write = MetricsFile.append

    def append(self: MetricsFile, record: StepRecord) -> None:
        if record.step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, record)

    monkeypatch.setattr(MetricsFile, "append", append)
    with pytest.raises(RunStopped, match=r"step 4 could not be saved in .*No space left.*that of step 2"):
        start(config)


def test_a_run_folder_that_cannot_be_held_is_refused(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"file/run cannot be written: Not a directory; set --run-dir"):
        start(run_config(folder, "file/run"))
    with hold_folder(folder / "held"), pytest.raises(ValueError, match=r"another process is training in .*held"):
        start(run_config(folder, "held"))


def killed_config(folder: Path, name: str) -> TrainConfig:
    """Every step chooses between two pool sizes; data come from a prepared folder, read ahead in a worker process."""
    data = DataConfig(paths=(str(folder / "prepared"),), workers=1, held_out=0.05)
    return run_config(folder, name, steps=1_000_000, mesh=TWO_SIZES, data=data)


def test_a_run_killed_at_any_moment_goes_on_and_ends_with_the_same_curve(folder: Path) -> None:
    """kill -9 from outside, twice, and the same command again; against a run that was left alone."""
    assert libra(["prepare", str(folder / "text"), "--tokenizer", "bytes", "--out", str(folder / "prepared")]) == 0
    config_file = folder / "killed.py"
    config_file.write_text(
        f'"""A test."""\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n'
        "from pathlib import Path\nfrom test_runs import killed_config\n"
        f"def config():\n    return killed_config(Path({str(folder)!r}), 'killed')\n"
    )
    command = [sys.executable, "-m", "libra_jax.cli", "train", str(config_file)]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    curve = folder / "killed" / "metrics.jsonl"
    for steps in (5, 14):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (curve.exists() and curve.read_text().count("\n") >= steps):
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        assert steps <= curve.read_text().count("\n")

    steps = max(40, max(whole_steps(folder / "killed" / "checkpoints")) + 2)
    done = subprocess.run([*command, "--steps", str(steps)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stdout and "Summary" in done.stdout
    assert done.stdout.index("compiling (about half a minute") < done.stdout.index("compiled in")
    lines = done.stdout.splitlines()  # what can be copied stands whole on its line, in any terminal
    assert f"checkpoints: {folder}/killed/checkpoints" in lines
    assert f"to go on: {sys.executable} -m libra_jax.cli train {config_file} --steps {2 * steps}" in lines
    assert (folder / "killed" / "work_per_rank.png").read_bytes().startswith(b"\x89PNG")
    whole, _ = start(dataclasses.replace(killed_config(folder, "alone"), steps=steps))
    assert numbers_of(read_metrics(curve)) == numbers_of(whole)
    assert {record.pool_size for record in whole} == {2, 4}
    assert re.search(r"sequences in a pool\W+2 in \d+ steps, 4 in \d+ steps", done.stdout)
