"""The formula for a layer's bytes against what XLA sets aside for an H100. Compiled only: nothing is allocated."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import NamedSharding

import libra_jax
from libra_jax.attention import PLAN_SPEC, SEQUENCE_SPEC
from libra_jax.memory import attention_bytes
from libra_jax.schedule import OVERLAP_OPTIONS
from libra_jax.spec import Capacity, PoolSpec
from libra_jax.tables import PlanTables, table_shapes
from libra_jax.targets import target_mesh

AXES = ("pool", "dp", "cp")
SMALL = PoolSpec(seq_len=16384, pool_size=2, cp=2, num_heads=16, num_kv_heads=4, head_dim=128)
QWEN3_8B = PoolSpec(seq_len=262144, pool_size=8, cp=8, num_heads=32, num_kv_heads=8, head_dim=128)
NODES = dataclasses.replace(SMALL, pool_size=4, waves=4, ranks_per_node=4)
TOLERANCE = 0.05


def set_aside(spec: PoolSpec) -> tuple[int, int]:
    """What one forward and backward pass takes for itself, and with its results (which XLA may also work in)."""
    hosts = spec.ranks // 8 or 1
    mesh = target_mesh("h100", (1, spec.pool_size, spec.cp), AXES, topology=(1, hosts, spec.ranks // hosts))

    def lying(shape, dtype, where):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    def heads(number, width):
        return lying((spec.pool_size, spec.seq_len, number, width), spec.dtype, SEQUENCE_SPEC)

    q, k = heads(spec.num_heads, spec.head_dim), heads(spec.num_kv_heads, spec.head_dim)
    v, out = heads(spec.num_kv_heads, spec.value_dim), heads(spec.num_heads, spec.value_dim)
    leading = (1, spec.pool_size, spec.cp)
    plans = PlanTables(
        spec=spec,
        **{name: lying((*leading, *shape), "int32", PLAN_SPEC) for name, shape in table_shapes(spec).items()},
    )

    def both(q, k, v, cotangent, plans):
        out, pull = jax.vjp(lambda q, k, v: libra_jax.libra_attention(q, k, v, plans, spec=spec, mesh=mesh), q, k, v)
        return out, *pull(cotangent)

    compiled = jax.jit(both).lower(q, k, v, out, plans).compile(compiler_options=OVERLAP_OPTIONS)
    found = compiled.memory_analysis()
    assert found is not None
    table_bytes = attention_bytes(spec).tables
    whole = sum(jax.numpy.dtype(x.dtype).itemsize * x.size for x in (q, k, v, out)) // spec.ranks
    assert found.argument_size_in_bytes == pytest.approx(whole + table_bytes, rel=1e-3)
    return found.temp_size_in_bytes, found.temp_size_in_bytes + found.output_size_in_bytes


@pytest.mark.parametrize(
    "spec",
    [
        dataclasses.replace(SMALL, waves=1),
        dataclasses.replace(SMALL, waves=2, v_head_dim=64, num_heads=4),
        dataclasses.replace(SMALL, waves=4, capacity=1.5),
        dataclasses.replace(QWEN3_8B, waves=2),
        dataclasses.replace(QWEN3_8B, waves=3),
        dataclasses.replace(QWEN3_8B, waves=4, num_kv_heads=4),
        dataclasses.replace(NODES, waves=3, capacity=Capacity(1, 2, 4, passed_pages=3, relayed_pages=1.5)),
        dataclasses.replace(QWEN3_8B, waves=4, ranks_per_node=8, capacity=Capacity(1, 3, 4, passed_pages=2)),
        dataclasses.replace(NODES, waves=5, capacity=Capacity(1, 2, 4, passed_pages=1, relayed_pages=3)),
    ],
    ids=[
        "1 wave", "narrow values", "4 waves, little room", "8B at 256K", "8B, 3 waves", "4 kv heads, 4 waves",
        "relays, 3 waves", "8B, nodes of 8", "relays, 5 waves",
    ],
)  # fmt: skip
def test_the_formula_is_what_xla_sets_aside(spec: PoolSpec) -> None:
    ours = attention_bytes(spec)
    lse = ours.kept - spec.home_blocks * (spec.block_bytes + spec.page_bytes)  # kept inside of this program
    passes = (ours.forward, ours.backward)
    work = max(p.outbox + p.inputs + p.results for p in passes) + lse
    formula = work + max(p.inboxes for p in passes)
    alone, with_results = set_aside(spec)
    print(f"formula {formula / 2**20:.0f} MiB, XLA {alone / 2**20:.0f} to {with_results / 2**20:.0f} MiB")
    assert (1 - TOLERANCE) * alone <= formula <= (1 + TOLERANCE) * with_results


def test_parts_add_up_and_a_pool_of_one_rank_needs_no_boxes() -> None:
    alone = attention_bytes(dataclasses.replace(SMALL, pool_size=1, cp=1))
    assert alone.forward.outbox == alone.forward.inboxes == 0
    parts = attention_bytes(SMALL).backward
    assert parts.total == parts.outbox + parts.inputs + parts.results + parts.inboxes


def test_relays_cost_their_room_and_where_nothing_can_be_passed_on_they_cost_nothing() -> None:
    spec = dataclasses.replace(NODES, capacity=Capacity(1, 2, 4, passed_pages=0.5, relayed_pages=2))
    one_level, two = (attention_bytes(s) for s in (dataclasses.replace(spec, ranks_per_node=None), spec))
    passed, relayed = (spec.home_blocks * room * spec.page_bytes for room in (0.5, 2))
    assert two.kept == one_level.kept
    assert two.forward.inboxes - one_level.forward.inboxes == passed
    assert two.backward.inboxes - one_level.backward.inboxes == passed + relayed
    assert two.forward.outbox - one_level.forward.outbox == relayed
    assert two.backward.results - one_level.backward.results == 2 * passed  # summed in float32
    in_one_node = dataclasses.replace(spec, ranks_per_node=spec.ranks)
    assert attention_bytes(in_one_node) == one_level
