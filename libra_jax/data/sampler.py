"""Which sequences an optimizer step trains on, and in which slot each of them goes.

Takes the document lengths of every packed sequence; gives, for any step asked for, the sequences of that step placed
by VRSP. A step is a pure function of (lengths, seed, step): nothing is carried from one step to the next, so a run
resumes at any step, on any number of hosts, from the step number alone. NumPy only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from libra_jax.modelled import check_prices
from libra_jax.placement import place
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, check_lengths, sequence_seconds

EMPTY = -1
"""Number of a sequence that is all padding; it fills an epoch's last step."""


class PoolSampler:
    """`sampler[step]`: the sequences of a step in slot order, (micro_steps, pools, pool_size) int64 numbers or `EMPTY`.

    lengths: document lengths of every packed sequence, (sequences,) lists.
    spec: pool_size and the shapes that work is counted with. pools, micro_steps: slots of a step.
    seed: every epoch deals all sequences anew, in an order that depends on (seed, epoch).
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
        lengths: Sequence[Sequence[int] | np.ndarray],
        spec: PoolSpec,
        *,
        pools: int = 1,
        micro_steps: int = 1,
        seed: int = 0,
        across: str = "pools",
        last_step: str = "pad",
        cost: CostModel | None = None,
    ) -> None:
        if len(lengths) == 0:
            raise ValueError("0 sequences to sample from: at least 1 is needed")
        for name, value in {"pools": pools, "micro_steps": micro_steps}.items():
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1")
        check_prices(cost, None)
        if last_step not in ("pad", "drop"):
            raise ValueError(f"last_step ({last_step!r}) must be 'pad' or 'drop'")
        self.lengths = [check_lengths(sizes, spec.seq_len, sequence=i) for i, sizes in enumerate(lengths)]
        self.spec, self.pools, self.micro_steps = spec, pools, micro_steps
        self.seed, self.across, self.last_step = seed, across, last_step
        if last_step == "drop" and len(lengths) < self.sequences_per_step:
            raise ValueError(
                f"{len(lengths)} sequences do not fill one step of {self.sequences_per_step}, and last_step='drop' "
                "leaves out what does not; use last_step='pad' or smaller steps"
            )
        self.cost = CostModel() if cost is None else cost
        self.seconds = np.array([sequence_seconds(sizes, spec, self.cost) for sizes in self.lengths])

    @property
    def sequences_per_step(self) -> int:
        return self.micro_steps * self.pools * self.spec.pool_size

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(len(self.lengths), self.sequences_per_step)
        return full + (1 if rest and self.last_step == "pad" else 0)

    def epoch(self, step: int) -> int:
        """The epoch that `step` belongs to, from 0."""
        return step // self.steps_per_epoch

    def step_sequences(self, step: int) -> np.ndarray:
        """Sequences of `step` in the order in which they come, before placement: (sequences_per_step,) int64."""
        if step < 0:
            raise IndexError(f"step ({step}) must be 0 or more")
        epoch, within = divmod(step, self.steps_per_epoch)
        size = self.sequences_per_step
        taken = _epoch_order(len(self.lengths), self.seed, epoch)[within * size : (within + 1) * size]
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
        return np.where(sequences == EMPTY, 0.0, self.seconds[sequences])

    def document_lengths(self, number: int) -> list[int]:
        """Document lengths of one sequence by its number; none where it is `EMPTY`."""
        return [] if number == EMPTY else self.lengths[number].tolist()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Stands for everything that decides which sequences a step holds: lengths, seed, step size, last step.

        How a step's sequences are placed is no part of it: pools of another size train on the same steps.
        """
        digest = hashlib.sha256(f"{self.seed} {self.sequences_per_step} {self.last_step}\n".encode())
        for sizes in self.lengths:
            digest.update(sizes.tobytes() + b"\n")
        return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def _epoch_order(sequences: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(sequences)
    order.flags.writeable = False
    return order
