"""`libra preflight`: one small step compiled for eight H100, what is read from it, and every way to ask wrongly."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from libra_jax import cli
from libra_jax.data import DataConfig
from libra_jax.hlo import read_program
from libra_jax.models.qwen3 import QWEN3_8B, Qwen3Config
from libra_jax.preflight import command, kernels, program
from libra_jax.preflight.memory import PARTS, read_memory
from libra_jax.preflight.report import RESERVED_BYTES, Report, as_json, as_markdown, print_report, report_of, verdict
from libra_jax.targets import TARGETS
from libra_jax.train.config import AttentionConfig, MeshConfig, TrainConfig

ROOT = Path(__file__).parents[1]
CONTRACT = {
    "fits", "peak_bytes", "device_bytes", "exchanges", "overlapped", "exposed", "max_group_size", "kernels",
    "compile_seconds",
}  # fmt: skip
FILE = '''"""A small model on eight GPUs."""
import sys
sys.path.insert(0, {tests!r})
from test_preflight import small as config
'''


def small() -> TrainConfig:
    """Two pools of two sequences over two ranks each; three layers, so that no other axis is as long."""
    return TrainConfig(
        model=Qwen3Config(512, 256, 512, 3, 4, 2, 128),
        data=DataConfig(paths=("nowhere",)),
        mesh=MeshConfig(2, 2, 2),
        attention=AttentionConfig(block=128),
        seq_len=1024,
        micro_steps=2,
    )


@pytest.fixture(scope="module")
def step() -> program.CompiledStep:
    return program.compile_for(small(), "h100", (1, 2, 4))


@pytest.fixture(scope="module")
def report(step: program.CompiledStep) -> Report:
    return report_of(step, small(), "h100", (1, 2, 4), "small")


def test_json_keeps_its_contract(report: Report) -> None:
    said = as_json(report)
    assert said.keys() >= CONTRACT
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said["fits"] is True and said["device_bytes"] == TARGETS["h100"].memory_bytes
    assert said["exchanges"] == said["overlapped"] + len(said["exposed"]) == len(said["schedule"])
    assert said["exposed"] == [e for e in said["schedule"] if e["exposed"]] and said["compile_seconds"] > 0
    assert (said["devices"], said["topology"], said["step_tokens"]) == (8, "1x2x4", 2 * 4 * 1024)


def test_the_parts_add_up_and_the_state_is_what_its_shapes_say(report: Report) -> None:
    assert report.parts.keys() == PARTS.keys() and min(report.parts.values()) >= 0
    assert sum(report.parts.values()) == report.peak_bytes
    # By hand: all matrices and the tables over 8 ranks, Adam twice, its counters and the step once.
    parameters = small().model.num_parameters
    assert report.state_bytes["parameters"] == pytest.approx(4 * parameters / 8, rel=0.01)
    assert report.parts["parameters"] == report.state_bytes["parameters"]
    assert report.parts["optimizer"] == report.state_bytes["optimizer"] == pytest.approx(parameters, rel=0.01)
    batch = 2 * 3 * 512 * 4  # micro-steps, arrays, tokens of a rank, int32; the rest are tables
    assert batch < report.parts["batch and plans"] < 10 * batch
    # Three layers keep input and output of attention (bfloat16), and two float32 a row and head.
    rows = 3 * 512
    assert report.parts["kept activations"] >= rows * (256 + 4 * 128) * 2
    assert report.parts["working memory"] > 0
    # What lives of the operator at the peak is no more than the formula's fullest moment, and some of it.
    formula = as_json(report)["attention_formula_bytes"]
    assert 0 < report.parts["attention"] <= 1.05 * max(formula["forward"], formula["backward"])


def test_a_longer_sequence_is_seen_where_it_costs(report: Report, step: program.CompiledStep) -> None:
    memory = read_memory(step, read_program(step.hlo), 3)
    assert memory.parts == report.parts and memory.peak_bytes >= step.memory.temp_size_in_bytes
    by_part = {part: sum(b.bytes for b in memory.buffers if b.part == part) for part in PARTS}
    assert all(by_part[part] == n for part, n in report.parts.items() if part != "gaps")
    kept = {b.type for b in memory.buffers if b.part == "kept activations"}
    assert kept and all(re.match(r"\w+\[3,", kind) for kind in kept)


def test_exchanges_of_the_operator_stay_inside_the_pool_and_weights_do_not(report: Report) -> None:
    said = as_json(report)
    assert (said["max_group_size"], said["pool_ranks"], said["inside_pools"]) == (4, 4, True)
    assert said["program_max_group_size"] == 8
    assert 0 < said["operator_overlapped"] <= said["operator_exchanges"] < said["exchanges"]
    operator = [e for e in said["schedule"] if e["purpose"] in ("dispatch", "return", "dispatch+return", "exchange")]
    assert {e["times"] for e in operator} == {2 * 3}, "two micro-steps, three layers"
    purposes = {e["purpose"] for e in said["schedule"]}
    assert {"weights", "gradients"} <= purposes
    scattered = [e for e in said["schedule"] if e["kind"] == "reduce-scatter" and e["times"] == 6]
    assert scattered, "gradients of the layers are scattered in the loop, not summed whole on every rank"
    assert not [e for e in said["schedule"] if e["kind"] == "all-reduce" and e["bytes"] > 4096]


def test_kernels_are_read_as_a_gpu_would_assemble_them(report: Report) -> None:
    assert {k.name for k in report.kernels} == {"libra_forward", "libra_dq", "libra_dkv"}
    for kernel in report.kernels:
        assert 32 < kernel.registers <= 255 and kernel.spill_bytes == 0 and kernel.arch == "sm_90a"
        assert 0 < kernel.shared_bytes <= TARGETS["h100"].shared_bytes_per_block and kernel.calls >= 2


def test_table_and_page_say_the_same(report: Report) -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    print_report(report, console)
    table, page = console.export_text(), as_markdown(report, "libra preflight small", "Written today.")
    for text in (table, page):
        assert "It fits: " in text and "every group lies inside a pool" in text
        assert "libra_dkv" in text and "kept activations" in text and "nan" not in text.lower()
    assert page.startswith("# Preflight: small on 8 H100\n\n`libra preflight small`\n")
    exposed = sum(exchange.exposed for exchange in report.exchanges)
    assert page.count("EXPOSED") == table.count("EXPOSED") == exposed


def test_what_does_not_fit_is_said_with_both_numbers_and_by_the_exit_status(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge = TARGETS["h100"].memory_bytes - RESERVED_BYTES
    assert dataclasses.replace(report, peak_bytes=edge).fits
    large = dataclasses.replace(report, peak_bytes=edge + 3 * 2**30)
    assert verdict(large) == (
        "It does not fit: 78.1 GiB at the peak and 4.0 GiB set aside for what XLA does not count are 3.0 GiB more than "
        "the 79.1 GiB of one NVIDIA H100 80GB HBM3."
    )
    for result, status in ((report, 0), (large, 1)):
        monkeypatch.setattr(command, "preflight", lambda *_, result=result: result)
        options = command.PreflightOptions(target="h100", topology="1x2x4", json=True)
        assert command.run(options, small(), "small", "") == status
        said = capsys.readouterr()
        assert json.loads(said.out)["fits"] is (status == 0)
        assert ("It does not fit: 78.1 GiB" in said.err) is (status == 1)


def test_every_pool_size_is_checked_and_named(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Pools of 1, 2 and 4 sequences on the same eight GPUs; the largest does not fit, whatever the others do."""
    config = dataclasses.replace(small(), mesh=MeshConfig(2, 2, 2, pool_sizes=(4, 1)))
    full = TARGETS["h100"].memory_bytes

    def compiled(config: TrainConfig, *_: object) -> Report:
        assert config.mesh.sizes == (config.mesh.pool_size,) and config.mesh.devices == 8
        peak = full if config.mesh.pool_size == 4 else report.peak_bytes
        return dataclasses.replace(report, config=config, peak_bytes=peak)

    monkeypatch.setattr(command, "preflight", compiled)
    options = command.PreflightOptions(target="h100", topology="1x2x4", report=tmp_path / "out", json=True)
    assert command.run(options, config, "small", "libra preflight small") == 1
    said = capsys.readouterr()
    assert re.fullmatch(r"libra: Pool size 4: It does not fit: .*\n", said.err)
    json_said = json.loads(said.out)
    assert json_said == json.loads((tmp_path / "out.json").read_text()) and json_said.keys() >= CONTRACT
    assert json_said["fits"] is False and json_said["peak_bytes"] == full and json_said["pool_size"] == 4
    fits = {
        size: (keys["fits"], keys["pool_size"], keys["pool_ranks"]) for size, keys in json_said["pool_sizes"].items()
    }
    assert fits == {"1": (True, 1, 2), "2": (True, 2, 4), "4": (False, 4, 8)}
    page = (tmp_path / "out.md").read_text()
    assert page.startswith("# Preflight: small on 8 H100, every pool size\n\n- Pool size 1: It fits: ")
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## Pool size {n}" for n in (1, 2, 4)]
    assert page.count("### Memory at the peak") == 3 and "- Pool size 4: It does not fit: " in page

    assert command.run(dataclasses.replace(options, json=False, report=None), config, "small", "") == 1
    table = capsys.readouterr().out
    assert table.index("2 pools x 2 sequences") < table.index("1 pools x 4 sequences") < table.index("Pool size 1: It")


def test_the_command_as_a_user_runs_it(tmp_path: Path, report: Report) -> None:
    """In a process of its own, which has no JAX_PLATFORMS; the report's folder is given."""
    (tmp_path / "small.py").write_text(FILE.format(tests=str(Path(__file__).parent)))
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    paths = [str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    arguments = ["small.py", "--target", "h100", "--topology=1x2x4", "--json", "--report", "out", "--micro-steps", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "libra_jax.cli", "preflight", *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == json.loads((tmp_path / "out.json").read_text()) and said["config"] == "small"
    assert said["step_tokens"] == 4 * 1024 and said["kernels"] == as_json(report)["kernels"]
    assert said["pool_size"] == 2 and "pool_sizes" not in said
    assert "preflight small.py --target h100" in (tmp_path / "out.md").read_text()


# Asked wrongly.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere --target h100 --topology 1x1x8", "there is no config 'nowhere'"),
        ("{config} --target v100 --topology 1x1x8", "no target 'v100': --target must be one of h100, h200, b200"),
        ("{config} --target h100 --topology 8", r"topology \('8'\) must be SLICESxHOSTSxGPUS"),
        ("{config} --target h100 --topology 1x0x8", r"topology \('1x0x8'\) must be SLICESxHOSTSxGPUS"),
        ("{config} --target h100 --topology 1xx8", "must be SLICESxHOSTSxGPUS"),
        (
            "{config} --target h100 --topology 1x2x8",
            r"topology 1x2x8 has 16 GPUs, .* = 2 \* 2 \* 2 = 8: name a topology of 8 GPUs, or set --mesh.pools",
        ),
        ("{config} --target h100", r"--topology is missing: .* --topology 1x8x8"),
        ("{config} --topology 1x1x8", r"--target is missing: .* --target h100"),
        ("{config} --target --topology 1x1x8", "--target needs a value"),
        ("{config} --target h100 --topology 1x1x8 --report no/where", "there is no folder no for the report"),
        ("--target h100 {config}", "the config comes first"),
    ],
)
def test_wrong_questions_are_answered_in_a_sentence(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(FILE.format(tests=str(Path(__file__).parent)))
    assert cli.main(["preflight", *arguments.format(config="small.py").split()]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err) and said.err.startswith("libra: ") and said.err.count("\n") == 1
    assert said.out == ""


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = program.importlib.util.find_spec

    def without(*missing: str):
        return lambda name, *rest: None if name in missing else found(name, *rest)

    for missing in ("triton", "jax_triton", "jax_plugins.xla_cuda13"):
        monkeypatch.setattr("importlib.util.find_spec", without(missing))
        with pytest.raises(RuntimeError, match=rf"{missing}.* missing.*pip install 'libra-jax\[preflight\]'"):
            program.compile_for(small(), "h100", (1, 1, 8))
    monkeypatch.setattr("importlib.util.find_spec", without("nvidia"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"ptxas.* missing: pip install 'libra-jax\[preflight\]'"):
        kernels.find_ptxas()


def test_reports_of_xla_that_cannot_be_read_are_refused(step: program.CompiledStep) -> None:
    text = read_program(step.hlo)
    for field in ("buffers", "live_ranges"):
        with pytest.raises(ValueError, match="lists no"):
            read_memory(dataclasses.replace(step, **{field: "something else"}), text, 3)


# The configs of the published model.


def test_qwen3_8b_is_as_published() -> None:
    assert QWEN3_8B.num_parameters == 8_190_735_360
    assert (QWEN3_8B.hidden_size, QWEN3_8B.intermediate_size, QWEN3_8B.num_layers) == (4096, 12288, 36)
    assert (QWEN3_8B.num_heads, QWEN3_8B.num_kv_heads, QWEN3_8B.head_dim) == (32, 8, 128)
    assert (QWEN3_8B.vocab_size, QWEN3_8B.rope_theta, QWEN3_8B.tied_embeddings) == (151_936, 1e6, False)


@pytest.mark.parametrize(("name", "tokens", "shape"), [("256k", 2**18, (1, 8, 8)), ("1m", 2**20, (1, 8, 16))])
def test_the_configs_of_qwen3_8b_and_their_reports_agree(name: str, tokens: int, shape: tuple[int, ...]) -> None:
    config = cli.load_config(str(ROOT / "configs" / f"qwen3_8b_{name}.py"))
    assert dataclasses.replace(config.model, rope_scaling=None) == QWEN3_8B and config.seq_len == tokens
    assert (config.mesh.pools, config.mesh.pool_size, config.mesh.cp) == shape
    said = json.loads((ROOT / "benchmarks" / "reports" / f"preflight_qwen3_8b_{name}.json").read_text())
    assert said.keys() >= CONTRACT and said["devices"] == math.prod(shape) and said["pool_ranks"] == math.prod(shape)
    assert said["step_tokens"] == config.step_tokens and sum(said["memory"].values()) == said["peak_bytes"]
    assert said["compile_seconds"] < 120
    sizes = {part: sum(b["bytes"] for b in said["largest_buffers"] if b["part"] == part) for part in PARTS}
    assert all(sizes[part] <= n for part, n in said["memory"].items())
