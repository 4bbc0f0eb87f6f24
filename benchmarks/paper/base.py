"""What the experiments of the report share: settings, sampled steps, policies measured, rows.

All policies get the same steps and the same kernels (FlashAttention-3's published curve, unless a row says otherwise).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pools import CORPORA
from libra_jax.data.lengths import find_lengths, read_lengths
from libra_jax.data.packing import cut
from libra_jax.policies.base import Policy, RunShape
from libra_jax.policies.names import POLICIES
from libra_jax.policies.names import policy as policy_named
from libra_jax.simulate.command import MODELS, WARM_UP
from libra_jax.simulate.constants import changed, constants, kernel
from libra_jax.simulate.step import Setting, Sync
from libra_jax.simulate.study import Outcome, outcome, outcomes, sample_steps

Row = dict[str, Any]
Batches = list[list[list[int]]]

MODEL_NAMES = ("qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b")
TOKENS: Mapping[str, int] = {"256K": 262_144, "1M": 1_048_576}
CP: Mapping[str, int] = {"256K": 8, "1M": 16}
LOGNORMAL = CORPORA[0]
"""The corpus with the median and 99th percentile that the Libra paper reports."""
WLB = (
    "wlb-micro-shuffled", "wlb-batch-shuffled", "wlb-batch-sorted",
    "wlb-micro-delay-shuffled", "wlb-batch-delay-shuffled", "wlb-batch-delay-sorted",
)  # fmt: skip
ASSUMED = "wlb-micro-delay-shuffled"
"""The variant that the WLB-LLM paper describes: each iteration's documents, delay queues, no order of micro-batches."""
WITHOUT_DELAY = "wlb-micro-shuffled"
"""The variant that the Libra paper compares with, as far as it is known: DistCA and Libra leave the queues out."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to model. dp * cp GPUs. values: constants to change. longest: documents are cut to it."""

    model: str = "qwen3-8b"
    tokens: str = "256K"
    corpus: str = LOGNORMAL
    dp: int = 32
    cp: int | None = None
    micro_steps: int = 4
    steps: int = 20
    kernel: str = "fa3"
    sync: Sync = "layer"
    strided: bool = False
    values: tuple[tuple[str, float], ...] = ()
    longest: int | None = None
    seed: int = 0

    def setting(self) -> Setting:
        table = changed(constants("H100"), dict(self.values))
        return Setting.of(
            MODELS[self.model], table, kernel(self.kernel, table)[0], TOKENS[self.tokens], self.dp,
            self.cp or CP[self.tokens], self.micro_steps, sync=self.sync, strided=self.strided,
        )  # fmt: skip

    def batches(self, warm_up: int = 0) -> Batches:
        """The last `steps` are the same whatever the warm-up."""
        run = self.setting().run
        longest = self.longest or run.seq_len
        drawn = RunShape(run.seq_len, run.dp, 1, run.micro_steps)  # what sampling depends on
        return sampled(self.corpus, drawn, self.steps + WARM_UP, longest, self.seed)[WARM_UP - warm_up :]

    def measured(self, name: str, policy: Policy | None = None) -> Outcome:
        """A policy over the case's steps; by name, or as given."""
        warm_up = warm_up_of(name)
        return outcome(name, policy or policy_named(name), self.batches(warm_up), self.setting(), warm_up)

    def measured_in(self, name: str, policy: Policy, others: Sequence[Case]) -> list[Outcome]:
        """A policy over the case's steps, priced here and in others that differ in the network alone."""
        settings = [each.setting() for each in (self, *others)]
        warm_up = warm_up_of(name)
        return outcomes(name, policy, self.batches(warm_up), settings, warm_up)

    def words(self) -> Row:
        return {"model": self.model, "tokens": self.tokens, "corpus": self.corpus, "dp": self.dp}


def warm_up_of(name: str) -> int:
    """Steps that a policy plans before the first that is priced."""
    return WARM_UP if name in POLICIES and POLICIES[name].delays else 0


@functools.lru_cache(maxsize=2)
def sampled(corpus: str, run: RunShape, steps: int, longest: int, seed: int) -> Batches:
    """Steps of a corpus whose documents are cut to `longest` tokens."""
    tokens = steps * run.sequences * run.seq_len
    lengths = read_lengths(find_lengths(corpus), least_tokens=int(1.03 * tokens), seed=seed)
    return sample_steps(cut(lengths, longest).length, run, steps, seed)


def numbers(found: Outcome, case: Case) -> Row:
    """What rows say of a policy: shares of the ideal and of losses, over all steps; means of the rest."""
    setting = case.setting()
    spreads = found.numbers(setting)
    row: Row = {"policy": found.policy, "efficiency": found.efficiency}
    row |= {f"lost to {name}": share for name, share in found.losses.items()}
    for name in ("pool_imbalance", "rank_imbalance", "micro_step_imbalance", "memory", "mfu", "heaviest"):
        row[name] = spreads[name][0]
    row["bytes over ulysses"] = spreads["busiest_bytes"][0] / max(spreads["ulysses_bytes"][0], 1)
    row["step seconds"], row["p5"], row["p95"] = spreads["step"]
    row["tokens per gpu second"] = spreads["tokens per gpu second"][0]
    row["planning ms"] = 1e3 * spreads["planning"][0] / max(spreads["micro_steps"][0], 1)
    row["steps"] = len(found.steps)
    left, left_tokens, came, came_tokens = found.changed
    row["documents left out"], row["documents"] = left, found.documents
    row["tokens left out"], row["tokens from other steps"] = left_tokens, came_tokens
    row["documents from other steps"] = came
    return row


def fewer_steps(case: Case, dp: int) -> Case:
    """Half the sampled steps at DP 128, a quarter at DP 256, 2 at least, where a step has 512 sequences and more: those
    of DP 64 with all of theirs are as many."""
    return dataclasses.replace(case, dp=dp, steps=max(case.steps * min(64, dp) // dp, 2))
