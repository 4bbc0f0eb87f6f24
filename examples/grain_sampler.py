"""Placement in a pipeline of your own: a Grain `DataLoader` over a dataset that is packed already.

    .venv/bin/python examples/grain_sampler.py

The dataset is any random-access source of packed sequences; all that has to be known beforehand are the document
lengths of each. `PlacementSampler` says which records a step has and in which order; `plans(step)` gives the plans that
go with them. In a job of N processes, process i gives `PlacementSampler(..., shards=N)` and `ShardOptions(i, N)`, and
asks for `plans(step, i)`; with `worker_count=W`, the sampler is told `workers=W`.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight virtual devices

import grain
import jax
import jax.numpy as jnp
import numpy as np

import libra_jax
from libra_jax.data import PlacementSampler, PoolSampler

SPEC = libra_jax.PoolSpec(
    seq_len=1024, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=16, block=32, dtype="float32"
)
MESH = jax.make_mesh((2, 2, 2), ("pool", "dp", "cp"))


class PackedDataset:
    """60 packed sequences, some of one long document and some of many short ones."""

    def __init__(self) -> None:
        self.lengths = [[1000 - i] if i % 3 == 0 else [20 + i] * (1024 // (20 + i)) for i in range(60)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids = np.repeat(np.arange(1, len(self.lengths[index]) + 1), self.lengths[index])
        tokens = np.random.default_rng(index).integers(1, 100, len(ids))
        pad = (0, SPEC.seq_len - len(ids))
        return {"tokens": np.pad(tokens, pad), "segment_ids": np.pad(ids, pad)}


@jax.jit
def attention(weights, tokens, plans):
    """weights (100, 8, 16): queries, keys and values of each token."""
    heads = weights[tokens]
    return libra_jax.libra_attention(heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:], plans, spec=SPEC, mesh=MESH)


def main() -> None:
    dataset = PackedDataset()
    sampler = PoolSampler(dataset.lengths, SPEC, pools=2, seed=0, last_step="drop")  # 4 sequences a step
    placed = PlacementSampler(sampler, steps=sampler.steps_per_epoch)
    loader = grain.DataLoader(
        data_source=dataset,
        sampler=placed,
        operations=[grain.transforms.Batch(placed.records_per_step, drop_remainder=True)],
        worker_count=0,
        shard_options=grain.sharding.ShardOptions(shard_index=0, shard_count=1, drop_remainder=True),
    )
    weights = 0.02 * jax.random.normal(jax.random.key(0), (100, 8, 16))
    for step, batch in zip(range(3), loader, strict=False):
        plans = placed.plans(step).map(lambda table: table[0])  # the first, and only, micro-step
        libra_jax.check_batch(plans, batch["segment_ids"])
        size = jnp.linalg.norm(attention(weights, batch["tokens"], plans))
        arrived = sampler.work(sampler.step_sequences(step).reshape(2, 2)).sum(axis=1)  # pools as the sequences came
        pools = sampler.work(sampler[step])[0].sum(axis=1)
        ratios = f"{pools.max() / pools.mean():.3f} of the mean ({arrived.max() / arrived.mean():.3f} as they came)"
        print(f"step {step}: |output| {size:.3f}, busiest pool {ratios}")


if __name__ == "__main__":
    main()
