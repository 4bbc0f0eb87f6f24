"""The input pipeline: tokens a second of a core, 100 million documents, 1,000 hosts, waiting, `libra prepare`.

Makes corpora in a folder (benchmarks/data_files.py), measures each case in a process of its own, pinned to one core
where that is what counts (benchmarks/data_cases.py), and prints what was asked beside what was measured. Nothing here
depends on time but the numbers. Host side only: needs no accelerator and no jax.

Run: python -m benchmarks.data [--json FILE] [--report FILE]; four to five minutes, 3 GB of disk, 6 GB of memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import data_cases as cases
from benchmarks import data_files as files
from benchmarks.pools import CORPORA, NODE, WAVES
from benchmarks.reporting import machine, markdown
from libra_jax.data import PlacementSampler
from libra_jax.spec import PoolSpec

Row = dict[str, Any]
Part = Literal["throughput", "scale", "hosts", "waiting", "prepare"]
MICRO_STEPS = 2
"""Of a step of 32 sequences, in pools of 8, two side by side."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    parts: tuple[Part, ...] = ("throughput", "scale", "hosts", "waiting", "prepare")
    corpora: tuple[str, ...] = CORPORA
    """Distributions of document lengths, of those in libra_jax/data/distributions."""
    seq_lens: tuple[int, ...] = (2**18, 2**20)
    """Lengths of sequences; the first one is what more is asked of."""
    tokens: int = 2**28
    """Of each memory-mapped corpus, 4 bytes each; half as many in prepared ones."""
    measured_tokens: int = 2**27
    """At least so many are measured, for throughput, in whole windows of documents."""
    documents: int = 10**8
    """For start-up and far steps, of the first of `corpora`."""
    far_step: int = 10**6
    hosts: int = 1000
    """Each with one pool; of the last of `corpora`, which has the shortest documents."""
    wait_steps: int = 12
    tokens_per_second: float = 10e6
    """How fast the consumer of `waiting` is."""
    text_mb: float = 64.0
    """Text for `libra prepare` to bytes; a quarter of it for the BPE tokenizer."""
    workers: tuple[int, ...] = (1, 2)
    """Worker processes of `libra prepare`."""
    seed: int = 0
    folder: Path | None = None
    """Make the corpora in this folder, and leave it empty; None: where temporary files go."""
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""


class Report:
    """Tables as they come: on the console at once, and kept for the files. asked: what was asked, and measured."""

    def __init__(self) -> None:
        self.console = Console(width=max(Console().width, 190))
        self.lines: list[str] = []
        self.rows: list[Row] = []
        self.asked: list[Row] = []

    def add(self, part: str, title: str, rows: Sequence[Row], note: str = "") -> None:
        cells = [[cell(*item) for item in row.items()] for row in rows]
        table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
        for name, value in rows[0].items():
            table.add_column(name, justify="left" if isinstance(value, str) else "right", no_wrap=True)
        for line in cells:
            table.add_row(*line)
        self.console.print(table, note)
        self.lines += [f"## {title}", "", *markdown(list(rows[0]), cells), "", *([note, ""] if note else [])]
        self.rows += [{"part": part, "table": title} | row for row in rows]

    def ask(self, what: str, asked: str, measured: str) -> None:
        self.asked.append({"what": what, "asked": asked, "measured": measured})


def cell(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if name.startswith(("tokens/s", "by wall")):
        return f"{value / 1e6:.1f} M"
    digits = 4 if 0 < value < 0.01 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, which starts from nothing."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def spec_of(seq_len: int, two_level: bool = False) -> PoolSpec:
    """Qwen3-8B's heads, pools of 8 sequences, 8 ranks to each."""
    node = NODE if two_level else None
    return PoolSpec(seq_len, 8, 8, 32, 8, 128, block=128, waves=WAVES[two_level], ranks_per_node=node)


def short(tokens: int) -> str:
    units = ((2**20, "M"), (2**10, "K"), (1, ""))
    return next(f"{tokens // size}{unit}" for size, unit in units if tokens >= size)


def main(options: Options) -> None:
    report = Report()
    sections = {
        "throughput": throughput,
        "scale": scale,
        "hosts": hosts,
        "waiting": waiting,
        "prepare": prepare,
    }
    with tempfile.TemporaryDirectory(prefix="libra-data-", dir=options.folder) as name:
        folder = Path(name)
        if set(options.parts) & {"throughput", "hosts", "waiting"}:
            files.write_tokens(folder / "tokens", options.tokens, options.seed)
            for corpus in options.corpora:
                lengths = files.draw_lengths(corpus, options.tokens, np.random.default_rng(options.seed))
                files.write_megatron(folder / corpus, folder / "tokens", lengths)
        for part in options.parts:
            sections[part](report, folder, options)
    at, report.lines = report.lines, []
    if report.asked:
        report.add("asked", "Asked and measured", report.asked, "Megatron pairs and lengths are in the page cache.")
    report.lines += at
    if options.json:
        asked = str(dataclasses.replace(options, folder=None, json=None, report=None))  # no paths of this machine
        content = {"machine": machine("numpy", "grain"), "options": asked, "rows": report.rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.report:
        text = ["# Input pipeline", "", machine("numpy", "grain"), "", LEGEND, *report.lines]
        options.report.write_text("\n".join(text).rstrip() + "\n")


LEGEND = """\
Qwen3-8B's heads (32/8, 128 wide), pools of 8 sequences, 8 ranks to each sequence. Times are processor time where
nothing else is said. Parts of a step, in milliseconds:

- packing: windows of documents are packed, and remembered; order: which sequences a step has; work: what they cost;
  place: VRSP; lists: document lengths for the planner and for the log; plans: `plan_pool` without its tables; tables:
  these; stack: those of all pools copied together; check: nothing in them points outside of a rank's buffers.
- read: tokens into the batch's rows; arrays: targets, segment ids, positions; rest: mostly the look for tokens that the
  vocabulary does not have.
"""


# -------------------------------------------------------------------------------------------------------- one core


def throughput(report: Report, folder: Path, options: Options) -> None:
    rows: list[Row] = []
    for seq_len in options.seq_lens:
        levels = (False, True) if seq_len == options.seq_lens[0] else (True,)
        for two_level, corpus in itertools.product(levels, options.corpora):
            made = fresh(
                cases.throughput, folder / corpus, spec_of(seq_len, two_level), MICRO_STEPS, options.measured_tokens
            )
            rows.append({"tokens": short(seq_len), "corpus": corpus, "levels": "two" if two_level else "one"} | made)
    title = "One core, from a memory-mapped Megatron pair (int32)"
    report.add("throughput", title, rows, THROUGHPUT_NOTE)
    for levels in ("one", "two"):
        of = [row for row in rows if row["tokens"] == short(options.seq_lens[0]) and row["levels"] == levels]
        slowest = min(of, key=lambda row: row["tokens/s"])
        measured = f"{slowest['tokens/s'] / 1e6:.1f} M ({slowest['by wall'] / 1e6:.1f} M by wall)"
        report.ask(f"tokens/s of a core, memory-mapped, {levels} level(s), slowest corpus", ">= 20 M", measured)

    text, rows = files.text_of_packages(), []
    for corpus in options.corpora:
        rng = np.random.default_rng(options.seed)
        lengths = files.draw_lengths(corpus, options.tokens // 2, rng) - 1  # and an end-of-document token
        source, out = folder / "text.jsonl", folder / f"{corpus}-prepared"
        files.write_jsonl(source, files.cut_texts(text, lengths[lengths > 0], rng))
        cases.prepared(source, "bytes", out, 1)
        for seq_len in options.seq_lens:
            made = fresh(cases.throughput, out, spec_of(seq_len, True), MICRO_STEPS, options.measured_tokens)
            rows.append({"tokens": short(seq_len), "corpus": corpus, "levels": "two"} | made)
        source.unlink()
        shutil.rmtree(out)
    rows.sort(key=lambda row: row["tokens"] != short(options.seq_lens[0]))
    report.add("throughput", "One core, from a folder of `libra prepare` (bytes, uint16, zstd)", rows)
    slowest = min(row["tokens/s"] for row in rows if row["tokens"] == short(options.seq_lens[0]))
    report.ask("tokens/s of a core, prepared folder, slowest corpus", "-", f"{slowest / 1e6:.1f} M")


THROUGHPUT_NOTE = (
    "Steps of 32 sequences, all of whose rows and pools are this core's. Two levels: pages cross nodes of 8 once, by "
    "relays, as the configs of Qwen3-8B have it. Whole windows are measured, so packing one counts for all its steps."
)


# ------------------------------------------------------------------------------------------------- many documents


def scale(report: Report, folder: Path, options: Options) -> None:
    lengths = folder / "lengths.npy"
    files.write_lengths(lengths, options.corpora[0], options.documents, options.seed)
    rows, steps = [], []
    for seq_len in options.seq_lens:
        index, spec = folder / f"index-{seq_len}.npz", spec_of(seq_len)
        found = [fresh(cases.start_up, lengths, spec, index, 0)]
        # Asked for in a process of its own, each step finds nothing remembered.
        asked = (0, options.far_step, -1) if seq_len == options.seq_lens[0] else (options.far_step,)
        found += [fresh(cases.start_up, lengths, spec, index, step) for step in asked]
        for kind, made in zip(("made", *["there"] * len(asked)), found, strict=True):
            named = {"tokens": short(seq_len), "index": kind}
            per_document = {f"{what} bytes/document": made[f"{what} bytes"] / made["documents"] for what in WHERE}
            starts = ("documents", "sequences", "windows", "wall s", "processor s", "deal s", "count s", "key s")
            rows.append(named | {name: made[name] for name in starts} | per_document)
            names = ("step", "cold ms", "later ms", "touched", "in the step")
            times = made["touched"] / max(made["in the step"], 1)
            steps.append(named | {name: made[name] for name in names} | {"touched/in the step": times})
        if seq_len == options.seq_lens[0]:
            first, start, far = found[:3]
            both = [f"{made['wall s']:.1f} s ({made['processor s']:.1f} s of processor)" for made in (first, start)]
            report.ask(f"start-up, {options.documents:,} documents, no index yet", "< 10 s", both[0])
            report.ask("the same, the index is there", "< 10 s", both[1])
            held = f"{first['held bytes'] / options.documents:.2f} + {first['index bytes'] / options.documents:.4f}"
            report.ask("memory + index file, bytes a document", "stated", held)
            pair = f"{far['cold ms']:.1f} / {start['cold ms']:.1f} ms cold, {far['later ms']:.1f} / "
            what = f"sampler[{options.far_step:,}] / sampler[0]"
            report.ask(what, "as fast", f"{pair}{start['later ms']:.1f} ms later")
            sent = fresh(cases.pickled_bytes, lengths, spec, index)
            report.ask("a worker process is sent, of the sampler", "-", f"{sent / 1e6:.1f} MB")
    lengths.unlink()
    title = f"Start-up with {options.documents:,} documents ({options.corpora[0]})"
    report.add("scale", title, rows, SCALE_NOTE)
    report.add("scale", "A step's sequences and their slots, in a new process", steps, STEPS_NOTE)


WHERE = ("held", "index")
SCALE_NOTE = (
    "deal: all lengths are read and dealt to windows; count: each window's sequences are counted; key: the index is "
    "compared with the lengths. held: what the process holds beside the mapped file of 4 bytes a document."
)
STEPS_NOTE = (
    "The first time in a process: the order of its epoch is made, and its windows are packed. later: five more steps "
    "far from one another, median. touched: documents whose lengths are looked at, those of the windows."
)


# ------------------------------------------------------------------------------------------------------ many hosts


def hosts(report: Report, folder: Path, options: Options) -> None:
    corpus, seq_len, step = options.corpora[-1], options.seq_lens[0], 1
    spec = spec_of(seq_len)
    tokens = int(2.2 * options.hosts * spec.pool_size * seq_len)
    lengths = files.draw_lengths(corpus, tokens, np.random.default_rng(options.seed))
    files.write_megatron(folder / "hosts", folder / "tokens", lengths)
    asked = sorted({0, options.hosts // 2, options.hosts - 1})
    rows = [fresh(cases.host, folder / "hosts", spec, options.hosts, number, step) for number in asked]
    sampler = cases.open_megatron(folder / "hosts", spec, options.hosts).sampler
    shards = PlacementSampler(sampler, step + 1, shards=options.hosts)
    slots = sampler[step].reshape(-1)
    given = np.concatenate([slots[shards.rows(number)] for number in range(options.hosts)])
    once = len(np.unique(given)) == len(given) and set(given.tolist()) == set(sampler.step_sequences(step).tolist())
    agree = len({row["slots"] for row in rows}) == 1 and all(
        row["own"] == slots[shards.rows(row["host"])].tolist() for row in rows
    )
    own = max(row["step ms"] for row in rows)
    report.ask(f"{len(given):,} sequences on {options.hosts:,} hosts: each on exactly one", "yes", yes(once))
    report.ask(f"{len(rows)} hosts that start from nothing find the same slots", "yes", yes(agree))
    report.ask("a host's part of that step, cold", "-", f"{own:,.0f} ms of one core")
    shown = [{name: value for name, value in row.items() if name != "own"} for row in rows]
    title = f"One of {options.hosts:,} hosts, a step of {len(given):,} sequences of {short(seq_len)} ({corpus})"
    report.add("hosts", title, shown, HOSTS_NOTE)


def yes(so: bool) -> str:
    return "yes" if so else "NO"


HOSTS_NOTE = (
    "Each host packs and places the whole step, and plans and reads its own pool's 8 sequences. slots: a digest of all "
    "the slots of the step. Every document is packed, placed and handed on by every host."
)


# --------------------------------------------------------------------------------------------------------- waiting


def waiting(report: Report, folder: Path, options: Options) -> None:
    spec = spec_of(options.seq_lens[0], two_level=True)
    rows = [
        fresh(cases.waiting, folder / corpus, spec, MICRO_STEPS, workers, options.wait_steps, options.tokens_per_second)
        | {"corpus": corpus}
        for corpus in options.corpora[:1]
        for workers in (0, 1)
    ]
    for row in rows:
        what = f"steps that waited, read ahead by {row['read ahead by']}"
        measured = f"{row['share without the first']:.0%}; the first one {row['first ms']:.0f} ms"
        report.ask(what, "0", measured)
    title = f"Waiting, one core that has to make {options.tokens_per_second / 1e6:g} M tokens/s"
    report.add("waiting", title, rows, WAITING_NOTE)


WAITING_NOTE = (
    "A step has waited where the next batch took more than 1% of the step. Two levels. Reading ahead begins a step's "
    "time before the first batch is taken; a worker process imports what it needs in that time."
)


# --------------------------------------------------------------------------------------------------------- prepare


def prepare(report: Report, folder: Path, options: Options) -> None:
    text, rows = files.text_of_packages(), []
    files.train_tokenizer(folder / "tokenizer.json")
    files.write_jsonl(folder / "short.jsonl", ["a text"])
    for tokenizer, share in (("bytes", 1.0), (str(folder / "tokenizer.json"), 0.25)):
        rng = np.random.default_rng(options.seed)
        lengths = files.draw_lengths(options.corpora[-1], int(1e6 * options.text_mb * share), rng)
        texts = list(files.cut_texts(text, lengths, rng))
        size_mb, starts = sum(map(len, texts)) / 1e6, {}
        for workers in options.workers:
            starts[workers] = cases.prepared(folder / "short.jsonl", tokenizer, folder / "short", workers)[0]
            shutil.rmtree(folder / "short")
        for kind, write in (("JSONL", files.write_jsonl), ("Parquet", files.write_parquet)):
            source, out = folder / f"text.{kind.lower()}", folder / "prepared"
            write(source, texts)
            for workers in options.workers:
                wall, processor, manifest = cases.prepared(source, tokenizer, out, workers)
                rows.append(
                    {
                        "tokenizer": "bytes" if tokenizer == "bytes" else f"BPE, {manifest.tokenizer['vocab_size']:,}",
                        "from": kind,
                        "workers": workers,
                        "text MB": size_mb,
                        "wall s": wall,
                        "of them start-up": starts[workers],
                        "MB/s": size_mb / max(wall - starts[workers], 1e-9),
                        "processor s": processor,
                        "tokens": manifest.tokens,
                        "bytes on disk a token": sum(shard.bytes for shard in manifest.shards) / manifest.tokens,
                    }
                )
                shutil.rmtree(out)
            source.unlink()
    report.add("prepare", "`libra prepare`", rows, PREPARE_NOTE)


PREPARE_NOTE = (
    "The command as a user starts it. Start-up: the command on one short text. MB/s: of text, in the rest of the time. "
    "processor: of all processes. Text of installed packages; the BPE tokenizer was trained on this repository's own."
)


if __name__ == "__main__":
    main(tyro.cli(Options))
