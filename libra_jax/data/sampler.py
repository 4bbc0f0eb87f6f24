"""Which sequences an optimizer step trains on, and in which slot each of them goes.

Takes the document lengths of every packed sequence; gives, for any step asked for, the sequences of that step placed
by VRSP. A step is a pure function of (lengths, seed, step): nothing is carried from one step to the next, so a run
resumes at any step, on any number of hosts, from the step number alone. A step costs what its own sequences cost,
however many there are and whichever step it is. NumPy only.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from libra_jax.data.order import EpochOrder, JoinedSequences, ListedSequences, PackedSequences, WeightedOrder
from libra_jax.modelled import check_prices
from libra_jax.placement import place
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, sequences_seconds

EMPTY = -1
"""Number of a sequence that is all padding; it fills an epoch's last step."""


class PoolSampler:
    """`sampler[step]`: the sequences of a step in slot order, (micro_steps, pools, pool_size) int64 numbers or `EMPTY`.

    sequences: the packed sequences: document lengths of each, (sequences,) lists; or what says them by number, such as
        `PackedDocuments`; or a list of such, several corpora, whose sequences are numbered one after another.
    spec: pool_size and the shapes that work is counted with. pools, micro_steps: slots of a step.
    seed: every epoch deals all sequences anew, in an order that depends on (seed, epoch).
    weights: one for each corpus: its share of the sequences, met within one sequence after any number of them. Each
        then has epochs of its own, and no step is partial. None: an epoch is all sequences of all corpora, once.
    across: as in `libra_jax.place`. "pools", the default: sequences of like cost share a micro-step, whose pools are
        equal, and micro-steps may differ; pools wait for one another within a micro-step only, unless a pipeline lets
        micro-steps overlap, and sequences that are alike leave little to move between ranks.
    cost: prices a sequence's work; None: `CostModel()`.
    last_step: an epoch whose last step is not full either fills it with empty sequences, last in the order ("pad":
        every sequence once an epoch), or leaves those sequences out of this epoch ("drop").

    Placement moves sequences between the slots of one step, never between steps. Raises ValueError where lengths do
    not fit seq_len, or "drop" would leave no step at all.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int] | np.ndarray] | PackedSequences | Sequence[PackedSequences],
        spec: PoolSpec,
        *,
        pools: int = 1,
        micro_steps: int = 1,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        across: str = "pools",
        last_step: str = "pad",
        cost: CostModel | None = None,
    ) -> None:
        for name, value in {"pools": pools, "micro_steps": micro_steps}.items():
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1")
        check_prices(cost, None)
        if last_step not in ("pad", "drop"):
            raise ValueError(f"last_step ({last_step!r}) must be 'pad' or 'drop'")
        self.sequences = JoinedSequences(_parts(sequences, spec))
        for part in self.sequences.parts:
            if not part.counts.sum():
                raise ValueError("0 sequences to sample from: at least 1 is needed")
        self.spec, self.pools, self.micro_steps = spec, pools, micro_steps
        self.seed, self.across, self.last_step = seed, across, last_step
        self._order = EpochOrder(self.sequences.counts, seed)
        self.weights = None if weights is None else [float(weight) for weight in weights]
        self._weighted = None if weights is None else WeightedOrder(self.sequences.parts, weights, seed)
        if weights is None and last_step == "drop" and len(self) < self.sequences_per_step:
            raise ValueError(
                f"{len(self)} sequences do not fill one step of {self.sequences_per_step}, and last_step='drop' "
                "leaves out what does not; use last_step='pad' or smaller steps"
            )
        self.cost = CostModel() if cost is None else cost

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.sequences)

    @property
    def sequences_per_step(self) -> int:
        return self.micro_steps * self.pools * self.spec.pool_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every sequence is served once; with weights, until every corpus has been served whole."""
        size = self.sequences_per_step
        if self._weighted is not None:
            return self._weighted.covered // size + bool(self._weighted.covered % size)
        full, rest = divmod(len(self), size)
        return full + (1 if rest and self.last_step == "pad" else 0)

    def epochs(self, step: int) -> np.ndarray:
        """How often each corpus has been served before `step`, (corpora,) float64."""
        step = _whole(step)
        if self._weighted is not None:
            return self._weighted.epochs(step * self.sequences_per_step)
        return np.full(len(self.sequences.parts), step / self.steps_per_epoch)

    def step_sequences(self, step: int) -> np.ndarray:
        """Sequences of `step` in the order in which they come, before placement: (sequences_per_step,) int64."""
        step, size = _whole(step), self.sequences_per_step
        if self._weighted is not None:
            return self._weighted.take(step * size, (step + 1) * size)
        epoch, within = divmod(step, self.steps_per_epoch)
        taken = self._order.take(epoch, within * size, (within + 1) * size)
        return np.concatenate([taken, np.full(size - len(taken), EMPTY, np.int64)])

    def __getitem__(self, step: int) -> np.ndarray:
        return self.slots(step, self.spec.pool_size)

    def slots(self, step: int, pool_size: int) -> np.ndarray:
        """The same sequences as `sampler[step]`, dealt to pools of another size: (micro_steps, pools, pool_size) int64.

        As many sequences lie side by side. Raises ValueError where pools of this size cannot hold them.
        """
        if isinstance(pool_size, bool) or not hasattr(pool_size, "__index__") or pool_size < 1:
            raise ValueError(f"pool_size ({pool_size!r}) must be a whole number of at least 1")
        pools, rest = divmod(self.pools * self.spec.pool_size, pool_size)
        if rest:
            raise ValueError(
                f"pool_size ({pool_size}) must divide the sequences of a micro-step, pools * pool_size "
                f"({self.pools} * {self.spec.pool_size} = {self.pools * self.spec.pool_size})"
            )
        sequences = self.step_sequences(step)
        return sequences[place(self.work(sequences), pool_size, pools, self.across)]

    def work(self, sequences: np.ndarray) -> np.ndarray:
        """What sequences cost by their numbers, float64 of their shape: seconds of one layer, 0 where `EMPTY`."""
        lengths = [self._lengths(number) for number in sequences.ravel().tolist()]
        counts = np.array([len(sizes) for sizes in lengths], np.int64)
        flat = np.concatenate([np.zeros(0, np.int64), *lengths])
        return sequences_seconds(flat, counts, self.spec, self.cost).reshape(sequences.shape)

    def document_lengths(self, number: int) -> list[int]:
        """Document lengths of one sequence by its number; none where it is `EMPTY`."""
        return self._lengths(number).tolist()

    def _lengths(self, number: int) -> np.ndarray:
        return np.zeros(0, np.int64) if number == EMPTY else self.sequences.lengths(number)


def _whole(step: int) -> int:
    """A step as a Python integer, which never overflows. TypeError for what is no whole number, IndexError below 0."""
    if isinstance(step, bool):
        raise TypeError(f"step ({step}) must be a whole number")
    number = operator.index(step)
    if number < 0:
        raise IndexError(f"step ({number}) must be 0 or more")
    return number


def _parts(sequences: Any, spec: PoolSpec) -> list[PackedSequences]:
    """The corpora of whatever way they were given in."""
    if hasattr(sequences, "counts"):
        return [sequences]
    listed = list(sequences)
    if listed and all(hasattr(part, "counts") for part in listed):
        return listed
    return [ListedSequences(listed, spec.seq_len)]
