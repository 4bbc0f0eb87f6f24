"""What of the exchange is left over beside the kernels, by number of waves and by where they are cut. Host side only.

Plans pools of the corpora in benchmarks/lengths at 256K and 1M tokens, and follows each plan through its waves with a
simple clock: a wave takes its pages times the cost model's seconds; an exchange starts when the last rank has come to
it and takes the busier of a rank's two directions at a given rate; a rank's next wave begins when its own wave and its
exchange are over. Exposed is what that takes longer than the slowest rank's pages alone.
Run: python -m benchmarks.waves [--pools 8] [--report FILE]; a minute or two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console

from benchmarks.planner import CORPORA, SETTINGS, pools_of, sample_batches, table_of
from benchmarks.reporting import machine, markdown
from libra_jax import planner
from libra_jax.intervals import stable_order
from libra_jax.routing import PoolWork, assign_waves, check_executor, route
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, block_pages

RATES = {"one 400 Gb/s port a GPU": 45e9, "inside a host": 150e9}
"""Bytes a second of one GPU, one way, in exchanges of pages of 64 KiB and more: 90% of a port; a cautious figure for
NVLink with traffic to every other GPU of a pool at once."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    pools: int = 8
    """Pools of each corpus at 256K tokens; a quarter as many at 1M."""
    waves: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    """Numbers of waves."""
    seed: int = 0
    report: Path | None = None
    """Write the tables to this file, as Markdown."""


def doubling(executor: np.ndarray, work: PoolWork) -> np.ndarray:
    """The rule that `assign_waves` had before: local work, then shares of the rest that double from wave to wave."""
    spec, local = work.spec, work.local(executor)
    if spec.waves < 3:
        return assign_waves(executor, work)
    rest = np.flatnonzero(~local)
    rest = rest[stable_order(executor.reshape(-1)[rest])]
    pages, rank = work.lanes(work.num_pages)[rest].astype(np.int64), executor.reshape(-1)[rest]
    total = np.bincount(rank, pages, minlength=spec.ranks)
    share = (np.cumsum(pages) - 0.5 * pages - (np.cumsum(total) - total)[rank]) / total[rank]
    ends = np.cumsum(2.0 ** np.arange(spec.exchanges))
    wave = np.zeros(executor.size, np.int32)
    wave[rest] = 1 + np.searchsorted(ends[:-1] / ends[-1], share, side="right")
    return wave.reshape(executor.shape)


RULES: dict[str, Callable[[np.ndarray, PoolWork], np.ndarray]] = {"in step": assign_waves, "doubling": doubling}


def main(options: Options) -> None:
    console, text = Console(width=max(Console().width, 150)), ["# Waves", "", machine("numpy"), "", __doc__ or "", ""]
    for setting, pools in zip(SETTINGS, (options.pools, max(options.pools // 4, 1)), strict=True):
        spec = setting.spec(32, 8, "default")
        planned = {corpus: plans(sample_batches(corpus, setting, pools, options.seed), spec) for corpus in CORPORA}
        for where, rate in RATES.items():
            rows = [
                {"waves": waves, "rule": rule}
                | {corpus: figures(planned[corpus][:pools], waves, RULES[rule], rate) for corpus in CORPORA}
                for waves in options.waves
                for rule in (RULES if waves > 2 else ("in step",))
            ]
            title = f"{setting.name} tokens, pool size 8, cp {setting.cp}, heads 32/8: {where} ({rate / 1e9:.0f} GB/s)"
            console.print(table_of(title, rows))
            lines = markdown(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])
            text += [f"## {title}", "", *lines, "", LEGEND, ""]
    if options.report:
        options.report.write_text("\n".join(text).rstrip() + "\n")


LEGEND = (
    "Cells: exposed milliseconds of a layer's attention, forward + backward, of (kernels alone, both passes); then the "
    "MiB of the busiest rank's last return in the backward pass. Means over pools."
)


def plans(batches: list[list[list[int]]], spec: PoolSpec) -> list[tuple[np.ndarray, PoolWork]]:
    """Who executes what, and the documents, of every pool."""
    found = []
    for lengths in pools_of(batches, spec):
        blocks = [block_pages(sequence, spec) for sequence in lengths]
        first_page, num_pages = np.stack([b.first_page for b in blocks]), np.stack([b.num_pages for b in blocks])
        executor = planner.pooled(first_page, num_pages, spec, np.ones(spec.ranks))
        work = PoolWork(spec, first_page, num_pages, np.zeros(0, np.int32))
        found.append((check_executor(executor, num_pages, spec), work))
    return found


def figures(pools: list[tuple[np.ndarray, PoolWork]], waves: int, rule: Callable, rate: float) -> str:
    samples = []
    for executor, work in pools:
        spec = dataclasses.replace(work.spec, waves=waves)
        model = CostModel().scaled(spec)
        pages, forward, backward = traffic(executor, rule(executor, work._replace(spec=spec)), spec, work)
        ahead, alone = clock(pages * model.page_seconds, forward, rate)
        back, back_alone = clock(pages * model.backward_page_seconds, backward, rate)
        last = backward[1][:, :, -1].max() / 2**20
        samples.append([1e3 * (ahead - alone), 1e3 * (back - back_alone), 1e3 * (alone + back_alone), last])
    ahead, back, alone, last = np.mean(samples, axis=0)
    return f"{ahead:.1f} + {back:.1f} of {alone:.0f}; {last:.0f}"


def traffic(
    executor: np.ndarray, wave: np.ndarray, spec: PoolSpec, work: PoolWork
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Pages (N, W) of each wave; for each pass the bytes of dispatches and returns, (2, N, X), sent and received."""
    n, x = spec.ranks, spec.exchanges
    routing = route(executor, wave, work._replace(spec=spec))
    cells = executor.reshape(-1) * spec.waves + wave.reshape(-1)
    pages = np.bincount(cells, work.lanes(work.num_pages), n * spec.waves).reshape(n, spec.waves)
    result = spec.block * spec.group * spec.value_dim * spec.item_bytes
    query = spec.block_bytes - result

    def count(rank: np.ndarray, exchange: np.ndarray, items: np.ndarray) -> np.ndarray:
        return np.bincount(rank * x + exchange, items, n * x).reshape(n, x)

    blocks, moved = routing.blocks, routing.pages
    out = np.stack([count(side, blocks.arrives, blocks.length) for side in (blocks.source, blocks.target)])
    page = (
        np.stack([count(side, moved.arrives, moved.length) for side in (moved.source, moved.target)]) * spec.page_bytes
    )
    home = np.stack([count(side, blocks.returns, blocks.length) for side in (blocks.target, blocks.source)])
    gradient = np.stack([count(side, moved.returns, moved.length) for side in (moved.target, moved.source)])
    gradient = gradient * spec.page_bytes
    return pages, (out * query + page, home * result), (out * (query + result) + page, home * query + gradient)


def clock(seconds: np.ndarray, bytes_: tuple[np.ndarray, np.ndarray], rate: float) -> tuple[float, float]:
    """(N, W) seconds of the waves and their traffic -> seconds of the pass, and of the slowest rank's waves alone."""
    dispatched, returned = bytes_
    waves, exchanges = seconds.shape[1], dispatched.shape[2]
    now = dispatched[:, :, 0].max(axis=0) / rate if waves == 1 else np.zeros(seconds.shape[0])
    for wave in range(waves):
        moved = np.zeros(dispatched.shape[:2])
        if waves > 1 and wave < exchanges:
            moved += dispatched[:, :, wave]
        if wave >= 2:
            moved += returned[:, :, wave - 2]
        arrived = now.max() + moved.max(axis=0) / rate if moved.any() else now
        now = np.maximum(now + seconds[:, wave], arrived)
    last = returned[:, :, -1].max(axis=0) / rate
    return float((now.max() + last).max()), float(seconds.sum(axis=1).max())


if __name__ == "__main__":
    main(tyro.cli(Options))
