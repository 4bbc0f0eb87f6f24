"""Causal attention over packed sequences in float64 NumPy, written from the definition and sharing no code with the
product: what every other implementation is held against.

Token i may see token j when both carry the same segment id (not the padding id), j is not later than i, and, with a
window W, i - j < W. Everything is dense and loops over sequences and heads; small inputs only.

Letters: N sequences, S tokens in one, H query heads, K key/value heads, D width of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Attention(NamedTuple):
    """Output (N, S, H, E), log-sum-exp (N, S, H) and, when a cotangent was given, the gradients; all float64."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None


def segments(lengths: Sequence[Sequence[int]], seq_len: int) -> np.ndarray:
    """(N, S) int32 segment ids: documents numbered from 1 in each sequence, then padding 0."""
    ids = np.zeros((len(lengths), seq_len), np.int32)
    for row, documents in zip(ids, lengths, strict=True):
        row[: sum(documents)] = np.repeat(np.arange(len(documents)) + 1, documents)
    return ids


def restarting_positions(segment_ids: np.ndarray) -> np.ndarray:
    """(N, S) int32: each token's place in its run of equal ids, from 0."""
    positions = np.zeros(segment_ids.shape, np.int32)
    for ids, row in zip(segment_ids, positions, strict=True):
        for t in range(1, len(ids)):
            row[t] = row[t - 1] + 1 if ids[t] == ids[t - 1] else 0
    return positions


def visibility(segment_ids: np.ndarray, window: int | None = None, padding_id: int = 0) -> np.ndarray:
    """(N, S, S) bool: may query i (second axis) see key j (third)?"""
    i, j = np.indices((segment_ids.shape[1],) * 2)
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = same & (segment_ids != padding_id)[:, :, None] & (j <= i)
    return visible if window is None else visible & (i - j < window)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segment_ids: np.ndarray,
    cotangent: np.ndarray | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    padding_id: int = 0,
) -> Attention:
    """The definition. q (N, S, H, D), k (N, S, K, D), v (N, S, K, E), cotangent (N, S, H, E), segment_ids (N, S).

    Query head h reads key/value head h // (H / K). Padding rows are taken as zeros whatever they hold; their output
    and gradients are zero and their log-sum-exp is -inf.
    """
    real = (segment_ids != padding_id)[:, :, None, None]
    q, k, v = (np.where(real, x.astype(np.float64), 0.0) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    visible = visibility(segment_ids, window, padding_id)
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    if cotangent is not None:
        cotangent = np.where(real, cotangent.astype(np.float64), 0.0)
    for n, h in np.ndindex(q.shape[0], q.shape[2]):
        head, rows = h // group, visible[n].any(axis=1)
        logits = q[n, :, h] @ k[n, :, head].T * scale
        slope = np.ones_like(logits)
        if soft_cap is not None:
            squashed = np.tanh(logits / soft_cap)
            logits, slope = soft_cap * squashed, 1.0 - squashed**2
        logits = np.where(visible[n], logits, -np.inf)
        top = np.where(rows, logits.max(axis=1, initial=-np.inf), 0.0)
        weights = np.exp(logits - top[:, None])
        total = weights.sum(axis=1)
        lse[n, rows, h] = top[rows] + np.log(total[rows])
        weights /= np.where(rows, total, 1.0)[:, None]
        out[n, :, h] = weights @ v[n, :, head]
        if cotangent is not None:
            d_out = cotangent[n, :, h]
            d_weights = d_out @ v[n, :, head].T
            # Softmax: dL/dlogit = weight * (dL/dweight - sum over keys of weight * dL/dweight).
            d_logits = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True)) * slope * scale
            dq[n, :, h] = d_logits @ k[n, :, head]
            dk[n, :, head] += d_logits.T @ q[n, :, h]
            dv[n, :, head] += weights.T @ d_out
    return Attention(out, lse) if cotangent is None else Attention(out, lse, dq, dk, dv)
