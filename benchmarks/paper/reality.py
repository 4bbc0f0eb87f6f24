"""The cluster model held to what others have published, and to this project's own measurement on two processes.

Every row has a published value, the same from the model, and the residual: modelled over published, less 1. Nothing is
fitted here and no constant is changed to come nearer: settings are the publications' own where these print them, and
what they leave open is said where it is filled in. Corpora of other systems are not public: their results are modelled
on all shipped distributions of lengths, one row each.

The report has the sums (`section`) and, beside them, every row (`rows_text`, `rows_csv`).
Run: python -m benchmarks.paper.reality prints all of it; under two minutes on one core.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.paper.reality_kernels import attention_rows, kernel_rows, nccl_rows
from benchmarks.paper.reality_rows import Row
from benchmarks.paper.reality_runs import distca_rows, llama_rows, wlb_rows
from benchmarks.reporting import markdown

TWO_RANKS = Path(__file__).parents[1] / "reports" / "two_ranks.json"


@dataclasses.dataclass(frozen=True)
class Part:
    """What is compared, how the model was set up for it, and the rows."""

    title: str
    text: str
    rows: Callable[[], list[Row]]


# ----------------------------------------------------------------------------------------------------------- two ranks


def two_rank_rows() -> list[Row]:
    """Speed-up by pooling, measured on two processes of this project's machine, and predicted from its page times."""
    content = json.loads(TWO_RANKS.read_text())
    rows = []
    for each in content["rows"]:
        way = {"forward": "forward", "both": "both ways", "step": "training step"}[each["pass"]]
        what = f"{each['tokens']:,} tokens, one document beside documents of {each['short']}"
        why = "copies into and out of buffers are not modelled" if each["tokens"] <= 4096 else ""
        source = "benchmarks/reports/two_ranks.json: measured by this project, " + content["machine"].split(",")[0]
        rows.append(Row(way, what, each["ratio"], each["predicted"], "x", source, why))
    return rows


# -------------------------------------------------------------------------------------------------------------- report

PARTS: tuple[Part, ...] = (
    Part(
        "Attention kernels against DistCA's H100 profile",
        "Forward attention of one document. The profile does not state its heads; 64 of width 128 are assumed and "
        "nothing is fitted to it. Its times at 65,536 tokens and cp 2, 4 and 8 are a half, a quarter and an eighth: "
        "cp divides work evenly, as a zigzag does, and so it is modelled; tp divides the heads. Packed sequences have "
        "many documents in a launch and fill a GPU better than a short one of these alone.",
        attention_rows,
    ),
    Part(
        "Attention kernels against published speeds",
        "Fitted points say how well two numbers describe a curve. Independent ones, another publication's with other "
        "shapes, were not used. With these a launch of 25 us is counted, as the model counts one for every wave.",
        kernel_rows,
    ),
    Part(
        "Wires",
        "All-gathers inside a node, in which a rank receives all but its own share; a reduce-scatter is modelled as "
        "the same bytes the other way.",
        nccl_rows,
    ),
    Part(
        "WLB-LLM",
        "Llama2-7B, 131,072 tokens, TP 8, CP 2, PP 4, DP 1, 4 micro-batches, FlashAttention-3. A rank stands for one "
        "GPU of a tensor-parallel group and has an eighth of the heads, of the MLP and of the vocabulary; the group's "
        "collectives lower the speed of matrix products. Queues' thresholds are evenly spread. Not as there: stages "
        "are not interleaved, layers are computed again in the backward pass, and the documents. Speed-ups are by "
        "token: with delay, steps are not equally long. 24 steps after 24 that fill the queues. Other readings of "
        "what is not published come last.",
        wlb_rows,
    ),
    Part(
        "DistCA",
        "Llama3-8B on H200, TP 8, no pipeline, 128K to 512K, 64 to 256 GPUs, batches as in its Table 3; Triton's "
        "speeds, which its own profile is nearest to. WLB-LLM's packing without delay, at the best of all splits into "
        "DP and CP, is what it is compared with. TP is modelled in two ways: as in the part above, or as context "
        "parallelism inside a node, one server a node (8 steps; else 32). Published are the least and the most "
        "over all settings, of 8B and 34B together.",
        distca_rows,
    ),
    Part(
        "Llama 3",
        "Absolute throughput. 128 layers for 126 and the embeddings, one document a sequence, activations kept, one "
        "replica.",
        llama_rows,
    ),
    Part(
        "Two processes of this project",
        "Measured, not published: what a pool of two sequences gains over plain packing. Predicted from times of a "
        "page, a block, a launch and a byte, measured on the same machine with equal work.",
        two_rank_rows,
    ),
)
MOST_ROWS = 45
"""Of a part that is printed row by row; the CSV has all."""
COLUMNS = ("series", "what", "published", "modelled", "residual", "why")
READING = (
    "Long documents and large messages are priced well: fitted curves to 1%, all-gathers and FSDP's gathers of more "
    "than 64 MiB to a few percent. Small ones are not: short documents in the backward pass and few queries a rank are "
    "priced too low by up to a half, and one latency for all sizes and numbers of GPUs is up to 60% off at 8 MiB.",
    "Publications differ more from each other than the curves from their fit: an independent benchmark's "
    "FlashAttention-3 is faster forward and slower backward, and DistCA's profile is nearest to Triton's speeds and "
    "takes about twice what the FlashAttention-3 curve would, if it has 64 heads. Triton's backward speed is an "
    "assumption: there is no published point to hold it to.",
    "Sums are as fast as gathers in the model, which they are not with two GPUs. Between nodes all ports run at full "
    "rate; one published measurement on 32 nodes is far from it.",
    "A step's linear part is probably too fast. Nothing is counted for elementwise work, and Llama 3's published "
    "throughput is well below what the model gives for its computation alone. The runtime's own pipeline, whose stages "
    "run forward twice and are not interleaved, is half as fast as Llama 3's at 16 micro-batches.",
    "Against context parallelism that gathers keys and values, the model is kind to systems that pool attention: "
    "DistCA's least gain is met, its largest is above what is published. Gathers take too large a share with many "
    "nodes, and DistCA's exchange is wholly hidden. What Libra gains over such systems leans the same way.",
    "WLB-LLM's imbalance with delay comes out a little too good. Its imbalance without, and its gain, are met only "
    "where attention takes more of the time than with FlashAttention-3 and tensor parallelism's collectives; what it "
    "takes there is not stated. Sharding per sequence loses more on its packed bins here than there.",
    "Idle shares follow from the longest documents: of the shipped distributions only the lognormal one has enough of "
    "them to be compared, and it makes two and four replicas wait too much.",
    "Gains on two processes are foretold a few percent too high: copies into and out of buffers are not modelled.",
)
"""What the residuals say about the model."""


@functools.cache
def all_rows() -> tuple[tuple[Part, tuple[Row, ...]], ...]:
    """Every part with its rows."""
    return tuple((part, tuple(part.rows())) for part in PARTS)


def summary(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str]]:
    """Of each series: its name, rows, median residual, and the worst one with its row."""
    for series in dict.fromkeys(row.series for row in rows):
        those = [row for row in rows if row.series == series]
        worst = max(those, key=lambda row: abs(row.residual))
        median = float(np.median([row.residual for row in those]))
        yield series, f"{len(those)}", f"{median:+.1%}", f"{worst.residual:+.1%} ({worst.what})"


def _number(amount: float, unit: str) -> str:
    return f"{amount:.1%}" if unit == "share" else f"{amount:,.{0 if amount >= 1000 else 2}f} {unit}"


def _cells(row: Row) -> tuple[str, ...]:
    shown = _number(row.published, row.unit), _number(row.modelled, row.unit)
    return row.series, row.what, *shown, f"{row.residual:+.1%}", row.why


RESIDUAL = "Residual: modelled over published, less 1; of a time, below 0 is too fast, of a rate or a gain, above 0."


def section() -> list[str]:
    """Markdown for the report: what the residuals say, and those of every series."""
    cells = [[part.title, *each] for part, rows in all_rows() for each in summary(rows)]
    lines = [RESIDUAL, "Every row, how it was modelled, and its source are in [residuals.md](residuals.md).", ""]
    lines += [*(f"- {each}" for each in READING), ""]
    return [*lines, *markdown(("held to", "series", "rows", "median residual", "worst"), cells), ""]


def rows_text() -> list[str]:
    """Markdown: of every part how it was modelled, residuals by series, rows where they are few, and sources."""
    lines = ["# The model and what others have published", "", RESIDUAL]
    lines += ["[What they say](README.md#held-to-reality).", ""]
    for part, rows in all_rows():
        lines += [f"## {part.title}", "", *textwrap.wrap(part.text, 120, break_on_hyphens=False), ""]
        lines += markdown(("series", "rows", "median residual", "worst"), [list(each) for each in summary(rows)])
        if len(rows) <= MOST_ROWS:
            lines += ["", *markdown(COLUMNS, [_cells(row) for row in rows])]
        sources = "Sources: " + "; ".join(dict.fromkeys(row.source for row in rows)) + "."
        lines += ["", *textwrap.wrap(sources, 120, break_on_hyphens=False), ""]
    return lines


def rows_csv(path: Path) -> None:
    """Writes all rows, one a line."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("part", *(field.name for field in dataclasses.fields(Row)), "residual"))
        for part, rows in all_rows():
            writer.writerows((part.title, *dataclasses.astuple(row), f"{row.residual:.6f}") for row in rows)


def main() -> None:
    console = Console(width=160, highlight=False)
    for each in READING:
        console.print(f"- {each}")
    for part, rows in all_rows():
        console.print(f"[bold]{part.title}[/bold]\n{part.text}")
        short = Table("series", "rows", "median", "worst", box=box.SIMPLE)
        for each in summary(rows):
            short.add_row(*each)
        console.print(short)
        if len(rows) <= MOST_ROWS:
            table = Table(*COLUMNS, box=box.SIMPLE)
            for row in rows:
                table.add_row(*_cells(row))
            console.print(table)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
