"""Model FLOPs of a step: what its matrix products need at least, on the documents that it really holds.

The count of Chowdhery et al. (PaLM, arXiv 2204.02311, appendix B), made exact for packed sequences: 6 FLOPs for every
weight that a token is multiplied with, and the attention of every document over itself alone, not over its sequence.
Takes the shape of a model and document lengths; nothing of how they are computed. Recomputation, padding, whole blocks
where a part would do, norms, rotary positions and the optimizer are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.workload import causal_pairs

PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
}
"""FLOP/s of a device in bfloat16, dense, by what JAX calls its kind. From NVIDIA's data sheets: A100 312; H100 PCIe
1,513, H100 SXM and H200 SXM 1,979, HGX B200 4,500, these with sparsity, which doubles them."""


def multiplied_parameters(model: Qwen3Config) -> int:
    """Weights that one token is multiplied with: projections, MLP or its experts with their router, and output matrix.

    Not the embeddings, which are looked up, nor the scales of norms.
    """
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    if model.moe is None:
        mlp = 3 * model.hidden_size * model.intermediate_size
    else:
        experts = 3 * model.moe.experts_per_token * model.hidden_size * model.moe.intermediate_size
        mlp = experts + model.hidden_size * model.moe.num_experts
    return model.num_layers * (attention + mlp) + model.vocab_size * model.hidden_size


def model_flops(model: Qwen3Config, lengths: Sequence[Sequence[int]], window: int | None = None) -> int:
    """FLOPs of an optimizer step, forward and backward. lengths: of the documents in each of its sequences.

    window: keys that a query sees at most, see `PoolSpec`. A pair of query and key costs 4 * head_dim FLOPs per query
    head and layer, two products of 2 * head_dim; the backward pass costs twice the forward pass, so that both are 12.
    """
    documents = np.array([length for sequence in lengths for length in sequence], np.int64)
    products = 6 * multiplied_parameters(model) * int(documents.sum())
    width = model.num_layers * model.num_heads * model.head_dim
    return products + 12 * width * causal_pairs(documents, window)


def peak_flops(kind: str, dtype: str) -> float | None:
    """FLOP/s that one device has at most, None where that is not known. kind: as JAX calls it; dtype: computed in."""
    return PEAK_FLOPS.get(kind) if dtype == "bfloat16" else None
