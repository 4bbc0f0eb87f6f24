"""`libra simulate`: what training would take on a cluster under each policy, and what to do about it. No GPU needed.

Takes document lengths and a model, samples optimizer steps and prices them (`step`); prints tables or JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from libra_jax.data.lengths import find_lengths, read_lengths
from libra_jax.data.packing import cut
from libra_jax.models.qwen3 import QWEN3_0_6B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B, Qwen3Config
from libra_jax.policies import names
from libra_jax.policies.base import RunShape
from libra_jax.simulate import advice
from libra_jax.simulate.constants import changed, constants, kernel
from libra_jax.simulate.plot import steps_png
from libra_jax.simulate.step import Setting, heaviest_over_mean
from libra_jax.simulate.study import Outcome, compare, sample_steps, spread
from libra_jax.simulate.tables import changed_sentence, constants_table, losses_table, numbers_table, policies_table

MODELS: dict[str, Qwen3Config] = {
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-235b-a22b": QWEN3_235B_A22B,
}
WARM_UP = 12
"""Steps for which policies that hold documents back fill their queues, before the first that is priced."""
MOST_DOCUMENTS = 100_000_000
"""That are sampled at most."""


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
        "ulysses", "ulysses-sorted", "context-parallel", "per-document", "wlb-micro-shuffled",
        "wlb-micro-delay-shuffled", "distca", "libra",
    )  # fmt: skip
    """What to compare; --list-policies says what there is. Where Libra is among them, so are the best plain ones."""
    steps: int = 20
    """Optimizer steps to sample."""
    bytes_per_token: float = 1.0
    """Text is counted in bytes and divided by this; 1 is byte tokens, 4 near common tokenizers."""
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
    """Print all constants with their sources, and do nothing else."""
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
    setting, kernel_source = setting_of(options)
    if options.constants:
        console.print(constants_table(setting.table))
        console.print(f"kernels: {kernel_source}")
        return 0
    policies, ours = _policies(options)
    if options.plot is not None and (options.plot.suffix != ".png" or not options.plot.absolute().parent.is_dir()):
        raise ValueError(f"plot ({options.plot}) must be a .png file in a folder that is there")
    if options.steps < 20:
        print(f"{options.steps} steps: percentiles of fewer than 20 say little", file=sys.stderr)
    batches, lengths = _sampled(options, setting.run)
    say = _progress()
    outcomes = list(compare(policies, batches, setting, WARM_UP, say))
    measured = batches[WARM_UP:]
    verdict = recommendation = own = None
    points: list[advice.BreakEven] = []
    if ours is not None:
        size = names.pool_size(ours, setting.run.dp)
        verdict = advice.verdict(outcomes, ours, setting.table["memory"].value)
        if options.kernel == "triton" and options.gpus != "B200":  # FlashAttention-3 is for Hopper
            own = advice.with_own_kernels(measured[:3], setting, ours, policies)
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
            console.print(own_kernels_sentence(*own))
    if recommendation is not None:
        best, run = recommendation.best, setting.run
        console.print(
            f"Recommended, from two steps: pool {best.pool_size}, cp {best.cp} (dp {best.dp}, micro-steps "
            f"{run.sequences // best.dp}), tolerance {best.tolerance:g}, waves {best.waves}: {recommendation.reason}. "
            f"In a config: --mesh.pools {best.dp // best.pool_size} --mesh.pool-size {best.pool_size} "
            f"--mesh.cp {best.cp} --attention.waves {best.waves}; the tolerance is plan_pool's."
        )
    if points:
        console.print(advice.break_even_sentence(points))
    return 0


def _policies(options: SimulateOptions) -> tuple[list[str], str | None]:
    """Names to compare, and the one that the verdict is about. Where there is one, with all `advice.ALTERNATIVES`."""
    if options.pool < 1:
        raise ValueError(f"pool ({options.pool}) must be at least 1")
    policies = list(dict.fromkeys(_named(name, options) for name in options.policies))
    if not policies:
        raise ValueError("policies must name one at least; --list-policies says what there is")
    for name in policies:
        names.known(name)
    ours = next((name for name in policies if name.startswith(("libra:", "libra-all:"))), None)
    if ours is None:
        print("no verdict: it is about libra, which is not among the policies", file=sys.stderr)
        return policies, None
    missing = [name for name in advice.ALTERNATIVES if name not in policies]
    return [*missing, *policies], ours


def _named(name: str, options: SimulateOptions) -> str:
    """With a pool size, where the user gave none; "libra" as the trainer runs it."""
    if name == "libra":
        return advice.as_built(options.pool, options.pp)
    return f"{name}:{options.pool}" if name in names.SIZED else name


def own_kernels_sentence(other: str, ratio: float) -> str:
    """All policies were priced with one kernel; what if each had its own?"""
    fast = "about as fast" if abs(ratio - 1) < 0.005 else f"{ratio:.2f} times as fast"
    return (
        f"That is with the same kernels everywhere. On Triton's published speed, against {other} on FlashAttention-3, "
        f"Libra's steps are {fast}{': slower' if ratio < 0.995 else ''} (from three steps)."
    )


def setting_of(options: SimulateOptions) -> tuple[Setting, str]:
    """The cluster and run that the options describe, and where the kernel's speed is from."""
    table = changed(constants(options.gpus), _values(options.set))
    cost, source = kernel(options.kernel, table)
    model = MODELS[options.model]
    for name, least in {"steps": 1, "pool": 1, "dp": 1, "cp": 1, "pp": 1, "micro_steps": 1, "seed": 0}.items():
        if getattr(options, name) < least:
            raise ValueError(f"{name} ({getattr(options, name)}) must be at least {least}")
    if any(name in names.SIZED for name in options.policies) and options.dp % options.pool:
        raise ValueError(f"pool ({options.pool}) must divide dp ({options.dp})")
    setting = Setting.of(
        model, table, cost, options.seq_len, options.dp, options.cp, options.micro_steps,
        pp=options.pp, sync=options.sync, strided=options.mapping == "strided",
    )  # fmt: skip
    return setting, source


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
    lengths = read_lengths(path, bytes_per_token=options.bytes_per_token, least_tokens=wanted, seed=options.seed)
    if path.is_dir() and options.bytes_per_token == 1:
        print("text is counted in bytes, a token each; --bytes-per-token 4 is nearer to tokenizers", file=sys.stderr)
    long = int((lengths > run.seq_len).sum())
    if long:
        print(f"{long:,} of {len(lengths):,} documents are longer than a sequence and are cut", file=sys.stderr)
    longest = run.seq_len if options.longest is None else options.longest
    if longest < 1:
        raise ValueError(f"longest ({longest}) must be at least 1")
    if longest < run.seq_len:
        lengths = cut(lengths, longest).length
    if lengths.sum() < wanted:  # a real corpus that is too small: its documents again, in another order
        times = int(-(-wanted // lengths.sum()))
        if times * len(lengths) > MOST_DOCUMENTS:
            raise ValueError(
                f"{steps} steps need {wanted:,} tokens, {times * len(lengths):,} documents of this corpus, and "
                f"{MOST_DOCUMENTS:,} at most are sampled: ask for fewer or smaller steps"
            )
        what = f"{options.steps} steps and the {WARM_UP} that fill delay queues"
        print(f"the corpus has too few tokens for {what}: its documents come {times} times", file=sys.stderr)
        lengths = np.tile(lengths, times)
    return sample_steps(lengths, run, steps, options.seed), lengths


def _progress() -> Callable[[str], None]:
    if not sys.stderr.isatty():
        return lambda what: None
    err = Console(stderr=True)
    return lambda what: err.print(f"  {what}"[:100].ljust(100), end="\r")


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
    console.print(numbers_table(outcomes, setting, "Means over steps", lambda spread: spread[0]))
    console.print(numbers_table(outcomes, setting, "5th percentile", lambda spread: spread[1]))
    console.print(numbers_table(outcomes, setting, "95th percentile", lambda spread: spread[2]))
    console.print(
        "tokens/s/GPU, MFU: means of all steps together. pools, ranks, micro-steps: the slowest over the mean. bytes: "
        "the busiest rank's over those of a full sequence by Ulysses, and what of them goes across nodes."
    )
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
    too_much = [f"{each.policy} ({each.memory:.0f})" for each in outcomes if each.memory > room]
    if too_much:
        console.print(f"do not fit in the {room:g} GiB of a GPU: {', '.join(too_much)}")
    for each in outcomes:
        if any(each.changed):
            console.print(changed_sentence(each))


def _content(
    options: SimulateOptions,
    setting: Setting,
    kernel_source: str,
    outcomes: Sequence[Outcome],
    verdict: advice.Verdict | None,
    own: tuple[str, float] | None,
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
        "verdict": None
        if verdict is None
        else dataclasses.asdict(verdict) | {"with_own_kernels": own and {"best_other": own[0], "gain": own[1]}},
        "recommendation": None if recommendation is None else dataclasses.asdict(recommendation),
        "break_even": None
        if not points
        else {"sentence": advice.break_even_sentence(points), "points": [dataclasses.asdict(p) for p in points]},
    }
