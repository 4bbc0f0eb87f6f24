"""Which pieces of which items share a packed sequence, decided by their lengths alone.

Takes the lengths of items (documents, or pieces of them) in the order in which they come; gives each piece's sequence,
by first fit, by best fit or by cutting the stream of tokens. All items of a call are packed together, without a limit
of sequences held open; a caller with many millions packs a window of them at a time. First and best fit are exact, and
quick because most items go where the one before went: an item that fits there, and is too long for every sequence that
would be asked first, needs no search. NumPy only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np

STRATEGIES = ("first_fit", "best_fit", "concat_and_split")

_SIDE_BY_SIDE = 512  # windows that are packed in step with each other
_LEAST_SIDE_BY_SIDE = 128  # with fewer, one at a time is quicker
_WIDEST = 2048  # sequences of a window, all searched for each item


@dataclass(frozen=True)
class Packed:
    """Pieces of items in packed sequences, by sequence, and within one in the order in which they were put there.

    sequence: (pieces,) int64, the sequence that holds the piece, 0 to count - 1.
    item, start, length: (pieces,) int64; the piece is tokens [start, start + length) of the item.
    count: sequences; each holds at least one piece.
    """

    sequence: np.ndarray
    item: np.ndarray
    start: np.ndarray
    length: np.ndarray
    count: int


def pack(lengths: np.ndarray, capacity: int, strategy: str = "first_fit", max_items: int | None = None) -> Packed:
    """Pack items into sequences of at most `capacity` tokens.

    lengths: (items,) whole numbers, tokens of each item in the order in which they come, 1 to `capacity`; for
        "concat_and_split" any length of at least 1.
    strategy: "first_fit": an item goes into the first sequence with room for it; "best_fit": into the fullest that
        still has room, of several the first; "concat_and_split": the stream of tokens is cut every `capacity` tokens.
    max_items: most pieces in one sequence, which takes no more then; None: no limit.

    Every token is in exactly one piece. First and best fit keep items whole: piece and item are the same. The result is
    a function of the arguments alone. Raises ValueError naming the entry and the rule.
    """
    sizes = _checked(lengths, capacity, strategy, max_items).astype(np.int64)
    if strategy == "concat_and_split":
        return _concat(sizes, capacity, max_items)
    first, chosen, count = _RUNS[strategy](sizes.tolist(), int(capacity), max_items)
    begin, into = np.array(first, np.int64), np.array(chosen, np.int64)
    order = np.argsort(into, kind="stable")
    length = np.diff(begin, append=len(sizes))[order]
    item = np.arange(len(sizes)) + np.repeat(begin[order] - np.cumsum(length) + length, length)
    return Packed(np.repeat(into[order], length), item, np.zeros(len(sizes), np.int64), sizes[item], count)


def count_by_window(
    lengths: np.ndarray,
    bounds: np.ndarray,
    capacity: int,
    strategy: str = "first_fit",
    max_items: int | None = None,
) -> np.ndarray:
    """How many sequences `pack` makes of each window of items: (windows,) int64.

    bounds: (windows + 1,) whole numbers that do not fall; window w is items bounds[w] to bounds[w + 1] - 1.

    The same as `pack(lengths[bounds[w] : bounds[w + 1]], ...).count` for each w, only quicker, above all where there
    are hundreds of windows: they are packed in step, an item of each at a time.
    Raises what `pack` raises, and ValueError for bounds that fall or lie outside.
    """
    edges = np.asarray(bounds)
    if edges.ndim != 1 or edges.size == 0 or edges.dtype.kind not in "iu":
        raise ValueError(f"bounds must be one flat array of whole numbers, not {edges.dtype} of shape {edges.shape}")
    edges = edges.astype(np.int64)
    items = np.diff(edges)
    if edges[0] < 0 or edges[-1] > len(lengths) or (items < 0).any():
        raise ValueError(f"bounds must not fall and must lie in 0 to {len(lengths)} (items), not {edges.tolist()[:20]}")
    sizes = _checked(lengths[edges[0] : edges[-1]], capacity, strategy, max_items, offset=int(edges[0]))
    edges -= edges[0]
    counts = np.full(len(items), -1, np.int64)
    if strategy != "concat_and_split" and len(items) >= _LEAST_SIDE_BY_SIDE and capacity < 2**31:
        alike = np.flatnonzero(items <= 2 * np.median(items))  # a giant would make most steps for itself
        longest_first = alike[np.argsort(-items[alike], kind="stable")]
        for part in range(0, len(alike) - _LEAST_SIDE_BY_SIDE + 1, _SIDE_BY_SIDE):
            windows = longest_first[part : part + _SIDE_BY_SIDE]
            counts[windows] = _count_in_step(sizes, edges[windows], items[windows], capacity, strategy, max_items)
    for window in np.flatnonzero(counts < 0).tolist():
        counts[window] = _count(sizes[edges[window] : edges[window + 1]], capacity, strategy, max_items)
    return counts


def _checked(lengths: np.ndarray, capacity: int, strategy: str, max_items: int | None, offset: int = 0) -> np.ndarray:
    """The lengths as (items,) integers of any kind, not copied, after all was checked; the first is entry `offset`."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy ({strategy!r}) must be one of {list(STRATEGIES)}")
    if capacity < 1:
        raise ValueError(f"capacity ({capacity} tokens) must be at least 1")
    if max_items is not None and max_items < 1:
        raise ValueError(f"max_items ({max_items}) must be at least 1, or None")
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be one flat array of whole numbers, not {sizes.dtype} of shape {sizes.shape}")
    if sizes.size == 0:
        return np.zeros(0, np.int64)
    if sizes.min() < 1:
        entry = int(np.argmax(sizes < 1))
        raise ValueError(f"length {sizes[entry]} (entry {offset + entry}) must be at least 1: leave empty items out")
    if strategy != "concat_and_split" and sizes.max() > capacity:
        entry = int(np.argmax(sizes > capacity))
        raise ValueError(
            f"length {sizes[entry]} (entry {offset + entry}) must be at most capacity ({capacity}): cut it first"
        )
    if float(sizes.max()) * sizes.size >= 2**63 and sum(sizes.tolist()) >= 2**63:
        raise ValueError(f"lengths add up to {sum(sizes.tolist())} tokens, they must stay below 2**63 ({2**63})")
    return sizes


# ----------------------------------------------------------------------------------------- first and best fit, by runs
#
# Both give (first item of each run, sequence it goes to, sequences). A run is consecutive items of one sequence: `low`
# is the most room of a sequence that an item of at most that length would go to instead, `room` what is left in the
# run's own, `stop` the item at which it has taken as many as it may. The lists end with a sequence not opened yet.


def _first_fit(sizes: list[int], capacity: int, max_items: int | None) -> tuple[list[int], list[int], int]:
    limit = max_items or len(sizes) + 1
    rooms, most_room, taken = [capacity], [capacity], [0]  # most_room[s]: the most of sequences 0 to s
    first: list[int] = []
    chosen: list[int] = []
    sequence = low = room = stop = 0
    for item, size in enumerate(sizes):
        if low < size <= room and item < stop:
            room -= size
            continue
        if item:
            taken[sequence] += item - first[-1]
            rooms[sequence] = room if item < stop else 0
            before, most = most_room[sequence], max(low, rooms[sequence])
            most_room[sequence] = most
            after = sequence + 1
            while most < before and most_room[after] == before:
                most = max(most, rooms[after])
                most_room[after] = most
                after += 1
        sequence = bisect_left(most_room, size)
        if sequence == len(rooms) - 1:
            rooms.append(capacity)
            most_room.append(capacity)
            taken.append(0)
        low = most_room[sequence - 1] if sequence else 0
        room = rooms[sequence] - size
        stop = item + limit - taken[sequence]
        first.append(item)
        chosen.append(sequence)
    return first, chosen, len(rooms) - 1


def _best_fit(sizes: list[int], capacity: int, max_items: int | None) -> tuple[list[int], list[int], int]:
    limit, bits = max_items or len(sizes) + 1, len(sizes).bit_length() + 1
    by_room, taken = [capacity << bits], [0]  # room and number of each sequence but the run's own in one sorted integer
    first: list[int] = []
    chosen: list[int] = []
    sequence = low = room = stop = 0
    for item, size in enumerate(sizes):
        if low < size <= room and item < stop:
            room -= size
            continue
        if item:
            taken[sequence] += item - first[-1]
            if room and item < stop:
                insort(by_room, room << bits | sequence)
        place = bisect_left(by_room, size << bits)
        found = by_room.pop(place)
        sequence = found & ((1 << bits) - 1)
        if sequence == len(taken) - 1:
            by_room.append(capacity << bits | len(taken))
            taken.append(0)
        low = by_room[place - 1] >> bits if place else 0
        room = (found >> bits) - size
        stop = item + limit - taken[sequence]
        first.append(item)
        chosen.append(sequence)
    return first, chosen, len(taken) - 1


_RUNS = {"first_fit": _first_fit, "best_fit": _best_fit}


def _count(sizes: np.ndarray, capacity: int, strategy: str, max_items: int | None) -> int:
    if strategy != "concat_and_split":
        return _RUNS[strategy](sizes.tolist(), int(capacity), max_items)[2]
    if max_items is None:
        return -(-int(sizes.sum()) // capacity)
    return len(_cuts(np.cumsum(sizes, dtype=np.int64), capacity, max_items))


# ---------------------------------------------------------------------------------------------- many windows, in step


def _count_in_step(
    sizes: np.ndarray, starts: np.ndarray, items: np.ndarray, capacity: int, strategy: str, max_items: int | None
) -> np.ndarray:
    """Sequences of each window, (windows,) int64; -1 where a window is better packed alone.

    starts, items: (windows,) a window's first item, and how many it has, which must not rise. Step t puts item t of
    every window that has one. Sequences not opened yet have all their room and come last, so no case is made of them.
    """
    windows, columns, width = len(items), 64, 1
    kind = np.uint16 if strategy == "first_fit" and capacity < 2**16 else np.uint32
    rooms, taken = np.full((windows, columns), capacity, kind), np.zeros((windows, columns), np.uint32)
    rows, ends = np.arange(windows), np.searchsorted(items[::-1], np.arange(items[0]), side="right")
    unfinished = 0
    for step, active in enumerate((windows - ends).tolist()):
        if width > _WIDEST:
            unfinished = active
            break
        size = sizes[starts[:active] + step].astype(kind)
        room = rooms[:active, :width]
        if strategy == "first_fit":
            sequence = (room >= size[:, None]).argmax(axis=1)
        else:
            sequence = (room - size[:, None]).argmin(axis=1)  # what does not fit wraps around, above every capacity
        place = sequence + rows[:active] * columns
        rooms.ravel()[place] -= size
        if max_items is not None:
            taken.ravel()[place] += 1
            rooms.ravel()[place[taken.ravel()[place] == max_items]] = 0
        width = max(width, int(sequence.max()) + 2)
        if width > columns:
            rooms = np.concatenate([rooms, np.full_like(rooms, capacity)], axis=1)
            taken = np.concatenate([taken, np.zeros_like(taken)], axis=1)
            columns *= 2
    opened = (rooms < capacity).sum(axis=1)
    opened[:unfinished] = -1
    return opened


# --------------------------------------------------------------------------------------------------- concat and split


def _cuts(ends: np.ndarray, capacity: int, max_items: int | None) -> np.ndarray:
    """(sequences,) int64, where in the stream each sequence begins. ends: (items,) where each item ends in it."""
    total = int(ends[-1]) if len(ends) else 0
    begins = np.arange(0, total, capacity, dtype=np.int64)
    if max_items is None or len(ends) == 0:
        return begins
    last = np.minimum(begins + capacity, total) - 1
    pieces = np.searchsorted(ends, last, side="right") - np.searchsorted(ends, begins, side="right") + 1
    if pieces.max() <= max_items:
        return begins
    stops, cuts, item, begin = ends.tolist(), [], 0, 0
    while begin < total:
        cuts.append(begin)
        begin = min(begin + capacity, stops[min(item + max_items, len(stops)) - 1])
        item = bisect_right(stops, begin, item, min(item + max_items, len(stops)))
    return np.array(cuts, np.int64)


def _concat(sizes: np.ndarray, capacity: int, max_items: int | None) -> Packed:
    ends = np.cumsum(sizes)
    cuts = _cuts(ends, capacity, max_items)
    begins = np.union1d(cuts, ends - sizes)  # of pieces, in the stream
    length = np.diff(begins, append=ends[-1:] if len(ends) else 0)
    item = np.searchsorted(ends, begins, side="right")
    sequence = np.searchsorted(cuts, begins, side="right") - 1
    return Packed(sequence, item, begins - (ends - sizes)[item], length, len(cuts))
