"""What the readers of compiled programs say, against programs whose schedule is known: small ones, compiled for H100,
in which an exchange can or cannot run under other work."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import operator_base as base
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_compile_gpu import arguments, loss_and_gradients, spec_of

from libra_jax.hlo import Instruction, groups_of, read_program, triton_call, type_bytes
from libra_jax.schedule import (
    DISPATCH_SCOPE,
    OVERLAP_OPTIONS,
    RETURN_SCOPE,
    Exchange,
    operator_exchanges,
    read_schedule,
)
from libra_jax.targets import target_mesh

AXES = ("pool", "dp", "cp")
POOL, WHERE = ("dp", "cp"), P(AXES)
POOLS = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return target_mesh("h100", (2, 2, 2), AXES)


def compiled(function, mesh, *shapes) -> str:
    args = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, WHERE)) for s, d in shapes]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=WHERE, out_specs=WHERE, check_vma=False)
    return jax.jit(mapped).lower(*args).compile(compiler_options=OVERLAP_OPTIONS).as_text()


def fetch_under_a_product(x, w, rows, offsets):
    with jax.named_scope(DISPATCH_SCOPE):
        at = offsets[0]
        got = lax.ragged_all_to_all(rows[0], jnp.zeros_like(rows[0]), at, at, at, at, axis_name=POOL)
    y, got = lax.optimization_barrier((x[0] @ w[0], got))
    return (y @ got.astype(y.dtype))[None]


PRODUCT = (
    ((8, 2048, 2048), jnp.bfloat16), ((8, 2048, 2048), jnp.bfloat16), ((8, 2048, 2048), jnp.uint16), ((8, 4), jnp.int32)
)  # fmt: skip


def test_a_ragged_exchange_under_a_matrix_product_is_hidden(mesh) -> None:
    (exchange,) = read_schedule(compiled(fetch_under_a_product, mesh, *PRODUCT))
    assert (exchange.kind, exchange.purpose, exchange.times) == ("ragged-all-to-all", "dispatch", 1)
    assert exchange.bytes == 2048 * 2048 * 2 and exchange.groups == POOLS and exchange.group_size == 4
    assert any("dot" in label for label in exchange.under) and not exchange.exposed


def test_an_exchange_that_everything_waits_for_is_exposed(mesh) -> None:
    def fetch_first(w, rows):
        with jax.named_scope(DISPATCH_SCOPE):
            got = lax.all_to_all(rows[0].reshape(4, -1, 2048), POOL, 0, 0).reshape(2048, 2048)
        return (got.astype(w.dtype) @ w[0])[None]

    (exchange,) = read_schedule(compiled(fetch_first, mesh, *PRODUCT[1:3]))
    assert (exchange.kind, exchange.purpose, exchange.under) == ("all-to-all", "dispatch", ())
    assert exchange.exposed


def test_loops_are_walked_and_their_turns_multiplied(mesh) -> None:
    def micro_steps(x, w, rows):
        def layer(carry, w):
            x, rows = carry
            with jax.named_scope(RETURN_SCOPE):
                got = lax.all_to_all(rows.reshape(4, -1, rows.shape[-1]), POOL, 0, 0).reshape(rows.shape)
            x, got = lax.optimization_barrier((x @ w, got))
            return (x, got + 1), None

        def micro_step(carry, _):
            return lax.scan(layer, carry, w[0])[0], None

        (x, rows), _ = lax.scan(micro_step, (x[0], rows[0]), length=5)
        return x[None], rows[None]

    text = compiled(micro_steps, mesh, PRODUCT[0], ((8, 3, 2048, 2048), jnp.bfloat16), PRODUCT[2])
    (exchange,) = read_schedule(text)
    assert (exchange.kind, exchange.purpose, exchange.times) == ("all-to-all", "return", 15)
    assert exchange.computation != read_program(text).entry
    assert exchange.groups == POOLS and not exchange.exposed


def test_weights_spread_over_all_are_gathered_and_their_gradients_scattered_in_the_loop(mesh) -> None:
    spread, whole = NamedSharding(mesh, P(None, AXES)), NamedSharding(mesh, P())

    def loss(x, w):
        def layer(x, w):
            return jnp.tanh(x @ lax.with_sharding_constraint(w, whole)), None

        return jnp.sum(lax.scan(layer, x, w)[0].astype(jnp.float32))

    x = jax.ShapeDtypeStruct((8 * 2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P(AXES)))
    w = jax.ShapeDtypeStruct((4, 2048, 2048), jnp.bfloat16, sharding=spread)
    jitted = jax.jit(jax.grad(loss, argnums=1), out_shardings=spread)
    exchanges = read_schedule(jitted.lower(x, w).compile(compiler_options=OVERLAP_OPTIONS).as_text())
    found = {(e.kind, e.purpose, e.times, e.group_size, e.bytes) for e in exchanges}
    size = 2048 * 2048 * 2
    assert found == {("all-gather", "weights", 4, 8, size), ("reduce-scatter", "gradients", 4, 8, size)}


def test_triton_kernels_are_named_and_their_code_is_there(mesh) -> None:
    spec = spec_of()
    lowered = loss_and_gradients(spec, mesh).lower(*arguments(spec, mesh))
    text = lowered.compile(compiler_options=OVERLAP_OPTIONS).as_text()
    calls = [
        call
        for lines in read_program(text).computations.values()
        for line in lines
        if line.opcode == "custom-call" and (call := triton_call(line.rest))
    ]
    assert sorted(call.name for call in calls) == sorted(["libra_forward", "libra_dq", "libra_dkv"] * spec.waves)
    for call in calls:
        assert f".entry {call.function}(" in call.ptx and ".target sm_90" in call.ptx
        assert call.warps in (4, 8) and call.shared_bytes > 0
    under = [set(e.under) for e in read_schedule(text) if e.group_size == 4]
    assert any("libra_forward" in labels for labels in under)


def test_the_operator_s_exchanges_are_told_from_others(mesh) -> None:
    exchanges = read_schedule(compiled(fetch_under_a_product, mesh, *PRODUCT))
    assert operator_exchanges(exchanges) == exchanges
    other = Exchange("a", "all-gather", "main", "", "weights", 1, 8, ((0, 1),), 1, (), True)
    assert operator_exchanges([other]) == []


# The text, form by form.


def collective(rest: str) -> Instruction:
    return Instruction("x", "all-gather", "f32[2]{0}", (), rest)


@pytest.mark.parametrize(
    ("rest", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("channel_id=1, replica_groups={}, dimensions={0}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8]", np.arange(8).reshape(2, 4)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), x", np.arange(8).reshape(2, 2, 2).transpose(0, 2, 1).reshape(4, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", np.arange(8).reshape(2, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, y", np.arange(8).reshape(2, 4).T),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", np.arange(8).reshape(2, 4).T),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", np.arange(8).reshape(2, 4)),
        ("source_target_pairs={{0,1},{1,2},{2,0},{3,4},{4,3}}", [[0, 1, 2], [3, 4]]),
    ],
)
def test_groups_in_every_form(rest: str, groups) -> None:
    assert [list(group) for group in groups_of(collective(rest), 8)] == np.asarray(groups, object).tolist()
    if "source" not in rest and ":(" not in rest and "={}" not in rest:  # against the tests' own reader
        assert base.groups_of(rest) == [set(map(int, group)) for group in groups]


@pytest.mark.parametrize("rest", ["replica_groups=nonsense", "", "replica_groups=mesh['a'=8] {'b'}"])
def test_groups_that_cannot_be_read_are_refused(rest: str) -> None:
    with pytest.raises(ValueError, match="cannot read which devices x joins"):
        groups_of(collective(rest), 8)


def test_bytes_of_types() -> None:
    assert type_bytes("bf16[2,3]{1,0:T(8,128)S(1)}") == 12
    assert type_bytes("((u16[4,5]{1,0}, s32[]), /*index=2*/pred[7]{0}, f8e4m3fn[3], u32[])") == 40 + 4 + 7 + 3 + 4
    with pytest.raises(ValueError, match="unknown element type 'what'"):
        type_bytes("what[3]")


WRAPPED = """HloModule m, is_scheduled=true, num_partitions=4

%inside (p: f32[4096]) -> f32[1024] {
  %p = f32[4096]{0} parameter(0)
  ROOT %rs = f32[1024]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, metadata={op_name="a/b"}
}

ENTRY %main (q: f32[4096]) -> f32[1024] {
  %q = f32[4096]{0} parameter(0)
  %start = ((f32[4096]{0}), f32[1024]{0}) async-start(%q), calls=%inside
  %update = ((f32[4096]{0}), f32[1024]{0}) async-update(%start)
  %gemm = f32[1024]{0} custom-call(%q), custom_call_target="__cublas$gemm"
  ROOT %done = f32[1024]{0} async-done(%update)
}
"""


def test_wrapped_collectives_and_small_work() -> None:
    (exchange,) = read_schedule(WRAPPED)
    assert (exchange.kind, exchange.name, exchange.purpose) == ("reduce-scatter", "start", "gradients")
    assert exchange.bytes == 16384 and exchange.under == ("__cublas$gemm",)
    assert exchange.exposed, "a product of a few KiB hides nothing"
    big = re.sub(r"%gemm = f32\[1024\]", "%gemm = f32[1024,1024]", WRAPPED)
    assert not read_schedule(big)[0].exposed
    together = WRAPPED.replace("calls=%inside", 'calls=%inside, backend_config={"is_sync":true}')
    assert read_schedule(together)[0].exposed


def test_what_is_not_a_scheduled_program_is_refused() -> None:
    with pytest.raises(ValueError, match="not scheduled"):
        read_schedule(WRAPPED.replace("is_scheduled=true, ", ""))
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        read_schedule("module @jit_f {")
