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
    overlap: bool = False
    """Whether products are ordered for tensor cores that work beside the other instructions, which takes registers."""


# Beside each: registers of a thread, of 255; KiB of shared memory; the bound that the model in `sass.py` puts on the
# share of the tensor cores' peak. For bfloat16, block 128, 4 query heads per key/value head, Triton 3.9. None spills.
# `python -m benchmarks.kernel_report` compiles them anew; docs/log.md has what else was tried.
# - Stages: an address comes from a page number, which is loaded first and takes a stage of its own. 5 are three
#   buffers, filled two turns ahead (what 3 are without a page table); 3 are two; 2 wait for every copy.
# - sm_90: a warp group of four warps takes 64 rows. With 128 rows a block reads half as much from L2 as two blocks of
#   64; where two blocks of 128 rows fit on an SM (four warps each), one calculates while the other waits. Tiles of 32
#   leave wgmma waiting for operands, but where accumulators are wide nothing larger fits. dK and dV of widths over 128
#   take two warp groups for 64 keys, and the compiler lets nothing overlap there.
# - sm_100: tcgen05 takes 128 rows, so programs own 128 where 512 columns of tensor memory allow it.
# - sm_80: accumulators share the registers with everything else, so dK and dV get small tiles.
_LAUNCHES: dict[int, dict[int, dict[Pass, Launch]]] = {
    80: {
        64: {
            "forward": Launch(128, 64, 4, 5),  # 248, 64 KiB, 1.00
            "dq": Launch(128, 64, 8, 5),  # 172, 80 KiB, 0.75
            "dkv": Launch(32, 64, 4, 5, overlap=True),  # 214, 48 KiB, 1.00
        },
        96: {
            "forward": Launch(128, 64, 8, 5),  # 179, 72 KiB, 0.66
            "dq": Launch(128, 64, 8, 5),  # 250, 96 KiB, 0.85
            "dkv": Launch(16, 64, 4, 5, overlap=True),  # 220, 48 KiB, 1.00
        },
        128: {
            "forward": Launch(128, 64, 8, 5),  # 214, 112 KiB, 0.67
            "dq": Launch(128, 32, 8, 5),  # 172, 104 KiB, 0.85
            "dkv": Launch(32, 64, 4, 3, overlap=True),  # 254, 68 KiB, 1.00
        },
        192: {
            "forward": Launch(128, 32, 8, 5),  # 255, 96 KiB, 0.76
            "dq": Launch(128, 32, 8, 5),  # 255, 144 KiB, 0.88
            "dkv": Launch(32, 32, 4, 3),  # 220, 74 KiB, 1.00
        },
        256: {
            "forward": Launch(128, 32, 8, 5),  # 242, 136 KiB, 0.77
            "dq": Launch(64, 32, 8, 3),  # 172, 100 KiB, 0.48
            "dkv": Launch(32, 32, 4, 3, overlap=True),  # 254, 98 KiB, 0.84
        },
    },
    90: {
        64: {
            "forward": Launch(128, 64, 4, 5, overlap=True),  # 250, 64 KiB, 0.85
            "dq": Launch(128, 64, 4, 5),  # 238, 80 KiB, 1.00
            "dkv": Launch(64, 64, 4, 3, overlap=True),  # 208, 64 KiB, 1.00
        },
        96: {
            "forward": Launch(128, 128, 8, 5, overlap=True),  # 228, 168 KiB, 0.62
            "dq": Launch(128, 64, 8, 5),  # 159, 120 KiB, 0.66
            "dkv": Launch(64, 64, 4, 3, overlap=True),  # 240, 96 KiB, 1.00
        },
        128: {
            "forward": Launch(128, 128, 8, 5, overlap=True),  # 247, 224 KiB, 0.73
            "dq": Launch(128, 64, 8, 5),  # 165, 160 KiB, 0.73
            "dkv": Launch(64, 128, 8, 5, overlap=True),  # 251, 225 KiB, 0.87
        },
        192: {
            "forward": Launch(128, 64, 8, 5, overlap=True),  # 226, 192 KiB, 0.78
            "dq": Launch(128, 32, 8, 5),  # 170, 168 KiB, 0.61
            "dkv": Launch(32, 64, 8, 3),  # 221, 124 KiB, 0.26
        },
        256: {
            "forward": Launch(128, 64, 8, 3),  # 230, 192 KiB, 0.60
            "dq": Launch(128, 32, 8, 5),  # 209, 224 KiB, 0.65
            "dkv": Launch(32, 64, 8, 3),  # 244, 164 KiB, 0.40
        },
    },
    100: {
        64: {
            "forward": Launch(128, 64, 4, 5),  # 194, 64 KiB, 0.49
            "dq": Launch(128, 64, 4, 5),  # 156, 88 KiB, 0.74
            "dkv": Launch(64, 128, 4, 5, overlap=True),  # 223, 130 KiB, 0.43
        },
        96: {
            "forward": Launch(128, 64, 4, 5),  # 238, 84 KiB, 0.68
            "dq": Launch(128, 64, 4, 5),  # 160, 108 KiB, 0.85
            "dkv": Launch(64, 128, 4, 5, overlap=True),  # 234, 170 KiB, 0.44
        },
        128: {
            "forward": Launch(128, 128, 8, 5, overlap=True),  # 202, 225 KiB, 0.54
            "dq": Launch(128, 64, 4, 5),  # 168, 176 KiB, 0.54
            "dkv": Launch(64, 128, 8, 3, overlap=True),  # 178, 193 KiB, 0.59
        },
        192: {
            "forward": Launch(128, 64, 8, 5),  # 230, 169 KiB, 0.42
            "dq": Launch(128, 32, 8, 5),  # 109, 156 KiB, 0.47
            "dkv": Launch(32, 64, 4, 3, overlap=True),  # 166, 120 KiB, 0.31
        },
        256: {
            "forward": Launch(128, 64, 8, 3),  # 254, 193 KiB, 0.50
            "dq": Launch(128, 32, 8, 3),  # 160, 208 KiB, 0.48
            "dkv": Launch(32, 64, 8, 3),  # 174, 192 KiB, 0.43
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
        if not isinstance(launch, Launch) or not all(type(number) is int for number in launch[:4]):
            raise ValueError(f"{which} launch ({launch!r}) must be a libra_kernels.Launch of four whole numbers")
        if launch.num_warps not in (1, 2, 4, 8, 16) or not 1 <= launch.num_stages <= 8:
            raise ValueError(
                f"{which} launch: num_warps ({launch.num_warps}) must be 1, 2, 4, 8 or 16, and num_stages "
                f"({launch.num_stages}) 1 to 8"
            )
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
    cut = launch._replace(rows=rows, keys=keys, num_warps=max(4, launch.num_warps * owned // planned))
    if which == "dkv" and keys < launch.keys:
        # Fewer warps would copy as many rows, and keep more addresses each than they have registers.
        cut = cut._replace(rows=max(rows // 2, 16), num_stages=min(launch.num_stages, 3), overlap=False)
    return cut


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
        "M": launch.rows, "N": launch.keys, "OVERLAP": launch.overlap,
    }  # fmt: skip
