"""What parts of the report are made of: rows of its CSVs picked out, and Markdown: tables, pictures, paragraphs."""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.base import MODEL_NAMES
from benchmarks.paper.figures import Row, chosen
from benchmarks.paper.published import PUBLISHED
from benchmarks.reporting import markdown

Rows = Sequence[Row]
MODEL = MODEL_NAMES[0]


def read(folder: Path, name: str) -> list[Row]:
    """A CSV's rows; cells that are numbers as such. [] where it was not made."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _value(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text and "e" not in text else number


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return ["", *markdown(columns, [[str(cell) for cell in row] for row in rows]), ""]


def paper(name: str) -> float:
    return PUBLISHED[name].value


def one(rows: Rows, **wanted: Any) -> Row:
    (row,) = chosen(rows, **wanted)
    return row


def span(values: Sequence[float], digits: int = 2) -> str:
    """Least, median and most."""
    low, middle, high = (f"{x:.{digits}f}" for x in (min(values), float(np.median(values)), max(values)))
    return low if low == high else f"{middle} ({low} to {high})"


def say(text: str) -> list[str]:
    """A paragraph, or a list whose entries begin with "- ", at the width of the other documents."""
    lines = []
    for part in re.split(r"\n\s*(?=- )", text.strip()):
        indent = "  " if part.startswith("- ") else ""
        words = " ".join(part.split())
        lines += textwrap.wrap(words, 120, subsequent_indent=indent, break_on_hyphens=False)
    return [*lines, ""]


def picture(name: str, what: str) -> list[str]:
    return ["", f"![{what}]({name}.png)", ""]
