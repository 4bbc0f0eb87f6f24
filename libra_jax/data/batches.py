"""The input pipeline: batches of optimizer steps, with their plans, read and planned ahead in the background.

`StepBatches[step]` is a Grain map dataset and a pure function of the step. `open_batches` puts a prefetching iterator
on it whose state is the step number and what the data was, so that Orbax saves and restores it, and a run on other
data is refused.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import grain
import numpy as np

from libra_jax.data.config import DataConfig
from libra_jax.data.documents import PADDING_TOKEN, TextDocuments
from libra_jax.data.packing import pack_documents
from libra_jax.data.pool_size import Planner, PoolSizes, plan_step
from libra_jax.data.sampler import EMPTY, PoolSampler
from libra_jax.plan import PlanTables, stack_plans
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel


class Documents(Protocol):
    """What a source of documents has to offer: lengths, tokens by number, and something that stands for its content."""

    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def fingerprint(self) -> str: ...
    def __getitem__(self, index: int, /) -> np.ndarray: ...


def sequence_arrays(documents: Sequence[np.ndarray], seq_len: int) -> dict[str, np.ndarray]:
    """One packed sequence as arrays, each (seq_len,) int32, from the tokens of its documents in order.

    tokens: `PADDING_TOKEN` where there is no document. targets: the next token of the same document; -1 for the last
    token of a document and for padding. segment_ids: 1 for the first document; 0 for padding. positions: restart at
    each document.
    """
    arrays = {
        "tokens": np.full(seq_len, PADDING_TOKEN, np.int32),
        "targets": np.full(seq_len, -1, np.int32),
        "segment_ids": np.zeros(seq_len, np.int32),
        "positions": np.zeros(seq_len, np.int32),
    }
    start = 0
    for number, tokens in enumerate(documents, start=1):
        end = start + len(tokens)
        arrays["tokens"][start:end] = tokens
        arrays["targets"][start : end - 1] = tokens[1:]
        arrays["segment_ids"][start:end] = number
        arrays["positions"][start:end] = np.arange(len(tokens))
        start = end
    return arrays


class StepBatches(grain.MapDataset):
    """`batches[step]`: the batch of one optimizer step, a dict of

    tokens, targets, segment_ids, positions: (micro_steps, pools * pool_size, seq_len) int32, in slot order;
        see `sequence_arrays`.
    plans: `PlanTables` with leading axes (micro_steps, pools, dp, cp). Their spec says which pool size was chosen.
    stats: the `PlanStats` of every pool, (micro_steps * pools,) list. host only, as are:
    pool_size: the chosen one, int. pools: how many of them lie side by side.
    modelled_seconds: by pool size, see `StepPlan`. planning_seconds: of one core, for placement, plans and choice.
    sequence_ids: (micro_steps, pools, pool_size) int64, -1 where a sequence is all padding.
    lengths: document lengths of the step's sequences, in the order in which they came before they were placed.
    epoch: int.

    documents: where tokens come from. packed: the documents of each sequence that `sampler` numbers.
    planner: plans one pool; None: see `plan_step`.
    sizes: further pool sizes, from which each step takes the one with the least modelled time; None: none.
    """

    def __init__(
        self,
        documents: Documents,
        packed: Sequence[np.ndarray],
        sampler: PoolSampler,
        planner: Planner | None = None,
        sizes: PoolSizes | None = None,
    ) -> None:
        super().__init__()
        if len(packed) != len(sampler.lengths):
            raise ValueError(f"{len(packed)} packed sequences, but the sampler knows {len(sampler.lengths)}")
        self.documents, self.packed, self.sampler, self.planner = documents, packed, sampler, planner
        self.sizes = PoolSizes() if sizes is None else sizes
        self.sizes.of(sampler)  # refuses sizes that do not fit

    def __len__(self) -> int:
        return sys.maxsize  # epochs go on for ever; the run says how many steps it takes

    def __str__(self) -> str:
        return "StepBatches"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        sampler, spec = self.sampler, self.sampler.spec
        began = time.thread_time()
        planned = plan_step(sampler, index, self.sizes, self.planner)
        slots, tables = planned.slots, stack_micro_steps([stack_plans(pools) for pools in planned.plans])
        planning_seconds = time.thread_time() - began
        rows = [self._row(number) for number in slots.ravel()]
        shape = (sampler.micro_steps, sampler.pools * spec.pool_size, spec.seq_len)
        batch: dict[str, Any] = {name: np.stack([row[name] for row in rows]).reshape(shape) for name in rows[0]}
        return batch | {
            "plans": tables,
            "stats": [plan.stats for pools in planned.plans for plan in pools],
            "pool_size": planned.spec.pool_size,
            "pools": slots.shape[1],
            "modelled_seconds": planned.modelled_seconds,
            "planning_seconds": planning_seconds,
            "sequence_ids": slots,
            "lengths": [sampler.document_lengths(number) for number in sampler.step_sequences(index)],
            "epoch": sampler.epoch(index),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a saved step number to mean the same data."""
        sampler = self.sampler
        return {
            "documents": self.documents.fingerprint,
            "seq_len": sampler.spec.seq_len,
            "sequences": len(self.packed),
            "sequences_per_step": sampler.sequences_per_step,
            "seed": sampler.seed,
            "order": sampler.fingerprint,
        }

    def _row(self, number: int) -> dict[str, np.ndarray]:
        documents = [] if number == EMPTY else [self.documents[int(i)] for i in self.packed[number]]
        return sequence_arrays(documents, self.sampler.spec.seq_len)


def stack_micro_steps(tables: Sequence[PlanTables]) -> PlanTables:
    """Tables of a step with leading axes (micro_steps, pools, dp, cp), from one (pools, dp, cp) per micro-step."""
    names = PlanTables.table_names()
    return dataclasses.replace(tables[0], **{name: np.stack([getattr(t, name) for t in tables]) for name in names})


class BatchIterator(grain.DatasetIterator):
    """Batches in the order of steps. Its state says which step comes next, and of which data.

    A Grain iterator: `get_state`, `set_state`, `close`, and Orbax saves and restores it. Restoring the state of other
    data raises ValueError with both values named; see `StepBatches.identity`.
    """

    def __init__(self, batches: StepBatches, prefetch: int = 2) -> None:
        options = grain.ReadOptions(num_threads=1 if prefetch else 0, prefetch_buffer_size=prefetch)
        super().__init__(iter(batches.to_iter_dataset(options)))
        self.batches = batches

    @property
    def identity(self) -> dict[str, Any]:
        """What data this is; see `StepBatches.identity`."""
        return self.batches.identity

    def __next__(self) -> dict[str, Any]:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {**self._parent.get_state(), "data": self.identity}

    def set_state(self, state: dict[str, Any]) -> None:
        saved, now = state["data"], self.identity
        changed = [name for name in now if saved.get(name) != now[name]]
        if changed:
            lines = "\n".join(f"  {name}: {saved.get(name)!r} saved, {now[name]!r} now" for name in changed)
            raise ValueError(f"the saved position belongs to other data:\n{lines}")
        self._parent.set_state({name: value for name, value in state.items() if name != "data"})

    def __str__(self) -> str:
        return "BatchIterator"


def open_step_batches(
    config: DataConfig,
    spec: PoolSpec,
    pools: int,
    micro_steps: int,
    seed: int,
    sizes: PoolSizes | None = None,
    cost: CostModel | None = None,
) -> StepBatches:
    """Documents found, packed and dealt to steps, as the configs say; see `StepBatches` and `PoolSampler`."""
    documents = TextDocuments.open(spec.seq_len, config.paths, config.packages, config.suffixes)
    packed = pack_documents(
        documents.lengths, spec.seq_len, seed=seed, packer=config.packer, max_documents=config.max_documents
    )
    sampler = PoolSampler(
        [documents.lengths[numbers] for numbers in packed],
        spec,
        pools=pools,
        micro_steps=micro_steps,
        seed=seed,
        across=config.across,
        last_step=config.last_step,
        cost=cost,
    )
    return StepBatches(documents, packed, sampler, sizes=sizes)


def open_batches(
    config: DataConfig,
    spec: PoolSpec,
    pools: int = 1,
    micro_steps: int = 1,
    seed: int = 0,
    sizes: PoolSizes | None = None,
    cost: CostModel | None = None,
) -> BatchIterator:
    """The batches of a run, from its first step; endless. Close it when done: it reads ahead in a thread."""
    return BatchIterator(open_step_batches(config, spec, pools, micro_steps, seed, sizes, cost), config.prefetch)
