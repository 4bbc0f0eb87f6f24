"""The command `libra preflight`: options in, report out, exit status 0 if the step fits, 1 if it does not."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from libra_jax.preflight.program import parse_topology
from libra_jax.preflight.report import Report, all_as_json, all_as_markdown, preflight, print_report, verdicts
from libra_jax.targets import TARGETS
from libra_jax.train.config import TrainConfig

_PAGE_COLUMNS = 120


@dataclasses.dataclass(frozen=True)
class PreflightOptions:
    """What is compiled for, and where the report goes. report: its pages, without suffix; None: none."""

    target: str
    topology: str
    json: bool = False
    report: Path | None = None


def run(options: PreflightOptions, config: TrainConfig, name: str, command: str) -> int:
    """Prints the report of a config, of every pool size. Returns 0 if the step fits in all of them and 1 if not.

    Raises ValueError for a target, topology or mesh that cannot be, RuntimeError for missing packages, OSError when the
    report cannot be written.
    """
    if options.target not in TARGETS:
        raise ValueError(f"there is no target {options.target!r}: --target must be one of {', '.join(TARGETS)}")
    topology = parse_topology(options.topology)
    if options.report is not None and not options.report.parent.is_dir():
        raise OSError(f"there is no folder {options.report.parent} for the report: make it, or set --report")
    if options.report is not None and (not options.report.name or options.report.is_dir()):
        raise OSError(f"--report ({options.report}) is a folder: name a file in it, without suffix")
    if options.report is not None and not os.access(options.report.parent, os.W_OK):
        raise OSError(f"the report cannot be written: folder {options.report.parent} does not let us")
    compile_on_the_host()
    notice = Console(stderr=True)
    reports = []
    for size in config.mesh.sizes:
        which = f", pool size {size}" if config.mesh.pool_sizes else ""
        with notice.status(
            f"tracing and compiling for {config.mesh.devices} {options.target}{which} (a minute or two)"
        ):
            reports.append(preflight(config.at_pool_size(size), options.target, topology, name))
    if options.json:
        print(json.dumps(all_as_json(reports), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else _PAGE_COLUMNS)
        for report in reports:
            print_report(report, console)
        if len(reports) > 1:
            console.print("", *verdicts(reports), sep="\n", soft_wrap=True)
    if options.report is not None:
        _write(reports, options.report, command)
    for report, line in zip(reports, verdicts(reports), strict=True):
        if not report.fits:
            print(f"libra: {line}", file=sys.stderr)
    return 0 if all(report.fits for report in reports) else 1


def compile_on_the_host() -> None:
    """Keeps JAX off any GPU of this machine, and from looking for one: it only compiles. Without effect once JAX has
    started. XLA's own log stays quiet, too: what it says of memory is in the report."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    jax.config.update("jax_platforms", "cpu")


def _write(reports: Sequence[Report], path: Path, command: str) -> None:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "triton", "jax-triton"))
    stamp = f"Written {datetime.date.today()} by the command above, with {versions}. Compiled, not run."
    path.with_name(path.name + ".json").write_text(json.dumps(all_as_json(reports), indent=2) + "\n")
    path.with_name(path.name + ".md").write_text(all_as_markdown(reports, command, stamp))
