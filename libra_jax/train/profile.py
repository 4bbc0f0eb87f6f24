"""A profile of chosen steps: what JAX's profiler sees of them, in the run folder, for XProf or Perfetto."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import jax


class StepProfile:
    """Traces steps first to last, counted from 1, once for each start of a run that comes by them. A context manager:
    leaving it ends a trace that is still going on.

    folder: to write to; processes of one run write to folders of their own in it. steps: None traces nothing.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self.folder = folder if jax.process_count() == 1 else folder / f"process_{jax.process_index()}"
        self._steps = steps
        self._tracing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Has to be called before each step."""
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and not self._tracing:
            jax.profiler.start_trace(str(self.folder))
            self._tracing = True

    def after(self, step: int) -> bool:
        """Has to be called after each step, when its results are there. True where a trace has been written."""
        return self._steps is not None and step >= self._steps[1] and self._stop()

    def _stop(self) -> bool:
        if not self._tracing:
            return False
        self._tracing = False
        jax.profiler.stop_trace()
        return True
