"""TAP, the tile planner: which rank of a pool executes which block of attention.

Takes the pages that each block visits and gives `executor (P, K, nb) int32` (see `assignments.py`), after Libra's
Tiled Attention Pooling (arXiv 2607.23250). Every rank has a target, a share of the pool's work (pages visited) in
proportion to its speed, and two steps bring it there:

1. `leaving`: work starts at home, and what is cheap there stays: blocks that see no further back than the rank
   before. Blocks that reach further leave, and so does what is above the target, whole heads before parts of heads.
2. `pour`: what left goes to the ranks below their target, heaviest lane first, each lane from its last block to its
   first, in pieces as long as a rank has work and room left for; first to ranks of the lane's own node, as much as
   they can take, then what is left to other nodes. A piece goes to the rank where a page of work costs the fewest
   seconds of exchange: a long piece uses the pages it needs for many blocks, a rank of the lane's own CP group has
   some of its blocks and pages already, wires inside a node are faster than those between nodes (`Links`), and where
   relays pass pages on (`PoolSpec.ranks_per_node`) what has come to a node once is cheap for all of it.

Two sequences of 8 blocks on 4 ranks, 4 heads. In sequence 0 one document whose blocks visit 1, 2, .. 8 pages, in
sequence 1 eight documents of one block. At home the ranks visit 40, 104, 16 and 16 pages; the target is 44 each. Rank
1 sheds two heads whole and one block of a third. A head goes in one piece to each of ranks 2 and 3, and the block to
the rank that has room left:

    sequence 0:  [[0 0 0 0 2 2 2 2]        sequence 1:  [[2 2 2 2 3 3 3 3]
                  [0 0 0 0 3 3 3 3]                      [2 2 2 2 3 3 3 3]
                  [0 0 0 0 1 1 1 0]                      [2 2 2 2 3 3 3 3]
                  [0 0 0 0 1 1 1 1]]                     [2 2 2 2 3 3 3 3]]

    pages visited by ranks 0 to 3: 48, 44, 42, 42

Costs are counted in pages of keys and values that cross from node to node: one that does is 1, a query block that is
executed away from home is G (its way out and its output's way back), and what stays inside a node counts as much less
as its wires are faster.

Letters: P sequences, C ranks of a CP group, N = P * C ranks, K kv heads, G query heads that share one, nb blocks of a
sequence. A lane is one (sequence, kv head). A part is what one rank is home to: nb / C consecutive blocks of a lane.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from libra_jax.assignments import Policy, at_home, head_parallel, home_ranks, keep_padding_home, random_plan
from libra_jax.links import Links
from libra_jax.spec import PoolSpec

__all__ = ["Policy", "at_home", "head_parallel", "home_ranks", "keep_padding_home", "pooled", "random_plan"]


def pooled(
    first_page: np.ndarray,
    num_pages: np.ndarray,
    spec: PoolSpec,
    speed: np.ndarray,
    *,
    raised: float = 0.0,
    links: Links | None = None,
) -> np.ndarray:
    """The pooled plan. -> executor (P, K, nb) int32.

    first_page, num_pages: (P, nb) int, the pages first_page[p, b] .. b that block b of sequence p visits, and how
        many (0: the block is all padding and stays home). The same for every head.
    speed: (N,) float, relative; a rank with twice the speed gets twice the work.
    raised: targets are 1 + raised shares: less has to move, and the slowest rank takes so much longer.
    links: what moving costs inside a node and between nodes; None is `Links()`. Where the spec has relays, it says
        which ranks share a node.

    No rank's work is above its target by more than one block's, unless that needs more room than `spec.room` has.
    Then all targets are raised, first to 1.01 of what they were, until the plan fits, to within 5% of the least raise
    that does. If none does, the last try is returned as it is.
    """
    links = Links() if links is None else links
    share = work_share(num_pages, spec, speed)

    def attempt(more: float) -> tuple[np.ndarray, bool]:
        scarce = more > 0.01  # the first raise is for a last run that no rank had room for
        target = (1 + raised + more) * share
        leaves = leaving(first_page, num_pages, spec, target, scarce)
        return pour(leaves, first_page, num_pages, spec, target, links, scarce)

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
    node_left: np.ndarray  # the same, as far as it is positive, of all ranks to which relays of the rank's node pass on
    blocks_left: np.ndarray  # query blocks that may still be received
    pages_left: np.ndarray  # pages that may still be received; one that two pieces of a lane need counts twice
    copies_left: np.ndarray  # page copies that may still be sent from home

    def take(self, rank: int, work: int, node: slice) -> None:
        self.work_left[rank] -= work
        self.node_left[node] = np.maximum(self.work_left[node], 0).sum()


class _Lane(NamedTuple):
    """The n blocks that leave one lane, in order, and what is the same for all its pieces."""

    number: int  # p * K + kv head
    group: slice  # ranks of the lane's CP group
    blocks: np.ndarray  # (n,)
    first_page: np.ndarray  # (n + 1,), the last entry without a meaning
    work: np.ndarray  # (n + 1,) pages visited by the blocks before
    parts: np.ndarray  # (C, 2) the pages begin .. end - 1 of each rank of the group
    own: np.ndarray  # (C, 2) the same for `blocks`
    near: np.ndarray  # (N, 2) the pages begin .. end - 1 that are home in the rank's node; where none are, 0, 0
    home: np.ndarray  # (N,) bool: ranks of the nodes that the lane's pages are home to
    block_cost: np.ndarray  # (N,) what a block that moves to the rank costs
    had: np.ndarray  # (N,) the first page that has been brought to the rank's node, changed as it goes; nb: none yet


def pour(
    leaves: np.ndarray,
    first_page: np.ndarray,
    num_pages: np.ndarray,
    spec: PoolSpec,
    target: np.ndarray,
    links: Links,
    scarce: bool = False,
) -> tuple[np.ndarray, bool]:
    """Gives the blocks that leave home (P, K, nb) bool to ranks below their target (N,).

    -> executor (P, K, nb) int32, and whether it fits `spec.room`; where it does not, some blocks are left at home.

    scarce: there was no room for the plan without. Choose by pages alone, wherever they come from, and do not cut lanes
        to keep a part in its node: pages are what fills the room, and every cut sends some twice.
    """
    executor = np.repeat(home_ranks(spec)[:, None], spec.num_kv_heads, axis=1)
    ledger = _kept(leaves, first_page, num_pages, spec, target)
    if ledger.pages_left.min() < 0 or ledger.copies_left.min() < 0:
        return executor, False
    page_cost = 1.0 if scarce else min(links.across / links.inside, 1.0)
    lanes = _lanes(leaves, first_page, num_pages, spec, links, page_cost, 0 if scarce else spec.group)
    by_lane = executor.reshape(-1, spec.blocks_per_sequence)
    rest = [(lane, 0, len(lane.blocks)) for lane in lanes]
    if not scarce:
        rest = []
        for lane in lanes:
            # The node's own ranks take the lane's first blocks, as many as they have work left for: blocks further back
            # are more work, so fewer of them have to move for the work that is left.
            room, end = np.maximum(ledger.work_left[lane.home], 0).sum(), len(lane.blocks)
            if room < lane.work[-1]:
                end = int(lane.work.searchsorted(room, "right")) - 1
            rest.append((lane, end, len(lane.blocks)))
            while end and (piece := _best_piece(lane, 0, end, page_cost, spec, ledger, at_home=True)):
                by_lane[lane.number, lane.blocks[piece[1] : end]] = piece[0]
                end = piece[1]
            rest.append((lane, 0, end))
    for lane, begin, end in rest:
        piece = None
        while end > begin:
            piece = _same_node_piece(lane, begin, end, piece, spec, ledger) if piece else None
            piece = piece or _best_piece(lane, begin, end, page_cost, spec, ledger)
            if piece is None:
                return executor, False
            by_lane[lane.number, lane.blocks[piece[1] : end]] = piece[0]
            end = piece[1]
    return executor, True


def _lanes(
    leaves: np.ndarray,
    first_page: np.ndarray,
    num_pages: np.ndarray,
    spec: PoolSpec,
    links: Links,
    page_cost: float,
    block_cost: float,
) -> list[_Lane]:
    """The lanes that blocks leave, heaviest first."""
    C, K, N, width = spec.cp, spec.num_kv_heads, spec.ranks, spec.blocks_per_rank
    leaving_work = np.where(leaves, num_pages[:, None], 0).sum(2)  # (P, K)
    node = np.arange(N) // (spec.ranks_per_node or links.ranks_per_node)
    parts = np.arange(C)[:, None] * width + [0, width]
    lanes, alike = [], {}
    for number in np.argsort(-leaving_work, axis=None, kind="stable")[: np.count_nonzero(leaving_work)]:
        p, h = divmod(int(number), K)
        had = np.full(N, spec.blocks_per_sequence)
        key = p, leaves[p, h].tobytes()
        if key not in alike:
            blocks = np.flatnonzero(leaves[p, h])
            work = np.zeros(len(blocks) + 1, np.int64)
            np.cumsum(num_pages[p, blocks], out=work[1:])
            group = slice(p * C, p * C + C)
            near = np.stack([node[group].searchsorted(node, side) * width for side in ("left", "right")], axis=1)
            near[near[:, 0] == near[:, 1]] = 0
            alike[key] = _Lane(
                number=int(number),
                group=group,
                blocks=blocks,
                first_page=np.append(first_page[p, blocks], 0),
                work=work,
                parts=parts,
                own=blocks.searchsorted(parts),
                near=near,
                home=near[:, 1] > 0,
                block_cost=np.where(near[:, 1] > 0, page_cost * block_cost, block_cost),
                had=had,
            )
        lanes.append(alike[key]._replace(number=int(number), had=had))
    return lanes


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
    left = target - work
    node_left = np.maximum(left, 0).reshape(-1, spec.node_ranks).sum(1).repeat(spec.node_ranks)
    room = spec.room
    return _Ledger(
        work_left=left,
        node_left=node_left,
        blocks_left=np.full(N, room.blocks),
        pages_left=room.pages - pages.reshape(N),
        copies_left=room.sent_pages - copies.reshape(N),
    )


def _best_piece(
    lane: _Lane, begin: int, end: int, page_cost: float, spec: PoolSpec, ledger: _Ledger, at_home: bool = False
) -> tuple[int, int] | None:
    """Chooses who executes the lane's blocks before `end`, and from which on (not before `begin`), and books it.

    at_home: choose from the ranks of the lane's own nodes. -> (rank, start); None where no rank has room, or, of those,
    work left.
    """
    start = np.maximum(_starts(lane, end, ledger, anyway=not at_home), begin)
    traffic = _traffic(lane, start, end, spec)
    can = (start < end) & (traffic.pages <= ledger.pages_left) & (traffic.blocks <= ledger.blocks_left)
    if at_home:
        can &= lane.home
    work = np.maximum(lane.work[end] - lane.work[start], 1)
    cost = (page_cost * traffic.pages + lane.block_cost * traffic.blocks) / work
    if spec.ranks_per_node:
        # What comes to a node serves all of its ranks that have work left: it costs each a share.
        served = np.minimum(ledger.node_left, lane.work[end] - lane.work[begin])
        cost += traffic.crossing / np.maximum(served, work)
    else:
        cost += (1 - page_cost) * traffic.crossing / work
    cost[~can] = np.inf
    while (least := cost.min()) < np.inf:
        equal = np.flatnonzero(cost == least)
        rank = int(equal[ledger.work_left[equal].argmin()])  # of several with equal cost the fullest
        first, top = int(lane.first_page[start[rank]]), int(lane.blocks[end - 1]) + 1
        copies = _copies(lane, rank, first, top, spec)
        if (copies <= ledger.copies_left[lane.group]).all():
            break
        cost[rank] = np.inf
    else:
        return None
    node = slice(rank - rank % spec.node_ranks, rank - rank % spec.node_ranks + spec.node_ranks)
    ledger.take(rank, int(work[rank]), node)
    ledger.blocks_left[rank] -= traffic.blocks[rank]
    ledger.pages_left[rank] -= traffic.pages[rank]
    ledger.copies_left[lane.group] -= copies
    if spec.ranks_per_node:
        lane.had[node] = min(lane.had[rank], first)
    return rank, int(start[rank])


def _same_node_piece(
    lane: _Lane, begin: int, end: int, last: tuple[int, int], spec: PoolSpec, ledger: _Ledger
) -> tuple[int, int] | None:
    """What `_best_piece` chooses where a lane goes on in the node that relays brought its pages to, away from home:
    the rank there with the most work left. None where it is not as simple as that, or nobody there has work left.

    last: the piece before, (rank, start).
    """
    if not spec.ranks_per_node or lane.home[last[0]]:
        return None
    node = slice(last[0] - last[0] % spec.node_ranks, last[0] - last[0] % spec.node_ranks + spec.node_ranks)
    rank = node.start + int(ledger.work_left[node].argmax())
    wanted = ledger.work_left[rank] + 0.5 * (lane.work[end] - lane.work[end - 1])
    start = max(int(lane.work.searchsorted(lane.work[end] - wanted)), begin, end - int(ledger.blocks_left[rank]))
    if start >= end:
        return None
    first, pages = lane.first_page[start], lane.blocks[end - 1] + 1 - lane.first_page[start]
    if first < lane.had[rank] or pages > ledger.pages_left[rank]:
        return None
    ledger.take(rank, int(lane.work[end] - lane.work[start]), node)
    ledger.blocks_left[rank] -= end - start
    ledger.pages_left[rank] -= pages
    return rank, start


def _starts(lane: _Lane, end: int, ledger: _Ledger, anyway: bool) -> np.ndarray:
    """(N,) where the longest piece up to `end` starts that each rank has work left for, to within half a block.

    anyway: where no rank has, the one with the most work left takes one block.
    """
    half_a_block = 0.5 * (lane.work[end] - lane.work[end - 1])
    start = lane.work.searchsorted((lane.work[end] - half_a_block) - ledger.work_left)
    start = np.minimum(np.maximum(start, end - ledger.blocks_left), end)
    if anyway and start.min() == end:
        return np.where(ledger.work_left == ledger.work_left.max(), end - 1, end)
    return start


class _Traffic(NamedTuple):
    """What each rank would receive for a piece, (N,) each, nothing from itself. Pages between two documents of a piece
    count too: never less than the piece needs.

    pages: in all. crossing: those of them that would have to cross nodes. blocks: query blocks.
    """

    pages: np.ndarray
    crossing: np.ndarray
    blocks: np.ndarray


def _traffic(lane: _Lane, start: np.ndarray, end: int, spec: PoolSpec) -> _Traffic:
    """start: (N,) where each rank's piece begins; all end at `end`."""
    first, top = lane.first_page[start], lane.blocks[end - 1] + 1
    pages, blocks = top - first, end - start
    brought = np.minimum(lane.had, top) if spec.ranks_per_node else top
    near = np.minimum(lane.near[:, 1], brought) - np.maximum(lane.near[:, 0], first)
    crossing = np.maximum(brought - first, 0) - np.maximum(near, 0)
    group = lane.group
    own = np.minimum(lane.parts[:, 1], top) - np.maximum(lane.parts[:, 0], first[group])
    pages[group] -= np.maximum(own, 0)
    own = np.minimum(lane.own[:, 1], end) - np.maximum(lane.own[:, 0], start[group])
    blocks[group] -= np.maximum(own, 0)
    return _Traffic(pages, crossing, blocks)


def _copies(lane: _Lane, rank: int, first: int, top: int, spec: PoolSpec) -> np.ndarray:
    """(C,) page copies that the lane's homes send when the rank reads pages first to top - 1: none of what has come to
    its node already, unless the home is of the node."""
    part, part_end = lane.parts[:, 0], lane.parts[:, 1]
    to = np.minimum(part_end, top)
    if spec.ranks_per_node:
        far = (part < lane.near[rank, 0]) | (part >= lane.near[rank, 1])
        to = np.where(far, np.minimum(to, lane.had[rank]), to)
    copies = np.maximum(to - np.maximum(part, first), 0)
    if lane.group.start <= rank < lane.group.stop:
        copies[rank - lane.group.start] = 0
    return copies
