"""What tests of whole runs share: a small run, its start, and programs that are compiled once for a file of tests."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from train_base import TINY

from libra_jax.data import VOCAB_SIZE, DataConfig
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.loop import train
from libra_jax.train.metrics import StepRecord


@contextlib.contextmanager
def programs_kept(path: Path) -> Iterator[None]:
    """Programs that were compiled once are kept in a folder for those who want them again."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(path / "compiled"), 0.0), strict=True):
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


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


def run_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """A run on the bytes of `folder`/text, in `folder`/name."""
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
