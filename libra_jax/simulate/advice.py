"""What the cluster model says one should do: whether Libra pays, with which settings, and from which skew on.

Every answer is a comparison of modelled steps, and says of which. Differences below `WORTH` are taken as none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from libra_jax.data.packing import cut
from libra_jax.plan import TOLERANCE
from libra_jax.policies.base import RunShape
from libra_jax.policies.names import known
from libra_jax.policies.packed import Order, libra
from libra_jax.simulate.constants import kernel
from libra_jax.simulate.step import Setting, heaviest_over_mean
from libra_jax.simulate.study import Outcome, compare, outcome, sample_steps

Batches = Sequence[Sequence[Sequence[int]]]

WORTH = 0.02
"""Share of a step's time from which a difference counts."""
POOLS = (1, 2, 4, 8, 16, 32)
TOLERANCES = (0.001, 0.003, 0.01, 0.03)
WAVES = (4, 6, 8)
ALTERNATIVES = ("ulysses-sorted", "context-parallel", "per-document")
"""What Libra is always compared with: the best without pools for long, short and middling documents."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A setting, and the share of the ideal that its steps reach; None: it does not fit in memory. relays: pages cross
    nodes once: two levels of exchange."""

    pool_size: int
    cp: int
    dp: int
    tolerance: float
    waves: int
    efficiency: float | None
    memory: float
    relays: bool = True


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """best: what to use. reason: why, in a sentence. flags: of `libra train`, for all of it. tried: everything that was
    looked at, the asked one first. plain: the fastest policy without pools on as many GPUs, plain_cp: with this cp;
    gain: how many times as fast Libra is with the best settings, or None where nothing fits."""

    best: Tried
    reason: str
    flags: str
    tried: tuple[Tried, ...]
    plain: str
    plain_cp: int
    gain: float | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """pays: whether Libra is worth it. best_other: the fastest policy without pools that keeps every step's documents,
    and gain: how many times as fast Libra is. sentence: all of it in words."""

    pays: bool
    best_other: str
    gain: float
    sentence: str


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """A corpus with all documents cut to `longest` tokens: what Libra gains over the best other policy, and how heavy
    the heaviest sequence of a step is over the mean."""

    longest: int
    gain: float
    best_other: str
    heaviest: float


def verdict(outcomes: Sequence[Outcome], ours: str, room: float = math.inf) -> Verdict:
    """Of policies over the same steps, all with the same kernels. room: GiB of a GPU.

    Compared are policies that keep every step's documents, pool no attention and fit: what one would run without Libra.
    Others that are faster than these are named beside it: global pools, and those that pack documents anew, whose price
    for a run's loss is not modelled. Raises ValueError where there is nothing to compare with.
    """
    mine = next(each for each in outcomes if each.policy == ours)
    plain = [each for each in outcomes if is_plain(each.policy)]
    if not plain:
        raise ValueError("a verdict needs a policy, beside Libra, that keeps every step's documents and pools nothing")
    best = fastest(plain, room)
    gain = mine.efficiency / best.efficiency
    pays = gain >= 1 + WORTH and mine.memory <= room
    against = f"with {best.policy}, the best without pools"
    if pays:
        sentence = f"Libra pays here, with equal kernels: steps of {ours} are {gain:.2f} times as fast as {against}"
    elif mine.memory > room:
        sentence = f"Libra does not pay here: its fullest rank needs {mine.memory:.0f} GiB, and there are {room:g}"
    else:
        how = f"{1 - gain:.1%} slower"
        if gain >= 1:
            how = f"{gain - 1:.1%} faster (under {WORTH:.0%} counts as nothing)"
        sentence = f"Libra does not pay here: with equal kernels steps of {ours} are {how} than {against}"
    notes = []
    for each in outcomes:
        if not each.efficiency:
            notes.append(f"{each.policy} holds back all documents of these steps")
            continue
        ratio = f"{mine.efficiency / each.efficiency:.2f} times as fast as"
        if each.policy == "ulysses" and each is not best:
            notes.append(f"{ratio} plain packing with Ulysses")
        elif each not in plain and not each.policy.startswith("libra") and each.efficiency > best.efficiency:
            why = "one pool of all sequences" if known(each.policy).keeps else "which packs documents anew"
            notes.append(f"{ratio} {each.policy}, {why}")
    return Verdict(pays, best.policy, gain, "; ".join([sentence, *notes]) + ".")


def fastest(outcomes: Sequence[Outcome], room: float = math.inf) -> Outcome:
    """The one with the fastest steps, of those that fit where any does."""
    return max([each for each in outcomes if each.memory <= room] or outcomes, key=lambda each: each.efficiency)


def as_built(pool_size: int, pp: int) -> str:
    """The name of Libra as the trainer runs it: with stages all of a step is even, else what runs side by side."""
    return f"libra-all:{pool_size}" if pp > 1 else f"libra:{pool_size}"


def is_plain(name: str) -> bool:
    """Whether a policy is what one would run without Libra: it keeps a step's documents and pools no attention."""
    return known(name).keeps and not known(name).pools


def with_own_kernels(batches: Batches, setting: Setting, ours: str, others: Sequence[str]) -> tuple[str, float]:
    """The fastest of the plain ones of `others` with FlashAttention-3, and how many times as fast `ours` is with
    Triton's published speed, by MFU."""
    mfu = {}
    for name, kernels in [(ours, "triton"), *((name, "fa3") for name in others if is_plain(name))]:
        cost = kernel(kernels, setting.table)[0]
        priced = dataclasses.replace(setting, cost=cost, run=dataclasses.replace(setting.run, cost=cost))
        found = next(compare([name], batches, priced))
        mfu[name] = sum(step.flops for step in found.steps) / sum(step.step for step in found.steps)
    mine = mfu.pop(ours)
    best = max(mfu, key=lambda name: mfu[name])
    return best, mine / mfu[best]


def recommend(
    batches: Batches,
    setting: Setting,
    pool_size: int,
    others: Sequence[str] = ALTERNATIVES,
    progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """Looks for the settings with the fastest steps on this many GPUs: pool size, then cp, tolerance, waves, and levels
    of exchange, one after the other from the asked ones. Of settings within half a percent, the smaller pool, the asked
    cp, the larger tolerance, the fewer waves, and two levels. others: policies; the plain ones of them are tried with
    the same cps, so that what is recommended is compared with the best there is without Libra."""
    order: Order = "all" if setting.pp > 1 else "pools"
    tried: dict[tuple[int, int, float, int, bool], Tried] = {}

    def attempt(pool: int, cp: int, tolerance: float, waves: int, relays: bool = True) -> Tried:
        key = pool, cp, tolerance, waves, relays
        if key not in tried:
            if progress is not None:
                progress(f"pool {pool}, cp {cp}, tolerance {tolerance:g}, waves {waves}, relays {relays}")
            run = _reshaped(setting.run, cp)
            here = dataclasses.replace(setting, run=run)
            policy = libra(pool, order=order, tolerance=tolerance, waves=waves, relays=relays)
            found = outcome("libra", policy, batches, here)
            efficiency = found.efficiency if found.memory <= setting.table["memory"].value else None
            two_levels = relays and run.spec(pool, relays=True).ranks_per_node is not None
            tried[key] = Tried(pool, cp, run.dp, tolerance, waves, efficiency, found.memory, two_levels)
        return tried[key]

    cp, tolerance, waves = setting.run.cp, TOLERANCE, 6
    asked = attempt(pool_size, cp, tolerance, waves)
    sizes_of_pools = sorted({*POOLS, pool_size})
    pools = [attempt(pool, cp, tolerance, waves) for pool in sizes_of_pools if setting.run.dp % pool == 0]
    best = _first_good(pools)
    sizes = [best, *(attempt(best.pool_size, c, tolerance, waves) for c in _cps(setting.run, best.pool_size))]
    best = by_size = _first_good(sizes)
    best = _first_good([attempt(best.pool_size, best.cp, each, waves) for each in sorted(TOLERANCES, reverse=True)])
    by_tolerance = best
    best = by_waves = _first_good([attempt(best.pool_size, best.cp, best.tolerance, each) for each in WAVES])
    if best.relays:
        best = _first_good([best, attempt(best.pool_size, best.cp, best.tolerance, best.waves, False)])
    changes = [
        (f"tolerance {tolerance:g}", by_size, by_tolerance),
        (f"{waves} waves", by_tolerance, by_waves),
        ("two levels of exchange", by_waves, best),
    ]
    plain, plain_cp, efficiency = _best_plain(batches, setting, others, sorted({each.cp for each in sizes}))
    gain = None if best.efficiency is None else best.efficiency / efficiency
    reason = _reason(best, pools, sizes, asked, setting, changes)
    return Recommendation(best, reason, flags(best, setting), tuple(tried.values()), plain, plain_cp, gain)


def _best_plain(
    batches: Batches, setting: Setting, others: Sequence[str], cps: Sequence[int]
) -> tuple[str, int, float]:
    """The plain policy and cp with the fastest steps, of those that fit where any does, and its efficiency."""
    found: list[tuple[bool, float, str, int]] = []
    for cp, name in itertools.product(cps, filter(is_plain, others)):
        here = dataclasses.replace(setting, run=_reshaped(setting.run, cp))
        try:
            each = next(compare([name], batches, here))
        except ValueError:  # it has no answer for that cp
            continue
        found.append((each.memory <= setting.table["memory"].value, each.efficiency, name, cp))
    _, efficiency, name, cp = max(found)
    return name, cp, efficiency


def flags(tried: Tried, setting: Setting) -> str:
    """What `libra train` takes to run a setting that was tried."""
    run = _reshaped(setting.run, tried.cp)
    values = {
        "seq-len": run.seq_len,
        "micro-steps": run.micro_steps,
        "mesh.pools": run.dp // tried.pool_size,
        "mesh.pool-size": tried.pool_size,
        "mesh.cp": tried.cp,
        "mesh.pp": setting.pp,
        "attention.waves": tried.waves,
        "attention.tolerance": f"{tried.tolerance:g}",
    }
    if tried.relays:
        values["attention.ranks-per-node"] = setting.network.links.ranks_per_node
    return " ".join(f"--{name} {value}" for name, value in values.items())


def _reshaped(run: RunShape, cp: int) -> RunShape:
    """The same GPUs and sequences with another cp."""
    dp = run.ranks // cp
    return dataclasses.replace(run, cp=cp, dp=dp, micro_steps=run.sequences // dp)


def _cps(run: RunShape, pool_size: int) -> list[int]:
    """Half and twice the cp, where GPUs and sequences come out even."""
    found = []
    for cp in (run.cp // 2, run.cp * 2):
        if cp and run.ranks % cp == 0 and run.seq_len % (cp * run.block) == 0:
            dp = run.ranks // cp
            if dp % pool_size == 0 and run.sequences % dp == 0:
                found.append(cp)
    return found


def _first_good(candidates: Sequence[Tried]) -> Tried:
    """The first that is within half a percent of the fastest that fits; the one with least memory where none does."""
    fit = [each for each in candidates if each.efficiency is not None]
    if not fit:
        return min(candidates, key=lambda each: each.memory)
    most = max(each.efficiency or 0.0 for each in fit)
    return next(each for each in fit if (each.efficiency or 0.0) >= 0.995 * most)


def _reason(
    best: Tried,
    pools: Sequence[Tried],
    sizes: Sequence[Tried],
    asked: Tried,
    setting: Setting,
    changes: Sequence[tuple[str, Tried, Tried]] = (),
) -> str:
    """pools: with the asked cp. sizes: with each cp, that one first. changes: what was given up, with it and without.
    Only what differs in one thing is compared."""
    if best.efficiency is None:
        return (
            f"nothing that was tried fits in {setting.table['memory'].value:g} GiB: the least needs {best.memory:.0f}"
        )
    parts, pool = [], sizes[0]
    fit = [each for each in pools if each.efficiency is not None]
    smaller = [each for each in fit if each.pool_size < pool.pool_size]
    larger = [each for each in fit if each.pool_size > pool.pool_size]
    if smaller:
        parts.append(f"pools of {smaller[-1].pool_size} are {_slower(smaller[-1], pool)}")
    if larger:
        top = max(larger, key=lambda each: each.efficiency or 0)
        parts.append(f"pools of {top.pool_size}, which exchange among more ranks, are {_slower(top, pool)}")
    size = next(each for each in sizes if each.cp == best.cp)
    for each in sizes:
        if each.cp != best.cp:
            what = f"needs {each.memory:.0f} GiB" if each.efficiency is None else f"is {_slower(each, size)}"
            parts.append(f"cp {each.cp} {what}")
    parts += [f"{what} {'is' if 'tolerance' in what else 'are'} {_slower(a, b)}" for what, a, b in changes if a != b]
    if asked.efficiency is None:
        parts.append(f"what was asked for needs {asked.memory:.0f} GiB")
    elif asked != best:
        parts.append(f"all together, what was asked for is {_slower(asked, best)}")
    return "; ".join(parts) or "there is nothing else to choose from"


def _slower(each: Tried, other: Tried) -> str:
    """By how much, in words. Both must fit."""
    ratio = (each.efficiency or 0.0) / (other.efficiency or 1.0)
    if abs(1 - ratio) < 5e-4:
        return "as fast"
    return f"{abs(1 - ratio):.1%} {'slower' if ratio < 1 else 'faster'}"


def break_even(
    lengths: np.ndarray,
    setting: Setting,
    others: Sequence[str],
    pool_size: int,
    steps: int = 2,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[BreakEven]:
    """Gains on the corpus with its documents cut shorter and shorter: to the sequence, to half of it, and so on to a
    64th; lengths that cut none are left out but for the least of them. others: policies to compare with: the plain ones
    of them (`is_plain`)."""
    kept = [name for name in others if is_plain(name)]
    found, there = [], int(lengths.max())
    cuts = [setting.run.seq_len // 2**halvings for halvings in range(7)]
    for longest in [min(each, there) for each in cuts if each // 2 < there or each == cuts[-1]]:
        if progress is not None:
            progress(f"documents of at most {longest:,} tokens")
        batches = sample_steps(cut(lengths, longest).length, setting.run, steps, seed)
        outcomes = list(compare([*kept, as_built(pool_size, setting.pp)], batches, setting))
        best = max(outcomes[:-1], key=lambda each: each.efficiency)
        heaviest = float(np.mean([heaviest_over_mean(sequences) for sequences in batches]))
        found.append(BreakEven(longest, outcomes[-1].efficiency / best.efficiency, best.policy, heaviest))
    return found


def break_even_sentence(points: Sequence[BreakEven]) -> str:
    """From which skew on Libra pays, in words."""
    paying = list(itertools.takewhile(lambda point: point.gain >= 1 + WORTH, points))
    if not paying:
        return f"Libra gains less than {WORTH:.0%} even with the corpus's longest documents."
    least = paying[-1]
    if len(paying) == len(points):
        return (
            f"Libra gains {WORTH:.0%} or more down to documents of at most {least.longest:,} tokens, the shortest "
            f"tried: {least.gain - 1:.1%}, where a step's heaviest sequence has {least.heaviest:.1f} times the mean "
            "attention."
        )
    below = [point for point in points if point.longest < least.longest]
    sentence = (
        f"Libra gains {WORTH:.0%} or more once documents reach {least.longest:,} tokens, where a step's heaviest "
        f"sequence has {least.heaviest:.1f} times the mean attention"
    )
    if below:
        gain = below[0].gain - 1
        sentence += f"; with documents up to {below[0].longest:,} tokens ({below[0].heaviest:.1f} times) it "
        sentence += f"{'gains' if gain >= 0 else 'loses'} {abs(gain):.1%}"
    return sentence + "."
