"""What always holds of `libra_attention`, each on small meshes of CPU devices and against the float64 oracle: the
invariants of the design, by number where they concern the operator."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from operator_base import (
    POLICIES,
    Inputs,
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
    random_lengths,
    run,
    same_bits,
    skewed_lengths,
)

import libra_jax
from libra_jax.attention import LSE_NAME, OUT_NAME
from libra_jax.spec import PoolSpec
from libra_jax.tables import PlanTables

S = 64
ROOMY = 16.0
"""A capacity that any assignment fits, so that no policy falls back."""


def make_spec(dp, cp, heads=8, kv_heads=2, **others) -> PoolSpec:
    fields = {"seq_len": S, "head_dim": 8, "block": 8, "capacity": ROOMY, "dtype": "float32"} | others
    return PoolSpec(pool_size=dp, cp=cp, num_heads=heads, num_kv_heads=kv_heads, **fields)


# (pools, dp, cp), query heads, kv heads: fewer kv heads than cp, as many, more; and groups of 4 in an odd number.
LAYOUTS = [
    ((1, 2, 4), 8, 2),
    ((1, 2, 4), 4, 4),
    ((2, 2, 2), 28, 7),
    ((2, 2, 2), 4, 1),
    ((4, 2, 1), 4, 2),
    ((1, 8, 1), 2, 1),
    ((1, 1, 8), 8, 2),
    ((1, 1, 8), 9, 9),
]


def layout_id(layout) -> str:
    mesh, heads, kv_heads = layout
    return f"{'x'.join(map(str, mesh))}-{heads}/{kv_heads}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_1_3_4_any_assignment_gives_the_oracles_result_and_the_same_bits(layout):
    """Every plan, among them a random one, finds what it needs; output and dq do not depend on it, bit for bit."""
    (pools, dp, cp), heads, kv_heads = layout
    spec, mesh, rng = make_spec(dp, cp, heads, kv_heads), make_mesh(pools, dp, cp), np.random.default_rng(heads)
    lengths = skewed_lengths(rng, pools * dp, S)
    inputs = random_inputs(rng, pools * dp, spec)
    want = expected(inputs, lengths, spec)
    results = [run(inputs, make_plans(lengths, spec, policy), spec, mesh) for policy in POLICIES.values()]
    for result in results:
        assert_close(result, want)
        assert_padding_zero(result, lengths, S)
        assert same_bits(result.out, results[0].out)
        assert same_bits(result.dq, results[0].dq)


def plain_jax(inputs: Inputs, lengths) -> list[np.ndarray]:
    """Output and gradients of jax.nn.dot_product_attention with a dense mask, in the inputs' own precision."""
    mask = jnp.asarray(oracle.visibility(oracle.segments(lengths, S))[:, None])
    with jax.numpy_dtype_promotion("standard"):  # jax's own function mixes its input type with float32
        out, pull = jax.vjp(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask), *inputs[:3])
        return [np.asarray(x) for x in (out, *pull(inputs.cotangent))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_4_low_precision_errs_at_most_twice_as_much_as_plain_jax(dtype):
    spec, mesh, rng = make_spec(2, 4, dtype=dtype), make_mesh(1, 2, 4), np.random.default_rng(1)
    lengths = [[40, 24], [5, 1, 33, 25]]
    inputs = random_inputs(rng, 2, spec)
    want, plain = expected(inputs, lengths, spec), plain_jax(inputs, lengths)
    bits = []
    for policy in POLICIES.values():
        result = run(inputs, make_plans(lengths, spec, policy), spec, mesh)
        for name, got, usual, truth in zip(result._fields, result, plain, want, strict=True):
            assert got.dtype == jnp.dtype(dtype)
            error, allowed = (np.abs(x.astype(np.float64) - truth).mean() for x in (got, usual))
            assert error <= 2 * allowed, f"{name}: mean error {error:.2e}, plain JAX {allowed:.2e}"
            error, allowed = (np.abs(x.astype(np.float64) - truth).max() for x in (got, usual))
            assert error <= 2 * allowed, f"{name}: error {error:.2e}, plain JAX {allowed:.2e}"
        bits.append(result)
    assert all(same_bits(r.out, bits[0].out) and same_bits(r.dq, bits[0].dq) for r in bits)


def test_3_transports_and_waves_give_the_same_bits():
    mesh, lengths = make_mesh(1, 2, 4), [[64], [9, 30, 12]]
    results = []
    for waves, transport in ((2, None), (1, "all_to_all"), (3, "all_to_all"), (3, "ppermute"), (2, "ppermute")):
        spec = make_spec(2, 4, waves=waves)
        inputs = random_inputs(np.random.default_rng(3), 2, spec)
        plans = make_plans(lengths, spec, POLICIES["random"])
        results.append(run(inputs, plans, spec, mesh, **({"transport": transport} if transport else {})))
        assert_close(results[-1], expected(inputs, lengths, spec))
        pooled = run(inputs, make_plans(lengths, spec), spec, mesh, **({"transport": transport} if transport else {}))
        results.append(pooled)
    for result in results[1:]:
        assert same_bits(result.out, results[0].out)
        assert same_bits(result.dq, results[0].dq)
    # One plan, two transports: everything is the same, dk and dv too.
    by_all_to_all, by_ppermute = results[4], results[6]
    assert all(same_bits(a, b) for a, b in zip(by_all_to_all, by_ppermute, strict=True))


def test_3_6_pool_size_and_context_parallelism_change_no_bit_and_not_the_loss():
    rng = np.random.default_rng(4)
    lengths = skewed_lengths(rng, 4, S)
    outs, losses = [], []
    for pools, dp, cp in ((2, 2, 2), (1, 4, 2), (4, 1, 2), (4, 1, 1)):
        spec = make_spec(dp, cp)
        inputs = random_inputs(np.random.default_rng(5), 4, spec)
        result = run(inputs, make_plans(lengths, spec), spec, make_mesh(pools, dp, cp))
        outs.append(result)
        losses.append(float((result.out.astype(np.float64) * inputs.cotangent).sum()))
    assert all(same_bits(r.out, outs[0].out) and same_bits(r.dq, outs[0].dq) for r in outs)
    assert len(set(losses)) == 1
    for other in outs[1:]:
        np.testing.assert_allclose(other.dk, outs[0].dk, atol=1e-5)
        np.testing.assert_allclose(other.dv, outs[0].dv, atol=1e-5)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_3_axis_types_of_the_mesh_do_not_matter(explicit):
    spec, rng = make_spec(2, 2), np.random.default_rng(6)
    lengths = skewed_lengths(rng, 4, S)
    inputs = random_inputs(rng, 4, spec)
    result = run(inputs, make_plans(lengths, spec), spec, make_mesh(2, 2, 2, explicit))
    assert_close(result, expected(inputs, lengths, spec))
    if explicit:
        assert same_bits(result.out, run(inputs, make_plans(lengths, spec), spec, make_mesh(2, 2, 2)).out)


def test_4_run_to_run_the_same_bits():
    spec, mesh, rng = make_spec(2, 4), make_mesh(1, 2, 4), np.random.default_rng(7)
    lengths = skewed_lengths(rng, 2, S)
    inputs = random_inputs(rng, 2, spec)
    first = run(inputs, make_plans(lengths, spec), spec, mesh)
    for _ in range(3):
        again = run(inputs, make_plans(lengths, spec), spec, mesh)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"window": 1}, {}),
        ({"window": 11}, {}),
        ({"window": S}, {}),
        ({}, {"soft_cap": 1.5}),
        ({"v_head_dim": 12}, {"scale": 0.3}),
        ({"window": 20, "v_head_dim": 4}, {"soft_cap": 4.0, "scale": 1.0}),
    ],
    ids=str,
)
def test_4_window_soft_cap_scale_and_value_width(fields, options):
    spec, mesh, rng = make_spec(2, 2, 4, 2, **fields), make_mesh(1, 2, 2), np.random.default_rng(8)
    lengths = [[64], [17, 1, 30]]
    inputs = random_inputs(rng, 2, spec)
    for name in ("pooled", "random"):
        result = run(inputs, make_plans(lengths, spec, POLICIES[name]), spec, mesh, **options)
        assert result.out.shape[-1] == spec.value_dim
        assert_close(result, expected(inputs, lengths, spec, **options))
        assert_padding_zero(result, lengths, S)


def test_4_the_reference_implementation_agrees():
    spec, mesh, rng = make_spec(2, 2, 4, 2), make_mesh(1, 2, 2), np.random.default_rng(9)
    lengths = [[64], [17, 1, 30]]
    inputs = random_inputs(rng, 2, spec)
    result = run(inputs, make_plans(lengths, spec, POLICIES["random"]), spec, mesh, implementation="reference")
    assert_close(result, expected(inputs, lengths, spec))


@pytest.mark.parametrize("layout", [((2, 2, 2), 8, 2), ((4, 2, 1), 4, 2), ((2, 1, 4), 4, 4)], ids=layout_id)
@pytest.mark.parametrize("transport", ["all_to_all", "ppermute"])
def test_2_collectives_stay_inside_the_pool(layout, transport):
    (pools, dp, cp), heads, kv_heads = layout
    spec, mesh = make_spec(dp, cp, heads, kv_heads), make_mesh(pools, dp, cp)
    rng = np.random.default_rng(10)
    inputs = random_inputs(rng, pools * dp, spec)
    plans = make_plans(skewed_lengths(rng, pools * dp, S), spec)
    step = forward_and_backward(spec, mesh, transport=transport)
    lines = collectives(step.lower(*on_mesh(inputs, plans, mesh)).compile().as_text())
    groups = [group for line in lines for group in groups_of(line)]
    size = spec.ranks
    members = [set(range(pool * size, (pool + 1) * size)) for pool in range(pools)]
    assert groups, "the program exchanges nothing"
    assert all(any(group <= pool for pool in members) for group in groups), groups
    if transport == "all_to_all":
        # One packed collective for each direction: dispatch and return, forward and backward.
        assert len(lines) == 4 * spec.exchanges, lines


@pytest.mark.parametrize("axis", ["first", "last"])
def test_2_other_axes_of_the_mesh_take_no_part(axis):
    """An axis for tensors or stages beside ours: the same results, and nothing is exchanged or summed over it."""
    names, sizes = ("pool", "dp", "cp"), (1, 2, 2)
    names, sizes = (("other", *names), (2, *sizes)) if axis == "first" else ((*names, "other"), (*sizes, 2))
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * 4)
    spec, rng, lengths = make_spec(2, 2, 4, 2), np.random.default_rng(16), [[64], [17, 1, 30]]
    inputs = random_inputs(rng, 2, spec)
    plans = make_plans(lengths, spec)
    compiled = forward_and_backward(spec, mesh).lower(*on_mesh(inputs, plans, mesh)).compile()
    result = Result(*(np.asarray(x) for x in compiled(*on_mesh(inputs, plans, mesh))))
    assert_close(result, expected(inputs, lengths, spec))
    pools = [{0, 1, 2, 3}, {4, 5, 6, 7}] if axis == "first" else [{0, 2, 4, 6}, {1, 3, 5, 7}]
    groups = [group for line in collectives(compiled.as_text()) for group in groups_of(line)]
    assert groups and all(any(group <= pool for pool in pools) for group in groups), groups


def test_5_one_compilation_serves_all_batches():
    spec, mesh, rng = make_spec(2, 4), make_mesh(1, 2, 4), np.random.default_rng(11)
    step, compiled = forward_and_backward(spec, mesh), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    batches = [[random_lengths(rng, S) for _ in range(2)] for _ in range(6)] + [[[S], []], [[], []], [[1] * S, [1]]]
    for number, lengths in enumerate(batches):
        inputs = random_inputs(rng, 2, spec)
        policy = list(POLICIES.values())[number % len(POLICIES)]
        arguments = on_mesh(inputs, make_plans(lengths, spec, policy), mesh)
        jax.block_until_ready(arguments)
        before = len(compiled)
        with jax.set_mesh(mesh):
            result = step(*arguments)
        jax.block_until_ready(result)
        assert number == 0 or len(compiled) == before, f"batch {number} compiled again"
        want = expected(inputs, lengths, spec).out
        np.testing.assert_allclose(np.asarray(result[0]), want, atol=2e-5)


PADDING_CASES = {
    "tail": [[37], [20, 30]],
    "whole ranks": [[9], [64]],
    "whole sequence": [[], [40, 24]],
    "whole pool": [[], []],
    "one token": [[1], [1]],
}


@pytest.mark.parametrize("lengths", PADDING_CASES.values(), ids=PADDING_CASES)
def test_7_non_finite_padding_reaches_nothing(lengths):
    spec, mesh, rng = make_spec(2, 4), make_mesh(1, 2, 4), np.random.default_rng(12)
    inputs = random_inputs(rng, 2, spec)
    want = expected(inputs, lengths, spec)
    padding = oracle.segments(lengths, S) == 0
    for array, value in zip(inputs, (np.nan, np.inf, np.nan, -np.inf), strict=True):
        array[padding] = value
    for policy in POLICIES.values():
        result = run(inputs, make_plans(lengths, spec, policy), spec, mesh)
        assert_close(result, want)
        assert_padding_zero(result, lengths, S)


def test_8_changing_one_document_changes_no_bit_of_another():
    spec, mesh, rng = make_spec(2, 4), make_mesh(1, 2, 4), np.random.default_rng(13)
    lengths = [[13, 20, 27], [30, 4, 30]]
    inputs = random_inputs(rng, 2, spec)
    ids = oracle.segments(lengths, S)
    plans = make_plans(lengths, spec, POLICIES["random"])
    before = run(inputs, plans, spec, mesh)
    for sequence, document in ((0, 1), (0, 2), (1, 3)):
        changed = Inputs(*(x.copy() for x in inputs))
        mine = np.zeros(ids.shape, bool)
        mine[sequence] = ids[sequence] == document
        for array in changed:
            array[mine] = rng.standard_normal(array[mine].shape) * 50
        after = run(changed, plans, spec, mesh)
        assert same_bits(after.out[~mine], before.out[~mine]) and not same_bits(after.out[mine], before.out[mine])
        for name in ("dq", "dk", "dv"):
            assert np.array_equal(getattr(after, name)[~mine], getattr(before, name)[~mine]), name


def test_5_a_call_outside_of_jit_is_one_program_too():
    spec, mesh, rng, lengths = make_spec(2, 2, 4, 2), make_mesh(1, 2, 2), np.random.default_rng(17), [[64], [17, 1, 30]]
    inputs = random_inputs(rng, 2, spec)
    for policy in POLICIES.values():
        plans = make_plans(lengths, spec, policy)
        out = libra_jax.libra_attention(*inputs[:3], plans, spec=spec, mesh=mesh)
        np.testing.assert_allclose(out, expected(inputs, lengths, spec).out, atol=2e-5)


document_lengths = st.lists(st.integers(1, S), max_size=12).map(
    lambda lengths: [n for n, total in zip(lengths, np.cumsum(lengths), strict=True) if total <= S]
)


@settings(max_examples=25, deadline=None)
@given(st.tuples(document_lengths, document_lengths), st.sampled_from(sorted(POLICIES)), st.integers(0, 2**32 - 1))
def test_9_any_lengths(lengths, policy, seed):
    spec, mesh = make_spec(2, 4), make_mesh(1, 2, 4)
    inputs = random_inputs(np.random.default_rng(seed), 2, spec)
    result = run(inputs, make_plans(lengths, spec, POLICIES[policy]), spec, mesh)
    assert_close(result, expected(inputs, lengths, spec))
    assert_padding_zero(result, lengths, S)


def test_9_a_plan_that_does_not_fit_runs_as_head_parallel():
    spec = dataclasses.replace(make_spec(2, 4), capacity=None)
    tight = dataclasses.replace(spec, capacity=libra_jax.spec.head_parallel_capacity(spec))
    lengths, mesh = [[64], [3] * 20], make_mesh(1, 2, 4)
    plan = libra_jax.plan_pool(lengths, tight, policy=POLICIES["random"])
    assert plan.stats.fallback is not None
    inputs = random_inputs(np.random.default_rng(14), 2, tight)
    assert_close(run(inputs, libra_jax.stack_plans([plan]), tight, mesh), expected(inputs, lengths, tight))


# Inside a model: checkpointed layers, scanned layers.


def stack_of_layers(weights, x, attend, policy):
    """Three residual layers scanned over stacked weights (layers, features, heads + 2 kv heads, width)."""

    def layer(x, w):
        heads = jnp.einsum("nsf,fhd->nshd", x, w)
        q, k, v = heads[:, :, :8], heads[:, :, 8:10], heads[:, :, 10:]
        return x + attend(q, k, v).reshape(x.shape), None

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
    return jax.lax.scan(layer, x, weights)[0]


CHECKPOINTS = {
    "no checkpoint": None,
    "recompute all": jax.checkpoint_policies.nothing_saveable,
    "keep output and log-sum-exp": jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME),
}


def test_scan_and_checkpoint_over_layers():
    spec, mesh, rng = make_spec(2, 2, waves=1), make_mesh(2, 2, 2), np.random.default_rng(15)
    lengths = skewed_lengths(rng, 4, S)
    plans = make_plans(lengths, spec)
    visible = jnp.asarray(oracle.visibility(oracle.segments(lengths, S))[:, None])
    real = jnp.asarray(oracle.segments(lengths, S) > 0)[:, :, None, None]
    x = rng.standard_normal((4, S, 64)).astype(np.float32)
    weights = (rng.standard_normal((3, 64, 12, 8)) * 0.1).astype(np.float32)

    def dense(q, k, v):
        return jnp.where(real, jax.nn.dot_product_attention(q, k, v, mask=visible), 0)

    def loss(weights, x, plans, policy, pooled):
        def attend(q, k, v):
            return libra_jax.libra_attention(q, k, v, plans, spec=spec, mesh=mesh) if pooled else dense(q, k, v)

        return jnp.mean(stack_of_layers(weights, x, attend, policy) ** 2)

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=(3, 4))
    want = gradients(weights, x, plans, None, False)
    exchanges = {}
    for name, policy in CHECKPOINTS.items():
        compiled = gradients.lower(weights, x, plans, policy, True).compile()
        got = compiled(weights, x, plans)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, atol=1e-5 * float(jnp.abs(w).max()), rtol=1e-4, err_msg=name)
        exchanges[name] = len(collectives(compiled.as_text()))
    assert exchanges["no checkpoint"] == exchanges["keep output and log-sum-exp"] < exchanges["recompute all"], (
        exchanges
    )


# 10: what does not belong together is refused before anything runs, with both sides named.

SPEC = make_spec(2, 4)
LENGTHS = [[40, 24], [64]]


def attend(spec=SPEC, mesh=(1, 2, 4), plans=None, inputs=None, **options):
    inputs = random_inputs(np.random.default_rng(0), 2, SPEC) if inputs is None else inputs
    plans = make_plans(LENGTHS, SPEC) if plans is None else plans
    return libra_jax.libra_attention(*inputs[:3], plans, spec=spec, mesh=make_mesh(*mesh), **options)


def test_10_a_plan_of_another_spec():
    other = dataclasses.replace(SPEC, waves=3)
    with pytest.raises(ValueError, match=r"(?s)waves=3.*waves=2|waves=2.*waves=3|waves.*3.*2|waves.*2.*3"):
        attend(plans=make_plans(LENGTHS, other))


def test_10_a_mesh_of_another_shape():
    with pytest.raises(ValueError, match=r"(?s)dp.*\b4\b.*pool_size.*\b2\b"):
        attend(mesh=(1, 4, 2))
    with pytest.raises(ValueError, match=r"(?s)cp.*\b1\b.*cp.*\b4\b"):
        attend(mesh=(1, 2, 1))
    with pytest.raises(ValueError, match=r"data.*pool"):
        data_mesh = jax.make_mesh((8,), ("data",))
        libra_jax.libra_attention(
            *random_inputs(np.random.default_rng(0), 2, SPEC)[:3], make_plans(LENGTHS, SPEC), spec=SPEC, mesh=data_mesh
        )


def test_10_another_number_of_pools_or_sequences():
    small = make_spec(2, 2)
    inputs = random_inputs(np.random.default_rng(0), 4, small)
    with pytest.raises(ValueError, match=r"\(1, 2, 2, .*2 pools.*\(2, 2, 2, "):
        attend(small, (2, 2, 2), make_plans(LENGTHS, small), inputs)
    with pytest.raises(ValueError, match=r"\(2, 64.*\(4, 64"):
        attend(small, (2, 2, 2), make_plans(LENGTHS * 2, small), Inputs(*(x[:2] for x in inputs)))


def test_10_arrays_of_another_shape_or_type():
    inputs = random_inputs(np.random.default_rng(0), 2, SPEC)
    with pytest.raises(ValueError, match=r"k has shape \(2, 64, 1, 8\).*\(2, 64, 2, 8\)"):
        attend(inputs=inputs._replace(k=inputs.k[:, :, :1]))
    with pytest.raises(ValueError, match=r"q has shape \(2, 64, 8\)"):
        attend(inputs=inputs._replace(q=inputs.q[:, :, 0]))
    with pytest.raises(ValueError, match=r"float32.*bfloat16|bfloat16.*float32"):
        attend(inputs=inputs._replace(v=inputs.v.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match="int32"):
        attend(inputs=Inputs(*(x.astype(np.int32) for x in inputs)))


def test_10_options_that_mean_nothing():
    with pytest.raises(ValueError, match=r"implementation.*'cuda'.*xla"):
        attend(implementation="cuda")
    with pytest.raises(ValueError, match=r"transport.*'carrier pigeon'.*all_to_all"):
        attend(transport="carrier pigeon")
    with pytest.raises(ValueError, match=r"soft_cap.*0"):
        attend(soft_cap=0.0)
    with pytest.raises(TypeError, match="stack_plans"):
        attend(plans=libra_jax.plan_pool(LENGTHS, SPEC))


def test_10_a_plan_for_other_documents():
    plans = make_plans(LENGTHS, SPEC)
    libra_jax.check_batch(plans, oracle.segments(LENGTHS, S))
    with pytest.raises(ValueError, match=r"sequence 0, token 39"):
        libra_jax.check_batch(plans, oracle.segments([[39, 25], [64]], S))


@pytest.mark.parametrize("name", PlanTables.table_names())
def test_10_a_table_of_another_shape_or_type(name):
    plans = make_plans(LENGTHS, SPEC)
    table = getattr(plans, name)
    for wrong in (table[..., :-1], np.concatenate([table, table]), table.astype(np.float32), None):
        with pytest.raises(ValueError, match=rf"table {name} is .*int32"):
            attend(plans=dataclasses.replace(plans, **{name: wrong}))


def test_10_what_is_no_plan_and_no_mesh():
    with pytest.raises(TypeError, match="stack_plans"):
        attend(plans=libra_jax.plan_pool(LENGTHS, SPEC))
    with pytest.raises(TypeError, match="mesh must be"):
        inputs = random_inputs(np.random.default_rng(0), 2, SPEC)
        libra_jax.libra_attention(*inputs[:3], make_plans(LENGTHS, SPEC), spec=SPEC, mesh=None)


def test_10_mesh_axes_of_two_types():
    kinds = (AxisType.Explicit, AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((1, 2, 4), ("pool", "dp", "cp"), axis_types=kinds)
    inputs = random_inputs(np.random.default_rng(0), 2, SPEC)
    with pytest.raises(ValueError, match=r"one type.*Explicit.*Auto"):
        libra_jax.libra_attention(*inputs[:3], make_plans(LENGTHS, SPEC), spec=SPEC, mesh=mesh)


def test_4_second_derivatives_and_forward_mode_are_refused():
    """Rows travel as integers, so these would be wrong without a word as soon as anything travels."""
    inputs = random_inputs(np.random.default_rng(0), 2, SPEC)

    def loss(q):
        return jnp.sum(attend(inputs=inputs._replace(q=q)) ** 2)

    q = jnp.asarray(inputs.q)
    for second in (
        lambda: jax.jvp(jax.grad(loss), (q,), (q,)),
        lambda: jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2))(q),
        lambda: jax.hessian(loss)(q),
    ):
        with pytest.raises(TypeError, match="first derivatives"):
            jax.eval_shape(second)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (q,), (q,))
