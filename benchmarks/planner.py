"""The tile planner on three corpora: balance, bytes, room, modelled time and planning time. Host side only: needs no
accelerator and no jax.

Draws documents from the length distributions that ship with the package, packs them into sequences, places the
sequences of each step into pools, plans every pool, and prints what the plans cost beside Ulysses (head-parallel
attention) and beside what was asked; then modelled training steps, what balance costs, and ranks of unequal speed.
Run: python -m benchmarks.planner [--pools 100] [--json FILE] [--report FILE] [--plot FILE]
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from benchmarks.frontier import SPEEDS, Point, frontier, frontier_png, speed_row
from benchmarks.pools import (
    CORPORA,
    HEADS,
    ROOMS,
    SETTINGS,
    Batches,
    PlanPool,
    Setting,
    cell,
    measure,
    pools_of,
    row_of,
    sample_batches,
    table_of,
)
from benchmarks.reporting import machine, markdown
from benchmarks.step_model import StepSeconds, all_alike, as_drawn, best_of, kernels, mean_of, planned_step, slots_of
from libra_jax import planner
from libra_jax.links import Links
from libra_jax.plan import plan_pool

LEVELS = ("one level", "two levels")
Row = dict[str, Any]
Part = Literal["plans", "step", "frontier", "speeds"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    pools: int = 100
    """Pools planned for each corpus and head layout, at least."""
    long_pools: int = 100
    """The same for sequences of 1M tokens; 0 leaves them out."""
    parts: tuple[Part, ...] = ("plans", "step", "frontier", "speeds")
    """plans: balance, bytes, room and time. step: modelled training steps. frontier: what balance costs. speeds: ranks
    of unequal speed."""
    tolerance: float = 0.003
    """How far above its share a rank may be."""
    tries: int = 1
    """Plans made of each pool, of which the fastest is taken."""
    room: tuple[str, ...] = ("default",)
    """default: the spec's. asked: 0.8, 3 and 3 home blocks of received blocks, received pages and copies to send."""
    fewer: int = 4
    """The frontier and unequal speeds are drawn from so many times fewer pools."""
    seed: int = 0
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""
    plot: Path | None = None
    """Draw the frontier to this file (PNG)."""


class Report:
    """Sections as they come: on the console at once, and kept for the files."""

    def __init__(self) -> None:
        self.console = Console(width=max(Console().width, 185))
        self.lines: list[str] = []
        self.rows: list[Row] = []

    def add(self, title: str, rows: list[Row], notes: Sequence[str] = (), **common: Any) -> None:
        self.console.print(table_of(title, rows))
        for note in notes:
            self.console.print(note)
        cells = [[cell(*item) for item in row.items()] for row in rows]
        self.lines += [f"## {title}", "", *markdown(list(rows[0]), cells), ""]
        self.lines += [*notes, ""] if notes else []
        self.rows += [common | row for row in rows]


def main(options: Options) -> None:
    links, cost, report = Links(), kernels(), Report()
    plan = functools.partial(plan_pool, tolerance=options.tolerance, tries=options.tries, cost=cost, links=links)
    plans: list[Row] = []
    steps: list[Row] = []
    points: list[Point] = []
    for setting, pools in zip(SETTINGS, (options.pools, options.long_pools), strict=True):
        if not pools:
            continue
        batches = {corpus: sample_batches(corpus, setting, pools, options.seed) for corpus in CORPORA}
        if "plans" in options.parts:
            for room, level in itertools.product(options.room, LEVELS):
                plans += plan_rows(report, setting, batches, room, level, plan)
        if "step" in options.parts:
            steps += step_rows(report, setting, batches, plan)
        fewer = {corpus: few_pools(batches[corpus], setting, -(-pools // options.fewer)) for corpus in CORPORA}
        spec = setting.spec(32, 8, two_level=True)
        if "frontier" in options.parts:
            here = [
                point
                for corpus in CORPORA
                for point in frontier(setting.name, corpus, fewer[corpus], spec, raised_by(links), cost, links)
            ]
            report.add(f"{setting.name} tokens: what balance costs", [point.row() for point in here], part="frontier")
            points += here
        if "speeds" in options.parts:
            rows = [
                speed_row(corpus, case, measure(fewer[corpus], spec, plan, cost, links, speed(spec.ranks, 0)))
                for corpus, (case, speed) in itertools.product(CORPORA, SPEEDS.items())
            ]
            report.add(f"{setting.name} tokens: ranks of unequal speed", rows, part="speeds")
    asked = asked_rows(plans, steps, options)
    if asked:
        at, report.lines = report.lines, []
        report.add("Asked and measured", asked, [ASKED_NOTE])
        report.lines += at
    write(report, points, options)


def raised_by(links: Links) -> Callable[[float], PlanPool]:
    """Pooled plans with shares raised by so much, whatever time they take."""
    return lambda by: functools.partial(plan_pool, policy=functools.partial(planner.pooled, raised=by, links=links))


def few_pools(batches: Batches, setting: Setting, count: int) -> list[list[list[int]]]:
    """Pools spread evenly over all that the steps have."""
    pools = list(pools_of(batches, setting.spec(32, 8)))
    return pools[:: max(len(pools) // count, 1)][:count]


def plan_rows(
    report: Report, setting: Setting, batches: dict[str, Batches], room: str, level: str, plan: PlanPool
) -> list[Row]:
    rows, reasons = [], []
    for corpus, (heads, kv_heads) in itertools.product(CORPORA, HEADS):
        spec = setting.spec(heads, kv_heads, room, level == "two levels")
        measured = measure(pools_of(batches[corpus], spec), spec, plan, kernels(), Links())
        rows.append({"corpus": corpus, "heads": f"{heads}/{kv_heads}"} | row_of(measured))
        reasons += [f"Fallback, {corpus} {heads}/{kv_heads}, {n} x: {why}." for why, n in measured.fallbacks.items()]
        room_set_aside = spec.room.blocks, spec.room.pages, spec.room.sent_pages
        rows[-1]["set aside"] = [size / spec.home_blocks for size in room_set_aside]
    title = (
        f"{setting.name} tokens, pool size 8, cp {setting.cp}, global batch {setting.global_batch}, {level}, "
        f"{room} room"
    )
    common = {"tokens": setting.name, "level": level, "room": room}
    both, rooms = ("corpus", "heads"), (*ROOMS, "set aside")
    report.add(
        title, [{k: v for k, v in row.items() if k not in rooms} for row in rows], reasons, part="plans", **common
    )
    needed = [{k: v for k, v in row.items() if k in both or k in rooms} for row in rows]
    report.add(
        f"{setting.name} tokens, {level}, {room} room: what the busiest rank needs", needed, part="room", **common
    )
    return [common | row for row in rows]


# ------------------------------------------------------------------------------------------------------ training steps


def step_rows(report: Report, setting: Setting, batches: dict[str, Batches], plan: PlanPool) -> list[Row]:
    """Modelled steps of Qwen3-8B, plan by plan."""
    cost, links = kernels(), Links()
    rows: list[Row] = []
    for corpus in CORPORA:

        def steps(
            two_level: bool,
            pool_size: int = 8,
            plan: PlanPool = plan,
            slots: Callable = slots_of,
            corpus: str = corpus,
            waves: int | None = None,
        ) -> list[StepSeconds]:
            spec = setting.spec(32, 8, two_level=two_level, pool_size=pool_size)
            spec = dataclasses.replace(spec, waves=waves or spec.waves)
            return [planned_step(batch, spec, plan, cost, links, slots) for batch in batches[corpus]]

        dealt = functools.partial(plan_pool, policy=planner.head_parallel)
        ulysses = steps(False, plan=dealt, slots=as_drawn)
        eight, sixteen = steps(True), steps(True, 16)
        kinds = {
            "Ulysses, sequences as drawn": ulysses,
            "Ulysses, placed": steps(False, plan=dealt),
            "pools of 8, one level": steps(False),
            "pools of 8, two levels, all alike": steps(True, slots=all_alike),
            "pools of 8, two levels": eight,
            "pools of 16, two levels": sixteen,
            CHOSEN: best_of([eight, sixteen]),
            "pools of 8, two levels, 4 tries": steps(True, plan=functools.partial(plan, tries=4)),
            "pools of 8, two levels, 4 tries, 8 waves": steps(True, plan=functools.partial(plan, tries=4), waves=8),
        }
        base = mean_of(ulysses).step
        rows += [{"corpus": corpus, "plan": kind} | step_row(mean_of(kind_steps), base)
                 | {"steps": len(kind_steps)} for kind, kind_steps in kinds.items()]  # fmt: skip
    title = f"{setting.name} tokens: modelled steps of Qwen3-8B, 16 sequences side by side, global batch "
    report.add(title + str(setting.global_batch), rows, part="step", tokens=setting.name)
    return [{"tokens": setting.name} | row for row in rows]


CHOSEN = "pools of 8 or 16, chosen by step"


def step_row(step: StepSeconds, base: float) -> Row:
    def percent(seconds: float) -> str:
        return f"{100 * seconds / step.ideal:.1f}%"

    return {
        "efficiency": f"{step.efficiency:.3f}",
        "attention alone": f"{step.attention_efficiency:.3f}",
        "between pools": percent(step.between_pools),
        "inside pools": percent(step.inside_pools),
        "exposed": percent(step.exposed),
        "step s": f"{step.step:.1f}",
        "ideal s": f"{step.ideal_step:.1f}",
        "faster than Ulysses": f"{base / step.step:.2f}x",
    }


# --------------------------------------------------------------------------------------------------- asked and measured

ASKED_NOTE = (
    "The worst of all corpora and head layouts; in brackets how many of them have what was asked. Rooms: what 99.9% of "
    "pools need, and what the spec sets aside, which may be more than any needed."
)
PLANS_ASKED: list[tuple[str, tuple[float, float], Callable[[Row], float]]] = [
    ("imbalance, median", (1.01, 1.01), lambda row: row["imbalance"][0]),
    ("imbalance, 99%", (1.02, 1.02), lambda row: row["imbalance"][1]),
    ("mean bytes over Ulysses'", (0.7, 0.7), lambda row: row["bytes mean"][0]),
    ("busiest sender, median", (1.25, 1.25), lambda row: row["sent"][0]),
    ("busiest sender, 99%", (1.25, 1.25), lambda row: row["sent"][1]),
    ("busiest receiver, median", (1.25, 1.25), lambda row: row["received"][0]),
    ("busiest receiver, 99%", (1.25, 1.25), lambda row: row["received"][1]),
    ("received blocks needed", (0.8, 0.8), lambda row: row["blocks"][2]),
    ("received blocks set aside", (0.8, 0.8), lambda row: row["set aside"][0]),
    ("received pages needed", (3, 3), lambda row: row["pages"][2]),
    ("received pages set aside", (3, 3), lambda row: row["set aside"][1]),
    ("pages sent, needed", (3, 3), lambda row: row["copies"][2]),
    ("pages sent, set aside", (3, 3), lambda row: row["set aside"][2]),
    ("planning ms, median", (15, 60), lambda row: row["plan ms"][0]),
    ("plans that fall back", (0, 0), lambda row: row["fallback"]),
]
SKETCH = {"best corpus": (0.975, 0.94), "worst corpus": (0.92, 0.77)}


def asked_rows(plans: list[Row], steps: list[Row], options: Options) -> list[Row]:
    """A row for each number that was asked for, and what was measured, with the room of the first option."""
    rows: list[Row] = []
    names = [setting.name for setting in SETTINGS]
    first = [row for row in plans if row["room"] == options.room[0]]
    for what, bounds, value in PLANS_ASKED if first else []:
        row: Row = {"what": what, "asked": "<= " + " / ".join(f"{x:g}" for x in dict.fromkeys(bounds))}
        for (name, bound), level in itertools.product(zip(names, bounds, strict=True), LEVELS):
            # Of what is asked in three digits only so many count.
            values = [round(value(r), 3) for r in first if (r["tokens"], r["level"]) == (name, level)]
            met = f"{sum(x <= bound for x in values)}/{len(values)}"
            row[f"{name}, {level}"] = f"{max(values):.3f} ({met})" if values else "-"
        rows.append(row)
    chosen = [row for row in steps if row["plan"] == CHOSEN]
    for (which, bounds), pick in zip(SKETCH.items(), (max, min), strict=True):
        row = {"what": f"modelled efficiency, {which}", "asked": ">= " + " / ".join(f"{x:g}" for x in bounds)}
        for name, level in itertools.product(names, LEVELS):
            values = [float(r["efficiency"]) for r in chosen if r["tokens"] == name and level == LEVELS[1]]
            row[f"{name}, {level}"] = f"{pick(values):.3f}" if values else "-"
        if chosen:
            rows.append(row)
    return rows


LEGEND = """\
Modelled time: kernels at 635 TFLOP/s, 360 GB/s of a rank inside a node of 8 and 50 GB/s between nodes
(`libra_jax.modelled`). One level: every page comes from its home; four waves. Two levels: one that several ranks of
another node read crosses once, to a relay; six waves.

- imbalance: most pages visited by a rank, over the mean of the ranks. Median / 99th percentile over pools.
- bytes, in units of what a rank sends with Ulysses (head-parallel attention), forward, dispatch and return together,
  relays' included: the mean over ranks and pools; then what the busiest rank sends and receives, and across nodes,
  median / 99th percentile over pools.
- blocks, pages, copies: the room the busiest rank needs for received blocks, for received pages and for page copies to
  send, in units of its home blocks; passed and relayed: for pages got from relays, and passed on by one. Median / 99th
  percentile / 99.9% of pools. set aside: what the spec has of the first three.
- time: modelled seconds of a layer's attention, forward and backward, over those of perfect balance at no cost of
  exchange. Mean over pools.
- ms: processor time of all of `plan_pool`, tables included, median over pools.
- over 1.02: pools whose imbalance is more than that. fallback: pools that got the head-parallel plan.
- steps: efficiency is the ideal step's time over the step's. The ideal spreads attention evenly over all ranks of a
  step and exposes nothing. Sequences of like cost share a micro-step (`place(across="pools")`), but where they are
  taken as drawn, or "all alike": every pool of a step equal (`across="all"`, as in the tables above). What attention
  takes beyond the ideal, in percent of it: because one pool of a micro-step has more to do than others, because one
  rank of a pool has, and because exchanges and waiting for others are exposed.
  Not in the model, and no part of the ideal: blocks and pages are copied into slots for every wave, which at 256K is
  about 1 ms of a layer's two passes a wave (`docs/how_it_works.md` has the bytes). So waves are not free, and tries are
  only planned more often.
- makespan: the slowest rank's time over that of work shared in proportion to speeds, median / 99% / most.
"""


def write(report: Report, points: list[Point], options: Options) -> None:
    if points and options.plot:
        frontier_png(options.plot, points)
        report.lines += [f"![What balance costs]({options.plot.name})", ""]
    if options.json:
        content = {"machine": machine("numpy"), "options": str(options), "rows": report.rows}
        options.json.write_text(json.dumps(content, indent=1))
    if options.report:
        text = ["# Tile planner", "", machine("numpy") + " One core is used.", "", LEGEND, *report.lines]
        options.report.write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
