"""The GPU check, as far as it goes without a GPU: its dry run, the code that measures (on a CPU, with the plain XLA
kernels), that it notices what is wrong, and that it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Bench, Item, Journal
from libra_jax import CostModel, PoolSpec

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tiny(tmp_path: Path) -> Bench:
    return Bench(gpu_check.TINY, False, tmp_path / "results.json")


def read(path: Path) -> dict:
    return json.loads(path.read_text())["items"]


def test_dry_run_goes_through_everything_and_is_not_repeated(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "code_version", lambda: "this")  # whoever edits the sources meanwhile
    path, report = tmp_path / "out" / "check.json", tmp_path / "report.md"
    arguments = ["--dry-run", "--quick", "--json", str(path), "--report", str(report)]
    assert gpu_check.main(arguments) == 0
    items = read(path)
    assert {item["status"] for item in items.values()} == {"done"}
    assert {item["section"] for item in items.values()} == set(gpu_check.SECTIONS)
    assert items["correctness: 128"]["result"]["lowered"] == "lowered for H100"
    assert items["speed: 128 32/8 65536"]["result"]["compiled"] == "compiled for H100"

    text = report.read_text()
    assert "Dry run: nothing was launched on a GPU" in text and "Rung 5" not in text
    rows = [line for line in text.splitlines() if " x 8192 | forward |" in line]
    assert [cell.strip() for cell in rows[0].split("|")[6:12]] == ["dry run"] * 6
    assert "602 / 529 / 369" in rows[0]
    spec = PoolSpec(65_536, 1, 1, 32, 8, 128)
    model, default = CostModel.load(path.with_name("check_dry_run_cost_d128.json")), CostModel().scaled(spec)
    for field in dataclasses.fields(CostModel):
        assert getattr(model, field.name) == pytest.approx(getattr(default, field.name), rel=1e-6), field.name

    capsys.readouterr()
    assert gpu_check.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"{len(items)} of {len(items)} items are in {path}" in printed and "..." not in printed


def test_what_measures_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TINY", dataclasses.replace(gpu_check.TINY, lengths=(64, 128, 256)))
    path, report = tmp_path / "trial.json", tmp_path / "trial.md"
    only = ["--only", "speed", "cost", "sweep"]
    with jax.numpy_dtype_promotion("standard"):  # inside jax.nn
        assert (
            gpu_check.main(["--platform", "cpu", "--quick", *only, "--json", str(path), "--report", str(report)]) == 0
        )
    items = read(path)
    one = items["speed: 128 4/2 128"]["result"]
    assert one["documents"] == 2 and 0 < one["useful"] < 1
    assert max(one["differs"].values()) < 0.01  # cuDNN's place is taken by plain XLA
    for direction in gpu_check.DIRECTIONS:
        assert one[direction]["libra"]["tflops"] > 0 and one[direction]["cudnn"]["ms"] > 0
    flops = 4 * 128 * 4 * 2 * (128 * 129 // 2)
    assert one["forward"]["libra"]["tflops"] * one["forward"]["libra"]["ms"] * 1e9 == pytest.approx(flops)
    assert items["speed: 128 4/2 wikipedia"]["result"]["left_out"]["cudnn"].startswith("RuntimeError")
    assert set(items["speed: latency"]["result"]["microseconds"]) == {
        "libra forward", "libra backward", "cudnn forward", "cudnn backward",
    }  # fmt: skip
    model = CostModel.load(tmp_path / "trial_cost_d128.json")
    assert model.page_seconds > 0 and (model.block, model.group, model.head_dim) == (16, 2, 128)
    assert "A trial on cpu" in report.read_text() and "Rung 5" not in report.read_text()


def damaged(kind: str):
    """A forward kernel with a fault."""
    whole, calls = gpu_check.tile_forward, []

    def run(q, k, v, tiles, out, lse, **how):
        result, lse = whole(q, k, v, tiles, out, lse, **how)
        calls.append(None)
        if kind == "wrong":
            return (result * 1.02).astype(result.dtype), lse
        if kind == "stray":
            return result.at[:].set(jnp.where(jnp.isnan(result), 0, result)), lse
        if kind == "log-sum-exp":
            return result, lse + 1e-3
        # Depends on the slot that a block lies in.
        slot = jnp.arange(result.shape[0], dtype=result.dtype)[:, None, None, None]
        return jnp.where(slot == 3, jnp.nextafter(result, jnp.inf * jnp.ones_like(result)), result), lse

    return run


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("wrong", "out: mean error .* plain JAX"),
        ("stray", "out: slots that no entry uses have changed"),
        ("log-sum-exp", "lse: error"),
        ("slot", "out in other slots: .* numbers differ"),
    ],
    ids=["wrong", "stray", "log-sum-exp", "slot"],
)
def test_a_faulty_kernel_is_noticed(kind: str, message: str, tiny: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpu_check.Case("small", 64, 64, 2, blocks=6)
    monkeypatch.setattr(gpu_check, "tile_forward", damaged(kind))
    gpu_check.run_tiles.clear_cache()
    try:
        with pytest.raises(gpu_check.WrongResult, match=message):
            gpu_check.check_kernels(case, tiny)
    finally:
        gpu_check.run_tiles.clear_cache()


@pytest.mark.parametrize("case", [gpu_check.CASES[4], gpu_check.CASES[9]], ids=lambda case: case.name)
def test_cases_are_right_with_the_plain_kernels(case: gpu_check.Case, tiny: Bench) -> None:
    """Values of another width, a window and a soft cap: the dry run calculates others."""
    assert 0 < gpu_check.check_kernels(case, tiny)["error"] <= 2


def test_the_cases_cover_what_the_kernels_take() -> None:
    covered = {(case.head_dim, case.v_head_dim) for case in gpu_check.CASES}
    assert covered >= {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)}
    assert {case.block for case in gpu_check.CASES} == {64, 128, 256}
    assert {case.dtype for case in gpu_check.CASES} == {"bfloat16", "float16"}
    assert {1, 16} <= {case.group for case in gpu_check.CASES}
    assert any(case.window and case.soft_cap for case in gpu_check.CASES)


def test_calls_of_cudnn_are_what_this_jax_takes(tiny: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and lowered for a GPU, with jax told that cuDNN is there: one document, and packed ones."""
    inner = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(inner, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(inner, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(inner, "is_cuda_compute_capability_equal", lambda capability: False)
    bench = Bench(dataclasses.replace(tiny.scale, library="cudnn"), False, tiny.json)
    for lengths, packed in (([512, 512], False), ([700, 24, 300], True)):
        attention = gpu_check.library_attention(bench, lengths, packed, 128)
        n, s = (1, 1024) if packed else (2, 512)
        q, k = (jax.ShapeDtypeStruct((n, s, heads, 128), jnp.bfloat16) for heads in (32, 8))

        def both(q, k, v, d_out, attention=attention):
            out, pull = jax.vjp(attention, q, k, v)
            return out, pull(d_out)

        with jax.numpy_dtype_promotion("standard"):
            text = jax.jit(both).trace(q, k, k, q).lower(lowering_platforms=("cuda",)).as_text()
        assert "@__cudnn$fmhaSoftmax(" in text and "@__cudnn$fmhaSoftmaxBackward(" in text
        assert ("PADDING_CAUSAL" in text) == packed


def test_measurements_are_interleaved_and_failures_left_out() -> None:
    order: list[str] = []

    def call(name: str):
        def run(n: int) -> None:
            if name == "broken":
                raise ValueError("no\nkernel")
            order.append(name)

        return run

    scale = dataclasses.replace(gpu_check.TINY, rounds=2, round_seconds=0.0)
    times, failed = gpu_check.interleaved({name: call(name) for name in ("libra", "broken", "other")}, scale)
    assert {name: len(seconds) for name, seconds in times.items()} == {"libra": 2, "other": 2}
    assert failed == {"broken": "ValueError: no kernel"}
    assert order[-4:] == ["libra", "other"] * 2
    with pytest.raises(RuntimeError, match="no kernel"):
        gpu_check.interleaved({"libra": call("broken")}, scale)


@pytest.mark.parametrize("corpus", gpu_check.CORPORA)
def test_documents_fill_the_sequence(corpus: str) -> None:
    lengths = gpu_check.sample_documents(corpus, 65_536)
    assert sum(lengths) == 65_536 and min(lengths) >= 1 and len(lengths) > 5
    assert gpu_check.sample_documents(corpus, 65_536) == lengths


# How it is run: items that only pretend to measure.


def pretend(log: list[str], name: str, error: BaseException | None = None, section: str = "speed") -> Item:
    def run() -> dict:
        log.append(name)
        if error is not None:
            raise error
        return {"value": np.float32(1.5)}

    return Item(section, name, run)


KEY = {"code": "1", "device": "cpu"}


def test_an_error_ends_nothing_and_what_failed_comes_last_the_next_time(tmp_path: Path, capsys, monkeypatch) -> None:
    path, log = tmp_path / "x.json", []
    todo = [pretend(log, "a"), pretend(log, "b", gpu_check.WrongResult("off by one", {"off": 1})), pretend(log, "c")]
    gpu_check.run_all(todo, Journal(path, KEY, False), 60)
    assert log == ["a", "b", "c"]
    assert read(path)["speed: b"]["reason"] == "WrongResult: off by one"
    assert read(path)["speed: b"]["result"] == {"off": 1} and read(path)["speed: a"]["result"] == {"value": 1.5}

    log.clear()
    todo = [pretend(log, "a"), pretend(log, "b"), pretend(log, "d", ValueError())]
    gpu_check.run_all(todo, Journal(path, KEY, False), 60)
    assert log == ["d", "b"] and "1 of 3 items are in" in capsys.readouterr().out
    assert read(path)["speed: b"]["status"] == "done" and "off" not in read(path)["speed: b"]["result"]

    log.clear()
    monkeypatch.setitem(gpu_check.SECTIONS, "speed", -1.0)  # its share is used up: what comes last may use the rest
    gpu_check.run_all([pretend(log, "d"), pretend(log, "e")], Journal(path, KEY, False), 60)
    assert log == ["d"] and read(path)["speed: e"]["status"] == "skipped"


def test_a_run_that_was_cut_off_is_on_disk_up_to_there(tmp_path: Path) -> None:
    path, log = tmp_path / "x.json", []
    todo = [pretend(log, "a"), pretend(log, "b", KeyboardInterrupt()), pretend(log, "c")]
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_all(todo, Journal(path, KEY, False), 60)
    assert {item["name"]: item["status"] for item in read(path).values()} == {"a": "done", "b": "started"}
    log.clear()
    gpu_check.run_all([pretend(log, name) for name in "abc"], Journal(path, KEY, False), 60)
    assert log == ["c", "b"]


def test_results_of_other_code_or_another_device_are_not_taken(tmp_path: Path, capsys) -> None:
    path, log = tmp_path / "x.json", []
    gpu_check.run_all([pretend(log, "a")], Journal(path, KEY, False), 60)
    for key, fresh in ((KEY | {"device": "gpu"}, False), (KEY | {"code": "2"}, False), (KEY | {"code": "2"}, True)):
        gpu_check.run_all([pretend(log, "a")], Journal(path, key, fresh), 60)
    assert log == ["a"] * 4
    printed = capsys.readouterr().out
    assert "is of another device: beginning anew" in printed and "is of another code, device" in printed


def test_what_the_time_does_not_suffice_for_is_listed_with_the_reason(tmp_path: Path) -> None:
    path, log = tmp_path / "x.json", []
    journal, todo = Journal(path, KEY, False), [pretend(log, "a"), pretend(log, "b", section="sweep")]
    gpu_check.run_all(todo, journal, -1.0)
    assert log == []
    *_, (title, _, rows) = gpu_check.tables_of([journal.of(item) for item in todo], False)
    assert title == "Not measured" and [row[:2] for row in rows] == [["speed: a", "skipped"], ["sweep: b", "skipped"]]
    assert "were used; speed is begun in the first" in rows[0][2]


def test_a_device_that_no_longer_answers_ends_the_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_check, "device_works", lambda: False)
    log: list[str] = []
    todo = [pretend(log, "a", RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")), pretend(log, "b")]
    gpu_check.run_all(todo, Journal(tmp_path / "x.json", KEY, False), 60)
    assert log == ["a"] and "Run the same command again" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """-S leaves the editable install out; jax and the rest are found by their folder."""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-S", str(ROOT / "benchmarks" / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout == (
        "This needs an NVIDIA GPU, and jax finds only cpu; --dry-run does everything but the launches.\n"
    )
    assert list(tmp_path.iterdir()) == []
