"""Placement for a pipeline of your own: a Grain `Sampler` over a dataset that is packed already.

`grain.DataLoader` asks a sampler for record keys by index and gives shard s of S the indices s, s + S, s + 2 S, ...
`PlacementSampler` answers so that each shard, batching what it gets, has its own rows of every step in slot order, and
`plans(step)` gives the plans that go with them.
"""

from __future__ import annotations

import functools
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
    shards, workers: the loader's `ShardOptions.shard_count` and `worker_count`, which the sampler cannot see, and which
        decide who asks for which index. shards must divide the sequences of a micro-step; shard s has the rows
        [s n / shards, (s + 1) n / shards) of each. workers must divide steps; 0 and 1 are the same.

    A shard's records of one step, in order, are (micro_steps, n / shards) sequences: batch them with
    `grain.transforms.Batch(records_per_step)`. Raises ValueError naming both numbers where one does not fit.
    """

    def __init__(self, sampler: PoolSampler, steps: int, shards: int = 1, workers: int = 0) -> None:
        rows = sampler.pools * sampler.spec.pool_size
        if steps < 1:
            raise ValueError(f"steps ({steps}) must be at least 1")
        if shards < 1 or rows % shards:
            raise ValueError(f"shards ({shards}) must divide the {rows} sequences of a micro-step")
        if workers < 0 or steps % max(workers, 1):
            raise ValueError(f"workers ({workers}) must divide steps ({steps}): each makes whole batches in turn")
        if sampler.last_step != "drop" and sampler.weights is None and len(sampler) % sampler.sequences_per_step:
            raise ValueError(
                f"{len(sampler)} sequences do not fill steps of {sampler.sequences_per_step}, and a loader of records "
                "cannot serve an empty one: give the PoolSampler last_step='drop'"
            )
        self.sampler, self.steps, self.shards, self.workers = sampler, steps, shards, max(workers, 1)
        self._cache()

    @property
    def records_per_step(self) -> int:
        """Of one shard."""
        return self.sampler.sequences_per_step // self.shards

    def __len__(self) -> int:
        return self.steps * self.sampler.sequences_per_step

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        # Shard s asks for s, s + shards, ...; of these, worker w takes w, w + workers, ... and batches what it has.
        asked, shard = divmod(index, self.shards)
        asked, worker = divmod(asked, self.workers)
        batch, record = divmod(asked, self.records_per_step)
        key = self._slots(batch * self.workers + worker)[shard, record]
        rng = np.random.default_rng([self.sampler.seed, index])
        return grain.RecordMetadata(index=index, record_key=int(key), rng=rng)

    def __repr__(self) -> str:
        """Grain compares this with that of the loader whose position it restores."""
        sampler = self.sampler
        return (
            f"PlacementSampler(sequences={len(sampler)}, sequences_per_step={sampler.sequences_per_step}, "
            f"steps={self.steps}, shards={self.shards}, workers={self.workers}, seed={sampler.seed}, "
            f"across={sampler.across!r})"
        )

    def rows(self, shard: int = 0) -> np.ndarray:
        """Which of a micro-step's sequences a shard has, (rows,) int64."""
        if not 0 <= shard < self.shards:
            raise ValueError(f"shard {shard} of a sampler with shards={self.shards}: give it as many as the loader has")
        size = self.sampler.pools * self.sampler.spec.pool_size // self.shards
        return np.arange(shard * size, (shard + 1) * size)

    def plans(self, step: int, shard: int = 0) -> PlanTables:
        """Plans of the pools that hold a shard's rows, leading axes (micro_steps, pools, dp, cp)."""
        return plan_step(self.sampler, step, PoolSizes(), rows=self.rows(shard)).tables

    def _slots_of(self, step: int) -> np.ndarray:
        """(shards, records_per_step) sequence numbers."""
        slots = self.sampler[step]
        assert (slots != EMPTY).all(), "steps are full"
        by_shard = slots.reshape(self.sampler.micro_steps, self.shards, -1)
        return by_shard.transpose(1, 0, 2).reshape(self.shards, -1)

    def _cache(self) -> None:
        self._slots = functools.lru_cache(maxsize=8)(self._slots_of)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_slots"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cache()
