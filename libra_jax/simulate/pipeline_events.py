"""A pipeline's schedule followed tick by tick: when each stage is busy, and how long it stands idle.

Takes seconds of every forward and backward pass; gives when they run, as `libra_jax.train.pipeline` orders them.

Letters: M micro-batches, P stages, T ticks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from libra_jax.train.pipeline import Schedule, first_return

HandedOn = Literal["tick", "pass"]


Tick = tuple[int | None, int | None]
"""The micro-batch that a stage takes forward in a tick, and the one it takes back."""


def ticks_of(schedule: Schedule, micro_batches: int, stages: int) -> list[list[Tick]]:
    """[stage][tick], as `libra_jax.train.pipeline` says."""
    turn = first_return(schedule, micro_batches, stages)

    def there(number: int) -> int | None:
        return number if 0 <= number < micro_batches else None

    return [
        [(there(t - s), there(t - turn - (stages - 1 - s))) for t in range(turn + micro_batches + stages - 1)]
        for s in range(stages)
    ]


class Run(NamedTuple):
    """forward, backward: (P, M) when each pass begins. end: when the last one is done. busy: all passes, added up."""

    forward: np.ndarray
    backward: np.ndarray
    end: float
    busy: float

    @property
    def idle(self) -> float:
        """Share of the stages' time in which they do nothing."""
        return 1 - self.busy / (self.end * len(self.forward))


def follow(forward: np.ndarray, backward: np.ndarray, schedule: Schedule, handed_on: HandedOn = "tick") -> Run:
    """Events of one optimizer step. forward, backward: (P, M) seconds of the passes; bytes take none.

    handed_on: "tick", as the program does: at the end of a tick every stage exchanges with both neighbours, also where
        there is nothing to hand on, so none begins a tick before both have ended the one before. "pass": the same
        passes in the same order, each begun when its stage is free and the result it needs is made.
    """
    stages, micro_batches = forward.shape
    start = np.zeros((2, stages, micro_batches))
    free = np.zeros(stages)
    done_forward, done_backward = np.zeros((2, stages, micro_batches))
    order = ticks_of(schedule, micro_batches, stages)
    for t in range(len(order[0])):
        if handed_on == "tick":
            either = np.concatenate([free[:1], free, free[-1:]])
            free = np.maximum(np.maximum(either[:-2], either[2:]), free)
        for s in range(stages):
            m, back = order[s][t]
            if m is not None:
                if handed_on == "pass" and s:
                    free[s] = max(free[s], done_forward[s - 1, m])
                start[0, s, m] = free[s]
                free[s] = done_forward[s, m] = free[s] + forward[s, m]
            if back is not None:
                if handed_on == "pass" and s < stages - 1:
                    free[s] = max(free[s], done_backward[s + 1, back])
                start[1, s, back] = free[s]
                free[s] = done_backward[s, back] = free[s] + backward[s, back]
    return Run(start[0], start[1], float(free.max()), float(forward.sum() + backward.sum()))


def least_idle(micro_batches: int, stages: int) -> float:
    """What both schedules have where all passes of a kind take as long: a stage waits for P - 1 of each."""
    return (stages - 1) / (micro_batches + stages - 1)
