"""Several JAX processes on this machine: what a cluster's launcher does, on one computer, to try and to test it.

`run_processes` starts a program a number of times and waits for all of them; in the program, `join_processes` makes
them one JAX runtime, each with its own CPU devices, with collectives between them through gloo. Nothing here is needed
on a cluster: its launcher starts the processes, and `jax.distributed.initialize()` joins them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

import jax

_PORT_TAKEN = ("address already in use", "address in use", "failed to bind", "could not start gRPC server")
_ATTEMPTS = 3
_TAIL_BYTES = 6000


class ProcessFailed(RuntimeError):
    """One of the processes failed, or they took too long. The message says which, and shows what it printed last."""


def run_processes(
    command: Sequence[str],
    count: int,
    *,
    timeout_seconds: float,
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> list[str]:
    """Runs `command` as `count` processes at once and waits for them. -> what each of them printed.

    command: program and arguments; three more follow, which the program hands to `join_processes`.
    cores: one core for each process, which it stays on; None leaves them where they are.
    environment: None is this process's.
    on_line: is called with every line that the first process prints, as soon as it has.

    They share a free port of the loopback interface; if another program was faster to take it, all start again with
    another one. As soon as one fails the others are killed, and none outlives this function.
    Raises ProcessFailed if one of them does not end with 0, or not all have ended after timeout_seconds.
    """
    deadline = time.monotonic() + timeout_seconds
    for attempt in range(_ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="libra-processes-") as folder, contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(os.path.join(folder, str(i)), "w+b")) for i in range(count)]
            address = f"127.0.0.1:{_free_port()}"
            with _started(command, address, files, cores, environment) as processes:
                failed = _first_to_fail(processes, deadline, _follow(files[0], on_line))
            if failed is None:
                return [_text(file) for file in files]
            if attempt + 1 < _ATTEMPTS and any(_port_was_taken(_text(file)) for file in files):
                continue
            raise ProcessFailed(_report(failed, processes, files, command, timeout_seconds))
    raise AssertionError("the last attempt returns or raises")


def join_processes(arguments: Sequence[str], *, devices: int = 1) -> None:
    """Makes this process one of those that `run_processes` started. Call it before JAX is used for anything else.

    arguments: the last three of the command line. devices: CPU devices that this process adds to the others'.
    """
    address, count, index = arguments
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(index), initialization_timeout=120)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def _started(
    command: Sequence[str],
    address: str,
    files: Sequence[IO[bytes]],
    cores: Sequence[int] | None,
    environment: Mapping[str, str] | None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes, each the head of a process group of its own; killed, with what they started, on the way out."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, file in enumerate(files):
            pin = [] if cores is None else ["taskset", "--cpu-list", str(cores[index])]
            arguments = [*pin, *command, address, str(len(files)), str(index)]
            processes.append(
                subprocess.Popen(
                    arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True, preexec_fn=_die_with_parent,
                )
            )  # fmt: skip
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def _die_with_parent() -> None:
    """In a new process on Linux: ask to be killed when the one that started it is gone, however that came about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _first_to_fail(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float, look: Callable[[], None]
) -> int | None:
    """Waits, and looks at what is printed. None: all have ended well. -1: time is up."""
    while True:
        codes = [process.poll() for process in processes]
        look()
        for index, code in enumerate(codes):
            if code:
                return index
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return -1
        time.sleep(0.02)


def _follow(file: IO[bytes], on_line: Callable[[str], None] | None) -> Callable[[], None]:
    """A function that hands on the whole lines that were added to the file since it was last called."""
    done, rest = 0, b""

    def look() -> None:
        nonlocal done, rest
        if on_line is None:
            return
        new = os.pread(file.fileno(), 1 << 20, done)  # leaves the position alone, which the process writes at
        done += len(new)
        *lines, rest = (rest + new).split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))

    return look


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _port_was_taken(text: str) -> bool:
    return any(sign.lower() in text.lower() for sign in _PORT_TAKEN)


def _report(
    failed: int,
    processes: Sequence[subprocess.Popen[bytes]],
    files: Sequence[IO[bytes]],
    command: Sequence[str],
    timeout_seconds: float,
) -> str:
    """Who failed, and the end of what was printed: of the one that failed, or of all of them when time ran out."""
    if failed >= 0:
        what = f"process {failed} of {len(files)} ended with {processes[failed].returncode}"
        shown = [failed]
    else:
        what = f"{len(files)} processes did not end within {timeout_seconds:g} s"
        shown = list(range(len(files)))
    tails = [f"--- process {index} printed:\n{_text(files[index])[-_TAIL_BYTES:]}" for index in shown]
    return "\n".join([f"{what}: {' '.join(command)}", *tails])
