"""What the tests of the input pipeline share: shapes, documents whose tokens say where they come from, and batches."""

import numpy as np

from libra_jax.assignments import keep_padding_home
from libra_jax.data import Corpus, PackedDocuments, PoolSampler, StepBatches
from libra_jax.plan import plan_pool
from libra_jax.spec import PoolSpec

HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}


def small_spec(seq_len=64, pool_size=2, cp=2, block=8):
    return PoolSpec(seq_len=seq_len, pool_size=pool_size, cp=cp, block=block, **HEADS)


class Documents:
    """Documents of given lengths: token t of document d is d * 1000 + t."""

    tokenizer, vocab_size = None, None

    def __init__(self, lengths):
        self.lengths, self.fingerprint = np.asarray(lengths), f"documents {list(lengths)}"

    def read(self, document, start, length, out):
        pieces = zip(document.tolist(), start.tolist(), length.tolist(), strict=True)
        out[:] = np.concatenate([np.arange(s, s + n) + 1000 * d for d, s, n in pieces])

    def describe(self):
        return f"{len(self.lengths)} documents"


def batches_of(lengths, spec, sizes=None, planner=None, rows=None, packing=None, **options):
    documents = Documents(lengths)
    packed = PackedDocuments(lengths, spec.seq_len, seed=options.get("seed", 0), **(packing or {}))
    sampler = PoolSampler(packed, spec, **options)
    return StepBatches([Corpus("documents", documents, packed)], sampler, planner, sizes, rows)


def documents_of(packed):
    """The documents of each sequence, by number."""
    return [packed.pieces(number).document.tolist() for number in range(len(packed))]


def read_whole(documents, number):
    """All tokens of one document."""
    length = np.array([documents.lengths[number]], np.int64)
    out = np.full(length[0], -7, np.int32)
    documents.read(np.array([number]), np.zeros(1, np.int64), length, out)
    return out


def dealt(lengths, spec):
    """A planner for tests of who chooses what: blocks, heaviest first, each to the rank that has least to do."""

    def policy(first_page, num_pages, spec, speed):
        executor = np.zeros((spec.pool_size, spec.num_kv_heads, spec.blocks_per_sequence), np.int32)
        pages = np.broadcast_to(num_pages[:, None], executor.shape)
        work = np.zeros(spec.ranks)
        for unit in np.argsort(-pages, axis=None, kind="stable"):
            executor.flat[unit] = work.argmin()
            work[work.argmin()] += pages.flat[unit]
        return keep_padding_home(executor, num_pages, spec)

    return plan_pool(lengths, spec, policy=policy)


def served(sampler, steps):
    return [sampler[step].ravel().tolist() for step in steps]


def take(iterator, steps):
    return [next(iterator) for _ in range(steps)]


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
