"""Rung 2 for the whole operator: `libra_attention` on CPU devices, the Triton kernels run by Triton's interpreter in
place of a GPU. Everything between a plan and a kernel's arguments is the product's own; only the launch is replaced."""

import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import operator_base as base
import pytest
from libra_kernels import launch, triton, triton_kernels
from triton_interpreter import Interpreter, Launch

import libra_jax

KERNELS = launch.__file__.replace("launch.py", "triton_kernels.py")
LENGTHS = [[256], [3] * 85, [200, 1, 30], [70, 100]]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Puts the interpreter where jax-triton would launch, and takes CPU devices for H100s."""
    interpreter, alone = Interpreter(KERNELS), threading.Lock()

    def call(which, q, v, options, inputs, results, rows):
        chosen = triton._launch(which, options, q, v)
        _, block, group, head_dim = q.shape
        tiles = block // chosen.keys if which == "dkv" else block * group // chosen.rows
        names = getattr(triton_kernels, f"{which}_kernel").arg_names[: len(inputs) + len(results)]
        constants = launch.constants(
            chosen, block=block, group=group, head_dim=head_dim, v_head_dim=v.shape[-1], scale=options.scale,
            soft_cap=options.soft_cap,
        )  # fmt: skip

        def run(*arrays):
            given = {name: np.array(array, order="C") for name, array in zip(names, arrays, strict=True)}
            with alone:  # devices call back from threads of their own
                done = interpreter.run(
                    Launch(f"{which}_kernel", rows * tiles, given, tuple(names[len(inputs) :]), constants)
                )
            return tuple(done.arrays[name] for name in names[len(inputs) :])

        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
        return jax.pure_callback(run, shapes, *inputs, *results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_call", call)
        patch.setattr(triton, "compute_capability_of", lambda device: 90)
        patch.setattr("libra_jax.attention.compute_capability_of", lambda device: 90)
        yield
    interpreter.close()
    base.forward_and_backward.cache_clear()


def spec_of(**changes) -> libra_jax.PoolSpec:
    fields = {
        "seq_len": 256, "pool_size": 2, "cp": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block": 64,
        "dtype": "bfloat16",
    }  # fmt: skip
    return libra_jax.PoolSpec(**{**fields, **changes})


def run(spec: libra_jax.PoolSpec, policy: str = "pooled", lengths=LENGTHS, **options) -> base.Result:
    mesh = base.make_mesh(len(lengths) // spec.pool_size, spec.pool_size, spec.cp)
    inputs = base.random_inputs(np.random.default_rng(7), len(lengths), spec)
    plans = base.make_plans(lengths, spec, base.POLICIES[policy])
    return base.run(inputs, plans, spec, mesh, implementation="triton", **options)


@pytest.mark.parametrize("changes", [{}, {"window": 90, "dtype": "float16"}])
def test_output_and_gradients_are_the_oracles(interpreted: None, changes: dict) -> None:
    spec = spec_of(**changes)
    result = run(spec)
    inputs = base.random_inputs(np.random.default_rng(7), 4, spec)
    rounding = float(jnp.finfo(spec.dtype).eps)
    base.assert_close(result, base.expected(inputs, LENGTHS, spec), tolerance=2 * rounding)
    base.assert_padding_zero(result, LENGTHS, spec.seq_len)


@pytest.mark.parametrize(
    ("changes", "policy", "options"),
    [
        ({}, "random", {}),
        ({"waves": 1}, "pooled", {}),
        ({"waves": 3}, "random", {"transport": "ppermute"}),
        ({"pool_size": 4, "cp": 1}, "pooled", {}),
        ({"pool_size": 1, "cp": 1}, "at_home", {}),
    ],
)
def test_the_same_bits_for_every_plan_and_mesh(interpreted: None, changes: dict, policy: str, options: dict) -> None:
    first, other = run(spec_of()), run(spec_of(capacity=4, **changes), policy, **options)
    assert base.same_bits(first.out, other.out)
    assert base.same_bits(first.dq, other.dq)
    for name in ("dk", "dv"):
        a, b = (getattr(result, name).astype(np.float64) for result in (first, other))
        assert np.abs(a - b).max() <= 2**-7 * np.abs(a).max()


def test_gradients_of_keys_have_the_same_bits_run_to_run(interpreted: None) -> None:
    first, again = run(spec_of()), run(spec_of())
    assert base.same_bits(first.dk, again.dk) and base.same_bits(first.dv, again.dv)
