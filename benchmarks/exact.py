"""The best assignments there are, for pools small enough: mixed-integer programs, solved by HiGHS through SciPy.

Two questions. How short can the slowest rank's work be (`least_makespan`)? And how few bytes does it take to stay below
a given makespan, in all or for the busiest sender (`least_bytes`)? Each answer comes with a proven bound.

Letters: P sequences, N ranks, K kv heads, nb blocks of a sequence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from libra_jax.assignments import home_ranks
from libra_jax.spec import PoolSpec

_ROUNDING = 1e-6  # what HiGHS may be off, relative


@dataclasses.dataclass(frozen=True, eq=False)
class Best:
    """value: the best found. bound: no assignment has less. Equal where the optimum is proven.

    executor: (P, K, nb) an assignment that has `value`; None where only the value was asked for, or none was found.
    """

    value: float
    bound: float
    executor: np.ndarray | None = None

    @property
    def proven(self) -> bool:
        return self.value <= self.bound * (1 + _ROUNDING)


def least_makespan(num_pages: np.ndarray, spec: PoolSpec, speed: np.ndarray, seconds: float = 10.0) -> Best:
    """The least time of the slowest rank, in pages at speed 1, whatever is sent. num_pages (P, nb), speed (N,).

    Blocks with as many pages are alike here: the program decides how many of each kind a rank executes.
    """
    pages, count = np.unique(num_pages[num_pages > 0], return_counts=True)
    count = count * spec.num_kv_heads
    total = int(pages @ count)
    if not total:
        return Best(0.0, 0.0)
    kinds, n = len(pages), spec.ranks
    program = _Program(kinds * n + 1)
    for kind in range(kinds):
        program.add(kind * n + np.arange(n), np.ones(n), count[kind], count[kind])
    for rank in range(n):
        program.add([*(np.arange(kinds) * n + rank), kinds * n], [*pages, -speed[rank]], -np.inf, 0)
    whole = bool((speed == speed[0]).all() and speed[0] == 1)
    bound = max(total / float(speed.sum()), pages[-1] / float(speed.max()))
    bound = math.ceil(bound - _ROUNDING) if whole else bound
    program.lower[-1], program.upper[:] = bound, np.append(np.repeat(count, n), np.inf)
    program.whole[-1] = whole
    objective = np.zeros(kinds * n + 1)
    objective[-1] = 1
    value, proven, _ = program.solve(objective, seconds)
    return Best(value, max(proven, bound))


def least_bytes(
    first_page: np.ndarray,
    num_pages: np.ndarray,
    spec: PoolSpec,
    speed: np.ndarray,
    makespan: float,
    busiest: bool = False,
    seconds: float = 10.0,
) -> Best:
    """The fewest bytes that all ranks together send, of all assignments with a makespan of at most this one.

    first_page, num_pages: (P, nb). speed: (N,). busiest: the fewest that the busiest sender sends instead.

    One variable says that a block is executed by a rank, one that this or a later block of the same document is, and
    one that a rank fetches a page.
    """
    P, K, N = spec.pool_size, spec.num_kv_heads, spec.ranks
    home, ranks = home_ranks(spec), np.arange(spec.ranks)
    units = [(p, h, b) for p in range(P) for h in range(K) for b in np.flatnonzero(num_pages[p])]
    if not units:
        return Best(0.0, 0.0, np.repeat(home[:, None], K, axis=1))
    runs = len(units) * N  # the first of the variables that say "this or a later block"
    fetches: dict[tuple[int, int, int, int], int] = {}  # (sequence, head, page, rank): variable
    program = _Program(0)
    # (N, variables) what each rank sends, in pages: queries from home, outputs from the executor, pages from home.
    out_cost = spec.block * spec.group * spec.value_dim * spec.item_bytes / spec.page_bytes
    query_cost = spec.block_bytes / spec.page_bytes - out_cost
    for i, (p, h, b) in enumerate(units):
        program.add(i * N + ranks, np.ones(N), 1, 1)
        again = i + 1 < len(units) and units[i + 1] == (p, h, b + 1) and first_page[p, b + 1] == first_page[p, b]
        begins = i == 0 or units[i - 1] != (p, h, b - 1) or first_page[p, b - 1] != first_page[p, b]
        for rank in ranks:
            run = runs + i * N + rank
            program.add([run, i * N + rank], [1, -1], 0, np.inf)
            if again:
                program.add([run, run + N], [1, -1], 0, np.inf)
            for page in range(first_page[p, b] if begins else b, b + 1):
                if rank != home[p, page]:
                    fetch = fetches.setdefault((p, h, page, int(rank)), 2 * runs + len(fetches))
                    program.add([fetch, run], [1, -1], 0, np.inf)
    variables = 2 * runs + len(fetches)
    program.resize(variables + busiest)
    program.upper[:variables] = 1
    program.whole[runs:] = False
    sent = np.zeros((N, variables))
    for i, (p, _, b) in enumerate(units):
        away = ranks[ranks != home[p, b]]
        sent[home[p, b], i * N + away] += query_cost
        sent[away, i * N + away] += out_cost
    for (p, _, page, _), variable in fetches.items():
        sent[home[p, page], variable] += 1
    work = np.array([num_pages[p, b] for p, _, b in units])
    for rank in ranks:
        limit = makespan * speed[rank] * (1 + _ROUNDING)
        program.add(np.arange(len(units)) * N + rank, work, -np.inf, limit)
        if busiest:
            who = np.flatnonzero(sent[rank])
            program.add([*who, variables], [*-sent[rank, who], 1], 0, np.inf)
    objective = np.append(np.zeros(variables), 1.0) if busiest else sent.sum(axis=0)
    value, bound, solution = program.solve(objective, seconds)
    if solution is None:
        return Best(math.inf, bound * spec.page_bytes)
    executor = np.repeat(home[:, None], K, axis=1)
    chosen = solution[: len(units) * N].reshape(-1, N).argmax(axis=1)
    for (p, h, b), rank in zip(units, chosen, strict=True):
        executor[p, h, b] = rank
    return Best(value * spec.page_bytes, bound * spec.page_bytes, executor)


class _Program:
    """A mixed-integer program of `variables` variables, whole and at least 0 unless changed; rows are added."""

    def __init__(self, variables: int):
        self.resize(variables)
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def resize(self, variables: int) -> None:
        self.lower, self.upper = np.zeros(variables), np.full(variables, np.inf)
        self.whole = np.ones(variables, bool)

    def add(self, columns, values, least: float, most: float) -> None:
        """least <= the sum of values times these variables <= most."""
        self._rows.append(np.full(len(columns), len(self._least)))
        self._columns.append(np.asarray(columns))
        self._values.append(np.asarray(values, np.float64))
        self._least.append(least)
        self._most.append(most)

    def solve(self, objective: np.ndarray, seconds: float) -> tuple[float, float, np.ndarray | None]:
        """-> least objective found, proven bound, solution; infinity and None where none was found in time."""
        entries = np.concatenate(self._values), (np.concatenate(self._rows), np.concatenate(self._columns))
        least: Any = np.array(self._least)  # SciPy's own annotations take them for numbers
        most: Any = np.array(self._most)
        lower: Any = self.lower
        upper: Any = self.upper
        matrix = coo_array(entries, shape=(len(self._least), len(objective))).tocsr()
        result = milp(
            objective,
            constraints=LinearConstraint(matrix, least, most),
            integrality=self.whole.astype(int),
            bounds=Bounds(lower, upper),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if result.status not in (0, 1):
            raise RuntimeError(f"HiGHS: {result.message}")
        bound = result.fun if result.status == 0 else result.mip_dual_bound
        return (math.inf if result.x is None else float(result.fun)), float(bound or 0.0), result.x
