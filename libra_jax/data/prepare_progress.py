"""How far `libra prepare` has come, on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

_LINE_SECONDS = 10.0


class Progress:
    """Use as a context manager; `show` after every batch."""

    def __init__(self, total_bytes: int, documents: int, tokens: int) -> None:
        """total_bytes: of all input files. documents, tokens: those that an earlier run has made."""
        self._total_bytes = total_bytes
        self._documents = documents
        self._tokens = tokens
        self._first_bytes: int | None = None
        self._begin_seconds = self._last_seconds = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, read_bytes: int, documents: int, tokens: int) -> None:
        """read_bytes: of the inputs, so far. documents, tokens: of one more batch."""
        self._documents += documents
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=read_bytes, description=f"{self._tokens:,} tokens")
            return
        now = time.monotonic()
        if self._first_bytes is None:  # what an earlier run has done says nothing on speed
            self._first_bytes, self._begin_seconds = read_bytes, now
        if now - self._last_seconds >= _LINE_SECONDS:
            self._last_seconds = now
            print(self._line(read_bytes, now - self._begin_seconds), file=sys.stderr, flush=True)

    def _line(self, read_bytes: int, seconds: float) -> str:
        done = f"{read_bytes / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB"
        line = f"{done}, {self._documents:,} documents, {self._tokens:,} tokens"
        speed = (read_bytes - (self._first_bytes or 0)) / seconds if seconds else 0.0
        if speed <= 0:
            return line
        left_seconds = (self._total_bytes - read_bytes) / speed
        left = f"{left_seconds:.0f} s" if left_seconds < 120 else f"{left_seconds / 60:,.0f} min"
        return f"{line}, {speed / 1e6:,.1f} MB/s, about {left} left"
