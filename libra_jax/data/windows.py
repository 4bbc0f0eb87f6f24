"""A corpus in windows: which documents are looked at together, so that memory never grows with the corpus.

Documents are dealt in chunks of neighbours, one document each in a corpus of up to 262,143 and never more than 1,024.
Chunks come in a random order; a window takes the next documents until it has tokens for a stated number of sequences,
and shuffles them. What is kept for each document is nothing, for each chunk a number and for each window where it
starts. A share of the chunks can be held out: always the same ones, whatever the run's seed.

Takes lengths, which may be memory-mapped and are read once from end to end; gives the documents of any window. A pure
function of its arguments. NumPy only.
"""

from __future__ import annotations

import dataclasses

import numpy as np

LONG_RULES = ("split", "drop", "truncate")
SPLITS = ("train", "held_out")
_CHUNKS = 2**17
_LARGEST_CHUNK = 1024
_AT_ONCE = 2**22  # documents looked at together when all lengths are read
_DEAL, _SHUFFLE, _HOLD_OUT = 0x9AC4, 0x9AC5, 0x401D  # keep the shuffles apart that start from one seed


@dataclasses.dataclass(frozen=True)
class Totals:
    """What reading all lengths once has shown, of the whole corpus or of the split that is served.

    documents, tokens: as they are. empty: documents of 0 tokens, which are left out. long: documents longer than a
    sequence. kept_tokens: what the rule for these leaves.
    """

    documents: int
    tokens: int
    empty: int
    long: int
    kept_tokens: int

    def describe(self, seq_len: int, rule: str) -> str:
        """What happens to long documents, in a sentence; empty where there are none."""
        if not self.long:
            return ""
        lost = self.tokens - self.kept_tokens
        done = {
            "split": "cut into pieces of that length",
            "drop": f"left out with their {lost:,} tokens",
            "truncate": f"cut short, {lost:,} tokens left out",
        }[rule]
        return f"{self.long:,} documents are longer than {seq_len:,} tokens and are {done}"


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Documents by window; `deal_windows` makes it.

    chunk: documents in a chunk; the corpus' last chunk may have fewer. order: (chunks of the split,) int32 chunk
    numbers as they are dealt. bounds: (windows + 1, 3) int64 where each window starts: place in `order`, document in
    that chunk, token of that document; the last row is the end. totals, apart: of this split, and of the other.
    """

    documents: int
    chunk: int
    order: np.ndarray
    bounds: np.ndarray
    seed: int
    totals: Totals
    apart: Totals

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def parts(self, window: int, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document, start, length) of what lies in a window, in the order in which it is packed. Each (parts,) int64.

        lengths: as they were given to `deal_windows`. A part is a whole document, empty and long ones too, but for the
        first and last of a window whose bounds lie inside documents.
        """
        (first, skipped, begin), (last, taken, end) = self.bounds[window : window + 2].tolist()
        chunks = self.order[first : last + 1].astype(np.int64)
        numbers = (chunks[:, None] * self.chunk + np.arange(self.chunk)).ravel()
        beyond = self.chunk - taken - bool(end) if last < len(self.order) else 0
        numbers = numbers[skipped : len(numbers) - beyond]
        numbers = numbers[numbers < self.documents]
        length = lengths[numbers].astype(np.int64)
        start = np.zeros_like(numbers)
        if end:
            length[-1] = end
        if begin:
            start[0], length[0] = begin, length[0] - begin
        shuffled = np.random.default_rng([self.seed, _SHUFFLE, window]).permutation(len(numbers))
        return numbers[shuffled], start[shuffled], length[shuffled]


def deal_windows(
    lengths: np.ndarray,
    seq_len: int,
    tokens: int,
    *,
    rule: str = "split",
    inside: bool = False,
    seed: int = 0,
    held_out: float = 0.0,
    split: str = "train",
) -> Windows:
    """Deals all documents to windows of at most `tokens` tokens, a single longer document apart.

    lengths: (documents,) whole numbers, 0 for an empty document. rule: what becomes of documents longer than seq_len;
        windows count the tokens that it leaves. inside: every window but the last has exactly `tokens`, and documents
        on the edge are divided; for rule "split".
    held_out: share of the documents, at least 0 and below 1, that "train" never serves and "held_out" does. The nearest
        whole number of chunks is held out, at least one where the share is above 0.

    Raises ValueError naming what does not fit together, or where no token is left to serve.
    """
    count = len(lengths)
    chunk = min(max(count // _CHUNKS, 1), _LARGEST_CHUNK)
    chosen = _split(-(-count // chunk), held_out, split)
    per_chunk, table = _chunk_tokens(lengths, seq_len, rule, chunk)
    totals = Totals(*(int(column[chosen].sum()) for column in table))
    apart = Totals(*(int(column.sum()) - here for column, here in zip(table, dataclasses.astuple(totals), strict=True)))
    if not totals.kept_tokens:
        raise ValueError(
            f"no token is left to serve: {totals.documents} documents in the split {split!r}, {totals.empty} of them "
            f"empty, {totals.long} longer than seq_len ({seq_len}) with the rule {rule!r}"
        )
    order = chosen[np.random.default_rng([seed, _DEAL]).permutation(len(chosen))].astype(np.int32)
    ends = np.cumsum(per_chunk[order])
    bounds, reached = [(0, 0, 0)], 0
    while reached + tokens < ends[-1]:
        place = int(np.searchsorted(ends, reached + tokens, side="right"))  # this chunk holds the next bound
        first = int(order[place]) * chunk
        kept = _kept(np.asarray(lengths[first : first + chunk]).astype(np.int64), seq_len, rule)
        before = int(ends[place]) - int(kept.sum())
        stops = before + np.cumsum(kept)
        document = int(np.searchsorted(stops, reached + tokens, side="right"))  # the first that does not fit whole
        stop = int(stops[document - 1]) if document else before
        if inside:
            bounds.append((place, document, reached + tokens - stop))
            reached += tokens
            continue
        if stop == reached:  # one document longer than a window
            stop, document = int(stops[document]), document + 1
        bounds.append((place, document, 0))
        reached = stop
    if reached < ends[-1]:
        bounds.append((len(order), 0, 0))
    else:
        bounds[-1] = (len(order), 0, 0)
    return Windows(count, chunk, order, np.array(bounds, np.int64), seed, totals, apart)


def _kept(sizes: np.ndarray, seq_len: int, rule: str) -> np.ndarray:
    """Tokens that the rule leaves of each document."""
    return sizes if rule == "split" else np.where(sizes > seq_len, 0 if rule == "drop" else seq_len, sizes)


def _split(chunks: int, held_out: float, split: str) -> np.ndarray:
    """Chunk numbers of a split, ascending."""
    if split not in SPLITS:
        raise ValueError(f"split ({split!r}) must be one of {SPLITS}")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out ({held_out!r}) must be a share of at least 0 and below 1")
    if held_out == 0:
        if split == "held_out":
            raise ValueError("split 'held_out' of nothing: held_out is 0")
        return np.arange(chunks)
    size = max(1, round(held_out * chunks))
    if size >= chunks:
        raise ValueError(
            f"held_out ({held_out}) takes {size} of {chunks} chunks of documents and leaves none to train on"
        )
    apart = np.random.default_rng(_HOLD_OUT).permutation(chunks)
    return np.sort(apart[:size] if split == "held_out" else apart[size:])


def _chunk_tokens(lengths: np.ndarray, seq_len: int, rule: str, chunk: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Tokens that the rule leaves of each chunk, (chunks,) int64, and the columns of `Totals` by chunk."""
    if rule not in LONG_RULES:
        raise ValueError(f"long_documents ({rule!r}) must be one of {LONG_RULES}")
    parts: list[tuple[np.ndarray, ...]] = []
    step = _AT_ONCE // chunk * chunk
    for start in range(0, len(lengths), step):
        sizes = np.asarray(lengths[start : start + step])
        if sizes.dtype.kind not in "iu":
            raise ValueError(f"document lengths must be whole numbers, got {sizes.dtype}")
        sizes = sizes.astype(np.int64)
        if sizes.min() < 0:
            at = int(np.argmax(sizes < 0))
            raise ValueError(f"document {start + at} has {sizes[at]} tokens: a length must be 0 or more")
        long = sizes > seq_len
        kept = _kept(sizes, seq_len, rule)
        edges = np.arange(0, len(sizes), chunk)
        columns = np.ones_like(sizes), sizes, sizes == 0, long, kept
        parts.append(tuple(np.add.reduceat(column, edges, dtype=np.int64) for column in columns))
    table = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0, np.int64)] * 5
    return table[-1], table
