"""The report's pictures, drawn from its CSVs. Each shows one thing, and says it in its title."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from libra_jax.simulate.plot import COLORS, stacked

Row = dict[str, Any]
Rows = Sequence[Row]

OURS, PAPER, OTHER, MUTED = "#20639b", "#222222", "#c0563b", "#9aa5b1"
POLICY_COLORS: Mapping[str, str] = {
    "ulysses": "#c0563b",
    "ulysses-sorted": "#e39a6f",
    "wlb-micro-shuffled": "#8e5ea2",
    "wlb-micro-delay-shuffled": "#5b3a6b",
    "distca": "#3c8d5a",
    "libra-paper": "#82aed2",
    "libra": OURS,
}
CORPUS_MARKS = {"lognormal-644-71k": "o", "short-bulk-long-tail": "s", "wikipedia": "^"}


def save(figure: Figure, folder: Path, name: str, title: str) -> None:
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(folder / f"{name}.png", dpi=120)


def panels(
    columns: int, rows: int = 1, width: float = 5.2, height: float = 4.2, **more: Any
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def powers(axes: Axes, values: Sequence[int], which: str = "x") -> None:
    """A logarithmic axis with these values as its ticks, as plain numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_minor_locator(NullLocator())


def chosen(rows: Rows, **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def names_of(rows: Rows, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


# ------------------------------------------------------------------------------------------------------------ figures


def placement(folder: Path, rows: Rows) -> None:
    figure, axes = panels(3, 2, 4.4, 3.3, sharex=True, sharey=True)
    styles = {
        "as packed": (OTHER, "-", "as packed"),
        "placed over the step": (OURS, "-", "placed over the step (VRSP)"),
        "like sequences together": ("#3c8d5a", "--", "like sequences in a micro-step"),
        "lower bound": (PAPER, ":", "no placement can do better"),
    }
    for i, tokens in enumerate(names_of(rows, "tokens")):
        for j, corpus in enumerate(names_of(rows, "corpus")):
            panel = axes[i, j]
            for name, (color, line, label) in styles.items():
                here = chosen(rows, tokens=tokens, corpus=corpus, placement=name)
                top = [max(value, 1e-5) for value in values(here, "imbalance")]
                panel.plot(values(here, "pool size"), top, color=color, linestyle=line, label=label)
            paper = {"256K": (1.08, 0.005), "1M": (0.52, 0.007)}[tokens]
            panel.plot([8, 8], paper, "k*", markersize=9, label="paper, before and after")
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:g}")
            panel.set_ylim(1e-5, 50)
            powers(panel, [1, 2, 4, 8, 16, 32])
            panel.set_title(f"{tokens}, {corpus}", loc="left", fontsize=10)
            plain(panel)
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.supxlabel("sequences in a pool")
    figure.supylabel("imbalance between pools, max/mean - 1")
    save(figure, folder, "1_placement", "Placement makes pools even, as far as the heaviest sequence lets it")


def scaling(folder: Path, rows: Rows) -> None:
    figure, axes = panels(2, width=6.2)
    paper = {"256K": {"ulysses": 7.63, "libra-paper": 13.66}, "1M": {"ulysses": 4.42, "libra-paper": 11.25}}
    for panel, tokens in zip(axes[0], paper, strict=True):
        here = chosen(rows, tokens=tokens, model="qwen3-8b", corpus="lognormal-644-71k")
        degrees = sorted(set(values(here, "dp")))
        panel.plot(degrees, degrees, color=MUTED, linestyle=":", label="ideal")
        for policy, color in POLICY_COLORS.items():
            line = chosen(here, policy=policy)
            panel.plot(values(line, "dp"), values(line, "speedup"), color=color, marker=".", label=policy)
        for policy, speed in paper[tokens].items():
            panel.plot(
                16, speed, marker="*", color=POLICY_COLORS[policy], markeredgecolor="k", markersize=13, linestyle=""
            )
        powers(panel, [int(d) for d in degrees])
        powers(panel, [1, 2, 4, 8, 16, 32, 64, 128, 256], "y")
        panel.set_title(f"Qwen3-8B, {tokens} (stars: the paper's at DP 16)", loc="left", fontsize=10)
        panel.set_xlabel("DP degree")
        plain(panel)
    axes[0, 0].set_ylabel("throughput over the same policy at DP 1")
    axes[0, 0].legend(frameon=False, fontsize=8)
    save(figure, folder, "2_scaling", "Without pools, more data parallelism mostly means more waiting")


def stragglers(folder: Path, rows: Rows) -> None:
    here = [row for row in rows if row["model"] == "qwen3-8b"]
    figure, axes = panels(2, width=6.4, height=4.6, sharey=True)
    policies = names_of(here, "policy")
    shades = {"lognormal-644-71k": OURS, "short-bulk-long-tail": "#82aed2", "wikipedia": OTHER}
    for panel, tokens in zip(axes[0], names_of(here, "tokens"), strict=True):
        for k, (corpus, color) in enumerate(shades.items()):
            part = chosen(here, tokens=tokens, corpus=corpus)
            places = np.arange(len(part)) + 0.27 * (k - 1)
            panel.barh(places, values(part, "straggler over mean"), 0.26, color=color, label=corpus)
        panel.set_yticks(range(len(policies)), policies)
        panel.axvline(1, color=PAPER, linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_title(tokens, loc="left", fontsize=10)
        panel.set_xlabel("slowest rank's forward attention over an even split")
        plain(panel)
    axes[0, 0].invert_yaxis()
    axes[0, 1].legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, folder, "4_stragglers", "What everybody waits for")


def gains(folder: Path, rows: Rows) -> None:
    """Libra's gain over every policy, all models, lengths and corpora."""
    others = [name for name in names_of(rows, "policy") if name != "libra:8"]
    figure, axes = panels(1, width=10.5, height=6)
    panel = axes[0, 0]
    panel.axvspan(1.44, 1.68, color="#f0e6c8", zorder=0, label="paper over WLB-LLM: +44% on average, up to +68%")
    for k, policy in enumerate(others):
        for row in chosen(rows, policy=policy):
            color = OURS if row["tokens"] == "256K" else OTHER
            shift = {"qwen3-8b": -0.22, "qwen3-30b-a3b": 0.0, "qwen3-235b-a22b": 0.22}[row["model"]]
            mark = CORPUS_MARKS[row["corpus"]]
            panel.plot(row["gain"], k + shift, marker=mark, color=color, markersize=5, alpha=0.8)
    panel.set_yticks(range(len(others)), others)
    panel.invert_yaxis()
    panel.axvline(1, color=PAPER, linewidth=1)
    panel.set_xscale("log")
    ticks = [0.8, 1, 1.2, 1.5, 2, 3, 5, 10]
    panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("times as fast: Libra (pools of 8, as built) over the policy, 256 GPUs, equal kernels")
    for corpus, mark in CORPUS_MARKS.items():
        panel.plot([], [], marker=mark, linestyle="", color=MUTED, label=corpus)
    panel.plot([], [], marker="o", linestyle="", color=OURS, label="256K")
    panel.plot([], [], marker="o", linestyle="", color=OTHER, label="1M")
    panel.legend(frameon=False, fontsize=8, loc="lower right")
    plain(panel)
    save(figure, folder, "5_gains", "How much Libra gains hangs on what it is compared with")


def losses(folder: Path, rows: Rows) -> None:
    figure, axes = panels(2, width=7.2, height=5.2)
    for panel, tokens in zip(axes[0], names_of(rows, "tokens"), strict=True):
        here = chosen(rows, tokens=tokens, model="qwen3-8b", corpus="lognormal-644-71k")
        bars = [
            (
                row["policy"],
                1.0,
                {name: row[f"lost to {name}"] / row["efficiency"] for name in COLORS},
            )
            for row in here
        ]
        stacked(panel, bars)
        panel.set_title(f"Qwen3-8B, {tokens}, lognormal corpus, 256 GPUs", loc="left", fontsize=10)
    save(figure, folder, "5_losses", "What a step is made of")


def tail(folder: Path, rows: Rows, whole: Rows) -> None:
    """Gain by the longest document."""
    figure, axes = panels(2, width=6)
    for panel, tokens in zip(axes[0], names_of(rows, "tokens"), strict=True):
        window = {"256K": 262_144, "1M": 1_048_576}[tokens]
        for policy in (
            "ulysses",
            "ulysses-sorted",
            "wlb-micro-shuffled",
            "wlb-batch-sorted",
            "wlb-micro-delay-shuffled",
            "distca",
        ):
            points = {1.0: chosen(whole, tokens=tokens, policy=policy, model="qwen3-8b", corpus="lognormal-644-71k")[0]}
            for row in chosen(rows, tokens=tokens, policy=policy):
                if row["change"].startswith("longest"):
                    points[int(row["change"].split()[1]) / window] = row
            color = POLICY_COLORS.get(policy, MUTED)
            shares = sorted(points)
            panel.plot(shares, [points[s]["gain"] for s in shares], marker=".", color=color, label=policy)
        panel.axhline(1, color=PAPER, linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks([0.05, 0.1, 0.2, 0.5, 1], ["1/20", "1/10", "1/5", "1/2", "1"])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_title(f"Qwen3-8B, {tokens}", loc="left", fontsize=10)
        panel.set_xlabel("longest document over the window")
        plain(panel)
    axes[0, 0].set_ylabel("times as fast: Libra over the policy")
    axes[0, 0].legend(frameon=False, fontsize=8)
    save(figure, folder, "5_tail", "Short documents need no Libra")


def pool_size(folder: Path, rows: Rows) -> None:
    figure, axes = panels(2, 2, 5.6, 3.4, sharex=True)
    styles = {"two levels": (OURS, "-"), "one level": ("#82aed2", "--"), "strided over nodes": (OTHER, ":")}
    for i, tokens in enumerate(names_of(rows, "tokens")):
        here = chosen(rows, tokens=tokens, corpus="lognormal-644-71k")
        for name, (color, line) in styles.items():
            part = chosen(here, exchange=name)
            sizes = values(part, "pool size")
            axes[0, i].plot(
                sizes, [100 * v for v in values(part, "efficiency")], color=color, linestyle=line, label=name
            )
            axes[1, i].plot(sizes, values(part, "across over ulysses"), color=color, linestyle=line, label=name)
        axes[0, i].set_title(f"Qwen3-8B, {tokens}, DP 32", loc="left", fontsize=10)
        axes[0, i].set_ylabel("step, % of the ideal")
        axes[1, i].set_ylabel("busiest rank's bytes\nbetween nodes / Ulysses' bytes")
        for panel in axes[:, i]:
            powers(panel, [1, 2, 4, 8, 16, 32])
            plain(panel)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.supxlabel("sequences in a pool")
    save(figure, folder, "6_pool_size", "Larger pools balance better until their exchange costs more")


def growth(folder: Path, rows: Rows) -> None:
    figure, axes = panels(2, width=5.8)
    labels = {
        "libra": "Libra, pools of 8",
        "libra-global": "one pool, Libra's planner",
        "distca": "one pool, DistCA's greedy",
    }
    colors = {"libra": OURS, "libra-global": "#82aed2", "distca": "#3c8d5a"}
    for name, label in labels.items():
        part = chosen(rows, policy=name)
        axes[0, 0].plot(values(part, "dp"), values(part, "across GB"), color=colors[name], marker="o", label=label)
        axes[0, 1].plot(
            values(part, "dp"), values(part, "planning s a pool"), color=colors[name], marker="o", label=label
        )
    for panel, what in zip(
        axes[0],
        ("busiest rank's GB between nodes, a layer, both passes", "planning a pool, processor seconds"),
        strict=True,
    ):
        powers(panel, [16, 64, 256, 1024, 4096])
        panel.set_xlabel("DP degree (sequences of 256K side by side, 8 GPUs each)")
        panel.set_ylabel(what)
        plain(panel)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 1].set_yscale("log")
    axes[0, 1].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].legend(frameon=False, fontsize=8)
    save(figure, folder, "7_growth", "A bounded pool does not know how large the cluster is")


def bounded(folder: Path, rows: Rows) -> None:
    figure, axes = panels(2, width=5.8)
    for panel, tokens in zip(axes[0], names_of(rows, "tokens"), strict=True):
        here = chosen(rows, tokens=tokens)
        for name, color in zip(names_of(here, "policy"), (OURS, "#82aed2", "#b8c7d6", "#3c8d5a"), strict=True):
            part = chosen(here, policy=name)
            panel.plot(
                values(part, "oversubscription"), [100 * v for v in values(part, "efficiency")],
                marker="o", color=color, label=name,
            )  # fmt: skip
        powers(panel, [1, 2, 4, 8])
        panel.set_title(f"Qwen3-8B, {tokens}, DP 64", loc="left", fontsize=10)
        panel.set_xlabel("oversubscription beyond pods of 16 nodes (1: none)")
        plain(panel)
    axes[0, 0].set_ylabel("step, % of the ideal")
    axes[0, 0].legend(frameon=False, fontsize=8)
    save(figure, folder, "7_bounded", "Bounded pools and one pool of all, by network")


def sensitivity(folder: Path, rows: Rows) -> None:
    """How Libra's gain over three others moves with each constant."""
    others = ("ulysses-sorted", "wlb-micro-shuffled", "wlb-micro-delay-shuffled")
    figure, axes = panels(len(others), 2, 4.6, 3.9, sharey=True)
    for i, tokens in enumerate(names_of(rows, "tokens")):
        here = chosen(rows, tokens=tokens)
        changes = [name for name in names_of(here, "changed") if name != "nothing"]
        for j, other in enumerate(others):
            panel = axes[i, j]
            base = chosen(here, changed="nothing", against=other)[0]["gain"]
            found = [chosen(here, changed=name, against=other)[0]["gain"] for name in changes]
            colors = [OURS if value >= base else OTHER for value in found]
            panel.barh(range(len(changes)), [v - base for v in found], left=base, color=colors)
            panel.axvline(base, color=PAPER, linewidth=1)
            panel.set_yticks(range(len(changes)), changes, fontsize=8)
            panel.set_title(f"{tokens}: over {other} ({base:.2f})", loc="left", fontsize=9)
            panel.margins(x=0.15)
            plain(panel)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("times as fast: Libra over the policy")
    save(figure, folder, "sensitivity", "What the answers hang on")
