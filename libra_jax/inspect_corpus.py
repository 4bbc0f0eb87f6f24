"""`libra inspect PATH`: how skewed a corpus is, and what that costs with and without Libra.

Takes document lengths, or text, and the shape of a run; shows what `data.skew` finds as tables, a picture and JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from libra_jax.data.config import TEXT_SUFFIXES
from libra_jax.data.lengths import holds_quantiles, read_lengths
from libra_jax.data.skew import Bucket, Report, inspect
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel

_LOW_FILL = 0.5  # below it, most of what is looked at is padding
_BAR = 16  # characters of the longest bar: what is left of 80 columns


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
    def step_slots(self) -> int:
        """Sequences in an optimizer step."""
        return self.micro_steps * self.pools * self.pool_size

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
        least_tokens=options.steps * options.step_slots * options.seq_len,
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
        drawn = holds_quantiles(options.path, options.kind)
        if report.fill < _LOW_FILL:
            print(low_fill(report, options), file=sys.stderr)
        print(
            json.dumps({"spec": dataclasses.asdict(spec), "drawn_from_quantiles": drawn} | report.as_dict(), indent=2)
        )
    else:
        show(report, options, Console(highlight=False))
    if options.png is not None:
        print(f"picture: {options.png}", file=sys.stderr)
    return 0


def fitting(tokens: int, options: InspectOptions) -> list[str]:
    """Options, as they are typed, with which a corpus of this many tokens fills an optimizer step, and what they give.

    The same slots with shorter sequences, and fewer slots with sequences as long as they can be; [] for a corpus that
    is too small for either.
    """
    fewer = dataclasses.replace(options, micro_steps=1, pools=1, pool_size=min(options.pool_size, 4))
    found = []
    for slots in (options, fewer):
        unit = slots.cp * slots.block  # seq_len is a multiple of it
        room = min(tokens // slots.step_slots, slots.seq_len) // unit
        if room > 0:
            fits = dataclasses.replace(slots, seq_len=unit * 2 ** int(math.log2(room)))
            names = ("seq_len", "micro_steps", "pools", "pool_size")
            changed = {name: getattr(fits, name) for name in names if getattr(fits, name) != getattr(options, name)}
            words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items())
            found.append(f"{words}  ({counted(fits.step_slots, 'sequence')} of {fits.seq_len:,} tokens a step)")
    return list(dict.fromkeys(found))


def low_fill(report: Report, options: InspectOptions) -> str:
    """What to say of a corpus that leaves most of the slots empty: numbers, and options that fit it."""
    slots, steps = report.steps * options.step_slots, counted(report.steps, "step")
    lines = [
        f"This corpus is too small for these options: its {report.tokens:,} tokens fill {100 * report.fill:.1f}% of "
        f"the {slots} slots looked at ({steps} of {step_shape(options)}). The rest is padding, "
        "so the imbalance found here says little about training."
    ]
    found = fitting(report.tokens, options)
    if found:
        lines += ["Options that fit it:", *(f"  {line}" for line in found)]
    else:
        lines.append(
            f"A sequence has at least cp * block = {options.cp} * {options.block} tokens; this corpus fills no step of "
            "such sequences: set --cp or --block lower, or take more documents."
        )
    return "\n".join(lines)


def counted(number: int, what: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def step_shape(options: InspectOptions) -> str:
    """2 micro-steps x 4 pools x 8 sequences of 262,144 tokens."""
    steps, pools = counted(options.micro_steps, "micro-step"), counted(options.pools, "pool")
    return f"{steps} x {pools} x {counted(options.pool_size, 'sequence')} of {options.seq_len:,} tokens"


def short(tokens: int) -> str:
    """4096 -> 4K, 1048576 -> 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)


def bucket_names(buckets: list[Bucket]) -> list[str]:
    """Names of length classes: up to 1K, 1K to 4K, 4K to 16K (cut), and so on."""
    names = [f"up to {short(buckets[0].up_to)}"]
    names += [f"{short(a.up_to)} to {short(b.up_to)}" for a, b in itertools.pairwise(buckets)]
    return [name + (" (cut)" if bucket.cut else "") for name, bucket in zip(names, buckets, strict=True)]


def show(report: Report, options: InspectOptions, console: Console) -> None:
    """Print the report as tables, made for 80 columns."""
    if report.fill < _LOW_FILL:
        console.print(low_fill(report, options), style="bold yellow", soft_wrap=True)
    if holds_quantiles(options.path, options.kind):
        console.print(
            f"{report.documents:,} document lengths drawn from the quantiles in the file, seed {options.seed}"
        )
    table = Table(title="Documents", title_justify="left", show_header=False)
    table.add_row("documents", f"{report.documents:,}")
    table.add_row("tokens", f"{report.tokens:,}")
    table.add_row("mean length", f"{report.mean:,.0f}")
    for percent, length in report.percentiles.items():
        table.add_row("median" if percent == "50" else f"{percent}% are no longer than", f"{length:,}")
    table.add_row("longest", f"{report.longest:,}")
    table.columns[1].justify = "right"
    console.print(table)

    table = Table(title="Where the attention work is", title_justify="left")
    for name in ("document length", "documents", "tokens", "attention work"):
        table.add_column(name, justify="left" if name == "document length" else "right")
    table.add_column("")
    for name, bucket in zip(bucket_names(report.buckets), report.buckets, strict=True):
        shares = (f"{100 * share:.2f}%" for share in (bucket.documents, bucket.tokens, bucket.work))
        table.add_row(name, *shares, "█" * round(_BAR * bucket.work))
    console.print(table)
    if report.cut_documents:
        longer = f"{counted(report.cut_documents, 'document')} {'is' if report.cut_documents == 1 else 'are'} longer"
        console.print(
            f"(cut): {longer} than a sequence and trained on in pieces of at most {options.seq_len:,} tokens; rows go "
            "by the whole length, attention work is that of the pieces",
            style="yellow",
        )

    needed = report.steps * options.step_slots
    console.print(
        f"optimizer steps looked at: {report.steps}, of {step_shape(options)}, {options.cp} ranks each; "
        f"{100 * report.fill:.1f}% filled"
    )
    if report.sequences < needed:
        note = f"the corpus gives {counted(report.sequences, 'sequence')} for {needed} slots; the others are empty"
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

    drawn = f" drawn from quantiles, seed {options.seed}" if holds_quantiles(options.path, options.kind) else ""
    micro_steps = report.steps * options.micro_steps
    first = f", first micro-step of {micro_steps}" if micro_steps > 1 else ""
    corpus_png(
        options.png,
        title=f"{options.path.name}: {report.documents:,} documents{drawn}, "
        f"{100 * report.fill:.0f}% of the slots filled\n"
        f"a step: {step_shape(options)}, {options.cp} ranks each",
        buckets=bucket_names(report.buckets),
        buckets_label="document length, tokens" + ("; (cut): trained on in pieces" if report.cut_documents else ""),
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
        imbalance_label=f"Attention time / perfect balance, over {counted(micro_steps, 'micro-step')}",
        before_label=f"Plain context parallelism{first}",
        after_label=f"Libra{first}",
    )
