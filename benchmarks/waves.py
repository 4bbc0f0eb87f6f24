"""How many waves: what of the exchange is left over beside the kernels, by their number. A model, no measurement.

Plans pools of three corpora for each number of waves, with pages straight from home and with relays, and prices them
with `libra_jax.modelled`: every rank is followed through its windows, with the cost model's kernels and the links
inside and between nodes. Copies into buffers are not in it; each wave more costs one of blocks and pages.

Host side only. Run: python -m benchmarks.waves [--report FILE]
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from benchmarks.pools import CORPORA, NODE, SETTINGS, Setting, sample_batches, table_of
from benchmarks.reporting import machine, markdown
from benchmarks.step_model import SIDE_BY_SIDE, kernels, slots_of
from libra_jax.links import Links
from libra_jax.modelled import PlanSeconds, plan_seconds
from libra_jax.plan import plan_pool

FLOPS = {"635 TFLOP/s": 635e12, "370 TFLOP/s": 370e12}
"""FlashAttention-3's kernels and the best published Triton kernel's, on an H100."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to model."""

    pools: int = 8
    """Pools of each corpus at 256K tokens; a quarter as many at 1M."""
    waves: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    """Numbers of waves."""
    seed: int = 0
    report: Path | None = None
    """Write the tables to this file, as Markdown."""


def main(options: Options) -> None:
    console, text = Console(width=max(Console().width, 150)), ["# Waves", "", machine("numpy"), "", __doc__ or "", ""]
    for setting, pools in zip(SETTINGS, (options.pools, max(options.pools // 4, 1)), strict=True):
        drawn = {corpus: some_pools(corpus, setting, pools, options.seed) for corpus in CORPORA}
        rows = []
        for node in (None, NODE):
            for waves in options.waves:
                if node is None or waves > 2:
                    rows += rows_of(setting, drawn, waves, node)
        title = f"{setting.name} tokens, pool size 8, cp {setting.cp}, heads 32/8"
        console.print(table_of(title, rows))
        lines = markdown(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])
        text += [f"## {title}", "", *lines, "", LEGEND, ""]
    if options.report:
        options.report.write_text("\n".join(text).rstrip() + "\n")


LEGEND = """\
Cells: a layer's attention, forward + backward, in milliseconds over what perfect balance would take at no cost of
exchange, for kernels of 635 TFLOP/s; in brackets the ratio. Then the same ratio for 370 TFLOP/s. Means over pools of
sequences of like cost."""


def some_pools(corpus: str, setting: Setting, count: int, seed: int) -> list[list[list[int]]]:
    """Pools spread evenly over the micro-steps of one step."""
    (batch,) = sample_batches(corpus, setting, 1, seed)
    slots = slots_of(batch, setting.spec(32, 8)).reshape(-1, SIDE_BY_SIDE // 2)
    return [[batch[i] for i in pool] for pool in slots[:: max(len(slots) // count, 1)][:count]]


def rows_of(
    setting: Setting, drawn: dict[str, list[list[list[int]]]], waves: int, node: int | None
) -> list[dict[str, Any]]:
    spec = dataclasses.replace(setting.spec(32, 8, two_level=False), waves=waves, ranks_per_node=node)
    row: dict[str, Any] = {"waves": waves, "pages": "from home" if node is None else "by relays"}
    for corpus, pools in drawn.items():
        plans = [plan_pool(lengths, spec) for lengths in pools]
        fast, slow = ([plan_seconds(plan, kernels(flops), Links()) for plan in plans] for flops in FLOPS.values())
        took, ideal = 1e3 * mean(fast, "total"), 1e3 * mean(fast, "ideal")
        row[corpus] = (
            f"{took:.1f} over {ideal:.1f} ({took / ideal:.2f}); {mean(slow, 'total') / mean(slow, 'ideal'):.2f}"
        )
    return [row]


def mean(plans: list[PlanSeconds], name: str) -> float:
    return float(np.mean([getattr(plan, name) for plan in plans]))


if __name__ == "__main__":
    main(tyro.cli(Options))
