"""Weights of a Hugging Face folder into sharded arrays, tensor by tensor.

Every process reads what its own devices hold and nothing else. On the host there is one device's share of one
parameter at a time, and one file is open. Before the first number is read all files have been looked at: whatever does
not fit is in one message. Format of the files: https://github.com/huggingface/safetensors (format).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from libra_jax.models.hugging_face import Parameter, is_fused, layout, tensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Types of numbers that are read, as safetensors calls them."""
_ALL_ITEM_BYTES = ITEM_BYTES | {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor as the header of its file states it. dtype: as safetensors calls it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_weights(folder: Path, shapes: Any) -> Any:
    """The parameters of the model in `folder`, float32, lying as `shapes` says.

    folder: model.safetensors.index.json and the files it names, or model.safetensors. shapes: tree of
    jax.ShapeDtypeStruct with shardings (`plan_state(...).shapes["params"]`); every process calls with the same one.
    Raises ValueError that lists everything in which the folder differs from the model. bfloat16, float16 and float32
    are read, exactly; other types are refused.
    """
    parameters = layout(shapes)
    entries = check_folder(folder, parameters)
    fused = is_fused(entries)
    by_path = {p.path: p for p in parameters}
    with _Files(entries) as files:

        def read(keys: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
            return _read_parameter(files, by_path[tuple(key.key for key in keys)], shape, fused)

        return jax.tree.map_with_path(read, shapes)


def _read_parameter(files: _Files, parameter: Parameter, shape: jax.ShapeDtypeStruct, fused: bool) -> jax.Array:
    sharding = shape.sharding
    assert sharding is not None and shape.dtype == np.float32, f"{parameter.path}: {shape}"
    holders: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape.shape).items():
        ranges = tuple(range(*s.indices(size)) for s, size in zip(index or (), shape.shape, strict=True))
        holders.setdefault(ranges, []).append(device)
    arrays = []
    for ranges, devices in holders.items():
        share = np.empty([len(r) for r in ranges], np.float32)
        stacked = ranges[: len(parameter.stacked)]
        for here, there in zip(np.ndindex(*map(len, stacked)), itertools.product(*stacked), strict=True):
            share[here] = _read_part(files, parameter, there, ranges[len(stacked) :], fused)
        arrays += [jax.device_put(share, device) for device in devices]
        jax.block_until_ready(arrays[-len(devices) :])  # so that no second share is on the host
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, arrays)


def _read_part(files: _Files, p: Parameter, index: tuple[int, ...], ranges: tuple[range, ...], fused: bool) -> Any:
    """Part of one matrix or vector of ours: `ranges` of its axes inputs + outputs."""
    source = p.source(index, fused)
    tensor = files.lazy(source.name)
    if not p.linear:
        return tensor[tuple(map(_slice, ranges))]
    ins, outs = ranges[: len(p.inputs)], ranges[len(p.inputs) :]
    rows, columns = _flat(outs, p.outputs), _flat(ins, p.inputs)
    rows = slice(source.first_row + rows.start, source.first_row + rows.stop)
    part = tensor[rows, columns] if source.expert is None else tensor[_one(source.expert), rows, columns][0]
    # Heads and their widths are one axis there. What was read holds whole heads: now cut to the widths asked for.
    part = part.reshape(len(outs[0]), *p.outputs[1:], len(ins[0]), *p.inputs[1:])
    whole = slice(None)
    part = part[(whole, *map(_slice, outs[1:]), whole, *map(_slice, ins[1:]))]
    return part.transpose(*range(len(outs), part.ndim), *range(len(outs)))


def _slice(r: range) -> slice:
    return slice(r.start, r.stop)


def _one(number: int) -> slice:
    return slice(number, number + 1)


def _flat(ranges: tuple[range, ...], sizes: tuple[int, ...]) -> slice:
    """The stretch of axes of these sizes, made one, that holds all of the first range."""
    step = math.prod(sizes[1:])
    return slice(ranges[0].start * step, ranges[0].stop * step)


class _Files:
    """Tensors by name, with one file open at a time: what a mapped file has brought into memory goes when it closes."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries
        self._path: Path | None = None
        self._stack = contextlib.ExitStack()
        self._file: Any = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lazy(self, name: str) -> Any:
        """The tensor, of which what is indexed is read."""
        path = self._entries[name].file
        if path != self._path:
            self._stack.close()
            try:
                self._file = self._stack.enter_context(safe_open(str(path), "np"))
            except SafetensorError as error:
                raise ValueError(f"{path} is not whole: {error}") from error
            self._path = path
        return self._file.get_slice(name)


def check_folder(folder: Path, parameters: list[Parameter]) -> dict[str, Entry]:
    """{name: entry} of all tensors of a folder that holds exactly these parameters.

    Raises ValueError with all that is wrong: files and tensors that are missing, cut off, there twice or not asked
    for, shapes and types. Tensors alike but for layer or expert share a line.
    """
    entries, unknown, problems = _list_tensors(folder)
    wanted = tensors(parameters, is_fused(entries))
    tied = "lm_head.weight" not in wanted and "lm_head.weight" in entries
    missing = [name for name in wanted if name not in entries and name not in unknown]
    extra = [name for name in entries if name not in wanted and not (tied and name == "lm_head.weight")]
    shapes, types = {}, {}
    for name, entry in entries.items():
        if name in wanted and entry.shape != wanted[name]:
            shapes[name] = f"has shape {entry.shape}, and the model {wanted[name]}"
        if entry.dtype not in ITEM_BYTES and name in wanted:
            types[name] = f"is {entry.dtype}, and must be {', '.join(ITEM_BYTES)}"
    problems += _grouped(dict.fromkeys(missing, "is missing"))
    problems += _grouped(dict.fromkeys(extra, "is there, and the model has none"))
    problems += _grouped(shapes) + _grouped(types)
    if tied and not problems and not _equal(entries, "lm_head.weight", "model.embed_tokens.weight"):
        problems.append(
            "lm_head.weight differs from model.embed_tokens.weight, and the model has one table for both "
            "(tied_embeddings)"
        )
    if problems:
        raise ValueError("\n  ".join([f"{folder} does not hold the weights of this model:", *problems]))
    return entries


def _equal(entries: dict[str, Entry], one: str, other: str) -> bool:
    if entries[one].shape != entries[other].shape:
        return False
    rows = entries[one].shape[0]
    with _Files(entries) as files, _Files(entries) as others:
        a, b = files.lazy(one), others.lazy(other)
        parts = (slice(at, min(at + 4096, rows)) for at in range(0, rows, 4096))
        return all(np.array_equal(a[p].astype(np.float32), b[p].astype(np.float32), equal_nan=True) for p in parts)


def _list_tensors(folder: Path) -> tuple[dict[str, Entry], set[str], list[str]]:
    """All tensors by name; names that are in files which cannot be read, as the index says; and what is wrong."""
    problems: list[str] = []
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.is_file() == single.is_file():
        has = f"has both {INDEX_FILE} and {SINGLE_FILE}" if single.is_file() else "has neither"
        raise ValueError(f"{folder} must have either {INDEX_FILE} or {SINGLE_FILE}, and {has}")
    placed: dict[str, str] | None = None
    if index.is_file():
        placed = _read_index(index)
    files = sorted(set(placed.values())) if placed is not None else [SINGLE_FILE]
    entries: dict[str, Entry] = {}
    held: dict[str, set[str]] = {}
    for file in files:
        if not (folder / file).is_file():
            problems.append(f"{file} is not there, and {INDEX_FILE} names it")
            continue
        header = _read_header(folder / file, problems)
        if header is None:
            continue
        held[file] = set(header)
        for name, entry in header.items():
            if name in entries:
                problems.append(f"{name} is there twice, in {entries[name].file.name} and in {file}")
            entries[name] = entry
    if placed is None:
        if not held:
            raise ValueError(f"{folder}: {problems[0]}")
        return entries, set(), problems
    unknown = {name for name, file in placed.items() if file not in held}
    astray = {n: f"is not in {f}, and {INDEX_FILE} says so" for n, f in placed.items() if n not in held.get(f, {n})}
    hidden = {
        n: f"is in {e.file.name}, and {INDEX_FILE} does not say so" for n, e in entries.items() if n not in placed
    }
    return entries, unknown | set(astray), problems + _grouped(astray) + _grouped(hidden)


def _read_index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be JSON with a weight_map of tensor names to files: {error!r}") from error


def _read_header(path: Path, problems: list[str]) -> dict[str, Entry] | None:
    """Tensors that the file's header states; None, and a line in `problems`, where it cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            problems.append(f"{path.name} has {size:,} bytes, and its header alone must have {8 + length:,}")
            return None
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            entries = {n: Entry(path, str(t["dtype"]), tuple(map(int, t["shape"]))) for n, t in header.items()}
            spans = {n: tuple(map(int, t["data_offsets"])) for n, t in header.items()}
            end = 8 + length + max((stop for _, stop in spans.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path.name} has no header of safetensors: {error}")
            return None
    if end != size:
        problems.append(f"{path.name} has {size:,} bytes, and its header says {end:,}")
    for name, entry in entries.items():
        start, stop = spans[name]
        bytes_wanted = math.prod(entry.shape) * _ALL_ITEM_BYTES.get(entry.dtype, 0)
        if entry.dtype in _ALL_ITEM_BYTES and stop - start != bytes_wanted:
            problems.append(
                f"{path.name}: {name} has {stop - start:,} bytes, and {entry.dtype} of shape {entry.shape} takes "
                f"{bytes_wanted:,}"
            )
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def _grouped(details: dict[str, str]) -> list[str]:
    """Lines "NAME detail". Names alike but for layer and expert share one: model.layers.{0-3,5}.mlp..."""
    groups: dict[Any, dict[str, set[int]]] = {}
    lines = []
    for name, detail in details.items():
        texts, numbers = re.split(r"\d+", name), re.findall(r"\d+", name)
        if 1 <= len(numbers) <= 2:
            groups.setdefault((*texts, detail), {}).setdefault("".join(numbers[:-1]), set()).add(int(numbers[-1]))
        else:
            lines.append(f"{name} {detail}")
    for (*texts, detail), by_layer in groups.items():
        alike: dict[str, set[int]] = {}  # experts: the layers that have these
        for layer, last in by_layer.items():
            alike.setdefault(_ranges(last), set()).update([int(layer)] if layer else [])
        for last, layers in alike.items():
            numbers = [_ranges(layers), last] if layers else [last]
            name = "".join(a + b for a, b in zip(texts, [*numbers, ""], strict=True))
            lines.append(f"{name} {detail}")
    return lines


def _ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} -> "{0-2,5}", and one number alone as it is."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return text if text.isdigit() else f"{{{text}}}"
