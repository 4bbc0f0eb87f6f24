"""`libra simulate`: what training would take on a cluster under each policy, and what to do about it. No GPU needed.

Takes document lengths and a model, samples optimizer steps and prices them (`step`); prints tables or JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.console import Console
from tyro.conf import UseAppendAction

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
from libra_jax.simulate.tables import (
    changed_sentence,
    constants_table,
    kernels_table,
    losses_table,
    numbers_table,
    policies_table,
    settings_sentence,
)

MODELS: dict[str, Qwen3Config] = {
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-235b-a22b": QWEN3_235B_A22B,
}
WARM_UP = 12
"""Steps for which policies that hold documents back fill their queues, before the first that is priced."""
PERCENTILES = 20
"""Steps from which on percentiles are shown."""
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
    set: Annotated[tuple[str, ...], UseAppendAction] = ()
    """A constant to change, as NAME=VALUE; may come several times. --constants shows them."""
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
        console.print(kernels_table(setting.table))
        console.print(f"kernels: {kernel_source}")
        console.print(settings_sentence())
        return 0
    policies, pooled = _policies(options)
    plot = options.plot
    if plot is not None and (plot.suffix != ".png" or not plot.absolute().parent.is_dir() or plot.is_dir()):
        raise ValueError(f"plot ({plot}) must be a .png file in a folder that is there")
    if plot is not None and not os.access(plot if plot.exists() else plot.absolute().parent, os.W_OK):
        raise ValueError(f"plot ({plot}) cannot be written")
    if options.steps < PERCENTILES:
        print(f"{options.steps} steps: percentiles of fewer than {PERCENTILES} are not shown", file=sys.stderr)
    batches, lengths = _sampled(options, setting.run)
    say = _progress()
    outcomes = list(compare(policies, batches, setting, WARM_UP, say))
    measured = batches[WARM_UP:]
    verdict = recommendation = own = None
    points: list[advice.BreakEven] = []
    if pooled:
        room = setting.table["memory"].value
        mine = advice.fastest([each for each in outcomes if each.policy in pooled], room)
        ours = mine.policy
        size = names.pool_size(ours, setting.run.dp)
        verdict = advice.verdict(outcomes, ours, room)
        hopper = options.gpus != "B200"  # FlashAttention-3 is for Hopper
        if options.kernel == "triton" and hopper and mine.memory <= room:
            own = advice.with_own_kernels(measured[:3], setting, ours, policies)
        if not options.quick:
            recommendation = advice.recommend(measured[:2], setting, size, policies, say)
            if min(each.memory for each in outcomes) <= room:
                points = advice.break_even(lengths, setting, policies, size, 2, options.seed, say)
    say("")
    title = f"{options.model}, {options.seq_len:,} tokens, {options.lengths}, {setting.gpus} {options.gpus}"
    if options.json:
        print(
            json.dumps(
                _content(options, setting, kernel_source, outcomes, verdict, own, recommendation, points),
                indent=1,
                allow_nan=False,
            )
        )
    else:
        _show(console, title, setting, kernel_source, outcomes, measured, options)
        said = [] if verdict is None else [f"\n[bold]{verdict.sentence}[/bold]"]
        if own is not None:
            said.append(f"[bold]{own_kernels_sentence(*own, steps=len(measured[:3]))}[/bold]")
        if recommendation is not None:
            said.append(recommended_sentence(recommendation, len(measured[:2])))
        if points:
            said.append(advice.break_even_sentence(points))
        for each in said:
            console.print(each)
    if plot is not None:  # last: whatever becomes of it, the rest is said
        steps_png(plot, f"{title}: modelled step over the ideal", outcomes, points)
        print(f"picture: {plot}", file=sys.stderr)
    return 0


def _policies(options: SimulateOptions) -> tuple[list[str], list[str]]:
    """Names to compare, and those of Libra as built: the verdict is about the fastest of these. Where there are some,
    with all `advice.ALTERNATIVES`."""
    if options.pool < 1:
        raise ValueError(f"pool ({options.pool}) must be at least 1")
    policies = list(dict.fromkeys(_named(name, options) for name in options.policies))
    if not policies:
        raise ValueError("policies must name one at least; --list-policies says what there is")
    for name in policies:
        names.known(name)
        size = names.pool_size(name, options.dp)
        if options.dp % size:
            raise ValueError(f"{name}: pool_size ({size}) must divide dp ({options.dp})")
        if name == "dynamic-cp" and (options.pp > 1 or options.sync == "step"):
            what = f"pp ({options.pp}) must be 1" if options.pp > 1 else 'sync="step" has no meaning'
            raise ValueError(f"{name}: {what}, because micro-steps must have the same groups of ranks, and its change")
    pooled = [name for name in policies if name.startswith(("libra:", "libra-all:"))]
    if not pooled:
        print("no verdict: it is about libra, which is not among the policies", file=sys.stderr)
        return policies, []
    missing = [name for name in advice.ALTERNATIVES if name not in policies]
    return [*missing, *policies], pooled


def _named(name: str, options: SimulateOptions) -> str:
    """With a pool size, where the user gave none; "libra" as the trainer runs it."""
    if name == "libra":
        return advice.as_built(options.pool, options.pp)
    return f"{name}:{options.pool}" if name in names.SIZED else name


def own_kernels_sentence(other: str, ratio: float, *, steps: int) -> str:
    """All policies were priced with one kernel; what if each had the one that it has today?"""
    kernels = f"with the kernels that each has today, Triton here and FlashAttention-3 with {other}"
    so = f"from {steps} step{'s' if steps > 1 else ''}; Triton's forward speed is published, its backward assumed"
    if ratio >= 1 + advice.WORTH:
        return f"W{kernels[1:]}, Libra's steps are {ratio:.2f} times as fast ({so})."
    return f"Libra does not pay {kernels}: its steps are {ratio:.2f} times as fast ({so})."


def recommended_sentence(found: advice.Recommendation, steps: int) -> str:
    """Settings, why, how they compare with the best without Libra, and how to use them."""
    best = found.best
    so = f"from {steps} step{'s' if steps > 1 else ''}"
    if found.gain is None:
        return f"Nothing is recommended, {so}: {found.reason}."
    against = f"{found.plain} with cp {found.plain_cp}, the best without pools on as many GPUs"
    if found.gain >= 1 + advice.WORTH:
        gain = f"Its steps are {found.gain:.2f} times as fast as with {against}."
    else:
        gain = f"Even so Libra does not pay: its steps are {found.gain:.3f} times as fast as with {against}."
    return (
        f"Recommended for Libra, {so}: pool {best.pool_size}, cp {best.cp}, tolerance {best.tolerance:g}, waves "
        f"{best.waves}, {'two levels' if best.relays else 'one level'} of exchange: {found.reason}. {gain} "
        f"libra train CONFIG {found.flags}"
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
    longest = run.seq_len if options.longest is None else options.longest
    if longest < 1:
        raise ValueError(f"longest ({longest}) must be at least 1")
    path = find_lengths(options.lengths)
    wanted = int(1.02 * steps * run.sequences * run.seq_len)
    lengths = read_lengths(path, bytes_per_token=options.bytes_per_token, least_tokens=wanted, seed=options.seed)
    if path.is_dir() and options.bytes_per_token == 1:
        print("text is counted in bytes, a token each; --bytes-per-token 4 is nearer to tokenizers", file=sys.stderr)
    long = int((lengths > run.seq_len).sum())
    if long:
        print(f"{long:,} of {len(lengths):,} documents are longer than a sequence and are cut", file=sys.stderr)
    if longest < run.seq_len:
        pieces = int((-(-lengths // longest)).astype(np.float64).sum())
        if pieces > MOST_DOCUMENTS:
            raise ValueError(
                f"cut to {longest:,} tokens these documents are {pieces:,}, and {MOST_DOCUMENTS:,} at most are sampled"
            )
        lengths = cut(lengths, longest).length
    if lengths.sum() < wanted:  # a real corpus that is too small: its documents again, in another order
        times = -(-wanted // int(lengths.sum()))
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
    if options.steps >= PERCENTILES:
        console.print(numbers_table(outcomes, setting, "5th percentile", lambda spread: spread[1]))
        console.print(numbers_table(outcomes, setting, "95th percentile", lambda spread: spread[2]))
    console.print(
        "tok/s/GPU, MFU: of all steps together. pools, ranks, micro-steps: the slowest over the mean; libra's "
        "micro-steps are unlike on purpose. bytes: the busiest rank's over one all-to-all of a full sequence's q, k, "
        "v and outputs, and across: what of them crosses nodes. GiB: the fullest rank in any step. “Times as fast” "
        "below is one policy's ideal % over the other's: steps of policies that move documents are of unlike size."
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


def _own(other: str, gain: float) -> dict[str, Any]:
    return {"best_other": other, "gain": gain, "pays": gain >= 1 + advice.WORTH}


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
        "verdict": None if verdict is None else dataclasses.asdict(verdict) | {"with_own_kernels": own and _own(*own)},
        "recommendation": None if recommendation is None else dataclasses.asdict(recommendation),
        "break_even": None
        if not points
        else {"sentence": advice.break_even_sentence(points), "points": [dataclasses.asdict(p) for p in points]},
    }
