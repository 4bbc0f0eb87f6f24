"""Which documents share a packed sequence, decided by Grain's packers.

Takes the documents' lengths alone; gives, for each packed sequence, the documents in it and their order. Grain's
packers work on real elements, so they are handed stand-ins of the right lengths that carry the document's number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libra_jax.workload import check_lengths

_PACKERS = {"first_fit": "FirstFitPackIterDataset", "best_fit": "BestFitPackIterDataset"}
_STREAM = 0x9AC4  # keeps this shuffle apart from the sampler's, which starts from the same seed
_OPEN_TOKENS = 2**24  # tokens of the sequences that a packer holds open; it allocates 17 bytes for each


def pack_documents(
    lengths: Sequence[int] | np.ndarray,
    seq_len: int,
    *,
    seed: int = 0,
    packer: str = "first_fit",
    max_documents: int | None = None,
) -> list[np.ndarray]:
    """Pack documents into sequences of at most `seq_len` tokens: one (documents,) int64 array of numbers a sequence.

    lengths: (documents,) tokens of each, 1 to seq_len (cut longer ones first: `documents.cut`).
    seed: documents are shuffled with it before they are packed. The result is a function of the arguments alone; no
        global random state is read or changed.
    packer: "first_fit" or "best_fit", Grain's.
    max_documents: most documents in one sequence; None: no limit.

    Every document is in exactly one sequence, whole. Raises ValueError naming the entry and the rule.
    """
    sizes = check_lengths(lengths, int(np.iinfo(np.int64).max))
    if sizes.size == 0:
        raise ValueError("0 documents to pack: at least 1 is needed")
    if sizes.max() > seq_len:
        entry = int(np.argmax(sizes > seq_len))
        raise ValueError(f"document {entry} has {sizes[entry]} tokens, more than seq_len ({seq_len}): cut it first")
    if packer not in _PACKERS:
        raise ValueError(f"packer ({packer!r}) must be one of {sorted(_PACKERS)}")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents ({max_documents}) must be at least 1, or None")
    import grain  # here, because Grain imports jax, and `libra inspect --help` must not wait for it

    order = np.random.default_rng([seed, _STREAM]).permutation(len(sizes))
    stand_ins = grain.MapDataset.source(_StandIns(sizes, order)).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    packed = getattr(grain.experimental, _PACKERS[packer])(
        stand_ins,
        length_struct={"tokens": int(seq_len)},
        num_packing_bins=max(8, min(256, _OPEN_TOKENS // seq_len)),
        shuffle_bins=False,
        meta_features=("document",),
        max_sequences_per_bin=max_documents,
    )
    return [np.array(element["document"], np.int64) for element in packed]


class _StandIns:
    """Elements as long as the documents, in the given order; all zeros, without memory of their own."""

    def __init__(self, sizes: np.ndarray, order: np.ndarray) -> None:
        self._sizes, self._order = sizes.tolist(), order.tolist()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, object]:
        document = self._order[index]
        return {"tokens": np.broadcast_to(np.int8(0), (self._sizes[document],)), "document": document}
