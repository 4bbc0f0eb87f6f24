"""Counting the packed sequences of a large corpus in several processes, each of which is this module, started anew.

Counting is Python and many small NumPy calls, so threads bring nothing. The processes get the packing, whose lengths
they read from the file that these lie in, and a range of windows; they give the numbers of sequences, int64.
"""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from libra_jax.data.packing import PackedDocuments


def count_in_processes(packed: PackedDocuments, processes: int) -> np.ndarray | None:
    """Sequences of each window, (windows,) int64; None where the processes could not do it."""
    windows, sent = len(packed.windows), pickle.dumps(packed)
    edges = np.linspace(0, windows, processes + 1).astype(int).tolist()
    started, parts = [], []
    try:
        for first, stop in itertools.pairwise(edges):
            command = [sys.executable, "-m", __name__, str(first), str(stop)]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for process in started:
            process.stdin.write(sent)
            process.stdin.close()
        parts = [np.frombuffer(process.stdout.read(), np.int64) for process in started]
    except OSError:
        return None
    finally:
        for process in started:
            if len(parts) < len(started):
                process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    counts = np.concatenate(parts)
    return counts if len(counts) == windows and not any(process.returncode for process in started) else None


def main(first: str, stop: str) -> None:
    packed: PackedDocuments = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(packed.count_windows(int(first), int(stop)).tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
