"""Corpora to measure the input pipeline with, made in seconds: document lengths of the distributions in
libra_jax/data/distributions, tokens at random or text cut from installed packages, in every form that
`libra_jax.data` reads.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from libra_jax.data.documents import package_folder, text_files
from libra_jax.data.lengths import DISTRIBUTIONS

VOCABULARY = 151_936
"""Of Qwen3's tokenizer, unless a text's own is used."""
PACKAGES = ("numpy", "scipy", "jax")
"""Where text is cut from, about 45 MB."""
_PIECE = 2**22


def draw_lengths(corpus: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Document lengths that add up to `tokens`, (documents,) int64; the last document ends where there are enough."""
    quantiles = json.loads((DISTRIBUTIONS / f"{corpus}.json").read_text())
    parts, total = [], 0
    while total < tokens:
        drawn = np.interp(rng.random(100_000), quantiles["probability"], quantiles["length_tokens"])
        parts.append(np.maximum(drawn.astype(np.int64), 1))
        total += int(parts[-1].sum())
    lengths = np.concatenate(parts)
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    lengths[last] -= ends[last] - tokens
    return lengths[: last + 1]


def write_lengths(path: Path, corpus: str, documents: int, seed: int) -> None:
    """A .npy of uint32 lengths, drawn from 2**22 quantiles, which is quick."""
    quantiles = json.loads((DISTRIBUTIONS / f"{corpus}.json").read_text())
    points = np.interp(np.linspace(0, 1, _PIECE), quantiles["probability"], quantiles["length_tokens"])
    table, rng = np.maximum(points, 1).astype(np.uint32), np.random.default_rng(seed)
    lengths = np.lib.format.open_memmap(path, "w+", np.uint32, (documents,))
    for start in range(0, documents, _PIECE):
        part = lengths[start : start + _PIECE]
        part[:] = table[rng.integers(0, _PIECE, len(part), dtype=np.int32)]
    lengths.flush()


def write_tokens(path: Path, tokens: int, seed: int) -> None:
    """Random int32 tokens of the vocabulary, end to end."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, tokens, _PIECE):
            file.write(rng.integers(0, VOCABULARY, min(_PIECE, tokens - start), dtype=np.int32))


def write_megatron(prefix: Path, all_tokens: Path, lengths: np.ndarray) -> None:
    """PREFIX.idx of these documents, and PREFIX.bin, a link to `all_tokens` (int32). Documents lie there end to end;
    where the file ends they begin again from its start, so a corpus may have more tokens than the file.

    Raises ValueError where a document has more tokens than the file.
    """
    held = all_tokens.stat().st_size // 4
    if lengths.max() > held:
        raise ValueError(f"{all_tokens} holds {held} tokens, a document has {lengths.max()}")
    starts = np.cumsum(lengths) - lengths
    if starts[-1] + lengths[-1] > held:
        starts %= held - int(lengths.max()) + 1
    Path(f"{prefix}.bin").symlink_to(all_tokens.absolute())
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4"))
        file.write((4 * starts).astype("<i8"))
        file.write(np.arange(len(lengths) + 1, dtype="<i8"))


def text_of_packages() -> bytes:
    """Text of the installed packages end to end, in ASCII so that it may be cut anywhere."""
    files = [path for name in PACKAGES for path in text_files(package_folder(name))]
    return b"".join(path.read_bytes() for path in files).decode(errors="replace").encode("ascii", "replace")


def cut_texts(text: bytes, lengths: np.ndarray, rng: np.random.Generator) -> Iterator[str]:
    """A text of each length in bytes, from anywhere."""
    lengths = np.minimum(lengths, len(text))
    starts = (rng.random(len(lengths)) * (len(text) - lengths + 1)).astype(np.int64)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        yield text[start : start + length].decode()


def write_jsonl(path: Path, texts: Iterator[str] | Sequence[str]) -> None:
    with path.open("w") as file:
        file.writelines(f'{{"text": {json.dumps(text)}}}\n' for text in texts)


def write_parquet(path: Path, texts: Iterator[str] | Sequence[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), path)


def train_tokenizer(path: Path, vocab_size: int = 8192) -> None:
    """A byte-level BPE tokenizer, trained on this repository's own text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = Path(__file__).parent.parent
    folders = ("libra_jax", "kernels", "benchmarks", "tests", "docs")
    files = [str(file) for folder in folders for file in text_files(root / folder)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        files,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer.save(str(path))
