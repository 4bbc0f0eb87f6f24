"""Rung 4: the operator with the Triton kernels, compiled by XLA for GPUs that are not there, over a mesh of them. What
is compiled is what a training step would run; only running it needs a GPU."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import operator_base as base
import pytest
from jax.sharding import NamedSharding
from libra_kernels import Launch

import libra_jax
from libra_jax.attention import PLAN_SPEC, SEQUENCE_SPEC
from libra_jax.targets import TARGETS, target_mesh

AXES = ("pool", "dp", "cp")
LENGTHS = [[1024], [3] * 300, [200, 1, 500], [77] * 13]


def spec_of(**changes) -> libra_jax.PoolSpec:
    fields = {
        "seq_len": 1024,
        "pool_size": 2,
        "cp": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "block": 128,
    }
    return libra_jax.PoolSpec(**{**fields, **changes})


def arguments(spec, mesh):
    """Shapes of q, k, v and the stacked plans as they lie on a mesh of two pools."""

    def lying(shape, dtype, where):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    q = lying((4, spec.seq_len, spec.num_heads, spec.head_dim), spec.dtype, SEQUENCE_SPEC)
    k = lying((4, spec.seq_len, spec.num_kv_heads, spec.head_dim), spec.dtype, SEQUENCE_SPEC)
    plans = base.make_plans(LENGTHS, spec)
    return q, k, k, jax.tree.map(lambda table: lying(table.shape, table.dtype, PLAN_SPEC), plans)


def loss_and_gradients(spec, mesh, **options):
    def loss(q, k, v, plans):
        out = libra_jax.libra_attention(q, k, v, plans, spec=spec, mesh=mesh, **options)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@functools.cache
def compiled(target: str, **changes) -> str:
    spec, mesh = spec_of(**changes), target_mesh(target, (2, 2, 2), AXES)
    return loss_and_gradients(spec, mesh).lower(*arguments(spec, mesh)).compile().as_text()


def kernel_calls(hlo: str) -> int:
    return len(re.findall(r'custom_call_target="triton_kernel_call', hlo))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_forward_and_backward_compile_with_three_kernels_a_wave(target: str) -> None:
    hlo = compiled(target)
    assert "is_scheduled=true" in hlo
    assert kernel_calls(hlo) == 3 * spec_of().waves
    assert not re.search(r" (?:dot|while)\(.*f32\[\d+,128,4,128\]", hlo)  # nothing of the plain XLA kernels is left


def test_collectives_stay_inside_the_pool() -> None:
    lines = base.collectives(compiled("h100"))
    lines = [line for line in lines if "all-reduce" not in line]  # the sum of the test's own loss
    assert lines
    for line in lines:
        for group in base.groups_of(line):
            assert len({device // 4 for device in group}) == 1, line


@pytest.mark.parametrize(
    "changes", [{"waves": 1}, {"head_dim": 64, "dtype": "float16"}, {"num_kv_heads": 8, "block": 64}, {"window": 300}]
)
def test_other_shapes_compile(changes: dict) -> None:
    assert kernel_calls(compiled("h100", **changes)) == 3 * spec_of(**changes).waves


def test_a_checkpointed_layer_in_a_scan_compiles() -> None:
    spec, mesh = spec_of(), target_mesh("h100", (2, 2, 2), AXES)
    q, k, v, plans = arguments(spec, mesh)

    def loss(q, k, v, plans):
        @jax.checkpoint
        def layer(x, _):
            return libra_jax.libra_attention(x, k, v, plans, spec=spec, mesh=mesh), None

        return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32))

    hlo = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v, plans).compile().as_text()
    assert kernel_calls(hlo) == (1 + 1 + 2) * spec.waves  # forward, again, and backward: once each, in loops


def test_one_program_lowers_for_cpus_and_for_gpus() -> None:
    """What `implementation=None` traces, traced once, lowers for both; for CPUs without a Triton kernel, and runs."""
    spec, mesh = spec_of(num_heads=4), base.make_mesh(2, 2, 2)
    traced = loss_and_gradients(spec, mesh).trace(*arguments(spec, mesh))
    assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    inputs = base.random_inputs(np.random.default_rng(0), 4, spec)
    result = base.run(inputs, base.make_plans(LENGTHS, spec), spec, mesh)
    base.assert_close(result, base.expected(inputs, LENGTHS, spec), tolerance=2e-2)


def test_named_on_cpus_it_refuses_and_names_the_way() -> None:
    spec, mesh = spec_of(), base.make_mesh(2, 2, 2)
    with pytest.raises(ValueError, match=r"runs on NVIDIA GPUs, not on cpu devices .* use 'xla', or None"):
        loss_and_gradients(spec, mesh, implementation="triton").lower(*arguments(spec, mesh))


def test_named_with_what_the_kernels_do_not_take_it_refuses() -> None:
    mesh = target_mesh("h100", (2, 2, 2), AXES)
    for changes, message in (
        ({"dtype": "float32"}, "must be bfloat16 or float16, got float32"),
        ({"head_dim": 80}, r"head_dim \(80\)"),
        ({"block": 32}, r"block \(32\)"),
        ({"num_heads": 34}, r"\(17\)"),
    ):
        spec = spec_of(**changes)
        with pytest.raises(ValueError, match=message):
            loss_and_gradients(spec, mesh, implementation="triton").lower(*arguments(spec, mesh))


def test_without_a_name_a_gpu_falls_back_to_xla_and_says_so() -> None:
    spec, mesh = spec_of(dtype="float32", seq_len=512), target_mesh("h100", (2, 2, 2), AXES)
    lengths = [[512], [3], [200, 1], [77]]
    q, k, v, _ = arguments(spec_of(dtype="float32"), mesh)
    q, k, v = (jax.ShapeDtypeStruct((4, 512, *x.shape[2:]), x.dtype, sharding=x.sharding) for x in (q, k, v))
    plans = base.make_plans(lengths, spec)
    plans = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, PLAN_SPEC)), plans
    )
    with pytest.warns(UserWarning, match="attention runs in plain XLA on this GPU, many times slower: .*float32"):
        text = loss_and_gradients(spec, mesh).lower(q, k, v, plans).as_text()
    assert "triton" not in text


def test_launch_parameters_can_be_overridden_and_are_checked() -> None:
    spec, mesh = spec_of(), target_mesh("h100", (2, 2, 2), AXES)
    usual = loss_and_gradients(spec, mesh).lower(*arguments(spec, mesh)).as_text()
    other = loss_and_gradients(spec, mesh, launches={"forward": Launch(64, 64, 4, 2)})
    assert other.lower(*arguments(spec, mesh)).as_text() != usual
    for launches, message in (
        ({"forward": Launch(96, 64, 4, 2)}, r"rows \(96\) must be a power of two"),
        ({"dkv": Launch(64, 256, 8, 2)}, r"keys \(256\) must be a power of two.*divides block \(128\)"),
        ({"forwards": Launch(64, 64, 4, 2)}, "forwards"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_and_gradients(spec, mesh, launches=launches).lower(*arguments(spec, mesh))


def test_unknown_targets_and_topologies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target \('v100'\) must be one of"):
        target_mesh("v100", (8,), ("cp",))
    with pytest.raises(ValueError, match=r"topology \(1, 2, 8\) has 16 GPUs, the mesh \(8,\) needs 8"):
        target_mesh("h100", (8,), ("cp",), topology=(1, 2, 8))


def test_pools_across_hosts_compile() -> None:
    spec = spec_of()
    mesh = target_mesh("h100", (2, 2, 2), AXES, topology=(1, 2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hlo = loss_and_gradients(spec, mesh).lower(*arguments(spec, mesh)).compile().as_text()
    assert kernel_calls(hlo) == 3 * spec.waves


def test_the_flax_layer_hands_launch_parameters_on() -> None:
    spec, mesh = spec_of(), target_mesh("h100", (2, 2, 2), AXES)
    fn = libra_jax.attention_fn(spec, mesh, launches={"forward": Launch(96, 64, 4, 2)})
    assert hash(fn) == hash(libra_jax.attention_fn(spec, mesh, launches={"forward": Launch(96, 64, 4, 2)}))
    q, k, v, plans = arguments(spec, mesh)
    with pytest.raises(ValueError, match=r"rows \(96\) must be a power of two"):
        jax.eval_shape(fn.attend, q, k, v, plans)
