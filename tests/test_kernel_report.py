"""The Triton kernels, compiled for GPUs that are not here: what the launch table promises, and how it is read."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from libra_kernels import sass
from libra_kernels.launch import BLOCKS, PASSES

ROOT = Path(__file__).parents[1]
COLUMNS = {
    "kernel", "arch", "head_dim", "registers", "spill_bytes", "shared_bytes", "tensor_core_instructions", "num_warps",
    "num_stages",
}  # fmt: skip


@functools.cache
def compiled(kernel: Any, arch: int, head_dim: int, v_head_dim: int, **shape: Any) -> Any:
    from libra_kernels.compiled import compile_kernel

    return compile_kernel(kernel, arch, head_dim=head_dim, v_head_dim=v_head_dim, **shape)


HOPPER = [(90, width, width) for width in (64, 96, 128, 192, 256)] + [(90, 192, 128)]
OTHERS = [(arch, width, width) for arch in (80, 100) for width in (64, 128)]


@pytest.mark.parametrize("kernel", PASSES)
@pytest.mark.parametrize(("arch", "head_dim", "v_head_dim"), HOPPER + OTHERS)
def test_what_the_table_chooses_compiles_well(kernel, arch, head_dim, v_head_dim):
    made = compiled(kernel, arch, head_dim, v_head_dim)
    assert made.complaints() == []  # shared and tensor memory, the generation's own tensor cores
    assert made.spill_bytes == 0
    assert made.registers <= 255 and made.ctas >= 1
    # As many as the tile's multiply-adds take, in the loop; nothing left to slower instructions.
    assert 0 < made.loop.tensor_instructions <= made.tensor_core_instructions
    if kernel != "dkv" or max(head_dim, v_head_dim) <= 128:  # wider ones ptxas serializes; the report says so
        assert not [remark for remark in made.remarks if "serialized" in remark]


CUT = {
    "block 64, group 1": {"block": 64, "group": 1},
    "float16": {"dtype": "fp16"},
    "soft cap": {"soft_cap": 50.0},
}


@pytest.mark.parametrize("kernel", PASSES)
@pytest.mark.parametrize("shape", CUT)
def test_other_shapes_do_not_spill_on_hopper(kernel, shape):
    made = compiled(kernel, 90, 128, 128, **CUT[shape])
    assert (made.complaints(), made.spill_bytes) == ([], 0)


def test_json_has_a_row_for_each_kernel_architecture_and_width():
    command = [sys.executable, "-m", "benchmarks.kernel_report", "--archs", "90", "--widths", "192/128", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(run.stdout)
    assert [(row["kernel"], row["arch"], row["head_dim"]) for row in rows] == [(kernel, 90, 192) for kernel in PASSES]
    for row in rows:
        assert row.keys() >= COLUMNS and row["rung"] == 3
        assert row["spill_bytes"] == 0 and row["tensor_core_instructions"] > 0


def test_what_is_wrong_is_said():
    from libra_kernels.compiled import compile_kernel
    from libra_kernels.launch import Launch

    # Two warps are no warp group: no wgmma. Far too many stages: more shared memory than there is.
    few = compile_kernel("forward", 90, head_dim=64, launch=Launch(32, 64, 2, 2))
    assert few.tensor_core_instructions == 0 and "no tensor-core instruction of sm_90" in few.complaints()
    large = compile_kernel("forward", 90, head_dim=64, block=BLOCKS[-1], launch=Launch(64, 256, 8, 9))
    assert any("shared memory" in complaint for complaint in large.complaints())
    assert large.ctas == 0
    # 256 x 128 accumulators in four warps do not fit into registers.
    spilling = compile_kernel("dq", 80, head_dim=128, launch=Launch(256, 64, 4, 2))
    assert spilling.spill_bytes > 0


# The reader of machine code, on a few lines of it.

LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;       /* 0x1 */
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/              @!P0 BRA P1, 0x60 ;
        /*0040*/                   ISETP.GT.AND P1, PT, R114.reuse, R14, PT ;
        /*0050*/                   FSEL R89, R89, RZ, !P1 ;
        /*0060*/                   MUFU.EX2 R88, R88 ;
        /*0070*/              @!P2 BRA 0xc0 ;
        /*0080*/                   FADD R1, R1, R88 ;
        /*0090*/               @P0 BRA 0x10 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0 ;
        /*00c0*/              @!P2 BRA 0xc0 ;
        /*00d0*/                   BRA 0x80 ;
"""


def test_the_path_of_a_whole_tile_leaves_out_what_a_branch_jumps_over():
    path, masked = sass.main_loop(sass.instructions(LOOP))
    assert [x.name for x in path] == ["HGMMA", "WARPGROUP", "BRA", "MUFU", "BRA", "FADD", "BRA"]
    assert masked == 2
    with pytest.raises(ValueError, match="no loop"):
        sass.main_loop(sass.instructions(LOOP.replace("HGMMA", "HADD")))


def test_the_model_counts_cycles():
    """Eight warps, two of each scheduler. The tensor core works 128 cycles from when the first of seven instructions
    has been issued by both warps; five follow what waits for it, 2 cycles each. Nobody waits for MUFU and its 16."""
    chip = sass.CHIPS[90]
    cost = sass.loop_cost(sass.instructions(LOOP), chip, num_warps=8, tensor_fmas=128 * 2048, loaded_bytes=0)
    assert (cost.instructions, cost.tensor_instructions, cost.mufu_instructions) == (7, 1, 1)
    assert (cost.tensor_cycles, cost.issue_cycles, cost.mufu_cycles) == (128, 14, 16)
    assert cost.turn_cycles == 2 + 128 + 2 * 5
    assert cost.serial_share == 128 / (128 + 16)
    assert cost.share(1) == 128 / cost.turn_cycles
    assert cost.share(2) == 1.0
