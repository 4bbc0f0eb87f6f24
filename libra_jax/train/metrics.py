"""What a run reports: one JSON line per step in the run folder, one row in the terminal, one summary at the end.

Takes the numbers of a step and the document lengths that it trained on; gives records. The file is the whole curve
of the run: when a run goes on from a checkpoint, lines of steps that will be done again are dropped first.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from libra_jax import planner
from libra_jax.plan import PlanStats, policy_work
from libra_jax.planner import Policy
from libra_jax.spec import PoolSpec


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One optimizer step. What each number says, and in what unit, stands in docs/metrics.md.

    Fields with a default are None where a run has no such number, and in files written before it was counted. loss and
    grad_norm are not finite where the step was skipped.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    targets: int
    tokens: int
    seconds: float
    tokens_per_second: float
    imbalance_home: float
    imbalance_ulysses: float
    imbalance_libra: float
    fallbacks: int
    pool_size: int | None = None
    planning_seconds: float | None = None
    waited_seconds: float | None = None
    z_loss: float | None = None
    balance_loss: float | None = None
    skipped: bool | None = None
    skipped_total: int | None = None
    imbalance_pools: float | None = None
    imbalance_ranks: float | None = None
    exchange_bytes_mean: float | None = None
    exchange_bytes_busiest: int | None = None
    model_flops: float | None = None
    flops_per_second_per_device: float | None = None
    mfu: float | None = None
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None

    @property
    def waited(self) -> bool:
        """Whether the step waited for its batch and plans: longer than a hundredth of its time."""
        return self.waited_seconds is not None and self.waited_seconds > 0.01 * self.seconds


def step_work(lengths: Sequence[Sequence[int]], spec: PoolSpec, pools: int, policy: Policy) -> np.ndarray:
    """(micro_steps, pools, N) pages visited; lengths: of the step's sequences, a pool's after another's."""
    size = spec.pool_size
    per_pool = [policy_work(lengths[i : i + size], spec, policy)[:, 0] for i in range(0, len(lengths), size)]
    return np.stack(per_pool).reshape(-1, pools, spec.ranks)


def planned_work(stats: Sequence[PlanStats], pools: int) -> np.ndarray:
    """(micro_steps, pools, N) pages visited as planned; stats: of the step's pools."""
    work = np.stack([plan.work for plan in stats])
    return work.reshape(-1, pools, work.shape[1])


def imbalance(work: np.ndarray) -> float:
    """Time of a step over its time with perfect balance. work: (micro_steps, pools, N)."""
    ranks = work.shape[1] * work.shape[2]
    return float(work.max(axis=(1, 2)).sum() * ranks / work.sum()) if work.any() else 1.0


def baselines(lengths: Sequence[Sequence[int]], spec: PoolSpec, pools: int) -> dict[str, np.ndarray]:
    """{"home", "ulysses"}: (micro_steps, pools, N) pages visited without Libra; see `StepRecord`."""
    return {
        "home": step_work(lengths, spec, pools, planner.at_home),
        "ulysses": step_work(lengths, spec, pools, planner.head_parallel),
    }


@dataclasses.dataclass(frozen=True)
class EvaluationRecord:
    """The loss on held-out documents after `step` steps. What each number says stands in docs/metrics.md."""

    step: int
    eval_loss: float
    eval_targets: int
    eval_seconds: float


class MetricsFile[Record: (StepRecord, EvaluationRecord)]:
    """A file of records in a run folder: one line for each, on disk when `append` returns."""

    def __init__(self, path: Path, steps_done: int, kind: type[Record] = StepRecord) -> None:
        """Opens the file for the step after `steps_done`; later lines and a torn last line are dropped."""
        kept = [record for record in read_metrics(path, kind) if record.step <= steps_done]
        lines = "".join(_line(record) for record in kept)
        if path.exists() and path.read_text() != lines:
            part = path.with_suffix(".part")
            part.write_text(lines)
            part.replace(path)
        self._file = path.open("a")

    def append(self, record: Record) -> None:
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics[Record: (StepRecord, EvaluationRecord)](path: Path, kind: type[Record] = StepRecord) -> list[Record]:
    """The records of a file in order, up to the first line that is not whole; [] where there is no file."""
    records: list[Record] = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                values = json.loads(line)
                records.append(kind(**values | {name: float(values[name]) for name in _LOSSES if name in values}))
            except (json.JSONDecodeError, TypeError):
                break
    return records


_LOSSES = ("loss", "grad_norm", "eval_loss")


def _line(record: StepRecord | EvaluationRecord) -> str:
    """JSON, which has no word for what is not finite: it stands there as text, "nan" or "inf"."""
    values = dataclasses.asdict(record)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = str(value)
    return json.dumps(values, allow_nan=False) + "\n"


_WIDTHS = (9, 8, 10, 13, 10, 9, 8, 6, 5, 6)  # 79 characters with the gaps, without the last two


def print_header(console: Console, pool_sizes: bool = False, mfu: bool = False) -> None:
    """pool_sizes: a column says which pool size each step takes. mfu: a column for it."""
    columns = ["step", "loss", "grad norm", "learning rate", "tokens/s", "plain CP", "Ulysses", "Libra"]
    over = f"{'imbalance: time / time if work were even':>{sum(_WIDTHS[:8]) + 7}}"
    columns += ["pool"] * pool_sizes + ["MFU"] * mfu
    console.print(over, _row(columns), sep="\n", style="bold", soft_wrap=True)


def print_step(console: Console, record: StepRecord, steps: int, pool_sizes: bool = False) -> None:
    values = [
        f"{record.step}/{steps}",
        f"{record.loss:.4f}",
        f"{record.grad_norm:.3f}",
        f"{record.learning_rate:.2e}",
        f"{record.tokens_per_second:,.0f}",
        f"{record.imbalance_home:.2f}",
        f"{record.imbalance_ulysses:.2f}",
        f"{record.imbalance_libra:.2f}",
    ]
    values += [f"{record.pool_size}"] * pool_sizes
    values += [f"{record.mfu:.1%}"] if record.mfu is not None else []
    console.print(_row(values), soft_wrap=True)


def print_evaluation(console: Console, record: EvaluationRecord) -> None:
    console.print(
        f"evaluation after step {record.step}: loss {record.eval_loss:.4f} over {record.eval_targets:,} targets, "
        f"{record.eval_seconds:.1f} s",
        soft_wrap=True,
        highlight=False,
    )


def _row(values: Sequence[str]) -> str:
    return " ".join(f"{value:>{width}}" for value, width in zip(values, _WIDTHS, strict=False))


def summary(records: Sequence[StepRecord]) -> Table:
    """The table a run ends with. records: the whole curve, at least one."""
    tenth = max(len(records) // 10, 1)

    def mean(name: str, part: Sequence[StepRecord]) -> float:
        values = [getattr(record, name) for record in part]
        values = [value for value in values if value is not None and math.isfinite(value)]
        return float(np.mean(values)) if values else math.nan

    steady = float(np.median([record.seconds for record in records]))
    rows = {
        "steps": f"{records[-1].step}",
        "loss, first and last tenth": f"{mean('loss', records[:tenth]):.4f} → {mean('loss', records[-tenth:]):.4f}",
        "tokens trained on": f"{sum(r.tokens for r in records):,}",
        "median step": f"{steady:.2f} s",
        "tokens per second, mean": f"{sum(r.tokens for r in records) / sum(r.seconds for r in records):,.0f}",
        "imbalance, plain CP (ranks work on what they hold)": f"{mean('imbalance_home', records):.3f}",
        "imbalance, Ulysses (heads dealt to the CP group)": f"{mean('imbalance_ulysses', records):.3f}",
        "imbalance, Libra (as it was run)": f"{mean('imbalance_libra', records):.3f}",
        "attention time, plain CP / Libra": (
            f"{mean('imbalance_home', records) / mean('imbalance_libra', records):.2f}, modelled from the work"
        ),
    }
    if any(record.imbalance_pools is not None for record in records):
        pools, ranks = mean("imbalance_pools", records), mean("imbalance_ranks", records)
        rows["imbalance, Libra, between pools and inside them"] = f"{pools:.3f} and {ranks:.3f}"
        sent, most = mean("exchange_bytes_mean", records), mean("exchange_bytes_busiest", records)
        rows["sent by a rank in a step's forward passes"] = f"{_bytes(sent)}, by the busiest {_bytes(most)}"
    if any(record.model_flops is not None for record in records):
        mfu = mean("mfu", records)
        share = "" if math.isnan(mfu) else f", {mfu:.1%} of its peak (MFU)"
        rows["model FLOP/s of a device, mean"] = f"{mean('flops_per_second_per_device', records):.3g}{share}"
    if skipped := sum(bool(record.skipped) for record in records):
        rows["steps skipped as not finite"] = f"{skipped:,}"
    sizes = Counter(record.pool_size for record in records if record.pool_size is not None)
    if len(sizes) > 1:
        rows["sequences in a pool"] = ", ".join(f"{size} in {sizes[size]} steps" for size in sorted(sizes))
    planning = [record.planning_seconds for record in records if record.planning_seconds is not None]
    if planning:
        rows["planning a step, median"] = f"{1e3 * float(np.median(planning)):.1f} ms of one core, ahead of the step"
    waits = [record for record in records if record.waited_seconds is not None]
    if waits:
        share = sum(record.waited for record in waits) / len(waits)
        seconds = sum(record.waited_seconds or 0 for record in waits)
        rows["steps that waited for data or plans"] = f"{share:.1%}, {seconds:.1f} s in all"
    for name, what in {"device_peak_bytes": "a device, peak", "host_peak_bytes": "a process, peak"}.items():
        if taken := [getattr(record, name) for record in records if getattr(record, name) is not None]:
            rows[f"memory of {what}"] = _bytes(max(taken))
    table = Table(title="Summary", show_header=False, title_justify="left")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _bytes(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError(number)
