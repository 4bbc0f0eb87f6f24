"""MagiAttention's dispatch as a policy: a packed sequence in equal chunks, dealt so that attention is even.

After the published solver (github.com/SandAI-org/MagiAttention, min-heap dispatch, its default; blog "MagiAttention",
2025). Written anew from what is public:

- The packed sequence, padding and all, is cut into chunks of equal length, whatever documents they cut. A chunk's area
  is the number of (query, key) pairs that its queries see.
- Every rank gets the same number of chunks, so linear layers are even. The largest area goes first, to the rank with
  the least area so far that still has room.
- Chunks are 1/8 of a rank's tokens by default: the least number of chunks a rank that is set there.
- A rank holds the tokens that it computes, and gets each key and value that its queries see once ("needed").

Where it leaves a choice, or does more: chunks of equal area in order of place, ranks of equal load in order of number;
a chunk size that is asked for is taken as it is, where the source lowers it to its default. Its top-p algorithms, which
weigh what ranks hold already, are not here, nor are stages of overlap: the model of exchanges has them.

Letters: C ranks of a CP group. Host side: NumPy only.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from libra_jax.policies import sharding
from libra_jax.policies.base import Group, RunShape, Sequences, StepPlan, check_step
from libra_jax.policies.packed import Order, slots
from libra_jax.spec import PoolSpec

CHUNKS_PER_RANK = 8


@dataclasses.dataclass(frozen=True)
class Magi:
    """Each sequence's chunks dealt to its own CP group.

    chunk_tokens: of a chunk; None: a rank has 8, or the most below 8 that divide its tokens. order: how sequences come
    to micro-steps, see `packed.Order`.
    """

    chunk_tokens: int | None = None
    order: Order = None

    def step(self, sequences: Sequences, run: RunShape) -> StepPlan:
        """Raises ValueError where chunks do not divide the tokens of a rank."""
        check_step(sequences, run)
        spec = run.spec(1)
        size = chunk_size(spec.tokens_per_rank, self.chunk_tokens, "chunk_tokens", "tokens")
        return StepPlan([
            [_group(sequences[int(pool[0])], spec, size) for pool in micro_step]
            for micro_step in slots(sequences, spec, run, self.order)
        ])  # fmt: skip


def _group(sequence: Sequence[int], spec: PoolSpec, size: int) -> Group:
    start = time.process_time()
    edges = np.arange(0, spec.seq_len + 1, size)
    parts = sharding.of_chunks(sequence, edges, deal_chunks(areas(sequence, edges), spec.cp))
    seconds = time.process_time() - start
    return Group((tuple(sequence),), spec, "needed", spec.tokens_per_rank, parts=parts, planning_seconds=seconds)


def chunk_size(held: int, asked: int | None, name: str, unit: str) -> int:
    """Tokens or blocks of a chunk, where a rank holds so many. Raises ValueError with the rule and both numbers."""
    if asked is None:
        return held // max(count for count in range(1, CHUNKS_PER_RANK + 1) if held % count == 0)
    if asked < 1 or held % asked:
        raise ValueError(f"{name} ({asked}) must be at least 1 and divide the {unit} of a rank ({held})")
    return asked


def areas(lengths: npt.ArrayLike, edges: np.ndarray) -> np.ndarray:
    """(chunks,) causal pairs of the queries at tokens [edges[i], edges[i + 1]) of a packed sequence; padding has none.

    lengths: of its documents. edges: (chunks + 1,) ascending.
    """
    sizes = np.asarray(lengths, np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    whole = np.concatenate([[0], np.cumsum(sizes * (sizes + 1) // 2)])
    # Pairs of all queries before an edge: those of the documents before its own, and its own document's first tokens.
    edge = np.minimum(edges, starts[-1])
    document = np.searchsorted(starts, edge, side="right") - 1
    inside = edge - starts[document]
    return np.diff(whole[document] + inside * (inside + 1) // 2)


def deal_chunks(areas: np.ndarray, ranks: int) -> np.ndarray:
    """(chunks,) rank of each chunk: equally many to each, the largest area first to the least loaded with room.

    areas: (chunks,), a multiple of `ranks`. The source's example, for two ranks: 8 7 6 5 4 2 2 2 become 8 5 4 2 and
    7 6 2 2, so 19 and 17 (18 and 18 could be).
    """
    owner, room = np.empty(areas.size, np.int64), areas.size // ranks
    heap = [(0, rank, room) for rank in range(ranks)]
    for chunk in np.argsort(-areas, kind="stable"):
        load, rank, left = heapq.heappop(heap)
        owner[chunk] = rank
        if left > 1:
            heapq.heappush(heap, (load + int(areas[chunk]), rank, left - 1))
    return owner
