"""Megatron-LM's dynamic context parallelism as a policy: each document gets as many ranks as its length needs.

After the published scheduler that packs (github.com/NVIDIA/Megatron-LM, `default_dynamic_cp`, 2025-2026; it grew out of
the hybrid context parallelism there). Written anew from what is public:

- A document takes the smallest power of two of ranks on which a rank holds at most `max_tokens` of it; all ranks where
  that is more than there are. It costs each of them length ** 2 / ranks.
- Documents are dealt in rounds, one packed micro-batch a set of ranks, the longest first. They are cut into as many
  buckets as they need sizes, of equal cost to a tenth; the first bucket whose next document has a place gives it: to
  ranks that are free, else to the least loaded set of its size that has room for its tokens.
- A round ends when nothing has a place, or, once a document came with fewer ranks than the round's first, when all
  ranks are loaded alike (to `slack`).
- Ranks that then have nothing: the first of the smallest sets gets twice its ranks, again and again. (Only so do
  several documents come to share several ranks: one that needs them has more than half of their tokens.)
- A set's documents are cut for its ring one by one (Transformer Engine's packed layout), each into a zigzag.

Where it leaves a choice, or fails: it wants ranks in powers of two; here ranks for which no set can be doubled have
nothing to do. Documents are not padded to multiples of twice their ranks. What remains for later buckets, which it
counts down twice, is counted once.

Known limits: rounds differ in number from step to step, so there is no pipeline here, and each size of a set is a
program compiled for it. Host side: NumPy only.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable
from typing import Literal

from libra_jax.policies import sharding
from libra_jax.policies.base import Group, RunShape, Sequences, StepPlan, check_step

_BUCKET_SLACK = 1.1


@dataclasses.dataclass(frozen=True)
class DynamicCP:
    """Rounds of CP groups of different sizes side by side, on all ranks of the run.

    max_tokens: that a rank holds; None: seq_len / cp, what it holds of a packed sequence.
    scope: what is dealt together: the documents of a "batch" (a step), as in the source, or of each "micro_step".
    slack: a round may end when the least loaded rank has at least 1 - slack of the most loaded one's work.
    """

    max_tokens: int | None = None
    scope: Literal["batch", "micro_step"] = "batch"
    slack: float = 0.05

    def step(self, sequences: Sequences, run: RunShape) -> StepPlan:
        """Plans an optimizer step of as many micro-steps as there are rounds: none where there is no document.

        Raises ValueError where the ranks could not hold the longest sequence, and for a scope that is none.
        """
        check_step(sequences, run)
        most = run.seq_len // run.cp if self.max_tokens is None else self.max_tokens
        if most * run.ranks < run.seq_len:
            raise ValueError(
                f"max_tokens ({most}) on all ranks ({run.ranks}) must hold a document of seq_len ({run.seq_len})"
            )
        if self.scope not in ("batch", "micro_step"):
            raise ValueError(f"scope ({self.scope!r}) must be batch or micro_step")
        together = run.sequences if self.scope == "batch" else run.dp
        micro_steps = []
        for i in range(0, run.sequences, together):
            start = time.process_time()
            documents = [length for sequence in sequences[i : i + together] for length in sequence]
            dealt = rounds(documents, run.ranks, most, self.slack)
            seconds = (time.process_time() - start) / max(sum(map(len, dealt)), 1)
            micro_steps += [[_group(ranks, most, run, seconds) for ranks in sets] for sets in dealt]
        return StepPlan(micro_steps)


@dataclasses.dataclass
class RankSet:
    """Ranks that share documents in one round. load: of each rank, tokens squared over ranks. tokens: of all."""

    size: int
    documents: list[int] = dataclasses.field(default_factory=list)
    load: float = 0.0
    tokens: int = 0

    def add(self, length: int) -> None:
        self.documents.append(length)
        self.load += length * length / self.size
        self.tokens += length


def size_of(length: int, ranks: int, most: int) -> int:
    """Ranks for a document: the smallest power of two that holds it with `most` tokens each, or all."""
    size = 1
    while size * most < length:
        size *= 2
    return min(size, ranks)


def rounds(documents: Iterable[int], ranks: int, most: int, slack: float = 0.05) -> list[list[RankSet]]:
    """Deals documents to sets of `ranks` ranks that hold at most `most` tokens each, round after round.

    4 ranks of 64 tokens: 128 96 64 48 32 24 16 8 become 128 on two ranks and 96 on two; then 64, 48, 32 and 24 16 8 on
    one each.
    """
    waiting, dealt = sorted(documents, reverse=True), []
    while waiting:
        sets, waiting = _round(waiting, ranks, most, slack)
        _use_all(sets, ranks)
        dealt.append(sets)
    return dealt


def _round(waiting: list[int], ranks: int, most: int, slack: float) -> tuple[list[RankSet], list[int]]:
    """One round's sets, and the documents that it leaves, in their order."""
    buckets = _buckets(waiting, ranks, most)
    sets: list[RankSet] = []
    free, first, may_end = ranks, None, False
    while buckets:
        bucket = next((bucket for bucket in buckets if _place(bucket[0], sets, free, ranks, most)), None)
        if bucket is None:
            break
        length = bucket.popleft()
        place = _place(length, sets, free, ranks, most)
        assert place is not None
        if not place.documents:
            sets.append(place)
            free -= place.size
        place.add(length)
        buckets = [each for each in buckets if each]
        first = first or place.size
        may_end |= place.size < first
        if may_end and not free and _alike(sets, slack):
            break
    return sets, [length for bucket in buckets for length in bucket]


def _place(length: int, sets: list[RankSet], free: int, ranks: int, most: int) -> RankSet | None:
    """Where a document goes: a new set, the least loaded one of its size with room, or None."""
    size = size_of(length, ranks, most)
    if size <= free:
        return RankSet(size)
    fit = (each for each in sets if each.size == size and each.tokens + length <= most * size)
    return min(fit, key=lambda each: each.load, default=None)


def _alike(sets: list[RankSet], slack: float) -> bool:
    heaviest = max(each.load for each in sets)
    return heaviest - min(each.load for each in sets) <= slack * heaviest


def _buckets(waiting: list[int], ranks: int, most: int) -> list[deque[int]]:
    """Runs of documents of about equal cost: as many as they need sizes, or more where costs are coarse."""
    sizes = [size_of(length, ranks, most) for length in waiting]
    costs = [length * length / size for length, size in zip(waiting, sizes, strict=True)]
    number = len(set(sizes))
    most_cost = _BUCKET_SLACK * sum(costs) / number
    buckets, inside = [deque()], 0.0
    for i, (length, cost) in enumerate(zip(waiting, costs, strict=True)):
        few_left = len(waiting) - i <= number - len(buckets)  # one for each bucket that is still to come
        if buckets[-1] and (inside + cost > most_cost or few_left):
            buckets.append(deque())
            inside = 0.0
        buckets[-1].append(length)
        inside += cost
    return buckets


def _use_all(sets: list[RankSet], ranks: int) -> None:
    """Doubles the smallest set, the first of them, while there are ranks left for it."""
    free = ranks - sum(each.size for each in sets)
    while free:
        smallest = min(sets, key=lambda each: each.size)
        more = min(smallest.size, ranks - smallest.size)
        if more > free:
            break
        smallest.load *= smallest.size / (smallest.size + more)
        smallest.size += more
        free -= more


def _group(ranks: RankSet, most: int, run: RunShape, seconds: float) -> Group:
    start = time.process_time()
    room = -(-most // run.block) * run.block
    spec = run.spec(1, seq_len=room * ranks.size, cp=ranks.size)
    parts = sharding.by_document(ranks.documents, ranks.size)
    tokens = int(sharding.held(parts, ranks.size).max())
    seconds += time.process_time() - start
    return Group((tuple(ranks.documents),), spec, "ring", tokens, parts=parts, planning_seconds=seconds)
