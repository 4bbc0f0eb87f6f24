"""The whole pipeline: text files -> `libra prepare` -> packed, placed and planned batches -> attention.

    .venv/bin/python examples/prepared_folder.py

Prepares this repository's documentation as byte tokens, and takes the batches of three steps from it, read and planned
ahead in the background. What a step needs comes in one dict; the state of the iterator is a few numbers. The weights
stay as they are: this is about data.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight virtual devices

import jax
import jax.numpy as jnp

import libra_jax
from libra_jax.cli import main as libra
from libra_jax.data import VOCAB_SIZE, DataConfig, open_batches

ROOT = Path(__file__).parent.parent
SPEC = libra_jax.PoolSpec(
    seq_len=4096, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=16, block=64, dtype="float32"
)
MESH = jax.make_mesh((2, 2, 2), ("pool", "dp", "cp"))


@jax.jit
def step(weights, batch, plans):
    """Mean loss of next tokens from one layer of attention; weights (VOCAB_SIZE, 8, 16)."""
    heads = weights[batch["tokens"]]  # (sequences, seq_len, 8, 16)
    q, k, v = heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
    out = libra_jax.libra_attention(q, k, v, plans, spec=SPEC, mesh=MESH)
    logits = jnp.einsum("nthd,whd->ntw", out, weights[:, :4])
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(batch["targets"], 0)[..., None], axis=-1)
    real = batch["targets"] >= 0
    return jnp.sum(losses[..., 0], where=real) / jnp.sum(real, dtype=losses.dtype)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/docs"
        if libra(["prepare", str(ROOT / "docs"), str(ROOT / "README.md"), "--tokenizer", "bytes", "--out", out]):
            raise SystemExit(1)
        batches = open_batches(DataConfig(paths=(out,), held_out=0.1), SPEC, pools=2, seed=0)
        print("\n".join(batches.batches.corpora[0].describe()))
        weights = 0.02 * jax.random.normal(jax.random.key(0), (VOCAB_SIZE, 8, 16))
        for number in range(3):
            batch = next(batches)
            arrays = {name: batch[name][0] for name in ("tokens", "targets")}  # the first, and only, micro-step
            plans = batch["plans"].map(lambda table: table[0])
            imbalance = max(stats.imbalance for stats in batch["stats"])
            print(f"step {number}: loss {step(weights, arrays, plans):.3f}, busiest rank {imbalance:.3f} of the mean")
        print("to go on from here:", batches.get_state()["next_step"])
        batches.close()


if __name__ == "__main__":
    main()
