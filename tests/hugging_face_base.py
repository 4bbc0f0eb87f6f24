"""Checkpoints as Hugging Face has them, written by safetensors tensor by tensor, and what must come of each number.

Names and shapes are spelt out here, not taken from libra. Programs that tests start in processes of their own import
this file too (`with_tests`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file
from train_base import TINY

from libra_jax.data import DataConfig
from libra_jax.models.moe import MoEConfig
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.train.config import AttentionConfig, MeshConfig, TrainConfig
from libra_jax.train.mesh import make_mesh
from libra_jax.train.step import plan_state

Tensors = dict[str, np.ndarray]
MOE = dataclasses.replace(TINY, moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16))
MESH = make_mesh(MeshConfig(2, 2, 2))
INDEX = "model.safetensors.index.json"
LARGER = dataclasses.replace(TINY, hidden_size=512, intermediate_size=1536, num_layers=24, vocab_size=512)
"""Large enough to see how much memory a host takes."""


def config_of(model: Qwen3Config, **changes: Any) -> TrainConfig:
    fields = {"data": DataConfig(paths=("text",)), "mesh": MeshConfig(2, 2, 2), "attention": AttentionConfig(block=8)}
    return TrainConfig(model=model, **{**fields, "seq_len": 64, **changes})


def params_of(model: Qwen3Config) -> Any:
    """Shapes of the parameters, as they lie in a run on eight devices."""
    return plan_state(config_of(model), MESH).shapes["params"]


def tensors_of(model: Qwen3Config, seed: int = 0, dtype: Any = ml_dtypes.bfloat16, fused: bool = False) -> Tensors:
    """A checkpoint: tensors by the names and in the shapes that Hugging Face has."""
    rng = np.random.default_rng(seed)
    width, heads = model.hidden_size, model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim

    def matrix(*shape: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(shape)).astype(dtype)

    def scale(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(dtype)

    found = {"model.embed_tokens.weight": matrix(model.vocab_size, width), "model.norm.weight": scale(width)}
    if not model.tied_embeddings:
        found["lm_head.weight"] = matrix(model.vocab_size, width)
    for layer in range(model.num_layers):
        at = f"model.layers.{layer}."
        found[at + "input_layernorm.weight"] = scale(width)
        found[at + "post_attention_layernorm.weight"] = scale(width)
        found[at + "self_attn.q_proj.weight"] = matrix(heads, width)
        found[at + "self_attn.k_proj.weight"] = matrix(kv_heads, width)
        found[at + "self_attn.v_proj.weight"] = matrix(kv_heads, width)
        found[at + "self_attn.o_proj.weight"] = matrix(width, heads)
        found[at + "self_attn.q_norm.weight"] = scale(model.head_dim)
        found[at + "self_attn.k_norm.weight"] = scale(model.head_dim)
        if model.moe is None:
            found[at + "mlp.gate_proj.weight"] = matrix(model.intermediate_size, width)
            found[at + "mlp.up_proj.weight"] = matrix(model.intermediate_size, width)
            found[at + "mlp.down_proj.weight"] = matrix(width, model.intermediate_size)
            continue
        experts, inner = model.moe.num_experts, model.moe.intermediate_size
        found[at + "mlp.gate.weight"] = matrix(experts, width)
        gate, up = matrix(experts, inner, width), matrix(experts, inner, width)
        down = matrix(experts, width, inner)
        if fused:
            found[at + "mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            found[at + "mlp.experts.down_proj"] = down
        for e in range(0 if fused else experts):
            found[at + f"mlp.experts.{e}.gate_proj.weight"] = gate[e]
            found[at + f"mlp.experts.{e}.up_proj.weight"] = up[e]
            found[at + f"mlp.experts.{e}.down_proj.weight"] = down[e]
    return found


def published(model: Qwen3Config) -> dict[str, Any]:
    """config.json in the words of the published ones."""
    found = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "head_dim": model.head_dim, "hidden_act": "silu",
        "hidden_size": model.hidden_size, "initializer_range": 0.02, "intermediate_size": model.intermediate_size,
        "max_position_embeddings": 40960, "max_window_layers": model.num_layers, "model_type": "qwen3",
        "num_attention_heads": model.num_heads, "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads, "rms_norm_eps": model.norm_epsilon, "rope_scaling": None,
        "rope_theta": model.rope_theta, "sliding_window": None, "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": model.vocab_size,
    }  # fmt: skip
    if model.moe is not None:
        found |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
            "mlp_only_layers": [], "moe_intermediate_size": model.moe.intermediate_size, "norm_topk_prob": True,
            "num_experts": model.moe.num_experts, "num_experts_per_tok": model.moe.experts_per_token,
            "output_router_logits": False, "router_aux_loss_coef": 0.001,
        }  # fmt: skip
    return found


def write_folder(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, files: int = 3) -> Path:
    """A model folder as Hugging Face has it. files: shards; 1: no index."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(b'{"a tokenizer": "\xc3\xa9"}\n')
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    return folder


def read_folder(folder: Path) -> tuple[Tensors, dict[str, str]]:
    """All tensors by name, and the file each is in, read with safetensors."""
    found, where = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "np") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 (no mapping)
                assert name not in found
                found[name], where[name] = file.get_tensor(name), path.name
    return found, where


def same_bytes(got: Tensors, want: Tensors) -> bool:
    return got.keys() == want.keys() and all(
        got[n].dtype == want[n].dtype and got[n].shape == want[n].shape and got[n].tobytes() == want[n].tobytes()
        for n in want
    )


def expected_params(tensors: Tensors, model: Qwen3Config) -> Any:
    """Ours, from tensors that are not fused: a linear weight is transposed, its heads become axes."""
    layers, heads = range(model.num_layers), model.head_dim

    def stack(name: str, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        found = [change(tensors[f"model.layers.{n}.{name}.weight"].astype(np.float32)) for n in layers]
        return np.stack(found)

    def plain(x: np.ndarray) -> np.ndarray:
        return x

    def turned(x: np.ndarray) -> np.ndarray:
        return x.T

    def into_heads(x: np.ndarray) -> np.ndarray:
        return x.T.reshape(x.shape[1], -1, heads)

    attention = {f"{p}_proj": {"kernel": stack(f"self_attn.{p}_proj", into_heads)} for p in "qkv"}
    out = stack("self_attn.o_proj", lambda x: x.T.reshape(-1, heads, x.shape[0]))
    attention |= {"o_proj": {"kernel": out}}
    attention |= {f"{p}_norm": {"scale": stack(f"self_attn.{p}_norm", plain)} for p in "qk"}
    if model.moe is None:
        mlp: Any = {p: {"kernel": stack(f"mlp.{p}_proj", turned)} for p in ("gate", "up", "down")}
    else:
        experts = range(model.moe.num_experts)
        mlp = {
            p: np.stack([stack(f"mlp.experts.{e}.{p}_proj", turned) for e in experts], axis=1)
            for p in ("gate", "up", "down")
        }
        mlp["router"] = {"kernel": stack("mlp.gate", turned)}
    params = {
        "embedding": tensors["model.embed_tokens.weight"].astype(np.float32),
        "layers": {
            "attention_norm": {"scale": stack("input_layernorm", plain)},
            "attention": attention,
            "mlp_norm": {"scale": stack("post_attention_layernorm", plain)},
            "mlp": mlp,
        },
        "norm": {"scale": tensors["model.norm.weight"].astype(np.float32)},
    }
    return params if model.tied_embeddings else params | {"head": tensors["lm_head.weight"].astype(np.float32)}


def shapes_like(params: Any, shardings: Callable[[tuple[int, ...]], NamedSharding]) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=shardings(x.shape)), params)


def assert_equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == np.float32, path
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w), err_msg=jax.tree_util.keystr(path))


def random_sharding(rng: np.random.Generator) -> Callable[[tuple[int, ...]], NamedSharding]:
    """Mesh axes dealt at random to axes of an array that they divide."""

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        spec: list[tuple[str, ...]] = [() for _ in shape]
        for name in rng.permutation(["pool", "dp", "cp"]):
            axis = int(rng.integers(len(shape) + 1))
            if axis < len(shape) and shape[axis] % 2 ** (len(spec[axis]) + 1) == 0:
                spec[axis] += (str(name),)
        return NamedSharding(MESH, PartitionSpec(*(names or None for names in spec)))

    return sharding


def params_like(model: Qwen3Config) -> Any:
    return shapes_like(expected_params(tensors_of(model), model), random_sharding(np.random.default_rng(0)))


def with_tests() -> dict[str, str]:
    """The environment of a program that imports hugging_face_base."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
