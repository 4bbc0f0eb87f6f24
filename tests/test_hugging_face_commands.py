"""`libra import` and `libra export`: a folder becomes checkpoint 0, and any checkpoint a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_base import (
    MOE,
    config_of,
    expected_params,
    params_of,
    published,
    read_folder,
    same_bytes,
    tensors_of,
    write_folder,
)
from rich.console import Console
from train_base import TINY

from libra_jax.train.checkpoint import Checkpoints, whole_steps
from libra_jax.train.config import AttentionConfig, CheckpointConfig, TrainConfig, fixed_values
from libra_jax.train.loop import RunFolder
from libra_jax.train.weights_command import ExportOptions, export_weights, import_weights


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_folder_becomes_step_0_and_a_folder_again(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    source = write_folder(tmp_path / "hf", tensors, published(TINY) | {"rope_theta": 1e6})
    config, console = config_of(TINY, run_dir=str(tmp_path / "run")), quiet()
    import_weights(source, config, console)
    assert "step 0" in said(console)
    assert "rope_theta is 1000000.0 in" in said(console) and "the run takes the config's, 10000.0" in said(console)
    with pytest.raises(ValueError, match=r"has a checkpoint of step 0 already"):
        import_weights(source, config, console)

    longer = config_of(dataclasses.replace(TINY, rope_theta=5e6, remat="full"), seq_len=65_536)
    export_weights(tmp_path / "run", ExportOptions(tmp_path / "out"), longer, console)
    assert same_bytes(read_folder(tmp_path / "out")[0], tensors)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["rope_theta"] == 5e6 and written["max_position_embeddings"] == 65_536
    assert written["eos_token_id"] == 2
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()

    wider = dataclasses.replace(TINY, intermediate_size=64, norm_epsilon=1e-5)
    with pytest.raises(ValueError, match=r"(?s)intermediate_size.*48 there, 64 now.*norm_epsilon"):
        export_weights(tmp_path / "run", ExportOptions(tmp_path / "wider"), config_of(wider), console)


def test_a_folder_of_another_model_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", tensors_of(TINY), published(TINY))
    other = dataclasses.replace(MOE, num_layers=4, tied_embeddings=True)
    with pytest.raises(ValueError) as refusal:
        import_weights(source, config_of(other, run_dir=str(tmp_path / "run")), quiet())
    assert str(refusal.value).splitlines()[1:] == [
        "  intermediate_size: 48 there, nothing in the config",
        "  num_layers: 2 there, 4 in the config",
        "  tied_embeddings: False there, True in the config",
        "  moe.num_experts: nothing there, 4 in the config",
        "  moe.experts_per_token: nothing there, 2 in the config",
        "  moe.intermediate_size: nothing there, 16 in the config",
    ]
    assert not (tmp_path / "run").exists()


def less(folder: Path) -> None:
    """A truncated shard."""
    path = folder / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def gone(folder: Path) -> None:
    """A file that the index names, and that is not there."""
    (folder / "model-00002-of-00003.safetensors").unlink()


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        ({NORM: None}, None, "model.norm.weight is missing"),
        ({"visual.patch": np.zeros(3, np.float32)}, None, "visual.patch is there, and the model has none"),
        ({NORM: np.ones(31, np.float32)}, None, "model.norm.weight has shape (31,), and the model (32,)"),
        ({NORM: np.ones(32, np.int8)}, None, "model.norm.weight is I8, and must be BF16, F16, F32"),
        ({}, less, "model-00003-of-00003.safetensors has "),
        ({}, gone, "model-00002-of-00003.safetensors is not there, and model.safetensors.index.json names it"),
    ],
    ids=["missing", "extra", "shape", "dtype", "truncated", "absent"],
)  # fmt: skip
def test_a_folder_that_does_not_hold_the_model_leaves_no_step_0(
    tmp_path: Path, changes: dict[str, Any], damage: Callable[[Path], None] | None, message: str
) -> None:
    tensors = {name: tensor for name, tensor in (tensors_of(TINY) | changes).items() if tensor is not None}
    source = write_folder(tmp_path / "hf", tensors, published(TINY))
    if damage is not None:
        damage(source)
    with pytest.raises(ValueError) as refusal:
        import_weights(source, config_of(TINY, run_dir=str(tmp_path / "run")), quiet())
    assert str(source) in str(refusal.value) and message in str(refusal.value)
    assert not (tmp_path / "run").exists()


@contextlib.contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """A disk that takes no larger file: writing one fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_leaves_no_step_0_and_the_next_try_makes_it(tmp_path: Path) -> None:
    """config.json has 642 bytes here, the tokenizer 22, and some file of the checkpoint more than 6,000."""
    source = write_folder(tmp_path / "hf", tensors_of(TINY), published(TINY))
    folder = RunFolder(tmp_path / "run")
    beside, config = folder.path / "hugging_face", config_of(TINY, run_dir=str(tmp_path / "run"))
    with files_up_to(100), pytest.raises(OSError, match="hugging_face could not be written: File too large; step 0"):
        import_weights(source, config, quiet())
    assert not folder.path.exists()

    with files_up_to(6000), pytest.raises(OSError, match=r"step 0 could not be saved in .*: .*File too large"):
        import_weights(source, config, quiet())
    assert sorted(path.name for path in beside.iterdir()) == ["config.json", "tokenizer.json"]
    assert whole_steps(folder.checkpoints) == [] and not (folder.checkpoints / "0").exists()

    import_weights(source, config, quiet())
    assert whole_steps(folder.checkpoints) == [0] and [path.name for path in folder.checkpoints.iterdir()] == ["0"]
    export_weights(folder.path, ExportOptions(tmp_path / "out"), config, quiet())
    assert same_bytes(read_folder(tmp_path / "out")[0], tensors_of(TINY))


def test_any_checkpoint_of_a_run_is_exported_without_its_optimizer(tmp_path: Path) -> None:
    config, folder = config_of(TINY, run_dir=str(tmp_path / "run")), RunFolder(tmp_path / "run")
    saved = {step: expected_params(tensors_of(TINY, seed=step), TINY) for step in (2, 10)}
    with Checkpoints(folder.checkpoints, CheckpointConfig(every=1)) as checkpoints:
        for step, params in saved.items():
            placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), params, params_of(TINY))
            state = {"params": placed, "optimizer": [placed, placed], "step": jnp.int32(step)}
            data = iter(grain.MapDataset.range(9).to_iter_dataset())
            assert checkpoints.save(step, state, data, {"config": fixed_values(config), "data": {}}, last=True)
    console = quiet()
    export_weights(tmp_path / "run", ExportOptions(tmp_path / "newest"), config, console)
    export_weights(tmp_path / "run", ExportOptions(tmp_path / "older", step=2, dtype="float32"), config, console)
    assert "step 10 of" in said(console) and "step 2 of" in said(console)
    assert same_bytes(read_folder(tmp_path / "newest")[0], tensors_of(TINY, seed=10))
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors_of(TINY, seed=2).items()}
    assert same_bytes(read_folder(tmp_path / "older")[0], wide)

    def refused(message: str, config: TrainConfig = config, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            run_dir = options.pop("run_dir", tmp_path / "run")
            export_weights(run_dir, ExportOptions(**{"out": tmp_path / "x", **options}), config, console)

    refused("has no checkpoint of step 3; there are: 2, 10", step=3)
    refused("has no whole checkpoint", run_dir=tmp_path / "nothing")
    refused("is there already", out=tmp_path / "older")
    refused("rope_theta: 10000.0 there, 5.0 now", config_of(dataclasses.replace(TINY, rope_theta=5.0)))
    refused("attention.window is 16", config_of(TINY, attention=AttentionConfig(block=8, window=16)))
    assert not (tmp_path / "x").exists()
