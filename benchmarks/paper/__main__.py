"""The paper's tables and figures, and how the model compares with what is published, in one command.

Runs every experiment (`experiments`), writes a CSV each into docs/report, then pictures and the text beside them.
Run: python -m benchmarks.paper [--only NAME ...] [--steps 20] [--draw]; an hour on two cores.
"""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.paper.base import Row
from benchmarks.paper.experiments import EXPERIMENTS, run

FOLDER = Path(__file__).parents[2] / "docs" / "report"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    only: tuple[str, ...] = ()
    """Experiments to run, of those that CSVs are named after; all without it. The others' CSVs stay."""
    steps: int = 20
    """Optimizer steps that each number rests on; fewer where a step has very many sequences."""
    draw: bool = False
    """Run nothing: draw pictures and write the text from the CSVs that are there."""
    processes: int = 2
    """Jobs side by side."""
    folder: Path = FOLDER
    """Where CSVs, pictures and the report go."""


def main(options: Options) -> None:
    unknown = set(options.only) - set(EXPERIMENTS)
    if unknown:
        raise SystemExit(f"no experiment is called {sorted(unknown)[0]!r}; there are {', '.join(EXPERIMENTS)}")
    for name, least in {"steps": 2, "processes": 1}.items():
        if getattr(options, name) < least:
            raise SystemExit(f"{name} ({getattr(options, name)}) must be at least {least}")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"folder ({options.folder}): {error}") from None
    console = Console()
    if not options.draw:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=context) as pool:
            for name in options.only or EXPERIMENTS:
                begin = time.perf_counter()
                jobs = EXPERIMENTS[name](options.steps)
                parts = track(pool.map(run, jobs), name, len(jobs), console=console, transient=True)
                rows = [row for part in parts for row in part]
                write_csv(options.folder / f"{name}.csv", rows)
                console.print(f"{name}: {len(rows)} rows in {time.perf_counter() - begin:.0f} s")
    from benchmarks.paper.report import write_report

    missing = write_report(options.folder)
    if missing:
        raise SystemExit(f"no report without {', '.join(missing)}: run these first")
    console.print(f"report: {options.folder / 'README.md'}")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All columns that any row has; numbers with six digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
