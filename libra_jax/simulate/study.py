"""Policies side by side: the same sampled steps through each, priced, and summed up as mean and percentiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from libra_jax.data.packing import PackedDocuments
from libra_jax.policies import names
from libra_jax.policies.base import Changed, Policy, RunShape, StepPlan, changed
from libra_jax.policies.packed import Pools
from libra_jax.simulate.step import Setting, StepResult, simulate_step

Spread = tuple[float, float, float]
"""Mean, 5th and 95th percentile."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A policy over all sampled steps.

    policy: its name. steps: results, one a step. changed: documents left out and from elsewhere, summed over steps.
    documents: of all steps as they were handed in. waiting: tokens held back after the last step.
    """

    policy: str
    steps: tuple[StepResult, ...]
    changed: Changed
    documents: int
    waiting: int

    def numbers(self, setting: Setting) -> dict[str, Spread]:
        """Mean, 5th and 95th percentile of every number of `StepResult.numbers`. Of rates, and of shares of time, the
        mean is that of all steps together: steps of a policy that holds documents back are of unlike size."""
        each = [step.numbers(setting.gpus, setting.table["peak"].value) for step in self.steps]
        found = {name: spread([values[name] for values in each]) for name in each[0]}
        rate = 1 / sum(step.step for step in self.steps) / setting.gpus
        whole = {
            "tokens per gpu second": sum(step.tokens for step in self.steps) * rate,
            "mfu": sum(step.flops for step in self.steps) * rate / setting.table["peak"].value,
            "efficiency": self.efficiency,
            **{f"lost to {name}": share for name, share in self.losses.items()},
        }
        return found | {name: (mean, *found[name][1:]) for name, mean in whole.items()}

    @property
    def seconds_per_token(self) -> float:
        """Of the whole run: policies that hold documents back have steps of unlike size."""
        return sum(step.step for step in self.steps) / max(sum(step.tokens for step in self.steps), 1)

    @property
    def memory(self) -> float:
        """GiB of the fullest rank in any step."""
        return max(step.memory for step in self.steps)

    @property
    def efficiency(self) -> float:
        """Ideal time over modelled time, of all steps together."""
        return sum(step.ideal for step in self.steps) / sum(step.step for step in self.steps)

    @property
    def losses(self) -> dict[str, float]:
        """Shares of the time of all steps."""
        total = sum(step.step for step in self.steps)
        return {name: sum(step.losses[name] for step in self.steps) / total for name in self.steps[0].losses}


def spread(values: Sequence[float]) -> Spread:
    low, high = np.quantile(values, [0.05, 0.95])
    return float(np.mean(values)), float(low), float(high)


def sample_steps(lengths: np.ndarray, run: RunShape, steps: int, seed: int = 0) -> list[list[list[int]]]:
    """Packed sequences of `steps` optimizer steps, as the loader would serve them: documents in random order, those
    longer than a sequence cut, packed first fit, the sequences in random order.

    Raises ValueError where there are fewer documents than that, with both numbers of tokens.
    """
    wanted = steps * run.sequences * run.seq_len
    if lengths.sum() < 1.01 * wanted:
        raise ValueError(
            f"{steps} steps of {run.sequences} sequences of {run.seq_len:,} tokens need {wanted:,} tokens and 1% more, "
            f"but the documents have {int(lengths.sum()):,}"
        )
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(lengths)
    enough = int(np.searchsorted(np.cumsum(shuffled), 1.01 * wanted)) + 1
    packed = PackedDocuments(shuffled[:enough], run.seq_len, seed=seed)
    chosen = rng.permutation(len(packed))[: steps * run.sequences]
    if len(chosen) < steps * run.sequences:
        raise ValueError(f"{steps * run.sequences} sequences are asked for, and the documents fill {len(chosen)}")
    found = {int(i): packed.lengths(int(i)).tolist() for i in np.sort(chosen)}  # a window is packed once
    sequences = [found[int(i)] for i in chosen]
    return [sequences[i * run.sequences :][: run.sequences] for i in range(steps)]


def outcome(
    name: str, policy: Policy, batches: Sequence[Sequence[Sequence[int]]], setting: Setting, warm_up: int = 0
) -> Outcome:
    """One policy through all steps, in order. warm_up: so many at the front are planned, to fill delay queues, and not
    priced."""
    return outcomes(name, policy, batches, [setting], warm_up)[0]


def outcomes(
    name: str,
    policy: Policy,
    batches: Sequence[Sequence[Sequence[int]]],
    settings: Sequence[Setting],
    warm_up: int = 0,
) -> list[Outcome]:
    """`outcome` in several settings of one run: each step is planned once, and priced in every one."""
    if not len(batches) > warm_up or not settings:
        raise ValueError(
            f"{len(batches)} steps, {warm_up} of them to warm up, and {len(settings)} settings: nothing to price"
        )
    run, strided = settings[0].run, [setting.network.strided for setting in settings]
    if any(setting.run != run for setting in settings):
        raise ValueError("steps are planned for one run, and the settings have several")
    if isinstance(policy, Pools) and policy.relays and any(strided):
        if not all(strided):
            raise ValueError("relays serve ranks that share a node: settings must all be strided, or none")
        policy = dataclasses.replace(policy, relays=False)
    found: list[list[StepResult]] = [[] for _ in settings]
    total, documents, plan = Changed(0, 0, 0, 0), 0, StepPlan([])
    for number, sequences in enumerate(batches):
        plan = policy.step(sequences, run)
        if number < warm_up:
            continue
        for results, setting in zip(found, settings, strict=True):
            results.append(simulate_step(plan, setting))
        total = Changed(*(a + b for a, b in zip(total, changed(plan, sequences), strict=True)))
        documents += sum(map(len, sequences))
    return [Outcome(name, tuple(results), total, documents, sum(plan.waiting)) for results in found]


def compare(
    policies: Sequence[str],
    batches: Sequence[Sequence[Sequence[int]]],
    setting: Setting,
    warm_up: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Outcome]:
    """Every policy, by name (`policies.names`), over the same steps. warm_up: steps at the front for policies that hold
    documents back; the others begin after them."""
    for name in policies:
        if progress is not None:
            progress(name)
        known = names.known(name)
        begin = warm_up if known.delays else 0
        try:
            found = outcome(name, known.make(), batches[warm_up - begin :], setting, begin)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        yield found
