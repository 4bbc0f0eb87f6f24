"""Compiles the kernels for an architecture that need not be here, and reads what came out: registers, spills, memory,
tensor-core instructions and what the main loop costs (`sass.py`). Rung 3: compiled, not run.

Uses Triton's compiler and the ptxas and cuobjdump that come with it, as they stand in Triton 3.6 and 3.9. On a GPU, JAX
assembles the same PTX with the ptxas of its own CUDA, whose register numbers may differ a little; `ptxas` asks for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from libra_kernels import sass, triton_kernels
from libra_kernels.launch import Launch, Pass, choose, constants

KERNELS = {
    "forward": triton_kernels.forward_kernel,
    "dq": triton_kernels.dq_kernel,
    "dkv": triton_kernels.dkv_kernel,
}
TENSOR_CORE = {80: "HMMA", 90: "HGMMA", 100: r"UTC\w*MMA"}
"""Opcode of the tensor-core instructions of a generation: mma.sync, wgmma, tcgen05.mma. Older ones do not count."""

MOST_TMEM_COLUMNS = 512
_SM_REGISTERS, _SM_WARPS = 65536, 64


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel for given shapes, as the compiler left it."""

    kernel: Pass
    arch: int
    head_dim: int
    v_head_dim: int
    dtype: str
    block: int
    group: int
    launch: Launch
    registers: int
    """Of a thread."""
    spill_bytes: int
    """Stored and loaded by a thread, in the code; what a loop repeats counts once."""
    shared_bytes: int
    tmem_columns: int
    tensor_core_instructions: int
    """In the whole kernel, of this architecture's own kind."""
    remarks: tuple[str, ...]
    """Warnings of ptxas, such as that it had to serialize wgmma."""
    loop: sass.LoopCost

    @property
    def ctas(self) -> int:
        """How many blocks of threads fit on an SM at once."""
        chip = sass.CHIPS[self.arch]
        warp_registers = -(-self.registers // 8) * 8 * 32
        fits = [
            _SM_REGISTERS // (warp_registers * self.launch.num_warps),
            _SM_WARPS // self.launch.num_warps,
            chip.shared_bytes // (self.shared_bytes + 1024),
        ]
        if self.tmem_columns:
            fits.append(MOST_TMEM_COLUMNS // self.tmem_columns)
        return min(fits)

    @property
    def share(self) -> float:
        """Bound on the share of the tensor cores' peak that the main loop reaches, see `sass.LoopCost.share`."""
        return self.loop.share(max(self.ctas, 1))

    def complaints(self) -> list[str]:
        """Why this should not be launched; empty if it may. Spills are for the reader to judge."""
        found = []
        limit = sass.CHIPS[self.arch].block_shared_bytes
        if self.shared_bytes > limit:
            found.append(f"shared memory ({self.shared_bytes} bytes) over the limit of a block ({limit})")
        if not self.tensor_core_instructions:
            found.append(f"no tensor-core instruction of sm_{self.arch}")
        return found


def compile_kernel(
    kernel: Pass,
    arch: int,
    *,
    head_dim: int,
    v_head_dim: int | None = None,
    block: int = 128,
    group: int = 4,
    dtype: str = "bf16",
    soft_cap: float | None = None,
    launch: Launch | None = None,
    ptxas: Path | None = None,
    options: Mapping[str, object] | None = None,
    kernels: Mapping[str, object] | None = None,
) -> Compiled:
    """A kernel of `triton_kernels.py` for sm_{arch}.

    dtype: "bf16" or "fp16". launch: the table's choice without one. ptxas: assembler to use instead of Triton's own.
    options: further options of Triton's compiler. kernels: functions to use instead of those of `triton_kernels.py`,
    to compare variants. Raises ValueError where a kernel asks for more tensor memory than there is.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    if launch is None:
        launch = choose(kernel, arch, block=block, group=group, head_dim=head_dim, v_head_dim=v_head_dim)
    given = constants(
        launch, block=block, group=group, head_dim=head_dim, v_head_dim=v_head_dim, scale=head_dim**-0.5,
        soft_cap=soft_cap,
    )  # fmt: skip
    function = (KERNELS if kernels is None else kernels)[kernel]
    made, log = _compile(function, arch, launch, given, dtype, ptxas, options or {})
    tmem_columns = getattr(made.metadata, "tmem_size", None) or 0
    if tmem_columns > MOST_TMEM_COLUMNS:  # ptxas says nothing: it leaves a trap in the kernel's place
        raise ValueError(f"{kernel} needs {tmem_columns} columns of tensor memory, of {MOST_TMEM_COLUMNS}")
    code = sass.instructions(_disassemble(made.asm["cubin"]))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas said nothing of registers and spills: {log!r}")
    opcode = re.compile(TENSOR_CORE[arch])
    return Compiled(
        kernel=kernel, arch=arch, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, block=block, group=group,
        launch=launch,
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=made.metadata.shared,
        tmem_columns=tmem_columns,
        tensor_core_instructions=sum(opcode.fullmatch(instruction.name) is not None for instruction in code),
        remarks=tuple(line.strip() for line in log.splitlines() if re.search(r"warning|Potential Performance", line)),
        loop=sass.loop_cost(
            code, sass.CHIPS[arch], num_warps=launch.num_warps,
            tensor_fmas=_fmas(kernel, launch, head_dim, v_head_dim),
            loaded_bytes=2 * (launch.rows if kernel == "dkv" else launch.keys) * (head_dim + v_head_dim),
            tensor_rate=_tensor_rate(kernel, arch, launch),
        ),
    )  # fmt: skip


def _fmas(kernel: Pass, launch: Launch, head_dim: int, v_head_dim: int) -> int:
    """Multiply-adds of a tile: S and O; S, dP, and dQ; S, dP, dV and dK."""
    width = {
        "forward": head_dim + v_head_dim,
        "dq": 2 * head_dim + v_head_dim,
        "dkv": 2 * (head_dim + v_head_dim),
    }[kernel]
    return launch.rows * launch.keys * width


def _tensor_rate(kernel: Pass, arch: int, launch: Launch) -> float:
    """tcgen05 works on 128 rows at a time; with 64 half of it has nothing to do."""
    owned = launch.keys if kernel == "dkv" else launch.rows
    return min(1.0, owned / 128) if arch == 100 else 1.0


def _compile(function, arch, launch, given, dtype, ptxas, options):
    types = {}
    for name in function.arg_names:
        if name in given:
            types[name] = "constexpr"
        elif name in ("q", "k", "v", "d_out", "out", "dq"):
            types[name] = f"*{dtype}"
        elif name in ("lse", "exponent", "delta", "dk", "dv"):
            types[name] = "*fp32"
        else:  # tables, and what is not read
            types[name] = "*i32"
    place = {name: (i,) for i, name in enumerate(function.arg_names)}
    aligned = {place[name]: [["tt.divisibility", 16]] for name, kind in types.items() if kind.startswith("*")}
    source = ASTSource(function, types, {place[name]: value for name, value in given.items()}, aligned)
    log = io.StringIO()
    with _own_cache(), contextlib.redirect_stdout(log):
        if ptxas is not None:
            knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell = str(ptxas)
        # Multiply-adds may be fused: Triton 3.9 asks that one says so.
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True, **options}
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return made, log.getvalue()


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Triton with an empty cache, so that ptxas runs and its log is there to read."""
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        yield


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
