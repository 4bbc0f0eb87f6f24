"""TAP, the tile planner: which rank of a pool executes which block of attention.

Takes the pages that each block visits and gives `executor (P, K, nb) int32` (see `assignments.py`), after Libra's
Tiled Attention Pooling (arXiv 2607.23250). Every rank has a target, a share of the pool's work (pages visited) in
proportion to its speed, and two steps bring it there:

1. `leaving`: work starts at home, and what is cheap there stays: blocks that see no further back than the rank
   before. Blocks that reach further leave, and so does what is above the target, whole heads before parts of heads.
2. `pour`: what left goes to the ranks below their target, heaviest lane first, each lane from its last block to its
   first, in pieces as long as a rank has work and room left for. A piece goes to the rank where a page of work costs
   the fewest bytes: a long piece uses the pages it needs for many blocks, and a rank of the lane's own CP group has
   some of its blocks and pages already.

Two sequences of 8 blocks on 4 ranks, 4 heads. In sequence 0 one document whose blocks visit 1, 2, .. 8 pages, in
sequence 1 eight documents of one block. At home the ranks visit 40, 104, 16 and 16 pages; the target is 44 each. Rank
1 sheds two heads whole and one block of a third. A head goes in one piece to each of ranks 2 and 3, and the block to
the rank that has room left:

    sequence 0:  [[0 0 0 0 2 2 2 2]        sequence 1:  [[2 2 2 2 3 3 3 3]
                  [0 0 0 0 3 3 3 3]                      [2 2 2 2 3 3 3 3]
                  [0 0 0 0 1 1 1 0]                      [2 2 2 2 3 3 3 3]
                  [0 0 0 0 1 1 1 1]]                     [2 2 2 2 3 3 3 3]]

    pages visited by ranks 0 to 3: 48, 44, 42, 42

Bytes are counted in pages: a page of keys and values that a rank has to fetch is 1, a query block that is executed
away from home is G (its way out and its output's way back).

Letters: P sequences, C ranks of a CP group, N = P * C ranks, K kv heads, G query heads that share one, nb blocks of a
sequence. A lane is one (sequence, kv head). A part is what one rank is home to: nb / C consecutive blocks of a lane.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from libra_jax.assignments import Policy, at_home, head_parallel, home_ranks, keep_padding_home, random_plan
from libra_jax.spec import PoolSpec

__all__ = ["Policy", "at_home", "head_parallel", "home_ranks", "keep_padding_home", "pooled", "random_plan"]


def pooled(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """The pooled plan. -> executor (P, K, nb) int32.

    first_page, num_pages: (P, nb) int, the pages first_page[p, b] .. b that block b of sequence p visits, and how
        many (0: the block is all padding and stays home). The same for every head.
    speed: (N,) float, relative; a rank with twice the speed gets twice the work.

    No rank's work is above its share by more than one block's, unless that needs more room than `spec.room` has. Then
    all shares are raised, first to 1.01 of what they were, until the plan fits, to within 5% of the least raise that
    does. If none does, the last try is returned as it is.
    """
    share = work_share(num_pages, spec, speed)

    def attempt(raised: float) -> tuple[np.ndarray, bool]:
        scarce = raised > 0.01  # the first raise is for a last run that no rank had room for
        target = (1 + raised) * share
        leaves = leaving(first_page, num_pages, spec, target, scarce)
        return pour(leaves, first_page, num_pages, spec, target, scarce)

    executor, fits = attempt(0.0)
    low, high = 0.0, 0.01
    while not fits and high < 2 * spec.pool_size:
        executor, fits = attempt(high)
        low, high = (low, high) if fits else (high, 2 * high)
    while fits and low and high - low > 0.05 * (1 + low):
        middle = (low + high) / 2
        better, better_fits = attempt(middle)
        if better_fits:
            executor, high = better, middle
        else:
            low = middle
    return executor


def work_share(num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """(N,) float: the pages that each rank should visit, all heads together, in proportion to its speed (N,)."""
    return spec.num_kv_heads * float(num_pages.sum(dtype=np.int64)) * speed / speed.sum()


def leaving(
    first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, target: np.ndarray, scarce: bool = False
) -> np.ndarray:
    """(P, K, nb) bool: the blocks that leave home. What stays is at most half a block more than the target (N,).

    Blocks that reach far back leave. Where more has to, blocks that reach back to the rank before go first, head by
    head, then the others, head by head. All ranks agree on the order of heads: their parts of a document that leave
    are in the same lanes, and can share the pages they need.

    scarce: there was no room for the plan without. A rank that keeps the second part of a long document reads the
    first for little work: the second part leaves with the rest.
    """
    P, C, K, N, width = spec.pool_size, spec.cp, spec.num_kv_heads, spec.ranks, spec.blocks_per_rank
    work = num_pages.astype(np.int64).reshape(N, width)
    pages = first_page.reshape(P, C, width)
    reach = (np.arange(C)[:, None] - pages // width).reshape(N, width)
    far = reach > 1
    if scarce:
        goes_on = np.zeros((P, C, width), bool)  # into the next part
        goes_on[:, :-1] = pages[:, :-1] == pages[:, 1:, :1]
        far |= (reach > 0) & goes_on.reshape(N, width)
    leaves = np.repeat(far[:, None], K, axis=1)  # (N, K, width)
    near = [np.where((reach > 0) & ~far, work, 0), np.where(reach > 0, 0, work)]
    excess = K * (near[0] + near[1]).sum(1) - target
    for stage in near:
        head = stage.sum(1, keepdims=True)  # (N, 1) work of one head
        goes = np.clip(excess[:, None] - np.arange(K) * head, 0, head)  # (N, K) how much of each head
        # Last block first, to the block that brings the rank nearest to its target.
        behind = stage[:, ::-1].cumsum(1)[:, ::-1] - 0.5 * stage
        leaves |= (stage > 0)[:, None] & (behind[:, None] <= goes[:, :, None])
        excess = excess - K * head[:, 0]
    return leaves.reshape(P, C, K, width).swapaxes(1, 2).reshape(P, K, C * width)


@dataclasses.dataclass
class _Ledger:
    """What every rank has taken on so far, (N,) each; the limits are its target and `spec.room`."""

    work_left: np.ndarray  # pages to visit until the target; negative above it
    blocks: np.ndarray  # query blocks received
    pages: np.ndarray  # pages received; one that two pieces of a lane need counts twice
    copies: np.ndarray  # page copies sent


class _Lane(NamedTuple):
    """The n blocks that leave one lane, in order."""

    group: np.ndarray  # (C,) ranks of the lane's CP group
    blocks: np.ndarray  # (n,)
    first_page: np.ndarray  # (n,)
    work: np.ndarray  # (n + 1,) pages visited by the blocks before


def pour(
    leaves: np.ndarray,
    first_page: np.ndarray,
    num_pages: np.ndarray,
    spec: PoolSpec,
    target: np.ndarray,
    scarce: bool = False,
) -> tuple[np.ndarray, bool]:
    """Gives the blocks that leave home (P, K, nb) bool to ranks below their target (N,).

    -> executor (P, K, nb) int32, and whether it fits `spec.room`; where it does not, some blocks are left at home.

    scarce: there was no room for the plan without. Choose by pages alone: they are what fills the room.
    """
    K, C = spec.num_kv_heads, spec.cp
    executor = np.repeat(home_ranks(spec)[:, None], K, axis=1)
    ledger = _kept(leaves, first_page, num_pages, spec, target)
    if (ledger.pages > spec.room.pages).any() or (ledger.copies > spec.room.sent_pages).any():
        return executor, False
    poured = np.where(leaves, num_pages[:, None], 0).sum(2)  # (P, K) work
    for number in np.argsort(-poured, axis=None, kind="stable")[: np.count_nonzero(poured)]:
        p, h = divmod(int(number), K)
        blocks = np.flatnonzero(leaves[p, h])
        work = np.concatenate([[0], np.cumsum(num_pages[p, blocks], dtype=np.int64)])
        lane = _Lane(p * C + np.arange(C), blocks, first_page[p, blocks], work)
        end = len(blocks)
        while end:
            piece = _best_piece(lane, end, 0 if scarce else spec.group, spec, ledger)
            if piece is None:
                return executor, False
            rank, start = piece
            executor[p, h, blocks[start:end]] = rank
            end = start
    return executor, True


def _kept(
    leaves: np.ndarray, first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, target: np.ndarray
) -> _Ledger:
    """The ledger before pouring: each rank executes the blocks it keeps, which see no further back than one part."""
    P, C, N, K, width = spec.pool_size, spec.cp, spec.ranks, spec.num_kv_heads, spec.blocks_per_rank
    heads = K - leaves.sum(1)  # (P, nb) heads of which the block stays
    work = (heads * num_pages).reshape(N, width).sum(1)
    # Of each head, the first block that stays and sees the part before reaches back furthest.
    begin = np.arange(C)[:, None] * width
    fetches = ((first_page.reshape(P, C, width) < begin) & (num_pages.reshape(P, C, width) > 0))[:, None]
    fetches = fetches & ~leaves.reshape(P, K, C, width)
    first = np.take_along_axis(first_page.reshape(P, 1, C, width), fetches.argmax(-1)[..., None], -1)[..., 0]
    pages = np.where(fetches.any(-1), begin[:, 0] - first, 0).sum(1)  # (P, C)
    copies = np.roll(pages, -1, axis=1)  # the part before sends them; the first part fetches nothing
    return _Ledger(target - work, np.zeros(N, np.int64), pages.reshape(N), copies.reshape(N))


def _best_piece(lane: _Lane, end: int, block_cost: float, spec: PoolSpec, ledger: _Ledger) -> tuple[int, int] | None:
    """Chooses who executes the blocks before `end`, and from which on, and books it. -> (rank, start).

    block_cost: what a block that moves costs, in pages.
    None: no rank has room.
    """
    room, start = spec.room, _starts(lane, end, spec, ledger)
    pages, moved = _traffic(lane, start, end, spec)
    fetched = pages.sum(1)
    can = (start < end) & (ledger.blocks + moved <= room.blocks) & (ledger.pages + fetched <= room.pages)
    can &= (ledger.copies[lane.group] + pages <= room.sent_pages).all(1)
    if not can.any():
        return None
    work = lane.work[end] - lane.work[start]
    cost = np.where(can, (fetched + block_cost * moved) / np.maximum(work, 1), np.inf)
    rank = int(np.lexsort((ledger.work_left, cost))[0])  # of several with equal cost the fullest
    ledger.work_left[rank] -= work[rank]
    ledger.blocks[rank] += moved[rank]
    ledger.pages[rank] += fetched[rank]
    ledger.copies[lane.group] += pages[rank]
    return rank, int(start[rank])


def _starts(lane: _Lane, end: int, spec: PoolSpec, ledger: _Ledger) -> np.ndarray:
    """(N,) where the longest piece up to `end` starts that each rank has work left for, to within half a block."""
    half_a_block = 0.5 * (lane.work[end] - lane.work[end - 1])
    start = np.searchsorted(lane.work, lane.work[end] - ledger.work_left - half_a_block)
    start = np.maximum(start, end - (spec.room.blocks - ledger.blocks))
    if (start >= end).all():  # nobody: the rank with the most work left takes one block
        return np.where(ledger.work_left == ledger.work_left.max(), end - 1, end)
    return np.minimum(start, end)


def _traffic(lane: _Lane, start: np.ndarray, end: int, spec: PoolSpec) -> tuple[np.ndarray, np.ndarray]:
    """What each rank would receive for its piece, from start (N,) up to `end`.

    -> pages (N, C) from each part of the lane, blocks (N,), none of either from itself. Pages between two documents of
    a piece count too: never less than the piece needs.
    """
    part = np.arange(spec.cp)
    part_begin, part_end = part * spec.blocks_per_rank, (part + 1) * spec.blocks_per_rank
    first = lane.first_page[np.minimum(start, end - 1)]
    pages = np.minimum(part_end, lane.blocks[end - 1] + 1) - np.maximum(part_begin, first[:, None])
    pages = np.maximum(pages, 0)
    pages[lane.group, part] = 0
    own_begin, own_end = np.searchsorted(lane.blocks, (part_begin, part_end))
    moved = end - start
    moved[lane.group] -= np.maximum(np.minimum(own_end, end) - np.maximum(own_begin, start[lane.group]), 0)
    return pages, moved
