"""Which rank executes which block: the three simple policies, as plans for the same runtime.

An assignment is `executor (P, K, nb) int32`: the rank that executes block b of lane (p, h). A policy is a function

    policy(first_page (P, nb), num_pages (P, nb), spec, speed (N,)) -> executor

`at_home` is plain context parallelism that fetches the keys and values it needs, `head_parallel` is Ulysses
(arXiv 2309.14509) for any number of kv heads and ranks, `random_plan` is any valid plan, for tests. The default
policy, `pooled`, is in `planner.py`. Blocks that are all padding (num_pages 0) stay home in every policy.

Letters: P sequences, C ranks of a CP group, N = P * C ranks, K kv heads, nb blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from libra_jax.spec import PoolSpec

Policy = Callable[[np.ndarray, np.ndarray, PoolSpec, np.ndarray], np.ndarray]


def home_ranks(spec: PoolSpec) -> np.ndarray:
    """(P, nb) int32: the rank that holds block b of sequence p, for every head."""
    part = np.arange(spec.blocks_per_sequence, dtype=np.int32) // spec.blocks_per_rank
    first_rank = np.arange(spec.pool_size, dtype=np.int32) * spec.cp
    return first_rank[:, None] + part


def at_home(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """Every block on the rank that holds it; only keys and values travel. -> executor (P, K, nb) int32."""
    return _per_head(home_ranks(spec), spec)


def head_parallel(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
    """Ulysses: each sequence's kv heads dealt to the cp ranks of its own group. -> executor (P, K, nb) int32.

    Every head is cut into C shares of nb / C blocks, and rank c of the group takes shares c * K to c * K + K - 1 of
    the K * C in head order: whole heads where K is a multiple of C, else parts of heads. Shares are folded,
    block b belongs to share min(b mod 2C, 2C - 1 - b mod 2C), so a share of a document costs what any other does:

        C = 2:  block 0 1 2 3 4 5 6 7        K = 1, C = 2:  rank 0 executes 0 3 4 7, rank 1 executes 1 2 5 6
                share 0 1 1 0 0 1 1 0        K = 3, C = 2:  rank 0 executes head 0 and share 0 of head 1

    A rank executes exactly `spec.home_blocks` pairs, and needs at most `spec.head_parallel_capacity(spec)`.
    """
    P, K, C = spec.pool_size, spec.num_kv_heads, spec.cp
    place = np.arange(spec.blocks_per_sequence) % (2 * C)
    share = np.minimum(place, 2 * C - 1 - place)
    part = (np.arange(K)[:, None] * C + share) // K
    executor = (np.arange(P) * C)[:, None, None] + part
    return keep_padding_home(executor.astype(np.int32), num_pages, spec)


def random_plan(seed: int) -> Policy:
    """A policy that gives every block a rank of the pool at random, always the same ones for one seed."""

    def policy(first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray) -> np.ndarray:
        shape = (spec.pool_size, spec.num_kv_heads, spec.blocks_per_sequence)
        executor = np.random.default_rng(seed).integers(0, spec.ranks, shape, dtype=np.int32)
        return keep_padding_home(executor, num_pages, spec)

    return policy


def keep_padding_home(executor: np.ndarray, num_pages: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """executor (P, K, nb) with the blocks that have no pages (num_pages (P, nb) == 0) put back home."""
    return np.where(num_pages[:, None] == 0, _per_head(home_ranks(spec), spec), executor)


def _per_head(ranks: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """(P, nb) -> a fresh (P, K, nb)."""
    return np.repeat(ranks[:, None], spec.num_kv_heads, axis=1)
