"""NVIDIA GPUs to compile for on a machine that has none: their figures, and a mesh of devices only a compiler sees.

`jax.jit(f).lower(...).compile()` on such a mesh runs XLA's whole pipeline, Triton kernels and the schedule included;
the result cannot be run. Needs the `preflight` extra: XLA's CUDA compiler and ptxas as wheels, no driver. Figures are
those that OpenXLA publishes for these devices (xla/backends/gpu/target_config/specs).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

_F64, _F32, _S32, _S64, _F16, _BF16 = 12, 11, 4, 8, 10, 16  # xla's numbers of element types
_EIGHT_BITS = (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What XLA's compiler wants to know of a GPU. Sizes in bytes, clocks in GHz, rates per core and clock.

    compute_capability: (major, minor). memory_bytes: what a process can allocate from, before XLA's own reserve.
    fma_rate: dense 16-bit multiply-adds that a core's matrix units do per clock.
    """

    name: str
    compute_capability: tuple[int, int]
    cores: int
    memory_bytes: int
    memory_bytes_per_second: int
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    clock_ghz: float
    matrix_clock_ghz: float
    fma_rate: int
    fp64_fma_rate: int
    pcie_bytes_per_second: int


TARGETS = {
    "h100": GpuTarget(
        name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), cores=132, memory_bytes=84942979072,
        memory_bytes_per_second=3352320000000, l2_bytes=52428800, shared_bytes_per_core=233472,
        shared_bytes_per_block=232448, clock_ghz=1.98, matrix_clock_ghz=1.8295201, fma_rate=2048, fp64_fma_rate=128,
        pcie_bytes_per_second=34359738368,
    ),
    "h200": GpuTarget(
        name="NVIDIA H200", compute_capability=(9, 0), cores=132, memory_bytes=151397597184,
        memory_bytes_per_second=4800000000000, l2_bytes=52428800, shared_bytes_per_core=233472,
        shared_bytes_per_block=232448, clock_ghz=1.98, matrix_clock_ghz=1.8295201, fma_rate=2048, fp64_fma_rate=128,
        pcie_bytes_per_second=34359738368,
    ),
    "b200": GpuTarget(
        name="NVIDIA B200", compute_capability=(10, 0), cores=148, memory_bytes=191514411008,
        memory_bytes_per_second=7672320000000, l2_bytes=132644864, shared_bytes_per_core=233472,
        shared_bytes_per_block=232448, clock_ghz=1.965, matrix_clock_ghz=1.8353101, fma_rate=4096, fp64_fma_rate=64,
        pcie_bytes_per_second=68719476736,
    ),
}  # fmt: skip


def target_mesh(
    target: str, shape: tuple[int, ...], axis_names: tuple[str, ...], topology: tuple[int, int, int] | None = None
) -> Mesh:
    """A mesh of devices of a GPU that need not be there, to lower and compile on.

    target: one of `TARGETS`. shape, axis_names: of the mesh. topology: (slices, hosts per slice, GPUs per host), as
    many in all as the mesh has; None: one host.

    Raises ValueError for an unknown target or numbers that do not fit, RuntimeError when the `preflight` extra is
    missing.
    """
    if target not in TARGETS:
        raise ValueError(f"target ({target!r}) must be one of {sorted(TARGETS)}")
    size = math.prod(shape)
    topology = (1, 1, size) if topology is None else topology
    if math.prod(topology) != size:
        raise ValueError(f"topology {topology} has {math.prod(topology)} GPUs, the mesh {shape} needs {size}")
    for module in ("jax_plugins.xla_cuda13", "jax_cuda13_plugin"):
        if _is_missing(module):
            raise RuntimeError(
                f"compiling for {target} needs XLA's CUDA compiler ({module} is missing): "
                f"pip install 'libra-jax[preflight]'"
            )
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=_target_config(TARGETS[target]), topology="x".join(map(str, topology))
    ).devices
    return Mesh(np.array(devices).reshape(shape), axis_names, axis_types=(AxisType.Auto,) * len(axis_names))


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def _target_config(gpu: GpuTarget) -> str:
    """XLA's GpuTargetConfigProto as text."""
    major, minor = gpu.compute_capability
    scalar = {
        _S32: (gpu.clock_ghz, 64), _S64: (gpu.clock_ghz, 64), _F16: (gpu.clock_ghz, 256), _F32: (gpu.clock_ghz, 128),
        _F64: (gpu.clock_ghz, 64), _BF16: (gpu.clock_ghz, 256),
    }  # fmt: skip
    matrix = {
        _F16: (gpu.matrix_clock_ghz, gpu.fma_rate), _BF16: (gpu.matrix_clock_ghz, gpu.fma_rate),
        _F32: (gpu.matrix_clock_ghz, gpu.fma_rate // 2), _F64: (gpu.clock_ghz, gpu.fp64_fma_rate),
        **dict.fromkeys(_EIGHT_BITS, (gpu.matrix_clock_ghz, 2 * gpu.fma_rate)),
    }  # fmt: skip
    return f"""
        gpu_device_info {{
          name: "{gpu.name}" device_vendor: "NVIDIA Corporation" model_str: "{gpu.name}"
          platform_version: "Compute Capability {major}.{minor}a"
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
          core_count: {gpu.cores} fpus_per_core: 128 clock_rate_ghz: {gpu.clock_ghz}
          device_memory_size: {gpu.memory_bytes} memory_bandwidth: {gpu.memory_bytes_per_second}
          l2_cache_size: {gpu.l2_bytes} pcie_bandwidth: {gpu.pcie_bytes_per_second}
          shared_memory_per_core: {gpu.shared_bytes_per_core} shared_memory_per_block: 49152
          shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          scalar_unit_description {{ {_rates(scalar, 64)} }}
          matrix_unit_description {{ {_rates(matrix, 4)} }}
          device_interconnect_info {{ active_links: 18 }} device_address_bits: 64 ecc_enabled: true
          driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0" cub_version: "3.1.2" collective_memory_granularity: 2097152
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{gpu.name}"
    """


def _rates(rates: dict[int, tuple[float, int]], units: int) -> str:
    """rates: by element type, clock and operations of a whole core per clock; XLA wants them per unit."""
    return " ".join(
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {clock} units_per_core: {min(units, rate)} "
        f"ops_per_clock: {max(1, rate // units)} }} }}"
        for key, (clock, rate) in rates.items()
    )
