"""Schedules, what decays, and updates that are left out because something was not finite."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_base import TINY, TINY_MOE, pack

from libra_jax.data import DataConfig
from libra_jax.train.config import AttentionConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.mesh import batch_shardings, make_mesh
from libra_jax.train.optimizer import decays, learning_rate, make_optimizer, nothing_skipped, update_state
from libra_jax.train.step import compile_step, plan_state


def rates(steps: int, **fields: Any) -> np.ndarray:
    schedule = learning_rate(OptimizerConfig(**fields), steps)
    return np.array([float(schedule(count)) for count in range(steps)])


def test_learning_rate_warms_up_from_the_first_step_and_falls_to_its_final_share() -> None:
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=4, decay_steps=20, final_share=0.1)
    rates = [float(learning_rate(config, 1000)(count)) for count in range(30)]
    np.testing.assert_allclose(rates[:4], [0.125, 0.25, 0.375, 0.5], rtol=1e-6)
    assert rates[3] > rates[4] > rates[18] and rates[11] == pytest.approx(0.5 * 0.55, rel=1e-5)
    np.testing.assert_allclose(rates[19:], 0.05, rtol=1e-6)
    with pytest.raises(ValueError, match=r"warmup_steps \(100\) must be below .* \(60: steps\)"):
        learning_rate(OptimizerConfig(warmup_steps=100), 60)


def test_wsd_is_stable_after_the_warm_up_and_decays_at_the_end() -> None:
    fields = {"learning_rate": 0.5, "warmup_steps": 4, "schedule": "wsd", "decay_share": 0.25, "final_share": 0.1}
    for shape, falls in {
        # Update 16 of 20 is the last at the peak; then four, at shares 1/4, 2/4, 3/4 and 1 of the way.
        "1-sqrt": [0.5 - 0.45 * root for root in (0.447214, 0.632456, 0.774597, 0.894427, 1.0)],
        "linear": [0.5 - 0.45 * part for part in (0.2, 0.4, 0.6, 0.8, 1.0)],
    }.items():
        found = rates(20, decay_shape=shape, **fields)
        np.testing.assert_allclose(found[:4], [0.125, 0.25, 0.375, 0.5], rtol=1e-6)
        np.testing.assert_allclose(found[3:15], 0.5, rtol=1e-6)
        np.testing.assert_allclose(found[15:], falls, rtol=1e-5)
    # Where it ends does not depend on the run's length if the config says it, and the rate stays from there on.
    longer = rates(30, decay_steps=20, **fields)
    np.testing.assert_allclose(longer[:20], rates(20, **fields), rtol=1e-6)
    np.testing.assert_allclose(longer[20:], 0.05, rtol=1e-6)


def test_without_warm_up_both_schedules_begin_at_their_peak() -> None:
    found = rates(8, learning_rate=1.0, warmup_steps=0, schedule="wsd", decay_share=0.5, final_share=0.0)
    np.testing.assert_allclose(found[:4], 1.0)
    cosine = rates(8, learning_rate=1.0, warmup_steps=0, final_share=0.0)
    np.testing.assert_allclose(cosine, 0.5 + 0.5 * np.cos(np.pi * np.arange(1, 9) / 8), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": 60}, r"warmup_steps \(60\) must be below the step at which the schedule ends \(60: steps\)"),
        (
            {"warmup_steps": 50, "schedule": "wsd", "decay_share": 0.5},
            r"warmup_steps \(50\) must end before the decay begins, at 30: the last 50% .* of 60 \(steps\)",
        ),
        ({"schedule": "line"}, r"optimizer.schedule \('line'\) must be one of"),
        ({"decay_share": 1.5}, r"optimizer.decay_share \(1.5\) must be between 0 and 1"),
        ({"stop_after_skipped": 0}, r"optimizer.stop_after_skipped \(0\) must be at least 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(OptimizerConfig(**fields), 60)


def config_of(**changes: Any) -> TrainConfig:
    fields = {
        "model": dataclasses.replace(TINY, num_layers=1),
        "data": DataConfig(paths=("text",)),
        "mesh": MeshConfig(1, 2, 2),
        "attention": AttentionConfig(block=8),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        "seq_len": 32,
        "micro_steps": 2,
        "steps": 6,
    }
    return TrainConfig(**fields | changes)


def test_matrices_of_the_layers_decay_and_nothing_else() -> None:
    """A router and experts, and tables that are not tied."""
    mesh = make_mesh(MeshConfig(1, 2, 2), jax.devices()[:4])
    shapes = plan_state(config_of(model=TINY_MOE), mesh).shapes["params"]
    marked = {jax.tree_util.keystr(path): mark for path, mark in jax.tree.leaves_with_path(decays(shapes))}
    moved = {name for name, mark in marked.items() if mark}
    ends = ["q_proj']['kernel']", "k_proj']['kernel']", "v_proj']['kernel']", "o_proj']['kernel']"]
    ends += ["router']['kernel']", "mlp']['gate']", "mlp']['up']", "mlp']['down']"]
    assert len(moved) == len(ends) and all(any(name.endswith(end) for name in moved) for end in ends)
    left = {name for name, mark in marked.items() if not mark}
    assert {"['embedding']", "['head']", "['norm']['scale']"} < left and len(left) == 7
    # With gradients of 0 only what decays moves: by learning rate * weight decay.
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), 10**6)
    params = {"embedding": jnp.ones(3), "layers": {"norm": {"scale": jnp.ones(3)}, "w": jnp.ones(3)}}
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    found = {jax.tree_util.keystr(path): leaf.tolist() for path, leaf in jax.tree.leaves_with_path(updates)}
    assert found.pop("['layers']['w']") == pytest.approx([-0.05] * 3)
    assert list(found.values()) == [[0.0] * 3] * 2


def test_a_step_that_is_not_finite_leaves_everything_as_it_was_but_the_counts() -> None:
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0), 100)
    params = {"layers": {"w": jnp.arange(3.0)}}
    state = {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(0), "skipped": nothing_skipped()}
    good = {"layers": {"w": jnp.array([1.0, -2.0, 3.0])}}
    bad = {"layers": {"w": jnp.array([1.0, jnp.nan, jnp.inf])}}
    counts = []
    for gradients in (good, bad, bad, good, bad):
        before = state
        finite = jnp.isfinite(gradients["layers"]["w"]).all()
        state = update_state(optimizer, state, gradients, finite)
        counts.append((int(state["skipped"]["total"]), int(state["skipped"]["in_a_row"]), int(state["step"])))
        same = [
            bool((x == y).all())
            for x, y in zip(*map(jax.tree.leaves, (state["params"], before["params"])), strict=True)
        ]
        assert all(same) == (gradients is bad)
    assert counts == [(0, 0, 1), (1, 1, 2), (2, 2, 3), (2, 0, 4), (3, 1, 5)]
    # optax, by itself, over the two gradients that were good.
    plain, moments = params, optimizer.init(params)
    for _ in range(2):
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(good, moments, plain)
        plain = optax.apply_updates(plain, updates)
    for one, other in zip(
        *map(jax.tree.leaves, ((plain, moments), (state["params"], state["optimizer"]))), strict=True
    ):
        np.testing.assert_array_equal(one, other)


POISON = 61
"""A word whose row of the embeddings is infinite."""


def test_a_run_after_a_skipped_step_equals_one_that_never_met_its_batch() -> None:
    """The word of the bad row stands in micro-step 1 of the second batch alone."""
    config = config_of(model=dataclasses.replace(TINY, num_layers=1, compute_dtype="bfloat16"))
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    blueprint = plan_state(config, mesh)
    batches = []
    for number in range(3):
        tokens = np.random.default_rng(number).integers(0, 60, (4, 32))
        if number == 1:
            tokens[3, 4] = POISON  # sequences 2 and 3 are micro-step 1
        batches.append(pack([[32], [10, 20], [5, 27], [30]], tokens, config.spec, 2))
    compiled = compile_step(config, mesh, blueprint, batches[0].arrays, batches[0].plans)

    def run(numbers: tuple[int, ...]) -> tuple[Any, list[Any]]:
        state, results = blueprint.init(), []
        table = state["params"]["embedding"]
        poisoned = jax.jit(lambda x: x.at[POISON].set(jnp.inf), out_shardings=table.sharding)(table)
        state["params"]["embedding"] = poisoned
        for number in numbers:
            batch = batches[number]
            placed = jax.device_put((batch.arrays, batch.plans), batch_shardings(mesh, batch.arrays, batch.plans))
            before = jax.tree.leaves(state)
            state, found = compiled(state, *placed)
            assert all(leaf.is_deleted() for leaf in before), "the state is donated"
            results.append(jax.device_get(found))
        return state, results

    state, results = run((0, 1, 2))
    assert [bool(np.isfinite(r["loss"])) for r in results] == [True, False, True]
    assert [int(r["skipped"]["total"]) for r in results] == [0, 1, 1]
    assert [int(r["skipped"]["in_a_row"]) for r in results] == [0, 1, 0]
    assert [r["micro_steps"]["finite"].tolist() for r in results] == [[True, True], [True, False], [True, True]]
    np.testing.assert_array_equal(np.isfinite(results[1]["micro_steps"]["loss"]), [True, False])
    for result in (results[0], results[2]):
        each = result["micro_steps"]
        assert each["targets"].sum() == result["targets"] and each["targets"].tolist() == [31 + 9 + 19, 4 + 26 + 29]
        assert each["loss"].sum() / result["targets"] == pytest.approx(float(result["loss"]), rel=1e-6)

    other, others = run((0, 2))
    assert results[2]["loss"] == others[1]["loss"] and results[2]["learning_rate"] == others[1]["learning_rate"]
    assert (int(state["step"]), int(other["step"])) == (3, 2)
    for name in ("params", "optimizer"):
        leaves = jax.tree.leaves_with_path(state[name])
        for (path, one), two in zip(leaves, jax.tree.leaves(other[name]), strict=True):
            assert one.dtype == jnp.float32 or one.dtype == jnp.int32, "weights and moments, whatever is computed in"
            np.testing.assert_array_equal(one, two, err_msg=jax.tree_util.keystr(path))
    assert nnx.merge(blueprint.graph, other["params"]).config.compute_dtype == "bfloat16"
