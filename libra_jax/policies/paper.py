"""The placer of the Libra paper as a policy: tiles of 8,192 tokens by one kv head, least extra bytes under a soft cap.

After Tiled Attention Pooling (arXiv 2607.23250), of which no code is public. Attention is cut along the sequence and
along the heads into SH-Tiles. Tiles are placed one by one: of the ranks whose work would stay below a soft cap, the one
to which the tile brings the fewest extra bytes, where keys and values that are there already are free, and so are
queries and outputs on the rank that is home to them.

Where the paper leaves a choice, the reading that is best for it:

- A tile is 8,192 tokens of the packed sequence by a single kv head with its query heads, so as narrow as can be. It
  never crosses from one home rank to the next.
- Tiles whose pages are all on their home rank first, because at home they bring no bytes at all; within both kinds the
  heaviest first, as when pools are filled; equally heavy ones in order of sequence, head and position. (Heaviest first
  over all tiles sends up to twice the bytes: heavy tiles from elsewhere fill ranks whose own light ones then have to
  leave. Fewest extra bytes first over all tiles leaves the heavy ones to the end, and imbalances of 1.2 to 1.5.)
- The cap is relative to the rank's share of the work, by its speed. Where no rank is below it, the tile goes to the
  rank that would be the least loaded. Reports give several caps.
- Padding costs nothing and stays home. No room limits what a rank receives or sends.

Letters: P sequences, C ranks of a CP group, N ranks, K kv heads, nb blocks of a sequence.
"""

from __future__ import annotations

import numpy as np

from libra_jax.assignments import Policy, home_ranks, keep_padding_home
from libra_jax.spec import PoolSpec

TILE_TOKENS = 8192


def paper_placer(cap: float = 1.02, tile_tokens: int = TILE_TOKENS) -> Policy:
    """The paper's placer with this soft cap, relative to a rank's share of the work."""

    def policy(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
        P, K, N, nb = spec.pool_size, spec.num_kv_heads, spec.ranks, spec.blocks_per_sequence
        width = spec.blocks_per_rank
        begin, end = _tiles(spec, tile_tokens)
        before = np.zeros((P, nb + 1), np.int64)
        np.cumsum(num_pages, axis=1, out=before[:, 1:])
        work = np.repeat((before[:, end] - before[:, begin])[:, None], K, axis=1)  # (P, K, tiles)
        share = K * before[:, -1].sum() * speed / speed.sum()
        home = home_ranks(spec)
        executor = np.repeat(home[:, None], K, axis=1)
        part_begin = np.arange(N) % spec.cp * width  # (N,) the pages that a rank is home to, in its own sequence
        block_cost = spec.block_bytes / spec.page_bytes
        load = np.zeros(N)
        fetched: dict[tuple[int, int], dict[int, np.ndarray]] = {}  # lane: rank: (nb,) bool, pages it got
        order = np.lexsort((-work.reshape(-1), _reaches_out(first_page[:, begin], begin, work, spec).reshape(-1)))
        for tile in order[work.reshape(-1)[order] > 0]:
            p, h, t = (int(i) for i in np.unravel_index(tile, work.shape))
            real = begin[t] + np.flatnonzero(num_pages[p, begin[t] : end[t]])
            first, last, own = first_page[p, real[0]], real[-1] + 1, home[p, begin[t]]
            # Extra pages, in closed form where a rank has only its own pages of the lane.
            pages = np.full(N, last - first)
            group = slice(p * spec.cp, (p + 1) * spec.cp)
            low, high = np.maximum(part_begin[group], first), np.minimum(part_begin[group] + width, last)
            pages[group] -= np.maximum(high - low, 0)
            there = fetched.setdefault((p, h), {})
            for rank, has in there.items():
                pages[rank] = np.count_nonzero(~has[first:last])
            cost = pages + np.where(np.arange(N) == own, 0, block_cost * len(real))
            after = load + work[p, h, t]
            below = after <= cap * share
            if below.any():
                rank = int(np.lexsort((after / share, np.where(below, cost, np.inf)))[0])
            else:
                rank = int(np.argmin(after / share))
            load[rank] = after[rank]
            executor[p, h, begin[t] : end[t]] = rank
            if rank not in there:
                there[rank] = np.zeros(nb, bool)
                if p * spec.cp <= rank < (p + 1) * spec.cp:
                    there[rank][part_begin[rank] : part_begin[rank] + width] = True
            there[rank][first:last] = True
        return keep_padding_home(executor, num_pages, spec)

    return policy


def _reaches_out(first_page: np.ndarray, begin: np.ndarray, work: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """(P, K, tiles) bool: tiles that see pages which are not on their home rank.

    first_page: (P, tiles) of the tiles' first blocks. begin: (tiles,) their numbers. work: (P, K, tiles).
    """
    home_begin = begin // spec.blocks_per_rank * spec.blocks_per_rank
    return (first_page < home_begin)[:, None] & (work > 0)


def _tiles(spec: PoolSpec, tile_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """First block, and block after the last, of each tile of a lane."""
    tile, width = max(tile_tokens // spec.block, 1), spec.blocks_per_rank
    begin = (np.arange(spec.cp)[:, None] * width + np.arange(0, width, tile)).reshape(-1)
    return begin, np.append(begin[1:], spec.blocks_per_sequence)
