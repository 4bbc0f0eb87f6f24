"""Small pools for the tests of planners: specs, documents drawn at random, and what they ask of attention."""

import numpy as np
from hypothesis import strategies as st

from libra_jax.spec import PoolSpec
from libra_jax.workload import block_pages

BLOCK = 4


def small_spec(pool_size, cp, kv_heads, width, *, group=2, window=None, capacity=None, block=BLOCK, waves=2, node=None):
    """A pool whose parts are `width` blocks of `block` tokens."""
    return PoolSpec(
        seq_len=cp * width * block,
        pool_size=pool_size,
        cp=cp,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=8,
        block=block,
        window=window,
        capacity=capacity,
        waves=waves,
        ranks_per_node=node,
    )


def pages_of(lengths, spec):
    """-> first_page, num_pages (P, nb)."""
    blocks = [block_pages(sequence, spec) for sequence in lengths]
    return np.stack([b.first_page for b in blocks]), np.stack([b.num_pages for b in blocks])


def rank_work(executor, num_pages, spec):
    """(N,) pages that each rank visits."""
    work = np.broadcast_to(num_pages[:, None], executor.shape)
    return np.bincount(executor.ravel(), work.ravel(), spec.ranks)


@st.composite
def pools(draw, most_blocks=4, capacity=None):
    """(spec, lengths): any small pool, documents of any lengths, padding of any length."""
    spec = small_spec(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, most_blocks)),
        group=draw(st.sampled_from([1, 2, 5])),
        window=draw(st.none() | st.integers(1, 40)),
        capacity=capacity,
    )
    lengths = []
    for _ in range(spec.pool_size):
        left, sequence = draw(st.integers(0, spec.seq_len)), []
        while left:
            sequence.append(draw(st.integers(1, left)))
            left -= sequence[-1]
        lengths.append(sequence)
    return spec, lengths
