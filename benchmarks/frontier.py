"""What balance costs: plans with targets above the mean, by balance, bytes and modelled time. Ranks of unequal speed.

Used by benchmarks/planner.py. Host side only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.pools import Measured, PlanPool, measure
from libra_jax.links import Links
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel

RAISED = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
COLORS = ("#20639b", "#c0563b", "#4f8a4c")


@dataclasses.dataclass(frozen=True)
class Point:
    """Plans of one corpus with one target."""

    setting: str
    corpus: str
    raised: float
    measured: Measured

    def median(self, name: str) -> float:
        return float(np.median(self.measured.values[name]))

    def mean(self, name: str) -> float:
        return float(self.measured.values[name].mean())

    def row(self) -> dict[str, Any]:
        values = self.measured.values
        return {
            "corpus": self.corpus,
            "raised": f"{self.raised:g}",
            "imbalance": [self.median("imbalance"), float(np.quantile(values["imbalance"], 0.99))],
            "bytes mean": [self.mean("bytes mean")],
            "sent": [self.median("sent"), float(np.quantile(values["sent"], 0.99))],
            "received": [self.median("received"), float(np.quantile(values["received"], 0.99))],
            "across sent": [self.median("across sent")],
            "time": [self.mean("time")],
            "plan ms": [self.median("plan ms")],
            "pools": self.measured.pools,
        }


def frontier(
    setting: str,
    corpus: str,
    pools: Iterable[list[list[int]]],
    spec: PoolSpec,
    raised_by: Callable[[float], PlanPool],
    cost: CostModel,
    links: Links,
    amounts: Iterable[float] = RAISED,
) -> list[Point]:
    """raised_by: plans with shares raised by so much. The same pools for each."""
    pools = list(pools)
    return [Point(setting, corpus, by, measure(pools, spec, raised_by(by), cost, links)) for by in amounts]


def frontier_png(path: str | os.PathLike, points: list[Point]) -> None:
    """A row of panels a setting: bytes of the busiest sender, mean bytes, and modelled time, each over the median
    imbalance that was reached. A line a corpus, a dot an amount by which shares were raised. Broken lines: asked."""
    settings = list(dict.fromkeys(point.setting for point in points))
    corpora = list(dict.fromkeys(point.corpus for point in points))
    panels: list[tuple[str, Callable[[Point], float], float | None]] = [
        ("busiest sender's bytes over Ulysses', median", lambda point: point.median("sent"), 1.25),
        ("mean bytes over Ulysses'", lambda point: point.mean("bytes mean"), 0.7),
        ("modelled time over the ideal, mean", lambda point: point.mean("time"), None),
    ]
    figure = Figure(figsize=(15, 4.8 * len(settings)), layout="constrained")
    figure.suptitle("What balance costs: each dot a plan with shares raised by so much", fontsize=14, fontweight="bold")
    grid = figure.subplots(len(settings), len(panels), squeeze=False)
    for axes_row, setting in zip(grid, settings, strict=True):
        for axes, (label, value, asked) in zip(axes_row, panels, strict=True):
            for corpus, color in zip(corpora, COLORS, strict=False):
                line = [point for point in points if (point.setting, point.corpus) == (setting, corpus)]
                x, y = [max(point.median("imbalance") - 1, 1e-4) for point in line], [value(point) for point in line]
                axes.plot(x, y, color=color, marker="o", markerfacecolor="white", label=corpus)
                for point, at in zip(line, zip(x, y, strict=True), strict=True):
                    name = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7, "color": color}
                    axes.annotate(f"{point.raised:g}", at, **name)
            axes.set_title(f"{setting} tokens: {label}", loc="left", fontsize=10)
            axes.set_xlabel("imbalance between ranks - 1, median")
            axes.set_xscale("log")
            axes.axvline(0.01, color="#999999", linewidth=1, linestyle="--", zorder=0)
            if asked is not None:
                axes.axhline(asked, color="#999999", linewidth=1, linestyle="--", zorder=0)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].legend(frameon=False)
    figure.savefig(path, dpi=130)


# ------------------------------------------------------------------------------------------- ranks of unequal speed


def spread(ranks: int, seed: int) -> Callable[[int], np.ndarray]:
    """Speeds drawn evenly from a range of 7%."""
    return lambda pool: np.random.default_rng([seed, pool]).uniform(0.965, 1.035, ranks)


def one_slow(ranks: int, seed: int) -> Callable[[int], np.ndarray]:
    """One rank, drawn anew for each pool, at half speed."""

    def speeds(pool: int) -> np.ndarray:
        speed = np.ones(ranks)
        speed[np.random.default_rng([seed, pool]).integers(ranks)] = 0.5
        return speed

    return speeds


SPEEDS = {"7% spread": spread, "one at half speed": one_slow}


def speed_row(corpus: str, case: str, measured: Measured) -> dict[str, Any]:
    """Makespan is the slowest rank's pages by its speed, over those of perfect balance."""
    makespan = measured.values["imbalance"]
    return {
        "corpus": corpus,
        "speeds": case,
        "makespan": "/".join(f"{x:.3f}" for x in np.quantile(makespan, [0.5, 0.99, 1.0])),
        "asked": "1.02",
        "within": f"{int((makespan <= 1.02).sum())} of {makespan.size}",
        "time": [float(measured.values["time"].mean())],
    }
