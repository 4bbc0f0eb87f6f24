"""What `libra simulate` advises: settings and their reasons, flags that the trainer takes, break-even, verdict."""

import dataclasses

import numpy as np
import pytest
import tyro

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import QWEN3_0_6B
from libra_jax.policies.base import Changed
from libra_jax.simulate.advice import (
    ALTERNATIVES,
    BreakEven,
    Tried,
    _reason,
    break_even,
    break_even_sentence,
    flags,
    is_plain,
    recommend,
    verdict,
)
from libra_jax.simulate.command import SimulateOptions as Options
from libra_jax.simulate.command import setting_of
from libra_jax.simulate.study import Outcome, compare, sample_steps
from libra_jax.train.config import MeshConfig, TrainConfig


def tried(pool_size, cp, efficiency, memory=10.0):
    return Tried(pool_size, cp, 8 // cp, 0.003, 6, efficiency, memory)


def test_reasons_compare_what_differs_in_one_thing():
    setting = setting_of(Options(seq_len=8192, cp=2, dp=4, micro_steps=2, pool=4))[0]
    pools = [tried(1, 2, 0.80), tried(2, 2, 0.90), tried(4, 2, 0.903)]
    sizes = [pools[1], tried(2, 1, 0.99), tried(2, 4, None, 100.0)]
    reason = _reason(sizes[1], pools, sizes, pools[2], setting)
    assert reason == (
        "pools of 1 are 11.1% slower; pools of 4, which exchange among more ranks, are 0.3% faster; cp 2 is "
        "9.1% slower; cp 4 needs 100 GiB; all together, what was asked for is 8.8% slower"
    )
    nothing = _reason(tried(1, 2, None, 90.0), [], [tried(1, 2, None, 90.0)], tried(1, 2, None, 90.0), setting)
    assert nothing == "nothing that was tried fits in 79.1 GiB: the least needs 90"
    fewer = dataclasses.replace(sizes[1], tolerance=0.01, efficiency=0.995)
    changes = [("tolerance 0.003", sizes[1], fewer), ("6 waves", fewer, fewer)]
    assert "; tolerance 0.003 is 0.5% slower; all together" in _reason(fewer, pools, sizes, pools[2], setting, changes)


def test_what_is_recommended_is_what_the_trainer_takes():
    """All flags are the trainer's, and give the mesh and pools that were priced; with stages and several nodes, too."""
    options = Options(seq_len=4096, cp=4, dp=8, pp=2, micro_steps=2, pool=4, model="qwen3-0.6b")
    setting = setting_of(options)[0]
    best = Tried(4, 8, 4, 0.01, 8, 0.9, 10.0, True)
    usual = TrainConfig(QWEN3_0_6B, DataConfig(paths=("nowhere",)), MeshConfig(1, 1, 1))
    config = tyro.cli(TrainConfig, default=usual, args=flags(best, setting).split())
    run = dataclasses.replace(setting.run, cp=8, dp=4, micro_steps=4)
    assert (config.mesh.pools, config.mesh.pool_size, config.mesh.cp, config.mesh.pp) == (1, 4, 8, 2)
    assert (config.seq_len, config.micro_steps) == (4096, 4) and config.mesh.sequences == 4
    assert config.pool_sizes.tolerance == 0.01
    priced = run.spec(4, waves=8, relays=True)
    assert config.spec.ranks_per_node == priced.ranks_per_node == 8 and config.spec.waves == priced.waves == 8
    alone = flags(dataclasses.replace(best, relays=False), setting)
    assert tyro.cli(TrainConfig, default=usual, args=alone.split()).spec.ranks_per_node is None


def test_break_even_begins_with_the_documents_that_there_are():
    """Cuts that cut nothing are not points of their own, and the heaviest sequence is one as it was packed."""
    setting = setting_of(Options(seq_len=8192, cp=2, dp=2, micro_steps=1, pool=2, model="qwen3-0.6b"))[0]
    lengths = np.array([1000, 100, 50, 2] * 200)
    points = break_even(lengths, setting, ["dynamic-cp", "per-document", "libra:2"], 2)
    assert [point.longest for point in points] == [1000, 512, 256, 128]
    assert len({point.heaviest for point in points}) == 4
    assert all(1 <= point.heaviest < 1.5 for point in points)
    assert [point.longest for point in break_even(lengths.clip(max=60), setting, ["ulysses"], 2)] == [60]


def test_break_even_in_words():
    points = [
        BreakEven(4096, 1.2, "ulysses", 3.0),
        BreakEven(2048, 1.03, "ulysses", 2.0),
        BreakEven(1024, 0.95, "x", 1.2),
    ]
    assert break_even_sentence(points) == (
        "Libra gains 2% or more once documents reach 2,048 tokens, where a step's heaviest sequence has 2.0 times the "
        "mean attention; with documents up to 1,024 tokens (1.2 times) it loses 5.0%."
    )
    assert break_even_sentence(points[2:]) == ("Libra gains less than 2% even with the corpus's longest documents.")


def test_a_verdict_needs_something_to_compare_with():
    with pytest.raises(ValueError, match="keeps every step's documents and pools nothing"):
        verdict([Outcome("libra:2", (), Changed(0, 0, 0, 0), 0, 0)], "libra:2")


def test_a_gain_at_every_length_is_no_threshold():
    points = [BreakEven(4096, 1.2, "ulysses", 3.0), BreakEven(64, 1.07, "ulysses", 1.0)]
    assert break_even_sentence(points) == (
        "Libra gains 2% or more down to documents of at most 64 tokens, the shortest tried: 7.0%, where a step's "
        "heaviest sequence has 1.0 times the mean attention."
    )


def test_recommendations_try_what_was_asked_for():
    """A pool of 3 sequences is none of the usual sizes."""
    setting = setting_of(Options(seq_len=4096, cp=2, dp=6, micro_steps=1, pool=3, model="qwen3-0.6b"))[0]
    batches = sample_steps(np.array([4096, *[256] * 47] * 10), setting.run, 2)
    found = recommend(batches, setting, 3)
    assert (found.tried[0].pool_size, found.tried[0].cp) == (3, 2)
    assert {each.pool_size for each in found.tried} == {1, 2, 3}
    assert all(each.dp * each.cp == 12 and each.dp % each.pool_size == 0 for each in found.tried)
    best = max(each.efficiency for each in found.tried if each.efficiency is not None)
    assert found.best in found.tried and found.best.efficiency is not None
    assert found.best.efficiency >= 0.995**5 * best
    assert is_plain(found.plain) and found.plain in ALTERNATIVES
    cp = found.plain_cp
    here = dataclasses.replace(setting, run=dataclasses.replace(setting.run, cp=cp, dp=12 // cp, micro_steps=cp // 2))
    (plain,) = compare([found.plain], batches, here)
    assert found.gain == pytest.approx(found.best.efficiency / plain.efficiency)


def test_nothing_is_recommended_that_does_not_fit():
    options = Options(seq_len=4096, cp=2, dp=2, micro_steps=1, pool=2, model="qwen3-0.6b", set=("memory=1",))
    setting = setting_of(options)[0]
    found = recommend(sample_steps(np.array([2048] * 50), setting.run, 2), setting, 2)
    assert all(each.efficiency is None for each in found.tried)
    assert found.best.memory == min(each.memory for each in found.tried)
    assert found.reason.startswith("nothing that was tried fits in 1 GiB: the least needs")
