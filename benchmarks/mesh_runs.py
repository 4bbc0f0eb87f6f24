"""What benchmarks/mesh.py runs: every policy's plans in one room, programs on the mesh, what is right, what takes long.

Plans are made on the host, the same in every process. Programs are the product's own: `libra_attention` and the
trainer's step. Letters as in `libra_jax.spec`: P sequences of a pool, C ranks of a CP group, N = P C, K kv heads.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from libra_kernels import TileOptions, Tiles, compute_capability_of, reference_attention, tile_backward, tile_forward

from libra_jax.assignments import Policy
from libra_jax.attention import PLAN_SPEC, SEQUENCE_SPEC, libra_attention
from libra_jax.plan import Plan, PlanTables, plan_pool, stack_plans
from libra_jax.policies.packed import pages_of
from libra_jax.policies.travel import Travel, travel
from libra_jax.relays import page_slots
from libra_jax.routing import check_executor
from libra_jax.spec import Capacity, PoolSpec, head_parallel_capacity
from libra_jax.train.config import TrainConfig
from libra_jax.train.mesh import local_rows, place_batch
from libra_jax.train.optimizer import all_finite
from libra_jax.train.step import compile_step, plan_state, step_shapes
from libra_jax.train.xla import compiler_options

Step = list[list[list[int]]]
"""Document lengths: of each pool, of each of its sequences."""
Call = Callable[[], Any]
NAMES = ("out", "dq", "dk", "dv")
ROUNDING = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Allowed error of output and gradients, over the largest entry (or 1)."""
LOSS_ROUNDING = {"float32": 1e-5, "bfloat16": 2e-3, "float16": 2e-3}
"""Allowed difference of two policies' losses, over the loss."""


class How(NamedTuple):
    """How the operator runs, see `libra_attention`."""

    implementation: str | None = None
    transport: str | None = None


# --------------------------------------------------------------------------------------------------------------- plans


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A policy's plans. spec: has room for all of them. steps: of each step, a plan for each pool. lacks: of each step,
    what the room that a spec has by default is too small for, or None."""

    name: str
    spec: PoolSpec
    steps: list[list[Plan]]
    lacks: list[str | None]

    @property
    def lack(self) -> str | None:
        return next((lack for lack in self.lacks if lack), None)

    @property
    def fallback(self) -> str | None:
        """Why a plan is not the policy's own, or None."""
        return next((plan.stats.fallback for step in self.steps for plan in step if plan.stats.fallback), None)


class NoPlan(Exception):
    """A policy has no plan. Arguments: its name, and why."""


def plan_steps(
    steps: Sequence[Step], base: PoolSpec, policies: Mapping[str, Policy], room: Literal["shared", "own"]
) -> dict[str, Planned]:
    """Plans of all policies for all steps. Policies decide in the room that `base` has; the plans then get a spec whose
    room is the most that any of them needs (shared), or any of the policy (own), so that none falls back.

    Raises NoPlan where a policy refuses a pool, or says what is no assignment.
    """
    roomy = dataclasses.replace(base, capacity=float(base.ranks))
    pages = [[pages_of(pool, base) for pool in step] for step in steps]
    executors: dict[str, list[list[np.ndarray]]] = {}
    needs: dict[str, Capacity] = {}
    lacks: dict[str, list[str | None]] = {}
    for name, policy in policies.items():
        try:
            executors[name] = [
                [check_executor(policy(*pool, base, np.ones(base.ranks)), pool[1], base) for pool in step]
                for step in pages
            ]
        except (ValueError, TypeError) as error:
            raise NoPlan(name, str(error)) from error
        travels = [
            [(travel(e, *p, roomy), travel(e, *p, base).lack) for e, p in zip(es, ps, strict=True)]
            for es, ps in zip(executors[name], pages, strict=True)
        ]
        needs[name] = most([needed(roomed) for step in travels for roomed, _ in step])
        lacks[name] = [next((lack for _, lack in step if lack), None) for step in travels]
    found = {}
    for name in policies:
        capacity = most([needs[name]] if room == "own" else list(needs.values()))
        spec = dataclasses.replace(base, capacity=most([capacity, head_parallel_capacity(base)]))
        plans = [
            [plan_pool(pool, spec, policy=decided(e)) for pool, e in zip(step, es, strict=True)]
            for step, es in zip(steps, executors[name], strict=True)
        ]
        found[name] = Planned(name, spec, plans, lacks[name])
    return found


def decided(executor: np.ndarray) -> Policy:
    return lambda first_page, num_pages, spec, speed: executor


def needed(found: Travel) -> Capacity:
    """The room that a plan takes."""
    counts, spec = found.counts, found.spec
    blocks, pages, passed = counts.sent_blocks, counts.sent_pages, counts.passed_pages
    numbers = (
        blocks.sum(axis=(0, 1)).max(),
        pages.sum(axis=(0, 1)).max(),
        pages.sum(axis=(1, 2)).max(),
        blocks.max(),
        max(pages.max(), counts.returned_pages.max()),
        passed.sum(axis=(0, 1)).max(),
        passed.sum(axis=(1, 2)).max(),
    )
    return Capacity(*(float(number) / spec.home_blocks for number in numbers))


def most(rooms: Sequence[Capacity]) -> Capacity:
    """The largest of each kind of room."""
    names = [field.name for field in dataclasses.fields(Capacity)]
    return Capacity(*(max(getattr(room, name) or 0.0 for room in rooms) for name in names))


def tables_of(planned: Planned, step: int) -> PlanTables:
    """Stacked tables of one step, (pools, dp, cp, ...)."""
    return stack_plans(planned.steps[step])


# ------------------------------------------------------------------------------------------------------------ operator


def place(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """An array that every process has, on the mesh."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def place_tables(tables: PlanTables, mesh: Mesh) -> Any:
    return jax.tree.map(lambda table: place(table, mesh, PLAN_SPEC), tables)


def shapes_of(spec: PoolSpec, sequences: int) -> list[tuple[int, ...]]:
    """Of q, k, v and the output's cotangent."""
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads
    return [(sequences, spec.seq_len, h, spec.head_dim) for h in heads]


def host_inputs(spec: PoolSpec, sequences: int, seed: int) -> list[np.ndarray]:
    rng, dtype = np.random.default_rng(seed), jnp.dtype(spec.dtype)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes_of(spec, sequences)]


def device_inputs(spec: PoolSpec, sequences: int, seed: int, mesh: Mesh) -> list[jax.Array]:
    """Made where they lie: at 256K tokens hosts should not hold them."""
    shapes, dtype = shapes_of(spec, sequences), jnp.dtype(spec.dtype)

    def draw() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]

    return jax.jit(draw, out_shardings=NamedSharding(mesh, SEQUENCE_SPEC))()


class Operator:
    """The operator's programs for one spec, compiled when they are first called: (q, k, v, d_out, plans) -> (out,) or
    (out, dq, dk, dv)."""

    def __init__(self, spec: PoolSpec, mesh: Mesh, how: How) -> None:
        self._attend = functools.partial(libra_attention, spec=spec, mesh=mesh, **how._asdict())
        self._options = compiler_options(mesh.devices.flat[0].platform, ())
        self._compiled: dict[str, Any] = {}

    def run(self, which: str, *arguments: Any) -> tuple[jax.Array, ...]:
        """which: "forward" or "both"."""
        if which not in self._compiled:
            lowered = jax.jit(getattr(self, f"_{which}")).lower(*arguments)
            self._compiled[which] = lowered.compile(compiler_options=self._options)
        return self._compiled[which](*arguments)

    def _forward(self, q: Any, k: Any, v: Any, d_out: Any, plans: Any) -> tuple[jax.Array, ...]:
        return (self._attend(q, k, v, plans),)

    def _both(self, q: Any, k: Any, v: Any, d_out: Any, plans: Any) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda q, k, v: self._attend(q, k, v, plans), q, k, v)
        return out, *pull(d_out)


class Operators(dict[PoolSpec, Operator]):
    """One for each spec."""

    def __init__(self, mesh: Mesh, how: How) -> None:
        super().__init__()
        self._given = mesh, how

    def __missing__(self, spec: PoolSpec) -> Operator:
        self[spec] = Operator(spec, *self._given)
        return self[spec]


# --------------------------------------------------------------------------------------------------------- correctness


def awkward_lengths(sequences: int, seq_len: int) -> list[list[int]]:
    """One whole document; short ones; mostly padding; lengths that double, from a single token. And again."""
    doubling = [2**i for i in range(seq_len.bit_length() - 1)]
    kinds = [[seq_len], [3] * (seq_len // 3), [seq_len // 5, 1], [*doubling, seq_len - sum(doubling)]]
    return [kinds[i % len(kinds)] for i in range(sequences)]


def segment_ids(lengths: Sequence[int], seq_len: int) -> np.ndarray:
    """(seq_len,) int32: documents from 1, then padding 0."""
    ids = np.zeros(seq_len, np.int32)
    ids[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids


@jax.jit
def _dense(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(lambda q, k, v: reference_attention(q, k, v, ids), q, k, v)
    return out, *pull(d_out)


class Reference:
    """Dense float32 output and gradients of the sequences that lie on this process' devices."""

    def __init__(self, inputs: Sequence[np.ndarray], lengths: Sequence[Sequence[int]], mesh: Mesh) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        for row in local_rows(mesh).tolist():
            arrays = (x[row : row + 1].astype(np.float32) for x in inputs)
            ids = segment_ids(lengths[row], inputs[0].shape[1])[None]
            self._rows[row] = [np.asarray(x)[0] for x in _dense(*arrays, ids)]

    def errors(self, results: Sequence[jax.Array]) -> dict[str, float]:
        """Largest error of each array, over its largest entry or 1; infinite where one is not finite."""
        found = []
        for number, array in enumerate(results):
            error, largest = 0.0, max([1.0, *(float(np.abs(row[number]).max()) for row in self._rows.values())])
            for shard in array.addressable_shards:
                rows, tokens = shard.index[0], shard.index[1]
                first = rows.indices(array.shape[0])[0]
                for i, got in enumerate(np.asarray(shard.data, np.float32)):
                    difference = np.abs(got - self._rows[first + i][number][tokens]).max()
                    error = max(error, float(difference) if np.isfinite(difference) else np.inf)
            found.append(error / largest)
        return dict(zip(NAMES, from_all(found).max(axis=0).tolist(), strict=True))


def from_all(values: Sequence[float]) -> np.ndarray:
    """(processes, values): what each process has."""
    if jax.process_count() == 1:
        return np.array([values])
    return np.asarray(multihost_utils.process_allgather(np.array(values)))


def differing(a: jax.Array, b: jax.Array) -> int:
    """Entries whose bits differ; above 2^24 about so many."""
    return int(_differing(a, b))


@jax.jit
def _differing(a: jax.Array, b: jax.Array) -> jax.Array:
    kind = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return jnp.sum(lax.bitcast_convert_type(a, kind) != lax.bitcast_convert_type(b, kind), dtype=jnp.float32)


class SameBits:
    """Holds output and dq of the first policy; says in how many entries another's differ."""

    def __init__(self) -> None:
        self._first: list[jax.Array] | None = None

    def differ(self, results: Sequence[jax.Array]) -> int:
        if self._first is None:
            self._first = list(results[:2])
        return sum(differing(a, b) for a, b in zip(self._first, results[:2], strict=True))


# ------------------------------------------------------------------------------------------------------- training step


class Trainer:
    """The trainer's step, compiled for each spec; one state, which every run of any policy carries on."""

    def __init__(self, config: TrainConfig, mesh: Mesh, steps: Sequence[Step], seed: int) -> None:
        self.config, self.mesh = config, mesh
        self.state: Any = None
        self._blueprint: Any = None
        self._compiled: dict[PoolSpec, Any] = {}
        rng = np.random.default_rng(seed)
        self._arrays = [arrays_of(step, config, rng) for step in steps]

    def call(self, planned: Planned, step: int, tables: PlanTables) -> Call:
        """A run of one step. -> metrics."""
        program = self._program(planned.spec)
        batch = place_batch(self.mesh, self._arrays[step], tables.map(lambda table: table[None]))

        def run() -> Any:
            self.state, metrics = program(self.state, *batch)
            return metrics

        return run

    def begin(self) -> None:
        """The state of a run that has done no step, always the same."""
        self.state = None  # before another is made
        self.state = self._blueprint.init()

    def finite(self) -> bool:
        return bool(jax.jit(all_finite)(self.state["params"]))

    def _program(self, spec: PoolSpec) -> Any:
        if spec not in self._compiled:
            attention = dataclasses.replace(self.config.attention, capacity=spec.capacity)  # PoolSpec takes both kinds
            config = dataclasses.replace(self.config, attention=attention)
            assert config.spec == spec, f"{config.spec} and {spec}"
            self._blueprint = plan_state(config, self.mesh)
            self._compiled[spec] = compile_step(config, self.mesh, self._blueprint, *step_shapes(config))
        return self._compiled[spec]


def arrays_of(step: Step, config: TrainConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tokens, and positions of the documents, (1, sequences, seq_len)."""
    sequences = [sequence for pool in step for sequence in pool]
    tokens = rng.integers(0, config.model.vocab_size, (1, len(sequences), config.seq_len), np.int32)
    positions = np.zeros(tokens.shape, np.int32)
    for row, sequence in zip(positions[0], sequences, strict=True):
        row[: sum(sequence)] = np.concatenate([np.arange(length) for length in sequence])
    return {"tokens": tokens, "targets": np.roll(tokens, -1, 2), "positions": positions}


def first_losses(trainer: Trainer, planned: Planned, tables: PlanTables) -> dict[str, Any]:
    """Two steps on one batch from the same start: their losses, and whether all weights are finite after them."""
    run = trainer.call(planned, 0, tables)
    trainer.begin()
    metrics = [jax.device_get(run()) for _ in range(2)]
    finite = trainer.finite() and not int(metrics[1]["skipped"]["total"])
    return {"losses": [float(m["loss"]) for m in metrics], "finite": finite}


# -------------------------------------------------------------------------------------------------------------- timing


def seconds_of(call: Call) -> float:
    """Wall seconds until the slowest process is done; all start together."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("start")
    start = time.perf_counter()
    jax.block_until_ready(call())
    return float(from_all([time.perf_counter() - start]).max())


def in_turn(calls: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, list[float]]:
    """calls: of each policy, one for each step; all have been compiled. -> seconds of a step, the mean of all steps, in
    each round. A round runs each step with every policy, one after the other, and begins with another policy."""
    names = list(calls)
    for name in names:  # every batch once: what is set up at a first run is no one's time
        jax.block_until_ready([call() for call in calls[name]])
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        sums = dict.fromkeys(names, 0.0)
        for step in range(len(calls[names[0]])):
            for name in order:
                sums[name] += seconds_of(calls[name][step])
        for name in names:
            found[name].append(sums[name] / len(calls[name]))
    return found


class Kernels:
    """A rank's own kernels, all waves, forward and backward, alone on this process' first device: no exchange, nobody
    to wait for. Numbers are random; how long kernels take follows from the tables."""

    def __init__(self, spec: PoolSpec, how: How) -> None:
        self._device = jax.local_devices()[0]
        slots = spec.home_blocks + (spec.room.blocks if spec.ranks > 1 else 0)
        rng, dtype = np.random.default_rng(0), jnp.dtype(spec.dtype)
        rows, page = (slots, spec.block, spec.group, spec.head_dim), (page_slots(spec), spec.block, spec.head_dim)
        arrays = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in (rows, page, page, rows))
        self._inputs = [jax.device_put(x, self._device) for x in arrays]
        options = TileOptions(spec.head_dim**-0.5, None, compute_capability_of(self._device))
        run = functools.partial(_kernels, waves=spec.waves, options=options, implementation=how.implementation)
        self._run = jax.jit(run)

    def call(self, tables: PlanTables, rank: tuple[int, int, int]) -> Call:
        """rank: its place in (pools, dp, cp)."""
        own = (tables.entries[rank], tables.pages[rank], tables.wave_offsets[rank])
        arguments = *self._inputs, *(jax.device_put(table, self._device) for table in own)
        return lambda: self._run(*arguments)


def _kernels(q, k, v, d_out, entries, pages, offsets, *, waves, options, implementation):
    first_visible = jnp.zeros(q.shape[:2], jnp.int32)
    out, lse, dq = jnp.zeros_like(q), jnp.full((*q.shape[:3], 2), -jnp.inf, jnp.float32), jnp.zeros_like(q)
    dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    tiles = [Tiles(entries, pages, first_visible, offsets[w], offsets[w + 1]) for w in range(waves)]
    how = {"options": options, "implementation": implementation}
    for some in tiles:
        out, lse = tile_forward(q, k, v, some, out, lse, **how)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    for some in tiles:
        dq, dk, dv = tile_backward(q, k, v, d_out, lse, delta, some, dq, dk, dv, **how)
    return out, dq, dk, dv


def busy_seconds(planned: Mapping[str, Planned], mesh: Mesh, how: How, rounds: int) -> dict[str, np.ndarray]:
    """(steps, pools * N) of each policy: seconds of every rank's own kernels, the least of some rounds in turn, because
    what disturbs only adds. Each process measures the ranks that lie on its devices."""
    ranks = [index[:3] for index in np.ndindex(mesh.devices.shape) if not any(index[3:])]
    mine = [i for i, rank in enumerate(ranks) if _device(mesh, rank).process_index == jax.process_index()]
    made: dict[PoolSpec, Kernels] = {}
    calls: dict[tuple[str, int, int], Call] = {}
    for name, policy in planned.items():
        if policy.spec not in made:
            made[policy.spec] = Kernels(policy.spec, how)
        for step in range(len(policy.steps)):
            tables = tables_of(policy, step)
            calls |= {(name, step, i): made[policy.spec].call(tables, ranks[i]) for i in mine}
    taken: dict[tuple[str, int, int], list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if number:
                taken[key].append(time.perf_counter() - start)
    found = {}
    for name, policy in planned.items():
        seconds = np.zeros((len(policy.steps), len(ranks)))
        for step, i in np.ndindex(seconds.shape):
            if (name, step, i) in taken:
                seconds[step, i] = min(taken[name, step, i])
        found[name] = from_all(seconds.reshape(-1).tolist()).max(axis=0).reshape(seconds.shape)
    return found


def _device(mesh: Mesh, rank: tuple[int, ...]) -> Any:
    return mesh.devices[rank].reshape(-1)[0]
