"""What a compiled program exchanges between devices, and what it computes meanwhile.

Takes the text of a program that XLA:GPU has scheduled: there the order of the lines of a computation is the order in
which they are issued. What stands between an exchange's start and its end runs while it is under way. Loops (layers,
micro-steps) and calls are walked; an exchange in a loop is listed once, with the number of times that it runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from libra_jax.hlo import Groups, Instruction, Program, groups_of, read_program, triton_call, type_bytes

DISPATCH_SCOPE, RETURN_SCOPE = "libra_dispatch", "libra_return"
"""`jax.named_scope`s around the operator's exchanges: out to the executors, and back."""
NODE_DISPATCH_SCOPE, NODE_RETURN_SCOPE = "libra_node_dispatch", "libra_node_return"
"""The same around those inside nodes: from relays to those that read the pages, and back."""

OVERLAP_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    "xla_gpu_memory_limit_slop_factor": 115,
}
"""Compiler options for GPUs. Without the first XLA runs exchanges where they stand; without the second one exchange at
a time, and gathering the next weights takes the kernel that the operator's exchange was to run under. The third, in
percent of 80% of the GPU's memory, is what it may fill before it gives up overlap and computes things twice: 92%."""

OPERATOR_PURPOSES = (
    "dispatch", "return", "dispatch+return", "node dispatch", "node return", "node dispatch+return", "exchange",
)  # fmt: skip

_KINDS = (
    "ragged-all-to-all", "all-to-all", "collective-permute", "all-gather", "all-reduce", "reduce-scatter",
    "collective-broadcast",
)  # fmt: skip
_NO_WORK = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "add-dependency", "opt-barrier",
    "optimization-barrier", "domain", "partition-id", "replica-id", "iota",
}  # fmt: skip
_SMALL_BYTES = 1 << 20
_FEW_NUMBERS_BYTES = 256
_MEMORY_OVER_LINK = 8


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One collective of a program.

    name: of the instruction that starts it. kind: "ragged-all-to-all", "all-gather", ... computation: where it stands.
    purpose: "dispatch", "return" or "dispatch+return" for the operator's, by the scopes in its op_name or, where XLA
        has dropped that, in those of its operands; with "node " before it for those of relays, inside nodes;
        "exchange" for ragged ones without a scope. Of the rest, "weights"
        for all-gathers, "gradients" for reductions of arrays, "other" for anything else, such as sums of numbers.
    bytes: on one device, the larger of what goes in and what comes out. Of a ragged exchange: what has room to arrive.
    groups: places in the mesh of those that exchange with each other. group_size: of the largest.
    times: how often it runs in one run of the program; None inside a loop of unknown length.
    under: what is computed between its start and its end, in order: Triton kernels by name, custom calls by target,
        other work by its name in the program.
    exposed: it has no separate end, or what runs under it cannot hide it: neither a kernel nor a matrix product nor a
        loop, and less than 8 times as many bytes as it moves itself are touched. (Memory is about 8 times as fast as
        the links inside a host.) What touches less than a MiB counts for nothing.
    """

    name: str
    kind: str
    computation: str
    op_name: str
    purpose: str
    bytes: int
    group_size: int
    groups: Groups
    times: int | None
    under: tuple[str, ...]
    exposed: bool


def read_schedule(hlo_text: str) -> list[Exchange]:
    """All exchanges of a compiled program, in the order of the walk from its entry.

    hlo_text: `compiled.as_text()`. Raises ValueError if the program is not scheduled, or holds what cannot be read.
    """
    return exchanges_of(read_program(hlo_text))


def exchanges_of(program: Program) -> list[Exchange]:
    """See `read_schedule`."""
    if not program.scheduled:
        raise ValueError("the program is not scheduled, so it does not say what overlaps; compile it for a GPU")
    return [
        exchange
        for computation, times in _computations(program, program.entry, 1)
        for exchange in _exchanges_in(program, computation, times)
    ]


def operator_exchanges(exchanges: list[Exchange]) -> list[Exchange]:
    """Those of the attention operator."""
    return [exchange for exchange in exchanges if exchange.purpose in OPERATOR_PURPOSES]


def _computations(program: Program, name: str, times: int | None) -> Iterator[tuple[str, int | None]]:
    """Computations that run as sequences of instructions, each with how often it runs."""
    yield name, times
    for instruction in program.computations[name]:
        for callee, turns in _callees(instruction):
            total = None if times is None or turns is None else times * turns
            yield from _computations(program, callee, total)


def _callees(instruction: Instruction) -> list[tuple[str, int | None]]:
    """Computations that an instruction runs line by line, with the number of turns. Fusions are single kernels."""
    opcode, rest = instruction.opcode, instruction.rest
    if opcode == "while":
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
        return [(body, int(count[1]) if count else None) for body in [instruction.attribute("body")] if body]
    if opcode == "call":
        return [(callee, 1) for callee in [instruction.attribute("to_apply")] if callee]
    if opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
        listed = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        named = [instruction.attribute(f"{which}_computation") for which in ("true", "false")]
        return [(callee, None) for callee in [*listed, *named] if callee]
    return []


def _exchanges_in(program: Program, computation: str, times: int | None) -> Iterator[Exchange]:
    lines = program.computations[computation]
    by_name = {line.name: line for line in lines}
    for place, line in enumerate(lines):
        collective = _collective(program, line)
        if collective is None:
            continue
        end = _end(lines, place) if line.opcode.endswith("-start") else None
        between = [] if end is None else lines[place + 1 : end]
        work = [step for other in between for step in _work(program, other)]
        result_bytes = type_bytes(lines[end].type) if end is not None else line.bytes
        kind = collective.opcode.removesuffix("-start")
        given = sum(by_name[operand].bytes for operand in line.operands)
        moved = result_bytes if kind == "ragged-all-to-all" else max(result_bytes, given)
        groups = groups_of(collective, program.devices)
        together = re.search(r'"is_sync":true', line.rest) is not None
        yield Exchange(
            name=line.name,
            kind=kind,
            computation=computation,
            op_name=collective.op_name or line.op_name,
            purpose=_purpose(line if line.op_name else collective, by_name, kind, moved),
            bytes=moved,
            group_size=max(map(len, groups)),
            groups=groups,
            times=times,
            under=tuple(step.label for step in work),
            exposed=end is None or together or not _hides(work, moved),
        )


def _collective(program: Program, line: Instruction) -> Instruction | None:
    """The collective that an instruction starts, itself or wrapped in `async-start`."""
    if line.opcode.removesuffix("-start") in _KINDS:
        return line
    if line.opcode == "async-start":
        called = line.attribute("calls")
        inside = program.computations[called] if called else ()
        return next((other for other in inside if other.opcode in _KINDS), None)
    return None


def _end(lines: tuple[Instruction, ...], start: int) -> int | None:
    """Place of the `-done` that belongs to a `-start`, over any `-update` between."""
    name = lines[start].name
    for place in range(start + 1, len(lines)):
        if name in lines[place].operands:
            if lines[place].opcode.endswith("-done"):
                return place
            if lines[place].opcode.endswith("-update"):
                name = lines[place].name
    return None


@dataclasses.dataclass(frozen=True)
class _Step:
    """One piece of work. heavy: a kernel, a matrix product or a loop, of some size. bytes: that it touches."""

    label: str
    heavy: bool
    bytes: int


def _work(program: Program, line: Instruction) -> list[_Step]:
    """What an instruction computes; nothing for exchanges and for what only names values."""
    opcode = line.opcode
    if opcode in _NO_WORK or opcode.endswith(("-done", "-update")) or _collective(program, line) is not None:
        return []
    if opcode == "call":
        return _work_inside(program, line)
    if opcode == "while":
        inside = _work_inside(program, line)
        return [_Step(line.name, any(step.heavy for step in inside), max((step.bytes for step in inside), default=0))]
    touched = _touched(program, line)
    if opcode == "custom-call":
        kernel = triton_call(line.rest)
        if "AllocateBuffer" in line.rest:
            return []
        target = re.search(r'custom_call_target="([^"]*)"', line.rest)
        label = kernel.name if kernel else target[1] if target else line.name
        return [_Step(label, kernel is not None or touched >= _SMALL_BYTES, touched)]
    if kernel := _kernel_in_fusion(program, line):
        return [_Step(kernel, True, touched)]
    return [_Step(line.name, touched >= _SMALL_BYTES and _multiplies(program, line), touched)]


def _kernel_in_fusion(program: Program, line: Instruction) -> str | None:
    """The name of a Triton kernel that reads slices of its operands in place: XLA makes a fusion of it."""
    called = line.attribute("calls") if line.opcode.startswith("fusion") else None
    inside = program.computations.get(called, ()) if called else ()
    kernels = (triton_call(other.rest) for other in inside if other.opcode == "custom-call")
    return next((kernel.name for kernel in kernels if kernel), None)


def _work_inside(program: Program, line: Instruction) -> list[_Step]:
    called = [inner for name, _ in _callees(line) for inner in program.computations[name]]
    return [step for inner in called for step in _work(program, inner)]


def _touched(program: Program, line: Instruction) -> int:
    """Bytes of an instruction's result and operands. A slice of a large array, or its update, touches the slice: for
    fusions around one the result of the slice, or twice the update, is counted."""
    called = line.attribute("calls")
    inside = program.computations.get(called, ()) if called else (line,)
    by_name = {other.name: other for other in inside}
    if line.opcode.startswith("fusion"):
        root = inside[-1]
        updates = [o for o in inside if o.opcode == "dynamic-update-slice" and o.name in (root.name, *root.operands)]
        if updates:
            return sum(2 * by_name[o.operands[1]].bytes for o in updates)
        read = 0
        for parameter in (o for o in inside if o.opcode == "parameter"):
            users = [o for o in inside if parameter.name in o.operands]
            sliced = users and all(o.opcode in ("dynamic-slice", "slice", "gather") for o in users)
            read += sum(o.bytes for o in users) if sliced else parameter.bytes
        return read + root.bytes
    return line.bytes + line.bytes


def _multiplies(program: Program, line: Instruction) -> bool:
    called = line.attribute("calls")
    inside = program.computations.get(called, ()) if called else (line,)
    return any(other.opcode in ("dot", "convolution", "scaled-dot") for other in inside)


def _hides(work: list[_Step], moved: int) -> bool:
    sizeable = [step for step in work if step.heavy or step.bytes >= _SMALL_BYTES]
    return any(step.heavy for step in sizeable) or (
        bool(sizeable) and sum(step.bytes for step in sizeable) >= _MEMORY_OVER_LINK * moved
    )


def _purpose(collective: Instruction, by_name: dict[str, Instruction], kind: str, moved: int) -> str:
    op_name = collective.op_name
    if not op_name:  # XLA drops it from ragged exchanges: take the scopes of what made the operands
        op_name = " ".join(other.op_name for other in _makers(collective, by_name))
    for where, out, back in (("node ", NODE_DISPATCH_SCOPE, NODE_RETURN_SCOPE), ("", DISPATCH_SCOPE, RETURN_SCOPE)):
        ways = [name for name, scope in (("dispatch", out), ("return", back)) if scope in op_name]
        if ways:
            return where + "+".join(ways)
    if kind == "ragged-all-to-all":
        return "exchange"
    if kind == "all-gather":
        return "weights"
    if kind == "reduce-scatter" or (kind == "all-reduce" and moved > _FEW_NUMBERS_BYTES):
        return "gradients"
    return "other"


def _makers(line: Instruction, by_name: dict[str, Instruction]) -> Iterator[Instruction]:
    """The instructions that computed the operands, looked for through those that only name values."""
    for operand in line.operands:
        maker = by_name.get(operand)
        if maker is not None and not maker.op_name and maker.opcode in _NO_WORK:
            yield from _makers(maker, by_name)
        elif maker is not None:
            yield maker
