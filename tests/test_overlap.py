"""Exchanges run under kernels: read off the schedules that XLA makes for H100s that are not there.

Every dispatch and every return of a pass but its last runs under the kernels of exactly one wave; the last return has
nothing left to run under. The same alone, in a scan over layers, under `jax.checkpoint`, and beside all-gathers of
weights that are sharded over the whole mesh. With relays there are two exchanges in a window, the pool's and the
nodes', and both do.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import operator_base as base
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import libra_jax
from libra_jax.attention import LSE_NAME, OUT_NAME, PLAN_SPEC, SEQUENCE_SPEC
from libra_jax.models.fsdp import gather, spread_spec
from libra_jax.schedule import OVERLAP_OPTIONS, Exchange, operator_exchanges, read_schedule
from libra_jax.targets import target_mesh

AXES = ("pool", "dp", "cp")
LENGTHS = [[2048], [3] * 600, [200, 1, 500], [77] * 26]
LAYERS = 4
FORWARD, BACKWARD = ["libra_forward"], ["libra_dkv", "libra_dq"]


def spec_of(waves: int, node: int | None = None) -> libra_jax.PoolSpec:
    return libra_jax.PoolSpec(
        seq_len=2048, pool_size=2, cp=2, num_heads=8, num_kv_heads=2, head_dim=128, waves=waves, capacity=4,
        ranks_per_node=node,
    )  # fmt: skip


@functools.cache
def mesh_of(hosts: int) -> jax.sharding.Mesh:
    """Two pools of four GPUs; on four hosts each pool spans two."""
    return target_mesh("h100", (2, 2, 2), AXES, topology=(1, hosts, 8 // hosts))


def lying(mesh, shape, dtype, where):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))


def arguments(spec, mesh):
    q = lying(mesh, (4, spec.seq_len, spec.num_heads, spec.head_dim), spec.dtype, SEQUENCE_SPEC)
    k = lying(mesh, (4, spec.seq_len, spec.num_kv_heads, spec.head_dim), spec.dtype, SEQUENCE_SPEC)
    plans = base.make_plans(LENGTHS, spec)
    return q, k, k, jax.tree.map(lambda table: lying(mesh, table.shape, table.dtype, PLAN_SPEC), plans)


def schedule(function, *args) -> list[Exchange]:
    text = jax.jit(function).lower(*args).compile(compiler_options=OVERLAP_OPTIONS).as_text()
    assert text is not None
    return read_schedule(text)


def check(exchanges: list[Exchange], kernels: list[list[str]], waves: int) -> None:
    """The operator's exchanges are those of passes with these kernels, and only the last return of each is exposed."""
    ours = operator_exchanges(exchanges)
    each = len(purposes(waves))
    assert len(ours) == each * len(kernels), [(e.purpose, e.under) for e in ours]
    for number, names in enumerate(kernels):
        one_pass = ours[number * each : (number + 1) * each]
        for exchange in one_pass[:-1]:
            assert not exchange.exposed
            assert sorted(name for name in exchange.under if name.startswith("libra_")) == names, exchange
        assert one_pass[-1].purpose == "return"
        assert not any(name.startswith("libra_") for name in one_pass[-1].under)
        assert [e.purpose for e in one_pass] == purposes(waves)


def purposes(waves: int) -> list[str]:
    """What the exchange of each window does, and at last the return that is left."""
    windows = []
    for wave in range(waves):
        ways = ["dispatch"] * (wave + 1 < waves) + ["return"] * (wave >= 2)
        windows += ["+".join(ways)] if ways else []
    return [*windows, "return"]


def check_nodes(exchanges: list[Exchange], kernels: list[list[str]], waves: int) -> None:
    """The nodes' exchanges, in groups of two, run under the same kernels as the pool's of their windows. Only the last
    return of gradients to relays does not: the pool's last return waits for it."""
    inside = [exchange for exchange in operator_exchanges(exchanges) if exchange.purpose.startswith("node ")]
    for names in kernels:
        wanted = node_purposes(waves, names == BACKWARD)
        one_pass, inside = inside[: len(wanted)], inside[len(wanted) :]
        assert [exchange.purpose for exchange in one_pass] == wanted
        hidden = one_pass[:-1] if names == BACKWARD else one_pass
        for exchange in hidden:
            assert not exchange.exposed and exchange.group_size == 2
            assert sorted(name for name in exchange.under if name.startswith("libra_")) == names, exchange
    assert not inside


def node_purposes(waves: int, backward: bool) -> list[str]:
    windows = []
    for wave in range(waves):
        ways = ["dispatch"] * (1 <= wave < waves - 1) + ["return"] * (backward and wave >= 3)
        windows += ["node " + "+".join(ways)] if ways else []
    return [*windows, *["node return"] * backward]


def pool_wide(exchanges: list[Exchange]) -> list[Exchange]:
    return [exchange for exchange in exchanges if not exchange.purpose.startswith("node ")]


def attention(spec, mesh):
    return lambda q, k, v, plans: libra_jax.libra_attention(q, k, v, plans, spec=spec, mesh=mesh)


@pytest.mark.parametrize(("waves", "hosts"), [(2, 1), (3, 4), (4, 1), (5, 4)])
def test_alone_every_exchange_but_the_last_return_runs_under_a_wave(waves: int, hosts: int) -> None:
    spec, mesh = spec_of(waves), mesh_of(hosts)

    def both(q, k, v, plans):
        out, pull = jax.vjp(lambda q, k, v: attention(spec, mesh)(q, k, v, plans), q, k, v)
        return out, *pull(out)

    check(schedule(both, *arguments(spec, mesh)), [FORWARD, BACKWARD], waves)


@pytest.mark.parametrize(("waves", "hosts"), [(3, 4), (4, 1), (5, 4)])
def test_alone_with_relays_both_exchanges_of_a_window_run_under_its_wave(waves: int, hosts: int) -> None:
    spec, mesh = spec_of(waves, node=2), mesh_of(hosts)

    def both(q, k, v, plans):
        out, pull = jax.vjp(lambda q, k, v: attention(spec, mesh)(q, k, v, plans), q, k, v)
        return out, *pull(out)

    exchanges = schedule(both, *arguments(spec, mesh))
    check(pool_wide(exchanges), [FORWARD, BACKWARD], waves)
    check_nodes(exchanges, [FORWARD, BACKWARD], waves)


def stack_of_layers(spec, mesh, policy, *, fsdp: bool = False):
    """loss(weights, x, plans) of LAYERS residual layers, scanned, each under `jax.checkpoint` unless policy is None."""

    def layer(x, weights, plans):
        if fsdp:
            weights = jax.tree.map(lambda w: w.astype(x.dtype), gather(weights, mesh, x.dtype))
        heads = jnp.einsum("nsf,fhd->nshd", x, weights["qkv"])
        q, k, v = jnp.split(heads, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=2)
        x = x + jnp.einsum("nshd,hdf->nsf", attention(spec, mesh)(q, k, v, plans), weights["out"])
        x = x + jax.nn.relu(x @ weights["up"]) @ weights["down"]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, SEQUENCE_SPEC))

    def loss(weights, x, plans):
        one = functools.partial(layer, plans=plans)
        one = one if policy is None else jax.checkpoint(one, policy=policy)
        return jnp.sum(jax.lax.scan(lambda x, w: (one(x, w), None), x, weights)[0].astype(jnp.float32))

    return loss


def model_arguments(spec, mesh, *, features: int = 1024, fsdp: bool = False):
    """Shapes of the weights, whole on every GPU or float32 and spread over all, of the activations and of the plans."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    shapes = {
        "qkv": (features, heads, spec.head_dim),
        "out": (spec.num_heads, spec.head_dim, features),
        "up": (features, 4 * features),
        "down": (4 * features, features),
    }
    weights = {
        name: lying(mesh, (LAYERS, *shape), "float32", spread_spec((LAYERS, *shape), mesh, first=1))
        if fsdp
        else lying(mesh, (LAYERS, *shape), "bfloat16", PartitionSpec())
        for name, shape in shapes.items()
    }
    x = lying(mesh, (4, spec.seq_len, features), "bfloat16", SEQUENCE_SPEC)
    return weights, x, arguments(spec, mesh)[-1]


REMAT = jax.checkpoint_policies.nothing_saveable
KEEP = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)


@pytest.mark.parametrize(
    ("policy", "passes", "waves", "hosts"),
    [
        (None, [FORWARD, BACKWARD], 3, 1),
        (REMAT, [FORWARD, FORWARD, BACKWARD], 4, 4),
        (KEEP, [FORWARD, BACKWARD], 2, 4),
    ],
    ids=["scan", "checkpoint", "checkpoint that keeps the output"],
)
def test_in_a_scan_over_layers(policy, passes, waves: int, hosts: int) -> None:
    spec, mesh = spec_of(waves), mesh_of(hosts)
    gradients = jax.grad(stack_of_layers(spec, mesh, policy))
    exchanges = schedule(gradients, *model_arguments(spec, mesh))
    check(exchanges, passes, waves)
    assert all(exchange.times == LAYERS for exchange in operator_exchanges(exchanges))


@pytest.mark.parametrize(
    ("policy", "passes", "waves", "hosts"),
    [(None, [FORWARD, BACKWARD], 3, 4), (REMAT, [FORWARD, FORWARD, BACKWARD], 4, 4), (KEEP, [FORWARD, BACKWARD], 5, 1)],
    ids=["scan", "checkpoint", "checkpoint that keeps the output"],
)
def test_in_a_scan_over_layers_with_relays(policy, passes, waves: int, hosts: int) -> None:
    spec, mesh = spec_of(waves, node=2), mesh_of(hosts)
    exchanges = schedule(jax.grad(stack_of_layers(spec, mesh, policy)), *model_arguments(spec, mesh))
    check(pool_wide(exchanges), passes, waves)
    check_nodes(exchanges, passes, waves)
    assert all(exchange.times == LAYERS for exchange in operator_exchanges(exchanges))


@pytest.mark.parametrize("node", [None, 2], ids=["one level", "relays"])
def test_beside_weights_that_are_gathered_from_all_gpus(node: int | None) -> None:
    """FSDP: gathers of weights and scatters of their gradients find other work, and do not push the tiles' out."""
    spec, mesh = spec_of(3, node), mesh_of(1)
    gradients = jax.grad(stack_of_layers(spec, mesh, KEEP, fsdp=True))
    exchanges = schedule(gradients, *model_arguments(spec, mesh, fsdp=True, features=4096))
    check(pool_wide(exchanges), [FORWARD, BACKWARD], 3)
    if node:
        check_nodes(exchanges, [FORWARD, BACKWARD], 3)
    others = [e for e in exchanges if e.purpose in ("weights", "gradients")]
    assert {e.kind for e in others} == {"all-gather", "reduce-scatter"}
    # What a layer begins with has nothing before it in the same turn of the scan.
    first = [e for e in others if e.exposed]
    assert len(first) <= 2 and sum(e.bytes for e in first) < 0.1 * sum(e.bytes for e in others), first
    assert all(e.under for e in others)
