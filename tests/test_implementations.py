"""The switch between tile implementations: named ones run or say why not, None falls through."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from libra_kernels import Launch, TileOptions, Tiles, check_implementation, tile_forward, triton, why_not_triton

H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")


def shapes(block=128, group=4, head_dim=128, v_head_dim=128, dtype=jnp.bfloat16):
    return (
        jax.ShapeDtypeStruct((3, block, group, head_dim), dtype),
        jax.ShapeDtypeStruct((3, block, v_head_dim), dtype),
    )


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"implementation \('flash'\) must be None or one of \['reference', 'triton'"):
        check_implementation("flash")


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        (H100, 90),
        (SimpleNamespace(compute_capability="12.0"), 120),
        (SimpleNamespace(compute_capability="gfx942"), None),
        (SimpleNamespace(platform="cpu"), None),
        (None, None),
    ],
)
def test_compute_capability_of_a_device(device: object, capability: int | None) -> None:
    assert triton.compute_capability_of(device) == capability


def test_triton_is_for_nvidia_gpus() -> None:
    check_implementation("triton", H100)
    for device in (jax.devices()[0], SimpleNamespace(platform="gpu", device_kind="MI300", compute_capability="gfx942")):
        with pytest.raises(ValueError, match=f"runs on NVIDIA GPUs, not on {device.platform} devices"):
            check_implementation("triton", device)


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        (90, {}, None),
        (103, {}, None),
        (80, {"dtype": jnp.float16, "head_dim": 192, "group": 16, "block": 64}, None),
        (90, {"dtype": jnp.float32}, "bfloat16 or float16, got float32"),
        (90, {"head_dim": 80}, r"head_dim \(80\)"),
        (90, {"block": 512}, r"block \(512\)"),
        (90, {"group": 17}, r"\(17\)"),
        (75, {}, r"7\.5"),
        (120, {}, r"12\.0"),
    ],
)
def test_why_not_triton(capability: int, changes: dict, reason: str | None) -> None:
    q, v = shapes(**changes)
    found = why_not_triton(TileOptions(1.0, compute_capability=capability), q, v)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


def test_without_jax_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else real(name))
    reason = why_not_triton(TileOptions(1.0, compute_capability=90), *shapes())
    assert reason == "jax-triton is not installed (pip install 'libra-jax[cuda]')"


def test_launch_parameters_of_the_users_own_are_not_fallen_through() -> None:
    options = TileOptions(1.0, compute_capability=90, launches=(("dq", Launch(48, 64, 4, 2)),))
    with pytest.raises(ValueError, match=r"rows \(48\)"):
        why_not_triton(options, *shapes())


def problem(dtype):
    """One block of one token that sees itself."""
    q, kv = np.ones((1, 64, 1, 64), dtype), np.ones((1, 64, 64), dtype)
    tiles = Tiles(
        jnp.array([[0, 0, 0, 1, 0]], jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 64), jnp.int32),
        jnp.int32(0), jnp.int32(1),
    )  # fmt: skip
    return q, kv, kv, tiles, jnp.zeros_like(q), jnp.zeros((1, 64, 1, 2), jnp.float32)


def test_named_where_it_cannot_run_the_kernels_refuse_and_none_falls_through() -> None:
    arguments = problem(jnp.bfloat16)
    with pytest.raises(ValueError, match="runs on NVIDIA GPUs, not on cpu"):
        tile_forward(*arguments, options=TileOptions(1.0), implementation="triton")
    with pytest.raises(ValueError, match="cannot run this: q, k and v must be bfloat16 or float16, got float32"):
        tile_forward(*problem(np.float32), options=TileOptions(1.0, compute_capability=90), implementation="triton")
    for implementation in (None, "xla"):
        out, _ = tile_forward(*arguments, options=TileOptions(1.0), implementation=implementation)
        np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
