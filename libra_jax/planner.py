"""TAP, the tile planner: which rank of a pool executes which block of attention.

Takes the pages that each block visits and gives `executor (P, K, nb) int32` (see `assignments.py`). Every rank gets
a target of work, in pages visited, that is proportional to its speed. Work starts at home. A rank above its target
sheds the rest, work that needs an exchange anyway first, whole heads before parts of heads; what was shed is poured,
lane by lane in long runs, into the ranks that have room. After Libra's Tiled Attention Pooling (arXiv 2607.23250).

Letters: P sequences, C ranks of a CP group, N = P * C ranks, K kv heads, nb blocks of a sequence. A lane is one
(sequence, kv head).
"""

from __future__ import annotations

import numpy as np

from libra_jax.assignments import Policy, at_home, head_parallel, home_ranks, keep_padding_home, random_plan
from libra_jax.spec import PoolSpec

__all__ = ["Policy", "at_home", "head_parallel", "home_ranks", "keep_padding_home", "pooled", "random_plan"]


def pooled(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """The pooled plan. -> executor (P, K, nb) int32.

    first_page, num_pages: (P, nb) int, the pages first_page[p, b] .. b that block b of sequence p visits, and how
        many (0: the block is all padding and stays home). The same for every head.
    speed: (N,) float, relative; a rank with twice the speed gets twice the work.
    """
    target = work_targets(num_pages, spec, speed)
    shed = shed_blocks(first_page, num_pages, spec, target)
    return pour(shed, num_pages, spec, target)


def work_targets(num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """(N,) float: the pages that each rank should visit, all heads together, in proportion to its speed (N,)."""
    return spec.num_kv_heads * float(num_pages.sum()) * speed / speed.sum()


def shed_blocks(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, target: np.ndarray) -> np.ndarray:
    """(P, K, nb) bool: the blocks that leave home, so that no rank keeps more than its target.

    Each rank sheds in this order: blocks with pages elsewhere, head by head, then the others, head by head. Ranks of
    a CP group agree on the order of heads, so what they shed of one document is in the same lanes.
    """
    P, C, N, K, width = spec.pool_size, spec.cp, spec.ranks, spec.num_kv_heads, spec.blocks_per_rank
    work = num_pages.astype(np.int64).reshape(P, C, width)
    fetches = (first_page.reshape(P, C, width) < (np.arange(C) * width)[:, None]) & (work > 0)
    stages = np.stack([np.where(fetches, work, 0), np.where(fetches, 0, work)], axis=2).reshape(N, 2, 1, width)
    queue = np.broadcast_to(stages, (N, 2, K, width)).reshape(N, 2 * K * width)  # the order of shedding
    excess = queue.sum(1) - target
    # Up to the block that brings the rank nearest to its target.
    shed = (queue > 0) & (2 * queue.cumsum(1) - queue <= 2 * excess[:, None])
    shed = shed.reshape(P, C, 2, K, width).any(2)
    return shed.transpose(0, 2, 1, 3).reshape(P, K, C * width)


def pour(shed: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, target: np.ndarray) -> np.ndarray:
    """Gives the blocks of `shed` (P, K, nb) bool to ranks below their target. -> executor (P, K, nb) int32.

    Lane by lane in order; a lane's run goes to one rank where one has room for it, else it is cut into as long
    pieces as there is room for. The lane's own CP group comes first.
    """
    P, K, C, N = spec.pool_size, spec.num_kv_heads, spec.cp, spec.ranks
    executor = np.repeat(home_ranks(spec)[:, None], K, axis=1)
    kept = np.where(shed, 0, num_pages[:, None].astype(np.int64)).sum(1)
    room = target - kept.reshape(N, -1).sum(1)
    for p, h in zip(*np.nonzero(shed.any(2)), strict=True):
        blocks = np.flatnonzero(shed[p, h])
        work = np.concatenate([[0], np.cumsum(num_pages[p, blocks], dtype=np.int64)])
        at, own = 0, slice(p * C, p * C + C)
        while at < len(blocks):
            rank = _choose(room, own, work[-1] - work[at])
            # Up to the block boundary nearest to the end of the room, at least one block.
            end = int(np.searchsorted(work, work[at] + room[rank]))
            end += -1 if work[min(end, len(blocks))] + work[end - 1] > 2 * (work[at] + room[rank]) else 0
            end = min(max(end, at + 1), len(blocks))
            executor[p, h, blocks[at:end]] = rank
            room[rank] -= work[end] - work[at]
            at = end
    return executor


def _choose(room: np.ndarray, own: slice, work: float) -> int:
    """The rank that a run of `work` pages starts on: the tightest that has room for all of it, else the roomiest."""
    for ranks in (own, slice(None)):
        fits = np.where(room[ranks] >= work, room[ranks], np.inf)
        if np.isfinite(fits.min()):
            return int(np.argmin(fits)) + (ranks.start or 0)
    mine = int(np.argmax(room[own])) + own.start
    return mine if room[mine] >= 0.25 * work else int(np.argmax(room))
