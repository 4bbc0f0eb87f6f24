"""Shardings of a sequence among its own ranks: `policies.sharding` against a count over tokens, MagiAttention's
dispatch, and the same shardings as plans for this runtime.
"""

import functools

import numpy as np
import planner_base as base
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra_jax.plan import plan_pool
from libra_jax.policies import sharding
from libra_jax.policies.base import RunShape
from libra_jax.policies.magi import Magi, areas, chunk_size, deal_chunks
from libra_jax.policies.plans import PLANS, adaptive, document_blocks, magi_dispatch, per_document, zigzag
from libra_jax.routing import check_executor
from libra_jax.spec import PoolSpec
from libra_jax.workload import causal_pairs

LENGTHS = st.lists(st.integers(1, 40), max_size=6)
RANKS = st.integers(1, 5)

# ------------------------------------------------------------------------------------------------ over tokens


def ranks_of_tokens(parts, lengths):
    """Of each document (tokens,) the rank of each token. Fails where one is dealt twice, or not at all."""
    ranks = [np.full(length, -1) for length in lengths]
    for rank, document, begin, end in zip(*parts, strict=True):
        assert 0 <= begin < end <= lengths[document]
        assert (ranks[document][begin:end] == -1).all()
        ranks[document][begin:end] = rank
    assert all((each >= 0).all() for each in ranks)
    return ranks


@st.composite
def dealt(draw):
    """(lengths, ranks, parts): each way to deal tokens."""
    lengths, ranks = draw(LENGTHS), draw(RANKS)
    by = draw(st.sampled_from(["sequence", "padded", "document", "chunks"]))
    if by == "document":
        return lengths, ranks, sharding.by_document(lengths, ranks)
    if by == "chunks":
        size, count = draw(st.integers(1, 30)), draw(st.integers(1, 12))
        size = max(size, -(-sum(lengths) // count))
        owner = np.array(draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count)))
        return lengths, ranks, sharding.of_chunks(lengths, np.arange(count + 1) * size, owner)
    padding = draw(st.integers(0, 30)) if by == "padded" else None
    return lengths, ranks, sharding.by_sequence(lengths, ranks, None if padding is None else sum(lengths) + padding)


@given(case=dealt())
@settings(deadline=None)
@example(case=([], 3, sharding.by_sequence([], 3)))
@example(case=([], 3, sharding.by_document([], 3)))
def test_every_token_is_dealt_once_and_runs_are_as_long_as_can_be(case):
    lengths, ranks, parts = case
    tokens = ranks_of_tokens(parts, lengths)
    assert np.array_equal(np.lexsort((parts.begin, parts.document)), np.arange(parts.rank.size))
    assert parts.rank.size == sum(1 + np.count_nonzero(np.diff(each)) for each in tokens)
    assert np.array_equal(
        sharding.held(parts, ranks), np.bincount(np.concatenate([[], *tokens]).astype(int), None, ranks)
    )


@given(case=dealt(), block=st.integers(1, 9))
@settings(deadline=None)
def test_visited_pairs_and_needed_are_what_a_count_over_tokens_gives(case, block):
    lengths, ranks, parts = case
    owner = ranks_of_tokens(parts, lengths)
    pages, blocks, pairs = (np.zeros(ranks, int) for _ in range(3))
    moved = np.zeros((ranks, ranks), int)
    for document, length in enumerate(lengths):
        mine = owner[document]
        for token in range(length):
            pairs[mine[token]] += token + 1
        for reader in range(ranks):
            seen = {key for query in np.flatnonzero(mine == reader) for key in range(query + 1)}
            for key in seen:
                moved[mine[key], reader] += mine[key] != reader
    for rank, _, begin, end in zip(*parts, strict=True):
        for start in range(begin, end, block):
            last = min(start + block, end) - 1
            blocks[rank] += 1
            pages[rank] += len({key // block for key in range(last + 1)})
    assert np.array_equal(sharding.pairs(parts, ranks), pairs)
    assert pairs.sum() == causal_pairs(lengths)
    assert np.array_equal(sharding.needed(parts, ranks), moved)
    assert np.array_equal(sharding.visited(parts, ranks, block).pages, pages)
    assert np.array_equal(sharding.visited(parts, ranks, block).blocks, blocks)


def test_the_zigzag_cuts_the_sequence_whatever_documents_it_holds():
    # Documents of 5 and 3 tokens on two ranks, chunks of 2 tokens:  0 0 1 1 1 | 1 0 0
    assert [column.tolist() for column in sharding.by_sequence([5, 3], 2)] == [
        [0, 1, 1, 0],
        [0, 0, 1, 1],
        [0, 2, 0, 1],
        [2, 5, 1, 3],
    ]
    # With two ranks' pairs 1 + 2 + 2 + 3 = 8 and 3 + 4 + 5 + 1 = 13.
    assert sharding.pairs(sharding.by_sequence([5, 3], 2), 2).tolist() == [8, 13]
    # Up to 16 tokens of padding, chunks of 4 tokens:  0 0 0 0 1 | 1 1 1
    assert sharding.held(sharding.by_sequence([5, 3], 2, 16), 2).tolist() == [4, 4]


@given(length=st.integers(1, 60), ranks=RANKS)
def test_within_a_document_ranks_have_the_same_work(length, ranks):
    # Of 2C chunks of n tokens, c and 2C - 1 - c have n (n + 1) + n n (2C - 1) pairs together, whatever c.
    parts = sharding.by_document([2 * ranks * length], ranks)
    assert set(sharding.held(parts, ranks)) == {2 * length}
    assert set(sharding.pairs(parts, ranks)) == {length * (length + 1) + length * length * (2 * ranks - 1)}


def test_keys_that_a_rank_holds_or_never_sees_do_not_travel():
    # One document of 8 tokens on two ranks:  0 0 1 1 1 1 0 0.  Rank 0's last query sees all, rank 1's up to token 5.
    assert sharding.needed(sharding.by_document([8], 2), 2).tolist() == [[0, 2], [4, 0]]


# ------------------------------------------------------------------------------------------------ MagiAttention


def test_the_source_s_example_of_the_min_heap():
    # Its docstring has loads 8 7 6 5 4 2 2 2 on two ranks: greedy 19 and 17, the best is 18 and 18.
    loads = np.array([8, 7, 6, 5, 4, 2, 2, 2])
    owner = deal_chunks(loads, 2)
    assert sorted(loads[owner == 0].tolist(), reverse=True) == [8, 5, 4, 2]
    assert sorted(loads[owner == 1].tolist(), reverse=True) == [7, 6, 2, 2]


@given(data=st.data(), ranks=RANKS, count=st.integers(1, 6))
def test_ranks_get_equally_many_chunks_and_loads_differ_by_at_most_one(data, ranks, count):
    loads = np.array(data.draw(st.lists(st.integers(0, 100), min_size=ranks * count, max_size=ranks * count)))
    owner = deal_chunks(loads, ranks)
    assert set(np.bincount(owner, None, ranks)) == {count}
    assert np.ptp(np.bincount(owner, loads, ranks)) <= loads.max()


@given(lengths=LENGTHS, size=st.integers(1, 20))
@settings(deadline=None)
def test_areas_are_the_pairs_of_each_chunk_s_queries(lengths, size):
    edges = np.arange(0, sum(lengths) + 3 * size, size)
    seen = np.concatenate([[], *(np.arange(1, length + 1) for length in lengths), np.zeros(4 * size)])
    expected = [seen[begin : begin + size].sum() for begin in edges[:-1]]
    assert areas(lengths, edges).tolist() == expected


def test_magi_deals_each_sequence_to_its_own_group():
    run = RunShape(64, dp=2, cp=2, micro_steps=2, num_heads=4, num_kv_heads=2, head_dim=8, block=4)
    sequences = [[64], [30, 20], [], [1, 2, 61]]
    plan = Magi(chunk_tokens=8).step(sequences, run)
    assert [group.documents for groups in plan.micro_steps for group in groups] == sequences
    for group in (group for groups in plan.micro_steps for group in groups):
        assert (group.exchange, group.ranks, group.tokens) == ("needed", 2, 32)
        ranks_of_tokens(group.parts, group.documents)
        assert (sharding.held(group.parts, 2) <= 32).all()
    # One document of 8 chunks, whose areas grow: 7 6 5 4 3 2 1 0 go to ranks 0 1 1 0 0 1 1 0.
    owner = ranks_of_tokens(plan.micro_steps[0][0].parts, [64])[0][::8]
    assert owner.tolist() == [0, 1, 1, 0, 0, 1, 1, 0]


def test_chunks_are_an_eighth_of_a_rank_or_the_nearest_that_divides():
    assert [chunk_size(held, None, "chunk_tokens", "tokens") for held in (32768, 6, 12, 7)] == [4096, 1, 2, 1]
    assert chunk_size(11, None, "chunk_tokens", "tokens") == 11


@pytest.mark.parametrize("size", [24, 0, -8])
def test_chunks_that_do_not_divide_a_rank_are_refused(size):
    run = RunShape(64, dp=1, cp=2, micro_steps=1, num_heads=4, num_kv_heads=2, head_dim=8, block=4)
    with pytest.raises(ValueError, match=rf"chunk_tokens \({size}\) must .*divide the tokens of a rank \(32\)"):
        Magi(chunk_tokens=size).step([[64]], run)
    first, count = base.pages_of([[64]], run.spec(1))
    with pytest.raises(ValueError, match=r"chunk_blocks \(3\) must .*divide the blocks of a rank \(8\)"):
        magi_dispatch(3)(first, count, run.spec(1), np.ones(2))


# ------------------------------------------------------------------------------------------------ as plans


def blocks_spec(cp, blocks, pool_size=1):
    """Blocks of one token, so that blocks and tokens are the same."""
    return PoolSpec(blocks, pool_size, cp, 1, 1, 8, block=1)


def executor_of(policy, lengths, spec):
    return policy(*base.pages_of(lengths, spec), spec, np.ones(spec.ranks))


def test_plans_by_hand():
    spec = blocks_spec(2, 8)
    assert executor_of(zigzag, [[8]], spec).tolist() == [[[0, 0, 1, 1, 1, 1, 0, 0]]]
    assert executor_of(zigzag, [[2, 6]], spec).tolist() == [[[0, 0, 1, 1, 1, 1, 0, 0]]]
    # Documents of 3 and 5 blocks. The first has no whole chunks, so its blocks go to 0 1 0 in turn; of the second one
    # block is left, which is rank 1's turn, and chunks of one block go to 0 1 1 0.
    assert executor_of(per_document, [[3, 5]], spec).tolist() == [[[0, 1, 0, 1, 0, 1, 1, 0]]]
    # Padding is at home with rank 1, and what a document does not need of a chunk is no turn of it.
    assert executor_of(per_document, [[1, 1, 1]], spec).tolist() == [[[0, 1, 0, 0, 1, 1, 1, 1]]]
    # The second sequence's ranks are 2 and 3.
    assert executor_of(zigzag, [[8], [8]], blocks_spec(2, 8, 2))[1].tolist() == [[2, 2, 3, 3, 3, 3, 2, 2]]


def test_adaptive_takes_for_each_sequence_what_its_busiest_rank_does_sooner():
    spec = blocks_spec(2, 8, 2)
    # 2 and 6: the zigzag gives rank 0 blocks of 1 2 5 6 pages and rank 1 of 1 2 3 4. Inside documents 1 2 go in turn,
    # so do 1 2 of the second; of 3 4 5 6 rank 0 has 3 6: 11 and 13 pages. 4 and 4: both ways are even, and the zigzag
    # over the sequence is kept.
    executor = executor_of(adaptive, [[2, 6], [4, 4]], spec)
    both = [executor_of(policy, [[2, 6], [4, 4]], spec) for policy in (zigzag, per_document)]
    count = base.pages_of([[2, 6], [4, 4]], spec)[1]
    work = [base.rank_work(each, count, spec) for each in both]
    assert work[0].tolist() == [14, 10, 10, 10]
    assert work[1].tolist() == [11, 13, 10, 10]
    assert np.array_equal(executor[0], both[1][0])
    assert np.array_equal(executor[1], both[0][1])


def test_magi_s_plan_by_hand():
    # Chunks of 2 blocks with 3, 7, 11 and 15 pages: 15 to rank 0, 11 and 7 to rank 1, which is full, 3 to rank 0.
    executor = executor_of(magi_dispatch(2), [[8]], blocks_spec(2, 8))
    assert executor.tolist() == [[[0, 0, 1, 1, 1, 1, 0, 0]]]


@given(pool=base.pools(most_blocks=6), name=st.sampled_from(sorted(PLANS)))
@settings(deadline=None, max_examples=150)
def test_every_plan_is_one_of_the_pool_s_and_keeps_padding_home(pool, name):
    spec, lengths = pool
    count = base.pages_of(lengths, spec)[1]
    executor = executor_of(PLANS[name], lengths, spec)
    assert executor.dtype == np.int32
    assert np.array_equal(check_executor(executor, count, spec), executor)
    if name not in ("distca", "libra-paper", "libra"):  # these share work across the pool's sequences
        assert (executor // spec.cp == np.arange(spec.pool_size)[:, None, None]).all()


@given(pool=base.pools(most_blocks=6))
@settings(deadline=None)
def test_the_sharding_plans_deal_blocks_as_the_shardings_deal_tokens(pool):
    spec, lengths = pool
    for p, sequence in enumerate(lengths):
        used = -(-sum(sequence) // spec.block)
        executor = executor_of(zigzag, lengths, spec)[p, 0, :used] - p * spec.cp
        parts = sharding.by_sequence([spec.blocks_per_sequence], spec.cp)
        assert np.array_equal(executor, ranks_of_tokens(parts, [spec.blocks_per_sequence])[0][:used])
        dealt = np.bincount(executor_of(per_document, lengths, spec)[p, 0, :used] - p * spec.cp, None, spec.cp)
        assert dealt.max() - dealt.min() <= 1  # left-over blocks go in turn, so tokens are as even as they can be


@given(pool=base.pools(most_blocks=6))
@settings(deadline=None)
def test_documents_are_found_where_they_begin_in_blocks(pool):
    spec, lengths = pool
    first, count = base.pages_of(lengths, spec)
    for p, sequence in enumerate(lengths):
        edges = document_blocks(first[p], count[p]).tolist()
        ends = np.cumsum([0, *sequence])
        begins = {int(-(-start // spec.block)) for start in ends[:-1]}  # the first block whose first token it may hold
        used = -(-sum(sequence) // spec.block)
        assert edges[0] == 0 and edges[-1] == used and edges == sorted(set(edges) | {0, used})
        if spec.window is None:
            assert set(edges) <= begins | {0, used}


def test_document_blocks_by_hand():
    spec = PoolSpec(32, 1, 1, 1, 1, 8, block=4)
    found = functools.partial(base.pages_of, spec=spec)
    edges = lambda lengths: document_blocks(*(each[0] for each in found([lengths]))).tolist()  # noqa: E731
    assert edges([]) == [0]
    assert edges([32]) == [0, 8]
    assert edges([16, 16]) == [0, 4, 8]
    assert edges([6, 20]) == [0, 2, 7]  # the second begins inside block 1, which is the first one's
    assert edges([5, 2, 13]) == [0, 2, 5]  # the second has no block of its own


@pytest.mark.parametrize("name", sorted(PLANS))
def test_every_plan_can_be_run(name):
    spec = base.small_spec(2, 2, 2, 4, capacity=1000.0)
    plan = plan_pool([[20, 12], [7, 5, 9]], spec, policy=PLANS[name])
    assert not plan.stats.fallback
