"""One of several processes of tests/test_processes.py; `run_processes` starts it.

    process_worker.py FOLDER DEVICES CASE... ADDRESS COUNT INDEX

Runs every case with inputs from a seed, the same in every process, and writes what its own devices hold of the results
to FOLDER/INDEX.npz: {"case name where-in-the-array": shard}.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

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


def attention(pools: int, dp: int, cp: int, node: int | None = None) -> dict[str, jax.Array]:
    """Output and gradients; in bfloat16 where the pool has more than four ranks. node: ranks of one, with relays."""
    from jax.sharding import NamedSharding
    from operator_base import forward_and_backward, make_mesh, make_plans, random_inputs, skewed_lengths

    from libra_jax.attention import PLAN_SPEC, SEQUENCE_SPEC
    from libra_jax.spec import PoolSpec

    mesh, rng = make_mesh(pools, dp, cp), np.random.default_rng(0)
    dtype = "bfloat16" if dp * cp > 4 else "float32"
    spec = PoolSpec(
        SEQ_LEN, dp, cp, num_heads=4, num_kv_heads=2, head_dim=8, block=8, capacity=16.0, dtype=dtype,
        waves=3 if node else 2, ranks_per_node=node,
    )  # fmt: skip
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
    """Losses, gradient norms and weights of a few optimizer steps of the trainer, each in pools of `dp` or of twice as
    many sequences: every process makes the rows of its own devices, and its own choices."""
    import jax.numpy as jnp
    from data_base import batches_of, dealt
    from jax.sharding import NamedSharding, PartitionSpec
    from train_base import FAST_LINKS, TINY

    from libra_jax.data import DataConfig
    from libra_jax.data.batches import check_step
    from libra_jax.train.config import AttentionConfig, MeshConfig, OptimizerConfig, TrainConfig
    from libra_jax.train.mesh import local_rows, make_mesh, place_batch
    from libra_jax.train.step import compile_program, plan_state

    config = TrainConfig(
        model=dataclasses.replace(TINY, num_layers=1),
        data=DataConfig(paths=("none",)),
        mesh=MeshConfig(pools, dp, cp, pool_sizes=(2 * dp,), least_saving=0.0, links=FAST_LINKS),
        attention=AttentionConfig(block=8, capacity=16.0),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        seq_len=SEQ_LEN,
        steps=6,
    )
    mesh = make_mesh(config.mesh)
    lengths = np.random.default_rng(1).choice([40, 24, 64, 3, 3, 3, 3], 40)
    batches = batches_of(lengths, config.spec, config.pool_sizes, dealt, local_rows(mesh), pools=pools)
    blueprint = plan_state(config, mesh)
    programs = {size: compile_program(config, mesh, blueprint, size) for size in config.mesh.sizes}
    state, results, sizes = blueprint.init(), {}, []
    for number in range(4):
        batch = batches[number]
        check_step(batch)
        assert batch["tokens"].shape[1] == pools * dp // jax.process_count()
        arrays = {
            "tokens": batch["tokens"] % TINY.vocab_size,
            "targets": np.where(batch["targets"] < 0, -1, batch["targets"] % TINY.vocab_size),
            "positions": batch["positions"],
        }
        program = programs[batch["pool_size"]]
        state, numbers = program.run(
            state, *place_batch(program.mesh, arrays, batch["plans"], batch["rows"], batch["pool_numbers"])
        )
        results |= {f"{name}{number}": numbers[name] for name in ("loss", "grad_norm")}
        sizes.append(batch["pool_size"])
    everywhere = NamedSharding(mesh, PartitionSpec())
    results["sizes"] = jax.jit(lambda: jnp.array(sizes, jnp.int32), out_shardings=everywhere)()
    for path, leaf in jax.tree.leaves_with_path(state["params"]):
        results["weight" + jax.tree_util.keystr(path)] = leaf
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
