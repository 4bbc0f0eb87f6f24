"""What the processes of a run decide together: whether all of them may go on, and that they see the same.

In a run of one process nothing here communicates. Every process has to call the same functions in the same order.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_SIGNS = "Gloo ", "NCCL", "Connection reset by peer", "Connection closed by peer", "DEADLINE_EXCEEDED", "UNAVAILABLE"


class PeerStopped(Exception):
    """Another process of the run could not go on, and its own message says why."""


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """All processes get through the block, or none does: where it raises in one, the others raise PeerStopped.

    what: that the block does, as in "process 3 could not ...". The block must not communicate.
    """
    if jax.process_count() == 1:
        yield
        return
    failed = None
    try:
        yield
    except Exception as error:
        failed = error
    failures = np.flatnonzero(_from_all(int(failed is not None)))
    if failed is not None:
        raise failed
    if len(failures):
        raise PeerStopped(f"process {failures[0]} could not {what}; its own message says why")


def same_everywhere(value: int, what: str, why: str) -> None:
    """Raises ValueError, in every process, if processes have different values. why: what is likely to be wrong."""
    values = _from_all(value)
    other = np.flatnonzero(values != values[0])
    if len(other):
        raise ValueError(
            f"{what} is {values[0]} in process 0 and {values[other[0]]} in process {other[0]}, and must be the same: "
            f"{why}"
        )


def same_config(values: Mapping[str, Any]) -> None:
    """Raises ValueError, in every process, if they do not run the same: {name: value} of what must be equal."""
    names = sorted(values)
    same_everywhere(_number(names), "the number of this version's settings", "hosts have different versions")
    numbers = np.array([_number(values[name]) for name in names], np.int32)
    if jax.process_count() == 1:
        return
    everybody = multihost_utils.process_allgather(numbers).reshape(jax.process_count(), -1)
    for i, name in enumerate(names):
        other = np.flatnonzero(everybody[:, i] != everybody[0, i])
        if len(other):
            raise ValueError(
                f"{name} is {values[name]!r} in process {jax.process_index()}, and process 0 and process {other[0]} "
                "differ in it: all processes of a run need the same command"
            )


def _number(value: Any) -> int:
    """The same number for the same value, in every process."""
    return zlib.crc32(repr(value).encode()) & 0x7FFFFFFF


def peer_is_gone(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that an exchange between processes broke off."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jax.errors.JaxRuntimeError) or any(sign in str(cause) for sign in _SIGNS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _from_all(value: int) -> np.ndarray:
    if jax.process_count() == 1:
        return np.array([value])
    return multihost_utils.process_allgather(np.int32(value)).reshape(-1)
