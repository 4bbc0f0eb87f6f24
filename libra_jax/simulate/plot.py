"""The picture of `libra simulate`: what each policy's step is made of, and from which documents on Libra pays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from libra_jax.simulate.advice import WORTH, BreakEven
from libra_jax.simulate.step import LOSSES
from libra_jax.simulate.study import Outcome

IDEAL = "#20639b"
COLORS: Mapping[str, str] = {
    "padding": "#c9ced6",
    "kernels": "#9aa5b1",
    "between pools": "#c0563b",
    "within pools": "#e39a6f",
    "exposed exchange": "#e8c547",
    "gathers": "#7b9e87",
    "bubble": "#6b5b95",
}


def steps_png(
    path: str | os.PathLike, title: str, outcomes: Sequence[Outcome], points: Sequence[BreakEven] = ()
) -> None:
    """Writes a PNG: a bar a policy, ideal and losses; beside it, if there are points, gain by longest document."""
    height = 1.9 + 0.42 * len(outcomes)
    figure = Figure(figsize=(13 if points else 10, max(height, 4.2)), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = figure.subplots(1, 2, width_ratios=[2.1, 1]) if points else [figure.subplots()]
    stacked(panels[0], [(each.policy, 1.0, losses_over_ideal(each)) for each in outcomes])
    if points:
        _gains(panels[1], points)
    figure.savefig(path, dpi=130)


def short(tokens: int) -> str:
    """262144 as 256K."""
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return f"{tokens:,}"


def losses_over_ideal(each: Outcome) -> dict[str, float]:
    return {name: share / each.efficiency for name, share in each.losses.items()}


def stacked(axes: Axes, rows: Sequence[tuple[str, float, Mapping[str, float]]]) -> None:
    """rows: a name, the ideal's length, and losses by name, in the same unit."""
    names = [name for name, _, _ in rows]
    left = [ideal for _, ideal, _ in rows]
    axes.barh(names, left, color=IDEAL, label="ideal")
    for loss in LOSSES:
        width = [max(losses.get(loss, 0.0), 0.0) for _, _, losses in rows]
        if max(width) >= 0.002:
            axes.barh(names, width, left=left, color=COLORS[loss], label=loss)
        left = [a + b for a, b in zip(left, width, strict=True)]
    for place, end in enumerate(left):
        axes.text(end, place, f" {end:.2f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("time of a step over the ideal split of its work")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def _gains(axes: Axes, points: Sequence[BreakEven]) -> None:
    axes.plot([p.longest for p in points], [p.gain for p in points], marker="o", color=IDEAL)
    axes.axhline(1 + WORTH, color="#222222", linewidth=1, linestyle="--")
    axes.text(points[-1].longest, 1 + WORTH, f"pays: {WORTH:.0%}", va="bottom", fontsize=8)
    for point in points:
        axes.annotate(
            f"{point.heaviest:.1f}", (point.longest, point.gain), (0, 6), textcoords="offset points", fontsize=8
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([p.longest for p in points], [short(p.longest) for p in points])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("longest document, tokens")
    axes.set_title(
        "Libra: times as fast as the best without pools\n(at points: heaviest sequence over the mean)",
        loc="left",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
