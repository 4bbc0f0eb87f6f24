"""The loss on documents that are never trained on: the same ones every time, in a program without gradients.

Their sequences are packed, placed and planned as those of a step are, with a seed of their own: the first so many
micro-steps of the held-out part, whatever the seed of the run.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.data import StepBatches, open_step_batches
from libra_jax.data.batches import check_step
from libra_jax.train.config import TrainConfig
from libra_jax.train.mesh import batch_shardings, local_rows, place_batch
from libra_jax.train.metrics import EvaluationRecord
from libra_jax.train.step import ARRAYS, Blueprint, model_loss_sum, step_shapes
from libra_jax.train.xla import compiler_options

_SEED = 0

LossProgram = Callable[[Any, Any, Any], dict[str, jax.Array]]
"""run(params, arrays, plans) -> {"loss" float32, "targets" int32, ...}: sums over one micro-step. arrays:
(1, sequences, seq_len), plans: tables (1, pools, dp, cp, ...), on the run's mesh."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The held-out micro-steps of a run, `count` of them, and the program that takes them."""

    mesh: Mesh
    batches: StepBatches
    count: int
    program: LossProgram

    def run(self, params: Any, step: int) -> EvaluationRecord:
        """The loss of these weights, the mean over all targets. step: how many have been done, for the record.

        Batches are made while the devices work on those before them.
        """
        begin, sums = time.perf_counter(), []
        for number in range(self.count):
            batch = self.batches[number]
            check_step(batch)
            arrays = {name: batch[name] for name in ARRAYS}
            placed = place_batch(self.mesh, arrays, batch["plans"], batch["rows"], batch["pool_numbers"])
            sums.append(self.program(params, *placed))
        found = jax.device_get(sums)
        loss, targets = (sum(float(part[name]) for part in found) for name in ("loss", "targets"))
        return EvaluationRecord(step, loss / targets, int(targets), time.perf_counter() - begin)


def open_evaluation(
    config: TrainConfig, mesh: Mesh, blueprint: Blueprint, index_folder: str | os.PathLike | None = None
) -> Evaluation:
    """Finds the held-out documents, and compiles.

    Raises ValueError where too few documents are held out to have a target, naming the share.
    """
    batches = _open_held_out(config, mesh, index_folder)
    count = min(config.evaluation.micro_steps, batches.sampler.steps_per_epoch)
    lengths = (length for number in range(count) for sizes in batches[number]["lengths"] for length in sizes)
    if not any(length > 1 for length in lengths):
        raise ValueError(f"data.held_out ({config.data.held_out}) holds no document of two tokens or more out")
    return Evaluation(mesh, batches, count, compile_loss(config, mesh, blueprint))


def _open_held_out(config: TrainConfig, mesh: Mesh, index_folder: str | os.PathLike | None) -> StepBatches:
    data = dataclasses.replace(config.data, last_step="pad")
    try:
        return open_step_batches(
            data,
            config.spec,
            config.mesh.pools,
            seed=_SEED,
            cost=config.cost,
            split="held_out",
            rows=local_rows(mesh),
            vocab_size=config.model.vocab_size,
            index_folder=index_folder,
        )
    except ValueError as error:
        raise ValueError(f"evaluation, with data.held_out ({config.data.held_out}): {error}") from error


def compile_loss(config: TrainConfig, mesh: Mesh, blueprint: Blueprint) -> LossProgram:
    """The loss of one micro-step as a compiled program. It leaves the weights where they are.

    With a pipeline every stage runs all layers, whose weights it gathers.
    """
    loss_sum = model_loss_sum(blueprint.graph)

    def run(params: Any, arrays: Any, plans: Any) -> dict[str, jax.Array]:
        return loss_sum(params, jax.tree.map(lambda x: x[0], (arrays, plans)))[1]

    shapes = step_shapes(dataclasses.replace(config, micro_steps=1))
    params = blueprint.shapes["params"]
    jitted = jax.jit(
        run,
        in_shardings=(jax.tree.map(lambda x: x.sharding, params), *batch_shardings(mesh, *shapes)),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    options = compiler_options(mesh.devices.flat[0].platform, config.xla)
    return jitted.lower(params, *shapes).compile(compiler_options=dict(options))


def describe(evaluation: Evaluation) -> list[str]:
    """What is evaluated on, in sentences."""
    sampler, asked = evaluation.batches.sampler, evaluation.count * evaluation.batches.sampler.sequences_per_step
    held = len(sampler)
    tokens = sum(int(np.sum(sizes)) for n in range(evaluation.count) for sizes in evaluation.batches[n]["lengths"])
    return [
        f"evaluation on {min(asked, held):,} of {held:,} held-out sequences, {tokens:,} tokens, in "
        f"{evaluation.count} micro-steps"
    ]
