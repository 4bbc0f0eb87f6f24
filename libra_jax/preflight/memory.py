"""What the memory of one device is for, at the moment when most of it is taken.

XLA sets memory aside in allocations: one for each argument and result, and large ones in which the buffers of the
program take turns. Its reports give every buffer's place and the times between which it lives; so they say what stands
in a large allocation when it is fullest. Each byte there is put under one heading: by the argument it belongs to, by
the part of the model whose operation made it, or by its shape; the rules stand in `_part`. Room that is empty at that
moment has a heading of its own, so the parts add up to the peak, to the byte.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from libra_jax.hlo import Program, type_bytes
from libra_jax.preflight.program import CompiledStep

PARTS = {
    "parameters": "float32, this device's share: arguments of the program",
    "optimizer": "mean and mean square of every gradient: arguments of the program",
    "batch and plans": "tokens, targets, positions and plan tables: arguments of the program",
    "gradients": "float32, shaped like the parameters' shares, in any order of dimensions",
    "gathered weights": "parameters that are whole for use: results of all-gathers",
    "kept activations": "what each layer keeps for the backward pass: arrays with a leading layer axis",
    "attention": "made inside the operator: blocks, pages, what was received, partial gradients",
    "working memory": "everything else that lives: results inside a layer, the loss, copies",
    "gaps": "room that XLA sets aside and that is empty at that moment",
}
"""The parts, with what belongs to them."""

_OPERATOR = re.compile(r"jit\(_on_rank\)|libra_(?:node_)?(?:dispatch|return)")
_SMALL_BYTES = 1 << 12
_ORDER = [part for part in PARTS if part != "working memory"] + ["working memory"]


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
    made_by = {line.name: line for lines in program.computations.values() for line in lines}
    lives = _lives(step.live_ranges)

    def named(value: _Value) -> Buffer:
        line = made_by.get(value.name)
        op_name = line.op_name.replace("\\'", "'") if line is not None else ""
        part = _part(value, op_name, shares, num_layers)
        return Buffer(value.name + (f"{{{value.place}}}" if value.place else ""), value.type, op_name, value.size, part)

    allocations = list(_allocations(step.buffers))
    peak = sum(allocation.size for allocation in allocations)
    memory = step.memory
    total = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )  # fmt: skip
    parts, buffers = dict.fromkeys(PARTS, 0), []
    for allocation in allocations:
        for size, candidates in _standing(allocation, lives):
            buffer = min(map(named, candidates), key=lambda b: _ORDER.index(b.part))
            buffers.append(dataclasses.replace(buffer, bytes=size))
            parts[buffer.part] += size
    peak = max(peak, total)
    parts["gaps"] = peak - sum(parts.values())
    if parts["gaps"] < 0:
        raise ValueError(f"XLA's reports place {peak - parts['gaps']} bytes of buffers, and it takes {peak} in all")
    state = {
        "parameters": _bytes_of(params),
        "optimizer": _bytes_of({k: v for k, v in step.blueprint.shapes.items() if k != "params"}),
    }
    return Memory(peak, parts, tuple(sorted(buffers, key=lambda b: -b.bytes)), state)


def _part(value: _Value, op_name: str, shares: set[int], num_layers: int) -> str:
    if op_name.startswith("state['params']"):
        return "parameters"
    if op_name.startswith("state["):
        return "optimizer"
    if op_name.startswith(("arrays[", "plans.")):
        return "batch and plans"
    if _OPERATOR.search(op_name) or "S(1)" in value.type:
        return "attention"  # memory space 1 is for ragged exchanges, and only the operator has such
    if value.name.startswith("all-gather"):
        return "gathered weights"
    shape = re.match(r"(\w+)\[([\d,]*)\]", value.type)
    if shape is None or value.size < _SMALL_BYTES:
        return "working memory"
    sizes = [int(n) for n in shape[2].split(",") if n]
    if shape[1] == "f32" and math.prod(sizes) in shares:
        return "gradients"
    if num_layers > 1 and sizes[:1] == [num_layers]:
        return "kept activations"
    return "working memory"


def _share(leaf: Any) -> int:
    """Elements that one device holds."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _bytes_of(tree: Any) -> int:
    return sum(_share(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class _Value(NamedTuple):
    """A value of the program in its allocation. place: its place in a tuple, "" for the whole."""

    name: str
    place: str
    size: int
    offset: int
    type: str


_Region = tuple[int, list[_Value]]


class _Allocation(NamedTuple):
    """shared: values take turns in it; otherwise they are one and the same."""

    size: int
    shared: bool
    values: list[_Value]


def _allocations(report: str) -> Iterator[_Allocation]:
    """All of XLA's buffer assignment that is device memory of its own."""
    head = r"^allocation \d+: size (\d+),(.*)\n((?: value: .*\n?)*)"
    found = re.findall(head, report, re.M)
    if not found:
        raise ValueError("XLA's buffer assignment lists no allocations")
    value = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?[^>]*> \(size=(\d+),offset=(\d+)\): (.+)$", re.M)
    for size, kind, text in found:
        if "thread-local" in kind:  # inside kernels
            continue
        values = [_Value(name, at, int(n), int(place), what) for name, at, n, place, what in value.findall(text)]
        yield _Allocation(int(size), "preallocated-temp" in kind, values)


def _lives(report: str) -> dict[tuple[str, str], tuple[int, int]]:
    """{(name, index in a tuple): (first, last)}: when each value lives, by XLA's live-range report."""
    found = re.findall(r"^\s+(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", report, re.M)
    if not found:
        raise ValueError("XLA's live-range report lists no values")
    return {(name, index): (int(first), int(last)) for name, index, first, last in found}


def _standing(allocation: _Allocation, lives: Mapping[tuple[str, str], tuple[int, int]]) -> list[_Region]:
    """What stands in an allocation when it is fullest: (bytes, values that share them), by place."""
    if not allocation.values:
        return []
    if not allocation.shared:
        largest = max(value.size for value in allocation.values)
        arguments = [v for v in allocation.values if v.size == largest and v.name.startswith("param")]
        return [(allocation.size, arguments or [v for v in allocation.values if v.size == largest])]
    unknown = [value for value in allocation.values if (value.name, value.place) not in lives]
    if unknown:
        raise ValueError(f"XLA's live-range report says nothing of {unknown[0].name}")
    spans = [(*lives[value.name, value.place], value) for value in allocation.values]
    moments = sorted({first for first, _, _ in spans})  # memory grows when something begins to live

    def covered(moment: int) -> list[_Region]:
        alive = sorted((v for first, last, v in spans if first <= moment <= last), key=lambda v: (v.offset, -v.size))
        regions: list[_Region] = []
        end = 0
        for value in alive:
            new = min(value.size, value.offset + value.size - end)
            if new > 0:
                regions.append((new, [value]))
                end = value.offset + value.size
            elif regions and value.size == regions[-1][1][0].size and value.offset == regions[-1][1][0].offset:
                regions[-1][1].append(value)
        return regions

    return max((covered(moment) for moment in moments), key=lambda regions: sum(size for size, _ in regions))


def check_sizes(memory: Memory) -> None:
    """Raises ValueError if a buffer's type and its size in the reports disagree by more than padding."""
    for buffer in memory.buffers:
        if buffer.type and not buffer.type.startswith("(") and type_bytes(buffer.type) > max(buffer.bytes, 4096) * 2:
            raise ValueError(f"{buffer.name} is {buffer.type}, and XLA reports {buffer.bytes} bytes")
