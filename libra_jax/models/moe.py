"""Qwen3-MoE's mixture of experts: a router chooses k of E small SwiGLU networks for each token. No token is dropped.

Router as published (Qwen3 technical report, arXiv 2505.09388): softmax over all experts in float32, the k largest,
normalised to sum 1; no bias, no shared expert. Takes what the norm before it gives, gives the same shape, and with it
the sums that the load-balancing loss is made of, per rank, so that a layer exchanges nothing beyond its pool for them.

Experts are where tokens are, or tokens go where experts are (`MoEConfig.experts`), with the same result. What a layer
takes beside the parameters' shards, in bytes, with R = pool_size · cp ranks to a pool, Q pools, T tokens of a rank,
width D, expert width F, c bytes a number in the type of the computation, W = 3·E·D·F:

    gathered   weights c·W (twice while the compiler gathers a layer ahead), their gradients 4·W; moved: c·W a pass, to
               every rank from all ranks
    spread     weights c·W/R, their gradients 4·W/R; moved: c·W/R a pass, among ranks of different pools; a round's
               buffers, about 6·capacity·T·k·D·c (backward 10), inside the pool

and 4·T·D for sums. Either way a parameter with its gradient and AdamW's two moments takes 16 bytes, spread over all
R·Q ranks; where Q divides neither E/R nor D nor F, spread experts are the same in each pool, and take Q times that.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from libra_jax.attention import in_context
from libra_jax.exchange import POOL_AXES, resolve_transport
from libra_jax.models.axes import rank_axes, rank_count, token_spec
from libra_jax.models.expert_exchange import Layout, run_items, through_experts
from libra_jax.models.fsdp import gather_on_rank, spread_dimension, spread_spec
from libra_jax.models.grouped import Experts

if TYPE_CHECKING:
    from libra_jax.models.qwen3 import Qwen3Config

_INIT = nnx.initializers.normal(0.02)  # initializer_range of the published configurations


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Shape of the experts, and where they are."""

    num_experts: int
    """Experts of a layer (E)."""
    experts_per_token: int
    """Experts that each token goes through (k)."""
    intermediate_size: int
    """Width inside one expert (F)."""
    balance_loss: float = dataclasses.field(default=0.001, metadata={"may_change": True})
    """Weight of the load-balancing loss."""
    experts: Literal["gathered", "spread"] = "gathered"
    """Gathered layer by layer like other weights, or spread over a pool's ranks, and tokens travel. Same results."""
    capacity: float = dataclasses.field(default=0.25, metadata={"may_change": True})
    """Spread experts: what one round moves between two ranks at most, 1 being the even share of a rank's tokens. Less
    takes less memory and more rounds; no token is dropped either way."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) must be at most num_experts ({self.num_experts})"
            )
        if not (math.isfinite(self.balance_loss) and self.balance_loss >= 0):
            raise ValueError(f"balance_loss ({self.balance_loss}) must be a finite number, 0 or more")
        if self.experts not in ("gathered", "spread"):
            raise ValueError(f"experts ({self.experts!r}) must be 'gathered' or 'spread'")
        if not (math.isfinite(self.capacity) and self.capacity > 0):
            raise ValueError(f"capacity ({self.capacity}) must be a finite number greater than 0")


class Statistics(NamedTuple):
    """What the load-balancing loss is made of: sums over the real tokens of a rank, of one layer or of several.

    counts: (..., pools, dp, cp, E) int32, tokens that chose each expert. probabilities: the same shape, float32, sums
    of what the router gave each expert. tokens: (..., pools, dp, cp) int32. They add up, over ranks and micro-steps.
    Ranks of "tp" count as ranks of "cp".
    """

    counts: Int[Array, "*layers pools dp cp E"]
    probabilities: Float[Array, "*layers pools dp cp E"]
    tokens: Int[Array, "*layers pools dp cp"]


def load_balancing_loss(statistics: Statistics, *, across_layers: bool = False) -> Float[Array, ""]:
    """E · sum over experts of (counts / tokens) · (probabilities / tokens), over the tokens of all ranks; the mean over
    layers. 0 where there is no token.

    It is k where experts are used alike, and at most E: counts / tokens sums to k, as in transformers'
    `load_balancing_loss_func`. Counts have no gradient. Counting over all ranks, not over each sequence or rank, is
    what lets experts specialise (arXiv 2501.11873).
    across_layers: sum over layers first, as if expert e of all layers were one. That is what transformers reports as
        aux_loss; layers' opposite preferences then cancel. With one layer the two are the same.
    """
    ranks = tuple(range(-4, -1))
    counts, probabilities = (jnp.sum(x, axis=ranks) for x in (statistics.counts, statistics.probabilities))
    tokens = jnp.sum(statistics.tokens, axis=(-3, -2, -1))
    if across_layers:
        experts = counts.shape[-1]
        counts, probabilities = (jnp.sum(x.reshape(-1, experts), axis=0) for x in (counts, probabilities))
        tokens = jnp.sum(tokens)
    share = 1 / jnp.maximum(tokens, 1).astype(jnp.float32)[..., None]
    products = (counts.astype(jnp.float32) * share) * (probabilities * share)
    return counts.shape[-1] * jnp.mean(jnp.sum(products, axis=-1))


def expert_spec(shape: tuple[int, ...], config: MoEConfig, mesh: Mesh, first: int = 0) -> PartitionSpec:
    """How gate, up or down, shape (E, ., .), lies on the mesh; `first` dimensions (layers) come before these.

    Gathered experts lie over all ranks; spread ones over the pool's ranks by expert, and what a rank of the pool has
    over the pools. By expert where numbers allow it, so that what is gathered is in order as it comes; else along the
    longest dimension that ranks divide; else every rank keeps all.
    """
    axes, along = _gathers(shape, config, mesh)
    if config.experts == "gathered":
        dimensions = () if along is None else (*[None] * along, axes)
    elif along is None or along == 0:
        dimensions = ((*POOL_AXES, *axes) if along == 0 else POOL_AXES,)
    else:
        dimensions = (POOL_AXES, *[None] * (along - 1), axes)
    return PartitionSpec(*[None] * first, *dimensions)


def _gathers(shape: tuple[int, ...], config: MoEConfig, mesh: Mesh) -> tuple[tuple[str, ...], int | None]:
    """The mesh axes over which experts of this shape are gathered, and along which dimension (None: they are whole)."""
    if config.experts == "gathered":
        along = 0 if shape[0] % rank_count(mesh) == 0 else spread_dimension(shape, rank_count(mesh))
        return rank_axes(mesh), along
    pool, axes = mesh.shape["dp"] * mesh.shape["cp"], tuple(a for a in rank_axes(mesh) if a not in POOL_AXES)
    copies, own = rank_count(mesh) // pool, shape[0] // pool
    along = spread_dimension(shape[1:], copies)
    return axes, 0 if own % copies == 0 else None if along is None else along + 1


class MixtureOfExperts(nnx.Module):
    """A layer's MLP. Parameters, float32: router.kernel (D, E), gate and up (E, D, F), down (E, F, D).

    config: of the model, with `moe`. mesh: has the axes "pool", "dp" and "cp". Parameters are used as they lie on the
    mesh (`expert_spec`; the router's as `spread_spec` says): they are not to be gathered before.

    Raises ValueError when the pool's ranks do not divide the experts that are to be spread over them.
    """

    def __init__(self, config: Qwen3Config, mesh: Mesh, *, rngs: nnx.Rngs) -> None:
        moe = config.moe
        assert moe is not None
        check_experts(moe, mesh.shape["dp"], mesh.shape["cp"])
        self.config, self.mesh = moe, mesh
        outer, inner = (
            (moe.num_experts, *widths)
            for widths in ((config.hidden_size, moe.intermediate_size), (moe.intermediate_size, config.hidden_size))
        )
        self.router = nnx.Linear(config.hidden_size, moe.num_experts, use_bias=False, kernel_init=_INIT, rngs=rngs)
        self.gate = nnx.Param(_INIT(rngs.params(), outer, jnp.float32))
        self.up = nnx.Param(_INIT(rngs.params(), outer, jnp.float32))
        self.down = nnx.Param(_INIT(rngs.params(), inner, jnp.float32))

    def __call__(
        self, x: Float[Array, "sequences seq_len D"], real: Bool[Array, "sequences seq_len"]
    ) -> tuple[Float[Array, "sequences seq_len D"], Statistics]:
        """x: in the type of the computation. real: False for padding. Both lie as `token_spec` says.

        Returns the weighted sum of each token's experts, like x, 0 for padding, and the sums for
        `load_balancing_loss`. Padding may hold anything; it goes to no expert and changes nothing.
        """
        experts = Experts(self.gate[...], self.up[...], self.down[...])
        return mixture_of_experts(x, real, self.router.kernel[...], experts, self.config, self.mesh)


def mixture_of_experts(
    x: Float[Array, "sequences seq_len D"],
    real: Bool[Array, "sequences seq_len"],
    router: Float[Array, "D E"],
    experts: Experts,
    config: MoEConfig,
    mesh: Mesh,
    transport: str | None = None,
) -> tuple[Float[Array, "sequences seq_len D"], Statistics]:
    """See `MixtureOfExperts`. transport: for spread experts, "ragged" or "all_to_all"; None: what the device has.

    Raises ValueError when shapes do not belong together, or experts cannot be spread.
    """
    _check(x, real, router, experts, config)
    ranks = check_experts(config, mesh.shape["dp"], mesh.shape["cp"])
    specs = jax.tree.map(lambda weight: expert_spec(weight.shape, config, mesh), experts)
    tokens = math.prod(x.shape[:2]) // rank_count(mesh)
    gate, up, down = (_gathers(weight.shape, config, mesh) for weight in experts)
    layout = Layout(
        num_experts=config.num_experts,
        axes=gate[0],
        along=(gate[1], up[1], down[1]),
        ranks=ranks if config.experts == "spread" else None,
        run_items=run_items(config.capacity, tokens, config.experts_per_token, ranks),
        transport=_transport(transport, mesh, ranks),
    )
    router_along, axes, home = spread_dimension(router.shape, rank_count(mesh)), rank_axes(mesh), token_spec(mesh)

    def on_rank(x: jax.Array, real: jax.Array, router: jax.Array, shards: Experts) -> tuple[jax.Array, Statistics]:
        shape, real = x.shape, real.reshape(-1)
        x = jnp.where(real[:, None], x.reshape(real.size, -1), jnp.zeros((), x.dtype))
        kernel: Any = gather_on_rank(router, router_along, axes, jnp.float32)
        chosen, factors, probabilities = _route(x, kernel, config.experts_per_token)
        chosen = jnp.where(real[:, None], chosen, config.num_experts)
        out: Any = through_experts(x, chosen, factors, shards, layout)
        statistics = Statistics(
            jnp.zeros(config.num_experts, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop"),
            jnp.sum(jnp.where(real[:, None], probabilities, 0), axis=0),
            jnp.sum(real, dtype=jnp.int32),
        )
        return out.reshape(shape), jax.tree.map(lambda s: s[None, None, None], statistics)

    return jax.shard_map(
        on_rank,
        mesh=in_context(mesh),
        axis_names=set(axes),
        in_specs=(home, home, spread_spec(router.shape, mesh), specs),
        out_specs=(home, PartitionSpec("pool", "dp", home[1])),
        check_vma=False,
    )(x, real, router, experts)


def check_experts(config: MoEConfig, pool_size: int, cp: int) -> int:
    """Ranks of a pool. Raises ValueError unless they divide the experts that are to be spread over them."""
    ranks = pool_size * cp
    if config.experts == "spread" and config.num_experts % ranks:
        raise ValueError(
            f"num_experts ({config.num_experts}) must be a multiple of the ranks of a pool, pool_size * cp "
            f"({pool_size} * {cp} = {ranks}), to be spread over them: use experts='gathered', or another pool"
        )
    return ranks


def _transport(name: str | None, mesh: Mesh, ranks: int) -> str:
    if name == "ppermute":
        raise ValueError(
            "transport 'ppermute' cannot carry spread experts' tokens: pools go through different numbers of rounds, "
            "and XLA:CPU has all devices of the mesh meet at a permutation; use 'all_to_all', or None, which chooses"
        )
    return resolve_transport(name, mesh.devices.flat[0], ranks, all_at_once=False)


def _route(x: jax.Array, kernel: jax.Array, choices: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x (T, D), kernel (D, E) float32 -> chosen (T, k) int32, the lower number first where two are equal, factors
    (T, k) and probabilities (T, E) float32."""
    logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
    # Softmax of the largest logits is their probabilities, normalised; logits are also told apart where the
    # probabilities are too small for float32.
    largest, chosen = jax.lax.top_k(logits, choices)
    return chosen, jax.nn.softmax(largest, axis=-1), jax.nn.softmax(logits, axis=-1)


def _check(x: jax.Array, real: jax.Array, router: jax.Array, experts: Experts, config: MoEConfig) -> None:
    if x.ndim != 3 or real.shape != x.shape[:2] or real.dtype != jnp.bool_:
        raise ValueError(
            f"x {x.shape} must be (sequences, seq_len, D), and real {real.dtype}{real.shape} bool (sequences, seq_len)"
        )
    width, number, inner = x.shape[-1], config.num_experts, config.intermediate_size
    wanted = {
        "router": (width, number), "gate": (number, width, inner), "up": (number, width, inner),
        "down": (number, inner, width),
    }  # fmt: skip
    for (name, shape), weight in zip(wanted.items(), (router, *experts), strict=True):
        if weight.shape != shape:
            raise ValueError(f"{name} {weight.shape} must be {shape}: x and the config say so")
