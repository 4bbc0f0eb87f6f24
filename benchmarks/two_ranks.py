"""Imbalance that costs real time: two processes, one core each, a pool of two sequences, timed.

One sequence is a single long document, the other many short ones. Plain: each rank works on what it holds. Pooled: the
two share the work as the planner says, and exchange what that takes through gloo, which is what XLA:CPU has between
processes. Forward, forward and backward of the attention operator, and a whole training step of a small Qwen3, in turn;
beside each ratio the one that the planner's cost model predicts, with coefficients measured on this machine.

Run: python -m benchmarks.two_ranks [--json FILE] [--report FILE] [--plot FILE]; about six minutes on two idle cores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import machine, markdown
from libra_jax.processes import run_processes
from libra_jax.workload import CostModel

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    tokens: tuple[int, ...] = (2048, 4096, 8192, 16384)
    """Lengths of the packed sequences."""
    documents: tuple[int, ...] = (64, 1024, 0, 256)
    """Lengths of the second sequence's documents; 0: half the sequence."""
    rounds: tuple[int, ...] = (5, 3, 3, 2)
    """Rounds at each length of sequence; a round runs plain and pooled once."""
    skews: tuple[int, ...] = (4, 4, 2, 1)
    """How many of `documents`, from the first, at each length."""
    steps: tuple[int, ...] = (1, 1, 1, 1)
    """For how many of those the training step is run, too."""
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block: int = 128
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    waves: int = 1
    capacity: float = 0.5
    """Room for what a rank receives, in its home blocks: no more than these plans need."""
    transport: Literal["ppermute", "all_to_all"] = "ppermute"
    """Of the operator; the training step takes what the operator chooses by itself."""
    disturbed: float = 0.1
    """A round in which other programs had more of a core than this is repeated."""
    minutes: float = 4.5
    """No round is repeated later than this."""
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the table to this file, as Markdown."""
    plot: Path | None = None
    """Draw predicted against measured into this file (PNG)."""


COLUMNS = (
    "tokens",
    "short",
    "pages",
    "pass",
    "plain",
    "pooled",
    "measured",
    "predicted",
    "cpu",
    "MB",
    "other",
    "rounds",
)
PASSES = {"forward": "forward", "both": "both ways", "step": "training step"}

LEGEND = """\
Two processes with one core each. The first sequence of a pool is one document, the second is full of documents of
`short` tokens. Output and dq of both sides have the same bits (checked before anything is timed).

- pages: what perfect balance would give if a page of attention were all that costs time, at most 2.
- pass: of the operator, its forward pass alone and with the backward pass; of the trainer, a whole step.
- plain, pooled: medians of the slower rank's seconds; plain exchanges nothing. measured: median over rounds of
  plain over pooled, each round running both, in turn.
- predicted: the same from the cost model (seconds per page, per block and per launch, measured on this machine with
  both ranks doing the same), the busier rank's, plus the bytes of the exchange over gloo's measured speed. For the
  step, what is not attention is measured with documents of one block on both ranks. Packing and copying is not in it.
- cpu: processor time of the busier rank, plain over pooled: it hardly notices other programs, nor waiting.
- MB: what each rank sends the other, padding included. other: cores that other programs used meanwhile (median).
- rounds: rounds counted; +n: n more were left out, because others used more than {disturbed} of a core; *: there were
  too few without, so all are counted."""


def main(options: Options) -> None:
    started = time.monotonic()
    console = Console(width=max(Console().width, 120))
    found = measure(options, console)
    rows = [cells_of(row, predict(row, found)) for row in found["rows"]]
    title = (
        f"heads {options.num_heads}/{options.num_kv_heads} of {options.head_dim}, block {options.block}, "
        f"{options.dtype}, {options.waves} wave{'s' * (options.waves > 1)}, {options.transport}"
    )
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "pass" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    notes = remarks(found, time.monotonic() - started)
    console.print("\n".join(notes), highlight=False)
    about = machine("jax", "numpy")
    if options.json:
        for row in found["rows"]:
            row["predicted"] = predict(row, found)
        content = {"machine": about, "options": str(options), **found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        draw(options.plot, found)
    if options.report:
        text = ["# Two ranks: what imbalance costs, measured", "", about, *notes, ""]
        if options.plot:
            text += [f"![predicted against measured]({os.path.relpath(options.plot, options.report.parent)})", ""]
        text += [LEGEND.format(disturbed=options.disturbed), "", f"## {title}", "", *markdown(COLUMNS, rows)]
        options.report.write_text("\n".join(text) + "\n")


def measure(options: Options, console: Console) -> dict[str, Any]:
    """Starts the two processes, each on a core of its own, and returns what they found; see `two_ranks_worker`."""

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit(f"two ranks need two cores, this process may use {len(cores)}")
    with tempfile.TemporaryDirectory() as folder:
        options_file, result = Path(folder) / "options.pickle", Path(folder) / "result.json"
        options_file.write_bytes(pickle.dumps(dataclasses.asdict(options)))
        run_processes(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.two_ranks_worker", str(options_file), str(result)],
            2,
            timeout_seconds=60 * options.minutes + 1800,
            cores=cores,
            environment=os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
            on_line=lambda line: say(line) if line.startswith("two ranks: ") else None,
        )
        return json.loads(result.read_text())


def predict(row: Row, found: dict[str, Any]) -> float:
    """Plain over pooled, as the cost model and the measured wire have it."""
    cost, wire = CostModel(**found["cost_model"]), found["wire_seconds"]
    which = ("forward",) if row["pass"] == "forward" else ("forward", "backward")

    def attention(work: list[int], blocks: list[int]) -> float:
        return sum(
            max(float(getattr(cost, name)(pages, number, 1)) for pages, number in zip(work, blocks, strict=True))
            for name in which
        )

    plain, pooled = (attention(row["work"][side], row["blocks"][side]) for side in ("plain", "pooled"))
    for name in which:
        pooled += row["moved_bytes"][name] * wire["per_byte"] + row["exchanges"] * wire["per_exchange"]
    rest = 0.0
    if row["pass"] == "step":
        even = found["rest_seconds"][str(row["tokens"])]
        rest = max(even["step"] - attention(even["pages"], even["blocks"]), 0.0)
    return (rest + plain) / (rest + pooled)


def cells_of(row: Row, predicted: float) -> list[str]:
    work, seconds = row["work"], row["seconds"]
    moved = row["moved_bytes"]["forward"] + (row["moved_bytes"]["backward"] if row["pass"] != "forward" else 0)
    extra = f" +{row['left_out']}" if row["left_out"] else ""
    return [
        str(row["tokens"]),
        str(row["short"]),
        f"{max(work['plain']) / (sum(work['plain']) / 2):.2f}",
        PASSES[row["pass"]],
        f"{seconds['plain']:.3f}",
        f"{seconds['pooled']:.3f}",
        f"{row['ratio']:.2f}",
        f"{predicted:.2f}",
        f"{row['processor_ratio']:.2f}",
        f"{moved / 1e6:.1f}",
        f"{row['foreign']:.2f}",
        f"{row['rounds']}{extra}{'' if row['clean'] else ' *'}",
    ]


def remarks(found: dict[str, Any], seconds: float) -> list[str]:
    cost, wire = found["cost_model"], found["wire_seconds"]
    foreign = [x for row in found["rows"] for x in row["all_foreign"]]
    return [
        f"Measured in {seconds / 60:.1f} minutes; other programs used {sum(foreign) / len(foreign):.2f} cores on "
        f"average, {max(foreign):.2f} at most.",
        f"A page costs {1e6 * cost['page_seconds']:.0f} us forward and {1e6 * cost['backward_page_seconds']:.0f} us "
        f"backward, a block {1e6 * cost['block_seconds']:.0f} and {1e6 * cost['backward_block_seconds']:.0f} us, "
        f"a launch {1e3 * cost['launch_seconds']:.2f} and {1e3 * cost['backward_launch_seconds']:.2f} ms; gloo moves "
        f"{1e-9 / wire['per_byte']:.2f} GB/s each way at once, and an exchange of nothing takes "
        f"{1e3 * wire['per_exchange']:.2f} ms.",
    ]


def draw(path: Path, found: dict[str, Any]) -> None:
    """Predicted against measured: a marker for each row, its kind by pass, its color by length of sequence."""
    figure = Figure(figsize=(7.2, 6.6), layout="constrained")
    axes = figure.subplots()
    lengths = sorted({row["tokens"] for row in found["rows"]})
    colors = dict(zip(lengths, ("#9aa5b1", "#82aed2", "#20639b", "#c0563b", "#222222"), strict=False))
    markers = {"forward": "o", "both": "s", "step": "^"}
    for row in found["rows"]:
        place = predict(row, found), row["ratio"]
        axes.scatter(*place, s=70, alpha=0.85, marker=markers[row["pass"]], color=colors[row["tokens"]], linewidths=0)
    ends = (0.9, 2.05)
    axes.plot(ends, ends, color="#222222", linewidth=1, linestyle="--")
    axes.text(1.02, 0.985, "measured = predicted", rotation=45, rotation_mode="anchor", color="#222222", fontsize=9)
    for name, marker in markers.items():
        axes.scatter([], [], marker=marker, color="#555555", label=PASSES[name])
    for tokens, color in colors.items():
        axes.scatter([], [], marker="o", color=color, label=f"{tokens:,} tokens")
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    axes.set_xlabel("predicted: plain over pooled")
    axes.set_ylabel("measured: plain over pooled")
    axes.set_title(
        "Two ranks, one long document against many short ones:\nhow much faster a pool of two is", loc="left"
    )
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Options))
