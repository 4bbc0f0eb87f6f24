"""What an assignment makes ranks do and send, for assignments that no capacity has room for.

`plan_pool` replaces such a plan by the head-parallel one, and its tables have the size of the room. The routes alone
say as much: this counts them as `libra_jax.modelled.plan_counts` counts tables (tests hold the two against each other).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from libra_jax.modelled import PlanCounts
from libra_jax.routing import Copies, PoolWork, assign_waves, choose_relays, lack_of_room, route, runs_of
from libra_jax.spec import PoolSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Travel:
    """counts: pages visited and what travels. lack: why the room of the spec does not hold it, or None."""

    spec: PoolSpec
    counts: PlanCounts
    lack: str | None

    @property
    def work(self) -> np.ndarray:
        """(N,) pages visited."""
        return self.counts.pages.sum(axis=1)

    @property
    def moved_bytes(self) -> np.ndarray:
        """(N senders, N receivers), forward, dispatch and return together, as in `libra_jax.PlanStats`."""
        spec, counts = self.spec, self.counts
        result = spec.block * spec.group * spec.value_dim * spec.item_bytes
        blocks = counts.sent_blocks.sum(axis=1)
        pages = (counts.sent_pages + counts.passed_pages).sum(axis=1)
        return blocks * (spec.block_bytes - result) + blocks.T * result + pages * spec.page_bytes


def travel(executor: np.ndarray, first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec) -> Travel:
    """executor: (P, K, nb) int32. first_page, num_pages: (P, nb), as `workload.block_pages` gives for each sequence."""
    n, exchanges = spec.ranks, spec.exchanges
    work = PoolWork(spec, first_page, num_pages, np.zeros((0,), np.int32))  # routes ask for no token's first key
    relays = choose_relays(runs_of(executor, work), work)
    wave = assign_waves(executor, work, relays)
    routes = route(executor, wave, work, relays)

    def per_wave(weights: np.ndarray) -> np.ndarray:
        each = np.broadcast_to(weights[:, None], executor.shape).reshape(-1)
        counted = np.bincount((executor * spec.waves + wave).reshape(-1), each, n * spec.waves)
        return counted.astype(np.int64).reshape(n, spec.waves)

    def cube(copies: Copies, first: np.ndarray, exchange: np.ndarray, last: np.ndarray) -> np.ndarray:
        key = (first.astype(np.int64) * exchanges + exchange) * n + last
        counted = np.bincount(key, copies.length, n * exchanges * n)
        return counted.astype(np.int64).reshape(n, exchanges, n)

    blocks, pages, passed = routes.blocks, routes.pages, routes.passed
    counts = PlanCounts(
        pages=per_wave(num_pages),
        blocks=per_wave(num_pages > 0),
        sent_blocks=cube(blocks, blocks.source, blocks.arrives, blocks.target),
        sent_pages=cube(pages, pages.source, pages.arrives, pages.target),
        returned_pages=cube(pages, pages.target, pages.returns, pages.source),
        passed_pages=cube(passed, passed.source, passed.arrives, passed.target),
        returned_passed=cube(passed, passed.target, passed.returns, passed.source),
    )
    return Travel(spec, counts, lack_of_room(routes, spec))
