"""One of the two processes of benchmarks/two_ranks.py: makes the programs, runs them in turn, process 0 writes times.

    python -m benchmarks.two_ranks_worker OPTIONS.pickle RESULT.json ADDRESS COUNT INDEX

Plain: each sequence is a pool of its own, so that nothing is exchanged. Pooled: both are one pool. The same numbers
come in, and the output and dq have the same bits; this is checked before anything is timed.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import libra_jax
from benchmarks.two_ranks import Options
from libra_jax import planner
from libra_jax.attention import MESH_AXES, PLAN_SPEC, SEQUENCE_SPEC
from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.processes import join_processes
from libra_jax.spec import PoolSpec
from libra_jax.train.config import AttentionConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.mesh import place_batch
from libra_jax.train.step import compile_step, plan_state
from libra_jax.workload import CostModel, Measurements

Call = Callable[[], Any]
SIDES = ("plain", "pooled")


class Side(NamedTuple):
    """One way to lay two sequences on two ranks."""

    config: TrainConfig
    mesh: Mesh

    @property
    def spec(self) -> PoolSpec:
        return self.config.spec

    def plans(self, lengths: Sequence[Sequence[int]]) -> list[libra_jax.Plan]:
        policy = planner.pooled if self.spec.pool_size == 2 else planner.at_home
        size = self.spec.pool_size
        plans = [libra_jax.plan_pool(lengths[i : i + size], self.spec, policy=policy) for i in range(0, 2, size)]
        for plan in plans:
            assert plan.stats.fallback is None, plan.stats.fallback
        return plans


class Turn(NamedTuple):
    """Of one run: seconds of the slower rank, processor seconds of the busier, cores that other programs used."""

    seconds: float
    processor: float
    foreign: float


def main(options_file: str, result_file: str, *process: str) -> None:
    join_processes(process)
    options = Options(**pickle.loads(Path(options_file).read_bytes()))
    deadline = time.monotonic() + 60 * options.minutes
    found: dict[str, Any] = {"wire_seconds": measure_wire(options), "rows": [], "rest_seconds": {}}
    measurements: list[tuple[Measurements, Measurements]] = []
    sizes = zip(options.tokens, options.rounds, options.skews, options.steps, strict=True)
    for tokens, rounds, skews, steps in sizes:
        say(f"{tokens} tokens: compiling")
        sides = {name: make_side(name, tokens, options) for name in SIDES}
        passes = compile_passes(sides, options)
        step = Step(sides) if steps else None
        if len(measurements) < 2:
            measurements.append(calibrate(sides["plain"], passes, rounds))
        for number, short in enumerate(options.documents[:skews]):
            short = short or tokens // 2
            lengths = [[tokens], [short] * (tokens // short)]
            plans = {name: side.plans(lengths) for name, side in sides.items()}
            inputs = {name: operator_inputs(side, plans[name]) for name, side in sides.items()}
            same_results(passes, inputs)
            calls: dict[str, dict[str, Call]] = {
                which: {name: bind(compiled[name], inputs[name]) for name in SIDES}
                for which, compiled in passes.items()
            }
            if step is not None and number < steps:
                calls["step"] = {name: step.call(name, lengths, plans[name]) for name in SIDES}
            for which, pair in calls.items():
                found["rows"].append(
                    {"tokens": tokens, "short": short, "pass": which}
                    | describe(sides, plans)
                    | in_turn(pair, rounds, deadline, options)
                )
                say_row(found["rows"][-1])
        if step is not None:
            lengths = even_lengths(sides["plain"])
            plain = sides["plain"].plans(lengths)
            seconds = median_of(step.call("plain", lengths, plain), 5)
            found["rest_seconds"][tokens] = {
                "step": seconds,
                "pages": work_of(plain, "work"),
                "blocks": work_of(plain, "blocks"),
            }
    forward, backward = (
        tuple(np.concatenate(columns) for columns in zip(*which, strict=True))
        for which in zip(*measurements, strict=True)
    )
    cost = CostModel.fit(make_side("plain", options.tokens[0], options).spec, forward, backward)  # pyright: ignore[reportArgumentType]
    found["cost_model"] = dataclasses.asdict(cost)
    if jax.process_index() == 0:
        Path(result_file).write_text(json.dumps(found))


def make_side(name: str, tokens: int, options: Options) -> Side:
    pools, pool_size = (2, 1) if name == "plain" else (1, 2)
    config = TrainConfig(
        model=Qwen3Config(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=1, num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads, head_dim=options.head_dim, compute_dtype=options.dtype,
        ),
        data=DataConfig(paths=("none",)),
        mesh=MeshConfig(pools, pool_size, 1),
        attention=AttentionConfig(block=options.block, waves=options.waves, capacity=options.capacity),
        optimizer=OptimizerConfig(warmup_steps=1),
        seq_len=tokens,
        steps=1000,
    )  # fmt: skip
    mesh = jax.make_mesh((pools, pool_size, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    return Side(config, mesh)


def even_lengths(side: Side) -> list[list[int]]:
    """Documents of one block, in both sequences: hardly any attention, and as much on each rank."""
    return [[side.spec.block] * side.spec.blocks_per_sequence] * 2


def compile_passes(sides: dict[str, Side], options: Options) -> dict[str, dict[str, Any]]:
    """The operator's programs: {"forward" and "both": {side: compiled(q, k, v, d_out, plans)}}."""
    compiled: dict[str, dict[str, Any]] = {"forward": {}, "both": {}}
    for name, side in sides.items():
        attention = bind_attention(side, options)

        def both(q, k, v, d_out, plans, attention=attention):
            out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, plans), q, k, v)
            return out, *pull(d_out)

        def forward(q, k, v, d_out, plans, attention=attention):
            return (attention(q, k, v, plans),)

        inputs = operator_inputs(side, side.plans([[side.spec.seq_len]] * 2))
        for which, function in (("forward", forward), ("both", both)):
            compiled[which][name] = jax.jit(function).lower(*inputs).compile()
    return compiled


def bind_attention(side: Side, options: Options) -> Callable[..., jax.Array]:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, plans: Any) -> jax.Array:
        return libra_jax.libra_attention(
            q, k, v, plans, spec=side.spec, mesh=side.mesh, implementation="xla", transport=options.transport
        )

    return attention


def operator_inputs(side: Side, plans: Sequence[libra_jax.Plan]) -> list[Any]:
    spec, rng = side.spec, np.random.default_rng(0)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
    shapes = [(2, spec.seq_len, h, spec.head_dim) for h in heads]
    arrays = [rng.standard_normal(shape, np.float32).astype(jnp.dtype(spec.dtype)) for shape in shapes]
    home, tables = NamedSharding(side.mesh, SEQUENCE_SPEC), NamedSharding(side.mesh, PLAN_SPEC)

    def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    stacked = jax.tree.map(lambda table: place(table, tables), libra_jax.stack_plans(plans))
    return [*(place(array, home) for array in arrays), stacked]


def same_results(passes: dict[str, dict[str, Any]], inputs: dict[str, list[Any]]) -> None:
    """Runs everything once, which also warms it up, and holds output and gradients of one side against the other's."""
    for compiled in passes.values():
        plain, pooled = ([x.addressable_shards[0].data for x in compiled[name](*inputs[name])] for name in SIDES)
        for number, (a, b) in enumerate(zip(plain, pooled, strict=True)):
            if number < 2:  # output and dq
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), "plain and pooled differ in a bit"
            else:
                np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.1, atol=0.1)


class Step:
    """The trainer's step, compiled for both sides. Each keeps a state of its own, which its runs carry on."""

    def __init__(self, sides: dict[str, Side]) -> None:
        self.sides = sides
        self.compiled: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        for name, side in sides.items():
            blueprint = plan_state(side.config, side.mesh)
            even = even_lengths(side)
            arrays, plans = self._batch(side, even, side.plans(even))
            self.compiled[name] = compile_step(side.config, side.mesh, blueprint, arrays, plans)
            self.states[name] = blueprint.init()
            jax.block_until_ready(self.call(name, even, side.plans(even))())

    def call(self, name: str, lengths: Sequence[Sequence[int]], plans: Sequence[libra_jax.Plan]) -> Call:
        side = self.sides[name]
        batch = place_batch(side.mesh, *self._batch(side, lengths, plans))

        def run() -> Any:
            self.states[name], numbers = self.compiled[name](self.states[name], *batch)
            return self.states[name], numbers

        return run

    @staticmethod
    def _batch(side: Side, lengths: Sequence[Sequence[int]], plans: Sequence[libra_jax.Plan]) -> tuple[dict, Any]:
        rng = np.random.default_rng(1)
        tokens = rng.integers(0, 256, (1, 2, side.spec.seq_len)).astype(np.int32)
        positions = np.stack([np.concatenate([np.arange(n) for n in sequence]) for sequence in lengths])[None]
        arrays = {"tokens": tokens, "targets": np.roll(tokens, -1, 2), "positions": positions.astype(np.int32)}
        return arrays, libra_jax.stack_plans(plans).map(lambda table: table[None])


def calibrate(side: Side, passes: dict[str, dict[str, Any]], rounds: int) -> tuple[Measurements, Measurements]:
    """Seconds of the plain operator where both ranks do the same: (pages, blocks, launches, seconds), each (3,)."""
    found: list[tuple[int, int, float, float]] = []
    for short in (side.spec.seq_len, side.spec.seq_len // 4, side.spec.block):
        plans = side.plans([[short] * (side.spec.seq_len // short)] * 2)
        inputs = operator_inputs(side, plans)
        for compiled in passes.values():
            jax.block_until_ready(compiled["plain"](*inputs))
        forward, both = (median_of(bind(passes[which]["plain"], inputs), rounds) for which in ("forward", "both"))
        found.append((work_of(plans, "work")[0], work_of(plans, "blocks")[0], forward, max(both - forward, 1e-6)))
    pages, blocks, forward, backward = map(np.array, zip(*found, strict=True))
    launches = np.ones(len(found))
    return (pages, blocks, launches, forward), (pages, blocks, launches, backward)


def measure_wire(options: Options) -> dict[str, float]:
    """Seconds that the transport's collective takes: per byte to the other rank, and for none at all."""
    mesh = jax.make_mesh((2,), ("rank",), axis_types=(AxisType.Auto,))

    def swap(x: jax.Array) -> jax.Array:
        if options.transport == "ppermute":
            return lax.ppermute(x[1:], "rank", [(0, 1), (1, 0)])
        return lax.all_to_all(x, "rank", 0, 0, tiled=True)

    spread = PartitionSpec("rank")
    compiled = jax.jit(jax.shard_map(swap, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False))
    sizes, seconds = np.array([1e5, 1e6, 4e6, 16e6]), []
    for size in sizes:
        shape = (4, int(size) // 2)
        x = jax.make_array_from_callback(
            shape, NamedSharding(mesh, spread), lambda index, shape=shape: np.ones(shape, np.uint16)[index]
        )
        jax.block_until_ready(compiled(x))
        seconds.append(median_of(bind(compiled, [x]), 9))
    table = np.stack([sizes, np.ones(len(sizes))], axis=1) / np.array(seconds)[:, None]
    per_byte, none = np.linalg.lstsq(table, np.ones(len(sizes)), rcond=None)[0]
    return {"per_byte": float(per_byte), "per_exchange": max(float(none), 0.0)}


def describe(sides: dict[str, Side], plans: dict[str, list[libra_jax.Plan]]) -> dict[str, Any]:
    """What the plans say about each rank, and what the pooled program moves."""
    spec, stats = sides["pooled"].spec, plans["pooled"][0].stats
    rows = spec.block * spec.group * spec.head_dim * spec.item_bytes
    first, delta = 4 * spec.block, 4 * spec.block * spec.group
    blocks, pages = spec.room.pair_blocks, spec.room.pair_pages * spec.page_bytes
    # Each rank to the other, useful or not, summed over exchanges: the padded transports move the room of a pair.
    forward = blocks * (2 * rows + first) + pages
    backward = blocks * (3 * rows + first + delta) + 2 * pages
    return {
        "work": {name: work_of(plans[name], "work") for name in SIDES},
        "blocks": {name: work_of(plans[name], "blocks") for name in SIDES},
        "moved_bytes": {"forward": forward, "backward": backward},
        "useful_bytes": int(stats.sent_bytes.max()),
        "exchanges": 2 * spec.exchanges,
    }


def work_of(plans: Sequence[libra_jax.Plan], name: str) -> list[int]:
    return np.concatenate([getattr(plan.stats, name) for plan in plans]).tolist()


def in_turn(pair: dict[str, Call], rounds: int, deadline: float, options: Options) -> dict[str, Any]:
    """Runs both sides in turn; all programs have run before. Rounds in which other programs had more than
    `options.disturbed` of a core are repeated while there is time, and left out if enough others are left."""
    turns: list[dict[str, Turn]] = []

    def clean() -> list[dict[str, Turn]]:
        return [turn for turn in turns if max(x.foreign for x in turn.values()) <= options.disturbed]

    while len(turns) < rounds or (
        len(clean()) < rounds and len(turns) < 3 * rounds and agree(time.monotonic() < deadline)
    ):
        names = SIDES if len(turns) % 2 == 0 else SIDES[::-1]
        turns.append({name: timed(pair[name]) for name in names})
    used = clean() if len(clean()) >= min(rounds, 2) else turns
    return {
        "seconds": {name: statistics.median(turn[name].seconds for turn in used) for name in SIDES},
        "ratio": statistics.median(turn["plain"].seconds / turn["pooled"].seconds for turn in used),
        "processor_ratio": statistics.median(turn["plain"].processor / turn["pooled"].processor for turn in used),
        "foreign": statistics.median(max(x.foreign for x in turn.values()) for turn in used),
        "rounds": len(used),
        "left_out": len(turns) - len(used),
        "clean": used is not turns or len(clean()) == len(turns),
        "all_seconds": {name: [turn[name].seconds for turn in turns] for name in SIDES},
        "all_processor": {name: [turn[name].processor for turn in turns] for name in SIDES},
        "all_foreign": [max(x.foreign for x in turn.values()) for turn in turns],
    }


def median_of(call: Call, rounds: int) -> float:
    """Seconds of a program that has run before."""
    return statistics.median(timed(call).seconds for _ in range(rounds))


def timed(call: Call) -> Turn:
    """Both processes start together. Seconds from there until the slower one is done."""
    multihost_utils.sync_global_devices("start")
    busy, mine, start = busy_seconds(), time.process_time(), time.perf_counter()
    jax.block_until_ready(call())
    seconds, processor = time.perf_counter() - start, time.process_time() - mine
    multihost_utils.sync_global_devices("end")
    whole, own, all_cores = time.perf_counter() - start, time.process_time() - mine, busy_seconds() - busy
    ranks = multihost_utils.process_allgather(np.array([seconds, processor, whole, own, all_cores]))
    seconds, processor, whole, _, all_cores = np.max(ranks, axis=0).tolist()
    foreign = (all_cores - float(np.sum(ranks, axis=0)[3])) / whole
    return Turn(seconds, processor, max(foreign, 0.0))


def busy_seconds() -> float:
    """Seconds that all cores together were not idle, since the machine started; also what other guests took."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100


def agree(here: bool) -> bool:
    """What process 0 says."""
    return bool(multihost_utils.broadcast_one_to_all(np.array(here)))


def bind(function: Callable[..., Any], arguments: Sequence[Any]) -> Call:
    return lambda: function(*arguments)


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(f"two ranks: {line}", flush=True)


def say_row(row: dict[str, Any]) -> None:
    seconds = row["seconds"]
    say(
        f"{row['tokens']} tokens against {row['short']}-token documents, {row['pass']}: "
        f"plain {seconds['plain']:.3f} s, pooled {seconds['pooled']:.3f} s, {row['ratio']:.2f} x, "
        f"processor {row['processor_ratio']:.2f} x, {row['foreign']:.2f} cores busy elsewhere"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
