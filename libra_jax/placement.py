"""VRSP, Variance-Reduced Sequence Placement: which sequences of an optimizer step share a pool.

Takes what each sequence costs; gives every (micro-step, pool) slot exactly `pool_size` of them, so that pools that
run side by side cost the same. Longest first into the lightest slot with room, then slots are paired, heavy with
light, and each pair deals its sequences anew (Libra, arXiv 2607.23250; the second half is ours). Deterministic, and
the result depends on the costs, not on the order they are given in. Host side: NumPy only.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

_DEAL = 6  # sequences of each slot that a pair deals anew at once: 12 over 2 in 924 ways
_EFFORT = 4000  # pairs of slots dealt anew at most, over all micro-steps; about 5 us each
_ROUND = 10  # what a round of pairs costs besides, in pairs
_MANY_SLOTS = 2000  # from here on the lower bound leaves out all but its two simplest parts: they take slots^2 numbers
_CLOSE = 1e-4  # stop improving this near the lower bound: more would not be worth the time it takes


def place(
    work: Sequence[float] | np.ndarray, pool_size: int, pools: int | None = None, across: str = "all"
) -> np.ndarray:
    """Assign the sequences of one optimizer step to slots: (micro_steps, pools, pool_size) int64.

    work: (n,) what each sequence costs, in any unit, finite and not negative (`workload.sequence_seconds`).
    pools: pools that run side by side; None: n / pool_size, so that there is one micro-step.
    across: "all" makes every slot of the step equal, as in the paper (right for pipelines). "pools" puts sequences
        of like cost into one micro-step, and makes the pools of each micro-step equal (right without a pipeline).

    The result holds each of range(n) once. Slots and the sequences in them are in descending order of cost.
    Raises ValueError naming the rule and the numbers where it cannot be done.
    """
    values, pools = _check(work, pool_size, pools, across)
    order = np.argsort(-values, kind="stable")
    values = values[order]
    micro_steps = len(values) // (pools * pool_size)
    groups = 1 if across == "all" else micro_steps
    slots = [_balance(part, pool_size, _EFFORT // groups) + start for start, part in _split(values, groups)]
    return order[np.concatenate(slots)].reshape(micro_steps, pools, pool_size)


def slot_lower_bound(
    work: Sequence[float] | np.ndarray, pool_size: int, pools: int | None = None, across: str = "all"
) -> np.ndarray:
    """What the heaviest slot costs at least, per micro-step: (micro_steps,) float64, same arguments as `place`.

    No placement can do better than the mean of the slots, nor than the heaviest sequence + the pool_size - 1
    lightest. The same holds for the j heaviest: they lie in some s of the slots, filled up at best with the lightest,
    and the heaviest of these costs their mean or more. The bound is the largest of all these. With across="all" it
    is over all slots of the step, so every entry is the same; with "pools" over the micro-step's own. Above 2,000
    slots only the first two are used.
    """
    values, pools = _check(work, pool_size, pools, across)
    values = -np.sort(-values)
    micro_steps = len(values) // (pools * pool_size)
    groups = 1 if across == "all" else micro_steps
    bounds = [_lower_bound(part, pool_size) for _, part in _split(values, groups)]
    return np.repeat(bounds, micro_steps // groups)


def slot_imbalance(work: Sequence[float] | np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Heaviest over mean of the pools of each micro-step, (micro_steps,) float64; 1.0 is perfect.

    slots: what `place` gives, or any (micro_steps, pools, pool_size) indices into `work`. 1.0 where all work is 0.
    """
    sums = np.asarray(work, np.float64)[slots].sum(axis=-1)
    mean = sums.mean(axis=-1)
    return np.where(mean > 0, sums.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0)


def _check(work, pool_size: int, pools: int | None, across: str) -> tuple[np.ndarray, int]:
    """Validated (work as float64, pools)."""
    values = np.asarray(work, np.float64)
    if values.ndim != 1:
        raise ValueError(f"work must be one number a sequence, shape (n,), got shape {values.shape}")
    for name, value in {"pool_size": pool_size, "pools": 1 if pools is None else pools}.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1")
    if across not in ("all", "pools"):
        raise ValueError(f"across ({across!r}) must be 'all' or 'pools'")
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        entry = int(np.argmax(bad))
        raise ValueError(f"work of sequence {entry} ({values[entry]:g}) must be finite and not negative")
    unit, rule = (pool_size, "pool_size") if pools is None else (pools * pool_size, "pools * pool_size")
    if values.size == 0 or values.size % unit:
        product = f"({unit})" if pools is None else f"({pools} * {pool_size} = {unit})"
        raise ValueError(f"the number of sequences ({values.size}) must be a multiple of {rule} {product}, not 0")
    return values, values.size // pool_size if pools is None else pools


def _split(values: np.ndarray, groups: int):
    """Descending values in equal consecutive parts, each with where it starts."""
    size = len(values) // groups
    return [(start, values[start : start + size]) for start in range(0, len(values), size)]


def _lower_bound(values: np.ndarray, pool_size: int) -> float:
    """See `slot_lower_bound`; of descending values, over len(values) / pool_size slots."""
    count = len(values) // pool_size
    heaviest = np.cumsum(values)
    if count > _MANY_SLOTS:
        return float(max(heaviest[-1] / count, values[0] + values[len(values) - pool_size + 1 :].sum()))
    lightest = np.concatenate([[0.0], np.cumsum(values[::-1])])
    chosen, slots = np.arange(1, count + 1)[:, None], np.arange(1, count + 1)[None, :]
    filled = (heaviest[chosen - 1] + lightest[np.maximum(slots * pool_size - chosen, 0)]) / slots
    possible = (slots <= chosen) & (slots * pool_size >= chosen)
    groups = np.where(possible, filled, np.inf).min(axis=1)
    return float(max(heaviest[-1] / count, groups.max()))


def _balance(values: np.ndarray, pool_size: int, effort: int) -> np.ndarray:
    """Deal descending values into slots of pool_size: (slots, pool_size) positions, slots in descending order."""
    # Whole numbers whose sums are exact in any order, so that every host finds the same placement.
    bits = 52 - len(values).bit_length()
    values = np.rint(np.ldexp(values, bits - math.frexp(values[0])[1]))
    slots = _longest_first(values, pool_size)
    if pool_size > 2:  # with 1 or 2, longest first has no better
        slots = _improve(values, slots, _lower_bound(values, pool_size) * (1 + _CLOSE), effort)
    slots.sort(axis=1)
    return slots[np.lexsort((slots[:, 0], -values[slots].sum(axis=1)))]


def _longest_first(values: np.ndarray, pool_size: int) -> np.ndarray:
    """Longest first into the lightest slot with room (LPT with exact cardinality)."""
    slots: list[list[int]] = [[] for _ in range(len(values) // pool_size)]
    lightest = [(0.0, slot) for slot in range(len(slots))]
    for position, value in enumerate(values.tolist()):
        total, slot = heapq.heappop(lightest)
        slots[slot].append(position)
        if len(slots[slot]) < pool_size:
            heapq.heappush(lightest, (total + value, slot))
    return np.array(slots, np.int64)


@functools.cache
def _deals(size: int) -> np.ndarray:
    """Every way to choose `size` of 2 * size sequences, (ways, 2 * size): 1.0 where chosen, -1.0 where not."""
    chosen = np.array(list(itertools.combinations(range(2 * size), size)))
    table = np.full((len(chosen), 2 * size), -1.0)
    np.put_along_axis(table, chosen, 1.0, axis=1)
    return table


def _improve(values: np.ndarray, slots: np.ndarray, goal: float, effort: int) -> np.ndarray:
    """Pair slots, heavy with light, and deal each pair's sequences anew, as evenly as can be.

    With slots sorted by cost, slot i meets slot s - i; s falls while the heaviest stays as heavy, so that in the end
    it has met all others. A pair's heavier slot never grows. Slots of more than `_DEAL` sequences deal that many,
    evenly spread over their costs, others each time. Ends at `goal` for the heaviest slot, or out of effort.
    """
    count, pool_size = slots.shape
    size = min(pool_size, _DEAL)
    deals = _deals(size)
    stale = turn = 0
    while stale < count and effort > 0:
        slots = np.sort(slots, axis=1)  # positions in `values`, so in descending order of cost
        sums = values[slots].sum(axis=1)
        if sums.max() <= goal:
            break
        order = np.argsort(-sums, kind="stable")
        first = np.arange(count)
        second = (count - 1 - stale - first) % count
        heavy, light = order[first[first < second]], order[second[first < second]]
        effort -= _ROUND + len(heavy)
        picks = (np.arange(size) * pool_size // size + turn) % pool_size
        turn += 1
        both = np.concatenate([slots[heavy][:, picks], slots[light][:, picks]], axis=1)  # (pairs, 2 size)
        dealt = values[both]
        gap = sums[heavy] - sums[light]
        rest = gap - dealt[:, :size].sum(axis=1) + dealt[:, size:].sum(axis=1)  # heavy - light of what stays
        after = np.abs(deals @ dealt.T + rest)  # (ways, pairs)
        best = after.argmin(axis=0)
        better = after.min(axis=0) < gap
        chosen = deals[best] > 0
        for pair in np.flatnonzero(better):
            slots[heavy[pair], picks] = both[pair, chosen[pair]]
            slots[light[pair], picks] = both[pair, ~chosen[pair]]
        stale = 0 if values[slots].sum(axis=1).max() < sums.max() else stale + 1
    return slots
