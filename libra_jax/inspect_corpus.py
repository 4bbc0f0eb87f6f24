"""`libra inspect PATH`: how skewed a corpus is, and what that costs with and without Libra.

Takes document lengths, or text, and the shape of a run; shows what `data.skew` finds as tables, a picture and JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from libra_jax.data.config import TEXT_SUFFIXES
from libra_jax.data.lengths import read_lengths
from libra_jax.data.skew import Bucket, Report, inspect
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """How skewed a corpus is, and what that costs with and without Libra."""

    path: Path
    """A folder of text files; or a file of document lengths in tokens: .npy, .json (a list, or quantiles), .jsonl, or
    plain numbers."""
    kind: Literal["auto", "text"] = "auto"
    """text: read a file as one document of text, whatever it is called."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """What a file in a folder must end with to be read."""
    bytes_per_token: float = 1.0
    """Text is counted in bytes and divided by this; 1 is the byte tokens of the demo, 4 near common tokenizers."""
    seq_len: int = 262144
    """Tokens in a packed sequence."""
    pool_size: int = 8
    """Packed sequences in a pool."""
    cp: int = 8
    """Ranks that hold one sequence."""
    pools: int = 4
    """Pools side by side."""
    micro_steps: int = 2
    """Micro-steps of an optimizer step."""
    num_heads: int = 32
    """Query heads."""
    num_kv_heads: int = 8
    """Key and value heads."""
    head_dim: int = 128
    """Width of a head."""
    block: int = 128
    """Tokens in a block and in a page."""
    window: int | None = None
    """A query sees at most this many keys; None: its whole document."""
    across: Literal["all", "pools"] = "pools"
    """Make all slots of a step equal, or only the pools of each micro-step."""
    steps: int = 2
    """Optimizer steps to pack, place and plan."""
    cost: Path | None = None
    """A cost model saved by `CostModel.save`; None: the default, a Triton kernel on an H100."""
    seed: int = 0
    """Which documents come in which order."""
    png: Path | None = Path("libra-inspect.png")
    """Where the picture goes; None: no picture."""
    json: bool = False
    """Print JSON instead of tables."""

    @property
    def spec(self) -> PoolSpec:
        return PoolSpec(
            seq_len=self.seq_len,
            pool_size=self.pool_size,
            cp=self.cp,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block=self.block,
            window=self.window,
        )


def run(options: InspectOptions) -> int:
    """Do what the options say; tables or JSON on stdout, the picture where they say. Returns 0.

    Raises ValueError or OSError, with a message for the user, for a path or numbers that cannot be used.
    """
    spec = options.spec
    cost = None if options.cost is None else CostModel.load(options.cost)
    lengths = read_lengths(
        options.path,
        kind=options.kind,
        suffixes=options.suffixes,
        bytes_per_token=options.bytes_per_token,
        least_tokens=options.steps * options.micro_steps * options.pools * options.pool_size * options.seq_len,
        seed=options.seed,
    )
    print("packing, placing and planning a few steps", file=sys.stderr)
    report = inspect(
        lengths,
        spec,
        pools=options.pools,
        micro_steps=options.micro_steps,
        steps=options.steps,
        across=options.across,
        cost=cost,
        seed=options.seed,
    )
    if options.png is not None:
        picture(report, options)
    if options.json:
        print(json.dumps({"spec": dataclasses.asdict(spec)} | report.as_dict(), indent=2))
    else:
        show(report, options, Console(highlight=False))
    if options.png is not None:
        print(f"picture: {options.png}", file=sys.stderr)
    return 0


def short(tokens: int | None) -> str:
    """4096 -> 4K, 1048576 -> 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens is not None and tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return "any" if tokens is None else str(tokens)


def bucket_names(buckets: list[Bucket]) -> list[str]:
    """Names of length classes: up to 1K, 1K to 4K, and so on."""
    names = [f"up to {short(buckets[0].up_to)}"]
    return names + [f"{short(a.up_to)} to {short(b.up_to)}" for a, b in itertools.pairwise(buckets)]


def show(report: Report, options: InspectOptions, console: Console) -> None:
    """Print the report as tables."""
    table = Table(title="Documents", title_justify="left", show_header=False)
    table.add_row("documents", f"{report.documents:,}")
    table.add_row("tokens", f"{report.tokens:,}")
    table.add_row("mean length", f"{report.mean:,.0f}")
    for percent, length in report.percentiles.items():
        table.add_row("median" if percent == "50" else f"{percent}% are no longer than", f"{length:,}")
    table.add_row("longest", f"{report.longest:,}")
    table.columns[1].justify = "right"
    console.print(table)
    if report.cut_documents:
        console.print(f"{report.cut_documents:,} documents are longer than a sequence and are cut", style="yellow")

    table = Table(title="Where the attention work is", title_justify="left")
    for name in ("document length", "documents", "tokens", "attention work"):
        table.add_column(name, justify="left" if name == "document length" else "right")
    table.add_column("")
    for name, bucket in zip(bucket_names(report.buckets), report.buckets, strict=True):
        shares = (f"{100 * share:.2f}%" for share in (bucket.documents, bucket.tokens, bucket.work))
        table.add_row(name, *shares, "█" * round(30 * bucket.work))
    console.print(table)

    needed = report.steps * options.micro_steps * options.pools * options.pool_size
    console.print(
        f"optimizer steps looked at: {report.steps}, of {options.micro_steps} micro-steps x {options.pools} pools x "
        f"{options.pool_size} sequences of {options.seq_len:,} tokens, {options.cp} ranks each; "
        f"{100 * report.fill:.1f}% filled"
    )
    if report.sequences < needed:
        note = f"the corpus gives {report.sequences} sequences for {needed} slots; the others are empty"
        console.print(note, style="yellow")

    table = Table(title="Imbalance: time over time with perfect balance", title_justify="left")
    table.add_column("between")
    table.add_column("how")
    table.add_column("imbalance", justify="right")
    table.add_column("ms a step", justify="right")
    table.add_row("sequences", "as packed, even inside each", f"{report.sequence_imbalance:.3f}", "")
    for name, text in {
        "in order": "as packed, even inside each",
        "Libra": "placed by Libra",
        "bound": "lower bound",
    }.items():
        table.add_row("pools", text, f"{report.pool_imbalance[name]:.3f}", "")
    for name in report.rank_imbalance:
        style = "bold" if name == "Libra" else ""
        table.add_row(
            "ranks", name, f"{report.rank_imbalance[name]:.3f}", f"{1e3 * report.seconds[name]:.4g}", style=style
        )
    table.add_row("ranks", "perfect balance", "1.000", f"{1e3 * report.seconds['perfect balance']:.4g}")
    console.print(table)
    console.print("ms a step: one attention layer, forward and backward, by the cost model; exchange not included")
    console.print(
        f"Libra sends {report.libra_sent:.2f} of Ulysses' bytes on average, {report.libra_sent_busiest:.2f} from the "
        "busiest rank" + (f"; {report.fallbacks} pools fell back to the head-parallel plan" if report.fallbacks else "")
    )


def picture(report: Report, options: InspectOptions) -> None:
    """Draw the report to `options.png`."""
    assert options.png is not None
    from libra_jax.plots import corpus_png  # here: help does not wait for matplotlib

    corpus_png(
        options.png,
        title=f"{options.path.name}: {report.documents:,} documents, sequences of {short(options.seq_len)} tokens, "
        f"{options.pools} pools of {options.pool_size} sequences x {options.cp} ranks",
        buckets=bucket_names(report.buckets),
        shares={
            "documents": [bucket.documents for bucket in report.buckets],
            "tokens": [bucket.tokens for bucket in report.buckets],
            "attention work": [bucket.work for bucket in report.buckets],
        },
        imbalance={
            "sequences": {"as packed": report.sequence_imbalance},
            "pools": {
                "as packed": report.pool_imbalance["in order"],
                "Libra": report.pool_imbalance["Libra"],
                "bound": report.pool_imbalance["bound"],
            },
            "ranks": report.rank_imbalance,
        },
        before=report.before,
        after=report.after,
    )
