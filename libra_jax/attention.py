"""The pooled attention operator: home tensors in, home tensors out, executed wherever the plan says.

Forward: blocks and pages travel to their executors, each wave's tiles run, outputs travel back. Backward: the same
road with the same plan; the output's cotangent and delta travel along, dq returns to its block's home and the parts of
dk and dv to their pages' homes, where they are summed in a fixed order. Residuals are the home tensors and the
executor's log-sum-exp; what was received is received again, so a layer keeps nothing of the exchange.

Letters as in `spec`, and: T tokens of one sequence on one rank, H query heads, "slots" are home blocks followed by
received ones (`tables.PlanTables`).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from libra_kernels import Launch, TileOptions, check_implementation, compute_capability_of, why_not_triton

from libra_jax import waves
from libra_jax.exchange import resolve_transport
from libra_jax.spec import PoolSpec, spec_differences
from libra_jax.tables import PlanTables, register_pytree, table_shapes
from libra_jax.waves import Static

register_pytree()

MESH_AXES = ("pool", "dp", "cp")
SEQUENCE_SPEC = PartitionSpec(("pool", "dp"), "cp")
"""How (sequences, seq_len, ...) arrays lie on the mesh: a sequence for each (pool, dp), its tokens over cp."""
PLAN_SPEC = PartitionSpec(*MESH_AXES)
"""How the tables of stacked plans lie on the mesh."""

OUT_NAME, LSE_NAME = "libra_out", "libra_lse"
"""`jax.checkpoint` names of the output and the log-sum-exp. A policy that saves both (for example
`jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)`) spares the second forward pass its exchange."""


def libra_attention(
    q: Float[Array, "sequences seq_len num_heads head_dim"],
    k: Float[Array, "sequences seq_len num_kv_heads head_dim"],
    v: Float[Array, "sequences seq_len num_kv_heads v_head_dim"],
    plans: PlanTables,
    *,
    spec: PoolSpec,
    mesh: Mesh,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
    transport: str | None = None,
    launches: Mapping[str, Launch] | None = None,
    heads_axis: str | None = None,
) -> Float[Array, "sequences seq_len num_heads v_head_dim"]:
    """Causal attention inside the documents of packed sequences, balanced over each pool's ranks.

    q, k, v: float32, bfloat16 or float16, all the same; sequences = pools * spec.pool_size in the order of the plans.
        Query head h uses key/value head h // (num_heads / num_kv_heads). Accumulation is float32.
    plans: `stack_plans` of the plans of exactly these sequences, one per pool. An ordinary argument: another batch's
        plans need no new compilation.
    mesh: has axes "pool", "dp" (of size spec.pool_size) and "cp" (of size spec.cp); others are left alone.
    scale: factor on the logits; None: head_dim ** -0.5.
    soft_cap: logits become soft_cap * tanh(logits / soft_cap).
    implementation: "triton", "xla" or "reference". None: "triton" where the program is compiled for NVIDIA GPUs and the
        kernels take these shapes and dtypes, otherwise "xla".
    transport: "ragged", "all_to_all" or "ppermute"; None: "ragged" on GPUs, elsewhere
        "ppermute" between two ranks and "all_to_all" among more, or inside another `jax.shard_map`. Same bits.
    launches: launch parameters of the Triton kernels in place of the table's, for "forward", "dq" or "dkv".
    heads_axis: mesh axis that heads are spread over (tensor parallelism). Then spec and plans are those of the heads of
        one rank, and q, k and v have as many times more heads as the axis is long; each rank works on its own heads
        with the same plan, and nothing crosses this axis. None: every rank has all heads.

    Returns the output in q's dtype. Padding gives zero output and zero gradient, whatever it holds. Logits of real rows
    have to be finite in float32. Differentiable once, in reverse mode, in q, k and v; works under jit,
    `jax.checkpoint` and `lax.scan`. With "xla" and "triton", output and dq have the same bits for every plan, pool
    size, transport and number of waves; dk and dv agree within rounding and are the same from run to run.

    Raises ValueError or TypeError, before anything runs, when plans, spec, mesh and arrays do not belong together.
    Arrays that are committed to one device are refused by jax: `jax.device_put` them with `SEQUENCE_SPEC` first.
    """
    _check(q, k, v, plans, spec, mesh, heads_axis)
    if launches is not None and not (isinstance(launches, Mapping) and all(isinstance(k, str) for k in launches)):
        raise TypeError(f"launches must map passes to libra_kernels.Launch, got {launches!r}")
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    check_implementation(implementation, device)
    options = TileOptions(
        scale=spec.head_dim**-0.5 if scale is None else _positive("scale", scale),
        soft_cap=None if soft_cap is None else _positive("soft_cap", soft_cap),
        compute_capability=compute_capability_of(device),
        launches=tuple(sorted((launches or {}).items())),
    )
    if implementation in (None, "triton"):
        _check_triton(implementation, options, q, v, spec)
    alone = in_context(mesh) is mesh  # inside another map (a pipeline's, say) ranks may do different things
    chosen = resolve_transport(transport, device, spec.ranks, all_at_once=alone)
    static = Static(spec, options, implementation, chosen)
    q, k, v, plans = _laid_out(q, k, v, plans, mesh, heads_axis)
    return _on_mesh(static, in_context(mesh), heads_axis)(q, k, v, plans)


def _check_triton(implementation: str | None, options: TileOptions, q: jax.Array, v: jax.Array, spec: PoolSpec) -> None:
    """Refuses `triton` by name where it cannot run; on a GPU that does without it, says so."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=q.dtype)
    blocks, pages = shape((1, spec.block, spec.group, spec.head_dim)), shape((1, spec.block, v.shape[-1]))
    reason = why_not_triton(options, blocks, pages)
    if reason is not None and implementation == "triton":
        raise ValueError(f"implementation 'triton' cannot run this: {reason}")
    if reason is not None and options.compute_capability is not None:
        warnings.warn(f"attention runs in plain XLA on this GPU, many times slower: {reason}", stacklevel=3)


def _laid_out(
    q: jax.Array, k: jax.Array, v: jax.Array, plans: PlanTables, mesh: Mesh, heads_axis: str | None
) -> tuple[jax.Array, jax.Array, jax.Array, PlanTables]:
    """The arguments as they must lie on the mesh. On Auto axes the compiler sees to that; on Explicit ones, which
    `jax.make_mesh` makes unless told otherwise, an array's sharding is part of its type and has to be stated."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = _axes(heads_axis)
    ours = {types[axis] for axis in axes}
    if len(ours) > 1:
        raise ValueError(f"the mesh axes {axes} must be of one type, got {tuple(types[axis] for axis in axes)}")
    if ours != {AxisType.Explicit}:
        return q, k, v, plans
    sequences, tables = NamedSharding(mesh, heads_spec(heads_axis)), NamedSharding(mesh, PLAN_SPEC)
    q, k, v = (jax.reshard(x, sequences) for x in (q, k, v))
    return q, k, v, jax.tree.map(lambda table: jax.reshard(jnp.asarray(table), tables), plans)


def in_context(mesh: Mesh) -> Any:
    """The mesh as a function inside `jax.shard_map` over other axes (a pipeline's, say) must name it; else `mesh`."""
    context = jax.sharding.get_abstract_mesh()
    return context if context.manual_axes else mesh


def heads_spec(heads_axis: str | None) -> PartitionSpec:
    """How (sequences, seq_len, heads, width) arrays lie on the mesh, with heads over `heads_axis`."""
    return SEQUENCE_SPEC if heads_axis is None else PartitionSpec(*SEQUENCE_SPEC, heads_axis)


def _axes(heads_axis: str | None) -> tuple[str, ...]:
    return MESH_AXES if heads_axis is None else (*MESH_AXES, heads_axis)


@functools.cache
def _on_mesh(static: Static, mesh: Mesh, heads_axis: str | None) -> Callable[..., jax.Array]:
    """The operator over the whole mesh. Jitted and kept, so that layers of one shape are traced once, and a call
    outside of jit is compiled as one program."""
    spec = heads_spec(heads_axis)
    return jax.jit(
        jax.shard_map(
            functools.partial(_on_rank, static=static),
            mesh=mesh,
            in_specs=(spec, spec, spec, PLAN_SPEC),
            out_specs=spec,
            axis_names=set(_axes(heads_axis)),  # other axes of the mesh take no part, in the sums of gradients neither
            check_vma=False,
        )
    )


def _on_rank(q: jax.Array, k: jax.Array, v: jax.Array, plans: PlanTables, *, static: Static) -> jax.Array:
    """One rank's share: q (1, T, H, D), k (1, T, K, D), v (1, T, K, E) -> (1, T, H, E)."""

    forward = _first_derivatives_only(functools.partial(waves.forward, static=static))
    backward = _first_derivatives_only(functools.partial(waves.backward, static=static))

    @jax.custom_vjp
    def attend(q, k, v, tables):
        return forward(q, k, v, tables)[0]

    def attend_forward(q, k, v, tables):
        out, lse = forward(q, k, v, tables)
        out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
        return out, (q, k, v, out, lse, tables)

    def attend_backward(residuals, d_out):
        return *backward(*residuals, d_out), None

    attend.defvjp(attend_forward, attend_backward)
    tables = jax.tree.map(lambda table: table[0, 0, 0], plans)
    return attend(q[0], k[0], v[0], tables)[None]


def _first_derivatives_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that says no when jax differentiates it. Rows travel as integers, which have no tangents: a second
    derivative would go on without the exchange and come out wrong."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals, tangents):
        raise TypeError(
            "libra_attention has first derivatives in reverse mode only (jax.grad, jax.vjp): second derivatives and "
            "forward mode (jax.jvp of jax.grad, jax.hessian) are not defined; use libra_kernels.reference_attention"
        )

    return guarded


def _positive(name: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} ({value}) must be a finite number greater than 0")
    return float(value)


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, plans: PlanTables, spec: PoolSpec, mesh: Mesh, heads_axis: str | None
) -> None:
    """Refuses what does not belong together; every message names both sides."""
    check_mesh(spec, mesh, heads_axis)
    if not isinstance(plans, PlanTables):
        raise TypeError(f"plans must be what stack_plans([plan, ...]) returns, got {type(plans).__name__}")
    if plans.spec != spec:
        raise ValueError(f"the plans were made for another PoolSpec: {spec_differences(plans.spec, spec)}")
    pools = mesh.shape["pool"]
    for name, shape in table_shapes(spec).items():
        table, want = getattr(plans, name), (pools, spec.pool_size, spec.cp, *shape)
        if np.shape(table) != want or getattr(table, "dtype", None) != np.int32:
            got = f"{getattr(table, 'dtype', type(table).__name__)} {np.shape(table)}"
            raise ValueError(
                f"the plans' table {name} is {got}; {pools} pools on the mesh and the spec want int32 {want}"
            )
    sequences = pools * spec.pool_size
    shards = 1 if heads_axis is None else mesh.shape[heads_axis]
    over = "" if heads_axis is None else f", heads over {shards} ranks of axis {heads_axis!r},"
    want_q = (sequences, spec.seq_len, shards * spec.num_heads, spec.head_dim)
    want_k = (sequences, spec.seq_len, shards * spec.num_kv_heads, spec.head_dim)
    for name, array, want in (("q", q, want_q), ("k", k, want_k), ("v", v, (*want_k[:3], spec.v_head_dim))):
        if array.ndim != 4 or any(w is not None and a != w for a, w in zip(array.shape, want, strict=True)):
            raise ValueError(
                f"{name} has shape {array.shape}; {pools} pools of {spec.pool_size} sequences{over} and the spec want "
                f"(sequences, seq_len, heads, width) {tuple('any' if w is None else w for w in want)}"
            )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"q, k and v must share one of float32, bfloat16 and float16, got {q.dtype}, {k.dtype} and {v.dtype}"
        )


def check_mesh(spec: PoolSpec, mesh: Mesh, heads_axis: str | None = None) -> None:
    """Raises ValueError unless the mesh has axes "pool", "dp" of size pool_size, "cp" of size cp, and `heads_axis`."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax Mesh with axes {MESH_AXES}, got {type(mesh).__name__}")
    if heads_axis in MESH_AXES:
        raise ValueError(f"heads_axis ({heads_axis!r}) must be another axis than {MESH_AXES}")
    for axis in _axes(heads_axis):
        if axis not in mesh.shape:
            raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, the operator needs {_axes(heads_axis)}")
    for axis, field, want in (("dp", "pool_size", spec.pool_size), ("cp", "cp", spec.cp)):
        if mesh.shape[axis] != want:
            raise ValueError(f"mesh axis {axis!r} has size {mesh.shape[axis]}, the spec has {field} {want}")
