"""What each config in configs/ asks of one device: state, gradients, what layers keep, attention and experts in use.

Takes the configs as they are; builds each run's state as shapes with shardings, so nothing is allocated and no device
is needed. Gives bytes that follow from shapes alone: a lower bound, to see which mesh is worth a `libra preflight`,
which compiles the step and has every buffer in it.

Run: python -m benchmarks.config_table [--report FILE]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import tyro
from jax.sharding import AbstractMesh, AxisType, Mesh
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import machine, markdown
from libra_jax.cli import load_config
from libra_jax.memory import attention_bytes
from libra_jax.train.config import TrainConfig
from libra_jax.train.step import State, plan_state

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to read, and where the report goes."""

    configs: Path = CONFIGS
    """Folder of configs."""
    report: Path | None = None
    """Write the table to this file, as Markdown."""


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one device.

    parameters, optimizer: float32, as they are sharded. largest, largest_bytes: the parameter of which a device has
    most. gradients: float32, sharded like the parameters, once; a second micro-step makes them anew and adds, of which
    XLA may keep a layer or all. kept: from all layers' forward passes to their backward passes. attention: one layer's
    while it runs backward. experts: one layer's, gathered for use, with their gradients.
    """

    parameters: int
    optimizer: int
    largest: str
    largest_bytes: int
    gradients: int
    kept: int
    attention: int
    experts: int

    @property
    def state(self) -> int:
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """One layer's attention and experts both count: experts' gradients may wait for their reduction meanwhile."""
        return self.state + self.gradients + self.kept + self.attention + self.experts


def state_of(config: TrainConfig) -> State:
    """The state of a run as shapes with shardings, on a mesh that has no devices."""
    axes = config.mesh.axes
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return plan_state(config, cast(Mesh, mesh)).shapes


def device_bytes(config: TrainConfig) -> DeviceBytes:
    """Raises ValueError for a remat policy whose residuals have no formula here."""
    state = state_of(config)
    by_leaf = dict(_leaf_bytes(state["params"]))
    parameters = sum(by_leaf.values())
    largest = max(by_leaf, key=lambda name: by_leaf[name])
    return DeviceBytes(
        parameters=parameters,
        optimizer=sum(size for _, size in _leaf_bytes({**state, "params": {}})),
        largest=largest,
        largest_bytes=by_leaf[largest],
        gradients=parameters,
        kept=config.model.num_layers * _kept(config),
        attention=attention_bytes(config.spec).backward.total,
        experts=_experts(config),
    )


def _leaf_bytes(tree: Any) -> Iterator[tuple[str, int]]:
    """(dotted name, bytes of it on one device) of every array."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        yield name, math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _kept(config: TrainConfig) -> int:
    """What one layer keeps under `remat`: its input, and with "attention" that one's output and log-sum-exp, too."""
    spec, model = config.spec, config.model
    layer_input = spec.tokens_per_rank * model.hidden_size * spec.item_bytes
    if model.remat == "full":
        return layer_input
    if model.remat != "attention":
        raise ValueError(f"what model.remat={model.remat!r} keeps has no formula: 'attention' and 'full' have")
    before = spec.tokens_per_rank * spec.head_dim * (spec.num_heads + 2 * spec.num_kv_heads) * spec.item_bytes
    return layer_input + attention_bytes(spec).kept - before


def _experts(config: TrainConfig) -> int:
    """One layer's experts as a rank has them in use, in the type of the computation, and their float32 gradients."""
    moe, spec = config.model.moe, config.spec
    if moe is None:
        return 0
    numbers = 3 * moe.num_experts * config.model.hidden_size * moe.intermediate_size
    return numbers * (spec.item_bytes + 4) // (spec.ranks if moe.experts == "spread" else 1)


def row_of(name: str, config: TrainConfig) -> dict[str, str]:
    """A config's line of the table."""
    mesh, model, need = config.mesh, config.model, device_bytes(config)
    return {
        "config": name,
        "GPUs": str(mesh.devices),
        "mesh": " x ".join(map(str, [*mesh.axes.values()][: 3 if mesh.tp == 1 else None])),
        "parameters": f"{model.num_parameters:,}",
        "active": f"{model.active_parameters:,}",
        "experts": "-" if model.moe is None else model.moe.experts,
        "sequences a step": str(config.micro_steps * mesh.sequences),
        "tokens a step": f"{config.step_tokens:,}",
        "state": size_of(need.state),
        "gradients": size_of(need.gradients),
        "largest parameter": f"{need.largest.removesuffix('.kernel')} {size_of(need.largest_bytes)}",
        "layers keep": size_of(need.kept),
        "attention": size_of(need.attention),
        "experts in use": size_of(need.experts),
        "sum": size_of(need.total),
    }


def size_of(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


LEGEND = """\
Bytes are one device's. Mesh: pools x sequences in a pool x ranks of a sequence. Active: parameters that a token goes
through, the whole embedding table included. State: parameters and AdamW's two moments, float32. Layers keep: what
`remat` leaves from the forward pass to the backward pass, all layers. Attention: one layer's backward pass by the
formula of `libra_jax/memory.py`, with room for received blocks and pages in full. Experts in use: one layer's, and
their gradients. Sum: all of these. Not in it: activations inside a layer, the loss, the next layer's weights that
arrive early, a second copy of gradients: 2 to 10 GiB more where it was compiled. Of an H100's 79.1 GiB, `libra
preflight` leaves 4 GiB to what XLA does not count, and says what the whole step takes."""


def main(options: Options) -> None:
    files = sorted(options.configs.glob("[!_]*.py"), key=lambda path: _order(load_config(str(path))))
    rows = [row_of(path.stem, load_config(str(path))) for path in files]
    table = Table(title="configs, bytes of one device")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("config", "largest parameter") else "right")
    for row in rows:
        table.add_row(*row.values())
    Console(width=max(Console().width, 260)).print(table, LEGEND)
    if options.report:
        lines = markdown(list(rows[0]), [list(row.values()) for row in rows])
        head = ["# Configs", "", machine("jax", "flax"), "", __doc__ or "", ""]
        options.report.write_text("\n".join([*head, *lines, "", LEGEND]) + "\n")


def _order(config: TrainConfig) -> tuple[int, int]:
    return config.model.num_parameters, config.seq_len


if __name__ == "__main__":
    main(tyro.cli(Options))
