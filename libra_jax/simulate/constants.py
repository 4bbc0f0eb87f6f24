"""Every number that the cluster model takes from outside, with its unit and where it comes from, in one table.

`constants("H100")` gives the table of a GPU; `changed(table, {"across": 40e9})` is what `libra simulate --set` does.
Speeds of attention kernels are published curves, or a file that `benchmarks/gpu_check.py` measured (`kernel`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from libra_jax.links import Links
from libra_jax.workload import CostModel

GPUS = ("H100", "H200", "B200")


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number, its unit, and its source: a publication, a data sheet, a measurement, or an assumption that says so."""

    name: str
    value: float
    unit: str
    source: str


Constants = Mapping[str, Constant]
"""By name."""

_DATA_SHEET = "NVIDIA data sheet, dense bfloat16"
_COMMON = (
    Constant("ranks_per_node", 8, "GPUs", "DGX and HGX hosts"),
    Constant("across", 50e9, "B/s", "one 400 Gb/s port for each GPU; NCCL gets 46 to 48e9 of it (nccl-tests, 290)"),
    Constant("inside_latency", 45e-6, "s", "NCCL all-gathers of 8 to 64 MiB, 8 H100: 43 to 55e-6 beyond their bytes"),
    Constant("across_latency", 60e-6, "s", "assumption: what one inside a node costs, and 15 us more"),
    Constant("pod_nodes", 32, "nodes", "assumption: nodes under one set of leaf switches, with full bandwidth"),
    Constant("oversubscription", 1, "x", "assumption: none; a rank's bandwidth beyond its pod is `across` over this"),
    Constant("gather_bytes", 2, "B/weight", "FSDP gathers weights in bfloat16, forward and backward"),
    Constant("reduce_bytes", 4, "B/weight", "FSDP sums gradients in float32, once a micro-step"),
    Constant("state_bytes", 16, "B/weight", "float32 weight, gradient and AdamW's two moments"),
    Constant("recompute", 1, "0 or 1", "layers keep their input and attention's results, and do the rest again"),
    Constant(
        "gather_overlap",
        1,
        "0 to 1",
        "assumption: share of a layer's time that hides its gathers; 17 of 23 run under work (preflight, 8B 256K)",
    ),
)
_OF = {
    "H100": (
        Constant("peak", 989.5e12, "FLOP/s", f"{_DATA_SHEET}, H100 SXM"),
        Constant("memory", 79.1, "GiB", "what XLA may use of 80 GB (docs/preflight.md)"),
        Constant(
            "products", 635e12, "FLOP/s", "0.8 of the best shape's 794.5e12 (ml-engineering's table of matmul speeds)"
        ),
        Constant("inside", 360e9, "B/s", "NCCL all-gather of 1 GiB over 8 H100, bus bandwidth (published with DistCA)"),
    ),
    "H200": (
        Constant("peak", 989.5e12, "FLOP/s", f"{_DATA_SHEET}, H200 SXM"),
        Constant("memory", 139.0, "GiB", "141 GB less what XLA leaves"),
        Constant("products", 635e12, "FLOP/s", "as H100: the same chip (ml-engineering finds no difference)"),
        Constant("inside", 360e9, "B/s", "as H100: the same NVLink"),
    ),
    "B200": (
        Constant("peak", 2250e12, "FLOP/s", f"{_DATA_SHEET}, HGX B200"),
        Constant("memory", 178.0, "GiB", "180 GB less what XLA leaves"),
        Constant("products", 1396e12, "FLOP/s", "0.8 of the best shape's 1745e12 (ml-engineering's table)"),
        Constant(
            "inside",
            720e9,
            "B/s",
            "assumption: twice H100's, as NVLink 5 is to NVLink 4 on data sheets (1.8, 0.9 TB/s)",
        ),
    ),
}


def constants(gpu: str) -> Constants:
    """The table of a GPU. Raises ValueError for one that is not in it."""
    if gpu not in _OF:
        raise ValueError(f"gpus ({gpu!r}) must be one of {', '.join(GPUS)}")
    return {constant.name: constant for constant in (*_OF[gpu], *_COMMON)}


def changed(table: Constants, values: Mapping[str, float]) -> Constants:
    """The table with other values, marked as the user's. Raises ValueError for names that are not in it and for numbers
    that are not finite and above 0 (0 is allowed where a constant says "0 or 1", and for latencies)."""
    new = dict(table)
    for name, value in values.items():
        if name not in table:
            raise ValueError(f"--set {name}: no constant is called that; there are {', '.join(sorted(table))}")
        unit = table[name].unit
        may_be_zero = unit.startswith("0 ") or unit == "s"
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            least = "of 0 or more" if may_be_zero else "above 0"
            raise ValueError(f"--set {name}={value:g}: must be a finite number {least}")
        if (unit == "0 or 1" and value not in (0, 1)) or (unit == "0 to 1" and value > 1):
            raise ValueError(f"--set {name}={value:g}: must be {unit}")
        if unit in ("GPUs", "nodes") and value != int(value):
            raise ValueError(f"--set {name}={value:g}: must be a whole number of {unit}")
        if unit == "x" and value < 1:
            raise ValueError(f"--set {name}={value:g}: must be at least 1")
        new[name] = dataclasses.replace(table[name], value=value, source="set by the user")
    if new["products"].value > new["peak"].value:
        raise ValueError(f"products ({new['products'].value:g}) must be at most peak ({new['peak'].value:g}) FLOP/s")
    return new


def links(table: Constants) -> Links:
    """The wires that the table describes."""
    return Links(
        ranks_per_node=int(table["ranks_per_node"].value),
        inside=table["inside"].value,
        across=table["across"].value,
        inside_latency=table["inside_latency"].value,
        across_latency=table["across_latency"].value,
    )


# ------------------------------------------------------------------------------------------------- attention kernels


@dataclasses.dataclass(frozen=True)
class Curve:
    """Published speeds of a kernel, causal, head dim 128, bfloat16: TFLOP/s by tokens of a document, forward and
    backward. backward: of the same publication; empty: `share` of another curve's."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    source: str


_FA3 = "FlashAttention-3 (arXiv 2407.08608), H100 SXM; backward probably not causal"
CURVES = {
    "fa3": Curve({2048: 521, 4096: 579, 8192: 602, 16384: 616}, {4096: 542, 8192: 559, 16384: 561}, _FA3),
    "cudnn": Curve({2048: 484, 4096: 518, 8192: 529, 16384: 539}, {4096: 499, 8192: 518, 16384: 516}, _FA3 + ": cuDNN"),
}
KERNELS = ("triton", *CURVES)


def kernel(name: str, table: Constants) -> tuple[CostModel, str]:
    """A kernel's cost model, and where its numbers come from.

    name: "triton", the default of `CostModel`; "fa3" or "cudnn", fitted to published curves; or a file that
    `CostModel.save` wrote. Curves are an H100's and scaled to another GPU by peak FLOP/s, which the source then says;
    a file is taken as it is.

    Raises FileNotFoundError or ValueError for a file that is none.
    """
    if name not in KERNELS:
        if not Path(name).is_file():
            raise FileNotFoundError(f"kernel ({name!r}) must be one of {', '.join(KERNELS)} or a file: it is neither")
        return CostModel.load(Path(name)), f"measured: {name}"
    model = CostModel() if name == "triton" else fitted(CURVES[name])
    source = (
        "Triton's published forward speed (FlashAttention-3's comparison); backward assumed: FA3's, as much slower"
        if name == "triton"
        else CURVES[name].source
    )
    ratio = _OF["H100"][0].value / table["peak"].value
    if abs(ratio - 1) > 0.01:
        source += f", scaled by peak FLOP/s ({1 / ratio:.2f} times an H100's): not measured on this GPU"
    fields = ("page_seconds", "block_seconds", "backward_page_seconds", "backward_block_seconds")
    return dataclasses.replace(model, **{name: getattr(model, name) * ratio for name in fields}), source


def kernel_rows(table: Constants) -> list[list[str]]:
    """Of each kernel: its name; TFLOP/s on whole pages, forward and backward; what a block of queries costs besides, in
    pages, forward and backward; microseconds of a launch; source."""
    rows = []
    for name in KERNELS:
        model, source = kernel(name, table)
        flops = 4 * model.block**2 * model.head_dim * model.group / 1e12
        rows.append([
            name, f"{flops / model.page_seconds:.0f}", f"{2.5 * flops / model.backward_page_seconds:.0f}",
            f"{model.block_seconds / model.page_seconds:.2f}",
            f"{model.backward_block_seconds / model.backward_page_seconds:.2f}", f"{1e6 * model.launch_seconds:.0f}",
            source,
        ])  # fmt: skip
    return rows


KERNEL_COLUMNS = ("kernel", "forward", "backward", "block, forward", "block, backward", "launch, us", "source")
"""Of `kernel_rows`."""


def fitted(curve: Curve) -> CostModel:
    """Seconds a page and a block, from published speeds, by least squares on relative errors of 1 / speed = a + b / n.

    With n blocks in a document a causal kernel visits n (n + 1) / 2 pages for n n / 2 pages' worth of FLOPs, one that
    is not n n for n n: the backward pass's curves are taken as not causal. Launches keep the default's time.
    """
    usual = CostModel()
    work = 2 * usual.block**2 * usual.group
    slope, level = _line(curve.forward, work * (usual.head_dim + usual.v_head_dim))
    page, block = level, max(slope - level, 0.0) / 2
    back_block, back_page = _line(curve.backward, work * (3 * usual.head_dim + 2 * usual.v_head_dim))
    return dataclasses.replace(
        usual,
        page_seconds=page,
        block_seconds=block,
        backward_page_seconds=back_page,
        backward_block_seconds=back_block,
    )


def _line(speeds: Mapping[int, float], flops: int) -> tuple[float, float]:
    """b and a, in seconds for `flops`."""
    n = np.array(list(speeds), np.float64) / CostModel().block
    rate = np.array(list(speeds.values())) * 1e12
    a, b = np.linalg.lstsq(np.stack([rate, rate / n], axis=1), np.ones_like(n), rcond=None)[0]
    return max(float(b), 0.0) * flops, float(a) * flops
