"""What a run reads and how it is dealt to pools: the data part of a training config."""

from __future__ import annotations

import dataclasses
from typing import Literal

TEXT_SUFFIXES = (".py", ".md", ".rst", ".txt")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text files as documents, packed and placed. At least one path or package is needed."""

    paths: tuple[str, ...] = ()
    """Text files, and folders whose text files are read, sub-folders included."""
    packages: tuple[str, ...] = ()
    """Installed Python packages, by import name, whose text files are read."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """What a file in a folder or package must end with to be read."""
    packer: Literal["first_fit", "best_fit"] = "first_fit"
    """Grain's packer that fills sequences with documents."""
    max_documents: int | None = None
    """Most documents in one sequence; None: no limit."""
    across: Literal["all", "pools"] = "pools"
    """Make all slots of a step equal, or only the pools of each micro-step; see `libra_jax.place`. Pools wait for one
    another within a micro-step only, unless a pipeline lets micro-steps overlap. This trainer has none, so "pools"
    loses nothing, and it moves less: sequences of like cost share a pool. `place` itself cannot know whether there is a
    pipeline, and defaults to "all"."""
    last_step: Literal["pad", "drop"] = "pad"
    """An epoch's last, partial step: fill it with empty sequences, or leave its sequences out of this epoch."""
    prefetch: int = dataclasses.field(default=2, metadata={"may_change": True})
    """Steps that are read and planned ahead."""

    def __post_init__(self) -> None:
        if not self.paths and not self.packages:
            raise ValueError("data.paths and data.packages are both empty: name at least one file, folder or package")
        for name, choices in {
            "packer": ("first_fit", "best_fit"), "across": ("all", "pools"), "last_step": ("pad", "drop")
        }.items():  # fmt: skip
            if getattr(self, name) not in choices:
                raise ValueError(f"data.{name} ({getattr(self, name)!r}) must be one of {choices}")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"data.max_documents ({self.max_documents}) must be at least 1, or None")
        if self.prefetch < 0:
            raise ValueError(f"data.prefetch ({self.prefetch}) must be 0 or more")
