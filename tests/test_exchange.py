"""The transports: three ways for the same items, with the same bits, and no byte more than the plan says.

`ragged` runs on CPU devices through `ragged_on_cpu`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operator_base import (
    POLICIES,
    Result,
    assert_close,
    assert_padding_zero,
    collectives,
    expected,
    forward_and_backward,
    groups_of,
    make_mesh,
    make_plans,
    on_mesh,
    random_inputs,
    run,
    same_bits,
    skewed_lengths,
)

import libra_jax
from libra_jax.attention import LSE_NAME, OUT_NAME
from libra_jax.exchange import Box, Kind, resolve_transport
from libra_jax.spec import PoolSpec
from libra_jax.targets import target_mesh

S = 64
TRANSPORTS = ("ragged", "all_to_all", "ppermute")


def make_spec(dp: int, cp: int, heads: int = 4, kv_heads: int = 2, **others) -> PoolSpec:
    fields = {"seq_len": S, "head_dim": 8, "block": 8, "capacity": 16.0, "dtype": "float32"} | others
    return PoolSpec(pool_size=dp, cp=cp, num_heads=heads, num_kv_heads=kv_heads, **fields)


def compare(spec: PoolSpec, pools: int, transports: tuple[str, ...] = TRANSPORTS, explicit: bool = False) -> None:
    """Every policy's plan gives the oracle's result, and one plan the same bits with every transport: all four."""
    mesh, rng = make_mesh(pools, spec.pool_size, spec.cp, explicit), np.random.default_rng(spec.waves)
    lengths = skewed_lengths(rng, pools * spec.pool_size, S)
    inputs = random_inputs(rng, pools * spec.pool_size, spec)
    want = expected(inputs, lengths, spec)
    tolerance = 2e-5 if spec.dtype == "float32" else 2e-2
    for policy in POLICIES.values():
        plans = make_plans(lengths, spec, policy)
        first, *others = (run(inputs, plans, spec, mesh, transport=transport) for transport in transports)
        assert_close(first, want, tolerance)
        assert_padding_zero(first, lengths, S)
        for other in others:
            for name, a, b in zip(Result._fields, first, other, strict=True):
                assert same_bits(a, b), name


@pytest.mark.parametrize("waves", [1, 2, 3, 4])
def test_all_transports_give_the_same_bits_for_every_policy_and_number_of_waves(waves: int) -> None:
    compare(make_spec(2, 4, waves=waves), pools=1)


@pytest.mark.parametrize(
    ("spec", "pools"),
    [
        (make_spec(2, 2, window=11, waves=3), 2),
        (make_spec(2, 2, heads=28, kv_heads=7, waves=3, dtype="bfloat16"), 2),
        (make_spec(4, 1, heads=3, kv_heads=1, head_dim=7, v_head_dim=5, waves=3), 2),
        (make_spec(2, 2, window=20, dtype="float16", v_head_dim=4, capacity=None), 2),
        (make_spec(1, 1), 2),
    ],
    ids=["window", "bfloat16", "odd widths", "float16", "one rank"],
)
def test_ragged_and_padded_give_the_same_bits_for_other_shapes(spec: PoolSpec, pools: int) -> None:
    if spec.capacity is None:
        mesh, lengths = make_mesh(pools, spec.pool_size, spec.cp), [[S], [3] * 9, [30, 34], [1]]
        inputs, plans = random_inputs(np.random.default_rng(1), 4, spec), make_plans(lengths, spec)
        results = [run(inputs, plans, spec, mesh, transport=transport) for transport in TRANSPORTS]
        assert all(same_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    else:
        compare(spec, pools, ("ragged", "all_to_all"))
