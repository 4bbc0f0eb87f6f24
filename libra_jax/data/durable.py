"""Files that outlive a crash: locks, files that appear whole, and writing errors as messages."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class PrepareStopped(Exception):
    """The run could not go on; the message says why, and what helps."""


@contextlib.contextmanager
def stops_on_errors(path: Path) -> Iterator[None]:
    """What writing to `path` runs into, as PrepareStopped."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # ArrayRecord's are RuntimeErrors
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        when = "When there is room again" if full else "When that is mended"
        what = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise PrepareStopped(
            f"{path} cannot be written: {what}. {when}, the same command goes on after the last whole shard"
        ) from error


def locked(path: Path) -> int:
    """An open file that nobody else has locked. Raises PrepareStopped where another run has."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass  # somebody works here, or has just finished and removed it
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    raise PrepareStopped(f"another run is at work in {path.parent}; wait for it, or give another --out")


def holds(lock: int, path: Path) -> bool:
    """Whether `lock` is the file at `path`: otherwise somebody has removed it, and another run may have its own."""
    try:
        return lock >= 0 and os.path.samestat(os.fstat(lock), os.stat(path))
    except OSError:
        return False


def remove_locked(lock: int, path: Path) -> None:
    """Removes the folder of the lock at `path`, as far as it can, if `lock` is that lock.

    The lock goes last: until then no other run begins in the folder, and what one that begins then makes is left alone.
    """
    if not holds(lock, path):
        return
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            if other.name == path.name:
                continue
            if other.is_dir() and not other.is_symlink():
                shutil.rmtree(other, ignore_errors=True)
            else:
                other.unlink(missing_ok=True)
        path.unlink()
        path.parent.rmdir()


def open_at(path: Path, size_bytes: int) -> BinaryIO:
    """A file to append to, of which the first `size_bytes` are kept. Raises ValueError where it has fewer."""
    file = open(path, "r+b")  # noqa: SIM115 (stays open)
    if (there := path.stat().st_size) < size_bytes:
        file.close()
        raise ValueError(
            f"{path} has {there:,} bytes, and must have {size_bytes:,}; remove {path.parent.parent} to start from the "
            "beginning"
        )
    file.truncate(size_bytes)
    file.seek(size_bytes)
    return file


def replace(path: Path, content: bytes) -> None:
    """Puts a file there at once, or leaves the old one."""
    writing = path.with_name(path.name + ".writing")
    with open(writing, "wb") as file:
        file.write(content)
        flush(file)
    os.replace(writing, path)
    sync(path.parent)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Of a file or folder: what was written to it is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
