"""Reads the text of a program that XLA has compiled: computations, instructions, groups of devices, Triton kernels.

Takes `compiled.as_text()`, gives frozen dataclasses; what it cannot read it refuses. Knows nothing of schedules or of
this package. Text in, no jax.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Iterator, Mapping

Groups = tuple[tuple[int, ...], ...]
"""Sets of devices that exchange with each other, as places in the mesh, flattened."""

_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. type: its result's, as text. operands: names. rest: attributes, as text."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    rest: str

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return type_bytes(self.type)

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from: scopes and primitive, joined by slashes. May be empty."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute such as `body` or `calls` names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. computations: their instructions, in the order of the text."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    devices: int
    scheduled: bool


@dataclasses.dataclass(frozen=True)
class TritonCall:
    """What a custom call to a Triton kernel carries. warps: of a program; shared_bytes: that it asks for."""

    name: str
    function: str
    warps: int
    shared_bytes: int
    ptx: str


def read_program(text: str) -> Program:
    """The program of `compiled.as_text()`. Raises ValueError if the text is no compiled program."""
    head, _, _ = text.partition("\n")
    if not head.startswith("HloModule"):
        raise ValueError(f"not the text of a compiled program; it begins with {head[:40]!r}")
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = None, None, []
    for line in text.splitlines():
        if name is None:
            if header := _HEADER.match(line):
                name, lines = header[2], []
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name], name = tuple(lines), None
        elif line.strip():
            lines.append(_instruction(line))
    if entry is None:
        raise ValueError("the program has no ENTRY computation")
    partitions = re.search(r"num_partitions=(\d+)", head)
    replicas = re.search(r"replica_count=(\d+)", head)
    devices = int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)
    return Program(computations, entry, devices, "is_scheduled=true" in head)


def type_bytes(type_text: str) -> int:
    """Bytes of a type, tuples summed. Raises ValueError for an element type that it does not know."""
    return (
        sum(_bits(kind) * math.prod(map(int, filter(None, sizes.split(",")))) for kind, sizes in _shapes(type_text))
        // 8
    )


def groups_of(instruction: Instruction, devices: int) -> Groups:
    """The sets of devices that a collective joins. A permutation joins all that its pairs link.

    devices: of the program; stands for `replica_groups={}`. Raises ValueError for a form that it cannot read.
    """
    rest = instruction.rest
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", rest):
        return _linked([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])])
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})?\}", rest):
        if not listed[1]:
            return (tuple(range(devices)),)
        return tuple(tuple(int(i) for i in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if by_axis := re.search(r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\] \{([^}]*)\}", rest):
        return _by_axis(by_axis[1], by_axis[2], instruction)
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, sizes = ([int(i) for i in part.split(",")] for part in (iota[1], iota[2]))
        order = [int(i) for i in iota[3].split(",")] if iota[3] else list(range(len(sizes)))
        return _rows(sizes, order, math.prod(shape[1:]))
    raise ValueError(f"cannot read which devices {instruction.name} joins: {rest[:200]}")


@functools.lru_cache(maxsize=64)
def triton_call(rest: str) -> TritonCall | None:
    """The Triton kernel in the attributes of a custom call, as jax-triton wrote it; None if it is another call."""
    if 'custom_call_target="triton_kernel_call' not in rest:
        return None
    found = re.search(r'opaque = "((?:[^"\\]|\\.)*)"', rest) or re.search(r'backend_config="((?:[^"\\]|\\.)*)"', rest)
    if found is None:
        raise ValueError(f"a Triton kernel call without its kernel: {rest[:200]}")
    anykernel = dict(_fields(zlib.decompress(_unescape(found[1]))))
    call = dict(_fields(_bytes(anykernel[1])))
    kernel = dict(_fields(_bytes(call[1])))
    function = _bytes(kernel[1]).decode()
    name = _bytes(anykernel[4]).decode() if 4 in anykernel else function
    return TritonCall(name, function, _number(kernel[2]), _number(kernel.get(3, 0)), _bytes(kernel[4]).decode())


def _instruction(line: str) -> Instruction:
    head = _NAME.match(line)
    if head is None:
        raise ValueError(f"cannot read this line of the program: {line[:200]}")
    text = line[head.end() :]
    cut = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    type_text, text = text[:cut], text[cut:].lstrip()
    opcode, _, _ = text.partition("(")
    end = _closing(text, len(opcode))
    return Instruction(
        head[2], opcode, type_text, tuple(re.findall(r"%([\w.\-]+)", text[len(opcode) : end])), text[end + 1 :]
    )


def _closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"a parenthesis is not closed in {text[:200]}")


def _shapes(type_text: str) -> list[tuple[str, str]]:
    return _SHAPE.findall(type_text)


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    if narrow := re.match(r"f([48])e", kind):
        return int(narrow[1])
    raise ValueError(f"unknown element type {kind!r}")


def _linked(pairs: list[tuple[int, int]]) -> Groups:
    leader: dict[int, int] = {}

    def find(i: int) -> int:
        while leader.setdefault(i, i) != i:
            i = leader[i]
        return i

    for a, b in pairs:
        leader[find(a)] = find(b)
    groups: dict[int, list[int]] = {}
    for i in sorted(leader):
        groups.setdefault(find(i), []).append(i)
    return tuple(map(tuple, groups.values()))


def _by_axis(mesh: str, joined_text: str, instruction: Instruction) -> Groups:
    """Groups along some axes of a mesh, or along parts of axes, written 'name':(before)size."""
    sizes: list[int] = []
    joined: list[int] = []
    wanted = {}
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", joined_text):
        wanted.setdefault(name, []).append((int(before or 0), int(size or 0)))
    for name, text in re.findall(r"'(\w+)'=(\d+)", mesh):
        whole, parts = int(text), sorted(wanted.pop(name, []))
        done = 1
        for before, size in parts:
            before, size = (1, whole) if not before else (before, size)
            if before % done or whole % (before * size):
                raise ValueError(f"cannot read which devices {instruction.name} joins: {instruction.rest[:200]}")
            if before > done:
                sizes.append(before // done)
            joined.append(len(sizes))
            sizes.append(size)
            done = before * size
        if done < whole:
            sizes.append(whole // done)
    if wanted or "device_ids" in instruction.rest.partition("replica_groups=")[2].partition("{")[0]:
        raise ValueError(f"cannot read which devices {instruction.name} joins: {instruction.rest[:200]}")
    order = [axis for axis in range(len(sizes)) if axis not in joined] + joined
    return _rows(sizes, order, math.prod(sizes[axis] for axis in joined))


def _rows(sizes: list[int], order: list[int], width: int) -> Groups:
    """arange(product).reshape(sizes).transpose(order), cut into rows of `width`."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    ids = [0]
    for axis in order:
        ids = [base + i * strides[axis] for base in ids for i in range(sizes[axis])]
    return tuple(tuple(ids[i : i + width]) for i in range(0, len(ids), width))


_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.S)


def _unescape(text: str) -> bytes:
    letters = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
    return _ESCAPE.sub(
        lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else letters.get(m[1], m[1]), text.encode("latin-1")
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of the fields of a serialised protocol buffer."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            yield key >> 3, data[at : at + size]
            at += size


def _bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value


def _number(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value
