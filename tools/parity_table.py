"""Libra beside Hugging Face transformers: the table of `make parity`, and the recorded numbers.

    PYTHONPATH=tests python tools/parity_table.py PYTHON [--record]

PYTHON is that of the environment with torch, in which tools/parity.py runs. Errors are against the same computation in
float64, as shares of a tensor's largest number; Libra's may be at most twice that of transformers in float32, plus a
floor. Exits 1 where one is larger. --record rewrites tests/parity_data, by which tests/test_parity.py judges.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from parity_base import (
    FLOOR,
    MESHES,
    MODELS,
    RECORDED,
    ROWS,
    SEQ_LEN,
    Tensors,
    bound,
    flat,
    libra_numbers,
    load,
    runs_of,
    share,
    write_model,
)  # fmt: skip

from libra_jax.models.hugging_face import config_from_hugging_face
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.hugging_face_write import write_weights
from libra_jax.train.config import MeshConfig
from libra_jax.train.mesh import start_devices


def prepare(folder: Path) -> str:
    """Writes the model named like the folder and, in folder/exported, its weights as Libra writes them. Returns the
    digest of the model."""
    digest = write_model(folder, folder.name)
    _, params = load(folder, MESHES["2 pools of 2"], {})
    config = config_from_hugging_face(folder)
    write_weights(folder / "exported", params, config, dtype="float32", max_positions=SEQ_LEN)
    return digest


def print_rows(errors: dict[str, dict[str, float]], theirs: dict[str, float]) -> bool:
    """errors: {run: {quantity: error}}. Prints a row for each quantity, and one for the gradient that is nearest to its
    bound, or furthest beyond it. Returns whether all are within."""
    by_row = {"logits": ["logits"], "mean loss": ["loss"], "balance loss": ["balance_loss"]}
    gradients = [name for name in theirs if name.startswith("gradients/")]
    by_row[f"gradients, worst of {len(gradients)}"] = gradients
    fine = True
    for row, names in by_row.items():
        names = [name for name in names if name in theirs]
        if not names:
            continue
        for run, found in errors.items():
            worst = max(names, key=lambda name: found[name] / bound(theirs[name]))
            within = found[worst] <= bound(theirs[worst])
            fine &= within
            name = worst.removeprefix("gradients/") if len(names) > 1 else ""
            print(
                f"  {row:26} {run:22} {found[worst]:10.1e} {theirs[worst]:13.1e} {bound(theirs[worst]):9.1e}  "
                f"{'ok' if within else 'TOO LARGE'}  {name}".rstrip()
            )
            row = ""
    return fine


def same(what: str, equal: bool) -> bool:
    print(f"  {what}: {'yes' if equal else 'NO'}")
    return equal


def compare(folder: Path, reference: Tensors) -> bool:
    """Prints all about one model. Returns whether it is as it must be."""
    want = {name.removeprefix("float64/"): x for name, x in reference.items() if name.startswith("float64/")}
    gap = want.pop("gap", None)
    theirs = {name: share(reference[f"float32/{name}"], x) for name, x in want.items()}
    errors = {}
    for run, (mesh, moe) in runs_of(folder.name).items():
        got = flat(libra_numbers(folder, mesh, moe))
        if got.keys() != want.keys():
            raise SystemExit(f"{folder.name}: only one side has {sorted(got.keys() ^ want.keys())}")
        errors[run] = {name: share(got[name], x) for name, x in want.items()}
    fine = print_rows(errors, theirs)
    if gap is not None:
        print(f"  closest choice between two experts: {float(gap):.1e} of a logit")
    if "change_without_yarn" in reference:
        print(f"  without YaRN logits would change by {float(reference['change_without_yarn']):.2f} of the largest")
    # The same weights at other addresses: torch may add in another order.
    off = share(reference["exported/logits"], reference["float32/logits"])
    exported = bool(reference["exported/equal"]) and off <= FLOOR
    fine &= same(f"transformers loads the same weights from what Libra exports, logits within {off:.0e}", exported)
    return fine & same("Libra reads the same weights and config from what transformers saves", reads_saved(folder))


def reads_saved(folder: Path) -> bool:
    _, params = load(folder, MESHES["2 pools of 2"], {})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    try:
        saved = jax.tree.leaves(read_weights(folder / "saved", shapes))
        config = config_from_hugging_face(folder / "saved")
    except ValueError as error:
        print(f"  {error}")
        return False
    equal = all(map(np.array_equal, saved, jax.tree.leaves(params)))
    return equal and config == config_from_hugging_face(folder)


def record(name: str, digest: str, reference: Tensors) -> None:
    """Writes what transformers says in float64, rounded to float32, and how far its own float32 is from it."""
    found: dict[str, Any] = {"digest": np.array(digest), "versions": reference["versions"]}
    for key, value in reference.items():
        quantity = key.removeprefix("float64/")
        if quantity == key or quantity == "gap":
            continue
        kept = value[ROWS] if quantity == "logits" else value
        found[quantity] = kept.astype(np.float32) if kept.ndim else kept
        found[f"error/{quantity}"] = np.float32(share(reference[f"float32/{quantity}"], value))
    RECORDED.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED / f"{name}.npz", **found)
    print(f"  recorded: {(RECORDED / f'{name}.npz').stat().st_size:,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description="Libra beside Hugging Face transformers")
    parser.add_argument("python", help="of the environment with torch")
    parser.add_argument("--record", action="store_true", help="rewrite tests/parity_data")
    arguments = parser.parse_args()
    start_devices(MeshConfig(2, 2, 2, cpu_devices=8))
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in MODELS]
        digests = [prepare(folder) for folder in folders]
        script = Path(__file__).with_name("parity.py")
        subprocess.run([arguments.python, "-W", "ignore", script, *folders], check=True)
        fine = True
        for number, (folder, digest) in enumerate(zip(folders, digests, strict=True)):
            with np.load(folder / "reference.npz") as file:
                reference = dict(file)
            if number == 0:
                print(f"{reference['versions']}; jax {jax.__version__}. Errors against float64, as shares of a "
                      f"tensor's largest number;\nat most: twice transformers' own + {FLOOR:.0e}")  # fmt: skip
            print(f"\n{folder.name}\n  {'':26} {'Libra float32, in':22} {'error':>10} {'transformers':>13} at most")
            fine &= compare(folder, reference)
            if arguments.record:
                record(folder.name, digest, reference)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
