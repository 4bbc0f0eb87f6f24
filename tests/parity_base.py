"""Small random Qwen3 models in folders as Hugging Face has them, and what Libra makes of such a folder.

Shared by tests/test_parity.py and by tools/parity_table.py (`make parity`), which sets Libra's numbers beside those of
transformers: logits, mean loss over all targets, gradients by the names of a checkpoint. The documents go through
Libra packed and in pools, and through transformers one by one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file
from train_base import pack

from libra_jax.data import DataConfig
from libra_jax.models.hugging_face import config_from_hugging_face
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.hugging_face_write import write_weights
from libra_jax.models.moe import load_balancing_loss
from libra_jax.models.qwen3 import Qwen3
from libra_jax.train.config import AttentionConfig, MeshConfig, TrainConfig
from libra_jax.train.mesh import make_mesh
from libra_jax.train.step import plan_state

Tensors = dict[str, np.ndarray]

RECORDED = Path(__file__).parent / "parity_data"
ROWS = slice(None, None, 4)
"""Tokens whose logits are recorded."""
SEQ_LEN = 128
PACKED = [[128], [90, 21, 1, 9], [50, 64], [33, 77]]
"""Lengths of each sequence's documents: whole, short, of one token, cut inside a block; padding behind most."""
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": SEQ_LEN,
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "use_sliding_window": False,
}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**SHAPE, **DENSE, "rope_theta": 1000.0, "rope_scaling": YARN, "tie_word_embeddings": False},
    "tied": {**SHAPE, **DENSE, "rope_theta": 10_000.0, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "moe": {
        **SHAPE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_theta": 100_000.0,
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    },
}
"""config.json of each model, in the words of the published ones; numbers are not those that go without saying."""
MESHES = {"2 pools of 2": MeshConfig(2, 2, 2), "1 pool of 4": MeshConfig(1, 4, 2)}


def random_tensors(config: dict[str, Any], seed: int = 2) -> Tensors:
    """A checkpoint in float32: norms around 1, all else so large that no part of a layer is small beside another."""
    rng = np.random.default_rng(seed)
    width, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return rng.normal(0, 1.4 / np.sqrt(inputs), (outputs, inputs)).astype(np.float32)

    def scale(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    def swiglu(at: str, inner: int) -> Tensors:
        return {
            at + "gate_proj.weight": matrix(inner, width),
            at + "up_proj.weight": matrix(inner, width),
            at + "down_proj.weight": matrix(width, inner),
        }

    found = {"model.embed_tokens.weight": matrix(config["vocab_size"], width), "model.norm.weight": scale(width)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": scale(width),
            at + "self_attn.q_proj.weight": matrix(heads, width),
            at + "self_attn.k_proj.weight": matrix(kv_heads, width),
            at + "self_attn.v_proj.weight": matrix(kv_heads, width),
            at + "self_attn.o_proj.weight": matrix(width, heads),
            at + "self_attn.q_norm.weight": scale(head),
            at + "self_attn.k_norm.weight": scale(head),
            at + "post_attention_layernorm.weight": scale(width),
        }
        if "num_experts" not in config:
            found |= swiglu(at + "mlp.", config["intermediate_size"])
            continue
        found[at + "mlp.gate.weight"] = matrix(config["num_experts"], width)
        for e in range(config["num_experts"]):
            found |= swiglu(f"{at}mlp.experts.{e}.", config["moe_intermediate_size"])
    return found


def random_tokens(config: dict[str, Any], seed: int = 1) -> np.ndarray:
    """(sequences, SEQ_LEN)"""
    return np.random.default_rng(seed).integers(0, config["vocab_size"], (len(PACKED), SEQ_LEN))


def places() -> list[tuple[int, slice]]:
    """Sequence and tokens of each document."""
    found = []
    for row, lengths in enumerate(PACKED):
        ends = np.cumsum(lengths)
        found += [(row, slice(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    return found


def write_model(folder: Path, name: str) -> str:
    """Writes config.json, model.safetensors and documents.json (token ids of each document). Returns a digest of the
    numbers in them."""
    config = MODELS[name]
    tensors, tokens = random_tensors(config), random_tokens(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "documents.json").write_text(json.dumps([tokens[place].tolist() for place in places()]))
    digest = hashlib.sha256(tokens.astype("<i4").tobytes())
    for key in sorted(tensors):
        digest.update(tensors[key].astype("<f4").tobytes())
    return digest.hexdigest()


class Numbers(NamedTuple):
    """logits: (tokens of all documents, vocab). loss: mean over all targets. balance_loss: None without experts.
    gradients: of `loss` alone, by the names of a checkpoint."""

    logits: np.ndarray
    loss: float
    balance_loss: float | None
    gradients: Tensors


def load(folder: Path, mesh: MeshConfig, moe: dict[str, Any]) -> tuple[TrainConfig, Any]:
    """A run's config for the model in `folder`, and its params; moe: changed fields of its experts. The run is in
    float32, and only the cross-entropy is minimised."""
    model = dataclasses.replace(config_from_hugging_face(folder), compute_dtype="float32")
    if model.moe is not None:
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, balance_loss=0.0, **moe))
    config = TrainConfig(
        model=model, data=DataConfig(paths=("text",)), mesh=mesh, attention=AttentionConfig(block=8), seq_len=SEQ_LEN
    )
    return config, read_weights(folder, plan_state(config, make_mesh(mesh)).shapes["params"])


def libra_numbers(
    folder: Path, mesh: MeshConfig, moe: dict[str, Any], options: dict[str, Any] | None = None
) -> Numbers:
    """What Libra says of the model in `folder`: read, packed, in one micro-step on eight devices. options: XLA's."""
    config, params = load(folder, mesh, moe)
    graph = plan_state(config, make_mesh(mesh)).graph
    batch = pack(PACKED, random_tokens(MODELS[folder.name]), config.spec)

    tokens, targets, positions = (x[0] for x in (batch.tokens, batch.targets, batch.positions))

    def loss(params: Any, plans: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        model = nnx.merge(graph, params)
        hidden = model.hidden(tokens, positions, plans)
        balance = None if hidden[1] is None else load_balancing_loss(hidden[1], across_layers=True)
        with mock.patch.object(Qwen3, "hidden", lambda *_: hidden):  # the layers are compiled once, not three times
            total, sums = model.loss_sum(tokens, targets, positions, plans)
            logits = model(tokens, positions, plans)
        return total / sums["targets"].astype(jnp.float32), (logits, balance)

    plans = jax.tree.map(lambda x: x[0], batch.plans)
    call = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=options)
    (mean, (logits, balance)), gradients = jax.device_get(call(params, plans))
    with tempfile.TemporaryDirectory() as place:  # gradients have the tree of the weights: written, they have names
        write_weights(Path(place) / "gradients", gradients, config.model, dtype="float32")
        by_name = load_file(Path(place) / "gradients" / "model.safetensors")
    return Numbers(
        np.concatenate([logits[place] for place in places()]),
        float(mean),
        None if balance is None else float(balance),
        by_name,
    )


# Comparing


def runs_of(name: str) -> dict[str, tuple[MeshConfig, dict[str, Any]]]:
    """{what it is called: (mesh, fields of the experts)}: how Libra runs a model to be compared."""
    runs: dict[str, tuple[MeshConfig, dict[str, Any]]] = {mesh: (layout, {}) for mesh, layout in MESHES.items()}
    if "num_experts" in MODELS[name]:
        runs |= {f"{mesh}, spread": (layout, {"experts": "spread"}) for mesh, layout in MESHES.items()}
    return runs


FLOOR = 2e-6
"""Difference that no comparison in float32 minds, as a share of the largest number of a tensor."""


def bound(theirs: float) -> float:
    """What our error may be where that of transformers in float32 is `theirs`."""
    return 2 * theirs + FLOOR


def share(got: Any, want: Any) -> float:
    """Largest difference as a share of the largest number wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    largest = np.abs(want).max()
    assert largest > 0
    return float(np.abs(got - want).max() / largest)


def flat(numbers: Numbers) -> Tensors:
    """{quantity: numbers}, gradients as gradients/NAME; what transformers' numbers are called in reference.npz."""
    found = {"logits": numbers.logits, "loss": np.asarray(numbers.loss)}
    if numbers.balance_loss is not None:
        found["balance_loss"] = np.asarray(numbers.balance_loss)
    return found | {f"gradients/{name}": gradient for name, gradient in numbers.gradients.items()}
