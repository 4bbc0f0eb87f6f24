"""The tables of benchmarks/mesh.py: correctness, times, busy time of every rank; on the terminal and as Markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.mesh_runs import NAMES, Planned
from benchmarks.reporting import markdown

Row = dict[str, Any]
Lines = Sequence[dict[str, str]]
PASSES = {"forward": "forward", "both": "both ways", "step": "training step"}
MOST_RANKS = 16
LEGEND = """\
All policies run on the same sequences, in the same pools, with the same kernels and exchange, in turn. The base is
{base}. First table, over the largest entry: the largest error of output and gradients against dense float32 attention
(allowed: {rounding:g}), on sequences of {check} tokens with padding and one-token documents; entries of output and dq
whose bits differ from the first policy's (allowed: 0), there and at full size; the loss of two training steps on one
batch, from one start, with weights finite after them.

- forward, both ways, step: medians of {rounds} rounds, ± half of what lies between the fastest and the slowest. Of the
  operator its forward pass, and forward and backward; of the trainer an optimizer step. Until the slowest rank is done.
- over base: the median over rounds of a policy's time over the base's in the same round: above 1 is slower.
- tokens/s: real tokens of a step over the training step's time (or both ways, without one).
- imbalance: pages visited by the busiest rank of a pool over the mean, the plan's own number.
- busiest ms, busy imbalance: each rank's own kernels, forward and backward, run alone on one device: the slowest rank's
  time, and that over the mean of all ranks. Measured, the least of the rounds, with no exchange and nobody to wait for.
- sends: bytes of a layer's forward pass, both ways, of the busiest rank and of the mean one, from the plan.
- modelled over base: seconds of a layer's attention, forward and backward, by the cost model and the links (H100s
  unless a cost model is given), documents and blocks being as long as before their lengths were divided.
- room: "default" where a spec's default room holds the policy's plans; else "more", and the notes say what it lacks.
"""
LIMITS = (
    "Other systems are run as plans: who computes what is theirs, kernels and exchange are Libra's. In most of them a "
    "rank holds the tokens that it computes; here tokens have a fixed home, so queries travel to where those systems "
    "would have put the tokens, and outputs back: bytes are more than theirs.",
    "Pools are the same for all. Policies that stay inside a sequence's own ranks do not use the rest of the pool.",
    "Padded transports (all_to_all, ppermute) move the room of a pair whatever the plan, and with shared room that is "
    "the neediest policy's: there measured time says nothing of bytes. The ragged transport moves what is there.",
)
CPU_LIMIT = (
    "These devices are virtual and share this machine's cores: measured times follow the work of all ranks together, "
    "which is the same for every policy, not the slowest rank's. They show what a policy's plan costs beside its "
    "kernels (copies, exchange), and not what balance gains; that is in busiest ms, where each rank had all the cores."
)


def notes(planned: Mapping[str, Planned], platform: str) -> list[str]:
    """What a policy's plans lack in a default room, and what the numbers do not say."""
    lacks = [f"{name}: in a spec's default room {policy.lack}." for name, policy in planned.items() if policy.lack]
    if platform != "cpu":
        return [*lacks, *LIMITS]
    load = (
        f"At the end {os.getloadavg()[2]:.1f} threads wanted one of the {os.cpu_count()} cores, this run's own among "
        "them (mean of 15 minutes). What other programs took is in the ±."
    )
    return [*lacks, *LIMITS, CPU_LIMIT, load]


def correctness(rows: Sequence[Row]) -> Lines:
    """The first table."""
    table = []
    for row in rows:
        line = {"policy": row["policy"]}
        if "out" in row:
            line |= {name: f"{row[name]:.1e}" for name in NAMES}
            line |= {"bits": str(row["bits"]), "at full size": str(row["full_bits"])}
        if "losses" in row:
            line["losses"] = " ".join(f"{loss:.7f}" for loss in row["losses"])
        table.append(line | {"": "ok" if row["ok"] else "WRONG: " + "; ".join(row["why"])})
    return table


def times(rows: Sequence[Row]) -> Lines:
    """The second table."""
    table = []
    for row in rows:
        there, line = [which for which in PASSES if which in row], {"policy": row["policy"]}
        for which in there:
            seconds = 1e3 * np.array(row[which]["seconds"])
            spread = f" ±{(seconds.max() - seconds.min()) / 2:.1f}" if len(seconds) > 1 else ""
            line[f"{PASSES[which]} ms"] = f"{np.median(seconds):.1f}{spread}"
        line["over base"] = " / ".join(f"{row[which]['over_base']:.2f}" for which in there)
        table.append(line | {
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "imbalance": f"{row['imbalance']:.3f}",
            "busiest ms": f"{1e3 * row['busy_most']:.1f}",
            "busy imbalance": f"{row['busy_imbalance']:.2f}",
            "busiest sends MB": f"{row['sent_most_bytes'] / 1e6:.2f}",
            "mean sends MB": f"{row['sent_mean_bytes'] / 1e6:.2f}",
            "modelled over base": f"{row['modelled_over_base']:.2f}",
            "room": "more" if row["lack"] else "default",
        })  # fmt: skip
    return table


def busy(rows: Sequence[Row]) -> Lines:
    """The third table: of the first step, the first ranks."""
    return [
        {"policy": row["policy"]}
        | {f"rank {i}": f"{1e3 * seconds:.1f}" for i, seconds in enumerate(row["busy_seconds"][0][:MOST_RANKS])}
        for row in rows
    ]


def show(console: Console, title: str, lines: Lines) -> None:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in lines[0]:
        left = name in ("policy", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "policy")
    for line in lines:
        table.add_row(*line.values())
    console.print(table)


def write(found: Mapping[str, Any], legend: str, json_file: Path | None, report: Path | None) -> None:
    """found: as the JSON file has it."""
    if json_file:
        json_file.write_text(json.dumps(found, indent=1, default=str) + "\n")
    if report:
        text = ["# Every policy on one mesh", "", found["machine"], found["about"], "", legend]
        for title, lines in tables(found["correct"], found["rows"]).items():
            text += [f"## {title}", "", *markdown(list(lines[0]), [list(x.values()) for x in lines]), ""]
        if found["notes"]:
            text += ["## What these numbers do not say", "", *(f"- {note}" for note in found["notes"])]
        report.write_text("\n".join(text).rstrip() + "\n")


def tables(correct: Sequence[Row], rows: Sequence[Row]) -> dict[str, Lines]:
    """{title: lines}; without rows only the first."""
    first = {"Correctness": correctness(correct)}
    return first | ({"Times": times(rows), "Busy time of each rank, ms": busy(rows)} if rows else {})
