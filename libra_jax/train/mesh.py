"""The mesh of a run, and how its arrays lie on it.

Mesh axes "pool", "dp", "cp", "tp": which pool, which sequence in it, which rank of the sequence's CP group, which part
of the heads; before them "pp", which stage, where there is a pipeline. Batches are sharded like the sequences,
parameters and optimizer state over all ranks, FSDP-style.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from libra_jax.attention import MESH_AXES
from libra_jax.models.axes import PIPELINE_AXIS
from libra_jax.models.fsdp import spread_spec, tensor_dimension
from libra_jax.models.moe import expert_spec
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.train.config import MeshConfig

_PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
)
"""Virtual devices share the machine's cores. XLA ends the process when one of them is 40 seconds late at a collective,
which on a busy machine is only slow."""


def start_devices(config: MeshConfig) -> None:
    """Makes the virtual CPU devices a config asks for; other platforms' devices are as they are.

    Has to be called before JAX is first used. Raises ValueError if JAX has started with another number of them. XLA
    reads the patience it needs from XLA_FLAGS, where flags that are set already stay as they are.
    """
    if config.cpu_devices is None:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in _PATIENCE if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *missing])
    try:
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and len(jax.devices()) != config.cpu_devices:
            raise ValueError(
                f"mesh.cpu_devices ({config.cpu_devices}) cannot be made: JAX has already started with "
                f"{len(jax.devices())} devices"
            ) from error


def make_mesh(
    config: MeshConfig,
    devices: list[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # jax exports it as a variable
) -> Mesh:
    """The mesh with the axes that the config says.

    devices: None takes all there are. Raises ValueError with both numbers if the mesh does not fit them.
    """
    found = jax.devices() if devices is None else devices
    if config.devices != len(found):
        if found[0].platform == "cpu":
            way_out = f"; for as many virtual ones set --mesh.cpu-devices {config.devices}"
        else:
            way_out = "; to run on virtual CPU devices set JAX_PLATFORMS=cpu" if config.cpu_devices else ""
        raise ValueError(
            f"the mesh needs {product_of(config)} devices, and there are {len(found)} ({found[0].platform}){way_out}"
        )
    axes = config.axes
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=found)


def product_of(config: MeshConfig) -> str:
    """The devices that a mesh needs, as a product in words: "pools * pool_size * cp = 2 * 2 * 1 = 4"."""
    names = ["pools", "pool_size", "cp", *(name for name in ("tp", "pp") if getattr(config, name) > 1)]
    sizes = (str(getattr(config, name)) for name in names)
    return f"{' * '.join(names)} = {' * '.join(sizes)} = {config.devices}"


def regrouped(mesh: Mesh, config: MeshConfig) -> Mesh:
    """The devices of `mesh` in the same order, grouped as `config` says.

    Sequences and parameters lie over axes in this order, so every array stays where it is: only which ranks are a pool
    changes, and with it how plans lie. Raises ValueError with both numbers if there are other devices.
    """
    if config.devices != mesh.size:
        raise ValueError(f"a mesh of {mesh.size} devices cannot be regrouped into one of {config.devices}")
    axes = config.axes
    return Mesh(mesh.devices.reshape(tuple(axes.values())), tuple(axes), axis_types=mesh.axis_types)


def batch_shardings(mesh: Mesh, arrays: dict[str, Any], plans: Any) -> tuple[dict[str, NamedSharding], Any]:
    """Shardings of a step's arrays (micro_steps, sequences, seq_len) and tables (micro_steps, pools, dp, cp, ...)."""
    rows = NamedSharding(mesh, PartitionSpec(None, ("pool", "dp"), "cp"))
    tables = NamedSharding(mesh, PartitionSpec(None, *MESH_AXES))
    return dict.fromkeys(arrays, rows), jax.tree.map(lambda _: tables, plans)


def local_rows(mesh: Mesh) -> np.ndarray:
    """The sequences of a micro-step that lie on this process' devices, wholly or in part: (rows,) int64, ascending.

    Counted over axes "pool" and "dp"; what `StepBatches` takes as `rows`.
    """
    mine = np.vectorize(lambda device: device.process_index == jax.process_index())(mesh.devices)
    others = tuple(i for i, axis in enumerate(mesh.axis_names) if axis not in ("pool", "dp"))
    return np.flatnonzero(mine.any(axis=others).ravel())


def place_batch(
    mesh: Mesh,
    arrays: dict[str, Any],
    plans: Any,
    rows: np.ndarray | None = None,
    pools: np.ndarray | None = None,
) -> tuple[dict[str, jax.Array], Any]:
    """A step's arrays and tables on the mesh, sharded as `batch_shardings` says.

    arrays: (micro_steps, rows, seq_len), plans: tables (micro_steps, pools, dp, cp, ...), NumPy. rows, pools: which of
        the step's they are, ascending: at least what lies on this process' devices, else ValueError. None: the whole
        step's.
    """

    def place(array: Any, sharding: NamedSharding, numbers: np.ndarray | None, size: int, what: str) -> jax.Array:
        if numbers is None:
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        def part(index: Any) -> Any:
            first, stop, _ = index[1].indices(size)
            there = np.searchsorted(numbers, np.arange(first, stop))
            if there[-1] >= len(numbers) or (numbers[there] != np.arange(first, stop)).any():
                raise ValueError(f"{what} {first} to {stop - 1} lie on this process' devices, but it has {numbers}")
            return array[(index[0], slice(there[0], there[-1] + 1), *index[2:])]

        return jax.make_array_from_callback((array.shape[0], size, *array.shape[2:]), sharding, part)

    row_shardings, table_shardings = batch_shardings(mesh, arrays, plans)
    side_by_side = mesh.shape["pool"], mesh.shape["pool"] * mesh.shape["dp"]
    return (
        {name: place(array, row_shardings[name], rows, side_by_side[1], "rows") for name, array in arrays.items()},
        jax.tree.map(
            lambda table, sharding: place(table, sharding, pools, side_by_side[0], "pools"), plans, table_shardings
        ),
    )


def state_shardings(mesh: Mesh, state: Any, model: Qwen3Config) -> Any:
    """Shardings of a state's arrays (or their shapes): the longest dimension that all ranks divide, else replicated;
    experts as `expert_spec` says, and what axis "tp" shares as `tensor_dimension` says. In a pipeline a stage's ranks
    have its layers; the rest lies over all.

    The first dimension of stacked layers is never chosen: a scan takes one slice of it at a time.
    """

    stages = mesh.shape.get(PIPELINE_AXIS, 1)

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = [getattr(key, "key", None) for key in path]
        stacked = "layers" in names
        if model.moe is not None and stacked and names[-1] in ("gate", "up", "down"):
            spec = expert_spec(leaf.shape[1:], model.moe, mesh, first=1)
        else:
            tensor = tensor_dimension(path, mesh) if stacked else None
            spec = spread_spec(leaf.shape, mesh, first=1 if stacked else 0, tensor=tensor)
        return NamedSharding(mesh, _over_stages(spec, leaf.shape, stacked, mesh) if stages > 1 else spec)

    return jax.tree.map_with_path(sharding, state)


def _over_stages(spec: PartitionSpec, shape: tuple[int, ...], stacked: bool, mesh: Mesh) -> PartitionSpec:
    """`spec`, which is over a stage's ranks, over the stages as well: by layer, or along the same dimension if the
    stages divide what a rank has of it."""
    if stacked:
        return PartitionSpec(PIPELINE_AXIS, *spec[1:])
    parts = [
        (*axes, PIPELINE_AXIS) if axes and size % mesh.size == 0 else axes
        for axes, size in zip(spec, shape, strict=False)
    ]
    return PartitionSpec(*parts)
