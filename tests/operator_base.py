"""The shared test base of the attention operator: inputs, meshes, one compiled forward-and-backward pass for each set
of static arguments, and how results are held against the float64 oracle."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import ragged_on_cpu
from jax.sharding import AxisType, Mesh, NamedSharding

import libra_jax
from libra_jax import assignments, planner
from libra_jax.attention import PLAN_SPEC, SEQUENCE_SPEC
from libra_jax.plan import PlanTables
from libra_jax.spec import PoolSpec

ragged_on_cpu.install()

Lengths = Sequence[Sequence[int]]

POLICIES: dict[str, Callable] = {
    "pooled": planner.pooled,
    "at_home": assignments.at_home,
    "head_parallel": assignments.head_parallel,
    "random": assignments.random_plan(3),
}


class Inputs(NamedTuple):
    """q (N, S, H, D), k (N, S, K, D), v (N, S, K, E) and the output's cotangent (N, S, H, E)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cotangent: np.ndarray


class Result(NamedTuple):
    """Host copies, in the dtype of the inputs."""

    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@functools.cache
def make_mesh(pools: int, dp: int, cp: int, explicit: bool = False) -> Mesh:
    """A mesh of the first pools * dp * cp devices."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices()[: pools * dp * cp]
    return jax.make_mesh((pools, dp, cp), ("pool", "dp", "cp"), axis_types=(kind,) * 3, devices=devices)


def random_inputs(rng: np.random.Generator, sequences: int, spec: PoolSpec) -> Inputs:
    """Standard normal numbers, rounded to the spec's dtype."""
    lead = (sequences, spec.seq_len)
    shapes = (
        (*lead, spec.num_heads, spec.head_dim),
        (*lead, spec.num_kv_heads, spec.head_dim),
        (*lead, spec.num_kv_heads, spec.value_dim),
        (*lead, spec.num_heads, spec.value_dim),
    )
    return Inputs(*(rng.standard_normal(shape).astype(jnp.dtype(spec.dtype)) for shape in shapes))


def random_lengths(rng: np.random.Generator, seq_len: int) -> list[int]:
    """Documents of one sequence: log-normal lengths, one-token documents among them, usually some padding."""
    lengths, left = [], seq_len - int(rng.integers(0, seq_len // 4)) * int(rng.integers(0, 2))
    while left > 0:
        lengths.append(min(left, 1 + int(rng.lognormal(np.log(seq_len / 8), 1.2))))
        left -= lengths[-1]
    return lengths


def skewed_lengths(rng: np.random.Generator, sequences: int, seq_len: int) -> list[list[int]]:
    """One whole document, one sequence of short ones, one that is mostly padding, then random ones."""
    fixed = [[seq_len], [3] * (seq_len // 3), [seq_len // 5, 1]]
    return [fixed[i] if i < min(len(fixed), sequences - 1) else random_lengths(rng, seq_len) for i in range(sequences)]


def make_plans(lengths: Lengths, spec: PoolSpec, policy: Callable = planner.pooled, speed=None) -> PlanTables:
    """Stacked plans of all pools; `lengths` are of all sequences. A policy's plan must have been used as it is."""
    size = spec.pool_size
    plans = [
        libra_jax.plan_pool(lengths[i : i + size], spec, speed, policy=policy) for i in range(0, len(lengths), size)
    ]
    assert all(plan.stats.fallback is None for plan in plans), [plan.stats.fallback for plan in plans]
    return libra_jax.stack_plans(plans)


@functools.cache
def forward_and_backward(spec: PoolSpec, mesh: Mesh, **options) -> Callable:
    """jit of (q, k, v, cotangent, plans) -> (out, dq, dk, dv). Cached, so tests share compilations."""

    def both(q, k, v, cotangent, plans):
        out, pull = jax.vjp(
            lambda q, k, v: libra_jax.libra_attention(q, k, v, plans, spec=spec, mesh=mesh, **options), q, k, v
        )
        return out, *pull(cotangent)

    return jax.jit(both)


def on_mesh(inputs: Inputs, plans: PlanTables, mesh: Mesh) -> tuple:
    """The arguments of `forward_and_backward`, sharded as a training step has them."""
    arrays = [jax.device_put(x, NamedSharding(mesh, SEQUENCE_SPEC)) for x in inputs]
    return *arrays, jax.device_put(plans, NamedSharding(mesh, PLAN_SPEC))


def run(inputs: Inputs, plans: PlanTables, spec: PoolSpec, mesh: Mesh, **options) -> Result:
    """Output and gradients of `libra_attention`."""
    with jax.set_mesh(mesh):
        results = forward_and_backward(spec, mesh, **options)(*on_mesh(inputs, plans, mesh))
    return Result(*(np.asarray(x) for x in results))


def expected(inputs: Inputs, lengths: Lengths, spec: PoolSpec, **options) -> Result:
    """The float64 oracle's output and gradients."""
    ids = oracle.segments(lengths, spec.seq_len)
    truth = oracle.attention(*inputs[:3], ids, inputs.cotangent, window=spec.window, **options)
    return Result(truth.out, truth.dq, truth.dk, truth.dv)


def assert_close(got: Result, want: Result, tolerance: float = 2e-5, inputs: Inputs | None = None) -> None:
    """Every array finite and within `tolerance` of its largest entry: float32 rounding and its accumulation.

    inputs: where q and k are large, dq and dk are differences of large products, and rounding is relative to those.
    """
    factors = {} if inputs is None else {"dq": np.nanmax(np.abs(inputs.k)), "dk": np.nanmax(np.abs(inputs.q))}
    for name, g, w in zip(Result._fields, got, want, strict=True):
        assert g.shape == w.shape, f"{name}: shape {g.shape}, expected {w.shape}"
        assert np.isfinite(g.astype(np.float32)).all(), f"{name} is not finite"
        error, room = (
            np.abs(g.astype(np.float64) - w).max(),
            tolerance * max(1.0, np.abs(w).max(), factors.get(name, 0)),
        )
        assert error <= room, f"{name}: error {error:.2e}, at most {room:.2e}"


def assert_padding_zero(result: Result, lengths: Lengths, seq_len: int) -> None:
    """Output and gradients are exactly zero in every padding row."""
    padding = oracle.segments(lengths, seq_len) == 0
    for name, array in zip(Result._fields, result, strict=True):
        assert not np.any(array[padding] != 0), f"{name} is not zero in padding"


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equality of representations: tells 0.0 from -0.0, and NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


COLLECTIVE = re.compile(
    r" (?:ragged-all-to-all|all-to-all|collective-permute|all-gather|all-reduce|reduce-scatter)(?:-start)?\("
)


def collectives(hlo: str) -> list[str]:
    """The lines of a compiled program's text in which devices exchange something."""
    return [line for line in hlo.splitlines() if COLLECTIVE.search(line)]


def groups_of(line: str) -> list[set[int]]:
    """The sets of devices, by their place in the mesh, that one collective joins. Fails for a form it cannot read."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line):
        return [{int(a), int(b)} for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [{int(i) for i in group.split(",")} for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if by_axis := re.search(r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',?)+)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", by_axis[1])}
        joined, ids = re.findall(r"'(\w+)'", by_axis[2]), np.arange(np.prod(list(sizes.values())))
        kept = [axis for axis, name in enumerate(sizes) if name not in joined]
        order = kept + [axis for axis, name in enumerate(sizes) if name in joined]
        rows = ids.reshape(list(sizes.values())).transpose(order).reshape(-1, np.prod([sizes[name] for name in joined]))
        return [set(map(int, row)) for row in rows]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims = ([int(i) for i in part.split(",")] for part in (iota[1], iota[2]))
        ids = np.arange(np.prod(dims)).reshape(dims)
        ids = ids.transpose([int(i) for i in iota[3].split(",")]) if iota[3] else ids
        return [set(map(int, row)) for row in ids.reshape(shape)]
    raise AssertionError(f"cannot read the groups of: {line}")
