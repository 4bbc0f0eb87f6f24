"""What a finished run leaves its user with: a summary table and a picture of the work per rank."""

from __future__ import annotations

from rich.console import Console

from libra_jax.plots import work_per_rank_png
from libra_jax.train import metrics
from libra_jax.train.config import TrainConfig
from libra_jax.train.loop import Result


def report(config: TrainConfig, result: Result, console: Console, command: str) -> None:
    """Prints the summary and writes `work_per_rank.png` to the run folder. command: what started the run."""
    picture = result.folder.path / "work_per_rank.png"
    together = f", its {config.micro_steps} micro-steps added up" if config.micro_steps > 1 else ""
    work_per_rank_png(
        picture,
        result.plain_work.sum(axis=0),
        result.libra_work.sum(axis=0),
        f"Attention work of every rank in step {result.records[-1].step}{together}",
    )
    console.print(metrics.summary(result.records))
    for name, value in {
        "work per rank, before and after": picture,
        "checkpoints": result.folder.checkpoints,
        "metrics of every step": result.folder.metrics,
        "to go on": f"{command} --steps {2 * config.steps}",
    }.items():  # each whole on one line, however long, so that it can be copied
        console.print(f"{name}: {value}", soft_wrap=True, highlight=False, markup=False)
