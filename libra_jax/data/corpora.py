"""From the paths of a config to corpora: documents, whatever they are stored as, and how they are packed.

A path is a folder that `libra prepare` made, the prefix of a Megatron-LM .bin/.idx pair, or text files, which are read
as byte tokens. What a path is follows from what lies there.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from libra_jax.data.config import DataConfig
from libra_jax.data.documents import TextDocuments
from libra_jax.data.megatron import MegatronDocuments
from libra_jax.data.packing import PackedDocuments
from libra_jax.data.prepared import MANIFEST, UNFINISHED, PreparedDocuments, packing_index
from libra_jax.data.sources import Documents


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Documents and the sequences they are packed into. name: for messages."""

    name: str
    documents: Documents
    packed: PackedDocuments

    def describe(self) -> list[str]:
        """What was found, and what becomes of it, in sentences."""
        packed, lines = self.packed, [f"{self.name}: {self.documents.describe()}"]
        if self.documents.tokenizer is None:
            lines.append("its tokenizer is not known: that its tokens are the model's is for you to know")
        served, apart = packed.totals, packed.windows.apart
        if apart.documents:
            share = f"{apart.documents:,} documents with {apart.tokens:,} tokens"
            what = "are held out" if packed.rules["split"] == "train" else "are for training and left out here"
            lines.append(f"{share} {what}; {served.documents:,} with {served.tokens:,} remain")
        lines += filter(None, [served.describe(packed.seq_len, packed.rules["long_documents"])])
        return [*lines, f"{len(packed):,} packed sequences, {packed.fill:.2%} full"]


def open_corpora(
    config: DataConfig,
    seq_len: int,
    *,
    seed: int = 0,
    split: str = "train",
    index_folder: str | os.PathLike | None = None,
) -> list[Corpus]:
    """Finds and packs what a config names, in its order. Text comes last, as one corpus, where there are no weights.

    split: "train", or "held_out" for what `config.held_out` sets apart. index_folder: where the numbers of packed
        sequences are kept between runs; None: nowhere.

    Raises FileNotFoundError or ValueError naming the path, the rule and both values where something is missing, damaged
    or does not go together.
    """
    documents = _open_documents(config)
    tokenizers = {source.tokenizer: name for name, source in documents.items() if source.tokenizer is not None}
    if len(tokenizers) > 1:
        lines = ", ".join(f"{name} with {tokenizer}" for tokenizer, name in tokenizers.items())
        raise ValueError(f"corpora of one run must have been made with one tokenizer: {lines}")
    corpora = []
    for number, (name, source) in enumerate(documents.items()):
        try:
            packed = PackedDocuments(
                source.lengths,
                seq_len,
                packer=config.packer,
                long_documents=config.long_documents,
                max_documents=config.max_documents,
                seed=seed,
                held_out=config.held_out,
                split=split,
                index=None if index_folder is None else Path(index_folder, f"{split}-{number}.npz"),
                ready=packing_index(name, seq_len),
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        corpora.append(Corpus(name, source, packed))
    return corpora


def _open_documents(config: DataConfig) -> dict[str, Documents]:
    """Documents by the path they were named with."""
    found: dict[str, Documents] = {}
    text = []
    for path in config.paths:
        stored = stored_documents(path)
        if stored is None and config.weights is None:
            text.append(path)
        else:
            found[path] = TextDocuments.open([path], (), config.suffixes) if stored is None else stored
    if text or config.packages:
        found[", ".join([*text, *config.packages])] = TextDocuments.open(text, config.packages, config.suffixes)
    return found


def stored_documents(path: str | os.PathLike) -> Documents | None:
    """Documents that are tokens already; None where a path is not such. Raises FileNotFoundError for what `libra
    prepare` has not finished."""
    path = os.fspath(path)
    if Path(path, MANIFEST).is_file():
        return PreparedDocuments.open(path)
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    if any(Path(prefix + ending).is_file() for ending in (".idx", ".bin")):
        return MegatronDocuments.open(prefix)
    if any(Path(path).glob("*.array_record")):
        raise FileNotFoundError(f"{path} holds shards of `libra prepare`, and its {MANIFEST} is missing")
    name = os.path.normpath(path).removesuffix(UNFINISHED)
    if not Path(name).exists() and Path(name + UNFINISHED).is_dir():
        raise FileNotFoundError(f"{name} is not finished: the same `libra prepare` again goes on with it")
    return None
