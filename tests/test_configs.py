"""Every file in configs/: what it says of itself, the published shapes, and that its state fits the mesh it names.

Parameters are counted, and bytes of a device summed up, from the shapes and shardings of the whole state, which is
built abstractly: nothing is allocated, and no mesh of 512 devices is needed.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.config_table import LEGEND, Options, device_bytes, main, state_of
from libra_jax import cli
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py"))
LENGTHS = ("32k", "128k", "256k", "1m")
ROOM_BYTES = 60 << 30  # of the 80 GB of an H100; the rest is for activations
FORMULA_ROOM_BYTES = 73 << 30
"""For what has a formula: an H100's 79.1 GiB, less 4 that XLA does not count and the 2 at least that the formulas left
out where the step was compiled. With more, XLA gets there, if at all, by computing results twice; with less it is for
`libra preflight` to judge."""
NODE = 8
COMPILED = ("qwen3_8b_256k", "qwen3_8b_1m", "qwen3_30b_a3b_256k", "qwen3_235b_a22b_256k")
"""Those with a report of `libra preflight`."""


@functools.cache
def loaded(name: str) -> TrainConfig:
    return cli.load_config(str(ROOT / "configs" / f"{name}.py"))


@functools.cache
def leaves(name: str) -> list[tuple[str, Any]]:
    """(name, shape with sharding) of all arrays of a run's state."""
    found = jax.tree.leaves_with_path(state_of(loaded(name)))
    return [(".".join(str(getattr(key, "key", key)) for key in path), leaf) for path, leaf in found]


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text())) or ""


def test_there_is_a_config_for_every_size_and_length() -> None:
    assert set(NAMES) == {
        "demo", "qwen3_0_6b_4k",
        *(f"qwen3_{size}_{length}" for size in ("8b", "30b_a3b", "235b_a22b") for length in LENGTHS),
    }  # fmt: skip


# By hand from the config.json files on Hugging Face (layers, width, MLP, query heads, key/value heads, experts, experts
# of a token; heads are 128 wide, 151,936 words). The model cards say 0.6B, 8.2B, 30.5B with 29.9B beside embeddings and
# 3.3B active, 235B with 22B active.
COUNTED = {
    "qwen3_0_6b": ((28, 1024, 3072, 16, 8, 1, 1), True, 596_049_920, 596_049_920),
    "qwen3_8b": ((36, 4096, 12_288, 32, 8, 1, 1), False, 8_190_735_360, 8_190_735_360),
    "qwen3_30b_a3b": ((48, 2048, 768, 32, 4, 128, 8), False, 30_532_122_624, 3_353_032_704),
    "qwen3_235b_a22b": ((94, 4096, 1536, 64, 4, 128, 8), False, 235_093_634_560, 22_190_763_520),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "demo"])
def test_models_have_the_published_shapes_and_numbers_of_parameters(name: str) -> None:
    shape, tied, parameters, active = COUNTED[name.rpartition("_")[0]]
    model = loaded(name).model
    assert (_shape(model), model.tied_embeddings) == (shape, tied)
    assert (model.vocab_size, model.head_dim, model.norm_epsilon, model.rope_theta) == (151_936, 128, 1e-6, 1e6)
    arrays = {path: leaf for path, leaf in leaves(name) if path.startswith("params.")}
    assert sum(math.prod(leaf.shape) for leaf in arrays.values()) == parameters == model.num_parameters
    idle = sum(
        math.prod(leaf.shape) // shape[5] * (shape[5] - shape[6])
        for path, leaf in arrays.items()
        if shape[5] > 1 and re.search(r"mlp\.(gate|up|down)$", path)
    )
    assert parameters - idle == active == model.active_parameters


def _shape(model: Qwen3Config) -> tuple[int, ...]:
    moe = model.moe
    inner = (model.intermediate_size, 1, 1) if moe is None else (
        moe.intermediate_size, moe.num_experts, moe.experts_per_token,
    )  # fmt: skip
    return model.num_layers, model.hidden_size, inner[0], model.num_heads, model.num_kv_heads, *inner[1:]


@pytest.mark.parametrize("name", NAMES)
def test_state_and_gradients_fit_with_room_and_nothing_large_is_kept_twice(name: str) -> None:
    config = loaded(name)
    axes = config.mesh.axes
    total = 0
    for path, leaf in leaves(name):
        entries = [(entry,) if isinstance(entry, str) else entry or () for entry in leaf.sharding.spec]
        used = [axis for entry in entries for axis in entry]
        copies = config.mesh.devices // math.prod(axes[axis] for axis in used)
        whole = leaf.size * leaf.dtype.itemsize
        assert whole * copies % config.mesh.devices == 0
        total += whole * copies // config.mesh.devices * (2 if path.startswith("params.") else 1)
        assert copies == 1 or whole < 1 << 20, f"{path} {leaf.shape} is there {copies} times: {leaf.sharding.spec}"
    assert total < ROOM_BYTES
    need = device_bytes(config)
    assert need.state + need.gradients == total
    assert need.total < FORMULA_ROOM_BYTES


@pytest.mark.parametrize("name", [name for name in NAMES if name != "demo"])
def test_meshes_divide_what_they_must(name: str) -> None:
    config = loaded(name)
    spec, mesh, ranks = config.spec, config.mesh, config.spec.ranks
    assert mesh.devices % NODE == 0 and config.seq_len % (mesh.cp * spec.block) == 0
    if ranks > NODE:  # a pool of several nodes, whole ones
        assert ranks % NODE == 0 and spec.ranks_per_node == NODE and spec.waves >= 3
    else:
        assert NODE % ranks == 0 and spec.ranks_per_node is None
    moe = config.model.moe
    if moe is not None and moe.experts == "spread":
        assert moe.num_experts % ranks == 0 and ranks <= NODE
    assert config.model.hidden_size % mesh.devices == 0


@pytest.mark.parametrize("name", NAMES)
def test_rotary_positions_follow_the_model_cards(name: str) -> None:
    """Up to 32,768 tokens as they are, beyond with YaRN, whose factor is tokens / 32,768: 4 at 131,072."""
    config = loaded(name)
    scaling = config.model.rope_scaling
    if config.seq_len <= 32_768:
        assert scaling is None
    else:
        assert scaling is not None and scaling.original_max_positions == 32_768
        assert scaling.factor == {131_072: 4, 262_144: 8, 1_048_576: 32}[config.seq_len]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "demo"])
def test_files_say_what_they_are(name: str) -> None:
    config, text = loaded(name), docstring(name)
    mesh, first = config.mesh, text.partition("\n")[0]
    title = {"0_6b": "Qwen3-0.6B", "8b": "Qwen3-8B", "30b_a3b": "Qwen3-30B-A3B", "235b_a22b": "Qwen3-235B-A22B"}
    assert first.startswith(f"{title[name[6:].rpartition('_')[0]]} on sequences of {config.seq_len:,} tokens: ")
    assert re.search(rf"tokens: {mesh.devices} (GPUs|devices), ", first) and len(first) < 120
    numbers = {"one": 1, "two": 2, "four": 4, "eight": 8}
    said = re.search(r", (\w+) pools? of (\d+) sequences, (\w+) ranks? to a sequence\.$", first)
    assert said is not None
    assert [numbers.get(word) or int(word) for word in said.groups()] == [mesh.pools, mesh.pool_size, mesh.cp]
    assert config.run_dir == f"runs/{name}" and config.data.paths == ("corpus",)
    assert f"`libra import WEIGHTS --config {name}`" in text
    if mesh.cpu_devices is None:
        assert f"`libra preflight {name} --target h100 --topology 1x{mesh.devices // NODE}x{NODE}`" in text


def test_help_lists_them_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in NAMES:
        assert re.search(rf"^  {name} +{re.escape(docstring(name).partition('\n')[0])}$", shown, re.M)


@pytest.mark.parametrize("name", [name for name in NAMES if re.search("b_a[23]", name)])
def test_what_they_advise_for_later_weights_is_understood(name: str) -> None:
    """The -2507 weights: base 1e7 (30B-A3B) and 5e6 (235B-A22B), 262,144 tokens without YaRN, of which
    factor 1 is none, and beyond by their own length."""
    advice = re.search(r"with them `(.+?)`", docstring(name).replace("\n", " "))
    assert advice is not None
    model = cli.override(loaded(name), advice[1].split(), prog="libra train").model
    assert model.rope_theta == (1e7 if "30b" in name else 5e6)
    scaling, tokens = model.rope_scaling, loaded(name).seq_len
    if scaling is None:
        assert tokens <= 32_768
    else:
        assert scaling.factor == max(tokens // 262_144, 1)
        assert scaling.original_max_positions == 262_144 or scaling.slowed(np.array([1.0, 1e-6]), 1e6)[1] == 1e-6


@pytest.mark.parametrize("name", COMPILED)
def test_the_table_agrees_with_what_xla_sets_aside(name: str) -> None:
    """Against the reports of the compiled steps: parameters to the byte, the optimizer's state but for scalars, what
    layers keep nearly."""
    need = device_bytes(loaded(name))
    said = json.loads((ROOT / "benchmarks" / "reports" / f"preflight_{name}.json").read_text())
    assert need.parameters == said["state_bytes"]["parameters"]
    assert abs(need.optimizer - said["state_bytes"]["optimizer"]) < 64
    assert need.kept == pytest.approx(said["memory"]["kept activations"], rel=0.01)
    assert need.attention == pytest.approx(said["attention_formula_bytes"]["backward"], rel=0.05)
    assert need.total < said["peak_bytes"] < need.total + (10 << 30)  # what the table leaves out


def test_the_report_is_the_table_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.py").write_text((ROOT / "configs" / "demo.py").read_text())
    main(Options(configs=tmp_path / "configs", report=tmp_path / "table.md"))
    shown, written = capsys.readouterr().out, (tmp_path / "table.md").read_text()
    assert LEGEND in shown and LEGEND in written
    for word in ("demo", "2 x 2 x 2", "191,104", "65,536"):
        assert word in shown and f"| {word} |" in written
    committed = (ROOT / "benchmarks" / "reports" / "configs.md").read_text()
    for name in NAMES:
        assert f"| {name} | {loaded(name).mesh.devices} |" in committed
