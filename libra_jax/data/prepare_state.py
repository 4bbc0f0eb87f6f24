"""What an interrupted `libra prepare` has reached, and whether the next run is asked for the same.

`State` is DIR.unfinished/state.json (prepare_folder.py): the position in the inputs, the shards so far and the counts.
`check_shards` holds it against the files that lie there, `difference` against the options and inputs of a new run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from libra_jax.data import prepared
from libra_jax.data.durable import replace
from libra_jax.data.prepared import Shard
from libra_jax.data.records import InputFile, Position

FOLDER = "folder"
STATE = "state.json"
LENGTHS_HEADER_BYTES = 128


@dataclasses.dataclass
class State:
    """What is on disk for good, and the position behind it in the inputs.

    problems_bytes: of problems.jsonl. units: lines, rows, files and records that were left out, all that were read;
    which are the documents, blank lines, empty documents, and bad records by reason.
    """

    settings: dict[str, Any]
    position: Position = dataclasses.field(default_factory=Position)
    shards: list[Shard] = dataclasses.field(default_factory=list)
    longest: int = 0
    units: int = 0
    blank: int = 0
    empty: int = 0
    bad: dict[str, int] = dataclasses.field(default_factory=dict)
    problems_bytes: int = 0

    @property
    def bad_records(self) -> int:
        return sum(self.bad.values())

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def save(self, path: Path) -> None:
        replace(path, json.dumps(dataclasses.asdict(self), indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ValueError, with the way out, for a file that is not such a state."""
        try:
            content = json.loads(path.read_bytes())
            if isinstance(content, dict) and isinstance(content.get("shards"), list):
                content["position"] = prepared.from_json(Position, content.get("position"))
                content["shards"] = [prepared.from_json(Shard, shard) for shard in content["shards"]]
            return prepared.from_json(cls, content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error}; remove {path.parent} to start from the beginning") from error


def shard_names(shard: int, shards: int) -> tuple[str, str]:
    """Of shard number `shard`: until all are there, and in the end, when there are `shards`."""
    return f"documents-{shard:05d}.array_record", f"documents-{shard:05d}-of-{shards:05d}.array_record"


def check_shards(state: State, path: Path) -> None:
    """Raises ValueError, with the way out, where what is in DIR.unfinished, `path`, is not what its state says."""
    folder, state_path = path / FOLDER, path / STATE
    way_out = f"remove {path} to start from the beginning"
    for i, shard in enumerate(state.shards):
        places = [folder / name for name in shard_names(i, len(state.shards))]
        size = next((place.stat().st_size for place in places if place.exists()), None)
        if size != shard.bytes:
            what = "is gone" if size is None else f"has {size:,} bytes"
            raise ValueError(f"{places[0]} {what}, and {state_path} says that it has {shard.bytes:,} bytes; {way_out}")
    lengths_path = folder / prepared.LENGTHS
    if not lengths_path.is_file():
        raise ValueError(f"{lengths_path} is gone; {way_out}")
    with lengths_path.open("rb") as file:
        file.seek(LENGTHS_HEADER_BYTES)
        for shard in state.shards:
            lengths = file.read(4 * shard.documents)
            sha256 = hashlib.sha256(lengths).hexdigest()
            if len(lengths) == 4 * shard.documents and sha256 != shard.lengths_sha256:  # `open_at` finds it short
                raise ValueError(
                    f"{lengths_path} is damaged: its lengths of {shard.name} have the sha256 {sha256[:16]}..., "
                    f"{state_path} says {shard.lengths_sha256[:16]}...; {way_out}"
                )


def inputs_listing(inputs: Sequence[InputFile]) -> bytes:
    """Of inputs.jsonl: path, size in bytes and time of the last change of each input, in order."""
    rows = ({"path": file.path, "size_bytes": file.size_bytes, "mtime_ns": file.mtime_ns} for file in inputs)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def difference(then: dict[str, Any], now: dict[str, Any], listing: Path, inputs: Sequence[InputFile]) -> str | None:
    """The first setting or input that is not what it was, with both values; None where all are the same."""
    for name in sorted(then.keys() | now.keys(), key=lambda name: name == "inputs"):
        was, is_now = then.get(name), now.get(name)
        if was == is_now:
            continue
        if name == "inputs" and isinstance(was, dict) and listing.is_file():
            content = listing.read_bytes()
            if hashlib.sha256(content).hexdigest() == was.get("sha256"):
                return _inputs_difference(content.decode().splitlines(), inputs_listing(inputs).decode().splitlines())
        if isinstance(was, dict) and isinstance(is_now, dict):
            key = next(key for key in {**is_now, **was} if was.get(key) != is_now.get(key))
            name, was, is_now = f"{name} {key}", was.get(key), is_now.get(key)
        return f"{name.replace('_', ' ')} was {was!r} and is {is_now!r} now"
    return None


def _inputs_difference(then: list[str], now: list[str]) -> str:
    i = next((i for i, (was, is_now) in enumerate(zip(then, now, strict=False)) if was != is_now), None)
    if i is None:
        return f"there were {len(then):,} input files and there are {len(now):,} now"
    was, is_now = json.loads(then[i]), json.loads(now[i])
    if was["path"] != is_now["path"]:
        return f"input {i + 1:,} was {was['path']} and is {is_now['path']} now"
    what = ("size_bytes", "bytes") if was["size_bytes"] != is_now["size_bytes"] else ("mtime_ns", "ns since 1970")
    name = "its size" if what[0] == "size_bytes" else "the time of its last change"
    return f"{was['path']} has changed: {name} was {was[what[0]]:,} {what[1]} and is {is_now[what[0]]:,} now"
