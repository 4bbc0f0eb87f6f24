"""The step (loss, micro-steps, pools) and the run (exact resume, refusals, messages)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from train_base import FAST_LINKS, TINY, TINY_MOE, Packed, pack, tiny_spec

from libra_jax.cli import main as libra
from libra_jax.data import VOCAB_SIZE, DataConfig, open_batches
from libra_jax.models.moe import MoEConfig
from libra_jax.models.vocabulary import cross_entropy_sum
from libra_jax.train import loop
from libra_jax.train.checkpoint import Checkpoints
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.folder import hold_folder
from libra_jax.train.loop import RunStopped, train
from libra_jax.train.mesh import batch_shardings, make_mesh
from libra_jax.train.metrics import MetricsFile, StepRecord, baselines, imbalance, read_metrics
from libra_jax.train.step import (
    Program,
    compile_program,
    compile_step,
    mean_loss_and_gradients,
    plan_state,
)
from libra_jax.workload import CostModel

TWO_SIZES = MeshConfig(2, 2, 2, pool_sizes=(4,), least_saving=0.0, links=FAST_LINKS)


def config_of(pools: int, pool_size: int, cp: int, **changes: Any) -> TrainConfig:
    fields = {
        "model": dataclasses.replace(TINY, num_layers=1),
        "data": DataConfig(paths=("text",)),
        "mesh": MeshConfig(pools, pool_size, cp),
        "attention": AttentionConfig(block=8),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        "seq_len": 64,
        "steps": 6,
    }
    return TrainConfig(**fields | changes)


# The loss.


@pytest.mark.parametrize(
    ("micro_steps", "pools", "pool_size"),
    [(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1)],
    ids=["two micro-steps", "one pool", "two pools", "one pool, two micro-steps", "two pools, two micro-steps"],
)
def test_loss_is_the_mean_over_the_targets_of_the_whole_step(micro_steps: int, pools: int, pool_size: int) -> None:
    """Two sequences of 8 tokens, cp 2: losses 2, 4, 6, 8 | 10 on the ranks of one, 1 | none on those of the other."""
    sequences = pools * pool_size
    losses = np.full((micro_steps * sequences, 8), np.nan)
    losses[0, :4], losses[0, 4], losses[1, 0] = (2, 4, 6, 8), 10, 1
    has_target = ~np.isnan(losses)
    # With two words and logits (0, z), the loss of word 0 is log(1 + exp(z)).
    z = np.log(np.expm1(np.where(has_target, losses, 1.0)))
    logits = np.stack([np.zeros_like(z), z], axis=-1).astype(np.float32)
    targets = np.where(has_target, 0, -1).astype(np.int32)
    mesh = make_mesh(MeshConfig(pools, pool_size, 2), jax.devices()[: 2 * sequences])
    rows = NamedSharding(mesh, PartitionSpec(None, ("pool", "dp"), "cp"))
    batch = jax.device_put(
        (logits.reshape(micro_steps, sequences, 8, 2), targets.reshape(micro_steps, sequences, 8)), rows
    )

    def loss_sum(factor: jax.Array, micro_batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        sums = cross_entropy_sum(micro_batch[0] * factor, micro_batch[1])
        return sums.loss, {"loss": sums.loss, "targets": sums.targets}

    step = jax.jit(lambda factor, batch: mean_loss_and_gradients(loss_sum, factor, batch))
    means, gradient, each = step(jnp.float32(1), batch)
    loss = means["loss"]
    assert int(means["targets"]) == 6
    assert float(loss) == pytest.approx(31 / 6, rel=1e-6)
    assert int(each["targets"].sum()) == 6 and float(each["loss"].sum()) == pytest.approx(31, rel=1e-6)
    assert each["finite"].shape == (micro_steps,) and bool(each["finite"].all())
    by_hand = (z * np.exp(z) / (1 + np.exp(z)))[has_target].sum() / 6  # d/df log(1 + exp(f z)) at f = 1
    assert float(gradient) == pytest.approx(by_hand, rel=1e-6)

    nothing = jax.device_put((batch[0], np.full(batch[1].shape, -1, np.int32)), rows)
    means, gradient, _ = step(jnp.float32(1), nothing)
    assert (float(means["loss"]), float(gradient), int(means["targets"])) == (0.0, 0.0, 0)


def test_imbalance_is_the_time_that_micro_steps_take_over_what_even_work_would_take() -> None:
    # Two micro-steps, two pools of two ranks: 8 + 6 pages at the busiest ranks, 4 + 3 on average.
    work = np.array([[[8, 0], [4, 4]], [[1, 2], [3, 6]]])
    assert imbalance(work) == pytest.approx(14 / 7)
    assert imbalance(np.full((1, 2, 2), 5)) == 1 and imbalance(np.zeros((1, 2, 2))) == 1

    # One document over 4 blocks visits 1, 2, 3 and 4 pages; four of one block each visit one. Two kv heads.
    spec = tiny_spec(pool_size=2, cp=2, seq_len=32)
    lengths = [[32], [8, 8, 8, 8]]
    home, ulysses = (baselines(lengths, spec, 1)[name] for name in ("home", "ulysses"))
    np.testing.assert_array_equal(home, [[[2 * 3, 2 * 7, 2 * 2, 2 * 2]]])
    np.testing.assert_array_equal(ulysses, [[[10, 10, 4, 4]]])
    assert imbalance(home) == pytest.approx(14 / 7) and imbalance(ulysses) == pytest.approx(10 / 7)


# One model, one set of eight sequences, dealt out in different ways.

LENGTHS = [[64], [1, 20, 3, 9, 1, 5], [40, 24], [], [7, 7, 7], [30, 2, 31], [63], [10, 50]]


def losses_of(config: TrainConfig, steps: int = 3) -> tuple[list[float], list[float], Any]:
    """Losses and gradient norms of a few steps on `LENGTHS` with tokens that a model can learn, and the last state."""
    mesh = make_mesh(config.mesh)
    blueprint = plan_state(config, mesh)
    state, compiled = blueprint.init(), None
    losses, norms = [], []
    for step in range(steps):
        start = np.random.default_rng(step).integers(0, 60, (len(LENGTHS), 1))
        tokens = (start + np.arange(config.seq_len)) % 60
        batch: Packed = pack(LENGTHS, tokens, config.spec, config.micro_steps)
        if compiled is None:
            compiled = compile_step(config, mesh, blueprint, batch.arrays, batch.plans)
        placed = jax.device_put((batch.arrays, batch.plans), batch_shardings(mesh, batch.arrays, batch.plans))
        state, numbers = compiled(state, *placed)
        losses.append(float(numbers["loss"]))
        norms.append(float(numbers["grad_norm"]))
    return losses, norms, state


def test_loss_and_gradient_depend_neither_on_pool_size_nor_on_micro_steps() -> None:
    shapes = {
        "2x2x2, 2 micro-steps": config_of(2, 2, 2, micro_steps=2),
        "4x1x2, 2 micro-steps": config_of(4, 1, 2, micro_steps=2),
        "8x1x1, plain data parallelism": config_of(8, 1, 1),
        "2x4x1, 1 micro-step": config_of(2, 4, 1, micro_steps=1),
    }
    results = {name: losses_of(config) for name, config in shapes.items()}
    losses, norms, _ = results["2x2x2, 2 micro-steps"]
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.02) and losses[2] < losses[0]
    for name, (other_losses, other_norms, state) in results.items():
        np.testing.assert_allclose(other_losses, losses, rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(other_norms, norms, rtol=2e-5, err_msg=name)
        assert int(state["step"]) == 3


def test_experts_gathered_or_spread_give_one_curve() -> None:
    model = {
        experts: dataclasses.replace(TINY_MOE, moe=dataclasses.replace(TINY_MOE.moe, experts=experts))
        for experts in ("gathered", "spread")
    }
    shapes = {
        "gathered": config_of(2, 2, 2, micro_steps=2, model=model["gathered"]),
        "spread over 4 ranks": config_of(2, 2, 2, micro_steps=2, model=model["spread"]),
    }
    results = {name: losses_of(config) for name, config in shapes.items()}
    losses, norms, _ = results["gathered"]
    assert losses[2] < losses[0]
    for name, (other_losses, other_norms, _) in results.items():
        np.testing.assert_allclose(other_losses, losses, rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(other_norms, norms, rtol=2e-5, err_msg=name)


def test_parameters_and_optimizer_are_spread_over_all_ranks() -> None:
    config = config_of(2, 2, 2)
    blueprint = plan_state(config, make_mesh(config.mesh))
    held = total = 0
    for path, leaf in jax.tree.leaves_with_path(blueprint.shapes):
        here = math.prod(leaf.sharding.shard_shape(leaf.shape))
        total, held = total + leaf.size, held + here
        if any(n % 8 == 0 for n in leaf.shape[1:] or leaf.shape):
            assert here * 8 == leaf.size, jax.tree_util.keystr(path)
    assert total > 10_000 and held < total / 8 * 1.02


MOE_SPREAD = dataclasses.replace(TINY, moe=MoEConfig(8, 2, 16, experts="spread"))
MOE_OF_SIX = dataclasses.replace(TINY, moe=MoEConfig(6, 2, 16, experts="spread"))


def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"2 \* 4 \* 2 = 16 devices, and there are 8 \(cpu\)"):
        make_mesh(MeshConfig(2, 4, 2))
    with pytest.raises(ValueError, match=r"1 \* 2 \* 2 = 4 devices, and there are 8"):
        make_mesh(MeshConfig(1, 2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 60}, r"seq_len \(60\) must be a multiple of cp \* block \(2 \* 8 = 16\)"),
        ({"steps": 0}, r"steps \(0\) must be at least 1"),
        ({"micro_steps": 0}, r"micro_steps \(0\) must be at least 1"),
        (
            {"attention": AttentionConfig(block=8, ranks_per_node=2)},
            r"waves \(2\) must be at least 3 with ranks_per_node \(2\) in a pool of 4",
        ),
        ({"model": MOE_OF_SIX}, r"num_experts \(6\) must be a multiple of .* \(2 \* 2 = 4\)"),
        (
            {"model": MOE_SPREAD, "mesh": MeshConfig(2, 2, 2, pool_sizes=(4,))},
            r"mesh.pool_sizes \(4,\) with .*'spread'",
        ),
        (
            {"mesh": MeshConfig(2, 2, 2, pool_sizes=(4,)), "attention": AttentionConfig(block=8, ranks_per_node=4)},
            r"waves \(2\) must be at least 3 with ranks_per_node \(4\) in a pool of 8",
        ),
        ({"checkpoint": CheckpointConfig(keep_best=1)}, r"checkpoint.keep_best \(1\) goes by evaluations"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config_of(2, 2, 2), **changes)


def test_measured_prices_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    CostModel(page_seconds=1e-6).save(path)
    assert config_of(2, 2, 2).cost == CostModel()
    config = config_of(2, 2, 2, attention=AttentionConfig(block=8, cost_model=str(path)), run_dir=str(tmp_path / "run"))
    assert config.cost.page_seconds == 1e-6
    path.unlink()
    with pytest.raises(OSError, match=r"cost\.json"):
        start(config)


def test_old_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A run that was begun before pool sizes and planning were recorded goes on with its whole curve."""
    path = tmp_path / "metrics.jsonl"
    record = StepRecord(1, 2.0, 1.0, 1e-3, 10, 12, 0.5, 24.0, 1.5, 1.2, 1.01, 0)
    old = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
    assert record.pool_size is None and "pool_size" not in old
    path.write_text(json.dumps(old) + "\n")
    MetricsFile(path, 1).close()
    assert read_metrics(path) == [record]


def test_every_pool_size_has_the_shapes_of_a_run_that_knows_no_other() -> None:
    """Nodes of four ranks: pools of two sequences lie inside of one, pools of four and eight do not."""
    attention = AttentionConfig(block=8, waves=3, ranks_per_node=4)
    config = config_of(4, 2, 2, attention=attention)
    several = dataclasses.replace(config, mesh=MeshConfig(4, 2, 2, pool_sizes=(8, 4)))
    assert several.mesh.sizes == (2, 4, 8) and [s.pool_size for s in several.pool_sizes.specs] == [8, 4]
    assert [several.spec_of(size).ranks_per_node for size in several.mesh.sizes] == [None, 4, 4]
    assert several.at_pool_size(2) == config
    assert several.at_pool_size(8) == config_of(1, 8, 2, attention=attention)
    assert several.spec_of(8) == several.at_pool_size(8).spec
    assert several.step_tokens == several.at_pool_size(8).step_tokens == config.step_tokens


# The run.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a corpus in `text`; programs that were compiled once are kept there for the tests that follow."""
    path = tmp_path_factory.mktemp("runs")
    (path / "text").mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        (path / "text" / f"{i}.txt").write_text("the cat sat " * int(rng.integers(1, 10)))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(path / "compiled"), 0.0), strict=True):
        jax.config.update(name, value)
    yield path
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def run_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    fields = {
        "model": dataclasses.replace(TINY, vocab_size=VOCAB_SIZE, num_layers=1),
        "data": DataConfig(paths=(str(folder / "text"),)),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=100),
        "checkpoint": CheckpointConfig(every=2),
        "run_dir": str(folder / name),
        "micro_steps": 2,
        "steps": 8,
    }
    return config_of(2, 2, 2, **fields | changes)


def start(config: TrainConfig) -> tuple[list[StepRecord], str]:
    """Runs; returns the curve and what was printed."""
    console = Console(record=True, width=120, file=io.StringIO())
    return train(config, console).records, console.export_text()


def saved_arrays(config: TrainConfig) -> dict[str, np.ndarray]:
    """The state in the newest checkpoint."""
    blueprint = plan_state(config, make_mesh(config.mesh))
    with (
        Checkpoints(Path(config.run_dir) / "checkpoints", config.checkpoint) as checkpoints,
        contextlib.closing(open_batches(config.data, config.spec, 2, 2)) as batches,
    ):
        state = checkpoints.restore(blueprint.shapes, batches)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(state)}


def places_of(state: Any) -> list[int]:
    """Where in memory each device's share of each array lies."""
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for shard in x.addressable_shards]


def numbers_of(records: list[StepRecord]) -> list[dict[str, Any]]:
    """Records without what differs from one clock to another."""
    measured = {"seconds", "tokens_per_second", "planning_seconds", "waited_seconds", "host_peak_bytes"}
    measured |= {"flops_per_second_per_device"}
    return [{n: v for n, v in dataclasses.asdict(record).items() if n not in measured} for record in records]


def test_a_run_that_stops_and_goes_on_equals_one_that_does_not_bit_for_bit(folder: Path) -> None:
    whole, printed = start(run_config(folder, "whole"))
    assert [record.step for record in whole] == list(range(1, 9)) and "compiled in" in printed
    assert whole[-1].loss < whole[0].loss - 0.5
    assert all(1 <= r.imbalance_libra < r.imbalance_home for r in whole)

    part = run_config(folder, "parts", steps=3)
    assert numbers_of(start(part)[0]) == numbers_of(whole[:3])
    # What a kill can leave behind: steps past the checkpoint, half a line, half a checkpoint.
    run = Path(part.run_dir)
    later = (Path(run_config(folder, "whole").run_dir) / "metrics.jsonl").read_text().splitlines(keepends=True)[3:]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(later)[:-9])
    shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "5.orbax-checkpoint-tmp")
    shutil.copytree(run / "checkpoints" / "3" / "state", run / "checkpoints" / "7" / "state")

    records, printed = start(dataclasses.replace(part, steps=8))
    assert "going on from step 3 of 8" in printed
    assert "was not whole and is called 7.unfinished" in printed
    assert numbers_of(records) == numbers_of(whole)
    one, other = saved_arrays(run_config(folder, "whole")), saved_arrays(part)
    assert one.keys() == other.keys() and len(one) > 30
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array, err_msg=name)
    assert {path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()} == {"6", "8"}

    again, printed = start(dataclasses.replace(part, steps=8))
    assert "has done its 8 steps already; --steps 16 goes on" in printed and "compiled" not in printed
    assert again == records


def test_a_run_of_several_pool_sizes_has_the_curve_of_each_and_compiles_ahead_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs hand the state on where it lies: nothing is copied, moved or compiled once the first step has begun."""
    compiled: list[str] = []
    at_step: list[int] = []
    moved: list[bool] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    def compile_watched(*arguments: Any) -> Program:
        program = compile_program(*arguments)

        def run(state: Any, arrays: Any, plans: Any) -> Any:
            before = places_of(state)
            at_step.append(len(compiled))
            with jax.transfer_guard("disallow"):
                after, numbers = program.run(state, arrays, plans)
            moved.append(places_of(after) != before)
            return after, numbers

        return Program(program.mesh, run)

    jax.monitoring.register_event_duration_secs_listener(listen)
    monkeypatch.setattr(loop, "compile_program", compile_watched)
    curves: dict[str, list[StepRecord]] = {}
    try:
        for name, mesh in {
            "2": MeshConfig(2, 2, 2),
            "4": MeshConfig(1, 4, 2),
            "2 and 4": TWO_SIZES,
        }.items():
            at_step.clear()
            config = run_config(folder, f"pools of {name}", mesh=mesh, steps=6, checkpoint=CheckpointConfig(every=6))
            curves[name], printed = start(config)
            assert len(at_step) == 6 and at_step[0] > 0 and len(set(at_step)) == 1 and len(compiled) == at_step[0], name
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert moved == [False] * 18
    assert re.search(r"pool size 2: .* s\npool size 4: .* s\ncompiled in .* s, once for the whole run", printed)
    assert "or 1 pools x 4 sequences: each step takes" in printed
    sizes = {name: [record.pool_size for record in records] for name, records in curves.items()}
    assert sizes["2"] == [2] * 6 and sizes["4"] == [4] * 6 and set(sizes["2 and 4"]) == {2, 4}
    column = [line.split()[-1] for line in printed.splitlines() if re.match(r" +\d/6 ", line)]
    assert [int(size) for size in column] == sizes["2 and 4"]
    for field, rtol in (("loss", 2e-6), ("grad_norm", 2e-5)):
        one, *others = ([getattr(record, field) for record in records] for records in curves.values())
        for other in others:
            np.testing.assert_allclose(other, one, rtol=rtol)
    for fields in zip(*curves.values(), strict=True):
        assert len({(r.targets, r.tokens, r.imbalance_home, r.imbalance_ulysses) for r in fields}) == 1


def test_a_run_whose_config_or_data_has_changed_is_refused_with_both_values(folder: Path) -> None:
    config = run_config(folder, "fixed", steps=2)
    first, _ = start(config)

    def refused(**changes: Any) -> str:
        with pytest.raises(ValueError) as caught:
            start(dataclasses.replace(config, steps=4, **changes))
        return str(caught.value)

    message = refused(seq_len=128, mesh=MeshConfig(1, 4, 2))
    assert "seq_len: 64 there, 128 now" in message and "--run-dir" in message
    assert "mesh." not in message, "another layout of the devices is no hindrance"
    message = refused(mesh=MeshConfig(1, 2, 4))
    assert "was made with other data" in message and "sequences_per_step: 8 there, 4 now" in message
    assert "model.num_layers: 1 there, 2 now" in refused(model=dataclasses.replace(config.model, num_layers=2))
    assert "seed: 0 there, 1 now" in refused(seed=1)
    file = folder / "text" / "7.txt"
    before = file.read_bytes()
    file.write_bytes(before + b"!")
    message = refused()
    assert "was made with other data" in message and "corpus: " in message
    file.write_bytes(before)

    # How many steps and how often to save may change; the next test changes the learning rate.
    records, _ = start(dataclasses.replace(config, steps=4, checkpoint=CheckpointConfig(every=1, keep=1)))
    assert numbers_of(records[:2]) == numbers_of(first) and len(records) == 4


def test_a_run_goes_on_with_its_devices_in_another_layout(folder: Path) -> None:
    """Saved on 2 pools of 2, 2 ranks each; then one pool of 4; then 4 ranks a sequence and twice the micro-steps; then
    heads shared by two and layers in two stages.

    The same sequences in every step; losses differ by rounding alone.
    """
    model = dataclasses.replace(run_config(folder, "one_layout").model, num_layers=2)
    whole, _ = start(run_config(folder, "one_layout", steps=8, model=model))
    config = run_config(folder, "layouts", steps=2, model=model)
    start(config)
    others = MeshConfig(1, 4, 2), MeshConfig(1, 2, 4), MeshConfig(1, 2, 1, tp=2, pp=2)
    for mesh, micro_steps, steps in zip(others, (2, 4, 4), (4, 6, 8), strict=True):
        records, printed = start(dataclasses.replace(config, mesh=mesh, micro_steps=micro_steps, steps=steps))
        assert f"going on from step {steps - 2} of {steps}" in printed
    assert [r.tokens for r in records] == [r.tokens for r in whole]
    assert [r.targets for r in records] == [r.targets for r in whole]
    np.testing.assert_allclose([r.loss for r in records], [r.loss for r in whole], rtol=1e-5)
    assert [r.pool_size for r in records] == [2, 2, 4, 4, 2, 2, 2, 2]


def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_of_it_is_kept(folder: Path) -> None:
    config = run_config(folder, "burst", steps=2)
    start(config)
    optimizer = OptimizerConfig(learning_rate=1e30, warmup_steps=0, stop_after_skipped=2)
    hot = dataclasses.replace(config, steps=9, optimizer=optimizer)
    with pytest.raises(
        RunStopped,
        match=r"step 5: loss nan, .*: nothing was updated\. micro-step 0: loss nan; sequences \[\d.*, documents \d.* "
        r"of .*text\. micro-step 1: .* It is number 2 in a row, .*stop_after_skipped is 2: the run stops here.*"
        r"The newest whole checkpoint is that of step 2",
    ):
        start(hot)
    records = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3, 4] and records[2].learning_rate > 1e29
    assert [record.skipped for record in records] == [False] * 3 + [True]
    records, _ = start(dataclasses.replace(config, steps=4))
    assert [record.step for record in records] == [1, 2, 3, 4] and all(math.isfinite(r.loss) for r in records)


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(folder, "full", steps=4)
    write = MetricsFile.append

    def append(self: MetricsFile, record: StepRecord) -> None:
        if record.step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, record)

    monkeypatch.setattr(MetricsFile, "append", append)
    with pytest.raises(RunStopped, match=r"step 4 could not be saved in .*No space left.*that of step 2"):
        start(config)


def test_a_run_folder_that_cannot_be_held_is_refused(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"file/run cannot be written: Not a directory; set --run-dir"):
        start(run_config(folder, "file/run"))
    with hold_folder(folder / "held"), pytest.raises(ValueError, match=r"another process is training in .*held"):
        start(run_config(folder, "held"))


def killed_config(folder: Path, name: str) -> TrainConfig:
    """Every step chooses between two pool sizes; data come from a prepared folder, read ahead in a worker process."""
    data = DataConfig(paths=(str(folder / "prepared"),), workers=1, held_out=0.05)
    return run_config(folder, name, steps=40, mesh=TWO_SIZES, data=data)


def test_a_run_killed_at_any_moment_goes_on_and_ends_with_the_same_curve(folder: Path) -> None:
    """kill -9 from outside, twice, and the same command again; against a run that was left alone."""
    assert libra(["prepare", str(folder / "text"), "--tokenizer", "bytes", "--out", str(folder / "prepared")]) == 0
    config_file = folder / "killed.py"
    config_file.write_text(
        f'"""A test."""\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n'
        "from pathlib import Path\nfrom test_train import killed_config\n"
        f"def config():\n    return killed_config(Path({str(folder)!r}), 'killed')\n"
    )
    command = [sys.executable, "-m", "libra_jax.cli", "train", str(config_file)]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    curve = folder / "killed" / "metrics.jsonl"
    for steps in (5, 14):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (curve.exists() and curve.read_text().count("\n") >= steps):
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        assert steps <= curve.read_text().count("\n") < 40

    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stdout and "Summary" in done.stdout
    assert done.stdout.index("compiling (about half a minute") < done.stdout.index("compiled in")
    lines = done.stdout.splitlines()  # what can be copied stands whole on its line, in any terminal
    assert f"checkpoints: {folder}/killed/checkpoints" in lines
    assert f"to go on: {sys.executable} -m libra_jax.cli train {config_file} --steps 80" in lines
    assert (folder / "killed" / "work_per_rank.png").read_bytes().startswith(b"\x89PNG")
    whole, _ = start(killed_config(folder, "alone"))
    assert numbers_of(read_metrics(curve)) == numbers_of(whole)
    assert {record.pool_size for record in whole} == {2, 4}
    assert re.search(r"sequences in a pool\W+2 in \d+ steps, 4 in \d+ steps", done.stdout)
