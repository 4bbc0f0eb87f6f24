"""Modelled time of a plan: what its attention takes, forward and backward, read from nothing but its tables.

Kernels are priced by a `CostModel`, bytes by `Links`. A pass is followed through its windows as `waves` runs them. In
window w the kernel of wave w computes; beside it one collective of the pool brings what wave w + 1 reads and takes home
what wave w - 1 made, and one of each node (`PoolSpec.ranks_per_node`) carries what relays pass on, and its gradients:

- a collective starts when the last of its ranks has come to it, and ends for a rank when that rank's own bytes are
  through, sent and received at the same time, inside and across nodes at the same time, and the latency is over. What
  relays pass on takes the links inside a node first. Gradients go back to relays in the backward pass only;
- a rank's next window starts when its kernel and its exchanges are done;
- with one wave the dispatch comes before all work; the last return comes after all work, relays first.

Not counted: copies into and out of buffers, what else travels at the time, and contention beyond a rank's own links.
Host side: NumPy only. Letters as in `tables`: N ranks, W waves, X exchanges, M ranks among which relays pass on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from libra_jax.links import Links
from libra_jax.routing import Copies, PoolWork, Routing
from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables
from libra_jax.workload import CostModel

if TYPE_CHECKING:
    from libra_jax.plan import Plan


class PlanCounts(NamedTuple):
    """What each rank does and what travels.

    pages, blocks: (N, W) pages visited in a wave, and blocks executed that are not all padding.
    sent_blocks, sent_pages: (N, X, N) dispatched by exchange x, [home, x, executor]. Results of blocks go back the same
        way.
    returned_pages: (N, X, N) pages whose gradients go home with the return of exchange x, [executor, x, home].
    passed_pages: (N, X, N) pages that relays pass on beside exchange x, [relay, x, reader].
    returned_passed: (N, X, N) passed pages whose gradients go to their relays with its return, [reader, x, relay].
    """

    pages: np.ndarray
    blocks: np.ndarray
    sent_blocks: np.ndarray
    sent_pages: np.ndarray
    returned_pages: np.ndarray
    passed_pages: np.ndarray
    returned_passed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class PlanSeconds:
    """Modelled seconds of one layer's attention in one pool, and the bytes its ranks move.

    forward, backward: until the slowest rank is done.
    forward_kernel, backward_kernel: the busiest rank's kernels alone, launches included.
    ideal_forward, ideal_backward: all kernels' pages and blocks spread evenly over the ranks (by speed), no launches.
    inside_sent, inside_received, across_sent, across_received: (2, N) int64 bytes to and from ranks of the same node
        and of others; row 0 forward, row 1 backward.
    """

    forward: float
    backward: float
    forward_kernel: float
    backward_kernel: float
    ideal_forward: float
    ideal_backward: float
    inside_sent: np.ndarray
    inside_received: np.ndarray
    across_sent: np.ndarray
    across_received: np.ndarray

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def ideal(self) -> float:
        return self.ideal_forward + self.ideal_backward

    @property
    def forward_exposed(self) -> float:
        """What the forward pass takes beyond the busiest rank's kernels: exchanges, and waiting for others."""
        return self.forward - self.forward_kernel

    @property
    def backward_exposed(self) -> float:
        return self.backward - self.backward_kernel


def plan_seconds(
    plan: Plan | PlanTables,
    cost: CostModel | None = None,
    links: Links | None = None,
    speed: Sequence[float] | np.ndarray | None = None,
) -> PlanSeconds:
    """Modelled seconds of one pool's plan, from its tables.

    cost: None is `CostModel()`, for the shape of the spec. links: None is `Links()`, with the spec's nodes where it has
        relays.
    speed: (N,) how fast each rank's kernels are, 1 being as `cost` says; None: all 1. (`plan_pool` looks at ratios
        alone; here 0.5 takes twice as long.) Launches take as long on all ranks.

    Deterministic; about a millisecond for 64 ranks. Raises ValueError for the tables of several pools, and
    for speeds of another number of ranks or not above 0.
    """
    tables = getattr(plan, "tables", plan)
    if not isinstance(tables, PlanTables):
        raise TypeError(f"plan_seconds takes what plan_pool returns, or its tables, got {type(plan).__name__}")
    return counted_seconds(plan_counts(tables), tables.spec, cost, links, speed)


def plan_counts(tables: PlanTables) -> PlanCounts:
    """What the tables of one pool say each rank does and sends."""
    spec = tables.spec
    n, waves = spec.ranks, spec.waves
    if np.shape(tables.wave_offsets) != (spec.pool_size, spec.cp, waves + 1):
        raise ValueError(
            f"modelled time is one pool's: tables with leading axes {(spec.pool_size, spec.cp)} are wanted, but "
            f"wave_offsets, {waves + 1} a rank, has shape {np.shape(tables.wave_offsets)}"
        )
    entries = np.asarray(tables.entries).reshape(n, -1, 5)
    offsets = np.asarray(tables.wave_offsets).reshape(n, waves + 1)
    # Entries after the last wave's are all 0, so a wave's sum may run up to the next rank's first.
    visited = np.append(entries[:, :, 3], 0)
    begin = (np.arange(n)[:, None] * entries.shape[1] + offsets[:, :-1]).reshape(-1)
    some = (np.diff(offsets, axis=1) > 0).reshape(-1)

    def per_wave(values: np.ndarray) -> np.ndarray:
        return np.where(some, np.add.reduceat(values, begin, dtype=np.int64), 0).reshape(n, waves)

    def counts(table: np.ndarray, receivers: int) -> np.ndarray:
        return np.diff(np.asarray(table).reshape(n, spec.exchanges, receivers + 1), axis=2)

    def in_node(table: np.ndarray) -> np.ndarray:
        """Counts (N, X, M) by rank of the node, set down at the ranks of the pool."""
        out = np.zeros((n, spec.exchanges, n), np.int32)
        if spec.ranks_per_node:
            nodes, m = n // spec.node_ranks, spec.node_ranks
            there = np.arange(nodes)
            blocks = out.reshape(nodes, m, spec.exchanges, nodes, m)
            blocks[there, :, :, there] = counts(table, m).reshape(nodes, m, spec.exchanges, m)
        return out

    return PlanCounts(
        pages=per_wave(visited),
        blocks=per_wave(visited > 0),
        sent_blocks=counts(tables.send_block_offsets, n),
        sent_pages=counts(tables.send_page_offsets, n),
        returned_pages=counts(tables.return_page_offsets, n),
        passed_pages=in_node(tables.relay_page_offsets),
        returned_passed=in_node(tables.return_passed_offsets),
    )


def routed_counts(routing: Routing, work: PoolWork) -> PlanCounts:
    """The same counts before anything is written into tables."""
    spec, runs = work.spec, routing.runs
    n, x, waves = spec.ranks, spec.exchanges, spec.waves
    cell, pages = runs.rank * waves + runs.wave, work.pages_of(runs)
    blocks = np.where(runs.active, runs.length, 0)

    def moved(copies: Copies, start: np.ndarray, exchange: np.ndarray, end: np.ndarray) -> np.ndarray:
        between = (start.astype(np.int64) * x + exchange) * n + end
        return np.bincount(between, copies.length, n * x * n).astype(np.int64).reshape(n, x, n)

    def there(copies: Copies) -> np.ndarray:
        return moved(copies, copies.source, copies.arrives, copies.target)

    def back(copies: Copies) -> np.ndarray:
        return moved(copies, copies.target, copies.returns, copies.source)

    return PlanCounts(
        pages=np.bincount(cell, pages, n * waves).astype(np.int64).reshape(n, waves),
        blocks=np.bincount(cell, blocks, n * waves).astype(np.int64).reshape(n, waves),
        sent_blocks=there(routing.blocks),
        sent_pages=there(routing.pages),
        returned_pages=back(routing.pages),
        passed_pages=there(routing.passed),
        returned_passed=back(routing.passed),
    )


def counted_seconds(
    counts: PlanCounts,
    spec: PoolSpec,
    cost: CostModel | None = None,
    links: Links | None = None,
    speed: Sequence[float] | np.ndarray | None = None,
) -> PlanSeconds:
    """`plan_seconds` from counts, for plans that are not written into tables (yet)."""
    check_prices(cost, links)
    cost = (CostModel() if cost is None else cost).scaled(spec)
    links = Links(spec.ranks_per_node or Links().ranks_per_node) if links is None else links
    speeds = check_speed(speed, spec)
    seconds, kernels, ideals, moved = [], [], [], []
    for price, traffic in zip((cost.forward, cost.backward), _traffic(counts, spec, links), strict=True):
        work = price(counts.pages, counts.blocks)
        kernel = work / speeds[:, None] + price(0, 0, 1)
        seconds.append(float(_clock(kernel, traffic, spec, links).max()))
        kernels.append(float(kernel.sum(axis=1).max()))
        ideals.append(float(work.sum() / speeds.sum()))
        moved.append(sum(part.sum(axis=2) for part in traffic if part is not None))
    (inside_sent, inside_received), (across_sent, across_received) = np.array(moved).transpose(1, 2, 0, 3)
    return PlanSeconds(
        *seconds, *kernels, *ideals,
        inside_sent=inside_sent, inside_received=inside_received,
        across_sent=across_sent, across_received=across_received,
    )  # fmt: skip


class _Traffic(NamedTuple):
    """A pass's bytes by rank, (2, 2, X, N) int64 each: inside and across nodes, sent and received.

    passed_back: None in the forward pass, which takes nothing back to relays and waits for nothing of the kind.
    """

    dispatch: np.ndarray
    back: np.ndarray
    passed: np.ndarray
    passed_back: np.ndarray | None


def _traffic(counts: PlanCounts, spec: PoolSpec, links: Links) -> tuple[_Traffic, _Traffic]:
    """What the two passes move, as the operator's items are made up (`waves.forward`, `waves.backward`)."""
    node = np.arange(spec.ranks) // links.ranks_per_node
    near = (node[:, None] == node)[:, None]

    def by_rank(items: np.ndarray) -> np.ndarray:
        """(N, X, N) items -> (2, 2, X, N) of each rank, as in `_Traffic`."""
        inside = np.where(near, items, 0)
        out = np.empty((2, 2, spec.exchanges, spec.ranks), np.int64)
        out[0] = inside.sum(axis=2).T, inside.sum(axis=0)
        out[1] = items.sum(axis=2).T, items.sum(axis=0)
        out[1] -= out[0]
        return out

    rows = spec.block * spec.group
    query, result = (rows * width * spec.item_bytes for width in (spec.head_dim, spec.value_dim))
    first_visible, delta, page = 4 * spec.block, 4 * rows, spec.page_bytes
    blocks, pages = by_rank(counts.sent_blocks), by_rank(counts.sent_pages) * page
    came = blocks[:, ::-1]
    passed = passed_back = np.zeros_like(blocks)
    if spec.ranks_per_node:
        passed, passed_back = by_rank(counts.passed_pages) * page, by_rank(counts.returned_passed) * page
    forward = _Traffic(blocks * (query + first_visible) + pages, came * result, passed, None)
    backward = _Traffic(
        dispatch=blocks * (query + first_visible + result + delta) + pages,
        back=came * query + by_rank(counts.returned_pages) * page,
        passed=passed,
        passed_back=passed_back,
    )
    return forward, backward


def _clock(kernel: np.ndarray, traffic: _Traffic, spec: PoolSpec, links: Links) -> np.ndarray:
    """(N,) when each rank is done with a pass. kernel: (N, W) seconds."""
    if spec.ranks == 1:
        return kernel.sum(axis=1)
    one_node = spec.ranks <= links.ranks_per_node
    latency = links.inside_latency if one_node else links.across_latency
    group = np.arange(spec.ranks) // spec.node_ranks * spec.node_ranks
    cut = group // links.ranks_per_node != (group + spec.node_ranks - 1) // links.ranks_per_node
    group_latency = np.where(cut, links.across_latency, links.inside_latency)
    rates = np.array([links.inside, links.across])[:, None]

    def through(start: np.ndarray | float, parts: list[np.ndarray]) -> np.ndarray:
        """(2, N) when all of these bytes (2, 2, N) are through on each kind of link, which is free from `start`."""
        return start + sum(parts[1:], start=parts[0]).max(axis=1) / rates

    def of_node(now: np.ndarray) -> np.ndarray:
        """(N,) when the last rank of each rank's node has come."""
        return np.repeat(now.reshape(-1, spec.node_ranks).max(axis=1), spec.node_ranks)

    def of_window(now: np.ndarray, coming: int | None, going: int | None) -> np.ndarray:
        """(N,) when each rank is done with the exchanges of a window that it enters at `now` (N,)."""
        moves = [(traffic.dispatch, coming), (traffic.back, going)]
        pool = [part[:, :, x] for part, x in moves if x is not None]
        if not pool:
            return now
        moves = [(traffic.passed, coming), (traffic.passed_back, going)]
        group = [part[:, :, x] for part, x in moves if part is not None and x]  # nothing is passed on beside exchange 0
        free, done = np.zeros((2, now.size)), now
        if spec.ranks_per_node and group:
            free = through(of_node(now), group)
            done = free.max(axis=0) + group_latency
        arrived = through(np.maximum(free, now.max()), pool).max(axis=0) + latency
        return np.maximum(done, arrived)

    now, last = np.zeros(spec.ranks), spec.exchanges - 1
    if spec.waves == 1:
        now = of_window(now, 0, None)
    for wave in range(spec.waves):
        coming = wave if wave < spec.waves - 1 else None
        going = wave - 2 if wave >= 2 else None
        now = np.maximum(now + kernel[:, wave], of_window(now, coming, going))
    # After all work gradients go to the relays first, and what these have added up goes home.
    if spec.ranks_per_node and traffic.passed_back is not None:
        now = through(of_node(now), [traffic.passed_back[:, :, last]]).max(axis=0) + group_latency
    return through(float(now.max()), [traffic.back[:, :, last]]).max(axis=0) + latency


def check_prices(cost: object, links: object) -> None:
    """Raises TypeError unless these are a `CostModel` and `Links`, or None."""
    for name, value, wanted in (("cost", cost, CostModel), ("links", links, Links)):
        if value is not None and not isinstance(value, wanted):
            raise TypeError(f"{name} must be a libra_jax.{wanted.__name__} or None, got {value!r}")


def check_speed(speed: Sequence[float] | np.ndarray | None, spec: PoolSpec) -> np.ndarray:
    """Speeds of a pool's ranks as (N,) float64; None: all 1. Raises ValueError with the rule and the number."""
    if speed is None:
        return np.ones(spec.ranks)
    try:
        speeds = np.asarray(speed, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"speed ({speed!r}) must be one number for each of {spec.ranks} ranks") from error
    if speeds.shape != (spec.ranks,):
        raise ValueError(f"speed has shape {speeds.shape}; the pool has {spec.ranks} ranks")
    bad = ~(np.isfinite(speeds) & (speeds > 0))
    if bad.any():
        raise ValueError(f"speed[{bad.argmax()}] ({speeds[bad.argmax()]}) must be finite and greater than 0")
    return speeds
