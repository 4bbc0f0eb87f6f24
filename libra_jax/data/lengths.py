"""Document lengths from files: lists of numbers, quantiles of a distribution, or text whose size is what counts.

Everything ends as one array of tokens per document, whatever it came from. NumPy only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax.data.config import TEXT_SUFFIXES
from libra_jax.data.corpora import stored_documents
from libra_jax.data.documents import text_files
from libra_jax.workload import check_lengths

DISTRIBUTIONS = Path(__file__).parent / "distributions"
"""Quantiles of document lengths that ship with the package; each file notes its source."""
_ANY = int(np.iinfo(np.int64).max)
_MOST = 2**53  # what float64 counts
_DRAW = 100_000  # documents drawn from quantiles at a time
_QUANTILES = ("probability", "length_tokens")


def read_lengths(
    path: str | os.PathLike,
    *,
    kind: str = "auto",
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    bytes_per_token: float = 1.0,
    least_tokens: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """Tokens of every document in `path`, (documents,) int64, each at least 1.

    A folder that `libra prepare` made, or the prefix of a Megatron-LM .bin/.idx pair: its documents. Another folder:
    every file below it that ends with one of `suffixes` is a document. A file: `.npy` holds an array of
    lengths; `.json` a list of them, or quantiles {"probability": [...], "length_tokens": [...]}; `.jsonl` a length or
    an object with a "text" on each line; any other, numbers apart by spaces, commas or lines. kind="text" reads a file
    as one document of text, whatever it is called.
    least_tokens, seed: from quantiles, 100,000 documents are drawn with `seed`, and as many again until they have
        `least_tokens`.
    bytes_per_token: text is counted in bytes and divided by this. Empty documents are left out.

    Raises FileNotFoundError, or ValueError naming the file, the place in it and the rule.
    """
    path = Path(path)
    if kind not in ("auto", "text"):
        raise ValueError(f"kind ({kind!r}) must be 'auto' or 'text'")
    if not (bytes_per_token > 0 and math.isfinite(bytes_per_token)):
        raise ValueError(f"bytes_per_token ({bytes_per_token}) must be finite and above 0")
    if not path.exists() and not path.with_name(f"{path.name}.idx").is_file():
        raise FileNotFoundError(f"{path}: no such file or folder")
    try:
        stored = stored_documents(path) if kind == "auto" else None
        if stored is not None:
            return np.asarray(stored.lengths[stored.lengths > 0], np.int64)
        if path.is_dir():
            sizes = [file.stat().st_size for file in text_files(path, suffixes)]
            if not any(sizes):
                raise ValueError(f"{len(sizes)} files that end with one of {list(suffixes)}, none with text in it")
            return _tokens(sizes, bytes_per_token)
        if kind == "text":
            return _tokens([path.stat().st_size], bytes_per_token)
        if path.suffix == ".npy":
            lengths = np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            lengths = _from_json(json.loads(path.read_text()), least_tokens, seed)
        elif path.suffix == ".jsonl":
            lengths = _from_lines(path.read_text().splitlines(), bytes_per_token)
        else:
            lengths = _numbers(path.read_text())
        lengths = check_lengths(lengths, _ANY)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: neither text nor numbers ({error.reason} at byte {error.start})") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error
    except RecursionError:
        raise ValueError(f"{path}: lists in lists without end, and no lengths") from None
    if lengths.size == 0:
        raise ValueError(f"{path}: it holds no document length")
    return lengths


def distribution_names() -> list[str]:
    """What `find_lengths` knows by name."""
    return sorted(path.stem for path in DISTRIBUTIONS.glob("*.json"))


def find_lengths(name: str | os.PathLike) -> Path:
    """A path as it is, if there is something; else the shipped distribution of that name.

    Raises FileNotFoundError with the names there are.
    """
    path = Path(name)
    if not str(name):
        raise FileNotFoundError(f"lengths must name a file, a folder, or one of {', '.join(distribution_names())}")
    if path.exists() or path.with_name(f"{path.name}.idx").is_file():
        return path
    if str(name) in distribution_names():
        return DISTRIBUTIONS / f"{name}.json"
    raise FileNotFoundError(f"{name}: no such file or folder, nor one of {', '.join(distribution_names())}")


def holds_quantiles(path: str | os.PathLike, kind: str = "auto") -> bool:
    """Whether what `read_lengths` gives for this path was drawn from quantiles. The path must be one it reads."""
    path = Path(path)
    if kind == "text" or path.suffix != ".json" or path.is_dir():
        return False
    return isinstance(json.loads(path.read_text()), dict)


def _tokens(sizes: Sequence[int], bytes_per_token: float) -> np.ndarray:
    """Tokens of texts of these sizes in bytes; what is empty is left out."""
    size = np.array([s for s in sizes if s], np.float64)
    if size.size == 0:
        raise ValueError("there is no text in it")
    return np.maximum(np.rint(size / bytes_per_token), 1).astype(np.int64)


def _numbers(text: str) -> np.ndarray:
    words = text.replace(",", " ").split()
    try:
        return np.array([int(word) for word in words], np.int64)
    except (ValueError, OverflowError):
        pass
    values = []
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.replace(",", " ").split():
            try:
                values.append(float(word))
            except ValueError:
                raise ValueError(
                    f"line {number}: {word[:40]!r} is not a number (--kind text reads the file as one document of text)"
                ) from None
    return np.array(values)


def _from_json(content: Any, least_tokens: int, seed: int) -> Any:
    if isinstance(content, list):
        return content
    if not isinstance(content, dict) or any(name not in content for name in _QUANTILES):
        raise ValueError(f"expected a list of lengths, or an object with {' and '.join(_QUANTILES)}")
    probability, tokens = (_column(content, name) for name in _QUANTILES)
    if probability.shape != tokens.shape:
        raise ValueError(f"{probability.size} entries in probability, but {tokens.size} in length_tokens")
    for name, column, least in (("probability", probability, 0), ("length_tokens", tokens, 1)):
        if not np.isfinite(column).all() or column.min() < least or (np.diff(column) < 0).any():
            raise ValueError(f"{name} must be finite, at least {least}, and must not fall")
    if tokens[-1] > _MOST:
        raise ValueError(f"length_tokens ends at {tokens[-1]:g}, and a document has at most {_MOST:,} tokens")
    if probability[-1] > 1:
        raise ValueError(f"probability ends at {probability[-1]:g}, above 1")
    random, drawn = np.random.default_rng(seed), np.zeros(0, np.int64)
    while len(drawn) < _DRAW or (drawn.sum() < least_tokens and len(drawn) < 50 * _DRAW):
        more = np.interp(random.random(_DRAW), probability, tokens).astype(np.int64)
        drawn = np.concatenate([drawn, more])
    return drawn


def _column(content: dict[str, Any], name: str) -> np.ndarray:
    try:
        column = np.array(content[name], np.float64)
    except (TypeError, ValueError):
        column = np.zeros(0)
    if column.ndim != 1 or column.size == 0:
        raise ValueError(f"{name} must be a list of numbers")
    return column


def _from_lines(lines: Sequence[str], bytes_per_token: float) -> list[Any]:
    """Lengths of a .jsonl file; texts are measured, empty ones left out."""
    lengths: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise ValueError(f"line {number}: {line[:40]!r} is not JSON") from None
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            size = len(entry["text"].encode())
            lengths += [max(round(size / bytes_per_token), 1)] if size else []
        elif isinstance(entry, int | float):
            lengths.append(entry)
        else:
            raise ValueError(f'line {number}: expected a length, or an object with a "text"')
    return lengths
