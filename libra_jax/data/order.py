"""In which order a run takes its sequences, for ever: the sequence at any position, without the ones before it.

Sequences come in windows. Every epoch deals the windows in a new order, and the sequences of each window in a new
order: `EpochOrder`. Several corpora with weights are dealt in turns, each in the order of its own epochs:
`WeightedOrder`. What is kept is a number for each window, and what is asked for costs no more at position 10**9 than
at 0. Pure functions of (numbers of sequences, seed, position). NumPy only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from libra_jax.workload import check_lengths

_TURNS = 10_000  # weights are met within one part in this
_RUN = 1024  # sequences of a window of `ListedSequences`, at most
_WINDOWS = 2**17


class PackedSequences(Protocol):
    """Packed sequences by number, in windows of neighbouring numbers; what a sampler has to know of them."""

    @property
    def counts(self) -> np.ndarray:
        """(windows,) sequences of each window; the sequences of the first have the first numbers."""
        ...

    def lengths(self, number: int, /) -> np.ndarray:
        """Tokens of each document in a sequence, (documents,) int64."""
        ...


class ListedSequences:
    """Packed sequences given by the document lengths of each, (sequences,) lists. Raises ValueError where one is wrong.

    Kept as one flat array. Windows are runs of neighbours: one sequence each, up to 131,072 sequences.
    """

    def __init__(self, lengths: Sequence[Sequence[int] | np.ndarray], seq_len: int) -> None:
        checked = [check_lengths(sizes, seq_len, sequence=i) for i, sizes in enumerate(lengths)]
        self._bounds = np.concatenate([[0], np.cumsum([len(sizes) for sizes in checked], dtype=np.int64)])
        self._flat = np.concatenate([np.zeros(0, np.int64), *checked])
        size = min(max(len(checked) // _WINDOWS, 1), _RUN)
        full, rest = divmod(len(checked), size)
        self.counts = np.array([size] * full + [rest] * bool(rest), np.int64)

    def lengths(self, number: int) -> np.ndarray:
        return self._flat[self._bounds[number] : self._bounds[number + 1]]


class JoinedSequences:
    """Several of them as one: the sequences of the first have the first numbers."""

    def __init__(self, parts: Sequence[PackedSequences]) -> None:
        self.parts = list(parts)
        sizes = [int(part.counts.sum()) for part in self.parts]
        self.first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.counts = np.concatenate([part.counts for part in self.parts])

    def __len__(self) -> int:
        return int(self.first[-1])

    def find(self, number: int) -> tuple[int, int]:
        """Which part a sequence belongs to, and its number there."""
        part = int(np.searchsorted(self.first, number, side="right")) - 1
        return part, int(number - self.first[part])

    def lengths(self, number: int) -> np.ndarray:
        part, there = self.find(number)
        return self.parts[part].lengths(there)


class EpochOrder:
    """All sequences once an epoch. `order.take(epoch, start, stop)`: those at positions [start, stop), (n,) int64.

    counts: (windows,) sequences of each window, numbered one window after another. part: keeps the orders of several
        corpora apart that start from one seed.
    """

    def __init__(self, counts: np.ndarray, seed: int, part: int = 0) -> None:
        self.counts, self._seed = np.asarray(counts, np.int64), (seed, part)
        self.size = int(self.counts.sum())
        self._first = np.cumsum(self.counts) - self.counts
        self._windows = functools.lru_cache(maxsize=2)(self._windows_of)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_windows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._windows = functools.lru_cache(maxsize=2)(self._windows_of)

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        windows, begins = self._windows(epoch)
        position = np.arange(start, min(stop, self.size))
        at = np.searchsorted(begins, position, side="right") - 1
        within = position - begins[at]
        window = windows[at]
        for each in np.unique(window[self.counts[window] > 1]).tolist():
            here = window == each
            shuffled = np.random.default_rng([*self._seed, epoch, each]).permutation(self.counts[each])
            within[here] = shuffled[within[here]]
        return self._first[window] + within

    def _windows_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows that are not empty in the order of an epoch, and the position at which each begins."""
        windows = np.random.default_rng([*self._seed, epoch]).permutation(np.flatnonzero(self.counts))
        counts = self.counts[windows]
        return windows, np.cumsum(counts) - counts


class WeightedOrder:
    """Sequences of several parts in turns, so that after any number of them each part is less than one from its share.

    Parts are numbered one after another. weights: (parts,) above 0, any scale; shares are met within one part in
    10,000, and a smaller share is refused. A part that has been served whole starts its next epoch, in a new order,
    whatever the others do.
    """

    def __init__(self, parts: Sequence[PackedSequences], weights: Sequence[float], seed: int) -> None:
        self.weights = _turns(weights, len(parts))
        self._orders = [EpochOrder(part.counts, seed, i) for i, part in enumerate(parts)]
        sizes = [order.size for order in self._orders]
        self._offset = np.cumsum([0, *sizes[:-1]])
        self._pattern = _pattern(self.weights)  # who has each turn of a cycle
        mine = self._pattern[:, None] == np.arange(len(parts))
        self._before = np.concatenate([np.zeros((1, len(parts)), np.int64), np.cumsum(mine, axis=0)])

    def served(self, position: int) -> np.ndarray:
        """How many sequences of each part come before a position, (parts,) int64."""
        cycle, turn = divmod(position, len(self._pattern))
        return cycle * self.weights + self._before[turn]

    @property
    def covered(self) -> int:
        """The first position before which every part has been served whole."""
        cycles = max(-(-order.size // turns) for order, turns in zip(self._orders, self.weights.tolist(), strict=True))
        short = (cycles - 1) * self.weights + self._before[1:] >= [order.size for order in self._orders]
        return (cycles - 1) * len(self._pattern) + int(np.argmax(short.all(axis=1))) + 1

    def epochs(self, position: int) -> np.ndarray:
        """How often each part has been served before a position, (parts,) float64."""
        return self.served(position) / np.array([order.size for order in self._orders])

    def take(self, start: int, stop: int) -> np.ndarray:
        """The sequences at positions [start, stop), (n,) int64."""
        part = self._pattern[np.arange(start, stop) % len(self._pattern)]
        numbers = np.empty(stop - start, np.int64)
        first, last = self.served(start), self.served(stop)
        for i, order in enumerate(self._orders):
            taken = []
            position = int(first[i])
            while position < last[i]:
                epoch, within = divmod(position, order.size)
                end = min(order.size, within + int(last[i]) - position)
                taken.append(order.take(epoch, within, end))
                position += end - within
            if taken:
                numbers[part == i] = np.concatenate(taken) + self._offset[i]
        return numbers


def _pattern(turns: np.ndarray) -> np.ndarray:
    """Which part has each turn of a cycle, (sum(turns),) int64: after any number of turns, each has had its share but
    for less than one. The chairman assignment of Tijdeman (1980): of the parts that are due, the one whose bound is
    the next to be reached."""
    share = turns / turns.sum()
    slack = 1 / (2 * max(len(turns), 2) - 2)
    pattern, had = np.empty(turns.sum(), np.int64), np.zeros(len(turns))
    for turn in range(len(pattern)):
        behind = share * (turn + 1) - had
        due = np.where(behind >= slack - 1e-9, (1 - slack - behind) / share, np.inf)
        pattern[turn] = due.argmin()
        had[pattern[turn]] += 1
    return pattern


def _turns(weights: Sequence[float], parts: int) -> np.ndarray:
    """Turns of each part in a cycle of at most `_TURNS`, (parts,) int64: largest remainder, lowest terms."""
    values = np.asarray(weights, np.float64)
    if values.shape != (parts,):
        raise ValueError(f"{values.size} weights for {parts} corpora: one for each is needed")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"weights {list(weights)} must be finite and above 0")
    values = values / values.max()
    exact = values / values.sum() * _TURNS
    turns = np.floor(exact).astype(np.int64)
    short = _TURNS - int(turns.sum())
    turns[np.argsort(turns - exact, kind="stable")[:short]] += 1
    if turns.min() < 1:
        at = int(np.argmin(turns))
        raise ValueError(
            f"weight {weights[at]} is a share of {values[at] / values.sum():.1e}; the least is 1 in {_TURNS:,}"
        )
    return turns // math.gcd(*turns.tolist())
