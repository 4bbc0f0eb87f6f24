"""Hugging Face folders in and out: every number in its place, every refusal by its message, nothing half-written.

The folders here are written by safetensors, tensor by tensor, under names and shapes spelt out below; logits are
compared with Qwen3 in float64 NumPy that computes on those tensors as they are.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import save_file
from test_model import batch_of, run
from train_base import TINY, tiny_spec

from libra_jax.data import DataConfig
from libra_jax.models.hugging_face import config_from_hugging_face, config_to_hugging_face
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.hugging_face_write import write_weights
from libra_jax.models.moe import MoEConfig
from libra_jax.models.qwen3 import Qwen3, Qwen3Config
from libra_jax.processes import run_processes
from libra_jax.rope import YaRN
from libra_jax.train.checkpoint import Checkpoints
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, TrainConfig, fixed_values
from libra_jax.train.loop import RunFolder
from libra_jax.train.mesh import make_mesh
from libra_jax.train.step import plan_state
from libra_jax.train.weights_command import ExportOptions, export_weights, import_weights

Tensors = dict[str, np.ndarray]
MOE = dataclasses.replace(TINY, moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16))
MESH = make_mesh(MeshConfig(2, 2, 2))
INDEX = "model.safetensors.index.json"


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


# Numbers in their places


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


# There and back


@pytest.mark.parametrize("model", [TINY, dataclasses.replace(TINY, tied_embeddings=True), MOE], ids=["", "tied", "moe"])
def test_what_is_read_and_written_again_has_the_same_bytes(tmp_path: Path, model: Qwen3Config) -> None:
    tensors = tensors_of(model)
    odd = np.array([0x8000, 0x0001, 0x807F, 0x7F80, 0xFF7F, 0x0080], np.uint16)  # -0, subnormal, infinite, least normal
    tensors["model.layers.1.self_attn.o_proj.weight"].reshape(-1)[:6] = odd.view(ml_dtypes.bfloat16)
    source = write_folder(tmp_path / "hf", tensors, published(model) | {"eos_token_id": 77, "of_the_future": [1]})
    expected = expected_params(tensors, model)
    params = read_weights(source, shapes_like(expected, random_sharding(np.random.default_rng(2))))
    files = write_weights(tmp_path / "new", params, model, shard_bytes=5000, companions=source)
    new, where = read_folder(tmp_path / "new")
    assert same_bytes(new, tensors)

    index = json.loads((tmp_path / "new" / INDEX).read_text())
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    shards = sorted(set(where.values()))
    assert sorted(files) == sorted([*shards, INDEX, "config.json", "tokenizer.json"])
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for shard in shards:
        sizes = [tensors[name].nbytes for name, file in where.items() if file == shard]
        assert len(sizes) == 1 or sum(sizes) <= 5000
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert config_from_hugging_face(tmp_path / "new") == config_from_hugging_face(source)
    assert json.loads((tmp_path / "new/config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert_equal(
        read_weights(tmp_path / "new", shapes_like(expected, random_sharding(np.random.default_rng(3)))), expected
    )


def test_float32_stays_as_it_is_and_bfloat16_is_the_nearest(tmp_path: Path) -> None:
    tensors = tensors_of(TINY, dtype=np.float32)
    params = expected_params(tensors, TINY)
    assert write_weights(tmp_path / "f32", params, TINY, "float32") == ["config.json", "model.safetensors"]
    assert same_bytes(read_folder(tmp_path / "f32")[0], tensors)
    write_weights(tmp_path / "bf16", params, TINY)
    for name, got in read_folder(tmp_path / "bf16")[0].items():
        bits = tensors[name].view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
        np.testing.assert_array_equal(got.view(np.uint16), nearest.astype(np.uint16), err_msg=name)
    for folder, dtype in (("f32", "float32"), ("bf16", "bfloat16")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["torch_dtype"] == dtype


TWO = """
import sys
from pathlib import Path
import numpy as np
from libra_jax.processes import join_processes
join_processes(sys.argv[-3:], devices=4)
import jax
import test_hugging_face as t

place = Path(sys.argv[1])
want = t.expected_params(t.tensors_of(t.MOE), t.MOE)
shapes = t.shapes_like(want, t.random_sharding(np.random.default_rng(4)))
params = t.read_weights(place / "hf", shapes)
for ours, whole in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
    for shard in ours.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
t.write_weights(place / "new", params, t.MOE, shard_bytes=20_000)
assert (place / "new" / "config.json").is_file()
"""


def with_tests() -> dict[str, str]:
    """The environment of a program that imports this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def test_two_processes_read_and_write_the_same(tmp_path: Path) -> None:
    tensors = tensors_of(MOE)
    write_folder(tmp_path / "hf", tensors)
    environment = with_tests() | {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=3600"}
    command = [sys.executable, "-W", "ignore", "-c", TWO, str(tmp_path)]
    run_processes(command, 2, timeout_seconds=300, environment=environment)
    assert same_bytes(read_folder(tmp_path / "new")[0], tensors)


# The memory of a host

MEMORY = """
import dataclasses, resource, sys
from pathlib import Path
import jax
import test_hugging_face as t

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def both(model, place):
    shapes, folder = t.params_of(model), place / "hf"
    before = peak()
    params = t.read_weights(folder, shapes)
    taken = peak() - before - sum(4 * x.size for x in jax.tree.leaves(shapes))
    before = peak()
    t.write_weights(place / "new", params, model, shard_bytes=float(sys.argv[2]))
    return taken, peak() - before

place = Path(sys.argv[1])
both(t.TINY, place / "tiny")  # compilers and libraries are in memory now
print(*both(t.LARGER, place / "larger"))
"""
LARGER = dataclasses.replace(TINY, hidden_size=512, intermediate_size=1536, num_layers=24, vocab_size=512)


def test_a_host_holds_about_one_shard_beside_the_arrays(tmp_path: Path) -> None:
    """In a process of its own: 117 MB of bfloat16 in 8 files; 233 MB of float32 on devices, which are memory here."""
    for name, model in (("tiny", TINY), ("larger", LARGER)):
        (tmp_path / name).mkdir()
        tensors = tensors_of(model)
        write_folder(tmp_path / name / "hf", tensors, files=8)
    total = sum(t.nbytes for t in tensors.values())
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(total / 8)], capture_output=True, text=True, check=True,
        env=with_tests(),
    )  # fmt: skip
    read_bytes, written_bytes = map(int, done.stdout.split())
    assert read_bytes < total / 3
    assert written_bytes < total / 3


# config.json


def test_published_configs_give_the_published_models(tmp_path: Path) -> None:
    """The shapes of Qwen3-8B and Qwen3-30B-A3B as their config.json files have them."""
    dense = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(dense))
    assert config_from_hugging_face(tmp_path) == Qwen3Config(151936, 4096, 12288, 36, 32, 8)
    assert config_from_hugging_face(tmp_path).num_parameters == 8_190_735_360
    moe = dense | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
        "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(moe))
    assert config_from_hugging_face(tmp_path) == Qwen3Config(
        151936, 2048, 6144, 48, 32, 4, moe=MoEConfig(128, 8, 768, 0.001)
    )


@pytest.mark.parametrize("model", [TINY, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 32768), YaRN(2.5, 1000, 16.0, 2.0, 1.1)], ids=str)
def test_configs_go_there_and_back(tmp_path: Path, model: Qwen3Config, scaling: YaRN | None) -> None:
    model = dataclasses.replace(model, rope_scaling=scaling, rope_theta=5e6, compute_dtype="bfloat16")
    found = config_to_hugging_face(model, dtype="bfloat16", max_positions=4096)
    (tmp_path / "config.json").write_text(json.dumps(found))
    assert config_from_hugging_face(tmp_path) == model
    if scaling is not None:
        assert found["rope_scaling"]["rope_type"] == "yarn" and found["rope_scaling"]["factor"] == scaling.factor
    # As transformers 5 writes the same.
    found["rope_parameters"] = (found.pop("rope_scaling") or {"rope_type": "default"}) | {
        "rope_theta": found.pop("rope_theta")
    }
    if model.moe is not None:
        found["num_local_experts"] = found.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(found))
    assert config_from_hugging_face(tmp_path) == model


def test_what_a_model_came_with_stays_in_its_config() -> None:
    source = published(TINY) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}, "dtype": "float16"}
    for positions, expected in ((4096, 40960), (262_144, 262_144)):
        found = config_to_hugging_face(TINY, dtype="float32", max_positions=positions, source=source)
        assert found == published(TINY) | {"max_position_embeddings": expected, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "must be Qwen3ForCausalLM or Qwen3MoeForCausalLM, and is LlamaForCa"),
        ({"architectures": None}, "and is not stated, model_type 'qwen3_moe'"),
        ({"attention_bias": True}, "attention_bias is true, and must be false"),
        ({"use_sliding_window": True}, "use_sliding_window is true, and must be false"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", and must be "silu"'),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, and must be 0.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, 'quantization_config is {"quant_method": "fp8"}, and must'),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, and must be 1"),
        ({"mlp_only_layers": [0, 3]}, "mlp_only_layers is [0, 3], and must be []"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false, and must be true"),
        ({"norm_topk_prob": ...}, "norm_topk_prob is false, and must be true"),  # what transformers takes it for
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ['full_attention', 'sliding_atten"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 'rope scaling is "linear", and must be default or'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope scaling is "dynamic", and must be default'),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling has no factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "rope scaling has mscale 0.7"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"num_experts": ...}, "num_experts is missing"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"head_dim": 7}, "head_dim (7) must be even"),
        ({"num_experts_per_tok": 5}, "experts_per_token (5) must be at most num_experts (4)"),
        ({"vocab_size": "many"}, "config.json: "),
    ],
)  # fmt: skip
def test_configs_of_other_models_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    found = {name: value for name, value in (published(MOE) | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError) as refusal:
        config_from_hugging_face(tmp_path)
    assert message in str(refusal.value) and str(tmp_path / "config.json") in str(refusal.value)


def test_all_that_a_config_asks_for_and_cannot_have_is_in_one_message(tmp_path: Path) -> None:
    found = published(TINY) | {"attention_bias": True, "hidden_act": "relu", "vocab_size": None}
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"(?s)vocab_size.*hidden_act.*attention_bias"):
        config_from_hugging_face(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        config_from_hugging_face(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must be a JSON object, and is a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            config_from_hugging_face(tmp_path)


# Folders that do not hold the model

Q0 = "model.layers.0.self_attn.q_proj.weight"


def refusal_of(folder: Path, model: Qwen3Config = TINY) -> list[str]:
    """Lines of the message, the first left out, which names the folder."""
    with pytest.raises(ValueError) as refusal:
        read_weights(folder, params_like(model))
    first, *lines = str(refusal.value).splitlines()
    assert str(folder) in first
    return [line.strip() for line in lines] or [first]


def params_like(model: Qwen3Config) -> Any:
    return shapes_like(expected_params(tensors_of(model), model), random_sharding(np.random.default_rng(0)))


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


# Nothing half-written


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    params = expected_params(tensors_of(TINY), TINY)
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="is there already"):
        write_weights(tmp_path / "there", params, TINY)
    with pytest.raises(ValueError, match="tied_embeddings is True, and the parameters are those with a head"):
        write_weights(tmp_path / "new", params, dataclasses.replace(TINY, tied_embeddings=True))
    with pytest.raises(ValueError, match=r"dtype \(int8\) must be one of bfloat16, float32"):
        write_weights(tmp_path / "new", params, TINY, "int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"shard_bytes \(0\)"):
        write_weights(tmp_path / "new", params, TINY, shard_bytes=0)
    with pytest.raises(ValueError, match=r"has nothing for these parameters: layers\.mlp\.bias"):
        params["layers"]["mlp"]["bias"] = np.zeros((2, 48), np.float32)
        write_weights(tmp_path / "new", params, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = expected_params(tensors_of(TINY), TINY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # no file may be larger
    try:
        with pytest.raises(OSError, match=r"new could not be written: File too large\. Nothing is left of it"):
            write_weights(tmp_path / "new", params, TINY, shard_bytes=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)._replace(free=1234)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    total = sum(x.size for x in jax.tree.leaves(params)) * 4
    with pytest.raises(
        OSError, match=f"new could not be written: it takes {total:,} bytes, and there is room for 1,234"
    ):
        write_weights(tmp_path / "new", params, TINY, "float32")
    assert not list(tmp_path.iterdir())


STUCK = """
import sys, time
from pathlib import Path
import test_hugging_face as t
from libra_jax.models import hugging_face_write as w

write = w._write_shard
def stuck(out, *args):
    write(out, *args)
    if "model-00002-" in out.name:
        print("two shards", flush=True)
        time.sleep(600)
w._write_shard = stuck
w.write_weights(Path(sys.argv[1]), t.expected_params(t.tensors_of(t.TINY), t.TINY), t.TINY, shard_bytes=20_000)
"""


def test_a_process_that_is_killed_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    folder, unfinished = tmp_path / "new", tmp_path / "new.unfinished"
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(folder)], stdout=subprocess.PIPE, text=True, env=with_tests()
    )
    params = expected_params(tensors_of(TINY), TINY)
    try:
        assert process.stdout is not None and process.stdout.readline() == "two shards\n"
        assert not folder.exists() and len(list(unfinished.iterdir())) == 2
        with pytest.raises(ValueError, match="another process is writing"):
            write_weights(folder, params, TINY)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not folder.exists() and len(list(unfinished.iterdir())) == 2
    (unfinished / "of another try").write_text("")
    write_weights(folder, params, TINY, shard_bytes=30_000)
    assert not unfinished.exists() and not (folder / "of another try").exists()
    assert same_bytes(read_folder(folder)[0], tensors_of(TINY))


# The commands


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
