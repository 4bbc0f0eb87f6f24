"""What an assignment makes ranks do and send, for assignments that no capacity has room for.

`plan_pool` replaces such a plan by the head-parallel one, and its tables have the size of the room. The routes alone
say as much.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from libra_jax.modelled import PlanCounts, routed_counts
from libra_jax.routing import PoolWork, assign_waves, choose_relays, lack_of_room, route, runs_of
from libra_jax.spec import PoolSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Travel:
    """counts: pages visited and what travels. lack: why the room of the spec does not hold it, or None."""

    spec: PoolSpec
    counts: PlanCounts
    lack: str | None


def travel(executor: np.ndarray, first_page: np.ndarray, num_pages: np.ndarray, spec: PoolSpec) -> Travel:
    """executor: (P, K, nb) int32. first_page, num_pages: (P, nb), as `workload.block_pages` gives for each sequence."""
    work = PoolWork(spec, first_page, num_pages, np.zeros((0,), np.int32))  # routes ask for no token's first key
    relays = choose_relays(runs_of(executor, work), work)
    routes = route(executor, assign_waves(executor, work, relays), work, relays)
    return Travel(spec, routed_counts(routes, work), lack_of_room(routes, spec))
