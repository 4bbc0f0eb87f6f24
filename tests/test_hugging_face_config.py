"""config.json in and out: the published models, there and back, and every refusal by its message."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hugging_face_base import (
    MOE,
    published,
)
from train_base import TINY

from libra_jax.models.hugging_face import config_from_hugging_face, config_to_hugging_face
from libra_jax.models.moe import MoEConfig
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.rope import YaRN


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
