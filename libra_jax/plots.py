"""Pictures of work: how it lies on ranks before and after, and where a corpus has it. PNG files, through matplotlib.

Each picture says in words what it shows, so that it can be read without this code. Nothing here opens a window.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_BEFORE, _AFTER, _LINE = ("#c0563b", "#dd9a84"), ("#20639b", "#82aed2"), "#222222"  # pools take turns in two shades
_MUTED = ("#9aa5b1", "#5f7d95", "#c0563b")


def work_per_rank_png(
    path: str | os.PathLike,
    before: np.ndarray,
    after: np.ndarray,
    title: str = "Attention work of every rank in one step",
    *,
    before_label: str = "Plain context parallelism",
    after_label: str = "Libra",
    unit: str = "pages visited",
) -> None:
    """Draw the work of each rank before and after, one bar a rank, one scale for both.

    before, after: (pools, ranks of a pool) work of the ranks that run side by side, in `unit`. All wait for the
        busiest one, so its height is the time and the mean is the least that any plan can reach.

    Raises ValueError where the shapes differ or are not (pools, ranks).
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape or before.ndim != 2 or before.size == 0:
        raise ValueError(f"work must be (pools, ranks) before and after, got {before.shape} and {after.shape}")
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    _rank_bars(upper, before, before_label, unit, _BEFORE)
    _rank_bars(lower, after, after_label, unit, _AFTER)
    _pool_ticks(lower, *before.shape)
    top = max(before.max(), after.max())
    lower.set_ylim(0, 1.18 * top if top > 0 else 1)
    figure.savefig(path, dpi=130)


def _rank_bars(axes: Axes, work: np.ndarray, label: str, unit: str, colors: Sequence[str]) -> None:
    """One panel: a bar a rank, pools in alternating shades, the mean as a line, and the busiest rank named."""
    pools, ranks = work.shape
    flat, mean = work.reshape(-1), float(work.mean())
    shades = [colors[pool % 2] for pool in range(pools) for _ in range(ranks)]
    axes.bar(np.arange(flat.size), flat, width=0.86 if flat.size <= 128 else 1.0, color=shades)
    axes.axhline(mean, color=_LINE, linewidth=1.2, linestyle="--")
    ratio, busiest = (float(flat.max()) / mean if mean > 0 else 1.0), int(flat.argmax())
    waiting = ", and all others wait for it" if ratio >= 1.1 else ""
    axes.set_title(f"{label}: the busiest rank has {ratio:.2f} × the mean{waiting}", loc="left")
    edge = "left" if busiest < 0.1 * flat.size else "right" if busiest >= 0.9 * flat.size else "center"
    above = {"xytext": (0, 4), "textcoords": "offset points", "ha": edge, "fontweight": "bold"}
    axes.annotate(f"busiest: {ratio:.2f} ×", (busiest, flat.max()), **above)
    axes.text(1.003, mean, "mean", transform=axes.get_yaxis_transform(), va="center", color=_LINE)
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.01)
    _plain(axes)


def _pool_ticks(axes: Axes, pools: int, ranks: int) -> None:
    """Pools named in the middle of their ranks, and set apart by thin lines."""
    axes.set_xticks([(pool + 0.5) * ranks - 0.5 for pool in range(pools)])
    names = [f"pool {pool}" for pool in range(pools)] if pools <= 16 else [str(pool) for pool in range(pools)]
    axes.set_xticklabels(names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(f"one bar a rank, {ranks} ranks in a pool")
    for panel in axes.figure.axes:
        for pool in range(1, pools):
            panel.axvline(pool * ranks - 0.5, color="#cccccc", linewidth=0.8, zorder=0)


def corpus_png(
    path: str | os.PathLike,
    *,
    title: str,
    buckets: Sequence[str],
    shares: Mapping[str, Sequence[float]],
    imbalance: Mapping[str, Mapping[str, float]],
    before: np.ndarray,
    after: np.ndarray,
    buckets_label: str = "document length, tokens",
    imbalance_label: str = "How much longer attention takes than with perfect balance",
    before_label: str = "Plain context parallelism",
    after_label: str = "Libra",
) -> None:
    """Draw a corpus's skew: where the work is, what that does to sequences, pools and ranks, and ranks one by one.

    buckets: names of length classes. shares: a name and its share of each class (0 to 1), e.g. documents, tokens, work.
    imbalance: {group: {bar: busiest over mean}}, drawn as horizontal bars from 1.0, perfect balance.
    before, after: (pools, ranks) work of the same sequences, as in `work_per_rank_png`. *_label: titles.
    """
    figure = Figure(figsize=(13, 9.4), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    grid = figure.add_gridspec(3, 2, height_ratios=[1.5, 1, 1])
    _share_bars(figure.add_subplot(grid[0, 0]), buckets, shares, buckets_label)
    _imbalance_bars(figure.add_subplot(grid[0, 1]), imbalance, imbalance_label)
    upper = figure.add_subplot(grid[1, :])
    lower = figure.add_subplot(grid[2, :], sharex=upper, sharey=upper)
    _rank_bars(upper, np.asarray(before, np.float64), before_label, "pages visited", _BEFORE)
    _rank_bars(lower, np.asarray(after, np.float64), after_label, "pages visited", _AFTER)
    upper.tick_params(axis="x", labelbottom=False)
    pools, ranks = np.asarray(before).shape
    lower.set_xticks([(pool + 0.5) * ranks - 0.5 for pool in range(pools)], [f"pool {pool}" for pool in range(pools)])
    lower.set_xlabel(f"one bar a rank, {ranks} ranks in a pool")
    top = max(float(np.max(before)), float(np.max(after)))
    lower.set_ylim(0, 1.22 * top if top > 0 else 1)
    figure.savefig(path, dpi=120)


def _share_bars(axes: Axes, buckets: Sequence[str], shares: Mapping[str, Sequence[float]], label: str) -> None:
    width = 0.84 / len(shares)
    for i, (name, values) in enumerate(shares.items()):
        places = np.arange(len(buckets)) + (i - (len(shares) - 1) / 2) * width
        bars = axes.bar(places, 100 * np.asarray(values), width, label=name, color=_MUTED[i % len(_MUTED)])
        if i == len(shares) - 1:
            axes.bar_label(bars, [f"{100 * v:.0f}%" if v >= 0.005 else "" for v in values], padding=2, fontsize=8)
    axes.set_xticks(range(len(buckets)), buckets, rotation=25, ha="right")
    axes.set_xlabel(label)
    axes.set_ylabel("share, %")
    axes.set_title("Documents, tokens and attention work by document length", loc="left")
    axes.legend(frameon=False)
    axes.margins(y=0.12)
    _plain(axes)


def _imbalance_bars(axes: Axes, imbalance: Mapping[str, Mapping[str, float]], label: str) -> None:
    rows = [(group, name, value) for group, bars in imbalance.items() for name, value in bars.items()]
    places, place, group_before = [], 0.0, None
    for group, _, _ in rows:
        place += 0.5 if group_before not in (None, group) else 0.0
        places.append(place)
        place, group_before = place + 1, group
    widest = max(value for _, _, value in rows)
    for at, (_, name, value) in zip(places, rows, strict=True):
        color = _AFTER[0] if name.startswith("Libra") else _MUTED[0] if name.startswith("bound") else _BEFORE[0]
        axes.barh(at, max(value - 1, 0), left=1, color=color)
        axes.text(value + 0.012 * max(widest - 1, 0.05), at, f"{value:.2f} ×", va="center", fontsize=9)
    axes.set_yticks(places, [f"{group}: {name}" for group, name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(1, 1 + 1.15 * max(widest - 1, 0.05))
    axes.set_xlabel("busiest sequence, pool or rank over the mean; 1 is perfect balance")
    axes.set_title(label, loc="left")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
