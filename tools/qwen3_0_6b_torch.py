"""What transformers does for tools/qwen3_0_6b.py, in the environment of `make parity`, which has torch and no jax:

    qwen3_0_6b_torch.py make FOLDER SHAPE.json      a random Qwen3 in bfloat16, in several safetensors files
    qwen3_0_6b_torch.py logits FOLDER DOCUMENTS.json OUT.npy [float64]

DOCUMENTS.json: a list of lists of token ids. OUT.npy: (tokens of all documents, vocab), document by document. With
float64 everything is computed in it, see tools/parity.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from parity import float32_is_float64, load, logits_of
from transformers import Qwen3Config, Qwen3ForCausalLM

SEED = 6


def make(folder: Path, shape: Path) -> None:
    """shape: fields of transformers' Qwen3Config, and "max_shard_size"."""
    fields = json.loads(shape.read_text())
    shard = fields.pop("max_shard_size")
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(Qwen3Config(**fields)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)


def logits(folder: Path, documents: Path, out: Path, wide: bool) -> None:
    tokens = [torch.tensor([ids]) for ids in json.loads(documents.read_text())]
    with float32_is_float64() if wide else contextlib.nullcontext():
        model = load(folder, torch.float64 if wide else torch.float32)
        np.save(out, logits_of(model, tokens))


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    what, *rest = sys.argv[1:]
    if what == "make":
        make(Path(rest[0]), Path(rest[1]))
    else:
        logits(Path(rest[0]), Path(rest[1]), Path(rest[2]), rest[3:] == ["float64"])
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
