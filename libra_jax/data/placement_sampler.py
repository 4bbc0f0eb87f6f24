"""Placement for a pipeline of your own: a Grain `Sampler` over a dataset that is packed already.

`grain.DataLoader` asks a sampler for record keys by index and gives shard s of S the indices s, s + S, s + 2 S, ...
`PlacementSampler` answers so that each shard, batching what it gets, has its own rows of every step in slot order, and
`plans(step)` gives the plans that go with them.
"""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

from libra_jax.data.pool_size import PoolSizes, plan_step
from libra_jax.data.sampler import EMPTY, PoolSampler
from libra_jax.plan import PlanTables


class PlacementSampler:
    """A `grain.samplers.Sampler` over packed sequences: `steps` optimizer steps, placed by `sampler`.

    sampler: of the dataset's document lengths; with last_step="drop", as a record cannot be made of nothing.
    steps: how many steps the loader serves. A loader that goes on from a checkpoint needs the same number; use one as
        large as the run may become.
    shards: over how many processes the loader is spread (`grain.ShardOptions.shard_count`): 1, or a number that the
        sequences of a micro-step divide by. Shard s has the rows [s n / shards, (s + 1) n / shards) of each micro-step.

    A shard's records of one step, in order, are (micro_steps, n / shards) sequences: batch them with
    `grain.transforms.Batch(micro_steps * n // shards)`. Raises ValueError naming both numbers where shards do not fit.
    """

    def __init__(self, sampler: PoolSampler, steps: int, shards: int = 1) -> None:
        rows = sampler.pools * sampler.spec.pool_size
        if steps < 1:
            raise ValueError(f"steps ({steps}) must be at least 1")
        if shards < 1 or rows % shards:
            raise ValueError(f"shards ({shards}) must divide the {rows} sequences of a micro-step")
        if sampler.last_step != "drop" and sampler.weights is None and len(sampler) % sampler.sequences_per_step:
            raise ValueError(
                f"{len(sampler)} sequences do not fill steps of {sampler.sequences_per_step}, and a loader of records "
                "cannot serve an empty one: give the PoolSampler last_step='drop'"
            )
        self.sampler, self.steps, self.shards = sampler, steps, shards
        self._latest: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.steps * self.sampler.sequences_per_step

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        step, within = divmod(index, self.sampler.sequences_per_step)
        order = self._order(step)
        rng = np.random.default_rng([self.sampler.seed, index])
        return grain.RecordMetadata(index=index, record_key=int(order[within]), rng=rng)

    def __repr__(self) -> str:
        """Grain compares this with that of the loader whose position it restores."""
        sampler = self.sampler
        return (
            f"PlacementSampler(sequences={len(sampler)}, sequences_per_step={sampler.sequences_per_step}, "
            f"steps={self.steps}, shards={self.shards}, seed={sampler.seed}, across={sampler.across!r})"
        )

    def rows(self, shard: int = 0) -> np.ndarray:
        """Which of a micro-step's sequences a shard has, (rows,) int64."""
        size = self.sampler.pools * self.sampler.spec.pool_size // self.shards
        return np.arange(shard * size, (shard + 1) * size)

    def plans(self, step: int, shard: int = 0) -> PlanTables:
        """Plans of the pools that hold a shard's rows, leading axes (micro_steps, pools, dp, cp)."""
        return plan_step(self.sampler, step, PoolSizes(), rows=self.rows(shard)).tables

    def _order(self, step: int) -> np.ndarray:
        """Sequence numbers of a step in the order in which the loader asks for them: every shard's first, then ..."""
        if self._latest is None or self._latest[0] != step:
            slots = self.sampler[step]
            assert (slots != EMPTY).all(), "steps are full"
            by_shard = slots.reshape(self.sampler.micro_steps, self.shards, -1).transpose(0, 2, 1)
            self._latest = step, by_shard.ravel()
        return self._latest[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_latest": None}
