"""Qwen3, the dense decoder, over packed sequences with pooled attention.

Takes token ids and per-document positions of packed sequences, gives logits or the loss; attention is
`LibraAttention`, run inside the scanned layer with the plan of the batch. As published (Qwen3 technical report, arXiv
2505.09388, and the reference implementation in Hugging Face transformers): RMSNorm before attention and before the MLP,
grouped-query attention with an RMSNorm on every query and key head, rotary positions, SwiGLU, no biases, embeddings
tied or not.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from libra_jax.attention import LSE_NAME, OUT_NAME, SEQUENCE_SPEC
from libra_jax.layers import LibraAttention, RMSNorm
from libra_jax.models.fsdp import gather
from libra_jax.models.vocabulary import chunked_cross_entropy_sum, look_up
from libra_jax.plan import PlanTables
from libra_jax.spec import PoolSpec

_INIT = nnx.initializers.normal(0.02)  # initializer_range of the published configurations


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Shape of a dense Qwen3."""

    vocab_size: int
    """Rows of the embedding table."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    num_layers: int
    """Decoder layers; they are stacked and scanned."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads; divide num_heads."""
    head_dim: int = 128
    """Width of one head."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary positions."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    tied_embeddings: bool = False
    """Use the embedding table as the output matrix, too."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Activations and matrix products; parameters, norms, softmax and loss stay float32."""
    remat: Literal["none", "full", "attention", "dots"] = "attention"
    """Kept by a layer for the backward pass: its input; with attention or dots, their results too; or all (none)."""
    loss_chunk: int = dataclasses.field(default=2048, metadata={"may_change": True})
    """Tokens of a rank whose logits are held at once."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise ValueError(f"{field.name} ({value}) must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary positions turn pairs of numbers")

    @property
    def num_parameters(self) -> int:
        """Trainable numbers, embeddings included."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size


QWEN3_8B = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32, num_kv_heads=8
)
"""Qwen3-8B as published: 8.19 billion parameters, embeddings not tied."""

_REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            dtype = jnp.dtype(config.compute_dtype)
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, kernel_init=_INIT, rngs=rngs)

        self.gate = linear(config.hidden_size, config.intermediate_size)
        self.up = linear(config.hidden_size, config.intermediate_size)
        self.down = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Qwen3Layer(nnx.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Qwen3Config, spec: PoolSpec, mesh: jax.sharding.Mesh, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.attention = LibraAttention(
            config.hidden_size,
            spec,
            mesh,
            rope_theta=config.rope_theta,
            norm_epsilon=config.norm_epsilon,
            dtype=config.compute_dtype,
            kernel_init=_INIT,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, plans: PlanTables) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), positions, plans)
        return x + self.mlp(self.mlp_norm(x))


class Qwen3(nnx.Module):
    """The decoder. Every parameter of `layers` has a leading layer axis.

    spec: the pool's shapes; heads and head_dim as in config. mesh: has the axes "pool", "dp" and "cp".
    Raises ValueError if spec and config disagree.
    """

    def __init__(self, config: Qwen3Config, spec: PoolSpec, mesh: jax.sharding.Mesh, *, rngs: nnx.Rngs) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(config, name) != getattr(spec, name):
                raise ValueError(f"{name} of the model ({getattr(config, name)}) and of the pool spec "
                                 f"({getattr(spec, name)}) must be equal")  # fmt: skip
        self.config = config
        self.mesh = mesh
        self.embedding = nnx.Param(_INIT(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(axis_size=config.num_layers, transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> Qwen3Layer:
            return Qwen3Layer(config, spec, mesh, rngs=rngs)

        self.layers = stack(rngs)
        self.norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        if not config.tied_embeddings:
            self.head = nnx.Param(_INIT(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))

    def __call__(
        self, tokens: Int[Array, "sequences seq_len"], positions: Int[Array, "sequences seq_len"], plans: PlanTables
    ) -> Float[Array, "sequences seq_len vocab"]:
        """Logits, float32. Arrays are sharded P(("pool", "dp"), "cp").

        positions: of each token in its own document. plans: of these sequences, leading axes (pools, dp, cp).
        """
        x = self.hidden(tokens, positions, plans)
        table = gather(self._output_table, self.mesh, x.dtype).astype(x.dtype)
        return jnp.einsum("std,vd->stv", x, table, preferred_element_type=jnp.float32)

    def loss_sum(
        self,
        tokens: Int[Array, "sequences seq_len"],
        targets: Int[Array, "sequences seq_len"],
        positions: Int[Array, "sequences seq_len"],
        plans: PlanTables,
    ) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """Sum of the losses of all tokens with a target (-1: none), and their number; see `cross_entropy_sum`."""
        x = self.hidden(tokens, positions, plans)
        return chunked_cross_entropy_sum(x, self._output_table, targets, self.mesh, chunk=self.config.loss_chunk)

    def hidden(
        self, tokens: Int[Array, "sequences seq_len"], positions: Int[Array, "sequences seq_len"], plans: PlanTables
    ) -> Float[Array, "sequences seq_len hidden"]:
        """What the output table multiplies: the last layer's output, normed, in the type of the computation."""
        dtype = jnp.dtype(self.config.compute_dtype)
        home = NamedSharding(self.mesh, SEQUENCE_SPEC)
        x = look_up(self.embedding[...], tokens, self.mesh, dtype)
        graph, weights = nnx.split(self.layers)

        def layer(x: jax.Array, weights: nnx.State) -> tuple[jax.Array, None]:
            # FSDP: weights are gathered where they are used; left alone, the compiler may move activations instead.
            weights = gather(weights, self.mesh, dtype)
            return jax.lax.with_sharding_constraint(nnx.merge(graph, weights)(x, positions, plans), home), None

        if self.config.remat != "none":
            layer = jax.checkpoint(layer, policy=_REMAT[self.config.remat])
        x, _ = jax.lax.scan(layer, x, weights)
        return self.norm(x)

    @property
    def _output_table(self) -> jax.Array:
        return (self.embedding if self.config.tied_embeddings else self.head)[...]
