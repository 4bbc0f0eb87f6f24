"""The comparison of loss curves: its ranges, its arithmetic and its commands, on curves that are made up."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tyro

from benchmarks.curves import (
    LAYOUTS,
    SEQUENCES,
    Options,
    check_same_data,
    command_of,
    compare,
    draw,
    ends_of,
    ranges,
    remarks,
    write_csv,
)
from configs.demo import config
from libra_jax.train.config import TrainConfig
from libra_jax.train.metrics import StepRecord


def records_of(losses: list[float], seconds: float = 1.0) -> list[StepRecord]:
    return [
        StepRecord(step, loss, 1.0, 0.1, 90, 100, seconds, 100 / seconds, 1.0, 1.0, 1.0, 0)
        for step, loss in enumerate(losses, 1)
    ]


def test_ranges_cover_every_step_once():
    assert ranges(7) == [(1, 7)]
    assert ranges(1000) == [(1, 10), (11, 100), (101, 1000)]
    for steps in (1, 10, 11, 100, 101, 2345):
        assert [step for first, last in ranges(steps) for step in range(first, last + 1)] == list(range(1, steps + 1))


def test_differences_by_hand():
    plain = np.full(12, 2.0)
    pooled = np.array([2.02, 1.98] * 5 + [2.0, 2.2])
    rows = {
        (row["layout"], row["first"]): row
        for row in compare({"plain": plain, "pooled": pooled, "yardstick": np.array([2.01] * 10 + [2.0, 2.0])})
    }
    early, late = rows["pooled", 1], rows["pooled", 11]
    assert (early["mean"], early["largest"], early["over"]) == pytest.approx((0.01, 0.01, 2.0))
    assert early["signed"] == pytest.approx(0.0, abs=1e-15)
    assert (late["mean"], late["largest"], late["signed"]) == pytest.approx((0.05, 0.1, 0.05))
    assert late["over"] is None  # the yardstick is no different there
    assert rows["yardstick", 1]["over"] == pytest.approx(1.0)


def test_a_shorter_yardstick_is_held_against_the_steps_it_has():
    losses = {"plain": np.full(12, 2.0), "pooled": np.array([2.0] * 10 + [2.2, 4.0]), "yardstick": np.full(11, 2.1)}
    rows = {(row["layout"], row["first"]): row for row in compare(losses)}
    assert rows["yardstick", 11]["last"] == 11
    assert rows["pooled", 11]["last"] == 12
    assert rows["pooled", 11]["over"] == pytest.approx(2.0)  # 0.1 over 0.05 at step 11
    assert [end["last_loss"] for end in ends_of({"plain": records_of([2.0] * 12), "x": records_of([2.0] * 11)})] == [
        2.0,
        None,
    ]
    assert command_of("yardstick", Options(yardstick_steps=600))[6] == "600"
    assert command_of("pooled", Options(yardstick_steps=600))[6] == "1000"


def test_ends_by_hand():
    runs = {"plain": records_of([9.0] * 100 + [3.0] * 100, 0.5), "pooled": records_of([4.0] * 199 + [5.0], 2.0)}
    plain, pooled = ends_of(runs)
    assert (plain["last_mean"], plain["last_loss"], plain["over"]) == (3.0, 3.0, 1.0)
    assert (pooled["last_mean"], pooled["last_loss"], pooled["over"]) == pytest.approx((4.01, 5.0, 4.0))


def test_other_data_or_a_skipped_update_is_refused():
    plain = records_of([3.0, 2.0])
    check_same_data({"plain": plain, "pooled": records_of([3.1, 2.1])})
    other = [plain[0], dataclasses.replace(plain[1], targets=89)]
    with pytest.raises(SystemExit, match=r"pooled has \(step, targets, tokens\) \(2, 89, 100\)"):
        check_same_data({"plain": plain, "pooled": other})
    with pytest.raises(SystemExit, match="pooled left out the update of step 1"):
        check_same_data({"plain": plain, "pooled": [dataclasses.replace(plain[0], skipped=True), plain[1]]})


@pytest.mark.parametrize("name", LAYOUTS)
def test_commands_give_runs_that_fit_the_demo(name):
    command = command_of(name, Options(steps=7, seq_len=512))
    assert command[:3] == ["libra", "train", "demo"]
    made = tyro.cli(TrainConfig, default=config(), args=command[3:])
    assert made.mesh == dataclasses.replace(LAYOUTS[name], links=made.mesh.links)
    assert made.mesh.devices == made.mesh.cpu_devices
    assert made.step_tokens == SEQUENCES * 512 == config().micro_steps * config().mesh.sequences * 512
    assert (made.steps, made.model.compute_dtype, made.run_dir) == (7, "float32", f"runs/curves/{name}")


def test_pooled_is_the_demo_as_it_is():
    assert LAYOUTS["pooled"] == config().mesh


def test_options_are_refused_with_their_names():
    with pytest.raises(ValueError, match="with plain among them"):
        Options(layouts=("pooled",))
    with pytest.raises(ValueError, match="must be of"):
        Options(layouts=("plain", "pool"))
    with pytest.raises(ValueError, match=r"steps \(5\)"):
        Options(steps=5)


def test_csv_plot_and_remarks(tmp_path: Path):
    losses = {"plain": np.array([4.0, 2.0, 2.0]), "pooled": np.array([4.0, 2.0, np.float32(2.1)])}
    write_csv(tmp_path / "curves.csv", losses)
    assert (tmp_path / "curves.csv").read_text() == "step,plain,pooled\n1,4,4\n2,2,2\n3,2,2.0999999\n"
    draw(tmp_path / "curves.png", losses, 512)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    plain, pooled = remarks(losses, compare(losses))
    assert "from 4.000 to 2.667 nats" in plain
    assert "first more than 1e-3 away at step 3" in pooled
