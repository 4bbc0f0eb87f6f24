"""WLB-LLM as a policy: whole documents packed anew so that sequences cost the same, and the cheaper of two shardings.

After variable-length packing with outlier delay and adaptive sharding (arXiv 2503.17924, Algorithm 1 and section 5),
of which no code is public. Written anew from what is:

- A bin is one sequence of one micro-step on one CP group. Documents, the longest first, go to the bin with the least
  workload (attention and linear layers, in seconds) if the token cap allows, else to the shortest bin, else they wait:
  next time they come before all others, in the order in which they were left.
- A document as long as a queue's threshold waits in that queue. A queue that holds as many documents as there are bins
  gives that many, the oldest, once each time bins are filled.
- A bin's tokens are sharded per sequence or per document, whichever the kernel model says is faster; one choice serves
  both passes. Keys and values are all-gathered.

Where it leaves a choice, the reading that is best for it:

- The paper's listing keeps bins below the cap; here a bin may be as long, or sequences as long as the cap never fit.
- Thresholds are not printed; there they are tuned on a sample of documents. Here there are two queues, as many as its
  table has use for, with thresholds evenly spaced over a sequence; the report shows others.
- Which bins share a micro-step, it does not say. See `WLB`.
- Kernels are predicted from pages and blocks, where the paper looks profiled shapes up.

Known limits: memory for sequences longer than the loader's is taken as given, and what waits when a run ends is never
trained on. Documents change their step, so a run's loss is not the loader's. Host side: NumPy only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from libra_jax.policies import sharding
from libra_jax.policies.base import Group, RunShape, Sequences, StepPlan, check_step
from libra_jax.spec import PoolSpec
from libra_jax.workload import sequences_seconds

Sharding = Literal["adaptive", "sequence", "document"]


class WLB:
    """Packs a run's documents step after step. It holds documents back, so every run takes a new one.

    cap: most tokens of a bin, in `seq_len`s; rounded down to whole blocks on every rank.
    scope: what is packed together: the documents of a "batch" (a step) into all its bins, or those of each
        "micro_step" into its own.
    delay: long documents wait until there is one for every bin. thresholds: what is long, in `seq_len`s, ascending,
        one for each queue.
    order: which bins of a batch share a micro-step: "shuffled" (at random, from `seed`), or "sorted": those of like
        workload, the heaviest first. With scope "micro_step" bins stay in theirs, and the order is of CP groups: else
        the first would always have the longest document.
    sharding: "adaptive", or always by "sequence" or by "document".

    Raises ValueError for a cap below 1 (longest documents would never fit), for thresholds that do not ascend within
    (0, 1], and for other choices than these.
    """

    def __init__(
        self,
        cap: float = 1.25,
        scope: Literal["batch", "micro_step"] = "batch",
        delay: bool = True,
        order: Literal["shuffled", "sorted"] = "shuffled",
        sharding: Sharding = "adaptive",
        thresholds: Sequence[float] = (1 / 3, 2 / 3),
        seed: int = 0,
    ) -> None:
        if not (math.isfinite(cap) and cap >= 1):
            raise ValueError(f"cap ({cap!r}) must be at least 1: documents as long as a sequence would wait for ever")
        bounds = tuple(thresholds)
        if not all(low < high <= 1 for low, high in zip((0.0, *bounds), bounds, strict=False)):
            raise ValueError(f"thresholds {bounds} must ascend, above 0 and at most 1")
        for name, value, allowed in (
            ("scope", scope, ("batch", "micro_step")),
            ("order", order, ("shuffled", "sorted")),
            ("sharding", sharding, ("adaptive", "sequence", "document")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")
        self.cap, self.scope, self.order = cap, scope, order
        self.sharding: Sharding = sharding
        self.thresholds = bounds if delay else ()
        self._random = np.random.default_rng(seed)
        self._left: list[int] = []  # what did not fit, in the order in which it was left
        self._queues: list[deque[int]] = [deque() for _ in self.thresholds]

    @property
    def waiting(self) -> tuple[int, ...]:
        """Lengths of the documents that are held back."""
        return (*self._left, *(length for queue in self._queues for length in queue))

    def step(self, sequences: Sequences, run: RunShape) -> StepPlan:
        """Plans an optimizer step of `run.micro_steps` micro-steps with `run.dp` bins each, of which some may be empty.

        Every document handed in so far is in exactly one step's plan, or in `waiting`. A group's spec has the cap as
        its seq_len; its tokens are what its fullest rank holds.
        """
        check_step(sequences, run)
        start = time.process_time()
        most = most_tokens(self.cap, run)
        spec = run.spec(1, seq_len=most)
        if self.scope == "batch":
            bins = self._packed(sequences, run.sequences, run, spec)
            bins = self._ordered(bins, run, spec)
        else:
            micro_steps = [sequences[i : i + run.dp] for i in range(0, run.sequences, run.dp)]
            packed = (self._packed(part, run.dp, run, spec) for part in micro_steps)
            bins = [one for part in packed for one in self._ordered(part, run, spec)]
        packing = (time.process_time() - start) / run.sequences
        groups = [self._group(documents, run, spec, packing) for documents in bins]
        return StepPlan([groups[i : i + run.dp] for i in range(0, run.sequences, run.dp)], self.waiting)

    def _packed(self, sequences: Sequences, bins: int, run: RunShape, spec: PoolSpec) -> list[list[int]]:
        """Fills so many bins from what was left, what the queues give, and the documents of these sequences."""
        bounds = [threshold * run.seq_len for threshold in self.thresholds]
        ready = []
        for length in (length for sequence in sequences for length in sequence):
            queue = int(np.searchsorted(bounds, length, side="right")) - 1
            (ready if queue < 0 else self._queues[queue]).append(length)
        for queue in self._queues:
            if len(queue) >= bins:
                ready += [queue.popleft() for _ in range(bins)]
        documents = [*self._left, *sorted(ready, reverse=True)]
        packed, self._left = pack(documents, workloads(documents, run, spec), bins, spec.seq_len)
        return packed

    def _ordered(self, bins: list[list[int]], run: RunShape, spec: PoolSpec) -> list[list[int]]:
        if self.order == "shuffled":
            return [bins[i] for i in self._random.permutation(len(bins))]
        work = [float(workloads(documents, run, spec).sum()) for documents in bins]
        return [bins[i] for i in np.argsort(np.negative(work), kind="stable")]

    def _group(self, documents: list[int], run: RunShape, spec: PoolSpec, packing_seconds: float) -> Group:
        start = time.process_time()
        parts = shard(documents, run, spec, self.sharding)
        tokens = int(sharding.held(parts, run.cp).max())
        seconds = packing_seconds + time.process_time() - start
        return Group((tuple(documents),), spec, "all_gather", tokens, parts=parts, planning_seconds=seconds)


def most_tokens(cap: float, run: RunShape) -> int:
    """Tokens of a bin at most: cap * seq_len, rounded down to whole blocks on every rank."""
    unit = run.cp * run.block
    return int(cap * run.seq_len * (1 + 1e-12)) // unit * unit  # 1.1 * 10 is 11, not a bit less


def workloads(documents: npt.ArrayLike, run: RunShape, spec: PoolSpec) -> np.ndarray:
    """(documents,) seconds that each costs a rank of its group: attention and linear layers, forward and backward."""
    lengths = np.asarray(documents, np.int64)
    attention = sequences_seconds(lengths, np.ones(lengths.size, np.int64), spec, run.cost)
    return (attention + run.token_seconds * lengths) / run.cp


def pack(
    documents: Sequence[int], work: Sequence[float] | np.ndarray, bins: int, most: int
) -> tuple[list[list[int]], list[int]]:
    """Documents, in this order, to the bin with the least work, else to the shortest. -> bins, and what fits neither.

    documents, work: tokens and cost of each. most: tokens of a bin. The first of equal bins is taken.

        3 bins of at most 10 tokens, work l * l:  7 6 4 4 3 2 become 7, 6 3 and 4 4 2
    """
    packed: list[list[int]] = [[] for _ in range(bins)]
    load, tokens, left = np.zeros(bins), np.zeros(bins, np.int64), []
    for length, cost in zip(documents, work, strict=True):
        place = int(load.argmin())
        if tokens[place] + length > most:
            place = int(tokens.argmin())
        if tokens[place] + length > most:
            left.append(length)
            continue
        packed[place].append(length)
        load[place] += cost
        tokens[place] += length
    return packed, left


def shard(documents: Sequence[int], run: RunShape, spec: PoolSpec, by: Sharding) -> sharding.Parts:
    """Tokens of a bin to its ranks, without padding; adaptive: the way whose slowest rank has the shorter forward pass,
    per sequence where they are equal."""
    ways = []
    if by != "document":
        ways.append(sharding.by_sequence(documents, run.cp))
    if by != "sequence":
        ways.append(sharding.by_document(documents, run.cp))
    return min(ways, key=lambda parts: kernel_seconds(parts, run, spec))


def kernel_seconds(parts: sharding.Parts, run: RunShape, spec: PoolSpec) -> float:
    """Forward seconds of the slowest rank's kernels, all its heads."""
    pages, blocks = sharding.visited(parts, run.cp, run.block)
    return float(spec.num_kv_heads * run.cost.scaled(spec).forward(pages, blocks).max())
