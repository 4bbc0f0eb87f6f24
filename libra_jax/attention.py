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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from libra_kernels import (
    PADDING,
    Launch,
    TileOptions,
    Tiles,
    check_implementation,
    compute_capability_of,
    tile_backward,
    tile_forward,
    why_not_triton,
)

from libra_jax.exchange import Part, exchange, pack, resolve_transport, unpack, word_for
from libra_jax.spec import PoolSpec, spec_differences
from libra_jax.tables import PlanTables, register_pytree, table_shapes

register_pytree()

MESH_AXES = ("pool", "dp", "cp")
SEQUENCE_SPEC = PartitionSpec(("pool", "dp"), "cp")
"""How (sequences, seq_len, ...) arrays lie on the mesh: a sequence for each (pool, dp), its tokens over cp."""
PLAN_SPEC = PartitionSpec(*MESH_AXES)
"""How the tables of stacked plans lie on the mesh."""

OUT_NAME, LSE_NAME = "libra_out", "libra_lse"
"""`jax.checkpoint` names of the output and the log-sum-exp. A policy that saves both (for example
`jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)`) spares the second forward pass its exchange."""


class _Static(NamedTuple):
    """What the compiled program depends on besides shapes."""

    spec: PoolSpec
    options: TileOptions
    implementation: str | None
    transport: str


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
    transport: "all_to_all" or "ppermute"; None chooses. Same bits.
    launches: launch parameters of the Triton kernels in place of the table's, for "forward", "dq" or "dkv".

    Returns the output in q's dtype. Padding gives zero output and zero gradient, whatever it holds. Logits of real rows
    have to be finite in float32. Differentiable once, in reverse mode, in q, k and v; works under jit,
    `jax.checkpoint` and `lax.scan`. With "xla" and "triton", output and dq have the same bits for every plan, pool
    size, transport and number of waves; dk and dv agree within rounding and are the same from run to run.

    Raises ValueError or TypeError, before anything runs, when plans, spec, mesh and arrays do not belong together.
    Arrays that are committed to one device are refused by jax: `jax.device_put` them with `SEQUENCE_SPEC` first.
    """
    _check(q, k, v, plans, spec, mesh)
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
    static = _Static(spec, options, implementation, resolve_transport(transport))
    q, k, v, plans = _laid_out(q, k, v, plans, mesh)
    return _on_mesh(static, mesh)(q, k, v, plans)


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
    q: jax.Array, k: jax.Array, v: jax.Array, plans: PlanTables, mesh: Mesh
) -> tuple[jax.Array, jax.Array, jax.Array, PlanTables]:
    """The arguments as they must lie on the mesh. On Auto axes the compiler sees to that; on Explicit ones, which
    `jax.make_mesh` makes unless told otherwise, an array's sharding is part of its type and has to be stated."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    ours = {types[axis] for axis in MESH_AXES}
    if len(ours) > 1:
        raise ValueError(
            f"the mesh axes {MESH_AXES} must be of one type, got {tuple(types[axis] for axis in MESH_AXES)}"
        )
    if ours != {AxisType.Explicit}:
        return q, k, v, plans
    sequences, tables = NamedSharding(mesh, SEQUENCE_SPEC), NamedSharding(mesh, PLAN_SPEC)
    q, k, v = (jax.reshard(x, sequences) for x in (q, k, v))
    return q, k, v, jax.tree.map(lambda table: jax.reshard(jnp.asarray(table), tables), plans)


@functools.cache
def _on_mesh(static: _Static, mesh: Mesh) -> Callable[..., jax.Array]:
    """The operator over the whole mesh. Jitted and kept, so that layers of one shape are traced once, and a call
    outside of jit is compiled as one program."""
    return jax.jit(
        jax.shard_map(
            functools.partial(_on_rank, static=static),
            mesh=mesh,
            in_specs=(SEQUENCE_SPEC, SEQUENCE_SPEC, SEQUENCE_SPEC, PLAN_SPEC),
            out_specs=SEQUENCE_SPEC,
            axis_names=set(MESH_AXES),  # other axes of the mesh take no part, in the sums of gradients neither
            check_vma=False,
        )
    )


def _on_rank(q: jax.Array, k: jax.Array, v: jax.Array, plans: PlanTables, *, static: _Static) -> jax.Array:
    """One rank's share: q (1, T, H, D), k (1, T, K, D), v (1, T, K, E) -> (1, T, H, E)."""

    forward = _first_derivatives_only(functools.partial(_forward, static=static))
    backward = _first_derivatives_only(functools.partial(_backward, static=static))

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


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tables: PlanTables, static: _Static
) -> tuple[jax.Array, jax.Array]:
    """q (T, H, D), k (T, K, D), v (T, K, E) -> output (T, H, E), log-sum-exp (slots, B, G, 2) float32."""
    spec, room = static.spec, static.spec.room
    home = _home(q, k, v, tables, spec)
    word = word_for(q.dtype)
    block_rows, page_rows = pack([home.q, home.first], word), pack([home.k, home.v], word)
    received = _nothing_received(block_rows, page_rows, spec)

    slots = spec.home_blocks + (room.blocks if spec.ranks > 1 else 0)
    out = jnp.zeros((slots, *home.q.shape[1:-1], v.shape[-1]), q.dtype)
    lse = jnp.full((*out.shape[:-1], 2), -jnp.inf, jnp.float32)
    returned = jnp.zeros((spec.home_blocks, pack([out[:1]], word).shape[1]), word)
    for wave in range(spec.waves):
        x = _exchange_of(wave, spec)
        if x is not None and received is not None:
            parts = _dispatch(x, tables, block_rows, page_rows, received, spec)
            received = exchange(parts, transport=static.transport)
        q_all, first_all = _join([home.q, home.first], received[0] if received else None)
        k_all, v_all = _join([home.k, home.v], received[1] if received else None)
        tiles = _tiles(tables, wave, first_all)
        out, lse = tile_forward(
            q_all, k_all, v_all, tiles, out, lse, options=static.options, implementation=static.implementation
        )
        if x is not None:
            results = pack([out[spec.home_blocks :]], word)
            (returned,) = exchange([_return_blocks(x, tables, results, returned, spec)], transport=static.transport)
    if received is not None:
        out = _take_back(out[: spec.home_blocks], returned, tables)
    return _from_blocks(out, spec), lse


def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    tables: PlanTables,
    d_out: jax.Array,
    static: _Static,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients dq (T, H, D), dk (T, K, D), dv (T, K, E) in the inputs' dtype."""
    spec, room = static.spec, static.spec.room
    home = _home(q, k, v, tables, spec)
    d_out_home = _to_blocks(_zero_padding(d_out, tables), spec)
    delta = _row_dots(d_out_home, _to_blocks(out, spec), tables)
    block_parts = [home.q, home.first, d_out_home, delta]
    word = word_for(q.dtype)
    block_rows, page_rows = pack(block_parts, word), pack([home.k, home.v], word)
    received = _nothing_received(block_rows, page_rows, spec)

    page_slots = spec.home_blocks + (room.pages if spec.ranks > 1 else 0)
    dq = jnp.zeros((lse.shape[0], *home.q.shape[1:]), q.dtype)
    dk = jnp.zeros((page_slots, *home.k.shape[1:]), jnp.float32)
    dv = jnp.zeros((page_slots, *home.v.shape[1:]), jnp.float32)
    returned_blocks = jnp.zeros((spec.home_blocks, pack([home.q[:1]], word).shape[1]), word)
    returned_pages = jnp.zeros((room.sent_pages, page_rows.shape[1]), word)
    for wave in range(spec.waves):
        x = _exchange_of(wave, spec)
        if x is not None and received is not None:
            parts = _dispatch(x, tables, block_rows, page_rows, received, spec)
            received = exchange(parts, transport=static.transport)
        q_all, first_all, d_out_all, delta_all = _join(block_parts, received[0] if received else None)
        k_all, v_all = _join([home.k, home.v], received[1] if received else None)
        tiles = _tiles(tables, wave, first_all)
        dq, dk, dv = tile_backward(
            q_all, k_all, v_all, d_out_all, lse, delta_all, tiles, dq, dk, dv,
            options=static.options, implementation=static.implementation,
        )  # fmt: skip
        if x is not None:
            blocks = pack([dq[spec.home_blocks :]], word)
            pages = pack([d[spec.home_blocks :].astype(q.dtype) for d in (dk, dv)], word)
            returned_blocks, returned_pages = exchange(
                [
                    _return_blocks(x, tables, blocks, returned_blocks, spec),
                    Part(
                        pages, tables.return_pages, tables.return_page_offsets[x], tables.returned_page_offsets[x],
                        returned_pages, room.pair_pages,
                    ),
                ],
                transport=static.transport,
            )  # fmt: skip
    if received is not None:
        dq = _take_back(dq[: spec.home_blocks], returned_blocks, tables)
        parts = unpack(returned_pages, [home.k, home.v])
        dk, dv = _sum_at_home([dk[: spec.home_blocks], dv[: spec.home_blocks]], parts, tables)
    return (
        _from_blocks(dq, spec),
        _from_pages(dk.astype(k.dtype), spec),
        _from_pages(dv.astype(v.dtype), spec),
    )


class _Home(NamedTuple):
    """A rank's tensors as home slots: q (H', B, G, D), k and v (H', B, D or E), first (H', B), H' home blocks."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    first: jax.Array


def _home(q: jax.Array, k: jax.Array, v: jax.Array, tables: PlanTables, spec: PoolSpec) -> _Home:
    first = tables.first_visible.reshape(1, spec.blocks_per_rank, spec.block)
    first = jnp.broadcast_to(first, (spec.num_kv_heads, *first.shape[1:])).reshape(-1, spec.block)
    q, k, v = (_zero_padding(x, tables) for x in (q, k, v))
    return _Home(_to_blocks(q, spec), _to_pages(k, spec), _to_pages(v, spec), first)


def _zero_padding(x: jax.Array, tables: PlanTables) -> jax.Array:
    """(T, heads, width) with padding rows zeroed: pages are shared, and 0 * NaN would reach real rows."""
    return jnp.where((tables.first_visible < PADDING)[:, None, None], x, 0)


def _exchange_of(wave: int, spec: PoolSpec) -> int | None:
    """The exchange that feeds a wave; None for the first of several waves, and in a pool of one rank."""
    if spec.ranks == 1:
        return None
    x = wave - (spec.waves > 1)
    return x if x >= 0 else None


def _dispatch(
    x: int,
    tables: PlanTables,
    block_rows: jax.Array,
    page_rows: jax.Array,
    received: Sequence[jax.Array],
    spec: PoolSpec,
) -> list[Part]:
    """What exchange x brings to the executors: blocks and pages, added to what was received before."""
    return [
        Part(
            block_rows, tables.send_blocks, tables.send_block_offsets[x], tables.recv_block_offsets[x],
            received[0], spec.room.pair_blocks,
        ),
        Part(
            page_rows, tables.send_pages, tables.send_page_offsets[x], tables.recv_page_offsets[x],
            received[1], spec.room.pair_pages,
        ),
    ]  # fmt: skip


def _return_blocks(x: int, tables: PlanTables, results: jax.Array, returned: jax.Array, spec: PoolSpec) -> Part:
    """The way back of the blocks that exchange x brought: the dispatch's offsets, the other way round."""
    return Part(
        results, None, tables.recv_block_offsets[x], tables.send_block_offsets[x], returned, spec.room.pair_blocks
    )


def _nothing_received(block_rows: jax.Array, page_rows: jax.Array, spec: PoolSpec) -> list[jax.Array] | None:
    """Room for received blocks and pages, as rows; None in a pool of one rank, which needs no slots but its own."""
    if spec.ranks == 1:
        return None
    sizes = (spec.room.blocks, spec.room.pages)
    return [jnp.zeros((n, rows.shape[1]), rows.dtype) for n, rows in zip(sizes, (block_rows, page_rows), strict=True)]


def _join(home: Sequence[jax.Array], received: jax.Array | None) -> list[jax.Array]:
    """Home arrays, each followed by what was received of its kind."""
    if received is None:
        return list(home)
    return [jnp.concatenate([h, r]) for h, r in zip(home, unpack(received, home), strict=True)]


def _row_dots(a: jax.Array, b: jax.Array, tables: PlanTables) -> jax.Array:
    """Sums over the last axis of a * b in float32, for blocks (H', B, G, E) -> (H', B, G).

    On CPUs one block after the other: the order in which XLA:CPU adds, and whether it fuses multiply and add, follows
    from the shape, and must not depend on how many blocks a rank is home to (dq has the same bits on every mesh). The
    number of turns is read from the tables, because a loop that is known to turn once is unrolled into its
    surroundings. On GPUs a row is one warp's, whatever the number of rows, and thousands of turns would cost launches.
    """
    turns = tables.wave_offsets[0] + a.shape[0]  # the first offset is 0

    def in_turn(a: jax.Array, b: jax.Array, turns: jax.Array) -> jax.Array:
        def one_block(i: jax.Array, sums: jax.Array) -> jax.Array:
            row_a, row_b = (lax.dynamic_index_in_dim(x, i, 0, keepdims=False).astype(jnp.float32) for x in (a, b))
            return lax.dynamic_update_index_in_dim(sums, jnp.sum(row_a * row_b, axis=-1), i, 0)

        return lax.fori_loop(0, turns, one_block, jnp.zeros(a.shape[:-1], jnp.float32))

    def at_once(a: jax.Array, b: jax.Array, turns: jax.Array) -> jax.Array:
        return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1)

    return lax.platform_dependent(a, b, turns, cpu=in_turn, default=at_once)


def _tiles(tables: PlanTables, wave: int, first_visible: jax.Array) -> Tiles:
    start, stop = tables.wave_offsets[wave], tables.wave_offsets[wave + 1]
    return Tiles(tables.entries, tables.pages, first_visible, start, stop)


def _take_back(home: jax.Array, returned: jax.Array, tables: PlanTables) -> jax.Array:
    """Home results with those of the blocks that were executed elsewhere put in their slots."""
    position = jnp.arange(home.shape[0], dtype=jnp.int32)
    slot = jnp.where(position < tables.send_block_offsets[-1, -1], tables.send_blocks, home.shape[0])
    (results,) = unpack(returned, [home])
    return home.at[slot].set(results, mode="drop")


def _sum_at_home(home: Sequence[jax.Array], returned: Sequence[jax.Array], tables: PlanTables) -> list[jax.Array]:
    """Home partial gradients (float32) plus the returned ones of each page, one after the other in table order."""
    if returned[0].shape[0] == 0:
        return list(home)
    start, count = tables.sum_offsets[:-1], jnp.diff(tables.sum_offsets)

    def add_next(j: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        row = tables.sum_rows.at[start + j].get(mode="clip")
        more = (j < count)[:, None, None]
        return [
            s + jnp.where(more, r.at[row].get(mode="clip").astype(s.dtype), 0)
            for s, r in zip(sums, returned, strict=True)
        ]

    return lax.fori_loop(0, count.max(), add_next, list(home))


def _to_blocks(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(T, H, D) -> (K * blocks, B, G, D)"""
    x = x.reshape(spec.blocks_per_rank, spec.block, spec.num_kv_heads, spec.group, -1)
    return x.transpose(2, 0, 1, 3, 4).reshape(spec.home_blocks, spec.block, spec.group, -1)


def _from_blocks(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(K * blocks, B, G, D) -> (T, H, D)"""
    x = x.reshape(spec.num_kv_heads, spec.blocks_per_rank, spec.block, spec.group, -1)
    return x.transpose(1, 2, 0, 3, 4).reshape(spec.tokens_per_rank, spec.num_heads, -1)


def _to_pages(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(T, K, D) -> (K * blocks, B, D)"""
    x = x.reshape(spec.blocks_per_rank, spec.block, spec.num_kv_heads, -1)
    return x.transpose(2, 0, 1, 3).reshape(spec.home_blocks, spec.block, -1)


def _from_pages(x: jax.Array, spec: PoolSpec) -> jax.Array:
    """(K * blocks, B, D) -> (T, K, D)"""
    x = x.reshape(spec.num_kv_heads, spec.blocks_per_rank, spec.block, -1)
    return x.transpose(1, 2, 0, 3).reshape(spec.tokens_per_rank, spec.num_kv_heads, -1)


def _positive(name: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} ({value}) must be a finite number greater than 0")
    return float(value)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, plans: PlanTables, spec: PoolSpec, mesh: Mesh) -> None:
    """Refuses what does not belong together; every message names both sides."""
    check_mesh(spec, mesh)
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
    want_q = (sequences, spec.seq_len, spec.num_heads, spec.head_dim)
    want_k = (sequences, spec.seq_len, spec.num_kv_heads, spec.head_dim)
    for name, array, want in (("q", q, want_q), ("k", k, want_k), ("v", v, (*want_k[:3], spec.v_head_dim))):
        if array.ndim != 4 or any(w is not None and a != w for a, w in zip(array.shape, want, strict=True)):
            raise ValueError(
                f"{name} has shape {array.shape}; {pools} pools of {spec.pool_size} sequences and the spec want "
                f"(sequences, seq_len, heads, width) {tuple('any' if w is None else w for w in want)}"
            )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"q, k and v must share one of float32, bfloat16 and float16, got {q.dtype}, {k.dtype} and {v.dtype}"
        )


def check_mesh(spec: PoolSpec, mesh: Mesh) -> None:
    """Raises ValueError unless the mesh has axes "pool", "dp" of size pool_size and "cp" of size cp."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax Mesh with axes {MESH_AXES}, got {type(mesh).__name__}")
    for axis in MESH_AXES:
        if axis not in mesh.shape:
            raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, the operator needs {MESH_AXES}")
    for axis, field, want in (("dp", "pool_size", spec.pool_size), ("cp", "cp", spec.cp)):
        if mesh.shape[axis] != want:
            raise ValueError(f"mesh axis {axis!r} has size {mesh.shape[axis]}, the spec has {field} {want}")
