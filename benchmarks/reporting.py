"""What the benchmarks' reports share: which machine, when, which commit, and rows as a Markdown table."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path


def machine(*packages: str) -> str:
    """Processor, cores, Python, versions of `packages`, date and commit, in one line."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    facts = [f"{os.cpu_count()} cores of {processor}", f"Python {platform.python_version()}", *versions]
    return ", ".join([*facts, datetime.date.today().isoformat(), f"commit {run.stdout.strip() or 'unknown'}"]) + "."


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [list(columns), ["---"] * len(columns), *map(list, rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]
