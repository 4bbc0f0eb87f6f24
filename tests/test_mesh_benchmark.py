"""The benchmark of every policy on a mesh: a small run of all of them, and that what is wrong is found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_base import programs_kept

from benchmarks import mesh, mesh_case, mesh_report, mesh_runs
from benchmarks.mesh_case import Options, layout
from libra_jax.assignments import at_home
from libra_jax.data.lengths import read_lengths
from libra_jax.policies.plans import PLANS

SMALL = Options(
    seq_len=128, cp=2, pool_size=4, heads=2, kv_heads=1, head_dim=8, block=16, waves=2, rounds=2, check_tokens=128,
)  # fmt: skip
"""On the eight devices of the tests. The operator alone, unless a test says otherwise."""
OPERATOR = dataclasses.replace(SMALL, passes=("both",), policies=("context-parallel", "distca", "libra"), rounds=1)


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with programs_kept(tmp_path_factory.mktemp("programs")):
        yield


def run(options: Options, folder: Path) -> tuple[int, dict[str, Any], str]:
    """-> exit status, the JSON file's content, the report."""
    files = {"json": folder / "mesh.json", "report": folder / "mesh.md"}
    status = mesh.main(dataclasses.replace(options, **files))
    return status, json.loads(files["json"].read_text()), files["report"].read_text()


@pytest.mark.parametrize(
    "names", [tuple(PLANS), ("ulysses", "zigzag", "libra")], ids=["every policy", "three policies"]
)
def test_every_policy_is_right_and_has_a_row_of_times(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found, report = run(dataclasses.replace(SMALL, policies=names), tmp_path)
    assert status == 0, [row["why"] for row in found["correct"]]
    assert [row["policy"] for row in found["correct"]] == [row["policy"] for row in found["rows"]] == list(names)
    assert found["base"] == "libra" and found["mesh"] == {"pools": 1, "pool_size": 4, "cp": 2}
    for row in found["correct"]:
        assert row["ok"] and row["finite"] and row["fallback"] is None
        assert row["bits"] == row["full_bits"] == 0
        assert all(0 < row[name] < 2e-5 for name in mesh_runs.NAMES)
        assert len(row["losses"]) == 2 and row["losses"][1] < row["losses"][0]
    pages = np.array([row["pages"] for row in found["rows"]])
    assert (pages.sum(axis=(1, 2)) == pages[0].sum()).all(), "all policies do the same work"
    for row, visited in zip(found["rows"], pages, strict=True):
        for which in mesh_report.PASSES:
            assert len(row[which]["seconds"]) == SMALL.rounds and min(row[which]["seconds"]) > 0
        assert np.shape(row["busy_seconds"]) == (1, 8) and np.min(row["busy_seconds"]) > 0
        assert row["imbalance"] == pytest.approx(visited.max() / visited.mean())
        assert row["busy_most"] == pytest.approx(np.max(row["busy_seconds"]))
        step = np.median(row["step"]["seconds"])
        assert row["tokens_per_second"] == pytest.approx(4 * SMALL.seq_len / step)  # type: ignore[operator]
        assert 0 <= row["sent_mean_bytes"] <= row["sent_most_bytes"]
        assert row["modelled_over_base"] > 0
    libra = found["rows"][-1]
    assert libra["modelled_over_base"] == libra["both"]["over_base"] == 1
    shown = capsys.readouterr().out
    for name in names:
        assert name in shown and f"| {name} |" in report
    assert "What these numbers do not say" in report and mesh_report.CPU_LIMIT in report


def test_a_wrong_plan_ends_with_status_1_and_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = mesh_runs.tables_of

    def one_page_less(planned: mesh_runs.Planned, step: int) -> Any:
        tables = whole(planned, step)
        if planned.name != "distca":
            return tables
        entries = np.array(tables.entries)
        entries[..., 3] -= entries[..., 3] > 1
        return dataclasses.replace(tables, entries=entries)

    monkeypatch.setattr(mesh_runs, "tables_of", one_page_less)
    status, found, report = run(OPERATOR, tmp_path)
    assert status == 1 and found["rows"] == []
    assert {row["policy"]: row["ok"] for row in found["correct"]} == {
        "context-parallel": True, "distca": False, "libra": True,
    }  # fmt: skip
    why = " ".join(found["correct"][1]["why"])
    assert "out: error" in why and "differ from context-parallel's" in why
    assert "## Times" not in report and "WRONG" in report
    assert "WRONG: distca. Nothing was timed." in capsys.readouterr().out


def test_another_kernels_bits_are_told_from_right_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in one bit of one policy's output: far within rounding, and still not what the contract says."""
    run_operator, calls = mesh_runs.Operator.run, iter(range(100))

    def flip(self: mesh_runs.Operator, *arguments: Any) -> Any:
        out, *rest = run_operator(self, *arguments)
        return (out.at[0, 0, 0, 0].multiply(1 + 2**-22), *rest) if next(calls) == 2 else (out, *rest)

    monkeypatch.setattr(mesh_runs.Operator, "run", flip)
    status, found, _ = run(dataclasses.replace(OPERATOR, policies=("context-parallel", "libra")), tmp_path)
    assert status == 1
    assert found["correct"][1]["why"] == ["1 entries of output and dq differ from context-parallel's in the check"]


@pytest.mark.parametrize("answer", ["a rank that is not there", "a refusal"])
def test_a_policy_without_a_plan_ends_with_status_1(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def policy(first_page: np.ndarray, num_pages: np.ndarray, spec: Any, speed: np.ndarray) -> np.ndarray:
        if answer == "a refusal":
            raise ValueError("chunks do not divide the blocks")
        return at_home(first_page, num_pages, spec, speed) + 1

    monkeypatch.setitem(mesh_case.PLANS, "distca", policy)
    status, found, _ = run(OPERATOR, tmp_path)
    assert status == 1 and found["rows"] == []
    assert [row["policy"] for row in found["correct"]] == ["distca"]
    assert found["correct"][0]["why"][0].startswith("no plan: ")


@pytest.mark.parametrize("relays", [False, True])
def test_every_policys_plans_fit_the_shared_room_and_their_own(relays: bool) -> None:
    changes = {"relays": True, "gpus_per_node": 4, "waves": 3} if relays else {}
    case = mesh_case.make_case(dataclasses.replace(SMALL, steps=2, seq_len=1024, kv_heads=2, **changes))
    assert (case.config.spec.ranks_per_node == 4) == relays
    shared = mesh_runs.plan_steps(case.steps, case.config.spec, case.policies, "shared")
    own = mesh_runs.plan_steps(case.steps, case.config.spec, case.policies, "own")
    assert len({policy.spec for policy in shared.values()}) == 1
    for name in PLANS:
        assert shared[name].fallback is None and own[name].fallback is None
        assert own[name].spec.room.pages <= shared[name].spec.room.pages
        for a, b in zip(shared[name].steps, own[name].steps, strict=True):
            assert np.array_equal(a[0].executor, b[0].executor)


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        (1, (None, None, None), (1, 1, 1)),
        (8, (None, None, None), (1, 4, 2)),
        (64, (None, None, None), (1, 8, 8)),
        (256, (None, None, None), (2, 8, 16)),
        (8, (None, 8, None), (1, 8, 1)),
        (8, (None, None, 8), (1, 1, 8)),
        (8, (2, None, 2), (2, 2, 2)),
        (6, (None, None, None), (1, 3, 2)),
    ],
)
def test_the_mesh_is_made_of_all_devices(devices: int, given: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    found = layout(devices, *given)
    assert (found.pools, found.pool_size, found.cp) == expected and found.devices == devices


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": ("libra", "magic")}, "magic"),
        ({"pool_size": 3}, "8 devices"),
        ({"seq_len": 1000}, "seq_len"),
        ({"corpus": "nowhere.json"}, "nowhere.json"),
        ({"rounds": 0}, "rounds"),
        ({"multihost": "explicit"}, "--coordinator"),
        ({"num_processes": 2}, "--multihost"),
    ],
)
def test_what_cannot_be_run_is_refused_with_status_2(
    changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mesh.main(dataclasses.replace(SMALL, **changes)) == 2
    assert words in capsys.readouterr().err


def test_one_of_several_processes_has_to_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert mesh.main(SMALL) == 2
    assert "--multihost" in capsys.readouterr().err


def test_sequences_are_filled_from_a_file_of_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[5, 3, 4]")
    found = mesh_case.fill(read_lengths(tmp_path / "lengths.json"), 8, 4)
    assert found == [[5, 3], [4, 4], [1, 3, 4], [5, 3]]


def test_the_documents_of_the_check_are_awkward_and_fit() -> None:
    found = mesh_runs.awkward_lengths(6, 128)
    assert found[0] == [128] and found[4] == [128]
    assert all(sum(documents) <= 128 and min(documents) >= 1 for documents in found)
    assert any(sum(documents) < 100 for documents in found), "one is mostly padding"
    assert any(1 in documents for documents in found)
