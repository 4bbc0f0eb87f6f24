"""What a policy is: it takes the packed sequences of one optimizer step and says which ranks do what, micro-step by
micro-step. All policies, Libra's and other systems', speak these terms, so that one model prices them all.

Host side: NumPy only.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from libra_jax.links import Links
from libra_jax.modelled import PlanCounts
from libra_jax.policies.sharding import Parts
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, check_lengths

Sequences = Sequence[Sequence[int]]
"""Document lengths of packed sequences, in tokens."""

Exchange = Literal["plan", "ping_pong", "all_gather", "ring", "needed"]
"""How a group moves what its ranks need.

plan: blocks and pages from home to executors and back, wave by wave, as `libra_jax.exchange` does.
ping_pong: the same bytes at once, beside what a second micro-batch computes.
all_gather: every rank gets all keys and values of its sequence before its attention starts.
ring: the same bytes, passed on from rank to rank while the ranks compute.
needed: each rank gets the keys and values that its queries see, while it computes on those that it holds.
"""


@dataclasses.dataclass(frozen=True)
class RunShape:
    """What every policy is told of a run.

    seq_len: tokens of a packed sequence. dp: sequences side by side. cp: ranks of each. micro_steps: of an optimizer
    step, which so has dp * micro_steps sequences. num_heads, num_kv_heads, head_dim: of the model; dtype bfloat16.
    cost, links: what kernels and bytes cost. token_seconds: what a layer takes
    for one token beside its attention, forward and backward, on one rank (WLB-LLM weighs it against attention).

    Raises ValueError where a number is not a whole one of at least 1, or a rank would hold no block.
    """

    seq_len: int
    dp: int
    cp: int
    micro_steps: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block: int = 128
    cost: CostModel = dataclasses.field(default_factory=CostModel)
    links: Links = dataclasses.field(default_factory=Links)
    token_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seq_len", "dp", "cp", "micro_steps", "num_heads", "num_kv_heads", "head_dim", "block"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1")
        if not math.isfinite(self.token_seconds) or self.token_seconds < 0:
            raise ValueError(f"token_seconds ({self.token_seconds!r}) must be finite and 0 or more")
        self.spec(1)

    @property
    def sequences(self) -> int:
        """Sequences of an optimizer step."""
        return self.dp * self.micro_steps

    @property
    def ranks(self) -> int:
        return self.dp * self.cp

    def spec(
        self,
        pool_size: int,
        *,
        waves: int = 4,
        relays: bool = False,
        seq_len: int | None = None,
        cp: int | None = None,
        room: float | None = None,
    ) -> PoolSpec:
        """A pool of so many sequences. relays: pages cross nodes once, where the pool has more than one node and whole
        ones. room: `PoolSpec.capacity` in home blocks; None: the spec's own."""
        ranks, node = pool_size * (cp or self.cp), self.links.ranks_per_node
        return PoolSpec(
            seq_len or self.seq_len,
            pool_size,
            cp or self.cp,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            block=self.block,
            waves=waves,
            ranks_per_node=node if relays and ranks > node and ranks % node == 0 else None,
            capacity=room,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Ranks that do the attention of their sequences together, in one micro-step.

    sequences: (P,) document lengths of each sequence. spec: P sequences, spec.cp ranks each; spec.seq_len is the room
    of a sequence. exchange: see `Exchange`.
    executor: (P, K, nb) int32, with exchange "plan" or "ping_pong": the rank of each block. parts: with every other
    exchange, which tokens of the one sequence each rank computes, and holds.
    counts: what that executor makes ranks do and send, where planning has worked it out (see `travel`).
    tokens: of each rank, in its linear layers; padding counts where shapes are fixed.
    planning_seconds: processor time that it took to plan.
    """

    sequences: tuple[tuple[int, ...], ...]
    spec: PoolSpec
    exchange: Exchange
    tokens: int
    executor: np.ndarray | None = None
    parts: Parts | None = None
    counts: PlanCounts | None = None
    planning_seconds: float = 0.0

    @property
    def ranks(self) -> int:
        return self.spec.ranks

    @property
    def documents(self) -> list[int]:
        return [length for sequence in self.sequences for length in sequence]


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """One optimizer step. micro_steps: of each, the groups that run side by side; what they leave of the run's ranks
    has nothing to do. waiting: lengths of the documents that a policy holds back after this step."""

    micro_steps: list[list[Group]]
    waiting: tuple[int, ...] = ()

    @property
    def documents(self) -> Counter[int]:
        """The multiset of document lengths that the step trains on."""
        return Counter(length for groups in self.micro_steps for group in groups for length in group.documents)


class Policy(Protocol):
    """Plans step after step. One that holds documents back has state, and is made anew for every run."""

    def step(self, sequences: Sequences, run: RunShape) -> StepPlan:
        """Plans an optimizer step. sequences: `run.sequences` of them, each of at most `run.seq_len` tokens, in the
        order in which the loader packed them."""
        ...


class Changed(NamedTuple):
    """How a step's documents differ from those that were handed in: documents and tokens left out of it, and documents
    and tokens in it that are from another step."""

    left_out: int
    left_out_tokens: int
    from_others: int
    from_others_tokens: int


def changed(plan: StepPlan, sequences: Sequences) -> Changed:
    """Compares the multiset of documents that a step trains on with the one that was handed in."""
    given = Counter(length for sequence in sequences for length in sequence)
    left, came = given - plan.documents, plan.documents - given
    return Changed(left.total(), _tokens(left), came.total(), _tokens(came))


def _tokens(documents: Counter[int]) -> int:
    return sum(length * count for length, count in documents.items())


def check_step(sequences: Sequences, run: RunShape) -> None:
    """Raises ValueError with the rule and both numbers for sequences that are not a step of the run."""
    if len(sequences) != run.sequences:
        raise ValueError(
            f"a step has dp * micro_steps sequences ({run.dp} * {run.micro_steps} = {run.sequences}), got "
            f"{len(sequences)}"
        )
    for number, sequence in enumerate(sequences):
        check_lengths(sequence, run.seq_len, number)
