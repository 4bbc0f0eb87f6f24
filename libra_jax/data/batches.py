"""The input pipeline: batches of optimizer steps, with their plans, read and planned ahead in the background.

`StepBatches[step]` is a Grain map dataset and a pure function of the step: each process reads and plans its own rows
of a step, and all of them agree without talking. `BatchIterator` reads ahead in a thread or in worker processes; its
state is the step number and what the data was, so that Orbax saves and restores it, and a run on other data is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from libra_jax.data.config import DataConfig
from libra_jax.data.corpora import Corpus, open_corpora
from libra_jax.data.orphans import end_with_parent_alone
from libra_jax.data.packing import Pieces
from libra_jax.data.pool_size import Planner, PoolSizes, plan_step
from libra_jax.data.sampler import EMPTY, PoolSampler
from libra_jax.plan import check_batch
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel

PADDING_TOKEN = 0
"""Token of padding. No token of a document sees it and no loss counts it, so that it may be one of the vocabulary."""
_LOOKED_AT = 256
ARRAYS = ("tokens", "targets", "segment_ids", "positions")


def describe_documents(lengths: np.ndarray, rows: dict[str, np.ndarray]) -> None:
    """Completes a packed sequence whose tokens are there: what follows from the lengths of its documents.

    lengths: (documents,) tokens of each, end to end from the start. rows: arrays by the names in `ARRAYS`, (seq_len,)
        int32 each. tokens: of the documents; padding becomes `PADDING_TOKEN`. targets: the next token of the same
        document; -1 for the last token of a document and for padding. segment_ids: 1 for the first document; 0 for
        padding. positions: restart at each document.
    """
    tokens, targets, segment_ids, positions = (rows[name] for name in ARRAYS)
    ends = np.cumsum(lengths)
    used = int(ends[-1]) if len(ends) else 0
    tokens[used:] = PADDING_TOKEN
    targets[: max(used - 1, 0)] = tokens[1:used]
    targets[ends - 1] = -1
    targets[used:] = -1
    segment_ids[:used] = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    segment_ids[used:] = 0
    starts = np.repeat((ends - lengths).astype(np.int32), lengths)
    np.subtract(_counting(len(positions))[:used], starts, out=positions[:used])
    positions[used:] = 0


@functools.lru_cache(maxsize=2)
def _counting(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int32)


class StepBatches(grain.MapDataset):
    """`batches[step]`: the batch of one optimizer step, a dict of

    tokens, targets, segment_ids, positions: (micro_steps, rows, seq_len) int32, in slot order; see
        `describe_documents`. rows are the pools * pool_size sequences of a micro-step, or those of `rows`.
    plans: `PlanTables` with leading axes (micro_steps, pools, dp, cp). Their spec says which pool size was chosen. The
        pools are all, or those that hold one of `rows`.
    stats: the `PlanStats` of these pools, (micro_steps * pools,) list. host only, as are:
    rows: (rows,) int64, which of a micro-step's sequences these are; pool_numbers: (pools,) int64, which pools.
    pool_size: the chosen one, int. pools: how many of them lie side by side, int.
    modelled_seconds: by pool size, see `StepPlan`. planning_seconds: of one core, for placement, plans and choice;
        reading_seconds: for reading tokens and making the arrays.
    sequence_ids: (micro_steps, pools, pool_size) int64 of the whole step, -1 where a sequence is all padding.
    lengths: document lengths of the whole step's sequences, in the order in which they came before they were placed.
    epochs: (corpora,) float64, how often each has been served before this step.

    corpora: documents, and how they are packed; the sampler numbers their sequences one corpus after another.
    planner: plans one pool; None: see `plan_step`.
    sizes: further pool sizes, from which each step takes the one with the least modelled time; None: none.
    rows: the sequences of a micro-step that this process holds, whole numbers in ascending order, counted over pools
        and places in a pool (`train.mesh.local_rows`); None: all.
    vocab_size: tokens must be below it; None: whatever int32 holds. A ValueError names the document that is not.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        sampler: PoolSampler,
        planner: Planner | None = None,
        sizes: PoolSizes | None = None,
        rows: Sequence[int] | np.ndarray | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.corpora, self.sampler, self.planner, self.vocab_size = list(corpora), sampler, planner, vocab_size
        packed = [len(corpus.packed) for corpus in self.corpora]
        known = [int(part.counts.sum()) for part in sampler.sequences.parts]
        if packed != known:
            raise ValueError(f"{packed} packed sequences by corpus, but the sampler knows {known}")
        self.sizes = PoolSizes() if sizes is None else sizes
        self.sizes.of(sampler)  # refuses sizes that do not fit
        across = sampler.pools * sampler.spec.pool_size
        self.rows = np.arange(across) if rows is None else np.asarray(rows, np.int64)
        inside = self.rows.ndim == 1 and len(self.rows) and (np.diff(self.rows, prepend=-1) > 0).all()
        if not inside or self.rows[-1] >= across:
            raise ValueError(f"rows {self.rows.tolist()} must be ascending numbers of a micro-step's {across} rows")

    def __len__(self) -> int:
        return sys.maxsize  # epochs go on for ever; the run says how many steps it takes

    def __str__(self) -> str:
        return "StepBatches"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        sampler = self.sampler
        began = time.thread_time()
        planned = plan_step(sampler, index, self.sizes, self.planner, self.rows)
        slots, tables = planned.slots, planned.tables
        read_from = time.thread_time()
        numbers = slots.reshape(sampler.micro_steps, -1)[:, self.rows]
        arrays = {name: np.empty((*numbers.shape, sampler.spec.seq_len), np.int32) for name in ARRAYS}
        for at, number in np.ndenumerate(numbers):
            self._fill(int(number), {name: array[at] for name, array in arrays.items()})
        return arrays | {
            "plans": tables,
            "stats": [plan.stats for pools in planned.plans for plan in pools],
            "rows": self.rows,
            "pool_numbers": planned.pools,
            "pool_size": planned.spec.pool_size,
            "pools": slots.shape[1],
            "modelled_seconds": planned.modelled_seconds,
            "planning_seconds": read_from - began,
            "reading_seconds": time.thread_time() - read_from,
            "sequence_ids": slots,
            "lengths": [sampler.document_lengths(number) for number in sampler.step_sequences(index)],
            "epochs": sampler.epochs(index),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a saved step number to mean the same data. Values that JSON holds."""
        sampler = self.sampler
        packing = {name: value for corpus in self.corpora for name, value in corpus.packed.rules.items()}
        return {
            "corpus": [corpus.documents.fingerprint for corpus in self.corpora],
            "tokenizer": [corpus.documents.tokenizer for corpus in self.corpora],
            "seq_len": sampler.spec.seq_len,
            **packing,
            "sequences": len(sampler),
            "sequences_per_step": sampler.sequences_per_step,
            "weights": sampler.weights,
            "last_step": sampler.last_step,
            "seed": sampler.seed,
        }

    def _fill(self, number: int, rows: dict[str, np.ndarray]) -> None:
        """Makes one sequence, in place."""
        if number == EMPTY:
            describe_documents(np.zeros(0, np.int64), rows)
            return
        part, there = self.sampler.sequences.find(number)
        corpus = self.corpora[part]
        pieces = corpus.packed.pieces(there)
        tokens = rows["tokens"][: int(pieces.length.sum())]
        corpus.documents.read(*pieces, tokens)
        if self.vocab_size is not None:
            _check_vocabulary(corpus, pieces, tokens, self.vocab_size)
        describe_documents(pieces.length, rows)


def check_step(batch: dict[str, Any]) -> None:
    """Refuses, on the host, a batch whose plans were made for other documents than it holds; see `check_batch`."""
    plans, size, rows = batch["plans"], batch["pool_size"], batch["rows"]
    first = plans.first_visible  # (micro_steps, pools, dp, cp, tokens); a process may hold a part of a pool's rows
    planned = (batch["pool_numbers"][:, None] * size + np.arange(size)).ravel()
    first = first.reshape(first.shape[0], len(planned), 1, *first.shape[3:])[:, np.searchsorted(planned, rows)]
    check_batch(dataclasses.replace(plans, first_visible=first), batch["segment_ids"])


def _check_vocabulary(corpus: Corpus, pieces: Pieces, tokens: np.ndarray, vocab_size: int) -> None:
    """Refuses tokens that the model has no row for, which XLA would take for others. pieces: they lie end to end."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        at = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        document = int(pieces.document[np.searchsorted(np.cumsum(pieces.length), at, side="right")])
        raise ValueError(
            f"document {document} of {corpus.name} holds token {tokens[at]}, and the model's vocabulary has "
            f"{vocab_size} (--model.vocab-size): it was made with another tokenizer"
        )


def _look_at_some(corpus: Corpus, vocab_size: int) -> None:
    """Looks at the beginnings of documents from all over the corpus, so that a wrong vocabulary shows at the start."""
    lengths = corpus.documents.lengths
    numbers = np.unique(np.linspace(0, len(lengths) - 1, _LOOKED_AT).astype(np.int64))
    length = np.minimum(lengths[numbers].astype(np.int64), _LOOKED_AT)
    pieces = Pieces(numbers[length > 0], np.zeros(np.count_nonzero(length), np.int64), length[length > 0])
    tokens = np.empty(pieces.length.sum(), np.int32)
    if len(tokens):
        corpus.documents.read(*pieces, tokens)
        _check_vocabulary(corpus, pieces, tokens, vocab_size)


class BatchIterator(grain.DatasetIterator):
    """Batches in the order of steps, read and planned ahead. Its state says which step comes next, and of which data.

    A Grain iterator: `get_state`, `set_state`, `close`, and Orbax saves and restores it. The state does not depend on
    who reads ahead, nor on how many processes there are. Restoring the state of other data raises ValueError with both
    values named; see `StepBatches.identity`.

    prefetch: steps that are made ahead. workers: processes that make them; 0: a thread of this one, which shares its
        interpreter with whatever else this process does. Worker processes import the main module, as `multiprocessing`
        does: a script guards what it does with `if __name__ == "__main__"`.

    Batches have one entry more: waited_seconds, how long `next` had to wait for this one.
    """

    def __init__(self, batches: StepBatches, prefetch: int = 2, workers: int = 0) -> None:
        super().__init__()
        self.batches, self._prefetch, self._workers = batches, prefetch, workers
        self._step = 0
        self._source: grain.DatasetIterator | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What data this is; see `StepBatches.identity`."""
        return self.batches.identity

    def __next__(self) -> dict[str, Any]:
        self._assert_not_closed()
        began = time.perf_counter()
        try:
            batch = next(self._started())
        except BaseException:  # whoever asks again gets this step, not the next one that was made ahead
            self._stop()
            raise
        self._step += 1
        return batch | {"waited_seconds": time.perf_counter() - began}

    def start_prefetch(self) -> None:
        self._started().start_prefetch()

    def get_state(self) -> dict[str, Any]:
        return {"next_step": self._step, "data": self.identity}

    def set_state(self, state: dict[str, Any]) -> None:
        step, saved, now = state.get("next_step"), state.get("data"), self.identity
        if isinstance(step, bool) or not isinstance(step, int) or step < 0 or not isinstance(saved, dict):
            raise ValueError(f"this is no saved position: {json.dumps(state)[:200]}")
        changed = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
        if changed:
            lines = "\n".join(f"  {name}: {saved.get(name)!r} saved, {now.get(name)!r} now" for name in changed)
            raise ValueError(f"the saved position belongs to other data:\n{lines}")
        self._stop()
        self._step = step

    def close(self) -> None:
        self._stop()
        super().close()

    def __str__(self) -> str:
        return "BatchIterator"

    def _started(self) -> grain.DatasetIterator:
        if self._source is None:
            steps = _From(self.batches, self._step)
            ahead = self._prefetch if not self._workers else 0
            dataset = steps.to_iter_dataset(grain.ReadOptions(num_threads=min(ahead, 1), prefetch_buffer_size=ahead))
            if self._workers:
                _parse_absl_flags()
                buffer = max(1, -(-self._prefetch // self._workers))
                options = grain.MultiprocessingOptions(self._workers, buffer)
                dataset = dataset.mp_prefetch(options, worker_init_fn=end_with_parent_alone)
            self._source = iter(dataset)
        return self._source

    def _stop(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


class _From(grain.MapDataset):
    """The same batches, counted from a later step."""

    def __init__(self, batches: StepBatches, first: int) -> None:
        super().__init__()
        self._batches, self._first = batches, first

    def __len__(self) -> int:
        return sys.maxsize - self._first

    def __str__(self) -> str:
        return "StepBatches"

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._batches[self._first + index]


def _parse_absl_flags() -> None:
    """Grain's worker processes read absl's flags, which only an absl program has parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def open_step_batches(
    config: DataConfig,
    spec: PoolSpec,
    pools: int = 1,
    micro_steps: int = 1,
    seed: int = 0,
    *,
    sizes: PoolSizes | None = None,
    cost: CostModel | None = None,
    split: str = "train",
    rows: Sequence[int] | np.ndarray | None = None,
    vocab_size: int | None = None,
    index_folder: str | os.PathLike | None = None,
) -> StepBatches:
    """Documents found, packed and dealt to steps, as the configs say; see `open_corpora`, `PoolSampler`, `StepBatches`.

    Raises ValueError naming both numbers where the corpora's vocabulary is larger than vocab_size.
    """
    corpora = open_corpora(config, spec.seq_len, seed=seed, split=split, index_folder=index_folder)
    for corpus in corpora:
        words = corpus.documents.vocab_size
        if vocab_size is not None and words is not None and words > vocab_size:
            raise ValueError(
                f"{corpus.name} was made with a tokenizer of {words} tokens ({corpus.documents.tokenizer}), and the "
                f"model's vocabulary has {vocab_size} (--model.vocab-size)"
            )
        if vocab_size is not None and words is None:
            _look_at_some(corpus, vocab_size)
    sampler = PoolSampler(
        [corpus.packed for corpus in corpora],
        spec,
        pools=pools,
        micro_steps=micro_steps,
        seed=seed,
        weights=config.weights,
        across=config.across or "pools",
        last_step=config.last_step,
        cost=cost,
    )
    return StepBatches(corpora, sampler, sizes=sizes, rows=rows, vocab_size=vocab_size)


def open_batches(config: DataConfig, spec: PoolSpec, *arguments: Any, **options: Any) -> BatchIterator:
    """The batches of a run, from its first step; endless. Arguments as of `open_step_batches`.

    Close it when done: it reads ahead, `config.prefetch` steps, in `config.workers` processes or a thread.
    """
    return BatchIterator(open_step_batches(config, spec, *arguments, **options), config.prefetch, config.workers)
