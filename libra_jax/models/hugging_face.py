"""Qwen3 and Qwen3-MoE as Hugging Face publishes them: names and shapes of the tensors, and config.json.

`layout` says for each parameter of ours which tensors of a checkpoint hold its numbers; reading and writing follow it
(hugging_face_read.py, hugging_face_write.py). As in transformers: a linear weight is (outputs, inputs), a layer and an
expert are tensors of their own. Transformers 5 holds all experts of a layer as one tensor and can save them so; that
layout is read, too. Published checkpoints have the experts apart, and so has what is written.

Letters: L layers, E experts, D width, F width inside an MLP, H heads, K key/value heads, W width of a head, V words.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from libra_jax.models.moe import MoEConfig
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.rope import YaRN

_LAYER = "model.layers.{}."
_ATTENTION, _EXPERTS = _LAYER + "self_attn.", _LAYER + "mlp.experts."

# Path of ours: (name of its tensors, stacked axes, axes that are inputs; None: not a linear weight). In the order in
# which a checkpoint is written, those of a layer together.
_TABLE: dict[tuple[str, ...], tuple[str, int, int | None]] = {
    ("embedding",): ("model.embed_tokens.weight", 0, None),
    ("layers", "attention_norm", "scale"): (_LAYER + "input_layernorm.weight", 1, None),
    ("layers", "attention", "q_proj", "kernel"): (_ATTENTION + "q_proj.weight", 1, 1),  # (L, D, H, W)
    ("layers", "attention", "k_proj", "kernel"): (_ATTENTION + "k_proj.weight", 1, 1),  # (L, D, K, W)
    ("layers", "attention", "v_proj", "kernel"): (_ATTENTION + "v_proj.weight", 1, 1),
    ("layers", "attention", "o_proj", "kernel"): (_ATTENTION + "o_proj.weight", 1, 2),  # (L, H, W, D)
    ("layers", "attention", "q_norm", "scale"): (_ATTENTION + "q_norm.weight", 1, None),
    ("layers", "attention", "k_norm", "scale"): (_ATTENTION + "k_norm.weight", 1, None),
    ("layers", "mlp_norm", "scale"): (_LAYER + "post_attention_layernorm.weight", 1, None),
    ("layers", "mlp", "gate", "kernel"): (_LAYER + "mlp.gate_proj.weight", 1, 1),  # (L, D, F)
    ("layers", "mlp", "up", "kernel"): (_LAYER + "mlp.up_proj.weight", 1, 1),
    ("layers", "mlp", "down", "kernel"): (_LAYER + "mlp.down_proj.weight", 1, 1),  # (L, F, D)
    ("layers", "mlp", "router", "kernel"): (_LAYER + "mlp.gate.weight", 1, 1),  # (L, D, E)
    ("layers", "mlp", "gate"): (_EXPERTS + "{}.gate_proj.weight", 2, 1),  # (L, E, D, F)
    ("layers", "mlp", "up"): (_EXPERTS + "{}.up_proj.weight", 2, 1),
    ("layers", "mlp", "down"): (_EXPERTS + "{}.down_proj.weight", 2, 1),  # (L, E, F, D)
    ("norm", "scale"): ("model.norm.weight", 0, None),
    ("head",): ("lm_head.weight", 0, None),
}
# All experts of a layer in one tensor: (its name, which share of its rows, of how many).
_FUSED: dict[tuple[str, ...], tuple[str, int, int]] = {
    ("layers", "mlp", "gate"): (_EXPERTS + "gate_up_proj", 0, 2),  # (E, 2 F, D)
    ("layers", "mlp", "up"): (_EXPERTS + "gate_up_proj", 1, 2),
    ("layers", "mlp", "down"): (_EXPERTS + "down_proj", 0, 1),  # (E, D, F)
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one matrix or vector lies: `name` of the tensor, `shape` of the whole of it; in a tensor that holds all
    experts, which `expert`, and the `first_row` of its rows that are meant."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of ours, of shape stacked + inputs + outputs, and the tensors of a checkpoint that hold its numbers.

    path: its keys in the tree. stacked: (), (L,) or (L, E); there is a tensor for each index of these. linear: the
    tensor is (outputs, inputs), both flat; otherwise inputs is () and the tensor's shape is outputs.
    """

    path: tuple[str, ...]
    stacked: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    linear: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stacked + self.inputs + self.outputs

    def source(self, index: tuple[int, ...], fused: bool = False) -> Source:
        """The tensor for an index of the stacked axes. fused: where all experts of a layer are one tensor."""
        shape = (math.prod(self.outputs), math.prod(self.inputs)) if self.linear else self.outputs
        if fused and self.path in _FUSED:
            name, part, parts = _FUSED[self.path]
            layer, expert = index
            return Source(
                name.format(layer), (self.stacked[1], parts * shape[0], shape[1]), expert, first_row=part * shape[0]
            )
        return Source(_TABLE[self.path][0].format(*index), shape)

    def indices(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.stacked))


def layout(shapes: Any) -> list[Parameter]:
    """All parameters of a tree, in the order in which a checkpoint is written.

    shapes: nested dict of arrays or of their shapes. Raises ValueError for a parameter that no checkpoint has.
    """
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for keys, leaf in jax.tree.flatten_with_path(shapes)[0]:
        found[tuple(key.key for key in keys)] = tuple(leaf.shape)
    if unknown := [".".join(path) for path in found if path not in _TABLE]:
        raise ValueError(f"Hugging Face's Qwen3 has nothing for these parameters: {', '.join(unknown)}")
    parameters = []
    for path, (_, stacked, inputs) in _TABLE.items():
        if path in found:
            shape, end = found[path], stacked + (inputs or 0)
            parts = shape[:stacked], shape[stacked:end], shape[end:]
            parameters.append(Parameter(path, *parts, linear=inputs is not None))
    return parameters


def tensors(parameters: list[Parameter], fused: bool = False) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all tensors that a checkpoint with these parameters has."""
    sources = (p.source(index, fused) for p in parameters for index in p.indices())
    return {source.name: source.shape for source in sources}


def is_fused(names: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with tensors of these names has all experts of a layer in one."""
    return any(name.endswith(".mlp.experts.gate_up_proj") for name in names)


# config.json

CONFIG_FILE = "config.json"
_FIELDS = {  # theirs: ours; what weights have been trained for and no run can change
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied_embeddings",
}
_MOE_FIELDS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "intermediate_size",
}
_DENSE, _MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
# Options with one value that this model has: what transformers takes where config.json is silent, and that value.
_SETTLED: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", "silu"),
    "attention_bias": (False, False),
    "attention_dropout": (0.0, 0.0),
    "use_sliding_window": (False, False),
    "quantization_config": (None, None),
}
_SETTLED_MOE: dict[str, tuple[Any, Any]] = {
    "decoder_sparse_step": (1, 1),
    "mlp_only_layers": ([], []),
    "norm_topk_prob": (False, True),
}
_YARN_FIELDS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ValueError if it is not there, or no JSON object."""
    path = folder / CONFIG_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {CONFIG_FILE}; it must be a model folder as Hugging Face has it") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, and is a {type(found).__name__}")
    return found


def config_from_hugging_face(folder: Path) -> Qwen3Config:
    """The model that a folder's config.json describes; what it says nothing of (remat, say) is as by default.

    Raises ValueError for another architecture, and for everything the model here does not have, all in one message.
    """
    found, path = {"tie_word_embeddings": False, **read_config(folder)}, folder / CONFIG_FILE
    if "num_local_experts" in found:  # what transformers 5 calls num_experts when it saves a model
        found.setdefault("num_experts", found["num_local_experts"])
    architectures = found.get("architectures") or []
    if architectures not in ([_DENSE], [_MOE]):
        said = ", ".join(map(str, architectures)) or f"not stated, model_type {found.get('model_type')!r}"
        raise ValueError(f"{path}: the architecture must be {_DENSE} or {_MOE}, and is {said}")
    moe = architectures == [_MOE]
    needed = [*_FIELDS, *(_MOE_FIELDS if moe else ())]
    problems = [f"{name} is missing" for name in needed if found.get(name) is None]
    for name, (silent, wanted) in (_SETTLED | (_SETTLED_MOE if moe else {})).items():
        there = found.get(name, silent)
        if (there or None) != (wanted or None):
            problems.append(f"{name} is {json.dumps(there)}, and must be {json.dumps(wanted)}")
    if set(found.get("layer_types") or ()) - {"full_attention"}:
        problems.append(f"layer_types is {found['layer_types']}, and must be full_attention in every layer")
    try:
        rope, rope_problems = _rope(found)
        if problems := problems + rope_problems:
            raise ValueError("\n  ".join(["it asks for what this model does not have:", *problems]))
        fields: dict[str, Any] = {ours: found[theirs] for theirs, ours in _FIELDS.items()} | rope
        if moe:
            inside = {ours: found[theirs] for theirs, ours in _MOE_FIELDS.items()}
            fields["moe"] = MoEConfig(**inside, balance_loss=found.get("router_aux_loss_coef", 0.001))
        return Qwen3Config(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _rope(found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of ours for rotary positions, and what is wrong: as transformers 5 writes them (rope_parameters), or as
    published (rope_theta, rope_scaling)."""
    scaling = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or found.get("rope_theta")
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    problems = ["rope_theta is missing"] if theta is None else []
    scaling = {name: value for name, value in scaling.items() if value is not None}
    if kind == "default":
        return {"rope_theta": theta}, problems
    if kind != "yarn":
        return {}, [*problems, f"rope scaling is {json.dumps(kind)}, and must be default or yarn"]
    if "max_position_embeddings" in found:
        scaling.setdefault("original_max_position_embeddings", found["max_position_embeddings"])
    problems += [f"rope scaling has {name} {scaling[name]!r}" for name in scaling if name not in _YARN_FIELDS]
    lacks = [name for name in ("factor", "original_max_position_embeddings") if name not in scaling]
    problems += [f"rope scaling has no {name}" for name in lacks]
    if problems:
        return {}, problems
    yarn = YaRN(**{ours: scaling[theirs] for theirs, ours in _YARN_FIELDS.items() if theirs in scaling})
    return {"rope_theta": theta, "rope_scaling": yarn}, []


def config_to_hugging_face(
    config: Qwen3Config, *, dtype: str, max_positions: int, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json for a model: what `config_from_hugging_face` reads, and what transformers wants beside it.

    dtype: of the tensors. max_positions: longest document the model was trained on, in tokens. source: the config.json
    that the weights once came with; what it says beside (special tokens, say) stays, and so do more max_positions.
    """
    moe, scaling = config.moe, config.rope_scaling
    stays = {
        "initializer_range": 0.02,
        "max_window_layers": config.num_layers,
        "sliding_window": None,
        "use_cache": True,
        **(source or {}),
    }
    for name in ("rope_parameters", "dtype"):  # how transformers 5 calls rope_theta with rope_scaling, and torch_dtype
        stays.pop(name, None)
    fields = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()}
    settled = {name: wanted for name, (_, wanted) in _SETTLED.items() if wanted is not None}
    if moe is not None:
        fields |= {theirs: getattr(moe, ours) for theirs, ours in _MOE_FIELDS.items()}
        settled |= {name: wanted for name, (_, wanted) in _SETTLED_MOE.items()}
        settled |= {"router_aux_loss_coef": moe.balance_loss, "output_router_logits": False}
    yarn = {theirs: getattr(scaling, ours) for theirs, ours in _YARN_FIELDS.items()} if scaling else {}
    yarn = {name: value for name, value in yarn.items() if value is not None}
    written = {
        "architectures": [_DENSE if moe is None else _MOE],
        "model_type": "qwen3" if moe is None else "qwen3_moe",
        "max_position_embeddings": max(max_positions, stays.get("max_position_embeddings") or 0),
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "yarn", **yarn} if yarn else None,
        "torch_dtype": dtype,
    }
    return dict(sorted((stays | fields | settled | written).items()))


def weight_values(config: Qwen3Config) -> dict[str, Any]:
    """{field: value} of what weights have been trained for and no run can change, experts' fields as moe.NAME.

    Rotary positions are not among them: continued pre-training at longer sequences changes their base and scaling.
    """
    values = {name: getattr(config, name) for name in _FIELDS.values()}
    if config.moe is not None:
        del values["intermediate_size"]  # of an MLP that no layer has
        values |= {f"moe.{name}": getattr(config.moe, name) for name in _MOE_FIELDS.values()}
    return values
