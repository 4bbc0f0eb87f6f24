"""What the tests of model and trainer share: a tiny model, packed batches, and Qwen3 in float64 NumPy.

`qwen3_logits` is written from the published equations and runs one document at a time, unpacked, so that it knows
nothing of segments, plans or padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from libra_jax.links import Links
from libra_jax.models.moe import MoEConfig
from libra_jax.models.qwen3 import Qwen3, Qwen3Config
from libra_jax.plan import PlanTables, plan_pool, stack_plans
from libra_jax.spec import PoolSpec

TINY = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rope_theta=10_000.0, compute_dtype="float32",
)  # fmt: skip

TINY_MOE = dataclasses.replace(TINY, moe=MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=16))

FAST_LINKS = Links(inside=1e15, inside_latency=0.0)
"""With these, and least_saving=0, tiny steps differ in what pool size is best for them."""


def tiny_spec(pool_size: int = 2, cp: int = 2, seq_len: int = 64, **changes: Any) -> PoolSpec:
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "block": 8, "dtype": "float32"} | changes
    return PoolSpec(seq_len=seq_len, pool_size=pool_size, cp=cp, **fields)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Arrays (micro_steps, sequences, seq_len) int32 and plans (micro_steps, pools, dp, cp)."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    plans: PlanTables

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens, "targets": self.targets, "positions": self.positions}


def pack(lengths: Sequence[Sequence[int]], tokens: np.ndarray, spec: PoolSpec, micro_steps: int = 1) -> Packed:
    """Packs documents of these lengths. tokens: (sequences of all micro-steps, seq_len); padding is overwritten."""
    positions, segment_ids = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, np.int32)
    targets = np.full(tokens.shape, -1, np.int32)
    tokens = tokens.astype(np.int32).copy()
    for i, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, 1):
            end = start + length
            positions[i, start:end], segment_ids[i, start:end] = np.arange(length), number
            targets[i, start : end - 1] = tokens[i, start + 1 : end]
            start = end
        tokens[i, start:] = 0
    size, per_step = spec.pool_size, len(lengths) // micro_steps
    steps = [
        stack_plans([plan_pool(lengths[i : i + size], spec) for i in range(m * per_step, (m + 1) * per_step, size)])
        for m in range(micro_steps)
    ]
    joined = {name: np.stack([getattr(plans, name) for plans in steps]) for name in PlanTables.table_names()}
    shape = micro_steps, per_step, spec.seq_len
    parts = (x.reshape(shape) for x in (tokens, targets, positions, segment_ids))
    return Packed(*parts, plans=PlanTables(spec=spec, **joined))


def qwen3_logits(params: dict[str, Any], tokens: np.ndarray, config: Qwen3Config) -> np.ndarray:
    """One document, (n,) token ids -> (n, vocab_size) float64. params: nested dict, layers stacked."""
    rows = len(tokens)
    x = np.asarray(params["embedding"], np.float64)[tokens]
    angle = np.arange(rows)[:, None] * config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    turn = np.exp(1j * angle)[:, None]

    def weight(*path: str, layer: int | None = None) -> np.ndarray:
        value = params
        for key in path:
            value = value[key]
        return np.asarray(value if layer is None else value[layer], np.float64)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def rotate(x: np.ndarray) -> np.ndarray:
        half = config.head_dim // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def swiglu(y: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return (y @ gate / (1 + np.exp(-(y @ gate))) * (y @ up)) @ down

    for n in range(config.num_layers):
        y = norm(x, weight("layers", "attention_norm", "scale", layer=n))
        q, k, v = (
            np.einsum("tf,fhd->thd", y, weight("layers", "attention", f"{p}_proj", "kernel", layer=n)) for p in "qkv"
        )
        q = rotate(norm(q, weight("layers", "attention", "q_norm", "scale", layer=n)))
        k = rotate(norm(k, weight("layers", "attention", "k_norm", "scale", layer=n)))
        k, v = (np.repeat(z, config.num_heads // config.num_kv_heads, axis=1) for z in (k, v))
        logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim)
        logits[:, ~np.tri(rows, dtype=bool)] = -np.inf
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        heads = np.einsum("hqk,khd->qhd", shares, v)
        x = x + np.einsum("thd,hdf->tf", heads, weight("layers", "attention", "o_proj", "kernel", layer=n))
        y = norm(x, weight("layers", "mlp_norm", "scale", layer=n))
        if config.moe is None:
            x = x + swiglu(y, *(weight("layers", "mlp", part, "kernel", layer=n) for part in ("gate", "up", "down")))
            continue
        router = y @ weight("layers", "mlp", "router", "kernel", layer=n)
        shares = np.exp(router - router.max(-1, keepdims=True))
        chosen = np.argsort(-shares, axis=-1, kind="stable")[:, : config.moe.experts_per_token]
        experts = [weight("layers", "mlp", part, layer=n) for part in ("gate", "up", "down")]
        for token, numbers in enumerate(chosen):
            factors = shares[token, numbers] / shares[token, numbers].sum()
            for factor, expert in zip(factors, numbers, strict=True):
                x[token] += factor * swiglu(y[token], *(part[expert] for part in experts))
    table = "embedding" if config.tied_embeddings else "head"
    return norm(x, weight("norm", "scale")) @ weight(table).T


LENGTHS = [
    [64],
    [1, 20, 3, 9, 1, 5],
    [40, 24],
    [],
]  # a full one, short ones and padding, cut inside a block, only padding


def random_params(config: Qwen3Config, spec: PoolSpec, mesh: jax.sharding.Mesh, seed: int = 0) -> tuple[Any, Any]:
    """(graph, params): every weight drawn anew, norms too, so that no factor is hidden by a one or a small number."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Qwen3(config, spec, mesh, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        if path[-1].key == "scale":
            return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        return (0.3 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return graph, jax.tree.map_with_path(draw, nnx.to_pure_dict(state))


def run(graph: Any, params: Any, batch: Packed) -> np.ndarray:
    """Logits of the first micro-step."""
    plans = jax.tree.map(lambda x: x[0], batch.plans)
    call = jax.jit(lambda params, tokens, positions, plans: nnx.merge(graph, params)(tokens, positions, plans))
    return np.asarray(call(params, batch.tokens[0], batch.positions[0], plans))


def batch_of(spec: PoolSpec, seed: int = 1, lengths: Sequence[Sequence[int]] = LENGTHS) -> Packed:
    tokens = np.random.default_rng(seed).integers(0, TINY.vocab_size, (len(lengths), spec.seq_len))
    return pack(lengths, tokens, spec)


def assert_logits_of_documents_alone(
    logits: np.ndarray, params: Any, batch: Packed, config: Qwen3Config, lengths: Sequence[Sequence[int]]
) -> None:
    """Logits of packed sequences equal those of each document alone, in float64. lengths: as the batch was packed."""
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            part = slice(start, start + length)
            expected = qwen3_logits(params, batch.tokens[0, row, part], config)
            np.testing.assert_allclose(logits[row, part], expected, rtol=0, atol=3e-5 * np.abs(expected).max())
            start += length
