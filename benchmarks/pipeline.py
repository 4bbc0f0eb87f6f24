"""How long the stages of a pipeline stand idle, with sequences as they were packed and with balanced ones. A model, no
measurement: no GPU is involved.

Draws sequences from the distributions that ship with the package, gives them to the micro-steps of optimizer steps,
prices each micro-step's attention with `libra_jax.modelled` and the rest of Qwen3-8B with benchmarks/step_model.py, and
follows every stage through its ticks, as `libra_jax.train.pipeline` runs them.
Run: python -m benchmarks.pipeline [--json FILE] [--report FILE] [--plot FILE]

Letters: M micro-batches (one of each micro-step), P stages, T ticks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.pools import CORPORA, SETTINGS, Setting, sample_sequences, table_of
from benchmarks.reporting import machine, markdown
from benchmarks.step_model import TABLE, kernels
from libra_jax import planner
from libra_jax.links import Links
from libra_jax.modelled import PlanSeconds, counted_seconds
from libra_jax.models.qwen3 import QWEN3_8B
from libra_jax.placement import place
from libra_jax.policies.travel import travel
from libra_jax.simulate.pipeline_events import follow, least_idle
from libra_jax.simulate.step import stage_passes
from libra_jax.simulate.study import spread
from libra_jax.spec import PoolSpec
from libra_jax.train.pipeline import Schedule, kept_inputs
from libra_jax.workload import block_pages, sequence_seconds

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to model."""

    stages: tuple[int, ...] = (4, 9)
    """Stages of a pipeline; each must divide the model's 36 layers."""
    micro_steps: tuple[int, ...] = (8, 16, 32)
    """Micro-steps of an optimizer step."""
    steps: int = 20
    """Steps modelled for each number of micro-steps and each corpus, at most."""
    drawn: int = 640
    """Micro-steps drawn for each corpus at 256K tokens: no more steps than they give."""
    long_drawn: int = 128
    """The same at 1M tokens, where planning takes several times as long; 0 leaves them out."""
    pools: int = 1
    """Pools of 8 sequences side by side; the configs of Qwen3-8B have one."""
    seed: int = 0
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""
    plot: Path | None = None
    """Draw stages and idle shares into this file (PNG)."""


# ---------------------------------------------------------------------------------------------------- what a pass takes


class Attention(NamedTuple):
    """Seconds of one layer's attention in each micro-step, forward and backward, (micro_steps, 2): as modelled, and
    with its work spread evenly over all ranks of a stage and no exchange."""

    modelled: np.ndarray
    ideal: np.ndarray


def passes(attention: np.ndarray, spec: PoolSpec, stages: int) -> tuple[np.ndarray, np.ndarray]:
    """(P, M) seconds of Qwen3-8B's forward passes, and of its backward passes. attention: (M, 2), of one layer."""
    return stage_passes(QWEN3_8B, TABLE, attention, float(spec.tokens_per_rank), stages)


def seconds_of(lengths: Sequence[Sequence[int]], spec: PoolSpec, policy: planner.Policy) -> PlanSeconds:
    """What a policy's plan takes, from its routes: no tables are built, and there is room for everything."""
    pages = [block_pages(sequence, spec) for sequence in lengths]
    first_page, num_pages = np.stack([b.first_page for b in pages]), np.stack([b.num_pages for b in pages])
    executor = policy(first_page, num_pages, spec, np.ones(spec.ranks))
    return counted_seconds(travel(executor, first_page, num_pages, spec).counts, spec, kernels(), Links())


@dataclasses.dataclass(frozen=True)
class Policy:
    """How sequences come to micro-steps and pools, and how a pool shares its work.

    across: as of `place`; None: as packed, in the order they come. two_level: pages cross nodes once, to relays.
    """

    across: str | None
    executor: planner.Policy
    two_level: bool = True

    def slots(self, batch: Sequence[Sequence[int]], spec: PoolSpec, pools: int) -> np.ndarray:
        """(micro_steps, pools, pool_size) positions in the batch."""
        if self.across is None:
            return np.arange(len(batch)).reshape(-1, pools, spec.pool_size)
        return place([sequence_seconds(each, spec, kernels()) for each in batch], spec.pool_size, pools, self.across)


_pooled = functools.partial(planner.pooled, raised=0.003, links=Links())  # the first that `plan_pool` tries
POLICIES = {
    "context parallel": Policy(None, planner.at_home),
    "Ulysses": Policy(None, planner.head_parallel, two_level=False),
    "Libra, pools": Policy("pools", _pooled),
    "Libra, all": Policy("all", _pooled),
}
DESCENDING = "Libra, pools"


def attention_of(
    policy: Policy, sequences: list[list[int]], setting: Setting, micro_steps: int, pools: int
) -> Attention:
    """Of all steps of so many micro-steps that the sequences give, one after the other. Pools of a micro-step wait for
    each other in every layer and pass."""
    spec = setting.spec(32, 8, two_level=policy.two_level)
    size, modelled, ideal = micro_steps * pools * spec.pool_size, [], []
    for begin in range(0, len(sequences), size):
        batch = sequences[begin : begin + size]
        for micro_step in policy.slots(batch, spec, pools):
            seconds = [seconds_of([batch[i] for i in pool], spec, policy.executor) for pool in micro_step]
            modelled.append(np.max([[each.forward, each.backward] for each in seconds], axis=0))
            ideal.append(np.mean([[each.ideal_forward, each.ideal_backward] for each in seconds], axis=0))
    return Attention(np.array(modelled), np.array(ideal))


# -------------------------------------------------------------------------------------------------------------- results


def steps_row(attention: Attention, spec: PoolSpec, stages: int, micro_steps: int, schedule: Schedule) -> Row:
    """What the steps have in common, and of one number a step under each name the `spread`:

    over ideal: the step over all of its passes' work with ideal attention, spread evenly over all stages. work over
    ideal: the work alone. idle: share of the stages' time. idle, alike: the same with every micro-batch the mean of its
    step. idle, pass: with results handed on as soon as they are made. attention: its share of the modelled work.
    """
    values = []
    for begin in range(0, len(attention.modelled), micro_steps):
        took = attention.modelled[begin : begin + micro_steps]
        mine = passes(took, spec, stages)
        ideal = sum(part.sum() for part in passes(attention.ideal[begin : begin + micro_steps], spec, stages))
        alike = passes(np.broadcast_to(took.mean(axis=0), took.shape), spec, stages)
        run = follow(*mine, schedule)
        none = sum(part.sum() for part in passes(np.zeros_like(took), spec, stages))
        values.append({
            "over ideal": run.end * stages / ideal,
            "work over ideal": run.busy / ideal,
            "idle": run.idle,
            "idle, alike": follow(*alike, schedule).idle,
            "idle, pass": follow(*mine, schedule, "pass").idle,
            "attention": 1 - none / run.busy,
            "step s": run.end,
        })  # fmt: skip
    return {
        "stages": stages,
        "micro-steps": micro_steps,
        "schedule": schedule,
        "steps": len(values),
        "kept": kept_inputs(schedule, micro_steps, stages),
        "least idle": least_idle(micro_steps, stages),
    } | {name: list(spread([value[name] for value in values])) for name in values[0]}


def reordered(attention: Attention, micro_steps: int, order: Callable[[int], np.ndarray]) -> Attention:
    """The same with the micro-steps of every step in another order; order(number of the step) -> (micro_steps,)."""
    steps = len(attention.modelled) // micro_steps
    index = np.concatenate([step * micro_steps + order(step) for step in range(steps)])
    return Attention(attention.modelled[index], attention.ideal[index])


ORDERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "Libra, pools, lightest first": lambda micro_steps, step: np.arange(micro_steps)[::-1],
    "Libra, pools, shuffled": lambda micro_steps, step: np.random.default_rng(step).permutation(micro_steps),
}


Planned = dict[tuple[str, int], Attention]
"""By policy (or order of micro-steps) and number of micro-steps."""


def planned(setting: Setting, corpus: str, count: int, options: Options) -> Planned:
    """Steps from the first of `count` micro-steps' sequences, the same for all policies."""
    size = options.pools * setting.spec(32, 8).pool_size
    sequences = sample_sequences(corpus, setting.seq_len, count * size, options.seed)
    used = {micro_steps: micro_steps * min(options.steps, count // micro_steps) for micro_steps in options.micro_steps}
    found: Planned = {}
    for name, policy in POLICIES.items():
        if policy.across is None:  # a micro-step is the same, whatever step it is of
            every = attention_of(policy, sequences[: max(used.values()) * size], setting, 1, options.pools)
            found |= {(name, m): Attention(*(part[:number] for part in every)) for m, number in used.items()}
            continue
        for micro_steps, number in used.items():
            each = attention_of(policy, sequences[: number * size], setting, micro_steps, options.pools)
            found[name, micro_steps] = each
            for other, order in ORDERS.items() if name == DESCENDING else ():
                found[other, micro_steps] = reordered(each, micro_steps, functools.partial(order, micro_steps))
    return found


def rows_of(setting: Setting, corpus: str, found: Planned, options: Options) -> list[Row]:
    """A row for each policy, number of micro-steps and of stages, and schedule."""
    spec = setting.spec(32, 8)
    return [
        {"tokens": setting.name, "corpus": corpus, "policy": kind}
        | steps_row(attention, spec, stages, micro_steps, schedule)
        for (kind, micro_steps), attention in found.items()
        for stages, schedule in itertools.product(options.stages, SCHEDULES)
    ]


# --------------------------------------------------------------------------------------------------------------- report


def main(options: Options) -> None:
    check(options)
    rows: list[Row] = []
    plans: dict[tuple[str, str], Planned] = {}
    for setting, count in zip(SETTINGS, (options.drawn, options.long_drawn), strict=True):
        for corpus in CORPORA if count else ():
            plans[setting.name, corpus] = planned(setting, corpus, count, options)
            rows += rows_of(setting, corpus, plans[setting.name, corpus], options)
    tables = {
        SHORT: short_table(rows),
        "1f1b: step over ideal; stages idle, %": main_table(rows, "1f1b"),
        "gpipe: step over ideal; stages idle, %": main_table(rows, "gpipe"),
        "What idle time is made of, %": parts_table(rows),
        "Order of unlike micro-steps, 1f1b": orders_table(rows),
    }
    console = Console(width=max(Console().width, 165))
    text = ["# Pipeline", "", machine("numpy") + " One core is used.", "", legend(options), ""]
    for title, table in tables.items():
        console.print(table_of(title, table))
        text += [f"## {title}", "", *markdown(list(table[0]), [list(row.values()) for row in table]), ""]
        if options.plot and title == SHORT:
            text += [f"![Stages of a pipeline]({options.plot.name})", ""]
    if options.plot:
        draw(options.plot, plans, rows, options)
    if options.json:
        content = {"machine": machine("numpy"), "options": str(options), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.report:
        options.report.write_text("\n".join(text).rstrip() + "\n")


def check(options: Options) -> None:
    """Raises ValueError with the rule and the numbers."""
    layers = QWEN3_8B.num_layers
    for stages in options.stages:
        if stages < 1 or layers % stages:
            raise ValueError(f"stages ({stages}) must divide the model's layers ({layers})")
    most = max(options.micro_steps)
    for name in ("drawn", "long_drawn"):
        if 0 < getattr(options, name) < most:
            raise ValueError(f"{name} ({getattr(options, name)}) must be at least the most micro-steps ({most})")


LEGEND = """\
A model; no GPU is involved. Qwen3-8B, pools of 8 sequences to a micro-step: {pools}. GPUs to a stage: {ranks}.
Kernels and matrix products at 635 TFLOP/s, 360 GB/s of a rank inside a node of 8 and 50 GB/s between nodes;
gathers of weights, exchanges between stages, the optimizer and copies into buffers are left out. All policies get the
same sequences, of each corpus those of {drawn} micro-steps. These are cut into steps of
each size, at most {steps}: where a step has many micro-steps there are fewer steps than that, since planning more takes
long.

A micro-step's attention takes as long as in its slowest pool. The schedule is the one that `libra_jax.train.pipeline`
runs: at the end of a tick every stage exchanges with its neighbours, so none begins a tick before both neighbours have
ended the one before. A backward pass runs its stage forward again. The last stage has no forward pass of its own, and
has the head. 36 layers do not go into 8 stages evenly, which the trainer refuses; 9 is the nearest number that does.

- context parallel: sequences in the order they were packed; a rank computes for the tokens it holds, and fetches only
  the keys and values that these see. Its tokens are consecutive: the end of a long document is one rank's.
- Ulysses: the same sequences, their heads dealt to the ranks of a sequence.
- Libra, pools: sequences of like cost share a micro-step (`place(across="pools")`), heaviest first. Libra, all: every
  micro-step of a step costs alike (`across="all"`, the trainer's choice where there is a pipeline). Plans of both are
  the first that `plan_pool` tries, with room for whatever they need.
- step over ideal: over the time of all passes' work with attention spread evenly over all ranks of all stages, no
  exchange, nobody idle. What is computed again counts as work. Mean over steps.
- work over ideal: the passes alone, over the same: waiting for a stage's busiest rank, and exchanges that no kernel
  hides. A step over ideal is about that over (1 - idle).
- idle: the share of the stages' time in which they do nothing. Mean (5th to 95th percentile) over steps.
- P stages, M micro-steps; steps: how many were modelled. least: (P - 1) / (M + P - 1) in percent, which both schedules
  have where all passes of a kind take as long.
- idle = alike + unlike; waits. alike: idle with every micro-step of a step at the step's mean, so that nothing but the
  schedule and what sets the last stage apart is left. unlike: what differences between micro-steps add. waits: by how
  much idle would be less if a stage handed results on as soon as they are made, not at the end of a tick. Means over
  corpora.
- kept: inputs that the first stage keeps at most, and GiB of them on each rank (bfloat16)."""


def legend(options: Options) -> str:
    settings = [s for s, count in zip(SETTINGS, (options.drawn, options.long_drawn), strict=True) if count]
    counts = [f"{n} ({s.name})" for s, n in zip(SETTINGS, (options.drawn, options.long_drawn), strict=True) if n]
    ranks = [f"{options.pools * 8 * setting.cp} ({setting.name} tokens)" for setting in settings]
    return LEGEND.format(pools=options.pools, ranks=" or ".join(ranks), drawn=" and ".join(counts), steps=options.steps)


SHORT = "In short: 1f1b, means over corpora: step over ideal = work over ideal, and idle"


def short_table(rows: list[Row]) -> list[Row]:
    """A row for each length, number of stages and of micro-steps; a column for each policy."""
    table: dict[tuple, Row] = {}
    for tokens, stages, micro_steps, policy in itertools.product(
        dict.fromkeys(row["tokens"] for row in rows),
        dict.fromkeys(row["stages"] for row in rows),
        dict.fromkeys(row["micro-steps"] for row in rows),
        POLICIES,
    ):
        key = tokens, stages, micro_steps, policy, "1f1b"
        names = "tokens", "stages", "micro-steps", "policy", "schedule"
        here = [row for row in rows if tuple(row[name] for name in names) == key]
        step, work, idle = (
            float(np.mean([row[n][0] for row in here])) for n in ("over ideal", "work over ideal", "idle")
        )
        mine = table.setdefault(
            key[:3],
            dict(zip(("tokens", "P", "M"), map(str, key), strict=False))
            | {"least idle": f"{100 * least_idle(micro_steps, stages):.0f}%"},
        )
        mine[policy] = f"{step:.2f} = {work:.2f}, {100 * idle:.0f}%"
    return list(table.values())


def percent(values: list[float]) -> str:
    mean, low, high = (100 * value for value in values)
    return f"{mean:.0f} ({low:.0f}-{high:.0f})"


def main_table(rows: list[Row], schedule: Schedule) -> list[Row]:
    """A row for each corpus, number of stages and of micro-steps; a column for each policy."""
    table: dict[tuple, Row] = {}
    for row in rows:
        if row["schedule"] != schedule or row["policy"] not in POLICIES:
            continue
        key = row["tokens"], row["corpus"], row["stages"], row["micro-steps"]
        first = dict(zip(("tokens", "corpus", "P", "M"), map(str, key), strict=True))
        mine = table.setdefault(key, first | {"steps": str(row["steps"]), "least": f"{100 * row['least idle']:.0f}"})
        mine[row["policy"]] = f"{row['over ideal'][0]:.2f}; {percent(row['idle'])}"
    return list(table.values())


def parts_table(rows: list[Row]) -> list[Row]:
    """Means over corpora. A row for each schedule, number of stages and of micro-steps; columns for each policy."""
    names = [row for row in rows if row["policy"] in POLICIES]
    keys = dict.fromkeys((row["tokens"], row["schedule"], row["stages"], row["micro-steps"]) for row in names)
    table = []
    for key in sorted(keys, key=lambda key: (key[0] != SETTINGS[0].name, *key[1:])):
        here = [r for r in names if (r["tokens"], r["schedule"], r["stages"], r["micro-steps"]) == key]
        setting = next(setting for setting in SETTINGS if setting.name == key[0])
        gib = here[0]["kept"] * setting.spec(32, 8).tokens_per_rank * QWEN3_8B.hidden_size * 2 / 2**30
        row = dict(zip(("tokens", "schedule", "P", "M"), map(str, key), strict=True))
        row |= {"kept": f"{here[0]['kept']} ({gib:.1f} GiB)", "least": f"{100 * here[0]['least idle']:.1f}"}
        for policy in POLICIES:
            idle, alike, by_pass = (
                100 * float(np.mean([r[name][0] for r in here if r["policy"] == policy]))
                for name in ("idle", "idle, alike", "idle, pass")
            )
            row[policy] = f"{idle:.1f} = {alike:.1f} + {round(idle - alike, 1) + 0.0:.1f}; {idle - by_pass:.1f}"
        table.append(row)
    return table


def orders_table(rows: list[Row]) -> list[Row]:
    """Step over ideal, and idle, where micro-steps are unlike; means over corpora and numbers of micro-steps."""
    table = []
    kinds = [DESCENDING, *ORDERS, "Libra, all"]
    for tokens, stages in dict.fromkeys((row["tokens"], row["stages"]) for row in rows):
        for kind in kinds:
            here = [r for r in rows if (r["tokens"], r["stages"], r["policy"]) == (tokens, stages, kind)]
            here = [r for r in here if r["schedule"] == "1f1b"]
            cells = {
                f"M = {m}": "{:.3f}; {:.1f}%".format(*(
                    scale * float(np.mean([r[name][0] for r in here if r["micro-steps"] == m]))
                    for name, scale in (("over ideal", 1), ("idle", 100))
                ))
                for m in dict.fromkeys(r["micro-steps"] for r in here)
            }  # fmt: skip
            table.append({"tokens": tokens, "P": str(stages), "policy": kind} | cells)
    return table


# ----------------------------------------------------------------------------------------------------------------- plot

COLORS = {
    "context parallel": "#b9b9b9",
    "Ulysses": "#20639b",
    "Libra, pools": "#c0563b",
    "Libra, all": "#4f8a4c",
}
SHOWN = ("Ulysses", "Libra, pools", "Libra, all")


def draw(path: Path, plans: dict[tuple[str, str], Planned], rows: list[Row], options: Options) -> None:
    """Above: the stages of one step, policy by policy, on one scale of time. Below: idle shares by micro-steps, a panel
    a length and corpus; whiskers from the 5th to the 95th percentile."""
    stages, micro_steps = options.stages[0], options.micro_steps[0]
    settings = list(dict.fromkeys(tokens for tokens, _ in plans))
    corpora = list(dict.fromkeys(corpus for _, corpus in plans))
    figure = Figure(figsize=(15, 7.5 + 3.6 * len(settings)), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[7.2, 3.6 * len(settings)])
    above, below = halves
    tokens, corpus = settings[0], corpora[0]
    above.suptitle(
        f"One step of Qwen3-8B, {tokens} tokens, {corpus}: {stages} stages, {micro_steps} micro-steps, 1f1b (modelled)",
        fontsize=13, fontweight="bold",
    )  # fmt: skip
    spec = next(setting for setting in SETTINGS if setting.name == tokens).spec(32, 8)
    shown = [name for name in SHOWN if (name, micro_steps) in plans[tokens, corpus]]
    grid = above.subplots(len(shown), 1, sharex=True, squeeze=False)
    for i, name in enumerate(shown):
        took = plans[tokens, corpus][name, micro_steps].modelled[:micro_steps]
        gantt(grid[i][0], passes(took, spec, stages), name)
    grid[-1][0].set_xlabel("seconds")
    grid[0][0].legend(frameon=False, ncols=2, loc="lower right")
    below.suptitle(f"Share of {stages} stages' time in which they are idle, 1f1b", fontsize=13, fontweight="bold")
    panels = below.subplots(len(settings), len(corpora), squeeze=False, sharey=True, sharex=True)
    for (i, tokens), (j, corpus) in itertools.product(enumerate(settings), enumerate(corpora)):
        axes = panels[i][j]
        for k, (policy, color) in enumerate(COLORS.items()):
            line = [r for r in rows if (r["tokens"], r["corpus"], r["policy"]) == (tokens, corpus, policy)]
            line = [r for r in line if (r["stages"], r["schedule"]) == (stages, "1f1b")]
            x = np.arange(len(line)) + 0.06 * (k - 1.5)
            mean, low, high = 100 * np.array([r["idle"] for r in line]).T
            bars = np.stack([mean - low, high - mean]).clip(0)
            axes.errorbar(x, mean, bars, color=color, marker="o", markerfacecolor="white", capsize=2, label=policy)
        least = [100 * least_idle(m, stages) for m in options.micro_steps]
        axes.plot(range(len(least)), least, color="#333333", linestyle="--", label="(P - 1) / (M + P - 1)")
        axes.set_title(f"{tokens} tokens: {corpus}", loc="left", fontsize=10)
        axes.set_xticks(range(len(least)), [str(m) for m in options.micro_steps])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylim(bottom=0)  # of all: they share the axis
    for axes in panels[-1]:
        axes.set_xlabel("micro-steps")
    for axes_row in panels:
        axes_row[0].set_ylabel("% idle")
    panels[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def gantt(axes: Any, took: tuple[np.ndarray, np.ndarray], name: str) -> None:
    run = follow(*took, "1f1b")
    stages, micro_batches = took[0].shape
    parts = ("forward", run.forward, took[0], "#8fb8d8"), ("backward", run.backward, took[1], "#20639b")
    for (label, start, seconds, color), s in itertools.product(parts, range(stages)):
        some = {"facecolor": color, "edgecolor": "white", "linewidth": 0.6, "label": label if s == 0 else None}
        axes.broken_barh(list(zip(start[s], seconds[s], strict=True)), (s - 0.42, 0.84), **some)
        for m in range(micro_batches):
            if seconds[s, m] > 0.012 * run.end:
                middle = start[s, m] + seconds[s, m] / 2
                ink = "white" if label == "backward" else "black"
                axes.text(middle, s, str(m), ha="center", va="center", fontsize=7, color=ink)
    axes.axvline(run.end, color="#c0563b", linewidth=1)
    axes.set_title(f"{name}: {run.end:.1f} s, {100 * run.idle:.0f}% idle", loc="left", fontsize=10)
    axes.set_yticks(range(stages), [f"stage {s}" for s in range(stages)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(tyro.cli(Options))
