"""What the compiler makes of the Triton kernels, on a machine without a GPU: registers, spills, memory, tensor-core
instructions, and what a model of the main loop says they can reach at most (`libra_kernels/sass.py`).

One row per kernel, architecture and head_dim, with the launch parameters of `libra_kernels/launch.py`.
Run: python -m benchmarks.kernel_report; with --json alone it prints the rows as JSON and nothing else.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from libra_kernels.launch import PASSES
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import machine, markdown

Row = dict[str, Any]

RUNG = "Rung 3: compiled for the architectures, not run. Shares are bounds of a model, no measurement."

WIDTHS = ("64", "96", "128", "192/128", "192", "256")
"""head_dim, and after a slash the values' where it differs."""

LEGEND = """\
- rows, keys, warps, stages: `Launch`; + with overlap. registers: of a thread. spill: bytes that a thread stores to and
  loads from local memory, in the code. shared: KiB of a block. tmem: columns of tensor memory (sm_100), of 512.
- tensor: tensor-core instructions in the kernel, of the architecture's own kind: mma.sync, wgmma, tcgen05.mma.
- blocks: blocks of threads on an SM, by registers, warps and memory.
- loop: instructions of one turn of the main loop for a tile that needs no mask, of them tensor-core instructions, and
  their share of the issue slots.
- cycles: what the tensor cores need for that turn, and what the turn takes in the model. serial: tensor-core time over
  tensor-core time plus all other instructions, were nothing to overlap.
- bound: share of the tensor cores' peak in the model with as many blocks on an SM as fit. It knows nothing of latencies
  but those of copies and tensor cores, nor of barriers and bank conflicts, and on sm_100 nothing of how operands reach
  the tensor cores. ! marks what ptxas had to remark on: dK and dV of widths over 128 on sm_90, where it lets no wgmma
  run beside anything else ("serialized").
- To compare: FlashAttention-3's published forward pass at 16K, head_dim 128, causal, is 616 of an H100's 989 TFLOP/s,
  0.62, the best published Triton kernel 378, 0.38."""

SHAPES: dict[str, dict[str, Any]] = {
    "block 64, group 1": {"block": 64, "group": 1},
    "block 128, group 1": {"block": 128, "group": 1},
    "block 256, group 3": {"block": 256, "group": 3},
    "group 8": {"group": 8},
    "group 16": {"group": 16},
    "float16": {"dtype": "fp16"},
    "soft cap 50": {"soft_cap": 50.0},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    archs: tuple[int, ...] = (80, 90, 100)
    widths: tuple[Literal["64", "96", "128", "192/128", "192", "256"], ...] = WIDTHS
    """head_dim, or head_dim/v_head_dim."""
    block: int = 128
    group: int = 4
    """Query heads per key/value head."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    shapes: bool = True
    """In the report, and in the table here, also registers and spills for other blocks, groups and logits."""
    processes: int = 2
    ptxas: Path | None = None
    """Assembler to use instead of Triton's own."""
    json: Path | None = None
    """Write the rows to this file; `-`, or nothing after --json: print them, and nothing else."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""


def main(options: Options) -> None:
    jobs = [
        (kernel, arch, *_widths(width), {"block": options.block, "group": options.group, "dtype": options.dtype}, "")
        for kernel in PASSES
        for arch in options.archs
        for width in options.widths
    ]
    only_json = str(options.json) == "-"
    if options.shapes and not only_json:
        jobs += [
            (kernel, arch, *_widths(width), {"dtype": options.dtype, **shape}, name)
            for name, shape in SHAPES.items()
            for kernel in PASSES
            for arch in options.archs
            for width in options.widths
        ]
    # Not forked: jax, which the package imports, has threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        rows = list(pool.map(_compile, jobs, [options.ptxas] * len(jobs)))
    main_rows = [row for row in rows if not row["shape"]]
    if only_json:
        print(_as_json(main_rows))
        return
    about = f"{machine('triton')} {RUNG}"
    print(about)
    title = f"{options.dtype}, block {options.block}, group {options.group}"
    columns, cells = list(_cells(main_rows[0])), [list(_cells(row).values()) for row in main_rows]
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    console = Console(width=max(Console().width, 170))
    console.print(table)
    others = _others(rows)
    for name, spills, remarks in others:
        print(f"{name}: spills {spills}; remarks {remarks}")
    if options.json:
        options.json.write_text(_as_json(main_rows) + "\n")
    if options.report:
        text = ["# What the compiler makes of the kernels", "", about, "", LEGEND, "", f"## {title}", ""]
        text += markdown(columns, cells)
        if others:
            text += ["", "## Other shapes", "", f"All kernels and widths. What a shape does not name: {title}.", ""]
            text += markdown(["shape", "bytes spilled", "!"], others)
        options.report.write_text("\n".join(text) + "\n")


def _widths(width: str) -> tuple[int, int]:
    keys, _, values = width.partition("/")
    return int(keys), int(values or keys)


def _compile(job: tuple[Any, int, int, int, dict[str, Any], str], ptxas: Path | None) -> Row:
    """A row of the JSON file. In a process of its own, which alone imports Triton."""
    from libra_kernels.compiled import compile_kernel

    kernel, arch, head_dim, v_head_dim, shape, name = job
    made = compile_kernel(kernel, arch, head_dim=head_dim, v_head_dim=v_head_dim, ptxas=ptxas, **shape)
    loop = made.loop
    return {
        "rung": 3,
        "kernel": kernel,
        "arch": arch,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "dtype": made.dtype,
        "block": made.block,
        "group": made.group,
        "rows": made.launch.rows,
        "keys": made.launch.keys,
        "num_warps": made.launch.num_warps,
        "num_stages": made.launch.num_stages,
        "overlap": made.launch.overlap,
        "registers": made.registers,
        "spill_bytes": made.spill_bytes,
        "shared_bytes": made.shared_bytes,
        "tmem_columns": made.tmem_columns,
        "tensor_core_instructions": made.tensor_core_instructions,
        "blocks_per_sm": made.ctas,
        "loop_instructions": loop.instructions,
        "loop_masked_instructions": loop.masked_instructions,
        "loop_tensor_core_instructions": loop.tensor_instructions,
        "loop_mufu_instructions": loop.mufu_instructions,
        "issue_share": round(loop.issue_share, 4),
        "tensor_cycles": round(loop.tensor_cycles),
        "issue_cycles": loop.issue_cycles,
        "mufu_cycles": loop.mufu_cycles,
        "alu_cycles": loop.alu_cycles,
        "l2_cycles": round(loop.l2_cycles),
        "turn_cycles": round(loop.turn_cycles),
        "serial_share": round(loop.serial_share, 3),
        "bound": round(made.share, 3),
        "remarks": [*made.complaints(), *made.remarks],
        "shape": name,
    }


def _as_json(rows: Sequence[Row]) -> str:
    """A list, one row on each line."""
    lines = (json.dumps({key: value for key, value in row.items() if key != "shape"}) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]"


def _cells(row: Row) -> dict[str, str]:
    width = str(row["head_dim"])
    if row["v_head_dim"] != row["head_dim"]:
        width += f"/{row['v_head_dim']}"
    return {
        "kernel": row["kernel"],
        "sm": str(row["arch"]),
        "head_dim": width,
        "rows": str(row["rows"]),
        "keys": str(row["keys"]),
        "warps": str(row["num_warps"]),
        "stages": str(row["num_stages"]) + ("+" if row["overlap"] else ""),
        "registers": str(row["registers"]),
        "spill": str(row["spill_bytes"]),
        "shared": f"{row['shared_bytes'] / 1024:.0f}",
        "tmem": str(row["tmem_columns"] or ""),
        "tensor": str(row["tensor_core_instructions"]),
        "blocks": str(row["blocks_per_sm"]),
        "loop": f"{row['loop_tensor_core_instructions']}/{row['loop_instructions']} {row['issue_share']:.1%}",
        "cycles": f"{row['tensor_cycles']}/{row['turn_cycles']}",
        "serial": f"{row['serial_share']:.2f}",
        "bound": f"{row['bound']:.2f}" + ("!" if row["remarks"] else ""),
    }


def _others(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """For each other shape: what spills there, and what ptxas had to remark on."""
    found: dict[str, tuple[list[str], list[str]]] = {row["shape"]: ([], []) for row in rows if row["shape"]}
    for row in rows:
        if row["shape"]:
            spills, remarks = found[row["shape"]]
            at = f"{row['kernel']} sm_{row['arch']} {_cells(row)['head_dim']}"
            if row["spill_bytes"]:
                spills.append(f"{at}: {row['spill_bytes']}")
            if row["remarks"]:
                remarks.append(at)
    return [
        (name, ", ".join(spills) or "none", ", ".join(remarks) or "none") for name, (spills, remarks) in found.items()
    ]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    for i, argument in enumerate(arguments):
        if argument == "--json" and (i + 1 == len(arguments) or arguments[i + 1].startswith("--")):
            arguments[i] = "--json=-"
    main(tyro.cli(Options, args=arguments))
