"""Assignments: properties of every policy, exact optima on tiny pools, worked examples. NumPy alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner_base import BLOCK, pages_of, pools, rank_work, small_spec

from libra_jax import planner
from libra_jax.links import Links
from libra_jax.spec import Capacity, PoolSpec, Room, head_parallel_capacity

POLICIES = {
    "pooled": planner.pooled,
    "at_home": planner.at_home,
    "head_parallel": planner.head_parallel,
    "random": planner.random_plan(3),
}


def home_of(spec, p, b):
    return p * spec.cp + b // spec.blocks_per_rank


def moved(executor, first_page, num_pages, spec):
    """What a plan sends, straight from the definition: blocks and pages as {(p, h, index, from, to)}."""
    blocks, pages = set(), set()
    for p, h, b in np.ndindex(executor.shape):
        rank = int(executor[p, h, b])
        if rank != home_of(spec, p, b):
            blocks.add((p, h, b, home_of(spec, p, b), rank))
        for page in range(first_page[p, b], b + 1) if num_pages[p, b] else ():
            if rank != home_of(spec, p, page):
                pages.add((p, h, page, home_of(spec, p, page), rank))
    return blocks, pages


def needs(executor, first_page, num_pages, spec):
    """The `Capacity` that a plan needs, from the definition (the fields that are summed over waves)."""
    blocks, pages = moved(executor, first_page, num_pages, spec)
    n = spec.ranks

    def most(items, end):
        return np.bincount([item[end] for item in items], minlength=n).max()

    def most_pair(items):
        return np.bincount([item[3] * n + item[4] for item in items], minlength=n * n).max()

    counts = most(blocks, 4), most(pages, 4), most(pages, 3), most_pair(blocks), most_pair(pages)
    return Capacity(*(count / spec.home_blocks for count in counts))


# ------------------------------------------------------------------------------------------------ every policy


@pytest.mark.parametrize("name", POLICIES)
@given(pool=pools())
@settings(deadline=None, max_examples=60)
def test_every_block_goes_to_one_rank_of_the_pool(name, pool):
    spec, lengths = pool
    first, count = pages_of(lengths, spec)
    before = first.copy(), count.copy()
    executor = POLICIES[name](first, count, spec, np.ones(spec.ranks))
    assert executor.shape == (spec.pool_size, spec.num_kv_heads, spec.blocks_per_sequence)
    assert executor.dtype == np.int32
    assert (executor >= 0).all() and (executor < spec.ranks).all()
    home = np.broadcast_to(planner.home_ranks(spec)[:, None], executor.shape)
    padding = np.broadcast_to((count == 0)[:, None], executor.shape)
    assert (executor[padding] == home[padding]).all()
    assert np.array_equal(executor, POLICIES[name](first, count, spec, np.ones(spec.ranks)))
    assert (first == before[0]).all() and (count == before[1]).all()


def test_home_of_a_block_is_the_rank_that_holds_its_tokens():
    spec = small_spec(2, 2, 1, 3)
    assert planner.home_ranks(spec).tolist() == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


def test_at_home_moves_no_block():
    spec = small_spec(2, 2, 3, 3)
    first, count = pages_of([[24], [5, 6]], spec)
    executor = planner.at_home(first, count, spec, np.ones(4))
    blocks, pages = moved(executor, first, count, spec)
    assert not blocks
    # Rank 1 reads the first half of the document, once for each head; the short documents are whole on rank 2.
    assert {(home, reader) for *_, home, reader in pages} == {(0, 1)} and len(pages) == 3 * 3


def test_random_plans_differ_by_seed_and_reach_every_rank():
    spec = small_spec(2, 2, 4, 4)
    first, count = pages_of([[32], [32]], spec)
    plans = [planner.random_plan(seed)(first, count, spec, np.ones(4)) for seed in (0, 1)]
    assert (plans[0] != plans[1]).any()
    assert set(plans[0].ravel()) == set(range(4))


# ------------------------------------------------------------------------------------------------ head-parallel


@pytest.mark.parametrize(
    ("kv_heads", "cp", "expected"),
    [
        (2, 2, [[0, 0, 0, 0], [1, 1, 1, 1]]),  # a head for each rank
        (4, 2, [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]),
        (1, 2, [[0, 1, 1, 0]]),  # ranks that share a head fold its blocks
        (1, 4, [[0, 1, 2, 3, 3, 2, 1, 0]]),
        (3, 2, [[0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]),
        (2, 4, [[0, 0, 1, 1, 1, 1, 0, 0], [2, 2, 3, 3, 3, 3, 2, 2]]),
    ],
)
def test_head_parallel_deals_heads_and_folds_what_is_shared(kv_heads, cp, expected):
    width = len(expected[0]) // cp
    spec = small_spec(1, cp, kv_heads, width)
    first, count = pages_of([[spec.seq_len]], spec)
    assert planner.head_parallel(first, count, spec, np.ones(cp))[0].tolist() == expected


@pytest.mark.parametrize("kv_heads", range(1, 10))
@pytest.mark.parametrize("cp", range(1, 10))
def test_head_parallel_is_even_on_one_document(kv_heads, cp):
    spec = small_spec(1, cp, kv_heads, 4)
    first, count = pages_of([[spec.seq_len]], spec)
    executor = planner.head_parallel(first, count, spec, np.ones(cp))
    assert (np.bincount(executor.ravel()) == spec.home_blocks).all()
    work = rank_work(executor, count, spec)
    assert work.min() == work.max()  # an even number of folds: each rank as many early as late blocks


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("kv_heads", range(1, 8))
@pytest.mark.parametrize("cp", range(1, 8))
def test_head_parallel_capacity_is_what_one_document_needs(cp, kv_heads, width):
    spec = small_spec(1, cp, kv_heads, width)
    first, count = pages_of([[spec.seq_len]], spec)
    executor = planner.head_parallel(first, count, spec, np.ones(cp))
    assert needs(executor, first, count, spec) == head_parallel_capacity(spec)


@given(pool=pools())
@settings(deadline=None, max_examples=150)
def test_head_parallel_never_needs_more_than_its_capacity(pool):
    spec, lengths = pool
    first, count = pages_of(lengths, spec)
    need = needs(planner.head_parallel(first, count, spec, np.ones(spec.ranks)), first, count, spec)
    limit = head_parallel_capacity(spec)
    for name in ("blocks", "pages", "sent_pages", "pair_blocks", "pair_pages"):
        assert getattr(need, name) <= getattr(limit, name), name


# ------------------------------------------------------------------------------------------------ the pooled planner


def roomy(spec):
    """The same pool without limits: more room than any plan needs, for the planner may count a page twice."""
    spec = dataclasses.replace(spec)
    vars(spec)["room"] = Room(*[2**40] * 5)
    return spec


@given(pool=pools(), seed=st.none() | st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=200)
def test_with_room_no_rank_is_above_its_share_by_more_than_a_block(pool, seed):
    spec, lengths = roomy(pool[0]), pool[1]
    first, count = pages_of(lengths, spec)
    speed = np.ones(spec.ranks) if seed is None else np.random.default_rng(seed).uniform(0.25, 4.0, spec.ranks)
    work = rank_work(planner.pooled(first, count, spec, speed), count, spec)
    share = work.sum() * speed / speed.sum()
    assert (work <= share + count.max() + 1e-6).all()


@given(pool=pools(), extra=st.tuples(*[st.floats(0, 2)] * 3))
@settings(deadline=None, max_examples=200)
def test_what_the_planner_says_fits_does_fit(pool, extra):
    """With any capacity that head-parallel fits: the planner's own count is at least what the plan needs."""
    spec, lengths = pool
    least = head_parallel_capacity(spec)
    room = Capacity(least.blocks + extra[0], least.pages + extra[1], least.sent_pages + extra[2])
    spec = dataclasses.replace(spec, capacity=room)
    first, count = pages_of(lengths, spec)
    share = planner.work_share(count, spec, np.ones(spec.ranks))
    for raised, scarce in ((1.0, False), (1.0, True), (2.0, True)):
        leaves = planner.leaving(first, count, spec, raised * share, scarce)
        executor, fits = planner.pour(leaves, first, count, spec, raised * share, Links(), scarce)
        if fits:
            need = needs(executor, first, count, spec)
            assert need.blocks * spec.home_blocks <= spec.room.blocks
            assert need.pages * spec.home_blocks <= spec.room.pages
            assert need.sent_pages * spec.home_blocks <= spec.room.sent_pages


@given(pool=pools(), scarce=st.booleans())
@example(pool=(small_spec(2, 3, 2, 4, window=10), [[48], [48]]), scarce=False)
@settings(deadline=None, max_examples=150)
def test_the_ledger_starts_with_what_blocks_at_home_fetch(pool, scarce):
    spec, lengths = pool
    first, count = pages_of(lengths, spec)
    target = planner.work_share(count, spec, np.ones(spec.ranks))
    leaves = planner.leaving(first, count, spec, target, scarce)
    ledger = planner._kept(leaves, first, count, spec, target)
    home = planner.at_home(first, count, spec, np.ones(spec.ranks))
    pages, work = set(), np.zeros(spec.ranks, np.int64)
    for p, h, b in np.argwhere(~leaves):
        work[home[p, h, b]] += count[p, b]
        for page in range(first[p, b], b + 1) if count[p, b] else ():
            if home_of(spec, p, page) != home[p, h, b]:
                pages.add((p, h, page, home[p, h, b]))
    readers = [reader for *_, reader in pages]
    senders = [home_of(spec, p, page) for p, _, page, _ in pages]
    assert (spec.room.pages - ledger.pages_left).tolist() == np.bincount(readers, minlength=spec.ranks).tolist()
    assert (spec.room.sent_pages - ledger.copies_left).tolist() == np.bincount(senders, minlength=spec.ranks).tolist()
    assert np.allclose(ledger.work_left, target - work)
    assert (ledger.blocks_left == spec.room.blocks).all()


@given(pool=pools(), data=st.data(), links=st.builds(Links, ranks_per_node=st.integers(1, 6)))
@settings(deadline=None, max_examples=150)
def test_the_traffic_of_a_piece_is_what_its_blocks_see_elsewhere(pool, data, links):
    spec, lengths = pool
    first, count = pages_of(lengths, spec)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=first.size, max_size=first.size))).reshape(first.shape)
    leaves = np.repeat((chosen & (count > 0))[:, None], spec.num_kv_heads, axis=1)
    node = np.arange(spec.ranks) // links.ranks_per_node
    for lane in planner._lanes(leaves, first, count, spec, links, 0.5, 4.0):
        p = lane.number // spec.num_kv_heads
        assert lane.blocks.tolist() == np.flatnonzero(leaves[p, 0]).tolist()
        end = data.draw(st.integers(1, len(lane.blocks)))
        start = np.array(data.draw(st.lists(st.integers(0, end), min_size=spec.ranks, max_size=spec.ranks)))
        traffic = planner._traffic(lane, start, end, spec)
        for rank in range(spec.ranks):
            piece = lane.blocks[start[rank] : end]
            assert traffic.blocks[rank] == sum(home_of(spec, p, b) != rank for b in piece)
            if len(piece):
                # A piece fetches everything between the first page it sees and its last block, gaps included.
                homes = np.array([home_of(spec, p, page) for page in range(first[p, piece[0]], piece[-1] + 1)])
                assert traffic.pages[rank] == (homes != rank).sum()
                assert traffic.crossing[rank] == (node[homes] != node[rank]).sum()
                copies = planner._copies(lane, rank, int(first[p, piece[0]]), int(piece[-1]) + 1, spec)
                homes = homes[homes != rank] - p * spec.cp
                assert copies.tolist() == np.bincount(homes, minlength=spec.cp).tolist()


def crossings(executor, first, count, spec, node_ranks):
    """Pages that cross nodes, each once for every node that reads it, from the definition."""
    _, pages = moved(executor, first, count, spec)
    return {(p, h, page, to // node_ranks) for p, h, page, home, to in pages if home // node_ranks != to // node_ranks}


def test_a_heavy_document_goes_to_few_nodes_where_relays_pass_pages_on():
    """Eight nodes of four, one document that fills its sequence, four heads: half a head of work for each node, so a
    head needs two nodes, and a third where one has less work left. Without relays every reader gets its own copy."""
    spec = PoolSpec(2048, 8, 4, 8, 4, 8, block=8, waves=3, ranks_per_node=4, capacity=100.0)
    first, count = pages_of([[2048], *[[16] * 128] * 7], dataclasses.replace(spec, block=8))
    links = Links(ranks_per_node=4)
    two_level = planner.pooled(first, count, spec, np.ones(32), links=links)
    work = rank_work(two_level, count, spec)
    assert work.max() <= work.mean() + count.max()
    nodes = [len(np.unique(two_level[0, h] // 4)) for h in range(4)]
    assert max(nodes) <= 4 and sum(nodes) <= 4 * 3 + 1  # its own node, which keeps a part of every head, among them
    direct = planner.pooled(first, count, dataclasses.replace(spec, ranks_per_node=None), np.ones(32), links=links)
    copies = [(home, to) for *_, home, to in moved(direct, first, count, spec)[1] if home // 4 != to // 4]
    assert len(crossings(two_level, first, count, spec, 4)) < 0.5 * len(copies)


def test_what_a_node_can_do_itself_stays_in_it():
    """Two nodes, each home to one heavy and one light sequence: work is shared inside, nothing crosses."""
    spec = PoolSpec(512, 4, 2, 4, 2, 8, block=8)
    first, count = pages_of([[512], [8] * 64, [8] * 64, [512]], spec)
    executor = planner.pooled(first, count, spec, np.ones(8), links=Links(ranks_per_node=4))
    assert not crossings(executor, first, count, spec, 4)
    work = rank_work(executor, count, spec)
    assert work.max() <= work.mean() + count.max()


@pytest.mark.parametrize(
    ("pool_size", "cp", "kv_heads", "width"), [(2, 1, 1, 4), (2, 1, 2, 3), (3, 1, 1, 3), (1, 2, 2, 2), (2, 2, 1, 2)]
)
def test_slowest_rank_is_within_a_block_of_the_exact_optimum(pool_size, cp, kv_heads, width):
    spec = roomy(small_spec(pool_size, cp, kv_heads, width))
    rng = np.random.default_rng(7)
    for _ in range(4):
        lengths = []
        for _ in range(pool_size):
            cut = int(rng.integers(1, spec.seq_len + 1))
            lengths.append([cut] if cut == spec.seq_len else [cut, spec.seq_len - cut])
        first, count = pages_of(lengths, spec)
        executor = planner.pooled(first, count, spec, np.ones(spec.ranks))
        units = np.repeat(count[:, None], kv_heads, axis=1).ravel()
        # The loads of every assignment there is, (assignments that differ, ranks).
        loads = np.zeros((1, spec.ranks), np.int64)
        one_rank = np.eye(spec.ranks, dtype=np.int64)
        for unit in units:
            grown = (loads[:, None] + unit * one_rank).reshape(-1, spec.ranks)
            loads = np.unique(np.sort(grown), axis=0)  # ranks are alike
        best = loads.max(axis=1).min()
        assert best <= rank_work(executor, count, spec).max() <= best + count.max()


def test_balanced_work_stays_home():
    spec = small_spec(3, 2, 2, 4)
    first, count = pages_of([[16, 16]] * 3, spec)
    executor = planner.pooled(first, count, spec, np.ones(6))
    assert np.array_equal(executor, planner.at_home(first, count, spec, np.ones(6)))


def test_the_example_of_the_docstring():
    spec = small_spec(2, 2, 4, 4, group=1)
    first, count = pages_of([[32], [4] * 8], spec)
    assert count.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1] * 8]
    at_home = planner.at_home(first, count, spec, np.ones(4))
    assert rank_work(at_home, count, spec).tolist() == [40, 104, 16, 16]
    executor = planner.pooled(first, count, spec, np.ones(4))
    assert rank_work(executor, count, spec).tolist() == [48, 44, 42, 42]
    for p in (0, 1):
        for line in str(executor[p]).splitlines():
            assert line.strip() in str(planner.__doc__)
    faster = planner.pooled(first, count, spec, np.array([1.0, 1.0, 1.0, 3.0]))
    assert 88 - 8 <= rank_work(faster, count, spec)[3] <= 88 + 8


def test_a_rank_twice_as_fast_gets_twice_the_work():
    spec = roomy(small_spec(2, 2, 4, 16))
    first, count = pages_of([[256 // 2], [20] * 6], spec)
    speed = np.array([1.0, 2.0, 1.0, 0.5])
    work = rank_work(planner.pooled(first, count, spec, speed), count, spec)
    assert np.abs(work / work.sum() - speed / speed.sum()).max() < count.max() / work.sum()


def test_speeds_are_relative():
    spec = small_spec(2, 2, 2, 8)
    first, count = pages_of([[64], [9, 30, 2]], spec)
    speed = np.array([1.0, 2.0, 0.5, 1.5])
    assert np.array_equal(planner.pooled(first, count, spec, speed), planner.pooled(first, count, spec, 1000 * speed))


def test_an_all_padding_pool_stays_home():
    spec = small_spec(2, 2, 2, 3)
    first, count = pages_of([[], []], spec)
    assert not count.any()
    executor = planner.pooled(first, count, spec, np.ones(4))
    assert np.array_equal(executor, planner.at_home(first, count, spec, np.ones(4)))


def test_one_rank_keeps_everything():
    spec = small_spec(1, 1, 2, 5)
    first, count = pages_of([[3, 7, 1]], spec)
    assert not planner.pooled(first, count, spec, np.ones(1)).any()


def test_short_room_raises_the_shares_no_more_than_it_must():
    """One document in a pool of four: every rank reads its first page, so a balanced plan is short of copies."""
    spec = PoolSpec(seq_len=1024, pool_size=4, cp=4, num_heads=2, num_kv_heads=2, head_dim=8, block=4)
    lengths = [[1024], [], [], []]
    first, count = pages_of(lengths, spec)
    imbalance = {}
    for sent in (8.0, 4.0, 2.0):
        tight = dataclasses.replace(spec, capacity=Capacity(0.75, 4.0, sent))
        executor = planner.pooled(first, count, tight, np.ones(16))
        need = needs(executor, first, count, tight)
        assert need.blocks <= 0.75 and need.pages <= 4.0 and need.sent_pages <= sent
        work = rank_work(executor, count, spec)
        imbalance[sent] = work.max() / work.mean()
    assert imbalance[8.0] <= 1 + count.max() * 16 / (2 * count.sum())
    # Two copies: each of two lanes is executed by two ranks besides the one that is home to its first page.
    assert imbalance[8.0] < imbalance[4.0] < imbalance[2.0] < 4.0
    assert imbalance[2.0] >= 16 / 5


def test_room_for_blocks_holds_over_all_pieces_of_a_rank():
    """Ranks 2 and 3 are idle and twice as fast: they should get two thirds of the work, and have room for a half."""
    spec = small_spec(2, 2, 4, 16, capacity=Capacity(0.5, 4.0, 4.0))
    first, count = pages_of([[BLOCK] * 32, []], spec)
    speed = np.array([1.0, 1.0, 2.0, 2.0])
    tight = rank_work(planner.pooled(first, count, spec, speed), count, spec)
    assert tight.tolist() == [32, 32, 32, 32]
    free = rank_work(planner.pooled(first, count, roomy(spec), speed), count, spec)
    assert np.abs(free - 128 * speed / 6).max() <= 1


def test_long_documents_move_in_long_runs():
    """A heavy document is cut into few pieces: at most a piece for every lane and for every rank."""
    spec = PoolSpec(seq_len=4096, pool_size=4, cp=4, num_heads=8, num_kv_heads=4, head_dim=8, block=4)
    first, count = pages_of([[4096], [100] * 40, [50] * 80, [1000] * 4], spec)
    executor = planner.pooled(first, count, roomy(spec), np.ones(16))
    cuts = (np.diff(executor[0], axis=1) != 0).sum()
    assert cuts <= 2 * (spec.num_kv_heads + spec.ranks)


def test_policies_share_one_signature():
    spec = small_spec(1, 2, 1, 2)
    first, count = pages_of([[16]], spec)
    for policy in POLICIES.values():
        assert policy(first_page=first, num_pages=count, spec=spec, speed=np.ones(2)).shape == (1, 1, 4)


def test_windows_limit_what_moves():
    """With a window of one block nothing reaches further back than the block before."""
    spec = small_spec(2, 4, 2, 4, window=BLOCK)
    first, count = pages_of([[64], [64]], spec)
    executor = planner.pooled(first, count, spec, np.ones(8))
    work = rank_work(executor, count, spec)
    assert work.max() <= work.mean() + count.max()
    blocks, pages = moved(executor, first, count, spec)
    assert len(pages) <= 2 * len(blocks) + 2 * 2 * 3  # a moved block brings two pages; each part reads one before it


def test_where_nearly_all_sequences_are_one_document_room_for_received_blocks_binds():
    """Seven whole documents and one light sequence, twice as many ranks to a sequence as kv heads: a rank that shares a
    head takes its many light first blocks. With room for one and a half home blocks all have their share."""
    spec = PoolSpec(2**17, 8, 16, 32, 8, 128)
    first, count = pages_of([[2**17]] * 7 + [[2048] * 64], spec)
    imbalance = {}
    for blocks in (1.0, 1.5):
        room = dataclasses.replace(spec, capacity=Capacity(blocks, 4.0, 17.0))
        work = rank_work(planner.pooled(first, count, room, np.ones(spec.ranks)), count, spec)
        imbalance[blocks] = work.max() / work.mean()
    assert imbalance[1.5] < 1.02 and 1.1 < imbalance[1.0] < 1.14
