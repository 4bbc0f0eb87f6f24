"""Logits, loss and gradients against Hugging Face transformers, by recorded numbers: no torch is needed here.

`make parity ARGS=--record` computes them anew in an environment that has it (tools/parity.py says how). In
tests/parity_data, for each model: what transformers gives in float64, rounded to float32, with every fourth token's
logits, and how far transformers' own float32 is from that (error/...). Ours may be off at most twice as far, plus a
floor.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from parity_base import MODELS, RECORDED, ROWS, bound, flat, libra_numbers, runs_of, share, write_model

QUICK = {"xla_backend_optimization_level": 0}  # nearly all of the time is compilation
RUNS = [
    ("dense", "1 pool of 4"),  # YaRN, embeddings not tied
    ("moe", "2 pools of 2"),
]


@pytest.mark.parametrize(("name", "run"), RUNS, ids=[f"{name}, {run}" for name, run in RUNS])
def test_packed_and_pooled_it_says_what_transformers_says_of_each_document(tmp_path: Path, name: str, run: str) -> None:
    with np.load(RECORDED / f"{name}.npz") as file:
        recorded = dict(file)
    digest = write_model(tmp_path / name, name)
    assert digest == str(recorded["digest"]), "the model is another than the one recorded: make parity ARGS=--record"
    mesh, moe = runs_of(name)[run]
    got = flat(libra_numbers(tmp_path / name, mesh, moe, QUICK))
    got["logits"] = got["logits"][ROWS]
    theirs = {key.removeprefix("error/"): float(x) for key, x in recorded.items() if key.startswith("error/")}
    assert got.keys() == theirs.keys()
    beyond = {}
    for key, error in theirs.items():
        if (ours := share(got[key], recorded[key])) > bound(error):
            beyond[key] = f"{ours:.1e}, and at most {bound(error):.1e}"
    assert not beyond, beyond


def test_the_record_is_of_every_model_and_says_what_made_it() -> None:
    assert {path.stem for path in RECORDED.glob("*.npz")} == MODELS.keys()
    for path in RECORDED.glob("*.npz"):
        assert path.stat().st_size < 250_000
        with np.load(path) as file:
            said = str(file["versions"])
            theirs = [float(file[name]) for name in file.files if name.startswith("error/")]
        assert "torch 2" in said and "transformers 5" in said
        assert min(theirs) >= 0 and max(theirs) < 1e-5  # float32 against float64, not one against itself
        assert np.median(theirs) > 1e-7
