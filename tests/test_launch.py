"""Launch parameters of the GPU kernels: what is chosen fits every block and group, and what does not run is refused."""

from __future__ import annotations

import itertools

import pytest
from libra_kernels import launch
from libra_kernels.launch import BLOCKS, HEAD_DIMS, MOST_GROUP, PASSES, Launch, choose, split_width

DEVICES = (80, 87, 90, 100, 103)
SHAPE = {"block": 128, "group": 4, "head_dim": 128, "v_head_dim": 128}


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("which", PASSES)
def test_the_choice_fits_every_shape(which):
    for device, block, group, head_dim, v_head_dim in itertools.product(
        DEVICES, BLOCKS, range(1, MOST_GROUP + 1), HEAD_DIMS, HEAD_DIMS
    ):
        got = choose(which, device, block=block, group=group, head_dim=head_dim, v_head_dim=v_head_dim)
        assert power_of_two(got.rows) and block * group % got.rows == 0 and got.rows >= 16
        assert power_of_two(got.keys) and block % got.keys == 0 and got.keys >= 16
        assert got.num_warps in (4, 8) and 1 <= got.num_stages <= 5
        # A warp group's wgmma takes 64 of the rows that a program owns; two groups share 64 only for wide dK and dV.
        owned = got.keys if which == "dkv" else got.rows
        if launch.architecture(device) == 90 and not (which == "dkv" and max(head_dim, v_head_dim) > 128):
            assert owned >= 16 * got.num_warps
        # The tile is the table's, or as much of it as the block has.
        again = choose(which, device, block=256, group=16, head_dim=head_dim, v_head_dim=v_head_dim)
        assert got.rows <= again.rows and got.keys <= again.keys and got.num_warps <= again.num_warps
        assert got.keys == again.keys or got.keys == block
        if which != "dkv":
            assert got.rows == again.rows or block * group % (2 * got.rows)
        elif got.keys < again.keys:
            assert got.rows == again.rows // 2


def test_newer_devices_of_a_family_take_its_row():
    assert choose("dq", 87, **SHAPE) == choose("dq", 80, **SHAPE)
    assert choose("dq", 103, **SHAPE) == choose("dq", 100, **SHAPE)
    assert [launch.architecture(x) for x in (70, 75, 86, 89, 120, 121)] == [None] * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_capability": 75}, r"7\.5.*8\.0.*9\.0.*10\.0"),
        ({"head_dim": 80}, r"\(80\).*64, 96, 128, 192, 256"),
        ({"v_head_dim": 512}, r"\(512\).*64, 96, 128, 192, 256"),
        ({"block": 32}, r"block \(32\).*64, 128, 256"),
        ({"group": 17}, r"\(17\).*1 to 16"),
        ({"group": 0}, r"\(0\).*1 to 16"),
    ],
)
def test_what_does_not_run_is_refused(change, message):
    given = {"compute_capability": 90, **SHAPE, **change}
    with pytest.raises(ValueError, match=message):
        choose("forward", given.pop("compute_capability"), **given)


def test_overrides():
    mine = Launch(32, 64, 2, 1)
    assert choose("dkv", 90, **SHAPE, overrides={"dkv": mine}) == mine
    assert choose("dq", 90, **SHAPE, overrides={"dkv": mine}) == choose("dq", 90, **SHAPE)
    for wrong, message in (
        (Launch(48, 64, 4, 2), r"rows \(48\).*\(512\)"),
        (Launch(1024, 64, 4, 2), r"rows \(1024\).*\(512\)"),
        (Launch(64, 256, 4, 2), r"keys \(256\).*\(128\)"),
        (Launch(64, 8, 4, 2), r"keys \(8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            choose("forward", 90, **SHAPE, overrides={"forward": wrong})


def test_widths_are_sums_of_two_powers_of_two():
    for width in HEAD_DIMS:
        high, low = split_width(width)
        assert high + low == width and power_of_two(high) and (low == 0 or power_of_two(low)) and low < high
    assert split_width(192) == (128, 64) and split_width(256) == (256, 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((64, 64, 4, 2), "must be a libra_kernels.Launch of four whole numbers"),
        (None, "must be a libra_kernels.Launch"),
        (Launch("64", 64, 4, 2), "four whole numbers"),
        (Launch(64, 64, True, 2), "four whole numbers"),
        (Launch(64, 64, 3, 2), r"num_warps \(3\) must be 1, 2, 4, 8 or 16"),
        (Launch(64, 64, 64, 2), r"num_warps \(64\)"),
        (Launch(64, 64, 4, 0), r"num_stages \(0\) 1 to 8"),
        (Launch(64, 64, 4, 50), r"num_stages \(50\) 1 to 8"),
        (Launch(0, 64, 4, 2), r"rows \(0\) must be a power of two"),
        (Launch(64, 256, 4, 2), r"keys \(256\) must be a power of two"),
    ],
)
def test_launch_parameters_that_make_no_kernel_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        choose("forward", 90, **SHAPE, overrides={"forward": parameters})
