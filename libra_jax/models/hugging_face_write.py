"""Sharded parameters into a Hugging Face folder: safetensors files of bounded size, their index and config.json.

The folder appears under its name when it is whole and on disk; until then it is FOLDER.unfinished, which is gone when
writing fails and is taken over by the next try when the process was killed. On the host there is one layer of one
parameter at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from libra_jax.models.hugging_face import CONFIG_FILE, Parameter, config_to_hugging_face, layout, read_config
from libra_jax.models.hugging_face_read import INDEX_FILE, SINGLE_FILE
from libra_jax.models.qwen3 import Qwen3Config

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
)
"""What lies beside the weights and goes with them unchanged."""
_TYPES: dict[str, tuple[str, Any]] = {"bfloat16": ("BF16", jnp.bfloat16), "float32": ("F32", np.float32)}


def write_weights(
    folder: Path,
    params: Any,
    config: Qwen3Config,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    shard_bytes: float = 5e9,
    *,
    max_positions: int = 32_768,
    companions: Path | None = None,
) -> list[str]:
    """Writes the model, rounded to `dtype` (to nearest, ties to even), and returns the names of the files it wrote.

    params: float32, lying anywhere; every process calls, the first one writes. shard_bytes: no file holds more, unless
    a single tensor does. max_positions: see `config_to_hugging_face`. companions: folder whose tokenizer files are
    copied and whose config.json says what ours does not.
    Raises ValueError if `folder` is there already or params are not config's, OSError if it cannot be written. Then
    there is nothing under that name, and nothing under FOLDER.unfinished either.
    """
    if dtype not in _TYPES:
        raise ValueError(f"dtype ({dtype}) must be one of {', '.join(_TYPES)}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes ({shard_bytes}) must be at least 1")
    refuse_existing(folder)
    parameters = layout(params)
    has_head = any(p.path == ("head",) for p in parameters)
    if has_head == config.tied_embeddings:
        there = "with" if has_head else "without"
        raise ValueError(f"tied_embeddings is {config.tied_embeddings}, and the parameters are those {there} a head")
    shards = _shards(parameters, np.dtype(_TYPES[dtype][1]).itemsize, shard_bytes)
    description = config_to_hugging_face(
        config, dtype=dtype, max_positions=max_positions, source=read_config(companions) if companions else None
    )
    tensor = _Gather(params, _TYPES[dtype][1])
    if jax.process_index() != 0:
        for shard in shards:
            for part in shard:
                tensor(part)
        written = []
    else:
        written = _write_folder(folder, shards, tensor, dtype, description, companions)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"written {folder}")
    return written


def refuse_existing(folder: Path) -> None:
    """Raises ValueError if there is anything under this name."""
    if os.path.lexists(folder):
        raise ValueError(f"{folder} is there already; give another folder, or remove it")


_Part = tuple[Parameter, tuple[int, ...]]
"""A tensor: its parameter, and its index in the stacked axes."""


def _shards(parameters: list[Parameter], item_bytes: int, shard_bytes: float) -> list[list[_Part]]:
    """The tensors of each file, in order: what stands before the layers, layer by layer, what stands behind."""
    parts: list[_Part] = []
    for stacked, group in itertools.groupby(parameters, lambda p: bool(p.stacked)):
        members = list(group)
        if not stacked:
            parts += [(p, ()) for p in members]
            continue
        for layer in range(members[0].stacked[0]):
            parts += [(p, (layer, *rest)) for p in members for rest in np.ndindex(p.stacked[1:])]
    shards: list[list[_Part]] = []
    room = 0.0
    for part in parts:
        size = item_bytes * _source_size(part)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(part)
        room -= size
    return shards


def _source_size(part: _Part) -> int:
    parameter, index = part
    return math.prod(parameter.source(index).shape)


class _Gather:
    """Tensors on the host, as a checkpoint has them; called in the order in which they are written."""

    def __init__(self, params: Any, dtype: Any) -> None:
        self._params, self._dtype = params, dtype
        self._last: tuple[Any, np.ndarray] | None = None
        self._take = jax.jit(lambda x, layer: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False))

    def __call__(self, part: _Part) -> np.ndarray:
        parameter, index = part
        key = parameter.path, index[:1]
        if self._last is None or self._last[0] != key:
            self._last = None  # let go of before the next is there
            self._last = key, self._layer(*key)
        ours = self._last[1][index[1:]]
        if parameter.linear:
            ours = ours.reshape(math.prod(parameter.inputs), math.prod(parameter.outputs)).T
        return np.ascontiguousarray(ours)

    def _layer(self, path: tuple[str, ...], layer: tuple[int, ...]) -> np.ndarray:
        array = self._params
        for key in path:
            array = array[key]
        array = self._take(array, np.int32(layer[0])) if layer else jnp.asarray(array)
        if not array.is_fully_addressable:
            mesh = array.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]  # parameters lie on a mesh
            array = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
        host = np.empty(array.shape, self._dtype)
        for index, data in {str(shard.index): (shard.index, shard.data) for shard in array.addressable_shards}.values():
            # Of a copy, as an array keeps what it has brought to the host for as long as it lives. Cast on the host,
            # as XLA may take the smallest numbers for zero.
            host[index] = np.asarray(jnp.copy(data))
        return host


def _write_folder(
    folder: Path,
    shards: list[list[_Part]],
    tensor: _Gather,
    dtype: str,
    description: dict[str, Any],
    companions: Path | None,
) -> list[str]:
    item_bytes = np.dtype(_TYPES[dtype][1]).itemsize
    total = item_bytes * sum(_source_size(part) for shard in shards for part in shard)
    with _appearing_whole(folder) as place:
        if (free := shutil.disk_usage(place).free) < total:
            raise OSError(f"it takes {total:,} bytes, and there is room for {free:,}")
        where = {}
        for number, shard in enumerate(shards, 1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            with _open(place / file) as out:
                _write_shard(out, shard, tensor, *_TYPES[dtype])
            where |= {p.source(index).name: file for p, index in shard}
        if len(shards) > 1:
            _write_json(place / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(place / CONFIG_FILE, description)
        for name in COMPANIONS:
            if companions is not None and (companions / name).is_file():
                with (companions / name).open("rb") as source, _open(place / name) as out:
                    shutil.copyfileobj(source, out)
        return sorted(path.name for path in place.iterdir())


def _write_shard(out: BinaryIO, shard: list[_Part], tensor: _Gather, name: str, dtype: Any) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for parameter, index in shard:
        source = parameter.source(index)
        size = np.dtype(dtype).itemsize * math.prod(source.shape)
        header[source.name] = {"dtype": name, "shape": source.shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    out.write(len(text).to_bytes(8, "little") + text)
    for parameter, index in shard:
        array = tensor((parameter, index))
        assert array.shape == parameter.source(index).shape, f"{parameter.path} {index}: {array.shape}"
        out.write(array.view(np.uint8).data)


@contextlib.contextmanager
def _appearing_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all is done and on disk; on an error it is removed."""
    folder = folder.absolute()
    place = folder.with_name(folder.name + ".unfinished")
    handle = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {place}; wait for it, or give another folder") from None
        try:
            for left in place.iterdir():  # by a process that was killed
                left.unlink()
            yield place
            os.fsync(handle)
            refuse_existing(folder)
            place.rename(folder)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        _sync(folder.parent)
    except OSError as error:
        raise OSError(f"{folder} could not be written: {error.strerror or error}. Nothing is left of it") from error
    finally:
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is on disk afterwards."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Any) -> None:
    with _open(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
