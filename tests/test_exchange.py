"""The transports: three ways for the same items, with the same bits, and no byte more than the plan says.

`ragged` runs on CPU devices through `ragged_on_cpu`."""

from __future__ import annotations

import dataclasses
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
    expected,
    forward_and_backward,
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
def test_transports_give_the_same_bits_for_every_policy_and_number_of_waves(waves: int) -> None:
    compare(make_spec(2, 2, waves=waves), pools=1, transports=TRANSPORTS if waves == 4 else TRANSPORTS[:2])


@pytest.mark.parametrize(
    ("spec", "pools", "explicit"),
    [
        (make_spec(2, 2, window=11, waves=3), 2, True),
        (make_spec(2, 2, heads=28, kv_heads=7, waves=3, dtype="bfloat16"), 1, False),
        (make_spec(4, 1, heads=3, kv_heads=1, head_dim=7, v_head_dim=5), 1, False),
    ],
    ids=["window, two pools, explicit axes", "bfloat16", "odd widths"],
)
def test_ragged_and_padded_give_the_same_bits_for_other_shapes(spec: PoolSpec, pools: int, explicit: bool) -> None:
    compare(spec, pools, TRANSPORTS[:2], explicit)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)])
def test_ragged_in_a_scan_over_checkpointed_layers(policy) -> None:
    """The same gradients as with all_to_all, bit for bit, on a mesh with explicit axes."""
    spec, mesh, rng = make_spec(2, 2, waves=3), make_mesh(2, 2, 2, True), np.random.default_rng(5)
    lengths = skewed_lengths(rng, 4, S)
    inputs = random_inputs(rng, 4, spec)
    arguments = on_mesh(inputs, make_plans(lengths, spec), mesh)

    def gradients(transport: str):
        def loss(q, k, v, cotangent, plans):
            @functools.partial(jax.checkpoint, policy=policy)
            def layer(x, _):
                return x + libra_jax.libra_attention(x, k, v, plans, spec=spec, mesh=mesh, transport=transport), None

            return jnp.sum(jax.lax.scan(layer, q, None, length=2)[0] * cotangent)

        with jax.set_mesh(mesh):
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments)

    for a, b in zip(gradients("ragged"), gradients("all_to_all"), strict=True):
        assert np.isfinite(a).all() and same_bits(np.asarray(a), np.asarray(b))


def test_ragged_exchanges_stay_inside_the_pool_and_there_is_one_for_each_window() -> None:
    """Read before XLA has rewritten anything: the primitive itself, with the pool's ranks in its groups."""
    for waves, times in ((1, 4), (2, 4), (3, 8), (4, 10), (5, 12)):
        spec, mesh = make_spec(2, 2, waves=waves), make_mesh(2, 2, 2)
        inputs = random_inputs(np.random.default_rng(0), 4, spec)
        arguments = on_mesh(inputs, make_plans([[S], [3], [30, 34], [1]], spec), mesh)
        traced = jax.jit(forward_and_backward(spec, mesh, transport="ragged")).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "@ragged_all_to_all(" in line]
        assert len(calls) == times, waves
        assert all("replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]>" in line for line in calls), calls[0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_tables_send_the_bytes_that_the_statistics_say(policy: str) -> None:
    """Exactly, rank by rank, both ways; first-visible positions, 4 bytes a token, are not counted there."""
    spec = PoolSpec(
        seq_len=1024, pool_size=3, cp=2, num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=24, block=32, waves=4,
        capacity=16,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    plan = libra_jax.plan_pool(skewed_lengths(rng, 3, 1024), spec, policy=POLICIES[policy])
    assert plan.stats.fallback is None
    tables = plan.tables

    def items(name: str) -> np.ndarray:
        """(N,) all that a rank's sizes for all exchanges and peers come to."""
        return np.diff(getattr(tables, name), axis=-1).reshape(spec.ranks, -1).sum(axis=1)

    result_bytes = spec.block * spec.group * spec.value_dim * 2
    query_bytes = spec.block * spec.group * spec.head_dim * 2
    sent = items("send_block_offsets") * query_bytes + items("recv_block_offsets") * result_bytes
    np.testing.assert_array_equal(sent + items("send_page_offsets") * spec.page_bytes, plan.stats.sent_bytes)
    received = items("recv_block_offsets") * query_bytes + items("send_block_offsets") * result_bytes
    np.testing.assert_array_equal(received + items("recv_page_offsets") * spec.page_bytes, plan.stats.received_bytes)
    # Gradients of pages go home once for each copy that was sent.
    np.testing.assert_array_equal(items("return_page_offsets"), items("recv_page_offsets"))
    np.testing.assert_array_equal(items("returned_page_offsets"), items("send_page_offsets"))


def test_what_ranks_do_not_agree_on_is_refused() -> None:
    """A collective whose ends differ in size hangs: that must not get to a device."""
    spec = make_spec(2, 2, waves=3)
    plan = libra_jax.plan_pool([[S], [3] * 20], spec)
    for name in ("block_landings", "page_landings", "result_landings", "gradient_landings"):
        table = getattr(plan.tables, name).copy()
        where = tuple(np.argwhere(table == table.min())[0])
        table[where] += 1
        damaged = dataclasses.replace(plan, tables=dataclasses.replace(plan.tables, **{name: table}))
        with pytest.raises(ValueError, match=rf"{name} of rank \d+ in pool 0, exchange \d+, to rank \d+ is \d+, but"):
            libra_jax.stack_plans([damaged])
    offsets = plan.tables.send_page_offsets.copy()
    offsets[..., -1] += 1
    damaged = dataclasses.replace(plan, tables=dataclasses.replace(plan.tables, send_page_offsets=offsets))
    with pytest.raises(ValueError, match="the steps of send_page_offsets of rank 0"):
        libra_jax.stack_plans([damaged])


def test_a_box_gives_back_what_was_written() -> None:
    rng = np.random.default_rng(3)
    shapes = (((6, 2, 5), jnp.bfloat16), ((6,), jnp.int32)), (((6, 5), jnp.bfloat16),) * 2
    box = Box(
        tuple(Kind(3 + i, tuple(jax.ShapeDtypeStruct(*a) for a in like)) for i, like in enumerate(shapes)),
        jnp.dtype(jnp.uint16),
    )
    assert box.words == (72, 60) and box.unit == 12 and box.starts == (0, 18, 38)
    kinds = {
        kind: [
            jnp.asarray(rng.integers(-9, 9, (layout.room, *a.shape))).astype(a.dtype) for a in layout.like
        ]
        for kind, layout in enumerate(box.kinds)
    }  # fmt: skip
    buffer = box.write_all(box.empty(), kinds)
    picked = jnp.asarray([2, 0, 2], jnp.int32)
    for kind, arrays in kinds.items():
        for a, b in zip(arrays, box.read(buffer, kind), strict=True):
            assert same_bits(np.asarray(a), np.asarray(b))
        for a, b in zip(arrays, box.pick(buffer, kind, picked), strict=True):
            assert same_bits(np.asarray(a[picked]), np.asarray(b))


def test_gpus_take_the_ragged_transport_by_themselves() -> None:
    assert resolve_transport(None, target_mesh("h100", (1,), ("cp",)).devices.flat[0]) == "ragged"
    assert resolve_transport(None, jax.devices()[0]) == "all_to_all"
    assert resolve_transport(None, jax.devices()[0], 2) == "ppermute"
    assert resolve_transport(None, jax.devices()[0], 2, all_at_once=False) == "all_to_all", "where some may not come"
    with pytest.raises(ValueError, match=r"transport \('nccl'\) must be None or one of .*'ragged'"):
        resolve_transport("nccl")


def test_ragged_by_name_on_cpus_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra_jax.exchange.RAGGED_PLATFORMS", {"gpu"})
    with pytest.raises(ValueError, match=r"'ragged' runs on GPUs, not on cpu devices.*use 'all_to_all' or 'ppermute'"):
        resolve_transport("ragged", jax.devices()[0], 4)
