"""What a run says in the terminal beside the rows of its steps."""

from __future__ import annotations

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from libra_jax.data import StepBatches
from libra_jax.train.config import TrainConfig
from libra_jax.train.xla import describe_options


def describe(config: TrainConfig, mesh: Mesh, data: StepBatches, console: Console) -> None:
    """Prints what is about to be trained, on what."""
    for corpus in data.corpora:
        for line in corpus.describe():
            say(console, line)
    sampler = data.sampler
    if sampler.weights is not None:
        total, epochs = sum(sampler.weights), sampler.epochs(config.steps)
        for corpus, weight, times in zip(data.corpora, sampler.weights, epochs, strict=True):
            say(console, f"{weight / total:.1%} of the tokens from {corpus.name}, seen {times:.2g} times in this run")
    else:
        say(console, f"{sampler.steps_per_epoch:,} steps an epoch")
    shape, spec, platform = config.mesh, config.spec, mesh.devices.flat[0].platform
    say(
        console,
        f"Qwen3 with {config.model.num_parameters:,} parameters on {mesh.size} {platform} devices: {shape.in_words}",
    )
    if jax.process_count() > 1:
        say(console, f"in {jax.process_count()} processes, {jax.local_device_count()} devices in this one")
    say(console, describe_options(platform, config.xla))
    if shape.pool_sizes:
        others = ", ".join(f"{shape.sequences // size} pools x {size} sequences" for size in shape.pool_sizes)
        say(console, f"or {others}: each step takes the pool size with the least modelled time")
    say(
        console,
        f"{config.step_tokens:,} tokens a step: {config.micro_steps} micro-steps x {shape.sequences} sequences x "
        f"{spec.seq_len} tokens",
    )


def say(console: Console, line: str) -> None:
    """Prints one line, however long, as it stands."""
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def progress_bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True)
