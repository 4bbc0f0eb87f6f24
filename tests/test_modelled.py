"""Modelled time: against a simulation event by event, worked cases, and what has to hold whatever the numbers."""

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import CostModel, Links, PoolSpec, plan_pool, plan_seconds, planner, stack_plans
from libra_jax.modelled import plan_counts
from libra_jax.workload import block_pages

BLOCK = 4
FREE = Links(1000, inside=1e30, across=1e30, inside_latency=0, across_latency=0)


def small_spec(pool_size=2, cp=2, width=3, waves=3, kv_heads=2, **other):
    return PoolSpec(
        seq_len=cp * width * BLOCK, pool_size=pool_size, cp=cp, num_heads=2 * kv_heads, num_kv_heads=kv_heads,
        head_dim=8, v_head_dim=4, block=BLOCK, waves=waves, capacity=1000.0, **other,
    )  # fmt: skip


def random_lengths(spec, rng):
    lengths = []
    for _ in range(spec.pool_size):
        left, documents = spec.seq_len, []
        while left > 0:
            documents.append(int(rng.integers(1, left + 1)))
            left -= documents[-1]
        lengths.append(documents[: int(rng.integers(1, len(documents) + 1))])
    return lengths


# ------------------------------------------------------------------------------- what a plan moves, from its definition


def item_bytes(spec, kind, backward):
    """Bytes of one item as the operator's docstrings describe it; spec has keys of 8 and values of 4, bfloat16."""
    tokens, heads = spec.block, spec.group
    q, out, page = tokens * heads * 8 * 2, tokens * heads * 4 * 2, tokens * (8 + 4) * 2
    if kind == "block":
        return q + 4 * tokens + (out + 4 * tokens * heads if backward else 0)
    if kind == "result":
        return q if backward else out
    assert kind in ("page", "gradient", "passed", "passed gradient")
    return page


def transfers(plan, lengths, backward):
    """[(kind, exchange, sender, receiver, bytes)] of a plan without relays, from who executes what and when."""
    spec, moves = plan.spec, []
    used = defaultdict(set)  # (reader, sequence, head, page): exchanges whose wave reads it
    for p, h, b in np.ndindex(plan.executor.shape):
        pages = block_pages(lengths[p], spec)
        rank, home = int(plan.executor[p, h, b]), p * spec.cp + b // spec.blocks_per_rank
        x = max(int(plan.wave[p, h, b]) - 1, 0)
        if rank != home:
            moves += [("block", x, home, rank), ("result", x, rank, home)]
        for page in range(pages.first_page[b], b + 1) if pages.num_pages[b] else ():
            if p * spec.cp + page // spec.blocks_per_rank != rank:
                used[rank, p, h, page].add(x)
    for (rank, p, _, page), exchanges in used.items():
        home = p * spec.cp + page // spec.blocks_per_rank
        moves.append(("page", min(exchanges), home, rank))
        if backward:
            moves.append(("gradient", max(exchanges), rank, home))
    return [(*move, item_bytes(spec, move[0], backward)) for move in moves]


def kernel_seconds(plan, lengths, cost, speed, backward):
    """[rank][wave]"""
    spec = plan.spec
    price = cost.scaled(spec).backward if backward else cost.scaled(spec).forward
    seconds = [[price(0, 0, 1)] * spec.waves for _ in range(spec.ranks)]
    for p, h, b in np.ndindex(plan.executor.shape):
        pages = int(block_pages(lengths[p], spec).num_pages[b])
        rank = int(plan.executor[p, h, b])
        seconds[rank][int(plan.wave[p, h, b])] += price(pages, int(pages > 0)) / speed[rank]
    return seconds


# --------------------------------------------------------------------------------------------- event by event


class Simulation:
    """Every rank is a program of windows; a window is a set of jobs that start side by side. A job is a kernel, or a
    rank's part of a collective. Once all ranks of a collective have come, each sends its parcels over its links, one
    parcel after the other on each of four wires: to and from its node, to and from elsewhere."""

    def __init__(self, links):
        self.links, self.events, self.order = links, [], 0
        self.waiting = defaultdict(list)
        self.wire_free = defaultdict(float)  # (rank, wire): since when it is free

    def at(self, time: float, action: Callable[[float], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, action))

    def run(self, programs):
        """programs: {rank: [[job, ...], ...]}; a job is ("kernel", seconds), or ("collective", name, members, parcels,
        whether it has the wires first). -> when the last rank is done."""
        ends = {}

        def enter(rank, window, time):
            if window == len(programs[rank]):
                ends[rank] = time
                return
            jobs = programs[rank][window]
            open_jobs = [len(jobs)]

            def done(time):
                open_jobs[0] -= 1
                if open_jobs[0] == 0:
                    enter(rank, window + 1, time)

            if not jobs:
                open_jobs[0] = 1
                done(time)
            for job in jobs:
                if job[0] == "kernel":
                    self.at(time + job[1], done)
                else:
                    self.come(rank, time, job, done)

        for rank in programs:
            enter(rank, 0, 0.0)
        while self.events:
            time, _, action = heapq.heappop(self.events)
            action(time)
        assert ends.keys() == programs.keys() and not any(self.waiting.values()), "somebody waits for ever"
        return max(ends.values())

    def come(self, rank, time, job, done):
        _, name, members, parcels, priority = job
        self.waiting[name].append((rank, parcels, done))
        if len(self.waiting[name]) == len(members):
            came = self.waiting.pop(name)

            def start(now):
                for one, its_parcels, its_done in came:
                    self.transmit(now, one, its_parcels, its_done, members, priority)

            self.at(time, start)

    def transmit(self, now, rank, parcels, done, members, priority):
        node = self.links.ranks_per_node
        spread = len({member // node for member in members}) > 1
        latency = self.links.across_latency if spread else self.links.inside_latency
        end = now
        wires = defaultdict(float)
        for sender, receiver, size in parcels:
            near = sender // node == receiver // node
            if sender == rank:
                wires["out", near] += size / (self.links.inside if near else self.links.across)
            if receiver == rank:
                wires["in", near] += size / (self.links.inside if near else self.links.across)
        for near in (True, False):  # both directions of a kind of link are done together
            busy = max(wires["out", near], wires["in", near])
            start = max(now, self.wire_free[rank, near]) if not priority else now
            if priority:
                self.wire_free[rank, near] = start + busy
            end = max(end, start + busy)
        self.at(end + latency, done)


def simulated(spec, kernels, moves, links, backward):
    """Slowest rank's end. moves: [(kind, exchange, sender, receiver, bytes)]; what relays do is among them."""
    ranks, waves, m = range(spec.ranks), spec.waves, spec.node_ranks
    everyone = tuple(ranks)
    out, home = ("block", "page"), ("result", "gradient")

    def collective(name, rank, wanted):
        """wanted: {(kind, exchange)}; the parcels that concern the rank."""
        passes = any(kind.startswith("passed") for kind, _ in wanted)
        members = tuple(range(rank // m * m, rank // m * m + m)) if passes else everyone
        parcels = [(s, r, size) for kind, x, s, r, size in moves if (kind, x) in wanted and rank in (s, r)]
        return ("collective", (name, members), members, parcels, passes)

    programs = {}
    for rank in ranks:
        windows = []
        if len(ranks) > 1 and waves == 1:
            windows.append([collective("first", rank, {(kind, 0) for kind in out})])
        for w in range(waves):
            jobs: list[tuple] = [("kernel", kernels[rank][w])]
            wanted = {(kind, w) for kind in out if w + 1 < waves} | {(kind, w - 2) for kind in home if w >= 2}
            passed = {("passed", w)} if 0 < w < waves - 1 else set()
            passed |= {("passed gradient", w - 2)} if w > 2 and backward else set()
            if spec.ranks_per_node and passed:
                jobs.append(collective(f"relays {w}", rank, passed))
            if wanted and len(ranks) > 1:
                jobs.append(collective(f"window {w}", rank, wanted))
            windows.append(jobs)
        if len(ranks) > 1:
            if spec.ranks_per_node and backward:
                windows.append([collective("last to relays", rank, {("passed gradient", spec.exchanges - 1)})])
            windows.append([collective("last", rank, {(kind, spec.exchanges - 1) for kind in home})])
        programs[rank] = windows
    return Simulation(links).run(programs)


def some_links(rng, node):
    inside, across = 10 ** rng.uniform(6, 9, 2)
    return Links(node, inside, across, *rng.choice([0.0, 1e-6, 1e-4], 2))


def some_cost(rng):
    names = [field.name for field in dataclasses.fields(CostModel)][:6]
    return CostModel(**dict(zip(names, 10 ** rng.uniform(-6, -3, 6), strict=True)))


@pytest.mark.parametrize("seed", range(30))
def test_same_as_event_by_event(seed):
    rng = np.random.default_rng(seed)
    spec = small_spec(*rng.choice([1, 2, 3], 2).tolist(), waves=int(rng.integers(1, 7)))
    lengths = random_lengths(spec, rng)
    plan = plan_pool(lengths, spec, policy=planner.random_plan(seed))
    assert plan.stats.fallback is None
    cost, links, speed = some_cost(rng), some_links(rng, int(rng.integers(1, 5))), rng.uniform(0.3, 1.5, spec.ranks)
    got = plan_seconds(plan, cost, links, speed)
    for row, (backward, seconds) in enumerate(((False, got.forward), (True, got.backward))):
        moves = transfers(plan, lengths, backward)
        kernels = kernel_seconds(plan, lengths, cost, speed, backward)
        assert seconds == pytest.approx(simulated(spec, kernels, moves, links, backward), rel=1e-9)
        kernel, exposed = (
            (got.backward_kernel, got.backward_exposed) if backward else (got.forward_kernel, got.forward_exposed)
        )
        assert kernel == pytest.approx(max(map(sum, kernels)), rel=1e-9)
        assert exposed == pytest.approx(seconds - kernel)
        for name, side, near in (
            ("inside_sent", 2, True), ("inside_received", 3, True),
            ("across_sent", 2, False), ("across_received", 3, False),
        ):  # fmt: skip
            expected = np.zeros(spec.ranks, np.int64)
            for move in moves:
                if (move[2] // links.ranks_per_node == move[3] // links.ranks_per_node) == near:
                    expected[move[side]] += move[4]
            np.testing.assert_array_equal(getattr(got, name)[row], expected)


@pytest.mark.parametrize("seed", range(30))
def test_same_as_event_by_event_with_relays(seed):
    """What is passed on is made up, beside a plan that passes nothing on: the model reads offsets, nothing else."""
    rng = np.random.default_rng(100 + seed)
    node = int(rng.choice([2, 4]))
    flat = small_spec(4, 2, waves=int(rng.integers(3, 7)))
    spec = dataclasses.replace(flat, ranks_per_node=node)
    lengths = random_lengths(spec, rng)
    plan = plan_pool(lengths, flat, policy=planner.random_plan(seed))
    assert plan.stats.fallback is None
    counts = {name: rng.integers(0, 20, (4, 2, spec.exchanges, node)) for name in ("passed", "passed gradient")}
    own = np.arange(8).reshape(4, 2) % node
    extra = []
    for name, count in counts.items():
        np.put_along_axis(count, own[:, :, None, None], 0, axis=3)
        count[:, :, 0] = 0
        for p, c, x, mate in np.ndindex(count.shape):
            sender = p * 2 + c
            extra.append((name, x, sender, sender // node * node + mate, int(count[p, c, x, mate]) * 96))

    def offsets(count):
        flat = np.cumsum(count.reshape(4, 2, -1), axis=2)
        flat = np.concatenate([np.zeros((4, 2, 1), int), flat], axis=2)
        starts = np.arange(spec.exchanges)[:, None] * node + np.arange(node + 1)
        return flat[:, :, starts].astype(np.int32)

    tables = dataclasses.replace(
        plan.tables,
        spec=spec,
        relay_page_offsets=offsets(counts["passed"]),
        return_passed_offsets=offsets(counts["passed gradient"]),
    )
    cost, links = some_cost(rng), some_links(rng, int(rng.choice([2, 3, 4, 8])))
    got = plan_seconds(tables, cost, links)
    for backward, seconds in ((False, got.forward), (True, got.backward)):
        moves = transfers(plan, lengths, backward)
        moves += [move for move in extra if backward or move[0] == "passed"]
        kernels = kernel_seconds(plan, lengths, cost, np.ones(8), backward)
        assert seconds == pytest.approx(simulated(spec, kernels, moves, links, backward), rel=1e-9)
    sent = sum(move[4] for move in extra if move[0] == "passed")
    assert sent > 0
    total = got.inside_sent[0].sum() + got.across_sent[0].sum()
    assert total == sum(move[4] for move in transfers(plan, lengths, False)) + sent


@pytest.mark.parametrize("seed", range(10))
def test_bytes_of_plans_with_relays(seed):
    """What is sent in the forward pass is what the plan's statistics say, and first visible positions; in the backward
    pass every page that went out comes back, by the same relays."""
    rng = np.random.default_rng(seed)
    spec = small_spec(4, 2, waves=int(rng.integers(3, 7)), ranks_per_node=4)
    plan = plan_pool(random_lengths(spec, rng), spec, policy=planner.random_plan(seed))
    assert plan.stats.fallback is None
    counts, got = plan_counts(plan.tables), plan_seconds(plan, links=Links(4))
    assert counts.passed_pages.sum() > 0
    node = np.arange(8) // 4
    assert not counts.passed_pages.transpose(0, 2, 1)[node[:, None] != node].any()
    left = counts.sent_blocks.sum(axis=(1, 2))
    np.testing.assert_array_equal((got.inside_sent + got.across_sent)[0], plan.stats.sent_bytes + left * 4 * BLOCK)
    came = counts.sent_blocks.sum(axis=(0, 1))
    received = plan.stats.received_bytes + came * 4 * BLOCK
    np.testing.assert_array_equal((got.inside_received + got.across_received)[0], received)
    for out, back in (("sent_pages", "returned_pages"), ("passed_pages", "returned_passed")):
        went, returned = getattr(counts, out).sum(axis=1), getattr(counts, back).sum(axis=1)
        np.testing.assert_array_equal(went, returned.T)
    assert got.across_sent[1].sum() == got.across_received[1].sum()


# ------------------------------------------------------------------------------------------------ worked by hand


ONE_SECOND_A_PAGE = CostModel(
    1.0, 0.0, 0.0, 2.0, 0.0, 0.0, block=BLOCK, group=2, head_dim=8, v_head_dim=4
)  # two seconds in the backward pass


def worked(waves, links=FREE, cost=ONE_SECOND_A_PAGE):
    """Two ranks, a sequence of 4 blocks each, one head. Sequence 0 is one document of 4 blocks: blocks 1 to 4 pages;
    sequence 1 is four documents of one block. Rank 1 executes the last block of sequence 0."""
    spec = PoolSpec(
        seq_len=16, pool_size=2, cp=1, num_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=4, block=BLOCK, waves=waves,
        capacity=1000.0,
    )  # fmt: skip

    def policy(first_page, num_pages, spec, speed):
        return np.array([[[0, 0, 0, 1]], [[1, 1, 1, 1]]])

    return plan_seconds(plan_pool([[16], [4, 4, 4, 4]], spec, policy=policy), cost, links)


def test_worked_two_waves():
    # Wave 0: rank 0 visits 1 + 2 + 3 pages, rank 1 visits 4. Wave 1: rank 1 visits the 4 pages of the block it got.
    seconds = worked(2)
    assert (seconds.forward_kernel, seconds.ideal_forward, seconds.forward) == (8, 7, 8)
    assert (seconds.backward_kernel, seconds.ideal_backward, seconds.backward) == (16, 14, 16)
    assert (seconds.total, seconds.ideal) == (24, 21)
    # Bytes: a block of queries 4 * 2 * 8 * 2 = 128 and 16 of first visible positions; 4 pages of 4 * 12 * 2 = 96; an
    # output 4 * 2 * 4 * 2 = 64. Backward: 128 + 16 + 64 and 32 of delta, the pages; 128 and 4 pages come home.
    np.testing.assert_array_equal(seconds.inside_sent, [[528, 64], [624, 512]])
    np.testing.assert_array_equal(seconds.inside_received, [[64, 528], [512, 624]])
    assert not seconds.across_sent.any() and not seconds.across_received.any()


def test_worked_slow_links():
    # Nodes of one rank, 48 bytes a second between them and half a second of latency: the dispatch takes 11.5 s beside
    # wave 0, wave 1 takes 4 s, the return 64 / 48 + 0.5.
    links = Links(1, inside=1, across=48, inside_latency=100, across_latency=0.5)
    seconds = worked(2, links)
    assert seconds.forward == pytest.approx(11.5 + 4 + 64 / 48 + 0.5)
    assert seconds.backward == pytest.approx(13.5 + 8 + 512 / 48 + 0.5)
    assert seconds.forward_exposed == pytest.approx(seconds.forward - 8)
    np.testing.assert_array_equal(seconds.across_sent, [[528, 64], [624, 512]])
    # One wave: dispatch, then all work (8 s on rank 1), then the return.
    assert worked(1, links).forward == pytest.approx(11.5 + 8 + 64 / 48 + 0.5)


def test_worked_wave_without_work_costs_its_launch():
    cost = dataclasses.replace(ONE_SECOND_A_PAGE, launch_seconds=10.0, block_seconds=0.25)
    seconds = worked(2, cost=cost)
    # Rank 0: two launches, though it has nothing in wave 1; rank 1: 8 pages, 5 blocks, two launches.
    assert seconds.forward == 8 + 5 * 0.25 + 2 * 10
    assert seconds.ideal_forward == (14 + 8 * 0.25) / 2


def test_one_rank_has_no_exchange():
    spec = PoolSpec(16, 1, 1, 2, 1, 8, v_head_dim=4, block=BLOCK, waves=3)
    plan = plan_pool([[16]], spec)
    slow = Links(1, 1, 1, 1000, 1000)
    seconds = plan_seconds(plan, ONE_SECOND_A_PAGE, slow)
    assert (seconds.forward, seconds.forward_exposed) == (10, 0)


# ------------------------------------------------------------------------------------------------- always


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), waves=st.integers(1, 5), data=st.data())
def test_slower_is_never_faster(seed, waves, data):
    rng = np.random.default_rng(seed)
    spec = small_spec(2, 2, waves=waves)
    plan = plan_pool(random_lengths(spec, rng), spec, policy=planner.random_plan(seed))
    cost, links, speed = some_cost(rng), some_links(rng, int(rng.integers(1, 5))), rng.uniform(0.5, 1.5, 4)
    before = plan_seconds(plan, cost, links, speed)
    factor = data.draw(st.floats(1.0, 100.0))
    slower = data.draw(st.sampled_from(["inside", "across", "inside_latency", "across_latency", "speed", "pages"]))
    if slower == "speed":
        speed = speed.copy()
        speed[data.draw(st.integers(0, 3))] /= factor
    elif slower == "pages":
        cost = dataclasses.replace(
            cost, page_seconds=cost.page_seconds * factor, backward_page_seconds=cost.backward_page_seconds * factor
        )
    else:
        value = getattr(links, slower)
        links = dataclasses.replace(links, **{slower: value * factor if "latency" in slower else value / factor})
    after = plan_seconds(plan, cost, links, speed)
    assert after.forward >= before.forward * (1 - 1e-12)
    assert after.backward >= before.backward * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), waves=st.integers(1, 5))
def test_bounds(seed, waves):
    """Never less than the busiest rank's kernels, and these never less than the ideal. With links that cost nothing,
    one or two waves take just the kernels; more also wait for each other, at most for the slowest in every wave."""
    rng = np.random.default_rng(seed)
    spec = small_spec(2, 3, waves=waves)
    lengths = random_lengths(spec, rng)
    plan = plan_pool(lengths, spec, policy=planner.random_plan(seed))
    cost, speed = some_cost(rng), rng.uniform(0.5, 1.5, 6)
    limited, free = plan_seconds(plan, cost, some_links(rng, 2), speed), plan_seconds(plan, cost, FREE, speed)
    for seconds in (limited, free):
        assert seconds.forward >= seconds.forward_kernel >= seconds.ideal_forward
        assert seconds.backward >= seconds.backward_kernel >= seconds.ideal_backward
    if waves <= 2:
        assert free.forward == pytest.approx(free.forward_kernel)
        assert free.backward == pytest.approx(free.backward_kernel)
    kernels = np.array(kernel_seconds(plan, lengths, cost, speed, False))
    assert free.forward <= kernels.max(axis=0).sum() * (1 + 1e-9)


def test_all_ranks_alike_take_just_their_kernels():
    """Four waves, equal work in each on every rank: links that cost nothing leave nothing exposed."""
    spec = small_spec(4, 1, width=8, waves=4, kv_heads=4)
    plan = plan_pool([[32]] * 4, spec, policy=lambda first, pages, spec, speed: np.tile(
        (np.arange(4)[:, None] + np.arange(4)) [:, :, None] % 4, (1, 1, 8)
    ))  # fmt: skip
    assert (plan.stats.work == plan.stats.work[0]).all()
    seconds = plan_seconds(plan, links=FREE)
    assert seconds.forward == pytest.approx(seconds.forward_kernel)
    assert seconds.ideal_forward < seconds.forward_kernel  # launches


def test_deterministic_and_of_plans_or_tables():
    spec = small_spec(2, 2)
    plan = plan_pool([[24], [10, 3]], spec)
    one, other = plan_seconds(plan), plan_seconds(plan.tables, CostModel(), Links(), [1.0] * 4)
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("inside", 0, "above 0"),
        ("across", -5e9, "above 0"),
        ("across", math.inf, "finite"),
        ("inside", "fast", "finite"),
        ("inside_latency", -1e-6, "0 or more"),
        ("across_latency", math.nan, "finite"),
        ("ranks_per_node", 0, "whole number of at least 1"),
        ("ranks_per_node", 7.5, "whole number of at least 1"),
        ("ranks_per_node", True, "whole number"),
    ],
)
def test_links_name_what_is_wrong(field, value, rule):
    with pytest.raises(ValueError, match=f"links: {field} .*{rule}") as error:
        Links(**{field: value})
    assert repr(value) in str(error.value)


def test_links_take_numpy_numbers():
    numbers: dict[str, Any] = {"ranks_per_node": np.int64(8), "inside": np.float32(2.0)}
    links = Links(**numbers, inside_latency=0)
    assert (links.ranks_per_node, links.inside, links.inside_latency) == (8, 2.0, 0.0)
    assert type(links.ranks_per_node) is int
    assert hash(links) == hash(Links(8, 2.0, inside_latency=0))


def test_refusals():
    spec = small_spec(2, 2)
    plan = plan_pool([[24], [10, 3]], spec)
    with pytest.raises(ValueError, match=r"one pool's.*\(2, 2\).*\(2, 2, 2, 4\)"):
        plan_seconds(stack_plans([plan, plan]))
    with pytest.raises(ValueError, match=r"shape \(3,\); the pool has 4 ranks"):
        plan_seconds(plan, speed=[1, 1, 1])
    with pytest.raises(ValueError, match=r"speed\[2\] \(0.0\) must be finite and greater than 0"):
        plan_seconds(plan, speed=[1, 1, 0, 1])
