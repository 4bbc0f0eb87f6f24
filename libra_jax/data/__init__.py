"""From documents to the batches that a training step takes: text -> packed sequences -> pools -> tokens and plans.

documents.py reads text files as byte tokens; packing.py fills sequences with Grain's packers; sampler.py says which
sequences a step holds, and where; pool_size.py, in pools of which size; batches.py is the Grain pipeline that gives
them. Names are imported on first use: only packing and batches need Grain.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "BatchIterator": "batches",
    "DataConfig": "config",
    "PoolSampler": "sampler",
    "PoolSizes": "pool_size",
    "StepBatches": "batches",
    "TextDocuments": "documents",
    "VOCAB_SIZE": "documents",
    "open_batches": "batches",
    "pack_documents": "packing",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from libra_jax.data.batches import BatchIterator as BatchIterator
    from libra_jax.data.batches import StepBatches as StepBatches
    from libra_jax.data.batches import open_batches as open_batches
    from libra_jax.data.config import DataConfig as DataConfig
    from libra_jax.data.documents import VOCAB_SIZE as VOCAB_SIZE
    from libra_jax.data.documents import TextDocuments as TextDocuments
    from libra_jax.data.packing import pack_documents as pack_documents
    from libra_jax.data.pool_size import PoolSizes as PoolSizes
    from libra_jax.data.sampler import PoolSampler as PoolSampler


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'libra_jax.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"libra_jax.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
