"""What the Triton kernels of a compiled program need of a GPU: registers, spills, shared memory.

The program carries every kernel as PTX. It is assembled here as a GPU would do it when the program is loaded, by
NVIDIA's ptxas, which says what came out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from libra_jax.hlo import Program, TritonCall, triton_call


@dataclasses.dataclass(frozen=True)
class KernelUse:
    """registers: of a thread. spill_bytes: stored and loaded by a thread. shared_bytes, warps: of a block of threads.
    calls: places in the program where it is started, a loop's counted once. arch: such as "sm_90a"."""

    name: str
    calls: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    arch: str


def read_kernels(program: Program) -> list[KernelUse]:
    """The program's Triton kernels by name, each variant once. Raises RuntimeError without ptxas."""
    calls = Counter(
        call
        for lines in program.computations.values()
        for line in lines
        if line.opcode == "custom-call" and (call := triton_call(line.rest)) is not None
    )
    return [_assembled(call, count) for call, count in sorted(calls.items(), key=lambda item: item[0].name)]


def find_ptxas() -> str:
    """Path of ptxas: the wheel's, as XLA takes it, or one on PATH. Raises RuntimeError."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob("c*/bin/ptxas")):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise RuntimeError("reading the kernels needs ptxas, which is missing: pip install 'libra-jax[preflight]'")
    return found


def _assembled(call: TritonCall, count: int) -> KernelUse:
    arch = re.search(r"^\.target (\w+)", call.ptx, re.M)
    if arch is None:
        raise ValueError(f"the PTX of {call.name} names no .target")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(call.ptx)
        command = [find_ptxas(), "-v", f"--gpu-name={arch[1]}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if done.returncode or registers is None or spills is None:
        raise RuntimeError(f"ptxas could not assemble {call.name}: {log.strip()[:500]}")
    static = re.search(r"(\d+) bytes smem", log)
    return KernelUse(
        name=call.name,
        calls=count,
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=call.shared_bytes + (int(static[1]) if static else 0),
        warps=call.warps,
        arch=arch[1],
    )
