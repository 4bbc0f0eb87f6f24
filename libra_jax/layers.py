"""Pooled attention for flax: an `attention_fn` for its stock modules, the plan it reads, and Qwen3's attention layer.

`attention_fn` goes into `nnx.MultiHeadAttention` or `linen.MultiHeadDotProductAttention`; the rest of a model stays as
it is. A model's layers do not hand plans down, so `use_plan` says which one is read while the model is traced.
`LibraAttention` is the whole layer: projections, qk-norm and RoPE as in Qwen3 (arXiv 2505.09388).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from jax.core import Tracer
from jaxtyping import Array, Float, Int
from libra_kernels import Launch

from libra_jax.attention import libra_attention
from libra_jax.plan import Plan, PlanTables
from libra_jax.rope import YaRN, rotary
from libra_jax.spec import PoolSpec, spec_differences

_CONSTANT_PLANS_BEFORE_WARNING = 4

_plans: contextvars.ContextVar[tuple[PlanTables, ...]] = contextvars.ContextVar("libra_plans", default=())
# Part of the key of every jax cache (jit, scan, checkpoint, cond). Without it a function that jax has traced before
# would keep the plan of that trace: stale numbers, or a tracer that has left its own trace.
_trace_key = jax.make_user_context(())
_next_key = itertools.count(1)
_constant_plans = itertools.count(1)
_known_plans: dict[int, tuple[weakref.ref[PlanTables], int]] = {}


@contextlib.contextmanager
def use_plan(plans: PlanTables) -> Iterator[PlanTables]:
    """Says which plan `attention_fn` and `LibraAttention` read, while the model is traced or run in this thread.

    plans: what `stack_plans` returns, as arrays or, inside a jitted function, as the tracers of an argument. Make it
    an argument, like the batch that it belongs to, and enter `use_plan` inside:

        @jax.jit
        def loss(params, tokens, plans):
            with use_plan(plans):
                return model.apply(params, tokens).mean()

    Then one compilation serves every batch. Entered around a jitted function instead, the plan becomes a constant of
    the program: right as well, but each new plan compiles again (a warning says so at the fourth).

    Nests, also across layers of different specs (sliding-window and full ones, say): a layer reads the innermost
    plan that was made for its own spec. The plan before is restored on the way out, also after an error. Other
    threads do not see it. Under `jax.checkpoint`, `jax.lax.scan`, `nnx.remat` and the like the plan of the enclosing
    `use_plan` is read; no function that jax has cached with another plan is used again.

    Raises TypeError when `plans` is not a `PlanTables`.
    """
    if not isinstance(plans, PlanTables):
        way_out = ": join plans with stack_plans([plan, ...]) first" if isinstance(plans, Plan) else ""
        raise TypeError(f"use_plan needs PlanTables, got {type(plans).__name__}{way_out}")
    before = _plans.set((*_plans.get(), plans))
    try:
        with _trace_key((*_trace_key.value, _key(plans))):
            yield plans
    finally:
        _plans.reset(before)


def current_plans(spec: PoolSpec) -> PlanTables:
    """The innermost plan that was made for `spec`. Raises RuntimeError outside of `use_plan`, ValueError when every
    plan there is was made for another spec, with the fields that differ."""
    entered = _plans.get()
    for plans in reversed(entered):
        if plans.spec == spec:
            return plans
    if not entered:
        raise RuntimeError(
            "pooled attention was called outside of use_plan: enter `with libra_jax.use_plan(plans):` around the call "
            "of the model, inside the jitted function that has plans as an argument (flax's init traces the model too)"
        )
    differ = spec_differences(entered[-1].spec, spec)
    raise ValueError(f"the plan in use_plan was made for another PoolSpec than this attention's: {differ}")


def _key(plans: PlanTables) -> int:
    """A number for this plan in jax's caches: the same each time for arrays that are entered again."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(plans)):
        return next(_next_key)
    identity = id(plans)
    if identity not in _known_plans:
        forget = weakref.ref(plans, lambda _: _known_plans.pop(identity, None))
        _known_plans[identity] = (forget, next(_next_key))
        if next(_constant_plans) == _CONSTANT_PLANS_BEFORE_WARNING:
            warnings.warn(
                f"use_plan was entered with {_CONSTANT_PLANS_BEFORE_WARNING} different plans as arrays: each is a "
                f"constant of what is compiled under it, so every new one compiles again. Give the jitted function the "
                f"plans as an argument and enter use_plan inside it",
                stacklevel=4,
            )
    return _known_plans[identity][1]


def attention_fn(
    spec: PoolSpec,
    mesh: jax.sharding.Mesh,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
    transport: str | None = None,
    launches: Mapping[str, Launch] | None = None,
    heads_axis: str | None = None,
) -> AttentionFn:
    """The `attention_fn` that makes flax's attention modules pooled: causal inside each packed document.

    For `nnx.MultiHeadAttention` call the layer with `is_causal=True` and no mask; for
    `linen.MultiHeadDotProductAttention`, which has no such switch, with no mask. The plan is read from `use_plan`.
    spec: heads and head_dim as the module has them. Linen has as many key/value heads as query heads.
    scale, soft_cap, implementation, transport, launches: see `libra_attention`.
    heads_axis: see `libra_attention`; the module then has the heads of all ranks of this axis, spec those of one.

    Returns a callable that equals and hashes by its arguments, so modules that hold it stay comparable.
    """
    own = tuple(sorted((launches or {}).items()))
    return AttentionFn(spec, mesh, scale, soft_cap, implementation, transport, own, heads_axis)


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """See `attention_fn`."""

    spec: PoolSpec
    mesh: jax.sharding.Mesh
    scale: float | None = None
    soft_cap: float | None = None
    implementation: str | None = None
    transport: str | None = None
    launches: tuple[tuple[str, Launch], ...] = ()
    heads_axis: str | None = None

    @property
    def shards(self) -> int:
        """Ranks that the heads are spread over."""
        return 1 if self.heads_axis is None else self.mesh.shape[self.heads_axis]

    def __call__(
        self,
        query: Float[Array, "N S H D"],
        key: Float[Array, "N S K D"],
        value: Float[Array, "N S K E"],
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = True,
        input_positions: jax.Array | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> Float[Array, "N S H E"]:
        """Every keyword that flax passes is named: linen leaves out those that a signature does not name.

        Left unread, because they change nothing here: dropout_rng and broadcast_dropout (there is no dropout),
        precision and force_fp32_for_softmax (products accumulate, and the softmax is taken, in float32).
        is_causal: nnx passes its own, False unless the layer is called with True, and False is refused, because a
        layer without it sees later tokens. Linen passes none, and gets causal attention.

        Raises ValueError for what pooled attention does not do, with the way out, and for shapes and types that
        do not fit the spec or each other.
        """
        if key.shape[1:2] != query.shape[1:2]:
            raise ValueError(
                f"queries ({query.shape}) and keys ({key.shape}) differ in length: attention_fn is self-attention over "
                f"whole packed sequences; for decoding with a cache, or for cross-attention, give the module flax's "
                f"dot_product_attention as attention_fn (parameters stay the same)"
            )
        if mask is not None:
            raise ValueError(
                f"a dense mask of shape {mask.shape} was passed: attention_fn is causal and keeps packed documents "
                f"apart by the plan in use_plan. Drop mask=, and with nnx pass is_causal=True. Padding is what no "
                f"document length covers; a sliding window is PoolSpec(window=...)"
            )
        if bias is not None:
            raise ValueError(f"a bias of shape {bias.shape} was passed: attention_fn adds none. Use RoPE for positions")
        if not is_causal:
            raise ValueError(
                "is_causal is False: attention_fn is causal inside each document. Call nnx.MultiHeadAttention with "
                "is_causal=True; for attention that sees later tokens keep flax's dot_product_attention"
            )
        if dropout_rate > 0.0 and not deterministic:
            raise ValueError(
                f"dropout_rate is {dropout_rate} and deterministic is False: attention_fn drops no attention weights. "
                f"Set the module's dropout_rate=0.0 (dropout after the layer may stay), or pass deterministic=True"
            )
        if module is not None:
            raise ValueError("sow_weights is True: attention weights are never all there at once. Leave it False")
        if input_positions is not None:
            raise ValueError(
                "input_positions was passed: attention_fn does not rotate queries and keys. Apply RoPE to them before "
                "(libra_jax.rope.rotary), in a function that then calls this one, or use LibraAttention"
            )
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise ValueError("an einsum of its own was passed (qk_attn_weights_einsum_cls): attention_fn has no einsum")
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        self._check(query, key, value)
        return self.attend(query, key, value, current_plans(self.spec))

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, plans: PlanTables) -> jax.Array:
        """`libra_attention` with this object's options."""
        return libra_attention(
            query,
            key,
            value,
            plans,
            spec=self.spec,
            mesh=self.mesh,
            scale=self.scale,
            soft_cap=self.soft_cap,
            implementation=self.implementation,
            transport=self.transport,
            launches=dict(self.launches),
            heads_axis=self.heads_axis,
        )

    def _check(self, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
        spec = self.spec
        if not query.ndim == key.ndim == value.ndim == 4:
            raise ValueError(
                f"query {query.shape}, key {key.shape} and value {value.shape} must have 4 axes: (sequences, seq_len, "
                f"heads, head_dim)"
            )
        shards = self.shards
        kv_hint = " (linen has one key/value head a query head)" if key.shape[2] == query.shape[2] else ""
        for what, got, name, want in (
            ("tokens in a sequence", query.shape[1], "seq_len", spec.seq_len),
            ("query heads", query.shape[2], "num_heads", shards * spec.num_heads),
            ("key heads" + kv_hint, key.shape[2], "num_kv_heads", shards * spec.num_kv_heads),
            ("value heads", value.shape[2], "num_kv_heads", shards * spec.num_kv_heads),
            ("width of a query head", query.shape[3], "head_dim", spec.head_dim),
            ("width of a key head", key.shape[3], "head_dim", spec.head_dim),
        ):
            if got != want:
                times = f", times {shards} ranks of axis {self.heads_axis!r}" if "heads" in what and shards > 1 else ""
                raise ValueError(f"{what}: the module gives {got}, PoolSpec.{name} says {want}{times}")
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(f"query {query.dtype}, key {key.dtype} and value {value.dtype} must be of one dtype")


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, in float32 (arXiv 1910.07467); x keeps its dtype."""

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        param_dtype: Any = jnp.float32,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((num_features,), param_dtype), **scale_metadata)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale).astype(x.dtype)


class LibraAttention(nnx.Module):
    """Qwen3's self-attention, pooled: projections without bias, RMSNorm over each query and key head, RoPE, output.

    features: width of x and of the result.
    spec: heads, head widths, sequence and pool. mesh: with axes "pool", "dp" and "cp".
    rope_theta: base of the rotary frequencies; rope_scaling: for longer contexts. norm_epsilon: of both norms.
    dtype: type of the computation; None: spec.dtype. param_dtype: type of the parameters.
    kernel_metadata: of the query, key and value kernels, (features, heads, width); out_kernel_metadata: of the output
        kernel (heads, width, features); norm_metadata: of the norms' scales (width,). A key `out_sharding` with a
        PartitionSpec shards the parameter when the layer is built under `jax.set_mesh`.
    scale, soft_cap, implementation, transport, launches: see `libra_attention`.
    heads_axis: mesh axis that heads are spread over (tensor parallelism), see `libra_attention`; spec is then of the
        heads of one rank, and the layer has those of all of them.
    """

    def __init__(
        self,
        features: int,
        spec: PoolSpec,
        mesh: jax.sharding.Mesh,
        *,
        rope_theta: float = 1e6,
        rope_scaling: YaRN | None = None,
        norm_epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        out_kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        norm_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale: float | None = None,
        soft_cap: float | None = None,
        implementation: str | None = None,
        transport: str | None = None,
        launches: Mapping[str, Launch] | None = None,
        heads_axis: str | None = None,
        rngs: nnx.Rngs,
    ):
        if spec.head_dim % 2:
            raise ValueError(f"head_dim ({spec.head_dim}) must be even: RoPE turns pairs of elements")
        self.features, self.rope_theta, self.rope_scaling = features, rope_theta, rope_scaling
        self.dtype = jnp.dtype(spec.dtype if dtype is None else dtype)
        self.attention_fn = attention_fn(
            spec, mesh, scale=scale, soft_cap=soft_cap, implementation=implementation, transport=transport,
            launches=launches, heads_axis=heads_axis,
        )  # fmt: skip
        query_heads, kv_heads = (self.attention_fn.shards * n for n in (spec.num_heads, spec.num_kv_heads))

        def project(heads: int, width: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                features, (heads, width), kernel_metadata=kernel_metadata, use_bias=False, dtype=self.dtype,
                param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs,
            )  # fmt: skip

        self.q_proj = project(query_heads, spec.head_dim)
        self.k_proj = project(kv_heads, spec.head_dim)
        self.v_proj = project(kv_heads, spec.value_dim)
        self.o_proj = nnx.LinearGeneral(
            (query_heads, spec.value_dim), features, axis=(-2, -1), kernel_metadata=out_kernel_metadata,
            use_bias=False, dtype=self.dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs,
        )  # fmt: skip
        norm = {"epsilon": norm_epsilon, "param_dtype": param_dtype, "scale_metadata": norm_metadata}
        self.q_norm = RMSNorm(spec.head_dim, **norm)
        self.k_norm = RMSNorm(spec.head_dim, **norm)

    def __call__(
        self, x: Float[Array, "N S F"], positions: Int[Array, "N S"], plans: PlanTables | None = None
    ) -> Float[Array, "N S F"]:
        """x: (sequences, seq_len, features); positions: of each token in its own document, padding's do not matter;
        plans: None reads `use_plan`. Returns (sequences, seq_len, features) in the layer's dtype."""
        if x.ndim != 3 or x.shape[-1] != self.features:
            raise ValueError(f"x {x.shape} must be (sequences, seq_len, features) with features {self.features}")
        if positions.shape != x.shape[:2]:
            raise ValueError(f"positions {positions.shape} must have x's sequences and tokens {x.shape[:2]}")
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(f"positions ({positions.dtype}) must be whole numbers")
        q = rotary(self.q_norm(self.q_proj(x)), positions, self.rope_theta, self.rope_scaling)
        k = rotary(self.k_norm(self.k_proj(x)), positions, self.rope_theta, self.rope_scaling)
        v = self.v_proj(x)
        plans = current_plans(self.attention_fn.spec) if plans is None else plans
        return self.o_proj(self.attention_fn.attend(q, k, v, plans))
