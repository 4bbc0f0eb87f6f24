"""How the Triton kernels are launched: tile sizes, warps and pipeline stages per architecture, width and pass.

Chosen from what the compiler says (`benchmarks/kernel_report.py`), not at run time. Needs neither jax nor triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Pass = Literal["forward", "dq", "dkv"]
PASSES: tuple[Pass, ...] = ("forward", "dq", "dkv")

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities times ten that the table below knows; a newer one of the same family uses the older's row."""

HEAD_DIMS = (64, 96, 128, 192, 256)
BLOCKS = (64, 128, 256)
MOST_GROUP = 16


class Launch(NamedTuple):
    """rows: queries (token, head) of a tile; keys: keys of a tile. Powers of two from 16 and 32 on."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Registers: a warp group of four warps holds a 64 x 128 float32 accumulator in 64 registers a thread, of at most 255.
# Shared memory: 163 KiB a block on sm_80, 227 KiB on sm_90 and sm_100.
_LAUNCHES: dict[int, dict[int, dict[Pass, Launch]]] = {
    90: {
        128: {
            "forward": Launch(128, 128, 8, 2),
            "dq": Launch(128, 64, 8, 2),
            "dkv": Launch(64, 128, 8, 2),
        },
    },
}


def architecture(compute_capability: int) -> int | None:
    """The row of the table for a device, 80, 90 or 100; None where the kernels have not been made for it."""
    return {80: 80, 87: 80, 90: 90, 100: 100, 103: 100}.get(compute_capability)


def choose(
    which: Pass,
    compute_capability: int,
    *,
    block: int,
    group: int,
    head_dim: int,
    v_head_dim: int,
    overrides: Mapping[str, Launch] | None = None,
) -> Launch:
    """The launch parameters of a pass, from `overrides` or else from the table, cut to what a block has.

    Raises ValueError where the kernels do not run: the rule, and what was asked for.
    """
    arch = architecture(compute_capability)
    if arch is None:
        raise ValueError(f"compute capability ({compute_capability / 10}) must be one of 8.0, 8.7, 9.0, 10.0 and 10.3")
    if head_dim not in HEAD_DIMS or v_head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim ({head_dim}) and v_head_dim ({v_head_dim}) must be among {HEAD_DIMS}")
    if block not in BLOCKS:
        raise ValueError(f"block ({block}) must be one of {BLOCKS}")
    if not 1 <= group <= MOST_GROUP:
        raise ValueError(f"query heads per key/value head ({group}) must be 1 to {MOST_GROUP}")
    for name in overrides or {}:
        if name not in PASSES:
            raise ValueError(f"launch parameters are for {PASSES}, got {name!r}")
    if overrides and which in overrides:
        launch = overrides[which]
        for name, size, of, whole in (
            ("rows", launch.rows, "block * group", block * group), ("keys", launch.keys, "block", block)
        ):  # fmt: skip
            if size < 16 or size & (size - 1) or whole % size:
                raise ValueError(
                    f"{which} launch: {name} ({size}) must be a power of two, at least 16, that divides {of} ({whole})"
                )
        return launch
    launch = _LAUNCHES[arch][max(head_dim, v_head_dim)][which]
    rows, keys = launch.rows, min(launch.keys, block)
    while block * group % rows:
        rows //= 2
    owned, planned = (keys, launch.keys) if which == "dkv" else (rows, launch.rows)
    warps = launch.num_warps if owned == planned else max(4, launch.num_warps * owned // planned)
    return Launch(rows, keys, warps, launch.num_stages)


def split_width(width: int) -> tuple[int, int]:
    """A width as the sum of two powers of two, the second 0 where one is enough: 192 = 128 + 64."""
    high = 1 << (width.bit_length() - 1)
    return high, width - high


def constants(
    launch: Launch, *, block: int, group: int, head_dim: int, v_head_dim: int, scale: float, soft_cap: float | None
) -> dict[str, int | float | None]:
    """The compile-time arguments of a kernel (`triton_kernels.py`)."""
    (d0, d1), (e0, e1) = split_width(head_dim), split_width(v_head_dim)
    return {
        "SCALE": scale, "SOFT_CAP": soft_cap, "B": block, "G": group, "D0": d0, "D1": d1, "E0": e0, "E1": e1,
        "M": launch.rows, "N": launch.keys,
    }  # fmt: skip
