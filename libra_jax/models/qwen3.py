"""Qwen3, dense and with a mixture of experts, over packed sequences with pooled attention.

Takes token ids and per-document positions of packed sequences, gives logits or the loss; attention is
`LibraAttention`, run inside the scanned layer with the plan of the batch. As published (Qwen3 technical report, arXiv
2505.09388, and the reference implementation in Hugging Face transformers): RMSNorm before attention and before the MLP,
grouped-query attention with an RMSNorm on every query and key head, rotary positions, SwiGLU or experts of it, no
biases, embeddings tied or not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from libra_jax.attention import LSE_NAME, OUT_NAME, SEQUENCE_SPEC, in_context
from libra_jax.layers import LibraAttention, RMSNorm
from libra_jax.models.axes import TENSOR_AXIS, tensor_ranks, token_spec
from libra_jax.models.fsdp import gather
from libra_jax.models.moe import MixtureOfExperts, MoEConfig, Statistics, load_balancing_loss
from libra_jax.models.vocabulary import chunked_cross_entropy_sum, look_up
from libra_jax.plan import PlanTables
from libra_jax.rope import YaRN
from libra_jax.spec import PoolSpec
from libra_jax.workload import PADDING

_INIT = nnx.initializers.normal(0.02)  # initializer_range of the published configurations


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Shape of a Qwen3."""

    vocab_size: int
    """Rows of the embedding table."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP; without one, in a mixture of experts, it is not used."""
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
    rope_scaling: YaRN | None = None
    """Frequencies for longer contexts than the weights were trained on."""
    moe: MoEConfig | None = None
    """Experts in the place of each layer's MLP; None: the dense model."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    tied_embeddings: bool = False
    """Use the embedding table as the output matrix, too."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Activations and matrix products; parameters, norms, softmax and loss stay float32."""
    remat: Literal["none", "full", "attention", "dots"] = "attention"
    """Kept by a layer for the backward pass: its input; with attention or dots, their results too; or all (none)."""
    z_loss: float = dataclasses.field(default=0.0, metadata={"may_change": True})
    """Weight of the mean of logsumexp(logits) ** 2, which keeps logits near 0."""
    loss_chunk: int = dataclasses.field(default=2048, metadata={"may_change": True})
    """Tokens of a rank whose logits are held at once."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise ValueError(f"{field.name} ({value}) must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0):
            raise ValueError(f"z_loss ({self.z_loss}) must be a finite number, 0 or more")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary positions turn pairs of numbers")

    @property
    def num_parameters(self) -> int:
        """Trainable numbers, embeddings included."""
        return self._parameters(1 if self.moe is None else self.moe.num_experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through, embeddings included."""
        return self._parameters(1 if self.moe is None else self.moe.experts_per_token)

    def _parameters(self, experts: int) -> int:
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads) + 2 * self.head_dim
        inner = self.intermediate_size if self.moe is None else self.moe.intermediate_size
        router = 0 if self.moe is None else self.hidden_size * self.moe.num_experts
        layer = attention + router + 3 * experts * self.hidden_size * inner + 2 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size


QWEN3_8B = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32, num_kv_heads=8
)
"""Qwen3-8B as published: 8.19 billion parameters, embeddings not tied."""
QWEN3_0_6B = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
    tied_embeddings=True,
)  # fmt: skip
"""Qwen3-0.6B as published: 0.60 billion parameters, embeddings tied."""
QWEN3_30B_A3B = Qwen3Config(
    vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32, num_kv_heads=4,
    moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=768),
)  # fmt: skip
"""Qwen3-30B-A3B as published: 30.5 billion parameters, 3.3 billion of them for a token."""
QWEN3_235B_A22B = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=94, num_heads=64, num_kv_heads=4,
    moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=1536),
)  # fmt: skip
"""Qwen3-235B-A22B as published: 235 billion parameters, 22 billion of them for a token."""

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
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)), where the MLP may be a mixture of experts."""

    def __init__(self, config: Qwen3Config, spec: PoolSpec, mesh: jax.sharding.Mesh, *, rngs: nnx.Rngs) -> None:
        self.mesh = mesh
        self.attention_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.attention = LibraAttention(
            config.hidden_size,
            spec,
            mesh,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            norm_epsilon=config.norm_epsilon,
            dtype=config.compute_dtype,
            kernel_init=_INIT,
            heads_axis=TENSOR_AXIS if TENSOR_AXIS in mesh.shape else None,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.mlp = SwiGLU(config, rngs=rngs) if config.moe is None else MixtureOfExperts(config, mesh, rngs=rngs)

    def __call__(
        self, x: jax.Array, positions: jax.Array, plans: PlanTables, real: jax.Array
    ) -> tuple[jax.Array, Statistics | None]:
        """x: lies as `token_spec` says. real: False for padding, (sequences, seq_len). The second is for
        `load_balancing_loss`."""
        mesh = in_context(self.mesh)
        home, whole = (NamedSharding(mesh, spec) for spec in (token_spec(mesh), SEQUENCE_SPEC))

        def with_all_tokens(part: Callable[[jax.Array], jax.Array], y: jax.Array) -> jax.Array:
            """A product that ranks of "tp" share by heads or features: each has its sequence's tokens, and their sums
            come back to the ranks that keep them."""
            y = part(jax.lax.with_sharding_constraint(y, whole))
            return jax.lax.with_sharding_constraint(y, home)

        x = x + with_all_tokens(lambda y: self.attention(y, positions, plans), self.attention_norm(x))
        if isinstance(self.mlp, SwiGLU):
            return x + with_all_tokens(self.mlp, self.mlp_norm(x)), None
        more, statistics = self.mlp(self.mlp_norm(x), real)
        return x + more, statistics


class Qwen3(nnx.Module):
    """The decoder. Every parameter of `layers` has a leading layer axis.

    spec: the pool's shapes; head_dim as in config, heads too. mesh: has the axes "pool", "dp" and "cp"; with an axis
    "tp" heads and features are spread over it, and spec has the heads of one of its ranks.
    Raises ValueError if spec and config disagree.
    """

    def __init__(self, config: Qwen3Config, spec: PoolSpec, mesh: jax.sharding.Mesh, *, rngs: nnx.Rngs) -> None:
        ranks = tensor_ranks(mesh)
        for name, shards in (("num_heads", ranks), ("num_kv_heads", ranks), ("head_dim", 1)):
            if getattr(config, name) != shards * getattr(spec, name):
                times = f", times {shards} ranks of axis 'tp'," if shards > 1 else ""
                raise ValueError(f"{name} of the model ({getattr(config, name)}) and of the pool spec "
                                 f"({getattr(spec, name)}{times}) must be equal")  # fmt: skip
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
        x, _ = self.hidden(tokens, positions, plans)
        table = gather(self._output_table, self.mesh, x.dtype).astype(x.dtype)
        return jnp.einsum("std,vd->stv", x, table, preferred_element_type=jnp.float32)

    def loss_sum(
        self,
        tokens: Int[Array, "sequences seq_len"],
        targets: Int[Array, "sequences seq_len"],
        positions: Int[Array, "sequences seq_len"],
        plans: PlanTables,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """What is minimised, as a sum over all tokens with a target (-1: none), and the sums it is made of.

        The sums: "loss", the cross-entropy, and "targets", the number of tokens; with a z-loss "z_loss", and with
        experts "balance_loss", both without their weights. All add up over micro-steps, so that a step's numbers are
        sums over targets: the load-balancing loss of a micro-step, over all of its tokens, counts as often as it has
        targets.
        """
        x, statistics = self.hidden(tokens, positions, plans)
        return self._sums(x, statistics, targets)

    def stage(
        self,
        x: Float[Array, "sequences seq_len hidden"],
        tokens: Int[Array, "sequences seq_len"],
        targets: Int[Array, "sequences seq_len"],
        positions: Int[Array, "sequences seq_len"],
        plans: PlanTables,
        first: Bool[Array, ""],
        last: Bool[Array, ""],
    ) -> tuple[Float[Array, "sequences seq_len hidden"], Float[Array, ""], dict[str, Array]]:
        """A stage of a pipeline, where the model holds that stage's layers: x through them, and its part of what
        `loss_sum` gives, which adds up over the stages. The first takes no x, but looks its tokens up; only the last
        has a loss of tokens."""
        dtype = jnp.dtype(self.config.compute_dtype)
        x = jax.lax.cond(first, lambda: look_up(self.embedding[...], tokens, self.mesh, dtype), lambda: x)
        x, statistics = self._through_layers(x, positions, plans)

        def of_tokens(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            return self._sums(self.norm(x), None, targets)

        def nothing(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(of_tokens, x))

        total, parts = jax.lax.cond(last, of_tokens, nothing, x)
        if self.config.moe is not None and statistics is not None:
            share = statistics.tokens.shape[0] / self.config.num_layers
            balance = share * load_balancing_loss(statistics) * jnp.sum(targets >= 0).astype(jnp.float32)
            total, parts = total + self.config.moe.balance_loss * balance, {**parts, "balance_loss": balance}
        return x, total, parts

    def _sums(
        self, x: jax.Array, statistics: Statistics | None, targets: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `loss_sum`. x: what the output table multiplies."""
        chunk = self.config.loss_chunk
        sums = chunked_cross_entropy_sum(x, self._output_table, targets, self.mesh, chunk=chunk)
        total, parts = sums.loss, {"loss": sums.loss, "targets": sums.targets}
        if self.config.z_loss:
            total, parts["z_loss"] = total + self.config.z_loss * sums.squares, sums.squares
        if self.config.moe is not None and statistics is not None:
            balance = load_balancing_loss(statistics) * sums.targets.astype(jnp.float32)
            total, parts["balance_loss"] = total + self.config.moe.balance_loss * balance, balance
        return total, parts

    def hidden(
        self, tokens: Int[Array, "sequences seq_len"], positions: Int[Array, "sequences seq_len"], plans: PlanTables
    ) -> tuple[Float[Array, "sequences seq_len hidden"], Statistics | None]:
        """What the output table multiplies: the last layer's output, normed, in the type of the computation. With it
        what the routers of all layers did, None in a dense model."""
        x = look_up(self.embedding[...], tokens, self.mesh, jnp.dtype(self.config.compute_dtype))
        x, statistics = self._through_layers(x, positions, plans)
        return self.norm(x), statistics

    def _through_layers(
        self, x: jax.Array, positions: jax.Array, plans: PlanTables
    ) -> tuple[jax.Array, Statistics | None]:
        dtype = jnp.dtype(self.config.compute_dtype)
        home = NamedSharding(in_context(self.mesh), token_spec(self.mesh))
        graph, weights = nnx.split(self.layers)
        real = (plans.first_visible < PADDING).reshape(positions.shape)

        def layer(x: jax.Array, weights: nnx.State) -> tuple[jax.Array, Statistics | None]:
            # FSDP: weights are gathered where they are used; left alone, the compiler may move activations instead.
            # Experts see to it themselves.
            experts = ("mlp",) if self.config.moe else ()
            parts = {name: part for name, part in weights.items() if name not in experts}
            weights = nnx.State({**weights, **gather(parts, self.mesh, dtype)})
            x, statistics = nnx.merge(graph, weights)(x, positions, plans, real)
            return jax.lax.with_sharding_constraint(x, home), statistics

        if self.config.remat != "none":
            layer = jax.checkpoint(layer, policy=_REMAT[self.config.remat])
        return jax.lax.scan(layer, x, weights)

    @property
    def _output_table(self) -> jax.Array:
        return (self.embedding if self.config.tied_embeddings else self.head)[...]
