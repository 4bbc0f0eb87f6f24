"""One of several processes of tests/test_processes.py; `run_processes` starts it.

    process_worker.py FOLDER DEVICES CASE... ADDRESS COUNT INDEX

Runs every case with inputs from a seed, the same in every process, and writes what its own devices hold of the results
to FOLDER/INDEX.npz: {"case name where-in-the-array": shard}.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from libra_jax.processes import join_processes

Shards = dict[str, np.ndarray]
SEQ_LEN = 64


def main(folder: str, devices: str, *rest: str) -> None:
    *cases, address, count, index = rest
    join_processes((address, count, index), devices=int(devices))
    # What reads devices, or takes long to import, comes after.
    assert jax.process_count() == int(count) and jax.local_device_count() == int(devices)
    found: Shards = {}
    for case in cases:
        name, _, layout = case.partition("-")
        sizes = tuple(map(int, layout.split("x")))
        for key, array in {"attention": attention, "step": step}[name](*sizes).items():
            for shard in array.addressable_shards:
                place = ",".join(f"{part.start or 0}" for part in shard.index)
                found[f"{case} {key} {place}"] = np.atleast_1d(np.asarray(shard.data)).view(np.uint8)
    np.savez(Path(folder) / f"{index}.npz", **found)


def attention(pools: int, dp: int, cp: int) -> dict[str, jax.Array]:
    """Output and gradients; in bfloat16 where the pool has more than four ranks."""
    from jax.sharding import NamedSharding
    from operator_base import forward_and_backward, make_mesh, make_plans, random_inputs, skewed_lengths

    from libra_jax.attention import PLAN_SPEC, SEQUENCE_SPEC
    from libra_jax.spec import PoolSpec

    mesh, rng = make_mesh(pools, dp, cp), np.random.default_rng(0)
    dtype = "bfloat16" if dp * cp > 4 else "float32"
    spec = PoolSpec(SEQ_LEN, dp, cp, num_heads=4, num_kv_heads=2, head_dim=8, block=8, capacity=16.0, dtype=dtype)
    lengths = skewed_lengths(rng, pools * dp, SEQ_LEN)
    inputs, plans = random_inputs(rng, pools * dp, spec), make_plans(lengths, spec)

    # Two ways to make global arrays: from what a process holds, and from a function of the place in the array.
    home, tables = NamedSharding(mesh, SEQUENCE_SPEC), NamedSharding(mesh, PLAN_SPEC)

    def from_local_data(array: np.ndarray) -> jax.Array:
        places = home.addressable_devices_indices_map(array.shape).values()
        rows, columns = ([part[axis].indices(array.shape[axis])[:2] for part in places if part] for axis in (0, 1))
        (top, bottom), (left, right) = ((min(a for a, _ in x), max(b for _, b in x)) for x in (rows, columns))
        return jax.make_array_from_process_local_data(home, array[top:bottom, left:right], array.shape)

    arrays = [from_local_data(array) for array in inputs]
    plans = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, tables, lambda index: x[index]), plans)
    with jax.set_mesh(mesh):
        results = forward_and_backward(spec, mesh)(*arrays, plans)
    return dict(zip(("out", "dq", "dk", "dv"), results, strict=True))


def step(pools: int, dp: int, cp: int) -> dict[str, jax.Array]:
    """Loss, gradient norm and updated weights of one optimizer step of the trainer."""
    from train_base import TINY, pack

    from libra_jax.data import DataConfig
    from libra_jax.train.config import AttentionConfig, MeshConfig, OptimizerConfig, TrainConfig
    from libra_jax.train.mesh import make_mesh, place_batch
    from libra_jax.train.step import compile_step, plan_state

    config = TrainConfig(
        model=dataclasses.replace(TINY, num_layers=1),
        data=DataConfig(paths=("none",)),
        mesh=MeshConfig(pools, dp, cp),
        attention=AttentionConfig(block=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        seq_len=SEQ_LEN,
        steps=6,
    )
    mesh = make_mesh(config.mesh)
    lengths = [[64], [1, 20, 3, 9, 1, 5], [40, 24], []]
    tokens = (np.arange(len(lengths))[:, None] * 7 + np.arange(SEQ_LEN)) % TINY.vocab_size
    batch = pack(lengths, tokens, config.spec)
    blueprint = plan_state(config, mesh)
    compiled = compile_step(config, mesh, blueprint, batch.arrays, batch.plans)
    state, numbers = compiled(blueprint.init(), *place_batch(mesh, batch.arrays, batch.plans))
    results: dict[str, Any] = {name: numbers[name] for name in ("loss", "grad_norm")}
    for path, leaf in jax.tree.leaves_with_path(state["params"]):
        results["weight" + jax.tree_util.keystr(path)] = leaf
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
