"""A whole run and what it leaves behind: skipped steps by name, evaluation on held-out documents, event files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_base import programs_kept, run_config, start
from test_metrics import events_of
from train_base import TINY

from libra_jax.data import VOCAB_SIZE, DataConfig, open_corpora, open_step_batches
from libra_jax.train import loop
from libra_jax.train.config import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    MetricsConfig,
    TrainConfig,
)
from libra_jax.train.evaluate import open_evaluation
from libra_jax.train.mesh import make_mesh
from libra_jax.train.metrics import EvaluationRecord, read_metrics
from libra_jax.train.step import Blueprint, plan_state

POISON = ord("Z")
"""A byte that stands in one document alone; its row of the embeddings is infinite."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A corpus in `text`, a document of it poisoned; programs that were compiled once are kept."""
    path = tmp_path_factory.mktemp("records")
    (path / "text").mkdir()
    rng = np.random.default_rng(0)
    for i in range(80):
        (path / "text" / f"{i:02}.txt").write_text(f"{i:02}" + " the cat sat" * int(rng.integers(2, 6)))
    (corpus,) = open_corpora(DataConfig(paths=(str(path / "text"),), held_out=0.2), 64)
    chosen = path / "text" / f"{corpus.packed.pieces(20).document[0]:02}.txt"
    chosen.write_text(chosen.read_text().replace("c", "Z", 1))
    with programs_kept(path):
        yield path


def evaluated(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """A run with a part held out, evaluated every three steps."""
    fields: dict[str, Any] = {
        "data": DataConfig(paths=(str(folder / "text"),), held_out=0.2),
        "evaluation": EvaluationConfig(every=3, micro_steps=2),
        "metrics": MetricsConfig(peak_flops=1e9),
        "steps": 6,
    }
    return run_config(folder, name, **fields | changes)


def poisoned(config: TrainConfig, mesh: Any) -> Blueprint:
    """What `plan_state` gives, but for one row of the embeddings."""
    blueprint = plan_state(config, mesh)

    def init() -> Any:
        state = blueprint.init()
        table = state["params"]["embedding"]
        state["params"]["embedding"] = jax.device_put(table.at[POISON].set(jnp.inf), table.sharding)
        return state

    return dataclasses.replace(blueprint, init=init)


def step_of_the_document(config: TrainConfig) -> tuple[int, int, int]:
    """Step, micro-step and sequence that hold it, looked up in the tokens of the batches themselves."""
    batches = open_step_batches(config.data, config.spec, 2, 2, config.seed)
    for number in range(batches.sampler.steps_per_epoch):
        batch = batches[number]
        where = np.argwhere(batch["tokens"] == POISON)
        if len(where):
            micro_step, row, _ = where[0]
            return number + 1, int(micro_step), int(batch["sequence_ids"][micro_step].reshape(-1)[row])
    raise AssertionError("the document is held out")


def test_a_step_that_is_not_finite_is_skipped_named_and_counted_across_a_resumption(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "plan_state", poisoned)
    config = evaluated(folder, "skipped")
    bad, micro_step, sequence = step_of_the_document(config)
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every=bad, keep=9), steps=bad + 1)
    records, printed = start(config)
    assert [record.step for record in records if record.skipped] == [bad]
    assert [record.skipped_total for record in records] == [0] * (bad - 1) + [1, 1]
    assert math.isnan(records[bad - 1].loss) and all(math.isfinite(r.loss) for r in records if not r.skipped)
    said = next(line for line in printed.splitlines() if line.startswith(f"step {bad}: loss nan"))
    assert f"micro-step {micro_step}: loss nan; sequences [" in said and "nothing was updated" in said
    (line,) = (json.loads(line) for line in (folder / "skipped" / "skipped.jsonl").read_text().splitlines())
    assert line["step"] == bad
    (part,) = line["micro_steps"]
    assert part["micro_step"] == micro_step and sequence in part["sequences"]
    (documents,) = part["documents"].values()
    (number,) = (int(path.stem) for path in (folder / "text").iterdir() if "Z" in path.read_text())
    assert number in documents and documents == sorted(documents)

    # The checkpoint that was due at the skipped step came a step later, with the count; the run goes on from it.
    assert {p.name for p in (folder / "skipped" / "checkpoints").iterdir() if p.name.isdigit()} == {str(bad + 1)}
    records, _ = start(dataclasses.replace(config, steps=bad + 2))
    assert [record.skipped_total for record in records[bad:]] == [1, 1]
    # The schedule has not moved on in the skipped step: the one after it has the rate that it would have had.
    assert records[bad].learning_rate == records[bad - 1].learning_rate > records[bad + 1].learning_rate


def test_evaluation_is_the_loss_of_the_held_out_documents_whatever_the_seed(folder: Path) -> None:
    config = evaluated(folder, "evaluated", steps=4)
    records, printed = start(config)
    assert len(records) == 4 and all(record.mfu for record in records)
    evaluations = read_metrics(folder / "evaluated" / "evaluation.jsonl", EvaluationRecord)
    assert [record.step for record in evaluations] == [3, 4]
    assert "evaluation after step 3: loss" in printed and "held-out sequences" in printed
    (events,) = events_of(folder / "evaluated" / "tensorboard")
    tags = {(value.tag, event.step) for event in events for value in event.summary.value}
    assert {("evaluation/eval_loss", 3), ("evaluation/eval_loss", 4), ("step/loss", 1), ("step/mfu", 4)} <= tags

    # Another seed deals other sequences to the steps, and evaluates on the same.
    mesh = make_mesh(config.mesh)
    blueprint = plan_state(config, mesh)
    evaluation = open_evaluation(dataclasses.replace(config, seed=7), mesh, blueprint)
    begun = evaluation.run(blueprint.init()["params"], 0)
    assert begun.eval_loss == pytest.approx(math.log(VOCAB_SIZE), rel=0.02)
    assert evaluations[1].eval_loss < evaluations[0].eval_loss < begun.eval_loss - 0.05
    assert {record.eval_targets for record in evaluations} == {begun.eval_targets}
    served = [text for n in range(evaluation.count) for text in documents_in(evaluation.batches[n])]
    assert len(served) == len(set(served)) and begun.eval_targets == sum(map(len, served))
    files = {path.read_text() for path in (folder / "text").iterdir()}
    steps = open_step_batches(config.data, config.spec, 2, 2, config.seed)
    trained = {text for n in range(steps.sampler.steps_per_epoch) for text in documents_in(steps[n])}
    assert set(served) < files and trained < files and not trained & set(served)


def documents_in(batch: dict[str, Any]) -> list[str]:
    """The texts of a batch, by its segment ids, without the token that ends each."""
    found = []
    for tokens, segments in zip(batch["tokens"].reshape(-1, 64), batch["segment_ids"].reshape(-1, 64), strict=True):
        found += ["".join(map(chr, tokens[segments == number][:-1])) for number in range(1, int(segments.max()) + 1)]
    return found


def test_evaluation_without_held_out_documents_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation.every \(3\) needs documents .* data.held_out is 0.0: set it"):
        evaluated(folder, "none", data=DataConfig(paths=(str(folder / "text"),)))


def test_evaluation_has_one_loss_on_every_mesh(folder: Path) -> None:
    """Heads shared by two ranks, and layers by two stages; the model and the documents are the same."""
    losses = []
    for mesh_config in (MeshConfig(1, 2, 1), MeshConfig(1, 2, 1, tp=2, pp=2)):
        model = dataclasses.replace(TINY, vocab_size=VOCAB_SIZE)
        config = evaluated(folder, "meshes", mesh=mesh_config, model=model)
        mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.devices])
        blueprint = plan_state(config, mesh)
        losses.append(open_evaluation(config, mesh, blueprint).run(blueprint.init()["params"], 0))
    assert {record.eval_targets for record in losses} == {losses[0].eval_targets}
    np.testing.assert_allclose([record.eval_loss for record in losses], losses[0].eval_loss, rtol=2e-6)
