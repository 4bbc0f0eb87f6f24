"""Hugging Face folders that do not hold the model: all that differs, in one message."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hugging_face_base import (
    INDEX,
    MOE,
    assert_equal,
    expected_params,
    params_like,
    tensors_of,
    write_folder,
)
from safetensors import safe_open
from safetensors.numpy import save_file
from train_base import TINY

from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.qwen3 import Qwen3Config

Q0 = "model.layers.0.self_attn.q_proj.weight"


def refusal_of(folder: Path, model: Qwen3Config = TINY) -> list[str]:
    """Lines of the message, the first left out, which names the folder."""
    with pytest.raises(ValueError) as refusal:
        read_weights(folder, params_like(model))
    first, *lines = str(refusal.value).splitlines()
    assert str(folder) in first
    return [line.strip() for line in lines] or [first]


def test_all_differences_are_in_one_message(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.input_layernorm.weight"] = tensors["model.layers.1.input_layernorm.weight"]
    tensors["visual.patch_embed"] = np.zeros((3, 2), ml_dtypes.bfloat16)
    tensors[Q0] = tensors[Q0].T[:, :24].copy()
    tensors["lm_head.weight"] = np.zeros((64, 32), np.int8)
    tensors["model.layers.1.self_attn.k_norm.weight"] = np.ones(8, ml_dtypes.float8_e4m3fn)
    assert sorted(refusal_of(write_folder(tmp_path / "hf", tensors))) == [
        "lm_head.weight is I8, and must be BF16, F16, F32",
        "model.layers.0.self_attn.q_proj.weight has shape (32, 24), and the model (32, 32)",
        "model.layers.1.self_attn.k_norm.weight is F8_E4M3, and must be BF16, F16, F32",
        "model.layers.2.input_layernorm.weight is there, and the model has none",
        "model.layers.{0-1}.mlp.up_proj.weight is missing",
        "model.norm.weight is missing",
        "visual.patch_embed is there, and the model has none",
    ]


def test_what_many_experts_lack_is_one_line(tmp_path: Path) -> None:
    """A dense checkpoint for a mixture of experts; then one that lacks some experts."""
    lines = refusal_of(write_folder(tmp_path / "dense", tensors_of(TINY)), MOE)
    assert "model.layers.{0-1}.mlp.experts.{0-3}.up_proj.weight is missing" in lines
    assert "model.layers.{0-1}.mlp.up_proj.weight is there, and the model has none" in lines
    assert len(lines) == 7  # three of the MLP; router and experts' three
    tensors = tensors_of(MOE)
    for layer, expert in ((0, 0), (0, 1), (0, 3), (1, 2)):
        del tensors[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"]
    assert refusal_of(write_folder(tmp_path / "moe", tensors), MOE) == [
        "model.layers.0.mlp.experts.{0-1,3}.up_proj.weight is missing",
        "model.layers.1.mlp.experts.2.up_proj.weight is missing",
    ]


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", tensors_of(TINY))
    path = folder / "model-00002-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert refusal_of(folder) == [f"{path.name} has {len(whole) - 100:,} bytes, and its header says {len(whole):,}"]
    header = int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[: header // 2])
    assert refusal_of(folder) == [
        f"{path.name} has {header // 2:,} bytes, and its header alone must have {header + 8:,}"
    ]
    path.write_bytes(whole[:8] + b"x" * header + whole[8 + header :])
    assert "has no header of safetensors" in refusal_of(folder)[0]
    path.write_bytes(b"")
    assert refusal_of(folder) == [f"{path.name} has 0 bytes, and its header alone must have 8"]
    single = write_folder(tmp_path / "single", tensors_of(TINY), files=1) / "model.safetensors"
    single.write_bytes(single.read_bytes()[:-2])
    assert "and its header says" in refusal_of(single.parent)[0]
    single.write_bytes(b"1234")
    assert "model.safetensors has 4 bytes" in refusal_of(single.parent)[0]


def test_tensors_whose_bytes_are_not_those_of_their_shape_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", tensors_of(TINY), files=1)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[64,32]', b'"shape":[64,31]', 1))
    assert "model.safetensors: lm_head.weight has 4,096 bytes, and BF16 of shape (64, 31) takes 3,968" in refusal_of(
        folder
    )


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", tensors_of(TINY))
    index = json.loads((folder / INDEX).read_text())
    where = index["weight_map"]
    first, second, third = sorted(set(where.values()))
    moved = next(name for name, file in where.items() if file == first)

    (folder / INDEX).write_text(json.dumps(index | {"weight_map": where | {moved: second}}))
    assert refusal_of(folder) == [f"{moved} is not in {second}, and {INDEX} says so"]

    (folder / INDEX).write_text(json.dumps({"weight_map": {n: f for n, f in where.items() if n != moved}}))
    assert refusal_of(folder) == [f"{moved} is in {first}, and {INDEX} does not say so"]

    (folder / INDEX).write_text(json.dumps(index))
    with safe_open(str(folder / first), "np") as file:
        twice = file.get_tensor(moved)
    with safe_open(str(folder / second), "np") as file:
        others = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    save_file(others | {moved: twice}, folder / second)
    assert refusal_of(folder) == [f"{moved} is there twice, in {first} and in {second}"]

    save_file(others, folder / second)
    (folder / third).unlink()
    assert refusal_of(folder) == [f"{third} is not there, and {INDEX} names it"]

    (folder / INDEX).write_text(json.dumps(index).replace('"weight_map": {', f'"weight_map": {{"{moved}": "x", ', 1))
    assert f"{moved} is there twice" in refusal_of(folder)[0]
    (folder / INDEX).write_text("{}")
    assert "must be JSON with a weight_map" in refusal_of(folder)[0]


def test_a_folder_must_have_weights_and_have_them_once(tmp_path: Path) -> None:
    assert "and has neither" in refusal_of(tmp_path)[0]
    write_folder(tmp_path, tensors_of(TINY))
    write_folder(tmp_path, tensors_of(TINY), files=1)
    assert "and has both" in refusal_of(tmp_path)[0]


def test_a_head_beside_tied_embeddings_must_be_the_same(tmp_path: Path) -> None:
    tied = dataclasses.replace(TINY, tied_embeddings=True)
    tensors = tensors_of(tied)
    table = tensors["model.embed_tokens.weight"]
    shapes = params_like(tied)
    folder = write_folder(tmp_path / "same", tensors | {"lm_head.weight": table.copy()})
    assert_equal(read_weights(folder, shapes), expected_params(tensors, tied))
    other = table.copy()
    other[63, 31] += 1
    for head in (other, table[:, :16].copy()):
        folder = write_folder(tmp_path / "differs", tensors | {"lm_head.weight": head})
        assert refusal_of(folder, tied) == [
            "lm_head.weight differs from model.embed_tokens.weight, and the model has one table for both "
            "(tied_embeddings)"
        ]
