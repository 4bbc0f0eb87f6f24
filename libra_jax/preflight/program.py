"""Compiles the whole training step of a config for GPUs that are not there.

Shapes of state, batch and plans follow from the config; no data is read and nothing is allocated. Beside the compiled
program XLA writes down which buffers it has placed, and which of them live at the moment of most memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax

from libra_jax.targets import target_mesh
from libra_jax.train.config import TrainConfig
from libra_jax.train.mesh import product_of
from libra_jax.train.step import Blueprint, compile_step, plan_state, step_shapes

Topology = tuple[int, int, int]
"""(slices, hosts in a slice, GPUs in a host)."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """blueprint: of the state, as it lies on the mesh. inputs: {"batch", "plans"} shapes with shardings.
    hlo: the program. memory: XLA's totals. buffers, live_ranges: XLA's own reports, as text. seconds: from tracing to
    the compiled program. remarks: warnings while it was traced."""

    blueprint: Blueprint
    hlo: str
    memory: Any
    buffers: str
    live_ranges: str
    seconds: float
    remarks: tuple[str, ...]


def parse_topology(text: str) -> Topology:
    """ "1x8x8" -> (1, 8, 8). Raises ValueError."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"topology ({text!r}) must be SLICESxHOSTSxGPUS, three whole numbers such as 1x8x8: one slice of eight "
            f"hosts with eight GPUs each"
        )
    slices, hosts, gpus = map(int, parts)
    return slices, hosts, gpus


def _way_out(gpus: int, axes: dict[str, int]) -> str:
    """The option that makes a mesh fit."""
    pools, rest = divmod(gpus, math.prod(axes.values()) // axes["pool"])
    return f"--mesh.pools {pools}" if not rest else "--mesh.pool-size and --mesh.cp"


def compile_for(config: TrainConfig, target: str, topology: Topology) -> CompiledStep:
    """The step of `config`, compiled for a cluster of `target` GPUs.

    Raises ValueError for an unknown target or a topology that does not have the GPUs of the config's mesh, RuntimeError
    when the packages to compile with are missing.
    """
    mesh_config = config.mesh
    slices, hosts, gpus = topology
    if slices * hosts * gpus != mesh_config.devices:
        raise ValueError(
            f"topology {slices}x{hosts}x{gpus} has {slices * hosts * gpus} GPUs, and the config's mesh needs "
            f"{product_of(mesh_config)}: name a topology of "
            f"{mesh_config.devices} GPUs, or set {_way_out(slices * hosts * gpus, mesh_config.axes)}"
        )
    axes = mesh_config.axes
    mesh = target_mesh(target, tuple(axes.values()), tuple(axes), topology)
    for module in ("triton", "jax_triton"):
        if importlib.util.find_spec(module) is None:
            raise RuntimeError(
                f"the attention kernels need {module}, which is missing: pip install 'libra-jax[preflight]'"
            )
    blueprint = plan_state(config, mesh)
    with tempfile.TemporaryDirectory(prefix="libra-preflight-") as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        begin = time.perf_counter()
        compiled = compile_step(config, mesh, blueprint, *step_shapes(config), options={"xla_dump_to": folder})
        seconds = time.perf_counter() - begin
        return CompiledStep(
            blueprint=blueprint,
            hlo=compiled.as_text(),
            memory=compiled.memory_analysis(),
            buffers=_dumped(folder, "buffer-assignment"),
            live_ranges=_dumped(folder, "live-range"),
            seconds=seconds,
            remarks=tuple(dict.fromkeys(str(w.message) for w in said if w.category is UserWarning)),
        )


def _dumped(folder: str, what: str) -> str:
    files = [path for path in Path(folder).glob(f"*-{what}.txt") if "jit_step" in path.name]
    if len(files) != 1:
        raise RuntimeError(
            f"XLA wrote {len(files)} reports {what} of the step, not one: this version of jax ({jax.__version__}) is "
            f"not known to preflight"
        )
    return files[0].read_text()
