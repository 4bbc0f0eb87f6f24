"""Twenty steps of one small model, in every way that devices can share it: one loss curve, but for rounding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from train_base import TINY_MOE, pack

from libra_jax.data import DataConfig
from libra_jax.train.config import AttentionConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.mesh import make_mesh, place_batch
from libra_jax.train.step import compile_step, plan_state

STEPS, SEQUENCES, SEQ_LEN = 20, 8, 64

# Each on eight devices, eight sequences to a step, so many micro-steps as that takes.
LAYOUTS = {
    "plain data parallelism": MeshConfig(8, 1, 1),
    "context parallelism": MeshConfig(2, 1, 4),
    "pools": MeshConfig(2, 2, 2),
    "one pool": MeshConfig(1, 8, 1),
    "tensor parallelism": MeshConfig(4, 1, 1, tp=2),
    "pipeline": MeshConfig(4, 1, 1, pp=2),
    "pools, gpipe": MeshConfig(1, 2, 2, pp=2, schedule="gpipe"),
    "experts spread over pools": MeshConfig(2, 2, 2),
    "experts spread over pools, tensor parallelism, pipeline": MeshConfig(1, 2, 1, tp=2, pp=2),
}


@functools.cache
def curve(layout: str) -> np.ndarray:
    """(STEPS, 2): loss and gradient norm."""
    mesh_of, model = LAYOUTS[layout], TINY_MOE
    if "spread" in layout:
        assert model.moe is not None
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, experts="spread"))
    config = TrainConfig(
        model=model,
        data=DataConfig(paths=("none",)),
        mesh=mesh_of,
        attention=AttentionConfig(block=8),
        # AdamW divides a gradient by its own size; without this eps one that is rounding alone moves as far as any.
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=4, eps=1e-3),
        seq_len=SEQ_LEN,
        micro_steps=SEQUENCES // mesh_of.sequences,
        steps=STEPS,
    )
    mesh, rng = make_mesh(mesh_of), np.random.default_rng(0)
    blueprint = plan_state(config, mesh)
    state, program, found = blueprint.init(), None, []
    for _ in range(STEPS):
        lengths = [packed(rng) for _ in range(SEQUENCES)]
        tokens = np.minimum(rng.geometric(0.1, (SEQUENCES, SEQ_LEN)), model.vocab_size) - 1
        batch = pack(lengths, tokens, config.spec, config.micro_steps)
        if program is None:
            program = compile_step(config, mesh, blueprint, batch.arrays, batch.plans)
        state, numbers = program(state, *place_batch(mesh, batch.arrays, batch.plans))
        found.append([float(numbers["loss"]), float(numbers["grad_norm"])])
    return np.array(found)


def packed(rng: np.random.Generator) -> list[int]:
    """Document lengths of one sequence: one that fills it, or short ones and padding."""
    lengths: list[int] = []
    while (length := int(rng.choice([64, 40, 17, 5, 2]))) + sum(lengths) <= SEQ_LEN:
        lengths.append(length)
    return lengths


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_every_layout_has_the_curve_of_plain_data_parallelism(layout: str) -> None:
    plain = curve("plain data parallelism")
    assert plain[-1, 0] < plain[0, 0] - 0.3, "it learns"
    np.testing.assert_allclose(curve(layout), plain, rtol=2e-4)
    assert jax.device_count() == LAYOUTS[layout].devices
