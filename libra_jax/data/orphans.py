"""Worker processes that do not outlive the process they work for, also where that was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent(*_: object) -> None:
    """To be called in a worker of `multiprocessing`, once: from then on it ends as soon as its parent has ended.

    A worker waits for what its parent hands it, and would wait for ever. Arguments are ignored.
    """
    threading.Thread(target=_wait_and_end, daemon=True).start()


def end_with_parent_alone(*_: object) -> None:
    """`end_with_parent`, and from then on signals that are sent to the parent's whole process group pass it by.

    A batch system sends SIGTERM to the group, and what the parent does about it may take another batch.
    """
    os.setpgrp()
    end_with_parent()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker has a parent"
    parent.join()
    os._exit(1)
