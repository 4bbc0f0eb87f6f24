"""Hugging Face folders read: every number in its place, for any sharding, and the logits that the model gives.

Logits are compared with Qwen3 in float64 NumPy that computes on the checkpoint's tensors as they are.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hugging_face_base import (
    MESH,
    MOE,
    Tensors,
    assert_equal,
    expected_params,
    params_of,
    published,
    random_sharding,
    shapes_like,
    tensors_of,
    write_folder,
)
from test_model import batch_of, run
from train_base import TINY, tiny_spec

from libra_jax.models.hugging_face import config_from_hugging_face
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.qwen3 import Qwen3, Qwen3Config


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_number_of_a_dense_model_is_read_into_its_place(tmp_path: Path, tied: bool, dtype: Any) -> None:
    model = dataclasses.replace(TINY, tied_embeddings=tied)
    tensors = tensors_of(model, dtype=dtype)
    folder = write_folder(tmp_path / "hf", tensors, files=1 if tied else 3)
    shapes = params_of(model)
    params = read_weights(folder, shapes)
    assert_equal(params, expected_params(tensors, model))
    assert all(p.sharding == s.sharding for p, s in zip(*map(jax.tree.leaves, (params, shapes)), strict=True))


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_every_number_of_a_mixture_of_experts_is_read_into_its_place(tmp_path: Path, fused: bool) -> None:
    tensors = expected_params(tensors_of(MOE), MOE)
    folder = write_folder(tmp_path / "hf", tensors_of(MOE, fused=fused))
    rng = np.random.default_rng(0)
    for _ in range(3):
        assert_equal(read_weights(folder, shapes_like(tensors, random_sharding(rng))), tensors)


def test_arrays_may_lie_in_any_way(tmp_path: Path) -> None:
    """Cut between heads and inside them, over one axis of the mesh, several or none."""
    tensors = tensors_of(TINY)
    folder, want = write_folder(tmp_path / "hf", tensors), expected_params(tensors, TINY)
    rng = np.random.default_rng(1)
    for _ in range(5):
        assert_equal(read_weights(folder, shapes_like(want, random_sharding(rng))), want)


@pytest.mark.parametrize("model", [TINY, MOE], ids=["dense", "moe"])
def test_logits_equal_those_of_the_tensors_in_float64(tmp_path: Path, model: Qwen3Config) -> None:
    tensors = tensors_of(model)
    folder = write_folder(tmp_path / "hf", tensors_of(model, fused=True), published(model))
    model = dataclasses.replace(config_from_hugging_face(folder), compute_dtype="float32")
    spec = tiny_spec()
    graph, _ = nnx.split(nnx.eval_shape(lambda: Qwen3(model, spec, MESH, rngs=nnx.Rngs(0))))
    batch = batch_of(spec)
    logits = run(graph, read_weights(folder, params_of(model)), batch)
    start = 0
    for length in [1, 20, 3, 9, 1, 5]:  # documents of the second sequence
        part = slice(start, start + length)
        expected = reference_logits(tensors, batch.tokens[0, 1, part], model)
        np.testing.assert_allclose(logits[1, part], expected, rtol=0, atol=3e-5 * np.abs(expected).max())
        start += length


def reference_mlp(w: Tensors, at: str, x: np.ndarray, model: Qwen3Config) -> np.ndarray:
    """SwiGLU; or the k experts with the greatest chances, each by its share of their sum."""

    def swiglu(x: np.ndarray, at: str) -> np.ndarray:
        gate = x @ w[at + "gate_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * (x @ w[at + "up_proj.weight"].T)) @ w[at + "down_proj.weight"].T

    if model.moe is None:
        return swiglu(x, at)
    chances = np.exp(x @ w[at + "gate.weight"].T)
    y = np.zeros(x.shape)
    for row, chance in enumerate(chances):
        chosen = np.argsort(-chance)[: model.moe.experts_per_token]
        for e in chosen:
            y[row] += chance[e] / chance[chosen].sum() * swiglu(x[row], f"{at}experts.{e}.")
    return y


def reference_logits(tensors: Tensors, tokens: np.ndarray, model: Qwen3Config) -> np.ndarray:
    """One document through Qwen3, float64, on the tensors of a checkpoint: y = x W^T throughout."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    rows, half = len(tokens), model.head_dim // 2
    angle = np.arange(rows)[:, None] * model.rope_theta ** (-2 * np.arange(half) / model.head_dim)
    cos, sin = (np.tile(f(angle), 2)[:, None] for f in (np.cos, np.sin))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return w[f"{name}.weight"] * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + model.norm_epsilon)

    def rotate(x: np.ndarray) -> np.ndarray:
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(model.num_layers):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm")
        q, k, v = ((y @ w[f"{at}self_attn.{p}_proj.weight"].T).reshape(rows, -1, model.head_dim) for p in "qkv")
        q, k = rotate(norm(q, at + "self_attn.q_norm")), rotate(norm(k, at + "self_attn.k_norm"))
        heads = []
        for head in range(model.num_heads):
            group = head // (model.num_heads // model.num_kv_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(model.head_dim)
            scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
            share = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(share / share.sum(-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(heads, -1) @ w[at + "self_attn.o_proj.weight"].T
        x = x + reference_mlp(w, at + "mlp.", norm(x, at + "post_attention_layernorm"), model)
    return norm(x, "model.norm") @ w["lm_head.weight"].T
