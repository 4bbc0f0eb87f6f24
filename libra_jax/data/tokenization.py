"""Tokenizers of `libra prepare`: "bytes", or a `tokenizer.json` of Hugging Face.

A tokenizer takes the text of whole documents and gives their tokens, each with one end-of-document token after it. What
a tokenizer file says about truncation, padding and special tokens around a text is switched off: a document is
tokenised whole, and as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from libra_jax.data import documents

BYTES = "bytes"
END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Where none is named: the first of these that a tokenizer file has."""


_NOT_OF_THE_LIBRARY = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)
"""All else is what the library ran into: it raises nothing more precise, and its panics are no Exception."""


class TokenizerFailed(Exception):
    """The tokenizer cannot take this text; the message says why, in its words."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What turns text into tokens. Travels to worker processes: the file is loaded again there, when first used.

    name: "bytes", or the file's name. file: where it is. sha256: of the file, 64 hex digits; None for bytes.
    vocab_size: every token is below it. end_of_document: appended to every document. end_of_document_token: its text.
    parse_special_tokens: special tokens that are written out in a text are read as such, not as ordinary text.
    """

    name: str
    file: Path | None
    sha256: str | None
    vocab_size: int
    end_of_document: int
    end_of_document_token: str | None
    parse_special_tokens: bool = False

    @classmethod
    def open(cls, name: str, end_of_document: str | None = None, parse_special_tokens: bool = False) -> Self:
        """ "bytes", or the tokenizer in the file `name`.

        Raises FileNotFoundError or ValueError where there is no tokenizer, or no such end-of-document token in it.
        """
        if name == BYTES:
            if end_of_document is not None:
                raise ValueError(
                    f"the tokenizer 'bytes' ends a document with its own token {documents.END_OF_DOCUMENT}, "
                    f"so --end-of-document ({end_of_document}) must be left out"
                )
            return cls(BYTES, None, None, documents.END_OF_DOCUMENT + 1, documents.END_OF_DOCUMENT, None)
        file = Path(name)
        if file.is_dir():
            raise ValueError(f"--tokenizer: {file} is a folder; name the file, such as {file / 'tokenizer.json'}")
        if not file.is_file():
            raise FileNotFoundError(f"--tokenizer: there is no file {file}; it must be 'bytes' or a tokenizer.json")
        content = file.read_bytes()
        vocabulary = _load(content, file).get_vocab(with_added_tokens=True)
        token = end_of_document or next((token for token in END_OF_DOCUMENT_TOKENS if token in vocabulary), None)
        if token is None:
            raise ValueError(
                f"{file} has none of {', '.join(END_OF_DOCUMENT_TOKENS)}: "
                "name the token that ends a document with --end-of-document TOKEN"
            )
        if token not in vocabulary:
            raise ValueError(f"--end-of-document: {token!r} is not among the {len(vocabulary):,} tokens of {file}")
        return cls(
            name=file.name.encode(errors="backslashreplace").decode(),  # it is printed
            file=file,
            sha256=hashlib.sha256(content).hexdigest(),
            vocab_size=max(vocabulary.values()) + 1,  # ids may have gaps, so this is not the number of tokens
            end_of_document=vocabulary[token],
            end_of_document_token=token,
            parse_special_tokens=parse_special_tokens,
        )

    @property
    def identity(self) -> str:
        """ "bytes", or "sha256:" and 16 hex digits of the file: the same exactly where tokens mean the same."""
        return BYTES if self.sha256 is None else f"sha256:{self.sha256[:16]}"

    @property
    def dtype(self) -> np.dtype:
        """Little-endian uint16 where that holds every token, uint32 otherwise."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of each text (UTF-8, but for the tokenizer "bytes"), end-of-document token included, in `dtype`.

        Raises TokenizerFailed where the tokenizer gives up on one of them, such as one without a token for unknown
        words. An empty array, without the end-of-document token, stands for a text that has no tokens.
        """
        if self.file is None:
            return [documents.encode(text).astype(self.dtype) if text else np.empty(0, self.dtype) for text in texts]
        try:
            encodings = self._loaded.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        except _NOT_OF_THE_LIBRARY:
            raise
        except BaseException as error:
            raise TokenizerFailed(str(error)) from error
        end = self.end_of_document
        return [np.array([*ids, end] if ids else [], self.dtype) for ids in (encoding.ids for encoding in encodings)]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of the tokens of a document, without its end."""
        if self.file is None:
            return documents.decode(tokens)
        ids = np.asarray(tokens).tolist()
        return self._loaded.decode(ids[:-1] if ids and ids[-1] == self.end_of_document else ids, False)

    @functools.cached_property
    def _loaded(self) -> Any:
        assert self.file is not None
        tokenizer = _load(self.file.read_bytes(), self.file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not self.parse_special_tokens
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_loaded"}


def _load(content: bytes, file: Path) -> Any:
    """The library's tokenizer. Raises ValueError for a file that is none."""
    import tokenizers

    try:
        json.loads(content)
        return tokenizers.Tokenizer.from_buffer(content)
    except _NOT_OF_THE_LIBRARY:
        raise
    except BaseException as error:
        raise ValueError(f"--tokenizer: {file} is not a tokenizer.json of Hugging Face: {error}") from error
