"""Dense float32 attention: the oracle that the other implementations are held against. Small inputs only.

`reference_attention` works on whole packed sequences; `forward` and `backward` read the same tables as the tile
kernels but score every entry against every page and mask, with no loop and no online softmax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from libra_kernels.tiles import BLOCK, FIRST_PAGE, NUM_PAGES, PAGE_BASE, Q_SLOT, TileOptions, Tiles, cap_logits

_f32 = jnp.float32
_highest = lax.Precision.HIGHEST


def reference_attention(
    q: Float[Array, "N S H D"],
    k: Float[Array, "N S K D"],
    v: Float[Array, "N S K E"],
    segment_ids: Int[Array, "N S"],
    positions: Int[Array, "N S"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "N S H E"]:
    """Causal attention inside each document of packed sequences, computed densely in float32.

    Query head h uses key/value head h // (H / K). A query sees the keys of its own document at positions no later
    than its own, and with `window` at most that many, its own included.

    segment_ids: > 0 names a token's document; equal ids in a sequence are one document. 0 and less is padding, which
        sees nothing, is seen by nothing, and gives zero output and zero gradient, whatever values it holds.
    positions: order of the tokens in their document; None: order in the sequence. Padding positions do not matter.
    scale: factor on the logits; None: D ** -0.5.
    soft_cap: logits become soft_cap * tanh(logits / soft_cap).

    Returns (N, S, H, E) in q's dtype. Raises ValueError when shapes do not fit each other.
    """
    n, s, h, d = q.shape
    kv_heads = k.shape[2]
    if k.shape != (n, s, kv_heads, d) or v.shape[:3] != (n, s, kv_heads) or h % kv_heads:
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} must be (N, S, H, D), (N, S, K, D) and (N, S, K, E) with K "
            f"dividing H"
        )
    if segment_ids.shape != (n, s):
        raise ValueError(f"segment_ids {segment_ids.shape} must have q's sequences and tokens {(n, s)}")
    if positions is not None and positions.shape != (n, s):
        raise ValueError(f"positions {positions.shape} must have q's sequences and tokens {(n, s)}")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (n, s))
    real = segment_ids > 0
    query_position, key_position = positions[:, :, None], positions[:, None, :]
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & real[:, None, :] & (key_position <= query_position)
    if window is not None:
        visible &= query_position - key_position < window

    # Zeroed before any arithmetic: 0 * NaN would carry padding into real rows.
    qf, kf, vf = (jnp.where(real[:, :, None, None], x, 0).astype(_f32) for x in (q, k, v))
    qf = qf.reshape(n, s, kv_heads, h // kv_heads, d)
    logits = jnp.einsum("nqkgd,npkd->nkgqp", qf, kf, precision=_highest)
    logits = cap_logits(logits * _scale(scale, d), TileOptions(1.0, soft_cap))
    weights, _ = _masked_softmax(logits, visible[:, None, None])
    out = jnp.einsum("nkgqp,npke->nqkge", weights, vf, precision=_highest)
    # Padding rows are zero already; saying so here keeps their cotangent, whatever it holds, out of the gradients.
    out = jnp.where(real[:, :, None, None], out.reshape(n, s, h, v.shape[-1]), 0)
    return out.astype(q.dtype)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, out: jax.Array, lse: jax.Array, options: TileOptions
) -> tuple[jax.Array, jax.Array]:
    """See `api.tile_forward`."""
    entry_out, entry_lse = _dense(q, k, v, tiles, options)
    target = jnp.where(_active(tiles), tiles.entries[:, Q_SLOT], out.shape[0])
    out = out.at[target].set(entry_out.astype(out.dtype), mode="drop")
    return out, lse.at[target].set(entry_lse, mode="drop")


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    tiles: Tiles,
    dq: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
    options: TileOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.tile_backward`. Differentiates the dense forward pass; lse and delta are not needed."""
    del lse, delta
    slots = tiles.entries[:, Q_SLOT]
    active = _active(tiles)
    _, pull = jax.vjp(lambda q, k, v: _dense(q, k, v, tiles, options)[0], *(x.astype(_f32) for x in (q, k, v)))
    entry_d_out = jnp.where(active[:, None, None, None], d_out[slots], 0).astype(_f32)
    q_part, k_part, v_part = pull(entry_d_out)
    executed = jnp.zeros((q.shape[0],), bool).at[jnp.where(active, slots, q.shape[0])].set(True, mode="drop")
    dq = jnp.where(_longer(executed, dq)[:, None, None, None], _longer(q_part.astype(dq.dtype), dq), dq)
    return dq, dk + _longer(k_part, dk), dv + _longer(v_part, dv)


def _longer(part: jax.Array, whole: jax.Array) -> jax.Array:
    """With zeros for the slots that results have beyond those that were read."""
    return jnp.pad(part, [(0, whole.shape[0] - part.shape[0]), *[(0, 0)] * (part.ndim - 1)])


def _active(tiles: Tiles) -> jax.Array:
    index = jnp.arange(tiles.entries.shape[0], dtype=jnp.int32)
    return (index >= tiles.start) & (index < tiles.stop)


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, options: TileOptions) -> tuple[jax.Array, jax.Array]:
    """Output (X, B, G, E) and log-sum-exp (X, B, G, 2) of every entry, float32; entries that do not run see nothing."""
    block = q.shape[1]
    entries, table = tiles.entries, jnp.arange(tiles.pages.shape[0], dtype=jnp.int32)
    step = table[None, :] - entries[:, PAGE_BASE, None]
    listed = (step >= 0) & (step < entries[:, NUM_PAGES, None]) & _active(tiles)[:, None]
    number = jnp.where(listed, entries[:, FIRST_PAGE, None] + step, -1)
    # (X, K): the number of the page that lies in each slot, for this entry; -1 where the entry does not visit it.
    page_number = jnp.full((entries.shape[0], k.shape[0]), -1, jnp.int32).at[:, tiles.pages].max(number)
    offset = jnp.arange(block, dtype=jnp.int32)
    key = page_number[:, :, None] * block + offset[None, None, :]
    query = entries[:, BLOCK, None] * block + offset[None, :]
    first = tiles.first_visible[entries[:, Q_SLOT]]
    key, first, query = key[:, None], first[:, :, None, None], query[:, :, None, None]
    visible = (key >= first) & (key <= query)
    visible &= (page_number >= 0)[:, None, :, None]
    # What is not visited may hold anything, and 0 * NaN is NaN.
    visited = (page_number >= 0).any(axis=0)[:, None, None]
    k, v = jnp.where(visited, k, 0), jnp.where(visited, v, 0)
    q_entries = jnp.where(_active(tiles)[:, None, None, None], q[entries[:, Q_SLOT]], 0).astype(_f32)
    logits = jnp.einsum("xigd,kjd->xgikj", q_entries, k.astype(_f32), precision=_highest) * options.scale
    shape = logits.shape
    logits = cap_logits(logits, options).reshape(*shape[:3], -1)
    weights, lse = _masked_softmax(logits, visible[:, None].reshape(shape[0], 1, shape[2], -1))
    out = jnp.einsum("xgikj,kje->xige", weights.reshape(shape), v.astype(_f32), precision=_highest)
    return out, lse.transpose(0, 2, 1, 3)


def _masked_softmax(logits: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the visible last axis, and its log-sum-exp in two parts (..., 2) as `api.tile_forward` has them;
    zeros and -inf for a row that sees nothing."""
    masked = jnp.where(visible, logits, -jnp.inf)
    top = lax.stop_gradient(masked.max(axis=-1, keepdims=True))
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.where(visible, jnp.exp(masked - shift), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    empty = total == 0.0
    safe_total = jnp.where(empty, 1.0, total)
    return weights / safe_total, jnp.concatenate([top, jnp.log(safe_total)], axis=-1)


def _scale(scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if scale is None else scale
