"""Arithmetic on runs of neighbours, so that whole tables are written without a step for each block or page.

A pool of eight 256K sequences has 131,072 (block, kv head) pairs and as many page copies again, but only some thousand
runs of neighbours that go the same way. Sorting and matching is done run by run; `expand` writes out what is inside.
NumPy only.
"""

from __future__ import annotations

import numpy as np


def expand(first: np.ndarray, count: np.ndarray, step: np.ndarray | int = 1) -> np.ndarray:
    """[first[0], first[0] + step[0], ... (count[0] of them), first[1], ...] as int32."""
    total, before = int(count.sum()), np.cumsum(count) - count
    if isinstance(step, int):
        return np.arange(total, dtype=np.int32) * np.int32(step) + np.repeat(_int32(first - step * before), count)
    inside = np.arange(total, dtype=np.int32) - np.repeat(_int32(before), count)
    return inside * np.repeat(_int32(step), count) + np.repeat(_int32(first), count)


def stable_order(*keys: np.ndarray) -> np.ndarray:
    """Order that sorts by the last key, then the one before it, and so on; ties keep their place (as np.lexsort).

    Small non-negative integers only. NumPy sorts 16-bit integers by radix, many times faster than wider ones.
    """
    order = None
    for key in keys:
        narrow = key.astype(np.uint16) if key.size == 0 or key.max() < 2**16 else key
        step = np.argsort(narrow if order is None else narrow[order], kind="stable")
        order = step if order is None else order[step]
    assert order is not None
    return order


def starts_within(owner: np.ndarray, count: np.ndarray, owners: int) -> np.ndarray:
    """For runs of `count` items, in ascending order of their owners: where each begins among the items of its owner."""
    before = np.cumsum(count) - count
    total = np.bincount(owner, count, owners).astype(np.int64)
    return (before - (np.cumsum(total) - total)[owner]).astype(np.int32)


def covering(low: np.ndarray, high: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intervals [low, high) cut at `points`, ascending numbers that hold every low and high.

    -> (which interval, which element), pair by pair; element e is [points[e], points[e + 1]).
    """
    begin, end = np.searchsorted(points, low), np.searchsorted(points, high)
    count = end - begin
    return np.repeat(np.arange(low.size), count), expand(begin, count)


def rows(owner: np.ndarray, count: np.ndarray, values: np.ndarray, owners: int, size: int) -> np.ndarray:
    """(owners, size) int32 that begin with each owner's values, zeros after them.

    values: those of all owners, one after the other. owner, count: runs of `count` values in ascending order of owner.
    """
    table = np.zeros((owners, size), np.int32)
    total = np.bincount(owner, count, owners).astype(np.int64)
    end = np.cumsum(total)
    for number in np.flatnonzero(total):
        table[number, : total[number]] = values[end[number] - total[number] : end[number]]
    return table


def offsets(count: np.ndarray) -> np.ndarray:
    """(N, M) counts -> (N, M + 1) int32 offsets from 0."""
    out = np.zeros((count.shape[0], count.shape[1] + 1), np.int32)
    np.cumsum(count, axis=1, out=out[:, 1:])
    return out


def _int32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32, copy=False)
