"""Steps whose update was left out: which micro-steps were not finite, and which documents they held.

Takes what the program says of each micro-step and the step's batch; gives sentences for the terminal, and for each such
step a line in `skipped.jsonl` that names every document.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax.data import StepBatches
from libra_jax.data.sampler import EMPTY

_NAMED = 8


@dataclasses.dataclass(frozen=True)
class BadMicroStep:
    """A micro-step, counted from 0, whose loss or gradients are not finite. loss: its mean, as it came out.

    sequences: numbers of its packed sequences. documents: {corpus: numbers of the documents in them}, in ascending
    order.
    """

    micro_step: int
    loss: float
    sequences: list[int]
    documents: dict[str, list[int]]

    def describe(self) -> str:
        """One sentence; it names some of the documents and counts the others."""
        named = [f"{_some(numbers)} of {corpus}" for corpus, numbers in self.documents.items()]
        what = f"loss {self.loss:.4g}" + (", but a gradient is not finite" if np.isfinite(self.loss) else "")
        return f"micro-step {self.micro_step}: {what}; sequences {self.sequences}, documents {'; '.join(named)}"


def bad_micro_steps(data: StepBatches, batch: dict[str, Any], micro_steps: dict[str, np.ndarray]) -> list[BadMicroStep]:
    """Those of a step that are not finite; none where only their sum is too large.

    micro_steps: as from `mean_loss_and_gradients`, on the host. batch: of the whole step or of a process, which names
    the sequences of all of them.
    """
    found = []
    for number in np.flatnonzero(~micro_steps["finite"] | ~np.isfinite(micro_steps["loss"])).tolist():
        sequences = batch["sequence_ids"][number]
        sequences = sequences[sequences != EMPTY].tolist()
        loss = float(micro_steps["loss"][number]) / max(int(micro_steps["targets"][number]), 1)
        found.append(BadMicroStep(number, loss, sequences, documents_of(data, sequences)))
    return found


def documents_of(data: StepBatches, sequences: Sequence[int]) -> dict[str, list[int]]:
    """{corpus: numbers of the documents that these packed sequences hold, ascending, each once}."""
    documents: dict[str, set[int]] = {}
    for number in sequences:
        part, there = data.sampler.sequences.find(number)
        corpus = data.corpora[part]
        documents.setdefault(corpus.name, set()).update(corpus.packed.pieces(there).document.tolist())
    return {name: sorted(numbers) for name, numbers in documents.items()}


def describe_skipped(step: int, loss: float, grad_norm: float, bad: Sequence[BadMicroStep], micro_steps: int) -> str:
    """What is said of a step of so many micro-steps whose update was left out."""
    what = f"step {step}: loss {loss}, gradient norm {grad_norm}: nothing was updated. "
    if not bad:
        return what + "Each of its micro-steps is finite by itself, and their sum is not."
    said = what + ". ".join(part.describe() for part in bad) + "."
    if len(bad) == micro_steps > 1:
        said += (
            " That is every micro-step: the weights are more likely the cause than these documents, and a smaller "
            "learning rate, from an earlier checkpoint, the way out."
        )
    return said


def note_skipped(path: Path, step: int, bad: Sequence[BadMicroStep]) -> None:
    """Adds a line to `skipped.jsonl` with all that is known of a step; what is not finite stands there as text."""
    parts = [dataclasses.asdict(part) | {"loss": str(part.loss)} for part in bad]
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "micro_steps": parts}) + "\n")


def _some(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:_NAMED]))
    return named if len(numbers) <= _NAMED else f"{named} and {len(numbers) - _NAMED} more"
