"""`libra simulate`: what training would take on a cluster under each policy, and what to do about it. No GPU needed.

Takes document lengths and a model, samples optimizer steps and prices them (`step`); prints tables or JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from libra_jax.data.lengths import find_lengths, read_lengths
from libra_jax.data.packing import cut
from libra_jax.models.qwen3 import QWEN3_0_6B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B, Qwen3Config
from libra_jax.policies import names
from libra_jax.policies.base import RunShape
from libra_jax.simulate import advice
from libra_jax.simulate.attention import Network
from libra_jax.simulate.constants import Constants, changed, constants, kernel, links
from libra_jax.simulate.plot import steps_png
from libra_jax.simulate.step import Setting, heaviest_over_mean, token_seconds
from libra_jax.simulate.study import Outcome, compare, sample_steps, spread

MODELS: dict[str, Qwen3Config] = {
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-235b-a22b": QWEN3_235B_A22B,
}
WARM_UP = 12
"""Steps for which policies that hold documents back fill their queues, before the first that is priced."""
Say = Any  # Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class SimulateOptions:
    """What training takes on a cluster that is not there, under Libra and under other systems, and whether it pays.

    A model: its constants and their sources are in the JSON and with --constants."""

    lengths: str = "lognormal-644-71k"
    """Document lengths: a file or folder as `libra inspect` takes it, or lognormal-644-71k, short-bulk-long-tail,
    wikipedia."""
    model: Literal["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b"] = "qwen3-8b"
    """Model to train."""
    seq_len: int = 262_144
    """Tokens of a packed sequence."""
    cp: int = 8
    """Ranks that hold one sequence."""
    dp: int = 16
    """Sequences side by side."""
    pp: int = 1
    """Pipeline stages."""
    micro_steps: int = 8
    """Micro-steps of an optimizer step, which has dp times as many sequences."""
    pool: int = 8
    """Sequences of one of Libra's pools."""
    gpus: Literal["H100", "H200", "B200"] = "H100"
    """GPUs of the cluster, dp * cp * pp of them."""
    policies: tuple[str, ...] = (
        "ulysses", "ulysses-sorted", "per-document", "wlb-batch-shuffled", "wlb-batch-delay-shuffled", "distca", "libra"
    )  # fmt: skip
    """What to compare; --list-policies says what there is."""
    steps: int = 20
    """Optimizer steps to sample."""
    kernel: str = "triton"
    """Attention kernels of all policies: triton, fa3 or cudnn, from published curves; or a cost model that
    benchmarks/gpu_check.py measured."""
    sync: Literal["layer", "step"] = "layer"
    """Where ranks wait for each other: in every layer, as with FSDP, or once a step."""
    mapping: Literal["packed", "strided"] = "packed"
    """Neighbouring ranks share a node, or a sequence's ranks lie on different ones (data parallelism innermost)."""
    longest: int | None = None
    """Cut documents to this many tokens; None: to a sequence."""
    set: tuple[str, ...] = ()
    """Constants to change, as NAME=VALUE; --constants shows them."""
    seed: int = 0
    """Which documents come in which order."""
    quick: bool = False
    """Compare the policies and stop: no search for settings, no break-even."""
    json: bool = False
    """Print JSON instead of tables."""
    plot: Path | None = None
    """Draw what steps are made of into this file (PNG)."""
    constants: bool = False
    """Print all constants with their sources."""
    list_policies: bool = False
    """Print what policies there are, with their sources and limits, and do nothing else."""


def run(options: SimulateOptions) -> int:
    """Does what the options say. Returns 0. Raises ValueError or OSError with a message for the user."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    if options.list_policies:
        console.print(policies_table())
        return 0
    if options.steps < 20:
        print(f"{options.steps} steps: percentiles of fewer than 20 say little", file=sys.stderr)
    policies = list(dict.fromkeys(_named(name, options) for name in options.policies))
    for name in policies:
        names.known(name)
    ours = next((name for name in policies if name.startswith(("libra:", "libra-all:"))), None)
    setting, kernel_source = setting_of(options)
    batches, lengths = _sampled(options, setting.run)
    say = _progress(console)
    outcomes = list(compare(policies, batches, setting, WARM_UP, say))
    measured = batches[WARM_UP:]
    verdict = recommendation = own = None
    points: list[advice.BreakEven] = []
    if ours is not None and any(advice.is_plain(name) for name in policies):
        size = names.pool_size(ours, setting.run.dp)
        verdict = advice.verdict(outcomes, ours)
        if options.kernel == "triton":
            own = advice.with_own_kernels(measured[:3], setting, verdict.best_other, size)
        if not options.quick:
            recommendation = advice.recommend(measured[:2], setting, size, say)
            points = advice.break_even(lengths, setting, policies, size, 2, options.seed, say)
    say("")
    title = f"{options.model}, {options.seq_len:,} tokens, {options.lengths}, {setting.gpus} {options.gpus}"
    if options.plot is not None:
        steps_png(options.plot, f"{title}: modelled step over the ideal", outcomes, points)
        print(f"picture: {options.plot}", file=sys.stderr)
    if options.json:
        print(
            json.dumps(
                _content(options, setting, kernel_source, outcomes, verdict, own, recommendation, points), indent=1
            )
        )
        return 0
    _show(console, title, setting, kernel_source, outcomes, measured, options)
    if verdict is not None:
        console.print(f"\n[bold]{verdict.sentence}[/bold]")
        if own is not None:
            console.print(own_kernels_sentence(own, verdict.best_other))
    if recommendation is not None:
        best = recommendation.best
        console.print(
            f"Recommended: pool {best.pool_size}, cp {best.cp} (dp {best.dp}), tolerance {best.tolerance:g}, "
            f"waves {best.waves}: {recommendation.reason}."
        )
    if points:
        console.print(advice.break_even_sentence(points))
    return 0


def _named(name: str, options: SimulateOptions) -> str:
    """With a pool size, where the user gave none; "libra" as the trainer runs it."""
    if name == "libra":
        return advice.as_built(options.pool, options.pp)
    return f"{name}:{options.pool}" if name in names.SIZED else name


def own_kernels_sentence(ratio: float, other: str) -> str:
    """All policies were priced with one kernel; what if each had its own?"""
    return (
        f"That is with the same kernels everywhere. On Triton's published speed, against {other} on FlashAttention-3, "
        f"Libra's steps are {ratio:.2f} times as fast{'' if ratio >= 1 else ': slower'}."
    )


def setting_of(options: SimulateOptions) -> tuple[Setting, str]:
    """The cluster and run that the options describe, and where the kernel's speed is from."""
    table = changed(constants(options.gpus), _values(options.set))
    cost, source = kernel(options.kernel, table)
    model = MODELS[options.model]
    for name in ("steps", "pool", "dp", "cp", "pp", "micro_steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} ({getattr(options, name)}) must be at least 1")
    shape = RunShape(
        options.seq_len,
        options.dp,
        options.cp,
        options.micro_steps,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        cost=cost,
        links=links(table),
        token_seconds=sum(token_seconds(model, table)),
    )
    if any(name in names.SIZED for name in options.policies) and options.dp % options.pool:
        raise ValueError(f"pool ({options.pool}) must divide dp ({options.dp})")
    network = Network(
        shape.links, int(table["pod_nodes"].value), table["oversubscription"].value, options.mapping == "strided"
    )
    return Setting(model, shape, table, cost, network, options.pp, options.sync), source


def _values(words: Sequence[str]) -> dict[str, float]:
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            raise ValueError(f"--set {word}: must be NAME=VALUE with a number, such as across=40e9") from None
        if not equals:
            raise ValueError(f"--set {word}: must be NAME=VALUE, such as across=40e9")
    return values


def _sampled(options: SimulateOptions, run: RunShape) -> tuple[list[list[list[int]]], Any]:
    steps = options.steps + WARM_UP  # the same steps, whether or not a policy holds documents back
    path = find_lengths(options.lengths)
    wanted = int(1.02 * steps * run.sequences * run.seq_len)
    lengths = read_lengths(path, least_tokens=wanted, seed=options.seed)
    longest = run.seq_len if options.longest is None else options.longest
    if longest < 1:
        raise ValueError(f"longest ({longest}) must be at least 1")
    if longest < run.seq_len:
        lengths = cut(lengths, longest).length
    if lengths.sum() < wanted:  # a real corpus that is too small: its documents again, in another order
        times = int(-(-wanted // lengths.sum()))
        print(f"the corpus has too few tokens for {steps} steps: its documents come {times} times", file=sys.stderr)
        lengths = np.tile(lengths, times)
    return sample_steps(lengths, run, steps, options.seed), lengths


def _progress(console: Console) -> Say:
    if not sys.stderr.isatty():
        return lambda what: None
    err = Console(stderr=True)
    return lambda what: err.print(f"  {what}"[:100].ljust(100), end="\r")


# -------------------------------------------------------------------------------------------------------------- tables


def _show(
    console: Console,
    title: str,
    setting: Setting,
    kernel_source: str,
    outcomes: Sequence[Outcome],
    measured: advice.Batches,
    options: SimulateOptions,
) -> None:
    run, node = setting.run, setting.network.links.ranks_per_node
    console.print(f"[bold]{title}[/bold]: {run.micro_steps} micro-steps of {run.dp} sequences")
    console.print(f"kernels: {kernel_source}; a model, no measurement")
    ours = next((each.policy for each in outcomes if each.policy.startswith("libra")), f"libra:{options.pool}")
    pool = names.pool_size(ours, run.dp)
    if options.mapping == "packed":
        nodes, where = -(-pool * run.cp // node), "neighbouring ranks share a node"
    else:
        nodes, where = -(-pool // node) * run.cp, "a sequence's ranks on different nodes"
    console.print(f"a pool of {pool}: {pool * run.cp} GPUs on {nodes} node{'s' if nodes > 1 else ''}, {where}\n")
    console.print(table_of(outcomes, setting))
    console.print(losses_table(outcomes))
    heaviest, low, high = spread([heaviest_over_mean(sequences) for sequences in measured])
    tokens = sum(map(sum, itertools.chain.from_iterable(measured)))
    fill = tokens / (len(measured) * run.sequences * run.seq_len)
    steps = {each.policy: each.numbers(setting)["micro_steps"][0] for each in outcomes}
    others = "".join(f", {name} {count:g}" for name, count in steps.items() if count != run.micro_steps)
    console.print(
        f"sequences as packed: the heaviest over the mean {heaviest:.1f} ({low:.1f} to {high:.1f}), fill {fill:.2%}; "
        f"micro-steps {run.micro_steps}{others}"
    )
    room = setting.table["memory"].value
    needs = {each.policy: max(step.memory for step in each.steps) for each in outcomes}
    too_much = [f"{name} ({memory:.0f})" for name, memory in needs.items() if memory > room]
    if too_much:
        console.print(f"do not fit in the {room:g} GiB of a GPU: {', '.join(too_much)}")
    for each in outcomes:
        if any(each.changed):
            console.print(changed_sentence(each))
    if options.constants:
        console.print(constants_table(setting.table))


def _cell(value: tuple[float, float, float], digits: int = 2, scale: float = 1.0) -> str:
    mean, low, high = (scale * x for x in value)
    digits = digits if high < 100 else min(digits, 1) if high < 1000 else 0
    text = f"{mean:.{digits}f}"
    same = f"{low:.{digits}f}" == text == f"{high:.{digits}f}"
    return text if same else f"{text} ({low:.{digits}f}-{high:.{digits}f})"


def table_of(outcomes: Sequence[Outcome], setting: Setting) -> Table:
    """Mean over steps, and the 5th to 95th percentile."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Means (5th to 95th percentile) over steps")
    table.caption = (
        "tokens/s/GPU, MFU: means of all steps together; pools, ranks, micro-steps: the slowest over the mean; "
        "bytes: the busiest rank's over Ulysses', and what of them goes across nodes"
    )
    columns = (
        "step s",
        "tokens/s/GPU",
        "MFU %",
        "of ideal %",
        "pools",
        "ranks",
        "micro-steps",
        "bytes",
        "across",
        "GiB",
    )
    table.add_column("policy", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for each in outcomes:
        numbers = each.numbers(setting)
        ulysses = numbers["ulysses_bytes"][0] or 1.0
        table.add_row(
            each.policy,
            _cell(numbers["step"]),
            _cell(numbers["tokens per gpu second"], 0),
            _cell(numbers["mfu"], 1, 100),
            f"{100 * each.efficiency:.1f}",
            _cell(numbers["pool_imbalance"]),
            _cell(numbers["rank_imbalance"]),
            _cell(numbers["micro_step_imbalance"]),
            _cell(numbers["busiest_bytes"], 2, 1 / ulysses),
            _cell(numbers["across_bytes"], 2, 1 / ulysses),
            _cell(numbers["memory"], 1),
        )
    return table


def losses_table(outcomes: Sequence[Outcome]) -> Table:
    """Shares of all steps' time; with the ideal they add up to 100."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Where the time goes, %")
    table.add_column("policy", no_wrap=True)
    for name in ("ideal", *outcomes[0].losses):
        table.add_column(name, justify="right", overflow="fold")
    for each in outcomes:
        shares = [each.efficiency, *each.losses.values()]
        table.add_row(each.policy, *(f"{100 * share:.1f}" for share in shares))
    return table


def changed_sentence(each: Outcome) -> str:
    """What a policy does to the steps' documents."""
    left, tokens, came, came_tokens = each.changed
    return (
        f"{each.policy} changes what steps train on: of {each.documents:,} documents {left:,} ({tokens:,} tokens) went "
        f"to later steps, {came:,} ({came_tokens:,} tokens) came from earlier ones; at the end {each.waiting:,} wait"
    )


def constants_table(table: Constants) -> Table:
    """Every constant with its source."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Constants")
    for name in ("name", "value", "unit", "source"):
        shown.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    for each in table.values():
        shown.add_row(each.name, f"{each.value:g}", each.unit, each.source)
    return shown


def policies_table() -> Table:
    """Every policy with its source and its limits."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Policies")
    for name in ("name", "what it does", "source", "known limits", "keeps a step's documents"):
        shown.add_column(name, overflow="fold")
    for name in [*names.POLICIES, *names.SIZED]:
        each = names.known(name)
        shown.add_row(name, each.about, each.source, each.limits, "yes" if each.keeps else "no")
    return shown


def _content(
    options: SimulateOptions,
    setting: Setting,
    kernel_source: str,
    outcomes: Sequence[Outcome],
    verdict: advice.Verdict | None,
    own: float | None,
    recommendation: advice.Recommendation | None,
    points: Sequence[advice.BreakEven],
) -> dict[str, Any]:
    """All that was found, for --json. Spreads are [mean, 5th percentile, 95th percentile]."""
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}
    return {
        "options": asked,
        "gpus": setting.gpus,
        "kernel": {"source": kernel_source, **dataclasses.asdict(setting.cost)},
        "constants": [dataclasses.asdict(each) for each in setting.table.values()],
        "policies": [
            {
                "policy": each.policy,
                "efficiency": each.efficiency,
                "numbers": each.numbers(setting),
                "losses": each.losses,
                "changed": each.changed._asdict() | {"documents": each.documents, "waiting_tokens": each.waiting},
            }
            for each in outcomes
        ],
        "verdict": None if verdict is None else dataclasses.asdict(verdict) | {"with_own_kernels": own},
        "recommendation": None if recommendation is None else dataclasses.asdict(recommendation),
        "break_even": None
        if not points
        else {"sentence": advice.break_even_sentence(points), "points": [dataclasses.asdict(p) for p in points]},
    }
