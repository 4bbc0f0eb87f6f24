"""What a compiled loop costs: reads the machine code (SASS) of a kernel and counts the cycles its main loop needs.

The model is small on purpose. It walks once around the loop on the path that a whole tile takes (what the mask's branch
jumps over is left out), with all warps of a scheduler in step: an instruction takes an issue slot a warp and keeps its
unit busy as long as the unit needs for 32 lanes; tensor-core instructions and copies to shared memory run beside, in
order, until the code waits for them. Other latencies, barriers, caches and bank conflicts are left out, so that a share
of tensor-core time found here is more than a kernel reaches: good for choosing between variants, not a prediction.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Chip:
    """What an SM does in a cycle. Per scheduler (four to an SM) where it says so."""

    tensor_fmas: int
    """Dense 16-bit multiply-adds with float32 accumulation, per SM."""
    fp32_cycles: int
    """Cycles a float32 instruction of a warp occupies its scheduler's unit: 32 lanes over units per scheduler."""
    l2_bytes: float
    """Bytes per SM and cycle that L2 can give at most."""
    shared_bytes: int
    """Shared memory of an SM; a block takes 1 KiB more than it asks for."""
    block_shared_bytes: int
    """The most that a block may ask for."""


# tensor_fmas from the data sheets' dense peak: TFLOP/s / (2 * SMs * boost clock), rounded to a power of two:
# A100 312 / (2 * 108 * 1.41 GHz) = 1024, H100 SXM 989 / (2 * 132 * 1.83 GHz) = 2048, B200 2250 / (2 * 148 * 1.85 GHz)
# = 4109. l2_bytes: 5,120 bytes a clock for the whole A100 (its white paper) and H100; B200 has two such halves.
CHIPS = {
    80: Chip(1024, 2, 5120 / 108, 164 * 1024, 163 * 1024),
    90: Chip(2048, 1, 5120 / 132, 228 * 1024, 227 * 1024),
    100: Chip(4096, 1, 2 * 5120 / 148, 228 * 1024, 227 * 1024),
}

# Cycles of a scheduler's unit per warp instruction: 16 lanes of the integer and compare unit, which also converts to 16
# bits, 4 of the special function unit (CUDA's table of arithmetic throughput: 64 and 16 results per cycle and SM).
_ALU_CYCLES = 2
_MUFU_CYCLES = 8
_FP32 = {"FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2"}
_ALU = {
    "FMNMX", "FMNMX3", "FSEL", "FSETP", "ISETP", "IADD3", "IADD", "VIADD", "VIMNMX", "IMNMX", "LOP3", "SHF", "LEA",
    "SEL", "PRMT", "PLOP3", "F2FP", "VIADDMNMX", "SGXT", "MOV",
}  # fmt: skip
_FMA_HEAVY = {"IMAD"}
_TENSOR = re.compile(r"HGMMA|HMMA|UTC\w*MMA")
# Shared memory gives 128 bytes a cycle. wgmma reads its second operand from there, and often the first, for every
# 64 rows anew: with N = 32 keys or queries to a tile it waits for them.
_SHARED_BYTES = 128
_COPY_CYCLES = 600
"""From a copy's start to its first bytes in shared memory: L2 answers an idle SM in less than half of that."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str
    """With its modifiers, without the predicate."""
    operands: str
    conditional: bool
    target: int | None = None
    """Of a branch."""

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_tensor(self) -> bool:
        return _TENSOR.fullmatch(self.name) is not None


@dataclasses.dataclass(frozen=True)
class LoopCost:
    """One turn of a kernel's main loop as a whole tile takes it, in cycles of an SM, for one block (CTA) of threads."""

    instructions: int
    """Per warp."""
    masked_instructions: int
    """Instructions of the loop that a whole tile jumps over."""
    tensor_instructions: int
    mufu_instructions: int
    tensor_cycles: float
    """For the multiply-adds at the tensor cores' peak."""
    tensor_busy_cycles: float
    """Until the tensor cores are through: more where they wait for operands from shared memory."""
    issue_cycles: int
    mufu_cycles: int
    alu_cycles: int
    l2_cycles: float
    turn_cycles: float
    """Of the turn if nothing else runs on the SM, with as much overlap as the waits in the code let happen."""

    @property
    def issue_share(self) -> float:
        """Share of tensor-core instructions in all that is issued."""
        return self.tensor_instructions / self.instructions

    @property
    def serial_share(self) -> float:
        """Share of tensor-core time if nothing overlapped: tensor / (tensor + others)."""
        return self.tensor_cycles / (self.tensor_cycles + self._others())

    def share(self, ctas: int) -> float:
        """Bound on the share of the tensor cores' peak with `ctas` blocks on an SM.

        No unit can be busier than all the time, and a block takes its turn no faster than alone.
        """
        most = max(self.tensor_busy_cycles, self._others(), self.l2_cycles) * ctas
        return self.tensor_cycles * ctas / max(most, self.turn_cycles)

    def _others(self) -> float:
        return max(self.issue_cycles, self.mufu_cycles, self.alu_cycles)


def instructions(sass: str) -> list[Instruction]:
    """Instructions of one kernel in what `cuobjdump -sass` prints."""
    found = []
    for match in re.finditer(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", sass):
        text = re.match(r"(@!?U?P\w+\s+)?(\S+)\s*(.*)", match[2])
        assert text is not None
        predicate, opcode, operands = text.groups()
        target = re.search(r"0x([0-9a-f]+)$", operands) if opcode.split(".")[0] in ("BRA", "JMP") else None
        # `BRA.U !UP0` and `BRA P1` carry a condition among their operands.
        conditional = predicate is not None or (target is not None and re.search(r"\bU?P\d", operands) is not None)
        address = int(match[1], 16)
        found.append(Instruction(address, opcode, operands, conditional, int(target[1], 16) if target else None))
    return found


def main_loop(code: Sequence[Instruction]) -> tuple[list[Instruction], int]:
    """The loop with most tensor-core instructions: its path for a whole tile, and how many instructions it jumps over.

    A path here goes from the loop's first instruction to the branch back; of those with most tensor-core instructions
    (on sm_100 one warp issues them, and only others jump over them) the shortest. Raises ValueError if there is none.
    """
    at = {instruction.address: i for i, instruction in enumerate(code)}
    found = []
    for last, instruction in enumerate(code):
        first = at.get(instruction.target, last) if instruction.target is not None else last
        if first < last and any(x.is_tensor for x in code[first : last + 1]):
            path = _path(code, at, first, last)
            tensor = sum(code[i].is_tensor for i in path)
            found.append((tensor, first - last, path))
    tensor, length, path = max(found, default=(0, 0, []))
    if not tensor:
        raise ValueError("the kernel has no loop with tensor-core instructions")
    return [code[i] for i in path], 1 - length - len(path)


def _path(code: Sequence[Instruction], at: dict[int, int], first: int, last: int) -> list[int]:
    """Best path from first to last as `main_loop` has it, going forward only; empty if there is none.

    There is none where a branch back only ends a detour, such as a wait that is put behind the end of the kernel.
    """
    # Tensor-core instructions and minus the length of the best path from i to last; then its next step.
    best: dict[int, tuple[int, int, int]] = {last: (0, -1, last)}
    for i in range(last - 1, first - 1, -1):
        here = code[i]
        steps = [i + 1] if here.conditional or (here.target is None and here.name != "EXIT") else []
        if here.target is not None and i < at.get(here.target, -1) <= last:
            steps.append(at[here.target])
        ways = [(best[step][0] + here.is_tensor, best[step][1] - 1, step) for step in steps if step in best]
        if ways:
            best[i] = max(ways)
    if first not in best:
        return []
    path = [first]
    while path[-1] != last:
        path.append(best[path[-1]][2])
    return path


def loop_cost(
    code: Sequence[Instruction],
    chip: Chip,
    *,
    num_warps: int,
    tensor_fmas: int,
    loaded_bytes: int,
    tensor_rate: float = 1.0,
) -> LoopCost:
    """Cost of the main loop. tensor_fmas: multiply-adds that a block needs in a turn; loaded_bytes: what it reads;
    tensor_rate: how much of their peak the tensor cores reach with tiles of this shape, operands at hand."""
    path, masked = main_loop(code)
    warps = num_warps / 4  # of a scheduler
    tensor = sum(instruction.is_tensor for instruction in path)
    tensor_cycles = tensor_fmas / chip.tensor_fmas
    units = [_unit(instruction, chip) for instruction in path]
    works = _tensor_works(path, warps, tensor_cycles / tensor_rate)

    def busy(unit: str) -> int:
        return round(sum(cycles for name, cycles in units if name == unit) * warps)

    return LoopCost(
        instructions=len(path),
        masked_instructions=masked,
        tensor_instructions=tensor,
        mufu_instructions=sum(instruction.name == "MUFU" for instruction in path),
        tensor_cycles=tensor_cycles,
        tensor_busy_cycles=sum(works),
        issue_cycles=round(len(path) * warps),
        mufu_cycles=busy("mufu"),
        alu_cycles=max(busy("alu"), busy("fp32")),
        l2_cycles=loaded_bytes / chip.l2_bytes,
        turn_cycles=_turn(path, units, works, warps, chip),
    )


def _unit(instruction: Instruction, chip: Chip) -> tuple[str, int]:
    name = instruction.name
    if name == "MUFU":
        return "mufu", _MUFU_CYCLES
    if name in _ALU:
        return "alu", _ALU_CYCLES
    if name in _FMA_HEAVY:
        return "fp32", 2
    if name in _FP32:
        return "fp32", chip.fp32_cycles
    return "", 0


def _turn(
    path: Sequence[Instruction],
    units: Sequence[tuple[str, int]],
    works: Sequence[float],
    warps: float,
    chip: Chip,
    turns: int = 8,
) -> float:
    """Cycles of a turn in the steady state, by going around the path a few times."""
    clock = tensor_free = copy_free = start = 0.0
    free: dict[str, float] = {}
    groups: list[tuple[str, float]] = []  # committed tensor-core work: its barrier, and when it is done
    copies: list[float] = []  # committed copies: when they are done
    for turn in range(turns):
        if turn == turns // 2:
            start = clock
        for instruction, (unit, cycles), work in zip(path, units, works, strict=True):
            clock += warps
            if unit:
                clock = max(clock, free.get(unit, 0.0) + warps)
                free[unit] = clock - warps + cycles * warps
            if work:
                # mma.sync occupies its warp until the unit takes it; the later generations queue.
                if instruction.name == "HMMA":
                    clock = max(clock, tensor_free)
                tensor_free = max(tensor_free, clock) + work
                if "gsb0" in instruction.operands:
                    groups.append(("gsb0", tensor_free))
            elif instruction.name == "LDGSTS":
                copied = 4 * warps * 32 * (16 if ".128" in instruction.opcode else 4)
                copy_free = max(copy_free, clock) + copied / chip.l2_bytes
            elif instruction.name == "LDGDEPBAR":
                copies.append(copy_free + _COPY_CYCLES)
            elif instruction.opcode.startswith("DEPBAR.LE"):
                clock = max([clock, *copies[: len(copies) - _pending(instruction)]])
            elif instruction.opcode.startswith("UTCBAR"):
                groups.append((_barrier(instruction), tensor_free))
            elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
                clock = max([clock, *(done for _, done in groups[: len(groups) - _pending(instruction)])])
            elif instruction.opcode.startswith("SYNCS.PHASECHK"):
                # The barrier may sit in another register than when it was committed to: then all that was committed.
                named = [done for name, done in groups if name == _barrier(instruction)]
                clock = max([clock, *(named or [done for _, done in groups])])
    return (clock - start) / (turns - turns // 2)


def _tensor_works(path: Sequence[Instruction], warps: float, tensor_cycles: float) -> list[float]:
    """Cycles that the tensor cores work on each instruction, for all warps; 0 for other instructions.

    A warp group's HGMMA of 64 x N x 16 says how large it is; the tensor-core instructions of the others are all alike.
    """
    columns = [_columns(instruction) for instruction in path]
    per_column = tensor_cycles / max(sum(columns), 1)
    works = []
    for instruction, n in zip(path, columns, strict=True):
        shared = 0.0
        if instruction.name == "HGMMA":
            from_shared = n + (64 if re.match(r"R\d+, gdesc", instruction.operands) else 0)
            shared = from_shared * 16 * 2 / _SHARED_BYTES * warps
        works.append(max(n * per_column, shared))
    return works


def _columns(instruction: Instruction) -> int:
    """N of an HGMMA, 1 of any other tensor-core instruction."""
    if not instruction.is_tensor:
        return 0
    shape = re.match(r"HGMMA\.64x(\d+)x16", instruction.opcode)
    return int(shape[1]) if shape else 1


def _barrier(instruction: Instruction) -> str:
    match = re.search(r"\[[^\]]*\]", instruction.operands)
    return match[0] if match else ""


def _pending(instruction: Instruction) -> int:
    """How many of the last groups a wait leaves."""
    match = re.search(r", 0x(\w+)", instruction.operands)
    return int(match[1], 16) if match else 0
