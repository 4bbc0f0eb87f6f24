"""Qwen3-0.6B from a Hugging Face folder and back into one, on the CPU: what `make qwen3-0.6b` runs and reports.

    PYTHONPATH=.:tests python tools/qwen3_0_6b.py PYTHON [--folder F] [--weights F] [--tiny] [--report F] [--json F]

Text is prepared, weights are imported, trained for three steps of sequences of 4,096 tokens and exported, each by the
command a user has; then transformers, in the environment of PYTHON, loads what was exported and gives its logits, and
so does Libra from the checkpoint. Every stage is a process of its own: its seconds and its peak memory are measured.
Stages that are done are not repeated; an interrupted run goes on at the one it was in. Exits 1 where logits, losses or
weights are not as they must be.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from safetensors import safe_open

from benchmarks.reporting import machine, markdown

TEXTS = ("docs", "configs", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
"""What is trained on: prose and code, documents of 1 to 37 KB."""
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_shard_size": "400MB",
}
"""The published shape, in the words of transformers."""
TINY = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_shard_size": "100KB",
}
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """A model of the shape of Qwen3-0.6B: imported, trained for three steps, exported, and loaded by transformers."""

    python: Annotated[str, tyro.conf.Positional]
    """Python of the environment with torch and transformers."""
    folder: Path = Path("runs/qwen3_0_6b")
    """Where all of it is kept, many GB. What is done there already is not repeated."""
    weights: Path | None = None
    """Folder with the published weights of Qwen3-0.6B; None: transformers makes random ones."""
    tiny: bool = False
    """A much smaller model and sequences of 256 tokens, to try this program."""
    report: Path | None = None
    """Write what was measured to this file, as Markdown."""
    json: Path | None = None
    """Write what was measured to this file."""

    def __post_init__(self) -> None:
        if self.tiny and self.weights:
            raise ValueError("--tiny makes its own weights: leave --weights out")

    @property
    def source(self) -> Path:
        return self.weights or self.folder / "hugging_face"

    @property
    def overrides(self) -> list[str]:
        """Of the config qwen3_0_6b_4k, for import, training and export alike."""
        rate = "2e-5" if self.weights else "3e-4"  # random weights have further to go
        words = f"--run-dir {self.folder}/run --data.paths {self.folder}/tokens --steps {STEPS} "
        words += "--mesh.pool-size 2 --mesh.cp 1 --mesh.cpu-devices 2 --model.compute-dtype float32 "
        words += f"--optimizer.warmup-steps 1 --optimizer.learning-rate {rate} --model.loss-chunk 512"
        if self.tiny:
            words += " --seq-len 256"
            for ours, theirs in (
                ("vocab-size", "vocab_size"),
                ("hidden-size", "hidden_size"),
                ("intermediate-size", "intermediate_size"),
                ("num-layers", "num_hidden_layers"),
                ("num-heads", "num_attention_heads"),
                ("num-kv-heads", "num_key_value_heads"),
                ("head-dim", "head_dim"),
            ):
                words += f" --model.{ours} {TINY[theirs]}"
        return words.split()


def stages_of(options: Options) -> dict[str, list[Any]]:
    """{what is done: command}, in order."""
    there, tools = options.folder, Path(__file__).parent
    libra = [sys.executable, "-m", "libra_jax.cli"]
    torch = [options.python, "-W", "ignore", tools / "qwen3_0_6b_torch.py"]
    ours = [sys.executable, tools / "qwen3_0_6b_logits.py", there / "run"]
    config = ["--config", "qwen3_0_6b_4k", *options.overrides]
    exported, rows, documents = (there / name for name in ("exported", "rows.json", "documents.json"))
    made = {} if options.weights else {"make weights": [*torch, "make", options.source, there / "shape.json"]}
    return made | {
        "libra prepare": [*libra, "prepare", *TEXTS, "--tokenizer", "bytes", "--out", there / "tokens"],
        "libra import": [*libra, "import", options.source, *config],
        "libra train": [*libra, "train", "qwen3_0_6b_4k", *options.overrides],
        "libra export": [*libra, "export", there / "run", "--out", exported, "--dtype", "float32", *config],
        "Libra, imported": [*ours, 0, rows, there / "ours_0.npy", *options.overrides],
        "Libra, trained": [*ours, STEPS, rows, there / "ours_3.npy", *options.overrides],
        "transformers, source": [*torch, "logits", options.source, documents, there / "theirs_0.npy"],
        "transformers, source, float64": [*torch, "logits", options.source, documents, there / "wide_0.npy", "float64"],
        "transformers, exported": [*torch, "logits", exported, documents, there / "theirs_3.npy"],
        "transformers, exported, float64": [
            *torch,
            "logits",
            there / "exported",
            documents,
            there / "wide_3.npy",
            "float64",
        ],
    }


def measured(command: list[Any]) -> dict[str, Any]:
    """Runs it. Returns {"seconds", "processor_seconds", "peak_bytes"}: of the process, and of those it waited for."""
    begin = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"this ended with {process.returncode}: {subprocess.list2cmdline(map(str, command))}")
    return {
        "seconds": time.perf_counter() - begin,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
    }


def run_stages(options: Options) -> dict[str, dict[str, Any]]:
    """{stage: what `measured` gives}; those that are in the folder's stages.json already are not run again."""
    file = options.folder / "stages.json"
    shown = [str(options.source), *options.overrides]
    kept = json.loads(file.read_text()) if file.exists() else {"options": shown, "stages": {}}
    if kept["options"] != shown:
        raise SystemExit(f"{file} is of a run with other options; give another --folder, or remove that one")
    for name, command in stages_of(options).items():
        if name in kept["stages"]:
            continue
        print(f"\n== {name}", flush=True)
        kept["stages"][name] = measured(command)
        file.write_text(json.dumps(kept, indent=1) + "\n")
    return kept["stages"]


def write_inputs(options: Options) -> None:
    """shape.json for the random model; rows.json and documents.json: text of the README whose logits are compared, two
    packed sequences of three documents, and the same documents in a row."""
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "shape.json").write_text(json.dumps(SHAPE | (TINY if options.tiny else {})))
    if (options.folder / "rows.json").exists():
        return
    length = 128 if options.tiny else 512
    text = list(Path("README.md").read_bytes()[: 2 * length])
    cut = length * 5 // 8
    rows = [[text[:cut], text[cut:length]], [text[length:]]]
    (options.folder / "rows.json").write_text(json.dumps(rows))
    (options.folder / "documents.json").write_text(json.dumps([document for row in rows for document in row]))


def compare(folder: Path) -> dict[str, Any]:
    """Differences of logits, as shares of the largest: each side's float32 against transformers' float64."""
    from parity_base import (  # imports jax: late, as processes started from here would count its memory
        FLOOR,
        bound,
        share,
    )

    found: dict[str, Any] = {"floor": FLOOR}
    wide = {step: np.load(folder / f"wide_{step}.npy", mmap_mode="r") for step in (0, STEPS)}
    found["tokens"], found["largest"] = wide[STEPS].shape[0], float(np.abs(wide[STEPS]).max())
    for step, want in wide.items():
        ours, theirs = (np.load(folder / f"{side}_{step}.npy", mmap_mode="r") for side in ("ours", "theirs"))
        errors = {"libra": share(ours, want), "transformers": share(theirs, want), "between": share(ours, theirs)}
        errors["at_most"] = bound(errors["transformers"])
        found[f"step {step}"] = errors
        same = (np.asarray(ours).argmax(-1) == np.asarray(want).argmax(-1)).mean()
        errors["same_first_choice"] = float(same)
    found["changed_by_training"] = share(wide[0], wide[STEPS])
    return found


def judge(found: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    wrong = []
    losses = [row["loss"] for row in found["losses"]]
    if len(losses) != STEPS or not np.isfinite(losses).all() or losses[-1] >= losses[0]:
        wrong.append(f"the losses of {STEPS} steps must be finite and fall: {losses}")
    for step in (0, STEPS):
        errors = found["logits"][f"step {step}"]
        if errors["libra"] > errors["at_most"]:
            wrong.append(f"logits after step {step} are off by {errors['libra']:.1e}, at most {errors['at_most']:.1e}")
    changed = found["logits"]["changed_by_training"]
    if changed < 1000 * found["logits"][f"step {STEPS}"]["at_most"]:
        wrong.append(f"training changed logits by {changed:.1e} only, so that their comparison says little of it")
    return wrong


def folder_bytes(folder: Path) -> dict[str, int]:
    """{"files", "bytes", "largest", "parameters"} of the safetensors in it."""
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    parameters = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return {"files": len(sizes), "bytes": sum(sizes), "largest": max(sizes), "parameters": parameters}


def gather(options: Options, stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    records = [json.loads(line) for line in (options.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    torch = subprocess.run(
        [options.python, "-c", "import torch, transformers as t; print(f'torch {torch.__version__}, transformers '"
         "f'{t.__version__}')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = {
        "machine": machine("jax", "flax", "optax", "orbax-checkpoint", "safetensors"),
        "reference": torch.stdout.strip(),
        "weights": "published" if options.weights else "random",
        "overrides": options.overrides,
        "stages": stages,
        "source": folder_bytes(options.source),
        "exported": folder_bytes(options.folder / "exported"),
        "losses": records,
        "logits": compare(options.folder),
    }
    return found | {"wrong": judge(found)}


def lines_of(found: dict[str, Any]) -> list[str]:
    """The report."""
    logits = found["logits"]
    parameters = found["exported"]["parameters"]
    gigabytes = 1e9
    source, memory = found["source"], f"{4 * parameters / gigabytes:.2f} GB, {12 * parameters / gigabytes:.2f} GB"
    lines = [
        f"{found['weights'].capitalize()} weights, {parameters:,} parameters: {source['bytes'] / gigabytes:.2f} GB of "
        f"bfloat16 in {source['files']} files,",
        f"the largest {source['largest'] / gigabytes:.2f} GB. In a run, as float32, {memory} with the optimizer's "
        "moments.",
        "Options of import, training and export:",
        "",
        *(f"    {line}" for line in textwrap.wrap(" ".join(found["overrides"]), 110, break_on_hyphens=False)),
        "",
        "## Stages",
        "",
        "Each is a process of its own. Peak: of resident memory, mapped files included.",
        "",
    ]
    rows = [
        [name, f"{x['seconds']:.0f}", f"{x['processor_seconds']:.0f}", f"{x['peak_bytes'] / gigabytes:.2f}"]
        for name, x in found["stages"].items()
    ]
    lines += markdown(["stage", "seconds", "of processors", "peak, GB"], rows)
    lines += ["", "## Training", ""]
    columns = {"step": "step", "loss": "loss", "grad_norm": "gradient norm", "seconds": "seconds"}
    columns = {key: name for key, name in columns.items() if key in found["losses"][0]}
    lines += markdown(
        [*columns.values()],
        [[f"{row[key]:.4f}" if isinstance(row[key], float) else str(row[key]) for key in columns]
         for row in found["losses"]],
    )  # fmt: skip
    lines += [
        "",
        "## Logits",
        "",
        f"Of {logits['tokens']:,} tokens of text, three documents. Libra takes them packed into two sequences of one "
        "pool, from a checkpoint;",
        "transformers takes them one by one, from the folder that was imported (step 0) or from the one exported.",
        f"Differences are shares of the largest logit ({logits['largest']:.2f}); Libra's may be at most twice that of "
        "transformers' own",
        f"float32, plus {logits['floor']:.0e}.",
        "",
    ]
    rows = []
    for step in (0, STEPS):
        errors = logits[f"step {step}"]
        shares = [f"{errors[key]:.1e}" for key in ("libra", "at_most", "transformers", "between")]
        rows.append([str(step), *shares, f"{errors['same_first_choice']:.2%}"])
    columns = ["step", "Libra against float64", "at most", "transformers' float32 against it", "between the two",
               "same likeliest token"]  # fmt: skip
    lines += markdown(columns, rows)
    lines += ["", f"Training changed logits by {logits['changed_by_training']:.2f} of the largest.", ""]
    return (
        lines
        + [f"NOT AS IT MUST BE: {line}" for line in found["wrong"] or ()]
        + ([] if found["wrong"] else ["All is as it must be."])
    )


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    write_inputs(options)
    found = gather(options, run_stages(options))
    lines = lines_of(found)
    print("\n" + "\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.report:
        title = [
            "# Qwen3-0.6B, from a Hugging Face folder and back",
            "",
            f"{found['machine']} {found['reference']}.",
            "",
        ]
        options.report.write_text("\n".join(title + lines) + "\n")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
