"""Rows of a published value beside the model's, for `reality`, profiles that are kept as files in `data/`,
and shapes of models that others used."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

from benchmarks.paper.published import PUBLISHED
from libra_jax.models.qwen3 import Qwen3Config

DATA = Path(__file__).parent / "data"
LLAMA2_7B = Qwen3Config(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32, num_heads=32, num_kv_heads=32
)
LLAMA3_8B = Qwen3Config(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, published (or measured) and modelled. series: rows that are summed up together."""

    series: str
    what: str
    published: float
    modelled: float
    unit: str
    source: str
    why: str = ""

    @property
    def residual(self) -> float:
        """Modelled over published, less 1."""
        return self.modelled / self.published - 1


def row_of(series: str, what: str, name: str, modelled: float, why: str = "") -> Row:
    """Against a number of `PUBLISHED`."""
    one = PUBLISHED[name]
    return Row(series, what, one.value, modelled, one.unit, one.source, why)


def read_csv(name: str) -> list[dict[str, str]]:
    """Rows of a file in `DATA`."""
    with open(DATA / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
