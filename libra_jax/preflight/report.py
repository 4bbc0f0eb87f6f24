"""The report of a preflight: from a compiled step to one dataclass, and from that to JSON, a table and a page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from libra_jax.hlo import Instruction, read_program
from libra_jax.memory import attention_bytes
from libra_jax.preflight.kernels import KernelUse, read_kernels
from libra_jax.preflight.memory import PARTS, Buffer, check_sizes, read_memory
from libra_jax.preflight.program import CompiledStep, Topology, compile_for
from libra_jax.schedule import OPERATOR_PURPOSES, Exchange, exchanges_of
from libra_jax.targets import TARGETS
from libra_jax.train.config import TrainConfig

RESERVED_BYTES = 4 << 30
"""Of a GPU's memory, for what XLA does not count: the CUDA context, NCCL's channels, libraries' workspaces. An
estimate."""

_LARGEST_BUFFERS = 12


@dataclasses.dataclass(frozen=True)
class Report:
    """Sizes in bytes, of one device. parts, state_bytes, buffers, exchanges, kernels: as their own modules say.
    recomputed: instructions that XLA runs a second time to save memory, beside what the config's remat asks for.
    remarks: warnings while the step was traced."""

    name: str
    config: TrainConfig
    target: str
    topology: Topology
    peak_bytes: int
    parts: dict[str, int]
    state_bytes: dict[str, int]
    buffers: tuple[Buffer, ...]
    exchanges: tuple[Exchange, ...]
    kernels: tuple[KernelUse, ...]
    recomputed: tuple[str, ...]
    compile_seconds: float
    remarks: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        return TARGETS[self.target].memory_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes + RESERVED_BYTES <= self.device_bytes

    @property
    def pool_size(self) -> int:
        return self.config.mesh.pool_size

    @property
    def operator(self) -> list[Exchange]:
        """The attention operator's exchanges."""
        return [exchange for exchange in self.exchanges if exchange.purpose in OPERATOR_PURPOSES]


def preflight(config: TrainConfig, target: str, topology: Topology, name: str = "") -> Report:
    """Compiles and reads. name: of the config, for the report. Raises as `compile_for` does."""
    return report_of(compile_for(config, target, topology), config, target, topology, name)


def report_of(step: CompiledStep, config: TrainConfig, target: str, topology: Topology, name: str) -> Report:
    program = read_program(step.hlo)
    memory = read_memory(step, program, config.model.num_layers)
    check_sizes(memory)
    return Report(
        name=name,
        config=config,
        target=target,
        topology=topology,
        peak_bytes=memory.peak_bytes,
        parts=memory.parts,
        state_bytes=memory.state_bytes,
        buffers=memory.buffers[:_LARGEST_BUFFERS],
        exchanges=tuple(exchanges_of(program)),
        kernels=tuple(read_kernels(program)),
        recomputed=tuple(
            line.name for lines in program.computations.values() for line in lines if _is_recomputed(line)
        ),
        compile_seconds=step.seconds,
        remarks=step.remarks,
    )


def as_json(report: Report) -> dict[str, Any]:
    """What `--json` prints. exchanges, overlapped and exposed are of the whole program, each exchange in a loop once;
    max_group_size is the operator's, and must not exceed pool_ranks; null: it has no exchange."""
    operator, spec = report.operator, report.config.spec
    exposed = [exchange for exchange in report.exchanges if exchange.exposed]
    return {
        "fits": report.fits,
        "peak_bytes": report.peak_bytes,
        "device_bytes": report.device_bytes,
        "reserved_bytes": RESERVED_BYTES,
        "memory": report.parts,
        "state_bytes": report.state_bytes,
        "attention_formula_bytes": _formula(report),
        "largest_buffers": [dataclasses.asdict(buffer) for buffer in report.buffers],
        "exchanges": len(report.exchanges),
        "overlapped": len(report.exchanges) - len(exposed),
        "exposed": [_exchange_json(exchange) for exchange in exposed],
        "operator_exchanges": len(operator),
        "operator_overlapped": sum(not exchange.exposed for exchange in operator),
        "max_group_size": max((exchange.group_size for exchange in operator), default=None),
        "pool_size": report.pool_size,
        "pool_ranks": spec.ranks,
        "inside_pools": all(_inside_pools(exchange, spec.ranks, report.config.mesh.tp) for exchange in operator),
        "program_max_group_size": max((exchange.group_size for exchange in report.exchanges), default=None),
        "schedule": [_exchange_json(exchange) for exchange in report.exchanges],
        "kernels": [dataclasses.asdict(kernel) for kernel in report.kernels],
        "recomputed": list(report.recomputed),
        "compile_seconds": round(report.compile_seconds, 1),
        "config": report.name,
        "target": report.target,
        "topology": "x".join(map(str, report.topology)),
        "devices": report.config.mesh.devices,
        "parameters": report.config.model.num_parameters,
        "step_tokens": report.config.step_tokens,
        "remarks": list(report.remarks),
    }


def all_as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """What `--json` prints of a config, from a report for each pool size. With several: whether all fit, the other keys
    of the size that needs most memory, and "pool_sizes": {size: all of its keys}."""
    keys = as_json(max(reports, key=lambda report: report.peak_bytes))
    if len(reports) == 1:
        return keys
    sizes = {str(report.pool_size): as_json(report) for report in reports}
    return keys | {"fits": all(report.fits for report in reports), "pool_sizes": sizes}


def verdict(report: Report) -> str:
    """Whether it fits, in a sentence with the numbers."""
    needed, gpu = report.peak_bytes + RESERVED_BYTES, TARGETS[report.target].name
    what = f"{_size(report.peak_bytes)} at the peak and {_size(RESERVED_BYTES)} set aside for what XLA does not count"
    if report.fits:
        return f"It fits: {what}, of the {_size(report.device_bytes)} of one {gpu}."
    over = _size(needed - report.device_bytes)
    return f"It does not fit: {what} are {over} more than the {_size(report.device_bytes)} of one {gpu}."


def print_report(report: Report, console: Console) -> None:
    """Prints the report as tables."""
    tables = []
    for title, header, rows in _sections(report):
        table = Table(*header, title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column, label in zip(table.columns, header, strict=True):
            column.justify = "right" if label in _NUMBERS else "left"
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row)
        tables += [table, ""]
    console.print(_title(report), soft_wrap=True)
    console.print("")
    console.print(Group(*tables))
    for line in _sentences(report):
        console.print(line, soft_wrap=True)


def as_markdown(report: Report, command: str, stamp: str) -> str:
    """The report as a page. command: that writes it; stamp: when, with what."""
    lines = [f"# Preflight: {report.name} on {report.config.mesh.devices} {report.target.upper()}", ""]
    lines += [f"`{command}`", "", stamp, "", _title(report), ""]
    lines += [*(f"- {line}" for line in _sentences(report)), ""]
    for title, header, rows in _sections(report):
        lines += [f"## {title}", "", "| " + " | ".join(header) + " |"]
        lines += ["|" + "|".join("---:" if label in _NUMBERS else "---" for label in header) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return "\n".join(lines).rstrip() + "\n"


def all_as_markdown(reports: Sequence[Report], command: str, stamp: str) -> str:
    """The page of a config with one report for each pool size: that report, or the verdicts and then each of them."""
    pages = [as_markdown(report, command, stamp) for report in reports]
    if len(reports) == 1:
        return pages[0]
    first = reports[0]
    lines = [f"# Preflight: {first.name} on {first.config.mesh.devices} {first.target.upper()}, every pool size", ""]
    lines += [*(f"- {line}" for line in verdicts(reports)), ""]
    for report, page in zip(reports, pages, strict=True):
        _, *rest = page.splitlines()
        lines += [f"## Pool size {report.pool_size}", *("#" + line if line.startswith("#") else line for line in rest)]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def verdicts(reports: Sequence[Report]) -> list[str]:
    """The verdict of each report, with its pool size if there are several."""
    if len(reports) == 1:
        return [verdict(reports[0])]
    return [f"Pool size {report.pool_size}: {verdict(report)}" for report in reports]


_NUMBERS = {"size", "times", "ranks", "registers", "spills", "shared", "warps", "calls", "share"}


def _title(report: Report) -> str:
    config, spec, mesh = report.config, report.config.spec, report.config.mesh
    topology = "x".join(map(str, report.topology))
    return (
        f"{report.name}: Qwen3 with {config.model.num_parameters:,} parameters, sequences of {spec.seq_len:,} tokens, "
        f"{mesh.in_words} on {topology} "
        f"{TARGETS[report.target].name}, {config.step_tokens:,} tokens a step"
    )


def _sentences(report: Report) -> list[str]:
    operator, spec, formula = report.operator, report.config.spec, _formula(report)
    hidden = sum(not exchange.exposed for exchange in operator)
    lines = [verdict(report)]
    if operator:
        bounded = all(_inside_pools(exchange, spec.ranks, report.config.mesh.tp) for exchange in operator)
        lines.append(
            f"Attention: {hidden} of {len(operator)} exchanges run under other work. The largest group has "
            f"{max(exchange.group_size for exchange in operator)} ranks, a pool has {spec.ranks}: "
            + ("every group lies inside a pool." if bounded else "GROUPS REACH BEYOND A POOL.")
        )
    else:
        lines.append("Attention exchanges nothing: a pool is one rank.")
    lines.append(
        f"One layer's attention by its formula: {_size(formula['forward'])} forward and {_size(formula['backward'])} "
        f"backward while it runs."
    )
    others = [exchange for exchange in report.exchanges if exchange.purpose not in OPERATOR_PURPOSES]
    lines.append(
        f"Weights, gradients and sums: {sum(not exchange.exposed for exchange in others)} of {len(others)} exchanges "
        f"run under other work."
    )
    spilling = [kernel.name for kernel in report.kernels if kernel.spill_bytes]
    if report.kernels:
        lines.append(f"Kernels that spill registers: {', '.join(spilling) if spilling else 'none'}.")
    else:
        lines.append("The program has no Triton kernel.")
    if report.recomputed:
        lines.append(
            f"XLA computes {len(report.recomputed)} results twice to save memory: {', '.join(report.recomputed[:6])}"
            + (" and others." if len(report.recomputed) > 6 else ".")
        )
    lines.append(f"Traced and compiled in {report.compile_seconds:.0f} s.")
    return [*lines, *(f"Remark: {remark}" for remark in report.remarks)]


def _sections(report: Report) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """(title, header, rows) of each table."""
    rows = [(part, _size(n), f"{n / report.peak_bytes:.1%}", PARTS[part]) for part, n in report.parts.items()]
    total = ("peak", _size(report.peak_bytes), "100%", "of one device, as XLA plans it")
    yield "Memory at the peak", ("part", "size", "share", "what it is"), [*rows, total]
    rows = [(_size(b.bytes), b.part, b.type, _last_scopes(b.op_name)) for b in report.buffers]
    yield "Largest buffers", ("size", "part", "type", "made by"), rows
    ordered = sorted(report.exchanges, key=lambda e: (not e.exposed, -e.bytes * (e.times or 1)))
    yield "Exchanges", ("for", "kind", "size", "times", "ranks", "runs under"), [_exchange_row(e) for e in ordered]
    rows = [
        (
            k.name, k.arch, str(k.calls), str(k.registers), str(k.spill_bytes), _size(k.shared_bytes), str(k.warps),
        )
        for k in report.kernels
    ]  # fmt: skip
    yield "Triton kernels", ("kernel", "for", "calls", "registers", "spills", "shared", "warps"), rows


def _exchange_row(exchange: Exchange) -> tuple[str, ...]:
    under = _summary(exchange.under)
    return (
        exchange.purpose,
        exchange.kind,
        _size(exchange.bytes),
        "?" if exchange.times is None else str(exchange.times),
        str(exchange.group_size),
        f"EXPOSED ({under})" if exchange.exposed and under else "EXPOSED" if exchange.exposed else under,
    )


def _summary(under: Sequence[str]) -> str:
    """Kernels by name, matrix products, loops and the rest by number."""

    def kind(label: str) -> str:
        if label.startswith("libra_"):
            return label
        for word, what in (("gemm", "matrix product"), ("dot", "matrix product"), ("while", "loop")):
            if word in label:
                return what
        return "other operation"

    def counted(label: str, n: int) -> str:
        if label.startswith("libra_"):
            return label if n == 1 else f"{n} {label}"
        return f"{n} {label}{'s' if n > 1 else ''}"

    return ", ".join(counted(label, n) for label, n in Counter(map(kind, under)).items())


def _size(n: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(n) >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n} B"


def _last_scopes(op_name: str, most: int = 46) -> str:
    """The end of an op_name, which says most."""
    parts = [part for part in op_name.split("/") if part not in ("while", "body", "eval_jaxpr", "shard_map")]
    text = "/".join(parts)
    return text if len(text) <= most else "…" + text[-most:]


def _formula(report: Report) -> dict[str, int]:
    """What `memory.attention_bytes` expects of one layer's attention at its fullest, forward and backward, and of the
    plan's tables."""
    counted = attention_bytes(report.config.spec)
    return {"forward": counted.forward.total, "backward": counted.backward.total, "tables": counted.tables}


def _is_recomputed(line: Instruction) -> bool:
    """XLA's rematerialization names its copies so."""
    return ".remat" in line.name and line.opcode.removesuffix("-start") in ("fusion", "custom-call", "dot")


def _inside_pools(exchange: Exchange, pool_ranks: int, tp: int) -> bool:
    """Ranks of axis "tp" are neighbours, each of them in a pool of its own."""
    return all(len({(device // tp // pool_ranks, device % tp) for device in group}) == 1 for group in exchange.groups)


def _exchange_json(exchange: Exchange) -> dict[str, Any]:
    fields = dataclasses.asdict(exchange)
    groups = fields.pop("groups")
    return {**fields, "under": list(exchange.under), "groups": len(groups)}
