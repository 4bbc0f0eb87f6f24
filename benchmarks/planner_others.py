"""The tile planner beside others: the optimum on small pools, DistCA's greedy and the Libra paper's on real ones.

Part one draws small pools (2 or 3 sequences, 4 or 6 ranks, blocks of 16,384 tokens) from the shipped distributions and
makes up adversarial ones. A mixed-integer solver finds the least makespan, the fewest bytes at the planner's makespan,
and the fewest for the busiest sender, each with a proven bound. Part two plans pools of benchmarks/planner.py with
every policy. Host side only; SciPy is needed besides the package.
Run: python -m benchmarks.planner_others [--quick] [--json FILE] [--report FILE]
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from benchmarks.exact import Best, least_bytes, least_makespan
from benchmarks.pools import (
    CORPORA,
    HEADS,
    NODE,
    SETTINGS,
    Setting,
    moved_bytes,
    pools_of,
    sample_batches,
    sample_sequences,
    table_of,
    timed,
)
from benchmarks.reporting import machine, markdown
from benchmarks.step_model import kernels
from libra_jax import planner
from libra_jax.links import Links
from libra_jax.modelled import counted_seconds
from libra_jax.placement import place
from libra_jax.plan import plan_pool
from libra_jax.planner import Policy
from libra_jax.policies.distca import distca
from libra_jax.policies.paper import paper_placer
from libra_jax.policies.travel import Travel, travel
from libra_jax.spec import PoolSpec
from libra_jax.workload import block_pages, sequence_seconds

TOKENS = 16_384  # a block's, in small pools
AMPLE = 1000.0  # capacity that any plan fits
SHAPES = ((2, 1, 16, 4), (2, 2, 8, 8), (2, 2, 12, 4), (3, 1, 12, 8), (3, 1, 14, 4))  # sequences, kv heads, blocks, G
POLICIES: dict[str, Policy] = {
    "pooled": planner.pooled,
    "DistCA, ranks, 0.1": distca(0.1),
    "DistCA, ranks, 0.02": distca(0.02),
    "DistCA, nodes, 0.1": distca(0.1, NODE),
    "DistCA, nodes, 0.02": distca(0.02, NODE),
    "paper's placer, 1.1": paper_placer(1.1),
    "paper's placer, 1.02": paper_placer(1.02),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare."""

    pools: int = 16
    """Pools of 256K sequences for each corpus and head layout: the first ones of benchmarks/planner.py."""
    long_pools: int = 4
    """The same for sequences of 1M tokens; 0 leaves them out."""
    draws: int = 2
    """Small pools drawn for each corpus and shape; 0 leaves the solver out."""
    seconds: float = 3.0
    """The longest that the solver may take for one question; what is not proven by then is reported with its bound."""
    quick: bool = False
    """2 pools, 1 of 1M tokens, 1 draw for two shapes, 1 second for each question: less than a minute."""
    seed: int = 0
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""


def main(options: Options) -> None:
    if options.quick:
        draws, seconds = min(options.draws, 1), min(options.seconds, 1.0)
        options = dataclasses.replace(options, pools=2, long_pools=1, draws=draws, seconds=seconds)
    console, report, rows = Console(width=max(Console().width, 185)), [], []

    def show(title: str, table: list[dict[str, Any]], text: str = "") -> None:
        table = [{name: cell(name, value) for name, value in row.items()} for row in table]
        console.print(table_of(title, table))
        report.extend([f"## {title}", "", *([text, ""] if text else [])])
        report.extend([*markdown(list(table[0]), [list(row.values()) for row in table]), ""])

    if options.draws:
        found = [against_optimum(*instance, options.seconds) for instance in small_pools(options)]
        show("Against the optimum: small pools", summary_of_optimum(found), OPTIMUM)
        show("Against the optimum: each pool", found)
        rows += found
    for setting, pools in zip(SETTINGS, (options.pools, options.long_pools), strict=True):
        if not pools:
            continue
        batches = {corpus: sample_batches(corpus, setting, pools, options.seed) for corpus in CORPORA}
        measured = []
        for corpus, (heads, kv_heads) in itertools.product(CORPORA, HEADS):
            spec = setting.spec(heads, kv_heads)
            some = list(itertools.islice(pools_of(batches[corpus], spec), pools))
            for name in POLICIES:
                row = {"corpus": corpus, "heads": f"{heads}/{kv_heads}", "policy": name}
                measured.append(row | measure(some, setting, heads, kv_heads, name))
        title = f"{setting.name} tokens, pool size 8, cp {setting.cp}"
        show(f"{title}: all corpora and heads", [average(measured, name) for name in POLICIES], POOLS)
        show(f"{title}: each", measured)
        rows += [{"tokens": setting.name} | row for row in measured]
    if options.json:
        content = {"machine": machine("numpy", "scipy"), "options": str(options), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.report:
        drawn = (
            f"{options.pools} pools of 256K and {options.long_pools} of 1M tokens, {options.seconds:g} s a question."
        )
        text = ["# The tile planner beside others", "", f"{machine('numpy', 'scipy')} {drawn}", "", *report]
        options.report.write_text("\n".join(text).rstrip() + "\n")


OPTIMUM = """\
Pools of 2 or 3 sequences on 4 or 6 ranks (cp 2), 1 or 2 kv heads, 8 to 16 blocks of 16,384 tokens: drawn from the
corpora (of four times as many sequences, the pool that placement made heaviest) and made up: one document as long as
its sequence among documents of one block; all documents equal; a staircase of 1, 2, 3, .. blocks; two heavy ones in
different sequences; the first again with one rank at half speed. HiGHS finds, with proof unless a bound is given:

- makespan: pages visited by the slowest rank (over its speed), the planner's / the least there is. With so few blocks
  one is a large part of a rank's work: "blocks above" is the difference in units of the largest block.
- bytes: what all ranks send, the planner's / the fewest of all assignments whose makespan is at most the planner's.
- busiest: the same for what the busiest rank sends. Bytes and busiest are in pages of keys and values.
- bytes at the least makespan: the fewest there, which is what the last bit of balance would cost.

First table: the quotient of sums over pools, the same with the solver's bounds for its best, then the median and the
worst pool, in how many the planner's is the least, and for how many the least is proven. Room is limited for neither.
"""
POOLS = """\
The same pools for all, the first of benchmarks/planner.py: pooled with the room that a spec has by default, the others
without any limit. Imbalance: most pages visited by a rank over the mean, median / 99th percentile of pools. Bytes in
units of what a rank sends with Ulysses, forward, both ways: the mean, of that what crosses nodes of 8 ranks, then the
busiest sender and receiver, median / 99th percentile. time: modelled seconds of a layer's attention, forward and
backward (635 TFLOP/s, 360 GB/s inside nodes, 50 GB/s between, four waves, six with relays), over those of perfect
balance at no cost of exchange; mean. After ";" the same with two levels, where a page that several ranks of another
node read crosses once (relays are not part of either system; they are given to all alike). ms: processor time of the
policy, median. no room: plans that the default room does not hold, so that the head-parallel plan would run instead;
one and two levels.

The first table averages the figures of the second over corpora and heads. DistCA: greedy from servers with a surplus to
servers with a deficit, with its tolerance; an attention server is a rank, or a node of 8 ranks that split the heads.
Paper's placer: tiles of 8,192 tokens by one kv head, fewest extra bytes below a soft cap of the share of work. What is
public of both, and how what is not was read, is in libra_jax/policies/distca.py and paper.py; both are our own.
"""


# ------------------------------------------------------------------------------------------------ small pools

Instance = tuple[str, list[list[int]], PoolSpec, np.ndarray]  # name, document lengths, spec, speed


def small_pools(options: Options) -> Iterator[Instance]:
    shapes = SHAPES[1:3] if options.quick else SHAPES
    for shape, corpus, draw in itertools.product(shapes, CORPORA, range(options.draws)):
        spec = small_spec(*shape)
        drawn = sample_sequences(corpus, spec.seq_len, 4 * spec.pool_size, options.seed + draw)
        slots = place([sequence_seconds(sequence, spec) for sequence in drawn], spec.pool_size)
        yield f"{corpus} {draw}", [drawn[i] for i in slots[0, 0]], spec, np.ones(spec.ranks)
    for shape in shapes[:: max(len(shapes) // 2, 1)]:
        spec = small_spec(*shape)
        for name, lengths in adversarial(spec).items():
            yield name, lengths, spec, np.ones(spec.ranks)
        slow = np.ones(spec.ranks)
        slow[0] = 0.5
        yield "one heavy, one slow rank", adversarial(spec)["one heavy"], spec, slow / slow.mean()


def small_spec(sequences: int, kv_heads: int, blocks: int, group: int) -> PoolSpec:
    """cp 2, blocks of `TOKENS` tokens, head_dim 128, bfloat16."""
    heads = kv_heads * group
    return PoolSpec(blocks * TOKENS, sequences, 2, heads, kv_heads, 128, block=TOKENS, capacity=AMPLE)


def adversarial(spec: PoolSpec) -> dict[str, list[list[int]]]:
    """Document lengths of pools that are hard, or should be easy."""
    nb, P = spec.blocks_per_sequence, spec.pool_size
    steps = list(itertools.takewhile(lambda k: k * (k + 1) // 2 <= nb, range(1, nb + 1)))
    staircase = [*steps, nb - sum(steps)] if nb > sum(steps) else steps
    blocks = {
        "one heavy": [[nb], *[[1] * nb] * (P - 1)],
        "all equal": [[nb // 4] * 4] * P,
        "staircase": [staircase, *[staircase[::-1]] * (P - 1)],
        "two heavy": [[nb], [1, nb - 1], *[[1] * nb] * (P - 2)],
    }
    return {name: [[k * TOKENS for k in sequence] for sequence in pool] for name, pool in blocks.items()}


def against_optimum(
    name: str, lengths: list[list[int]], spec: PoolSpec, speed: np.ndarray, seconds: float
) -> dict[str, Any]:
    first_page, num_pages = pages_of(lengths, spec)
    stats = plan_pool(lengths, spec, speed, policy=POLICIES["pooled"]).stats
    assert stats.fallback is None, stats.fallback
    makespan = float((stats.work / speed).max())
    shortest = least_makespan(num_pages, spec, speed, seconds)
    questions = {"bytes": (makespan, False), "busiest": (makespan, True), "at least": (shortest.value, False)}
    total, busiest, at_least = (
        least_bytes(first_page, num_pages, spec, speed, limit, most, seconds) for limit, most in questions.values()
    )
    total, busiest = known(total, stats.sent_bytes.sum()), known(busiest, stats.sent_bytes.max())
    return {
        "pool": name,
        "ranks": spec.ranks,
        "kv heads": spec.num_kv_heads,
        "blocks": spec.blocks_per_sequence,
        "makespan": [makespan, shortest.value, shortest.bound],
        "blocks above": (makespan - shortest.value) / float(num_pages.max()),
        "bytes": [x / spec.page_bytes for x in (stats.sent_bytes.sum(), total.value, total.bound)],
        "busiest": [x / spec.page_bytes for x in (stats.sent_bytes.max(), busiest.value, busiest.bound)],
        "bytes at the least makespan": [at_least.value / spec.page_bytes, at_least.bound / spec.page_bytes],
    }


def known(best: Best, planner_bytes: float) -> Best:
    """The planner's own plan is one of those asked for: no worse one counts."""
    return dataclasses.replace(best, value=min(best.value, float(planner_bytes)))


def summary_of_optimum(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For what was drawn, what was made up and all: the planner's makespan and bytes over the least."""
    drawn = [row for row in found if row["pool"].split()[0] in CORPORA]
    made_up = [row for row in found if row not in drawn]
    summary = []
    for kind, rows in {"drawn": drawn, "made up": made_up, "all": found}.items():
        for name in ("makespan", "bytes", "busiest") if rows else ():
            planned, best, bound = np.array([row[name] for row in rows]).T
            over = np.where(best > 0, planned / np.maximum(best, 1e-9), np.where(planned > 0, np.inf, 1.0))
            summary.append({
                "pools": f"{kind} ({len(rows)})",
                "planner's over the least": name,
                "of sums": float(planned.sum() / best.sum()),
                "over the bounds": float(planned.sum() / bound.sum()),
                "median": float(np.median(over)),
                "worst": float(over.max()),
                "is the least": int(np.count_nonzero(planned <= best * (1 + 1e-6))),
                "proven": int(np.count_nonzero(best <= bound * (1 + 1e-6))),
            })  # fmt: skip
    return summary


# ------------------------------------------------------------------------------------------------ real pools


def pages_of(lengths: list[list[int]], spec: PoolSpec) -> tuple[np.ndarray, np.ndarray]:
    """first_page, num_pages (P, nb)."""
    blocks = [block_pages(sequence, spec) for sequence in lengths]
    return np.stack([b.first_page for b in blocks]), np.stack([b.num_pages for b in blocks])


def measure(pools: list[list[list[int]]], setting: Setting, heads: int, kv_heads: int, name: str) -> dict[str, Any]:
    """Columns of POOLS; those that differ between one level and two hold the figures of both."""
    found: dict[str, list[list[float]]] = {}
    times: list[float] = []
    no_room = [0, 0]
    for lengths in pools:
        levels, executor = [], None
        for level, two_level in enumerate((False, True)):
            spec = setting.spec(heads, kv_heads, two_level=two_level)
            first_page, num_pages = pages_of(lengths, spec)
            if name == "pooled" or not two_level:  # the others know nothing of levels
                arguments = (first_page, num_pages, spec, np.ones(spec.ranks))
                executor, ms = timed(lambda given=arguments: POLICIES[name](*given))
                times += [ms] if not two_level else []
            assert executor is not None
            cost = travel(executor, first_page, num_pages, spec)
            no_room[level] += cost.lack is not None
            if name == "pooled" and cost.lack is not None:  # as it runs: with what it falls back to
                executor = planner.head_parallel(first_page, num_pages, spec, np.ones(spec.ranks))
                cost = travel(executor, first_page, num_pages, spec)
            levels.append(figures(cost))
        for column in levels[0]:
            found.setdefault(column, []).append([figure[column] for figure in levels])
    row: dict[str, Any] = {column: summary(column, np.array(values)) for column, values in found.items()}
    return row | {"ms": [float(np.median(times))], "pools": len(pools), "no room": no_room}


def figures(cost: Travel) -> dict[str, float]:
    spec, moved = cost.spec, moved_bytes(cost.counts, cost.spec)
    ulysses = spec.home_blocks * (spec.block_bytes + spec.page_bytes) * (spec.cp - 1) // spec.cp
    node, work = np.arange(spec.ranks) // NODE, cost.counts.pages.sum(axis=1)
    modelled = counted_seconds(cost.counts, spec, kernels(), Links())
    return {
        "imbalance": float(work.max() / work.mean()),
        "mean": float(moved.sum() / spec.ranks / ulysses),
        "across": float(moved[node[:, None] != node].sum() / spec.ranks / ulysses),
        "sent": float(moved.sum(axis=1).max() / ulysses),
        "received": float(moved.sum(axis=0).max() / ulysses),
        "time": modelled.total / modelled.ideal,
    }


def summary(column: str, values: np.ndarray) -> list[list[float]]:
    """values: (pools, 2 levels). -> for each level the mean, or median and 99th percentile over pools."""
    if column in ("mean", "across", "time"):
        return values.mean(axis=0)[:, None].tolist()
    return np.quantile(values, [0.5, 0.99], axis=0).T.tolist()


def average(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The mean over corpora and heads of one policy's figures."""
    mine = [row for row in rows if row["policy"] == name]
    columns = [column for column, value in mine[0].items() if isinstance(value, list) and column != "no room"]
    lists = {column: np.mean([row[column] for row in mine], axis=0).tolist() for column in columns}
    no_room = np.sum([row["no room"] for row in mine], axis=0).tolist()
    return {"policy": name} | lists | {"pools": sum(row["pools"] for row in mine), "no room": no_room}


def cell(name: str, value: Any) -> str:
    """The figures of a column as text; a bound is shown only where it is not reached, two levels only if different."""
    if name in ("makespan", "bytes", "busiest"):
        planned, best, bound = value
        return f"{planned:g} / {best:g}" + ("" if best <= bound * (1 + 1e-6) else f" (at least {bound:.1f})")
    if name == "bytes at the least makespan":
        best, bound = value
        if not math.isfinite(best):
            return f"at least {bound:.1f}"
        return f"{best:g}" + ("" if best <= bound * (1 + 1e-6) else f" (at least {bound:.1f})")
    if isinstance(value, float):
        return f"{value:.2f}"
    if not isinstance(value, list):
        return str(value)
    if name in ("ms", "no room"):
        return " ".join(f"{x:.0f}" for x in value)
    digits = 3 if name in ("imbalance", "time") else 2
    levels = ["/".join(f"{x:.{digits}f}" for x in level) for level in value]
    return "; ".join(dict.fromkeys(levels))


if __name__ == "__main__":
    main(tyro.cli(Options))
