"""What the memory of one device is for, at the moment when most of it is taken.

XLA lists the buffers that live at that moment. Each is put under one heading, by the argument it belongs to, by the
part of the model whose operation made it, or by its shape; a rule for each stands in `_part`. What XLA takes beyond the
sum of live buffers has a heading of its own, so the parts add up to the peak, to the byte.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from libra_jax.hlo import Program, type_bytes
from libra_jax.preflight.program import CompiledStep

PARTS = {
    "parameters": "float32, this device's share: arguments of the program",
    "optimizer": "mean and mean square of every gradient: arguments of the program",
    "batch and plans": "tokens, targets, positions and plan tables: arguments of the program",
    "gradients": "float32, shaped like the parameters' shares, in any order of dimensions",
    "gathered weights": "parameters that are whole for use: results of all-gathers, and gradients on their way back",
    "kept activations": "what each layer keeps for the backward pass: arrays with a leading layer axis",
    "attention": "made inside the operator: blocks, pages, what was received, partial gradients",
    "working memory": "everything else that lives: results inside a layer, the loss, copies",
    "gaps": "between buffers: what XLA takes in all, less the buffers above",
}
"""The parts, with what belongs to them."""

_OPERATOR = re.compile(r"jit\(_on_rank\)|libra_(?:dispatch|return)")
_SMALL_BYTES = 1 << 12


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One live at the peak. op_name: what made it; empty where XLA has forgotten."""

    name: str
    type: str
    op_name: str
    bytes: int
    part: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device. parts: by the names in `PARTS`; add up to peak_bytes. buffers: the largest first.
    state_bytes: {"parameters", "optimizer"} as shapes and shardings of the state give them."""

    peak_bytes: int
    parts: dict[str, int]
    buffers: tuple[Buffer, ...]
    state_bytes: dict[str, int]


def read_memory(step: CompiledStep, program: Program, num_layers: int) -> Memory:
    """Raises ValueError when XLA's reports cannot be read, or contradict each other."""
    params = step.blueprint.shapes["params"]
    shares = {_share(leaf) for leaf in jax.tree.leaves(params)}
    types = _types(step.buffers)
    made_by = {line.name: line for lines in program.computations.values() for line in lines}
    buffers = []
    for name, index, size in _live_at_peak(step.live_ranges):
        line = made_by.get(name)
        buffer_type = types.get((name, index), "")
        op_name = line.op_name.replace("\\'", "'") if line is not None else ""
        part = _part(name, buffer_type, op_name, size, shares, num_layers)
        buffers.append(Buffer(name + (f"{{{index}}}" if index else ""), buffer_type, op_name, size, part))
    memory = step.memory
    peak = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    )  # fmt: skip
    peak = max(peak, memory.peak_memory_in_bytes)
    parts = dict.fromkeys(PARTS, 0)
    for buffer in buffers:
        parts[buffer.part] += buffer.bytes
    parts["gaps"] = peak - sum(parts.values())
    if parts["gaps"] < 0:
        raise ValueError(f"XLA lists {peak - parts['gaps']} bytes of live buffers, and takes {peak} in all")
    state = {
        "parameters": _bytes_of(params),
        "optimizer": _bytes_of({k: v for k, v in step.blueprint.shapes.items() if k != "params"}),
    }
    return Memory(peak, parts, tuple(sorted(buffers, key=lambda b: -b.bytes)), state)


def _part(name: str, buffer_type: str, op_name: str, size: int, shares: set[int], num_layers: int) -> str:
    if op_name.startswith("state['params']"):
        return "parameters"
    if op_name.startswith("state["):
        return "optimizer"
    if op_name.startswith(("arrays[", "plans.")):
        return "batch and plans"
    if _OPERATOR.search(op_name):
        return "attention"
    if name.startswith("all-gather") or "fsdp_whole" in op_name:
        return "gathered weights"
    shape = re.match(r"(\w+)\[([\d,]*)\]", buffer_type)
    if shape is None or size < _SMALL_BYTES:
        return "working memory"
    sizes = [int(n) for n in shape[2].split(",") if n]
    if shape[1] == "f32" and math.prod(sizes) in shares:
        return "gradients"
    if num_layers > 1 and sizes and sizes[0] == num_layers:
        return "kept activations"
    return "working memory"


def _share(leaf: Any) -> int:
    """Elements that one device holds."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _bytes_of(tree: Any) -> int:
    return sum(_share(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _live_at_peak(report: str) -> Iterator[tuple[str, str, int]]:
    """(name, index in a tuple, bytes) of the buffers in XLA's live-range report that live at its peak."""
    found = re.search(r"^\s*Live ranges at \d+ \(peak\):\n((?:\s+\S+\{[\d,]*\}: \d+ bytes.*\n)+)", report, re.M)
    if found is None:
        raise ValueError("XLA's live-range report has no list of buffers at the peak")
    for name, index, size in re.findall(r"^\s+(\S+?)\{([\d,]*)\}: (\d+) bytes", found[1], re.M):
        yield name, index, int(size)


def _types(report: str) -> dict[tuple[str, str], str]:
    """{(name, index in a tuple): type} of all values in XLA's buffer assignment."""
    values = re.findall(r"value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?[^>]*> \(size=\d+,offset=\d+\): (.+)$", report, re.M)
    if not values:
        raise ValueError("XLA's buffer assignment lists no values")
    return {(name, index): kind for name, index, kind in values}


def check_sizes(memory: Memory) -> None:
    """Raises ValueError if a buffer's type and its size in the report disagree by more than padding."""
    for buffer in memory.buffers:
        if buffer.type and not buffer.type.startswith("(") and type_bytes(buffer.type) > buffer.bytes:
            raise ValueError(f"{buffer.name} is {buffer.type}, and XLA reports {buffer.bytes} bytes")
