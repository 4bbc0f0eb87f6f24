"""Other systems' sharding as plans for this package's runtime: which rank executes which block.

Takes what `libra_jax.assignments` policies take and gives executor (P, K, nb) int32; `PLANS` names every policy there
is. After Llama 3's context parallelism (arXiv 2407.21783), WLB-LLM's sharding (arXiv 2503.17924, section 5) and
MagiAttention's dispatch (`magi`).

Known limit: in those systems a rank holds the tokens that it computes. Here a token's home is fixed, so queries and
outputs travel to and from where these systems would have put them: work per rank is theirs, bytes are more than
theirs. `magi`, `wlb` and `packed.Sharded` say what they send. What they cut at tokens is cut at blocks here.

Letters: P sequences, C ranks of a CP group, K kv heads, nb blocks of a sequence. All heads of a block go together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from libra_jax.assignments import Policy, at_home, head_parallel, keep_padding_home
from libra_jax.planner import pooled
from libra_jax.policies.distca import distca
from libra_jax.policies.magi import chunk_size, deal_chunks
from libra_jax.policies.paper import paper_placer
from libra_jax.spec import PoolSpec


def zigzag(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """Per-sequence sharding: the sequence's blocks in 2C chunks, rank c has chunks c and 2C - 1 - c.

        C = 2:  block 0 1 2 3 4 5 6 7        One document of 8 blocks costs both ranks the same, 18 pages;
                rank  0 0 1 1 1 1 0 0        one of 2 and one of 6 cost them 14 and 10.
    """  # fmt: skip
    return _per_sequence(num_pages, spec, lambda p: _zigzag(spec.blocks_per_sequence, spec.cp))


def per_document(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """Per-document sharding: the zigzag inside every document.

    A block belongs to the document of its first token; documents without such a block are with the one before them.
    What is left when a document is cut into 2C equal chunks, its first blocks because they cost least, goes to the
    ranks in turn, from document to document. (WLB-LLM deals left-over tokens in turn; which ones, it does not say.)
    """
    return _per_sequence(num_pages, spec, lambda p: _by_document(first_page[p], num_pages[p], spec.cp))


def adaptive(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """WLB-LLM's choice: of each sequence the sharding, per sequence or per document, whose busiest rank visits fewer
    pages; the former where they are equal.

    The paper compares predicted kernel times, because short runs leave tiles half empty. Here blocks are whole in both,
    so pages decide.
    """

    def cheaper(p: int) -> np.ndarray:
        ways = _zigzag(spec.blocks_per_sequence, spec.cp), _by_document(first_page[p], num_pages[p], spec.cp)
        return min(ways, key=lambda rank: np.bincount(rank, num_pages[p], spec.cp).max())

    return _per_sequence(num_pages, spec, cheaper)


def magi_dispatch(chunk_blocks: int | None = None) -> Policy:
    """MagiAttention's dispatch: chunks of so many blocks, equally many to each rank, the largest first to the least
    loaded. None: 8 chunks a rank, or the most below 8 that divide its blocks. See `magi` for the source.

    The policy raises ValueError where chunks do not divide a rank's blocks. Areas are pages visited.
    """

    def policy(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
        size = chunk_size(spec.blocks_per_rank, chunk_blocks, "chunk_blocks", "blocks")
        areas = num_pages.reshape(spec.pool_size, -1, size).sum(axis=2)
        return _per_sequence(num_pages, spec, lambda p: np.repeat(deal_chunks(areas[p], spec.cp), size))

    return policy


PLANS: dict[str, Policy] = {
    "context-parallel": at_home,
    "ulysses": head_parallel,
    "zigzag": zigzag,
    "per-document": per_document,
    "wlb": adaptive,
    "magi": magi_dispatch(),
    "distca": distca(),
    "libra-paper": paper_placer(),
    "libra": pooled,
}
"""Every policy that is a plan for this runtime, by the name that `names` gives it. "wlb" is its sharding alone: packing
documents anew is no plan."""


def _per_sequence(num_pages: np.ndarray, spec: PoolSpec, deal: Callable[[int], np.ndarray]) -> np.ndarray:
    """(P, K, nb) from what `deal` gives for each sequence: (nb,) ranks of its group."""
    ranks = np.stack([p * spec.cp + deal(p) for p in range(spec.pool_size)])
    executor = np.repeat(ranks[:, None], spec.num_kv_heads, axis=1)
    return keep_padding_home(executor.astype(np.int32), num_pages, spec)


def _zigzag(blocks: int, ranks: int) -> np.ndarray:
    """(blocks,) rank of each of so many blocks in a row, cut into 2C chunks of the same size to a block."""
    edges = np.arange(2 * ranks + 1) * blocks // (2 * ranks)
    return np.repeat(np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]]), np.diff(edges))


def _by_document(first_page: np.ndarray, num_pages: np.ndarray, ranks: int) -> np.ndarray:
    """(nb,) rank of each block of one sequence; 0 where it is padding."""
    executor, turn = np.zeros(first_page.size, np.int64), 0
    edges = document_blocks(first_page, num_pages)
    for begin, end in itertools.pairwise(edges):
        left = (end - begin) % (2 * ranks)
        executor[begin : begin + left] = (turn + np.arange(left)) % ranks
        executor[begin + left : end] = _zigzag(int(end - begin - left), ranks)
        turn = (turn + left) % ranks
    return executor


def document_blocks(first_page: np.ndarray, num_pages: np.ndarray) -> np.ndarray:
    """(documents + 1,) of one sequence: the blocks at which documents begin, and where padding does.

    A document that begins at a block b - 1 or b shows in block b: it sees nothing before them, and block b - 1 does.
    """
    used = int(np.count_nonzero(num_pages))
    block = np.arange(1, used)
    begins = (first_page[1:used] >= block - 1) & (first_page[1:used] != first_page[: max(used - 1, 0)])
    return np.concatenate([[0], block[begins], [used]]) if used else np.zeros(1, np.int64)
