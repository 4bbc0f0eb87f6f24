"""Whether pooling changes what is learned: the demo model, trained in several layouts on the same sequences.

Each layout is one run of `libra train demo` on virtual CPU devices, all from the same first weights and with the same
sequences in every step; only who works on what, and so the order of sums, differs. Pools are compared with plain data
parallelism, and so is a yardstick: plain data parallelism whose gradients are added up over two micro-steps instead of
over eight devices, which knows neither pools nor exchanges of attention. What it is away from plain is rounding
alone. Reads the runs' metrics.jsonl; gives differences by step range, last losses and a picture.

Run: python -m benchmarks.curves [--json FILE] [--report FILE] [--plot FILE] [--csv FILE]. Runs are kept in --runs: what
is there goes on, or is read as it is; delete that folder to train anew. A thousand steps take some twelve minutes for
each layout on two busy cores.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import machine, markdown
from configs.demo import config
from libra_jax.train.config import MeshConfig
from libra_jax.train.metrics import StepRecord, read_metrics

SEQUENCES = 8
"""In every step of every layout, as in the demo's own: two micro-steps of two pools of two."""

LAYOUTS = {
    "plain": MeshConfig(8, 1, 1, cpu_devices=8),
    "pooled": MeshConfig(2, 2, 2, cpu_devices=8),
    "yardstick": MeshConfig(4, 1, 1, cpu_devices=4),
    "pipeline": MeshConfig(2, 2, 1, pp=2, cpu_devices=8),
}
TITLES = {
    "plain": "plain data parallelism: 8 devices, a sequence each",
    "pooled": "as the demo has it: 2 pools of 2 sequences, 2 ranks to a sequence, 2 micro-steps",
    "yardstick": "plain data parallelism: 4 devices, a sequence each, 2 micro-steps",
    "pipeline": "2 pools of 2 sequences, 2 stages of a pipeline, 2 micro-steps",
}
WARM_UP = 5
"""Steps whose seconds are not counted."""
LAST = 100
"""Steps whose mean loss stands for the end of a run."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train."""

    steps: int = 1000
    seq_len: int = 1024
    """Tokens in a sequence. The demo's own are 8,192, whose steps take ten times as long and more."""
    layouts: tuple[str, ...] = ("plain", "pooled", "yardstick")
    """Of plain, pooled, yardstick and pipeline; plain has to be among them."""
    yardstick_steps: int | None = None
    """Steps of the yardstick, where there is no time for all; None: all."""
    runs: Path = Path("runs/curves")
    """Folder of the runs, one to a layout."""
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""
    plot: Path | None = None
    """Draw the curves into this file (PNG)."""
    csv: Path | None = None
    """Write the losses of every step to this file."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.layouts if name not in LAYOUTS]
        if unknown or "plain" not in self.layouts:
            raise ValueError(f"layouts {self.layouts} must be of {tuple(LAYOUTS)}, with plain among them")
        if self.steps <= WARM_UP:
            raise ValueError(f"steps ({self.steps}) must be more than the {WARM_UP} whose seconds are not counted")
        if self.yardstick_steps is not None and not WARM_UP < self.yardstick_steps <= self.steps:
            raise ValueError(
                f"yardstick_steps ({self.yardstick_steps}) must be more than the {WARM_UP} whose seconds are not "
                f"counted, and no more than steps ({self.steps})"
            )

    def steps_of(self, name: str) -> int:
        """Steps of this layout's run."""
        return self.yardstick_steps or self.steps if name == "yardstick" else self.steps


LEGEND = """\
All runs start with the same weights and have the same sequences in every step (checked: as many targets and tokens).
Weights, activations and sums are float32, the demo's own type. Differences are relative, |loss - plain's| / plain's, by
step; one unit in the last place of a float32 near 3 is 8e-8 of it.

- plain: {plain}.
- pooled: {pooled}.
- yardstick: {yardstick}.
  Neither pools nor attention that crosses ranks: it differs from plain only in the order in which gradients and losses
  are added up, as any change of layout, or of the number of devices, does. It is rounding and
  nothing else, but less of it than pools bring, which also change the order of sums inside attention, in every layer: a
  pooled curve is expected to be further away by some factor, from the first steps on. A factor that grows and grows
  would be more than rounding. One run of each is one draw, so factors are rough. A difference is 1e-7 at first, and
  training multiplies it: AdamW divides every gradient by its own size, so that one which is rounding alone moves its
  weight as far as any other.{more}
- mean signed: of (loss - plain's) / plain's, so that a layout which learns worse has it above 0. Once two runs have
  drifted apart they stay on one side of each other for hundreds of steps, so this is one draw, not a mean of many: hold
  it against the yardstick's size, not against 0."""

COLUMNS = ("layout", "steps", "mean", "largest", "mean signed", "mean over yardstick's")
ENDS = ("layout", "steps", "last loss", "mean of the last {last}", "median s a step", "over plain's")


def main(options: Options) -> None:
    console = Console(width=max(Console().width, 120))
    runs = {name: run(name, options, console) for name in options.layouts}
    check_same_data(runs)
    losses = {name: np.array([record.loss for record in records]) for name, records in runs.items()}
    rows, ends = compare(losses), ends_of(runs)
    notes = remarks(losses, rows)
    tables = [
        ("Differences from plain", COLUMNS, [cells_of(row) for row in rows]),
        ("Ends", tuple(name.format(last=min(LAST, options.steps)) for name in ENDS), [end_cells(end) for end in ends]),
    ]
    for title, columns, cells in tables:
        table = Table(*columns, title=title)
        for row in cells:
            table.add_row(*row)
        console.print(table)
    console.print("\n".join(notes), highlight=False)
    commands = {name: command_of(name, options) for name in options.layouts}
    about = machine("jax", "numpy")
    if options.csv:
        write_csv(options.csv, losses)
    if options.plot:
        draw(options.plot, losses, options.seq_len)
    if options.json:
        content = {"machine": about, "options": str(options), "commands": commands, "rows": rows, "ends": ends}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.report:
        title = f"# {options.steps:,} steps of the demo model: pooled and plain"
        data = f"Sequences of {options.seq_len:,} tokens, {SEQUENCES} to a step"
        if options.seq_len != config().seq_len:
            data += f" (the demo's own have {config().seq_len:,}: --seq-len {config().seq_len})"
        text = [title, "", about, f"{data}.", "", *notes, ""]
        if options.plot:
            text += [f"![loss by step]({os.path.relpath(options.plot, options.report.parent)})", ""]
        more = f"\n- pipeline: {TITLES['pipeline']}." if "pipeline" in options.layouts else ""
        text += [LEGEND.format(**TITLES, more=more), ""]
        for title, columns, cells in tables:
            text += [f"## {title}", "", *markdown(columns, cells), ""]
        text += [SECONDS, "", "## Commands", "", "```", *(" ".join(line) for line in commands.values()), "```"]
        options.report.write_text("\n".join(text) + "\n")


SECONDS = """\
Seconds are of virtual devices that share two cores with one another and with other programs, which did not leave each
run the same: they say what this comparison costs, not what a layout is worth."""


def command_of(name: str, options: Options) -> list[str]:
    """The user's command that trains in this layout."""
    mesh = LAYOUTS[name]
    return [
        *("libra", "train", "demo", "--run-dir", str(options.runs / name)),
        *("--steps", str(options.steps_of(name)), "--seq-len", str(options.seq_len)),
        *("--mesh.pools", str(mesh.pools), "--mesh.pool-size", str(mesh.pool_size), "--mesh.cp", str(mesh.cp)),
        *("--mesh.pp", str(mesh.pp), "--mesh.cpu-devices", str(mesh.cpu_devices)),
        *("--micro-steps", str(SEQUENCES // mesh.sequences)),
        *("--model.compute-dtype", "float32", "--checkpoint.every", "250", "--checkpoint.keep", "1"),
        "--metrics.no-tensorboard",
    ]


def run(name: str, options: Options, console: Console) -> list[StepRecord]:
    """Trains in this layout, unless that is done already, and returns the records of its first steps.

    What the run says goes to a file beside its folder. Raises SystemExit with the end of it where the run fails.
    """
    folder, command = options.runs / name, command_of(name, options)
    console.print(" ".join(command), highlight=False, soft_wrap=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{name}.log"
    with log.open("w") as said:
        program = [sys.executable, "-m", "libra_jax.cli", *command[1:]]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(program, stdout=said, stderr=subprocess.STDOUT, env=environment, check=False)
    if ended.returncode:
        raise SystemExit(f"{log}: {' '.join(command)} ended with {ended.returncode}\n{log.read_text()[-2000:]}")
    steps = options.steps_of(name)
    records = read_metrics(folder / "metrics.jsonl")[:steps]
    if len(records) < steps:
        raise SystemExit(f"{folder} has {len(records)} whole records, {steps} were to be made")
    return records


def check_same_data(runs: Mapping[str, list[StepRecord]]) -> None:
    """Raises SystemExit where two runs did not have as many targets and tokens in a step, or one left out an update."""
    for name, records in runs.items():
        for one, plain in zip(records, runs["plain"], strict=False):
            ours, theirs = ((record.step, record.targets, record.tokens) for record in (one, plain))
            if ours != theirs:
                raise SystemExit(f"{name} has (step, targets, tokens) {ours} where plain has {theirs}: other sequences")
            if one.skipped:
                raise SystemExit(f"{name} left out the update of step {one.step}, which was not finite")


def ranges(steps: int) -> list[tuple[int, int]]:
    """First and last steps of 1 to 10, 11 to 100, 101 to 1,000 and so on, up to `steps`."""
    found, first, last = [], 1, 10
    while first <= steps:
        found.append((first, min(last, steps)))
        first, last = last + 1, 10 * last
    return found


def compare(losses: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """A row for each layout but plain and each range of steps. losses: (steps,) by layout, fewer of the yardstick.

    mean, largest: of |loss - plain's| / plain's; signed: mean of it with its sign; over: mean over the yardstick's in
    the steps that both have, None where that has none or is no different.
    """
    rows, plain = [], losses["plain"]
    apart = {name: curve / plain[: len(curve)] - 1 for name, curve in losses.items()}
    for first, last in ranges(len(plain)):
        for name in losses:
            here = apart[name][first - 1 : last]
            if name == "plain" or not len(here):
                continue
            both = min(last, len(apart.get("yardstick", ())))  # the last step that the yardstick has, too
            yardstick = np.abs(apart["yardstick"][first - 1 : both]).mean() if both >= first else 0.0
            rows.append(
                {
                    "layout": name,
                    "first": first,
                    "last": first + len(here) - 1,
                    "mean": float(np.abs(here).mean()),
                    "largest": float(np.abs(here).max()),
                    "signed": float(here.mean()),
                    "over": float(np.abs(apart[name][first - 1 : both]).mean() / yardstick) if yardstick else None,
                }
            )
    return rows


def cells_of(row: Mapping[str, Any]) -> list[str]:
    return [
        row["layout"],
        f"{row['first']} to {row['last']}",
        f"{row['mean']:.1e}",
        f"{row['largest']:.1e}",
        f"{row['signed']:+.1e}",
        "" if row["over"] is None else f"{row['over']:.2f}",
    ]


def ends_of(runs: Mapping[str, list[StepRecord]]) -> list[dict[str, Any]]:
    """A row for each layout: last_loss, last_mean (nats; None where a run has fewer steps than plain), seconds
    (median of a step), over (plain's seconds)."""
    seconds = {name: float(np.median([r.seconds for r in records[WARM_UP:]])) for name, records in runs.items()}
    whole = {name: len(records) == len(runs["plain"]) for name, records in runs.items()}
    return [
        {
            "layout": name,
            "steps": len(records),
            "last_loss": records[-1].loss if whole[name] else None,
            "last_mean": float(np.mean([record.loss for record in records[-LAST:]])) if whole[name] else None,
            "seconds": seconds[name],
            "over": seconds[name] / seconds["plain"],
        }
        for name, records in runs.items()
    ]


def end_cells(end: Mapping[str, Any]) -> list[str]:
    last = ["" if end[key] is None else f"{end[key]:.4f}" for key in ("last_loss", "last_mean")]
    return [end["layout"], str(end["steps"]), *last, f"{end['seconds']:.2f}", f"{end['over']:.2f}"]


def remarks(losses: Mapping[str, np.ndarray], rows: list[dict[str, Any]]) -> list[str]:
    """What the tables come to, in sentences."""
    plain = losses["plain"]
    jumps = np.abs(np.diff(plain[-LAST:])) / plain[-LAST:-1]
    notes = [
        f"Plain goes from {plain[0]:.3f} to {plain[-LAST:].mean():.3f} nats (mean of the last {len(plain[-LAST:])} "
        f"steps), and from one step to the next, which has other text, by {jumps.mean():.1%} in the mean."
    ]
    for name in losses:
        if name == "plain":
            continue
        row = [row for row in rows if row["layout"] == name][-1]
        apart = np.flatnonzero(np.abs(losses[name] / plain[: len(losses[name])] - 1) > 1e-3)
        since = f"first more than 1e-3 away at step {apart[0] + 1}" if len(apart) else "never 1e-3 away"
        if len(losses[name]) < len(plain):
            since += f" (this run was given {len(losses[name])} steps of {len(plain)})"
        notes.append(
            f"{name[0].upper()}{name[1:]}: {since}; in steps {row['first']} to {row['last']} {row['mean']:.1e} away in "
            f"the mean and {row['largest']:.1e} at most, with its sign {row['signed']:+.1e}."
        )
    return notes


def write_csv(path: Path, losses: Mapping[str, np.ndarray]) -> None:
    """A line for each step: its number, and the loss in each layout with all digits of a float32."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *losses])
        for step, values in enumerate(itertools.zip_longest(*losses.values()), 1):
            writer.writerow([step, *("" if value is None else f"{value:.9g}" for value in values)])


COLORS = {"plain": "#222222", "pooled": "#c0563b", "yardstick": "#82aed2", "pipeline": "#7a9a5b"}
FLOOR = 1e-8
"""Where a difference of nothing is drawn."""


def draw(path: Path, losses: Mapping[str, np.ndarray], seq_len: int) -> None:
    """Losses by step; below, how far each layout is from plain."""
    figure = Figure(figsize=(9.0, 7.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = np.arange(1, len(losses["plain"]) + 1)
    widths = {"plain": 2.6, "pooled": 1.0, "yardstick": 0.6, "pipeline": 0.6}
    for name, curve in losses.items():
        above.plot(
            steps[: len(curve)], curve, color=COLORS[name], linewidth=widths[name], label=f"{name}: {TITLES[name]}"
        )
        if name != "plain":
            apart = np.maximum(np.abs(curve / losses["plain"][: len(curve)] - 1), FLOOR)
            below.plot(
                steps[: len(curve)], apart, color=COLORS[name], linewidth=0.8, label=f"{name} and plain", alpha=0.85
            )
    above.set_ylabel("loss (nats)")
    above.set_title(f"The demo model, the same {SEQUENCES} sequences of {seq_len:,} tokens in every step", loc="left")
    below.set(xscale="log", yscale="log", xlabel="step", ylabel="relative difference of loss", xlim=(1, len(steps)))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper right" if axes is above else "lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Options))
