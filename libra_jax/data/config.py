"""What a run reads and how it is dealt to pools: the data part of a training config."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

TEXT_SUFFIXES = (".py", ".md", ".rst", ".txt")


def _free(default: Any) -> Any:
    """A field that may change when a run is resumed; for what data is read, its fingerprint says whether it did."""
    return dataclasses.field(default=default, metadata={"may_change": True})


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Documents, packed and placed. At least one path or package is needed."""

    paths: tuple[str, ...] = _free(())
    """Folders that `libra prepare` made; prefixes of Megatron-LM's .bin/.idx pairs; text files, and folders whose text
    files are read as bytes, sub-folders included. Each is a corpus of its own, but for text, which is one."""
    packages: tuple[str, ...] = _free(())
    """Installed Python packages, by import name, whose text files are read as bytes."""
    suffixes: tuple[str, ...] = _free(TEXT_SUFFIXES)
    """What a file in a folder or package must end with to be read."""
    weights: tuple[float, ...] | None = None
    """One for each path: its share of the sequences, on any scale; a corpus that has been served whole starts anew.
    None: every sequence of every corpus once an epoch."""
    held_out: float = 0.0
    """Share of the documents that is never trained on, but kept for evaluation; the same ones whatever the seed."""
    packer: Literal["first_fit", "best_fit", "concat_and_split"] = "first_fit"
    """How documents fill sequences: into the first with room, into the fullest with room, or end to end, cut where a
    sequence is full."""
    long_documents: Literal["split", "drop", "truncate"] = "split"
    """What becomes of documents longer than a sequence: cut into pieces of that length, each of them a document of its
    own from there on; left out; or cut short. How many there are, and what they lose, is printed."""
    max_documents: int | None = None
    """Most documents in one sequence; None: no limit."""
    across: Literal["all", "pools"] | None = _free(None)
    """Make all slots of a step equal, or only the pools of each micro-step; see `libra_jax.place`. None: "all" in a
    pipeline (mesh.pp above 1), where micro-steps that differ leave stages idle. Without one pools wait for one another
    within a micro-step only, so "pools" loses nothing, and it moves less: sequences of like cost share a pool."""
    last_step: Literal["pad", "drop"] = "pad"
    """An epoch's last, partial step: fill it with empty sequences, or leave its sequences out of this epoch."""
    prefetch: int = _free(2)
    """Steps that are read and planned ahead."""
    workers: int = _free(0)
    """Processes that read and plan ahead; 0: a thread of the training process."""

    def __post_init__(self) -> None:
        if not self.paths and not self.packages:
            raise ValueError("data.paths and data.packages are both empty: name at least one file, folder or package")
        if len(set(self.paths)) < len(self.paths):
            twice = next(path for path in self.paths if self.paths.count(path) > 1)
            raise ValueError(f"data.paths names {twice!r} twice; to see a corpus more often, give it a larger weight")
        for name, choices in {
            "packer": ("first_fit", "best_fit", "concat_and_split"),
            "long_documents": ("split", "drop", "truncate"),
            "across": ("all", "pools", None),
            "last_step": ("pad", "drop"),
        }.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"data.{name} ({getattr(self, name)!r}) must be one of {choices}")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"data.max_documents ({self.max_documents}) must be at least 1, or None")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data.held_out ({self.held_out}) must be a share of at least 0 and below 1")
        for name in ("prefetch", "workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.{name} ({getattr(self, name)}) must be 0 or more")
        if self.weights is not None:
            if self.packages or len(self.weights) != len(self.paths):
                raise ValueError(
                    f"data.weights has {len(self.weights)} entries for {len(self.paths)} paths and "
                    f"{len(self.packages)} packages: one for each path is needed, and packages have none "
                    "(--data.packages with nothing after it takes none)"
                )
            if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
                raise ValueError(f"data.weights {self.weights} must be finite and above 0")
