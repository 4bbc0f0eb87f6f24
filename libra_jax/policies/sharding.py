"""Context parallelism that deals a sequence's tokens to ranks: which tokens each rank holds and computes, what its
kernels visit for that, and which keys and values it needs from others.

In these systems a rank holds the tokens whose queries it computes: queries and outputs never travel, keys and values
do. All heads are dealt alike. Letters: C ranks, D documents. Host side: NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Parts(NamedTuple):
    """Runs of tokens, each of one document and on one rank. All (parts,) int64, ordered by document, then begin.

    rank: who holds and computes the run. document: its number. begin, end: tokens [begin, end) of the document.
    """

    rank: np.ndarray
    document: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def by_sequence(lengths: Sequence[int], ranks: int, seq_len: int | None = None) -> Parts:
    """Zigzag over the packed sequence: it is cut into 2C chunks, and rank c has chunks c and 2C - 1 - c.

    seq_len: where the chunks end, padding included; None: the sequence ends with its last document. The work of a
    sequence that is one document is then the same on all ranks, of several documents it is not. Source: the all-gather
    context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2); WLB-LLM calls it per-sequence sharding.
    """
    total = int(sum(lengths)) if seq_len is None else seq_len
    edges = np.arange(2 * ranks + 1, dtype=np.int64) * total // (2 * ranks)
    return of_chunks(lengths, edges, _folded(ranks))


def by_document(lengths: Sequence[int], ranks: int) -> Parts:
    """Zigzag within every document: each is cut into 2C chunks, and rank c has its chunks c and 2C - 1 - c.

    Ranks have the same work to a chunk's length, and many short runs, which kernels do in whole tiles. WLB-LLM's
    per-document sharding (arXiv 2503.17924, section 5).
    """
    sizes = np.asarray(lengths, np.int64)
    edges = np.arange(2 * ranks + 1, dtype=np.int64) * sizes[:, None] // (2 * ranks)
    document = np.repeat(np.arange(sizes.size), 2 * ranks)
    parts = Parts(np.tile(_folded(ranks), sizes.size), document, edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1))
    return _joined(parts)


def of_chunks(lengths: Sequence[int], edges: np.ndarray, owner: np.ndarray) -> Parts:
    """Chunks of the packed sequence, tokens [edges[i], edges[i + 1]) on rank owner[i], cut where documents end."""
    sizes = np.asarray(lengths, np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    cuts = np.union1d(np.minimum(edges, total), np.concatenate([[0], ends]))
    begin, end = cuts[:-1], cuts[1:]
    document = np.searchsorted(ends, begin, side="right")
    rank = np.asarray(owner, np.int64)[np.searchsorted(edges, begin, side="right") - 1]
    start = (ends - sizes)[document] if begin.size else begin
    return _joined(Parts(rank, document, begin - start, end - start))


def _folded(ranks: int) -> np.ndarray:
    """(2C,): 0 .. C - 1 and back."""
    return np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]])


def _joined(parts: Parts) -> Parts:
    """Without empty runs, and with neighbours on one rank as one."""
    parts = Parts(*(column[parts.end > parts.begin] for column in parts))
    goes_on = np.zeros(parts.rank.size, bool)
    goes_on[1:] = (np.diff(parts.rank) == 0) & (np.diff(parts.document) == 0)
    first = np.flatnonzero(~goes_on)
    if not first.size:
        return parts
    return Parts(parts.rank[first], parts.document[first], parts.begin[first], np.maximum.reduceat(parts.end, first))


class Visited(NamedTuple):
    """(C,) of one kv head: pages that each rank's kernel visits, and blocks of queries."""

    pages: np.ndarray
    blocks: np.ndarray


def visited(parts: Parts, ranks: int, block: int) -> Visited:
    """What a kernel for sequences of variable length does: every run is a query of its own, cut into blocks from its
    own first token; a block visits the pages of its document from the first to the one its last token is in."""
    length = parts.end - parts.begin
    blocks = -(-length // block)
    # Block j of a run ends j + 1 blocks after its begin, the last one at the run's end.
    full = blocks - 1
    pages = full * (full + 1) // 2 + full * -(-parts.begin // block) + -(-parts.end // block)
    return Visited(np.bincount(parts.rank, pages, ranks), np.bincount(parts.rank, blocks, ranks))


def pairs(parts: Parts, ranks: int) -> np.ndarray:
    """(C,) causal (query, key) pairs of each rank, one head."""
    count = (parts.begin + 1 + parts.end) * (parts.end - parts.begin) // 2
    return np.bincount(parts.rank, count, ranks)


def held(parts: Parts, ranks: int) -> np.ndarray:
    """(C,) tokens of each rank, no padding."""
    return np.bincount(parts.rank, parts.end - parts.begin, ranks).astype(np.int64)


def needed(parts: Parts, ranks: int) -> np.ndarray:
    """(C, C) int64: tokens whose keys and values go from rank to rank, each pair once: what the reader's queries see
    and it does not hold."""
    moved = np.zeros((ranks, ranks), np.int64)
    if not parts.rank.size:
        return moved
    documents = int(parts.document[-1]) + 1
    last = np.zeros((documents, ranks), np.int64)  # a rank's queries of a document end here
    np.maximum.at(last, (parts.document, parts.rank), parts.end)
    for reader in range(ranks):
        seen = np.clip(last[parts.document, reader] - parts.begin, 0, parts.end - parts.begin)
        moved[:, reader] = np.bincount(parts.rank, seen, ranks)
        moved[reader, reader] = 0
    return moved
