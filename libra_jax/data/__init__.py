"""From documents to the batches that a training step takes: text -> tokens -> packed sequences -> pools -> plans.

prepare.py tokenises a corpus into a folder; prepared.py, megatron.py, sources.py and documents.py read one. windows.py,
bins.py and packing.py fill sequences with documents, by their lengths alone. order.py and sampler.py say which
sequences a step holds, and where; pool_size.py, in pools of which size. batches.py is the Grain pipeline that gives
them, and placement_sampler.py serves a pipeline of your own. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "BatchIterator": "batches",
    "Corpus": "corpora",
    "DataConfig": "config",
    "MegatronDocuments": "megatron",
    "PackedDocuments": "packing",
    "PlacementSampler": "placement_sampler",
    "PoolSampler": "sampler",
    "PoolSizes": "pool_size",
    "PreparedDocuments": "prepared",
    "SourceDocuments": "sources",
    "StepBatches": "batches",
    "TextDocuments": "documents",
    "VOCAB_SIZE": "documents",
    "open_batches": "batches",
    "open_corpora": "corpora",
    "open_step_batches": "batches",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from libra_jax.data.batches import BatchIterator as BatchIterator
    from libra_jax.data.batches import StepBatches as StepBatches
    from libra_jax.data.batches import open_batches as open_batches
    from libra_jax.data.batches import open_step_batches as open_step_batches
    from libra_jax.data.config import DataConfig as DataConfig
    from libra_jax.data.corpora import Corpus as Corpus
    from libra_jax.data.corpora import open_corpora as open_corpora
    from libra_jax.data.documents import VOCAB_SIZE as VOCAB_SIZE
    from libra_jax.data.documents import TextDocuments as TextDocuments
    from libra_jax.data.megatron import MegatronDocuments as MegatronDocuments
    from libra_jax.data.packing import PackedDocuments as PackedDocuments
    from libra_jax.data.placement_sampler import PlacementSampler as PlacementSampler
    from libra_jax.data.pool_size import PoolSizes as PoolSizes
    from libra_jax.data.prepared import PreparedDocuments as PreparedDocuments
    from libra_jax.data.sampler import PoolSampler as PoolSampler
    from libra_jax.data.sources import SourceDocuments as SourceDocuments


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'libra_jax.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"libra_jax.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
