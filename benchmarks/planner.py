"""The tile planner on three corpora: balance, bytes, room and time. Host side only: needs no accelerator and no jax.

Draws documents from the length distributions in benchmarks/lengths, packs them into sequences, places the sequences
of each step into pools, plans every pool, and prints what the plans cost beside Ulysses (head-parallel attention).
Run: python -m benchmarks.planner [--pools 100] [--json FILE] [--report FILE]
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import machine, markdown
from libra_jax import planner
from libra_jax.placement import place
from libra_jax.plan import Plan, plan_pool
from libra_jax.planner import Policy
from libra_jax.routing import Copies, PoolWork, choose_relays, route, runs_of
from libra_jax.spec import Capacity, PoolSpec, head_parallel_capacity
from libra_jax.workload import block_pages, document_starts, sequence_seconds

LENGTHS = Path(__file__).parent / "lengths"
CORPORA = ("lognormal-644-71k", "short-bulk-long-tail", "wikipedia")
HEADS = ((32, 8), (32, 4), (64, 4))  # query heads, kv heads
POLICIES: dict[str, Policy] = {
    "pooled": planner.pooled,
    "at_home": planner.at_home,
    "head_parallel": planner.head_parallel,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    pools: int = 100
    """Pools planned for each corpus and head layout, at least."""
    long_pools: int = 16
    """The same for sequences of 1M tokens; 0 leaves them out."""
    policy: str = "pooled"
    """pooled, at_home or head_parallel."""
    room: tuple[str, ...] = ("default", "small")
    """default: the spec's. small: for 6 home blocks of page copies to send, whatever the number of ranks."""
    seed: int = 0
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A training run's shapes. 8 sequences in a pool, block 128, head_dim 128, bfloat16."""

    name: str
    seq_len: int
    cp: int
    global_batch: int

    def spec(self, heads: int, kv_heads: int, room: str) -> PoolSpec:
        spec = PoolSpec(self.seq_len, 8, self.cp, heads, kv_heads, 128, block=128)
        if room == "default":
            return spec
        need = head_parallel_capacity(spec)
        return dataclasses.replace(spec, capacity=Capacity(1.0, max(4.0, need.pages), max(6.0, need.sent_pages)))


SETTINGS = (Setting("256K", 262_144, 8, 128), Setting("1M", 1_048_576, 16, 32))


def main(options: Options) -> None:
    console, report, rows = Console(width=max(Console().width, 185)), [], []
    for setting, pools in zip(SETTINGS, (options.pools, options.long_pools), strict=True):
        if not pools:
            continue
        batches = {corpus: sample_batches(corpus, setting, pools, options.seed) for corpus in CORPORA}
        for room in options.room:
            measured = []
            for corpus, (heads, kv_heads) in itertools.product(CORPORA, HEADS):
                row = {"corpus": corpus, "heads": f"{heads}/{kv_heads}"}
                spec = setting.spec(heads, kv_heads, room)
                measured.append(row | measure(batches[corpus], spec, POLICIES[options.policy]))
            title = (
                f"{setting.name} tokens, pool size 8, cp {setting.cp}, global batch {setting.global_batch}, "
                f"{room} room, {options.policy} policy"
            )
            console.print(table_of(title, measured))
            report += [
                f"## {title}",
                "",
                *markdown(list(measured[0]), [[cell(*item) for item in row.items()] for row in measured]),
                "",
            ]
            rows += [{"tokens": setting.name, "room": room} | row for row in measured]
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine("numpy"), "options": str(options), "rows": rows}, indent=1)
        )
    if options.report:
        text = ["# Tile planner", "", machine("numpy") + " One core is used.", "", LEGEND, "", *report]
        options.report.write_text("\n".join(text).rstrip() + "\n")


LEGEND = """\
- imbalance: most pages visited by a rank, over the mean of the ranks. Median / 99th percentile over pools.
- bytes, in units of what a rank sends with Ulysses (head-parallel attention), forward, dispatch and return together:
  the mean over ranks and pools; then what the busiest rank sends and receives, median / 99th percentile over pools.
- blocks, pages, copies: the room the busiest rank needs for received blocks, for received pages and for page copies to
  send, in units of its home blocks. Median / 99th percentile / maximum over pools.
- ms: processor time, median over pools: for the policy alone, and for all of `plan_pool`, tables included.
- over 1.02: pools whose imbalance is more than that, for want of room. fallback: pools that got the head-parallel plan.
- Room: default is the spec's own, N / K + 1 home blocks for copies and at least 6 (N ranks, K kv heads): when one
  document as long as its sequence is nearly all of a pool's work, N / K ranks share each of its lanes and all read its
  first page. Small is 6, whatever N and K: what balance costs where memory is short.
"""


def sample_sequences(corpus: str, seq_len: int, count: int, seed: int) -> list[list[int]]:
    """`count` sequences, full of documents of lengths drawn from the corpus; one that does not fit is split."""
    quantiles = json.loads((LENGTHS / f"{corpus}.json").read_text())
    rng = np.random.default_rng(seed)
    total, ends = count * seq_len, [np.arange(seq_len, count * seq_len + 1, seq_len)]
    position = 0
    while position < total:
        drawn = np.interp(rng.random(65_536), quantiles["probability"], quantiles["length_tokens"])
        ends.append(position + np.cumsum(np.maximum(drawn.astype(np.int64), 1)))
        position = int(ends[-1][-1])
    cuts = np.unique(np.concatenate(ends))
    cuts = cuts[cuts <= total]
    lengths = np.diff(cuts, prepend=0)
    sequence = (cuts - 1) // seq_len
    return [part.tolist() for part in np.split(lengths, np.flatnonzero(np.diff(sequence)) + 1)]


def sample_batches(corpus: str, setting: Setting, pools: int, seed: int) -> list[list[list[int]]]:
    """Sequences of as many optimizer steps as have at least that many pools of 8."""
    steps = -(-pools * 8 // setting.global_batch)
    sequences = sample_sequences(corpus, setting.seq_len, steps * setting.global_batch, seed)
    return [sequences[i * setting.global_batch :][: setting.global_batch] for i in range(steps)]


def pools_of(batches: list[list[list[int]]], spec: PoolSpec) -> Iterator[list[list[int]]]:
    """Each step's sequences in pools that cost alike."""
    for batch in batches:
        seconds = [sequence_seconds(sequence, spec) for sequence in batch]
        for slot in place(seconds, spec.pool_size, across="all").reshape(-1, spec.pool_size):
            yield [batch[i] for i in slot]


def measure(batches: list[list[list[int]]], spec: PoolSpec, policy: Policy) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    over = fallbacks = 0
    for lengths in pools_of(batches, spec):
        blocks = [block_pages(sequence, spec) for sequence in lengths]
        first_page = np.stack([b.first_page for b in blocks])
        num_pages = np.stack([b.num_pages for b in blocks])
        _, policy_ms = timed(lambda f=first_page, n=num_pages: policy(f, n, spec, np.ones(spec.ranks)))
        plan, plan_ms = timed(lambda lengths=lengths: plan_pool(lengths, spec, policy=policy))
        stats, ulysses = plan.stats, max(plan.stats.ulysses_bytes, 1)
        first_visible = np.stack([document_starts(sequence, spec.seq_len, spec.window) for sequence in lengths])
        sample = {
            "imbalance": stats.imbalance,
            "bytes mean": stats.sent_bytes.mean() / ulysses,
            "bytes sent": stats.sent_bytes.max() / ulysses,
            "bytes received": stats.received_bytes.max() / ulysses,
            "policy ms": policy_ms,
            "plan ms": plan_ms,
        } | room_needed(plan, PoolWork(spec, first_page, num_pages, first_visible))
        for name, value in sample.items():
            found.setdefault(name, []).append(float(value))
        over += stats.imbalance > 1.02
        fallbacks += stats.fallback is not None
    row = {name: summary(name, np.array(values)) for name, values in found.items()}
    return row | {"pools": len(found["imbalance"]), "over 1.02": over, "fallback": fallbacks}


def room_needed(plan: Plan, work: PoolWork) -> dict[str, float]:
    """What the busiest rank needs of `Capacity`, in units of its home blocks."""
    relays = choose_relays(runs_of(plan.executor, work), work)
    routes = route(plan.executor, plan.wave, work, relays)

    def most(ranks: np.ndarray, copies: Copies) -> float:
        return np.bincount(ranks, copies.length, 1).max() / work.spec.home_blocks

    return {
        "blocks": most(routes.blocks.target, routes.blocks),
        "pages": most(routes.pages.target, routes.pages),
        "copies": most(routes.pages.source, routes.pages),
    }


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """-> result, milliseconds of processor time (what other programs on this machine do counts little)."""
    start = time.process_time()
    result = run()
    return result, 1e3 * (time.process_time() - start)


def summary(name: str, values: np.ndarray) -> list[float]:
    """The figures of a column: see LEGEND."""
    if name == "bytes mean":
        return [float(values.mean())]
    if name.endswith("ms"):
        return [float(np.median(values))]
    quantiles = [0.5, 0.99, 1.0] if name in ("blocks", "pages", "copies") else [0.5, 0.99]
    return [float(x) for x in np.quantile(values, quantiles)]


def cell(name: str, value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    digits = 3 if name == "imbalance" else 0 if name.endswith("ms") else 2
    return "/".join(f"{x:.{digits}f}" for x in value)


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "corpus" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(*item) for item in row.items()))
    return table


if __name__ == "__main__":
    main(tyro.cli(Options))
