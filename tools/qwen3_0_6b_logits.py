"""Libra's logits for tools/qwen3_0_6b.py: of documents packed into one pool, from a checkpoint of a run.

    PYTHONPATH=tests python tools/qwen3_0_6b_logits.py RUN_DIR STEP DOCUMENTS.json OUT.npy OVERRIDE...

DOCUMENTS.json: a list of packed sequences, each a list of documents, each a list of token ids; all sequences are full.
OUT.npy: (tokens of all documents, vocab) float32, in that order. OVERRIDE: of the config qwen3_0_6b_4k, as the run was
trained with it. There is one rank to a sequence.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from train_base import pack

from libra_jax.cli import load_config, override
from libra_jax.train.config import MeshConfig
from libra_jax.train.loop import RunFolder
from libra_jax.train.mesh import make_mesh, start_devices
from libra_jax.train.step import plan_state
from libra_jax.train.weights_command import restore_params


def main() -> None:
    run_dir, step, documents, out, *overrides = sys.argv[1:]
    rows = json.loads(Path(documents).read_text())
    tokens = np.array([np.concatenate(row) for row in rows])
    size = len(rows)
    config = dataclasses.replace(
        override(load_config("qwen3_0_6b_4k"), overrides, prog="qwen3_0_6b_logits"),
        mesh=MeshConfig(pool_size=size, cpu_devices=size),
        seq_len=tokens.shape[1],
    )
    start_devices(config.mesh)
    mesh = make_mesh(config.mesh)
    params = restore_params(RunFolder(Path(run_dir)), int(step), config, mesh)
    graph = plan_state(config, mesh).graph
    batch = pack([[len(document) for document in row] for row in rows], tokens, config.spec)
    plans = jax.tree.map(lambda x: x[0], batch.plans)
    logits = jax.jit(lambda params, *rest: nnx.merge(graph, params)(*rest))
    found = logits(params, batch.tokens[0], batch.positions[0], plans)
    np.save(out, np.asarray(found).reshape(tokens.size, -1))


if __name__ == "__main__":
    main()
