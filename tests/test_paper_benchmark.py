"""The report's experiments: their counting against independent counting, and the committed text against its CSVs."""

import csv
import dataclasses
import re

import numpy as np
import pytest

from benchmarks.paper import report
from benchmarks.paper.__main__ import FOLDER, Options, main, write_csv
from benchmarks.paper.base import WARM_UP, Case, numbers
from benchmarks.paper.experiments import EXPERIMENTS, Servers, _servers, growth, placement
from libra_jax.policies.names import policy
from libra_jax.simulate.attention import group_seconds

SMALL = Case(dp=8, micro_steps=1, steps=2)


def test_steps_are_the_same_whatever_fills_the_queues_before_them():
    warm = SMALL.batches(WARM_UP)
    assert len(warm) == WARM_UP + 2 and warm[-2:] == SMALL.batches()
    assert SMALL.batches() != dataclasses.replace(SMALL, seed=1).batches()
    short = dataclasses.replace(SMALL, longest=4096).batches()
    assert max(max(sequence) for step in short for sequence in step) == 4096


def test_a_global_pools_bytes_by_server_are_those_of_its_plan():
    """Two ways to count: by server, and rank by rank from the routes of the whole plan."""
    setting, sequences = SMALL.setting(), SMALL.batches()[0]
    counted = _servers(sequences, setting)
    (group,) = policy("distca").step(sequences, setting.run).micro_steps[0]
    priced = group_seconds(group, setting.cost, setting.network)
    assert counted.busiest == pytest.approx(priced.across, rel=0.01)
    assert counted.beyond_pod == 0 and 1 <= counted.peers < SMALL.dp
    assert isinstance(counted, Servers) and 0 < counted.mean < counted.busiest


def test_pools_exchange_no_more_when_there_are_more_of_them():
    (few,), (many,) = growth(16, "libra"), growth(32, "libra")
    assert many["across GB"] < 1.3 * few["across GB"]
    assert (few["peers"], many["peers"]) == (7, 7) and few["beyond pods GB"] == many["beyond pods GB"] == 0


def test_placement_is_between_the_bound_and_what_was_packed():
    rows = placement("lognormal-644-71k", "256K", 1)
    value = {(row["pool size"], row["placement"]): row["imbalance"] for row in rows}
    for size in (2, 4, 8, 16, 32):
        bound, placed, packed = (value[size, name] for name in ("lower bound", "placed over the step", "as packed"))
        assert bound - 1e-9 <= placed <= packed + 1e-9


def test_a_row_has_finite_numbers_and_its_losses_add_up():
    row = numbers(SMALL.measured("libra:8"), SMALL)
    losses = [value for name, value in row.items() if name.startswith("lost to ")]
    assert row["efficiency"] + sum(losses) == pytest.approx(1)
    assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))


def test_csv_there_and_back(tmp_path):
    rows = [{"a": 1, "b": 0.123456789}, {"a": "x", "c": None}]
    write_csv(tmp_path / "t.csv", rows)
    assert report.read(tmp_path, "t") == [{"a": 1, "b": 0.123457, "c": ""}, {"a": "x", "b": "", "c": ""}]
    assert report.read(tmp_path, "none") == []


def test_unknown_experiment_is_named():
    with pytest.raises(SystemExit, match="no experiment is called 'nope'; there are 1_placement"):
        main(Options(only=("nope",)))


def test_report_without_its_csvs_says_which(tmp_path):
    with pytest.raises(SystemExit, match="no report without 1_placement, 2_scaling"):
        main(Options(draw=True, folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_committed_text_is_what_its_csvs_give(monkeypatch):
    """All but the line about the machine, and the comparison with published numbers, which takes a minute."""
    from benchmarks.paper import reality

    monkeypatch.setattr(reality, "section", lambda: ["HERE"])
    tables = {name: report.read(FOLDER, name) for name in EXPERIMENTS}
    assert all(tables.values()), "every experiment has its CSV"
    before, after = "\n".join(report.report_text(tables)).split("HERE")
    written = (FOLDER / "README.md").read_text()
    machine = re.compile(r"^.* cores of .*$", re.MULTILINE)
    assert machine.sub("", written).startswith(machine.sub("", before).rstrip())
    assert written.rstrip().endswith(after.strip())
    for name in re.findall(r"\]\((\w+\.png)\)", written):
        assert (FOLDER / name).stat().st_size > 10_000
    rows = report.read(FOLDER, "residuals")
    for part in reality.PARTS:
        shown = f"| {part.title} | "
        assert shown in written and f"## {part.title}\n" in (FOLDER / "residuals.md").read_text()
        assert any(row["part"] == part.title for row in rows), part.title
    for path in FOLDER.glob("*.csv"):
        with path.open() as file:
            assert len(list(csv.reader(file))) > 2, path.name
