"""What can end a run from outside: peers that died or hang, SIGTERM before the machine is taken away, Ctrl-C.

`Watchdog` ends a process whose run stands still; `Signals` tells the loop, between two steps, that it has to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

HUNG_STATUS = 74
"""Exit status of a process that the watchdog ends."""
_TICK_SECONDS = 0.5
_STOPPED_SECONDS = 20.0


class Watchdog:
    """Ends this process when nothing has been finished for too long, whatever the main thread is stuck in.

    limit_seconds: for each of the things that `doing` is told of; None: no limit. name: of this process, for the
    message. A context manager: leaving it stops the thread. Time in which the process itself was stopped (SIGSTOP, a
    suspended job) does not count.
    """

    def __init__(self, name: str, limit_seconds: float | None) -> None:
        self._name, self._limit = name, limit_seconds
        self._what, self._since, self._after = "starting", time.monotonic(), "nothing"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if limit_seconds is not None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def doing(self, what: str, limit_seconds: float | None = None) -> None:
        """From now on this process is busy with `what`, and may be for as long; None: for as long as before."""
        self._after, self._what, self._since = self._what, what, time.monotonic()
        if limit_seconds is not None and self._limit is not None:
            self._limit = limit_seconds

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - looked > _STOPPED_SECONDS:
                self._since += now - looked
            looked = now
            assert self._limit is not None
            if now - self._since > self._limit:
                print(
                    f"libra: {self._name}: nothing has come to an end for {self._limit:g} s, waiting for {self._what} "
                    f"(the last to be done was {self._after}). Another process is gone or hangs: its own output says "
                    "more. This one ends here; the same command goes on from the newest whole checkpoint.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(HUNG_STATUS)


class Signals:
    """SIGTERM and Ctrl-C for a run. A context manager: leaving it puts the handlers back.

    In a run of several processes JAX listens for SIGTERM, whichever of them gets it, and `stop_after` becomes true in
    all of them after the same step. Ctrl-C raises KeyboardInterrupt at once; where a library's callback swallows that,
    the next `stop_after` or `check` raises it again.
    """

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        self._terminated = self._interrupted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)
            if not self._several:
                self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> bool:
        """Whether this process was told to stop. Raises KeyboardInterrupt if Ctrl-C came and was swallowed."""
        if self._interrupted:
            raise KeyboardInterrupt
        return self._terminated

    def stop_after(self, step: int) -> bool:
        """Whether the run has to stop after this step; the same in all processes, all of which must ask."""
        here = self.check()
        return multihost_utils.reached_preemption_sync_point(step) if self._several else here

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True
