"""Plans for a loader of your own, from the segment ids that it gives.

    .venv/bin/python examples/own_loader.py

MaxText pads with segment id 0, Levanter with -1 and numbers documents from 0; ids may skip numbers. The order of the
batch is the loader's, unless it is put into a better one first: `place` says which sequences should share a pool.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight virtual devices

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import libra_jax
from libra_jax.workload import sequence_seconds

SPEC = libra_jax.PoolSpec(
    seq_len=1024, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=16, block=32, dtype="float32"
)
MESH = jax.make_mesh((2, 2, 2), ("pool", "dp", "cp"))


def levanter_like_batches() -> Iterator[dict[str, np.ndarray]]:
    """Four sequences each, documents numbered through the whole stream, padding -1."""
    rng, document = np.random.default_rng(0), 0
    while True:
        segment_ids = np.full((4, SPEC.seq_len), -1)
        for row in segment_ids:
            start = 0
            while start < SPEC.seq_len - 100:
                length = min(int(rng.lognormal(4.5, 1.2)) + 1, SPEC.seq_len - start)
                row[start : start + length] = document
                start, document = start + length, document + 1
        yield {"tokens": rng.integers(1, 100, segment_ids.shape), "segment_ids": segment_ids}


@jax.jit
def attention(weights, tokens, plans):
    """weights (100, 8, 16): queries, keys and values of each token."""
    heads = weights[tokens]
    return libra_jax.libra_attention(heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:], plans, spec=SPEC, mesh=MESH)


def main() -> None:
    weights = 0.02 * jax.random.normal(jax.random.key(0), (100, 8, 16))
    for number, batch in zip(range(3), levanter_like_batches(), strict=False):
        lengths = libra_jax.lengths_from_segment_ids(batch["segment_ids"], padding_id=-1)
        work = [sequence_seconds(documents, SPEC) for documents in lengths]
        order = libra_jax.place(work, SPEC.pool_size).reshape(-1)
        batch = {name: array[order] for name, array in batch.items()}

        plans = libra_jax.plans_from_segment_ids(batch["segment_ids"], SPEC, padding_id=-1)
        libra_jax.check_batch(plans, batch["segment_ids"], padding_id=-1)
        size = jnp.linalg.norm(attention(weights, batch["tokens"], plans))
        print(f"batch {number}: order {order.tolist()}, |output| {size:.3f}")


if __name__ == "__main__":
    main()
