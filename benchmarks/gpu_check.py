"""One command for a machine with an NVIDIA GPU: are the Triton kernels right on it, how fast are they, and which cost
model do they make? Needs jax and a jax-triton wheel; the package itself need not be installed.

    python -m benchmarks.gpu_check            from a checkout also: python benchmarks/gpu_check.py
    python -m benchmarks.gpu_check --dry-run  on a machine without a GPU: everything but the launches

In this order: every kernel against float32; TFLOP/s beside cuDNN, PyTorch and tokamax, as far as they are there;
coefficients for `libra_jax.CostModel`; other launch parameters than the chosen ones; tables. Each result is in the
--json file as soon as it is there, and the same code on the same device goes on from that file.

Letters: K key/value heads, G query heads of one, H = K G, S tokens of a sequence, N sequences, B tokens of a block, D
and E widths of keys and values. A unit is a block or page: key/value head * blocks + block.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # the code that is beside this file is what is checked

# ruff: noqa: E402
import jax
import jax.numpy as jnp
import numpy as np

if importlib.util.find_spec("jaxtyping") is None:  # names in annotations, which nobody evaluates here
    sys.modules["jaxtyping"] = types.ModuleType("jaxtyping")
    vars(sys.modules["jaxtyping"]).update(dict.fromkeys(("Array", "Float", "Int"), jax.Array))

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from libra_kernels import Launch, TileOptions, Tiles, compute_capability_of, tile_backward, tile_forward
from libra_kernels.launch import PASSES, Pass, choose
from libra_kernels.tiles import NUM_PAGES

from benchmarks.reporting import markdown
from libra_jax.attention import MESH_AXES, libra_attention
from libra_jax.data.lengths import DISTRIBUTIONS
from libra_jax.plan import plan_pool, stack_plans
from libra_jax.spec import PoolSpec
from libra_jax.targets import target_mesh
from libra_jax.workload import CostModel, causal_pairs

SECTIONS = {"environment": 1.0, "correctness": 0.35, "speed": 0.8, "cost": 0.95, "sweep": 1.0}
"""What there is to do, in order, and the share of the time budget after which nothing of it is begun."""
CORPORA = ("lognormal-644-71k", "short-bulk-long-tail", "wikipedia")
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
"""FLOPs in units of the forward pass's: two products, and five."""
PUBLISHED = {
    "forward": {2048: "521 / 484 / 323", 4096: "579 / 518 / 353", 8192: "602 / 529 / 369", 16384: "616 / 539 / 378"},
    "backward": {4096: "542 / 499 / -", 8192: "559 / 518 / -", 16384: "561 / 516 / -"},
}
Shape = tuple[int, int, int]
"""head_dim, query heads, key/value heads."""
Launches = tuple[tuple[str, Launch], ...]


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured, and with which implementation."""

    implementation: str
    library: str  # implementation of jax.nn.dot_product_attention
    tokens: int  # in one measurement, whatever the documents
    lengths: tuple[int, ...]  # of documents, where all are of one length
    shapes: tuple[Shape, ...]  # for all lengths, and packed
    more_shapes: tuple[Shape, ...]  # for the second and fourth length
    block: int
    case_block: int | None  # of the correctness cases; None: their own
    rounds: int
    round_seconds: float


REAL = Scale(
    "triton", "cudnn", 65_536, (2048, 4096, 8192, 16_384, 32_768, 65_536), ((128, 32, 8), (64, 32, 8)),
    ((128, 16, 16),), 128, None, 5, 0.04,
)  # fmt: skip
TINY = Scale("xla", "xla", 256, (32, 64, 128, 256), ((128, 4, 2),), ((64, 2, 2),), 16, 16, 2, 0.002)


@dataclasses.dataclass
class Bench:
    """What every item needs to know. dry: compile, but launch nothing on a GPU."""

    scale: Scale
    dry: bool
    json: Path
    made: dict[tuple[Shape, int], Kernels] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def target(self) -> Mesh | str:
        """A mesh of one GPU that is not there, or why there is none."""
        try:
            return target_mesh("h100", (1, 1, 1), MESH_AXES)
        except RuntimeError as error:
            return str(error)

    def abstract(self, arrays: Any) -> Any:
        """Shapes of arrays, on that GPU."""
        where = None if isinstance(self.target, str) else NamedSharding(self.target, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arrays)

    def compiled(self, lower: Callable[[], Any], finish: bool = False) -> str:
        """Lowers for that GPU, which makes the kernels' PTX. finish: and lets XLA compile and assemble it."""
        if isinstance(self.target, str):
            return f"not compiled: {self.target}"
        lowered = lower()
        assert "triton_kernel_call" in lowered.as_text()
        if finish:
            lowered.compile()
        return "compiled for H100" if finish else "lowered for H100"

    def options(self, scale: float, soft_cap: float | None = None, launches: Launches = ()) -> TileOptions:
        return TileOptions(scale, soft_cap, 90 if self.dry else None, launches)

    def kernels(self, shape: Shape, tokens: int | None = None) -> Kernels:
        tokens = tokens or self.scale.tokens
        if (shape, tokens) not in self.made:
            self.made[shape, tokens] = Kernels(self, shape, tokens)
        return self.made[shape, tokens]


class WrongResult(Exception):
    """A result that is not what it has to be, in words; `numbers`: what was found, as JSON has it."""

    def __init__(self, message: str, numbers: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.numbers = dict(numbers)


# ------------------------------------------------------------------------------------------------------- are they right


@dataclasses.dataclass(frozen=True)
class Case:
    """Kernels to hold against float32: two key/value heads, one sequence. window: in blocks."""

    name: str
    head_dim: int
    v_head_dim: int
    group: int
    block: int = 128
    dtype: str = "bfloat16"
    window: float | None = None
    soft_cap: float | None = None
    scale: float | None = None
    blocks: int = 8


CASES = (
    Case("128", 128, 128, 4),
    Case("64 fp16 window", 64, 64, 1, dtype="float16", window=1.3),
    Case("128 soft cap", 128, 128, 1, soft_cap=12.0, scale=0.2),
    Case("64 group 16", 64, 64, 16, block=64),
    Case("192/128", 192, 128, 1),
    Case("96 group 3", 96, 96, 3),
    Case("256", 256, 256, 2, block=64),
    Case("128 fp16 long blocks", 128, 128, 8, block=256, dtype="float16", window=0.7, blocks=6),
    Case("192 fp16", 192, 192, 2, dtype="float16"),
    Case("96 fp16 soft cap window", 96, 96, 2, dtype="float16", window=2.6, soft_cap=20.0),
)
CALCULATED_DRY = CASES[:3]
"""What a dry run calculates, with the plain XLA kernels; the others it only lowers."""
NAMES = ("out", "lse", "dq", "dk", "dv")
SPARE = 2
"""Slots that no table names. They hold NaN and have to keep it."""


class Problem:
    """A case's inputs and tables. `inputs`: q, k, v, d_out as (K, G or 1, S, width); padding is zero, as the operator
    makes it."""

    def __init__(self, case: Case, block: int) -> None:
        tokens, kv_heads, rng = case.blocks * block, 2, np.random.default_rng(1)
        # Ragged, among them a document of one token, and more than a block of padding at the end.
        self.lengths = [tokens // 2 - 5, 1, 7, tokens // 4 + 3]
        self.scale, self.soft_cap = case.scale or case.head_dim**-0.5, case.soft_cap
        self.spec = PoolSpec(
            tokens, 1, 1, kv_heads * case.group, kv_heads, case.head_dim, block, case.v_head_dim, waves=1, capacity=0,
            window=None if case.window is None else int(case.window * block), dtype=case.dtype,
        )  # fmt: skip
        used, dtype = sum(self.lengths), jnp.dtype(case.dtype)
        widths = ((case.group, case.head_dim), (1, case.head_dim), (1, case.v_head_dim), (case.group, case.v_head_dim))
        real = (np.arange(tokens) < used)[:, None]
        self.inputs = [(rng.standard_normal((kv_heads, g, tokens, w)) * real).astype(dtype) for g, w in widths]
        ids, (i, j) = np.repeat(np.arange(5), [*self.lengths, tokens - used]), np.indices((tokens, tokens))
        self.visible = (ids[:, None] == ids) & (i < used) & (j <= i) & (i - j < (self.spec.window or tokens))
        self.plans = stack_plans([plan_pool([self.lengths], self.spec)])

    def by_unit(self, x: np.ndarray) -> np.ndarray:
        """(K, G or 1, S, width) -> (units, B, G or 1, width)"""
        kv_heads, heads, _, width = x.shape
        blocks = x.reshape(kv_heads, heads, -1, self.spec.block, width)
        return np.moveaxis(blocks, 1, 3).reshape(-1, self.spec.block, heads, width)

    def arguments(self, seed: int, share: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The arguments of `run_tiles`, blocks and pages in random slots, and the slots of the units' out, lse, dq, dk
        and dv. share: of the entries that run in the first of two waves."""
        units, rng = self.spec.home_blocks, np.random.default_rng(seed)
        q_slot, page_slot = (rng.permutation(units + SPARE)[:units] for _ in range(2))

        def placed(slot: np.ndarray, values: np.ndarray) -> np.ndarray:
            array = np.full((units + SPARE, *values.shape[1:]), np.nan, values.dtype)
            array[slot] = values
            return array

        q, k, v, d_out = (self.by_unit(x) for x in self.inputs)
        k, v = k[:, :, 0], v[:, :, 0]
        entries, stop = np.array(self.plans.entries[0, 0, 0]), int(self.plans.wave_offsets[0, 0, 0, -1])
        entries[:stop, 0] = q_slot[entries[:stop, 0]]
        first = np.zeros((units + SPARE, self.spec.block), np.int32)
        first[q_slot] = np.tile(self.plans.first_visible.reshape(-1, self.spec.block), (self.spec.num_kv_heads, 1))
        tables = [entries, page_slot[self.plans.pages[0, 0, 0]].astype(np.int32), first]
        none, f32 = np.zeros(0, int), np.float32
        results = [placed(none, d_out[:0]), placed(none, np.zeros((0, *q.shape[1:3], 2), f32)), placed(none, q[:0])]
        results += [placed(page_slot, np.zeros(x.shape, f32)) for x in (k, v)]
        inputs = [placed(slot, x) for slot, x in ((q_slot, q), (page_slot, k), (page_slot, v), (q_slot, d_out))]
        cuts = np.array([0, int(stop * share), stop], np.int32)
        return [*inputs, *tables, cuts, *results], [q_slot] * 3 + [page_slot] * 2

    @functools.cached_property
    def truth_and_plain(self) -> list[list[np.ndarray]]:
        """out, lse, dq, dk, dv by unit, in float32 and in the case's own precision; on the CPU, if jax has one."""
        q, k, v, d_out = self.inputs
        own = [q, k[:, 0], v[:, 0], d_out]
        try:
            device = jax.devices("cpu")[0]
        except RuntimeError:
            device = None
        found = []
        with jax.default_device(device):
            for arrays in ([x.astype(np.float32) for x in own], own):
                results = dense_attention(*arrays, self.visible, scale=self.scale, soft_cap=self.soft_cap)
                out, lse, dq, dk, dv = (np.asarray(x) for x in results)
                pages = (self.by_unit(x[:, None])[:, :, 0] for x in (dk, dv))
                found.append([self.by_unit(out), self.by_unit(lse[..., None]), self.by_unit(dq), *pages])
        return found

    def compare(self, got: Sequence[np.ndarray | None]) -> tuple[float, list[str]]:
        """got: out, lse, dq, dk, dv by unit. The largest error, mean or maximum, in units of what plain JAX makes in
        the same precision (2 is allowed), and what is wrong."""
        worst, wrong = 0.0, []
        for name, x, exact, plain in zip(NAMES, got, *self.truth_and_plain, strict=True):
            if x is not None and name == "lse":
                empty, total = np.isneginf(exact[..., 0]), x.astype(np.float64).sum(axis=-1)
                error = float(np.abs(total[~empty] - exact[..., 0][~empty]).max())
                if not np.array_equal(np.isneginf(total), empty) or not error <= 2e-5 * np.abs(exact[~empty]).max():
                    wrong.append(f"lse: error {error:.1e}, and -inf is for rows that see nothing alone")
            elif x is not None:
                both = zip(errors(x, exact), errors(plain, exact), strict=True)
                for kind, (error, allowed) in zip(("mean", "largest"), both, strict=True):
                    worst = max(worst, error / allowed)
                    if not error <= 2 * allowed:  # NaN too
                        wrong.append(f"{name}: {kind} error {error:.2e}, plain JAX {allowed:.2e}")
        return worst, wrong


def errors(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Mean and largest."""
    difference = np.abs(got.astype(np.float64) - want)
    return float(difference.mean()), float(difference.max())


@functools.partial(jax.jit, static_argnames=("options", "implementation"))
def run_tiles(q, k, v, d_out, entries, pages, first_visible, cuts, out, lse, dq, dk, dv, *, options, implementation):
    """Forward and backward of two waves, whose entries are cuts[0] to cuts[1] and cuts[1] to cuts[2]."""
    waves = [Tiles(entries, pages, first_visible, cuts[i], cuts[i + 1]) for i in range(2)]
    how = {"options": options, "implementation": implementation}
    for tiles in waves:
        out, lse = tile_forward(q, k, v, tiles, out, lse, **how)
    for tiles in waves:
        dq, dk, dv = tile_backward(q, k, v, d_out, lse, row_dots(out, d_out), tiles, dq, dk, dv, **how)
    return out, lse, dq, dk, dv


def row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums over the last axis of a * b, float32."""
    return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1)


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap"))
def dense_attention(q, k, v, d_out, visible, *, scale, soft_cap):
    """out, lse, dq, dk, dv by plain JAX. Products and sums are float32; weights and results are rounded to the type of
    the inputs. q, d_out: (K, G, S, width); k, v: (K, S, width); visible: (S, S)."""
    seen, einsum = visible[None, None], functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def attend(q, k, v):
        q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
        logits = einsum("kgid,kjd->kgij", q32, k32) * scale
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(seen, logits, -1e30)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0.0).astype(v.dtype)
        return einsum("kgij,kje->kgie", weights.astype(jnp.float32), v32).astype(q.dtype), lse

    out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
    return out, jnp.where(visible.any(axis=1)[None, None], lse, -jnp.inf), *pull(d_out)


def check_kernels(case: Case, bench: Bench) -> dict[str, Any]:
    """forward, dq and dkv of a case: right; the same bits when run again, in other slots and (but for dk and dv, which
    are then summed in another order) in two waves; outputs poisoned, and nothing written where no entry points."""
    found: dict[str, Any] = {}
    if bench.dry:
        problem = Problem(case, case.block)
        shapes, options = bench.abstract(problem.arguments(0, 1.0)[0]), bench.options(problem.scale, problem.soft_cap)
        found["lowered"] = bench.compiled(lambda: run_tiles.lower(*shapes, options=options, implementation="triton"))
        if case not in CALCULATED_DRY:
            return found
    scale = TINY if bench.dry else bench.scale
    problem = Problem(case, scale.case_block or case.block)
    how: dict[str, Any] = {"options": TileOptions(problem.scale, problem.soft_cap)}
    how["implementation"] = scale.implementation
    runs, wrong = [], []
    for seed, share in ((0, 1.0), (0, 1.0), (1, 1.0), (1, 0.4)):
        arguments, slots = problem.arguments(seed, share)
        results = [np.asarray(x) for x in run_tiles(*arguments, **how)]
        for name, x, slot in zip(NAMES, results, slots, strict=True):
            if not np.isnan(np.delete(x, slot, axis=0).astype(np.float32)).all():
                wrong.append(f"{name}: slots that no entry uses have changed")
        runs.append([x[slot] for x, slot in zip(results, slots, strict=True)])
    for title, run, same in (("again", runs[1], 5), ("in other slots", runs[2], 5), ("in two waves", runs[3], 3)):
        for name, a, b in list(zip(NAMES, runs[0], run, strict=True))[:same]:
            if a.tobytes() != b.tobytes():
                wrong.append(f"{name} {title}: {int((a != b).sum())} of {a.size} numbers differ")
    compared = [problem.compare(run) for run in (runs[0], runs[3])]
    found["error"] = max(worst for worst, _ in compared)
    wrong += [message for _, messages in compared for message in messages]
    if wrong:
        raise WrongResult("; ".join(dict.fromkeys(wrong)), found)
    return found


def check_operator(bench: Bench) -> dict[str, Any]:
    """`libra_attention` on one device, with the implementation that it chooses by itself."""
    case, found = CASES[0], {}

    def program(problem: Problem, mesh: Mesh) -> tuple[Any, list[Any]]:
        @jax.jit
        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, plans: Any) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(lambda q, k, v: libra_attention(q, k, v, plans, spec=problem.spec, mesh=mesh), q, k, v)
            return out, *pull(d_out)

        heads = [np.moveaxis(x.reshape(-1, *x.shape[2:]), 0, 1)[None] for x in problem.inputs]  # (1, S, heads, width)
        return both, [*heads, problem.plans]

    if bench.dry and isinstance(bench.target, Mesh):
        both, arguments = program(Problem(case, case.block), bench.target)
        found["lowered"] = bench.compiled(lambda: both.lower(*bench.abstract(arguments)))
    problem = Problem(case, (TINY if bench.dry else bench.scale).case_block or case.block)
    mesh = jax.make_mesh((1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])
    both, arguments = program(problem, mesh)

    def by_unit(x: jax.Array) -> np.ndarray:
        tokens, kv_heads, width = problem.spec.seq_len, problem.spec.num_kv_heads, x.shape[-1]
        return problem.by_unit(np.asarray(x).reshape(tokens, kv_heads, -1, width).transpose(1, 2, 0, 3))

    out, dq, dk, dv = (by_unit(x) for x in both(*arguments))
    found["error"], wrong = problem.compare((out, None, dq, dk[:, :, 0], dv[:, :, 0]))
    if wrong:
        raise WrongResult("; ".join(wrong), found)
    return found


# ---------------------------------------------------------------------------------------------------- how fast are they


Call = Callable[[int], object]
"""Enqueues this many calls one after the other, and waits for the last."""
Calls = dict[str, Call]


class Kernels:
    """Both passes for one shape as the operator calls them on one GPU, compiled once for all documents. The backward
    pass is delta, dQ, and dK with dV."""

    def __init__(self, bench: Bench, shape: Shape, tokens: int) -> None:
        self.bench, (head_dim, heads, kv_heads) = bench, shape
        self.spec = spec = PoolSpec(tokens, 1, 1, heads, kv_heads, head_dim, bench.scale.block, waves=1, capacity=0)
        block, dtype = (spec.home_blocks, spec.block, spec.group), jnp.dtype(spec.dtype)
        struct = jax.ShapeDtypeStruct
        query, page = struct((*block, head_dim), dtype), struct((*block[:2], head_dim), dtype)
        partial = struct(page.shape, jnp.float32)
        self.shapes = {"q": query, "k": page, "v": page, "d_out": query, "out": query, "dq": query, "dk": partial}
        self.shapes |= {"dv": partial, "lse": struct((*block, 2), jnp.float32)}
        self.programs: dict[tuple[str, Launches], Any] = {}
        self.state: dict[str, tuple[jax.Array, ...]] = {}

    def zeros(self, *names: str) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(self.shapes[name].shape, self.shapes[name].dtype) for name in names)

    @functools.cached_property
    def inputs(self) -> dict[str, jax.Array]:
        """Random q, k, v and d_out."""
        normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
        keys = dict(zip(("q", "k", "v", "d_out"), jax.random.split(jax.random.key(0), 4), strict=True))
        return {n: normal(key, self.shapes[n].shape, self.shapes[n].dtype) for n, key in keys.items()}

    def tables(self, lengths: Sequence[int], real_only: bool = False) -> tuple[Tiles, int, int]:
        """Tables of one sequence, pages visited, and blocks that are not all padding. real_only: the other blocks are
        left out, so that a time is that of the blocks counted."""
        plan = plan_pool([list(lengths)], self.spec)
        tables = stack_plans([plan])
        entries, stop = np.array(tables.entries[0, 0, 0]), int(tables.wave_offsets[0, 0, 0, -1])
        if real_only:
            kept = entries[:stop][entries[:stop, NUM_PAGES] > 0]
            entries[: len(kept)], stop = kept, len(kept)
        first = np.tile(tables.first_visible.reshape(-1, self.spec.block), (self.spec.num_kv_heads, 1))
        tiles = Tiles(*(np.asarray(x) for x in (entries, tables.pages[0, 0, 0], first, np.int32(0), np.int32(stop))))  # type: ignore[arg-type]
        return tiles, int(plan.stats.work.sum()), int(plan.stats.blocks.sum())

    def program(self, direction: str, launches: Launches = ()) -> Any:
        """A jitted pass. What the last call gave is handed on to be overwritten, or (dk, dv) to be added to."""
        if (direction, launches) not in self.programs:
            options = self.bench.options(self.spec.head_dim**-0.5, None, launches)
            how: dict[str, Any] = {"options": options, "implementation": self.bench.scale.implementation}

            def forward(q, k, v, tiles, out, lse):
                return tile_forward(q, k, v, tiles, out, lse, **how)

            def backward(q, k, v, tiles, d_out, out, lse, dq, dk, dv):
                return tile_backward(q, k, v, d_out, lse, row_dots(out, d_out), tiles, dq, dk, dv, **how)

            function, donated = (forward, (4, 5)) if direction == "forward" else (backward, (7, 8, 9))
            self.programs[direction, launches] = jax.jit(function, donate_argnums=donated)
        return self.programs[direction, launches]

    @functools.cached_property
    def compiled(self) -> str:
        """Both passes, compiled for a GPU that is not there."""
        s = self.bench.abstract(self.shapes)
        shared = [s["q"], s["k"], s["v"], self.bench.abstract(self.tables([1])[0])]
        forward, backward = self.program("forward"), self.program("backward")
        self.bench.compiled(lambda: forward.lower(*shared, s["out"], s["lse"]), finish=True)
        rest = [s[name] for name in ("d_out", "out", "lse", "dq", "dk", "dv")]
        return self.bench.compiled(lambda: backward.lower(*shared, *rest), finish=True)

    def calls(self, tiles: Tiles, launches: Launches = ()) -> Calls:
        """By direction. Backward reads what forward left."""
        shared = [*(self.inputs[name] for name in ("q", "k", "v")), jax.device_put(tiles)]

        def forward(n: int) -> object:
            state = self.state.pop("forward", None) or self.zeros("out", "lse")
            for _ in range(n):
                state = self.program("forward", launches)(*shared, *state)
            self.state["forward"] = state
            return jax.block_until_ready(state)

        def backward(n: int) -> object:
            state = self.state.pop("backward", None) or self.zeros("dq", "dk", "dv")
            for _ in range(n):
                given = (self.inputs["d_out"], *self.state["forward"])
                state = self.program("backward", launches)(*shared, *given, *state)
            self.state["backward"] = state
            return jax.block_until_ready(state)

        return {"forward": forward, "backward": backward}

    def results(self, calls: Calls) -> dict[str, jax.Array]:
        """out, dq, dk, dv of one pass each way."""
        calls["forward"](1)
        self.state.pop("backward", None)  # dk and dv begin at zero
        calls["backward"](1)
        return dict(zip(("out", "dq", "dk", "dv"), (self.state["forward"][0], *self.state["backward"]), strict=True))


@functools.partial(jax.jit, static_argnames=("kv_heads", "sequences"))
def in_model_layout(arrays: dict[str, jax.Array], kv_heads: int, sequences: int) -> dict[str, jax.Array]:
    """Blocks (units, B, G, width) and pages (units, B, width) as (N, S, heads, width)."""

    def one(x: jax.Array) -> jax.Array:
        x = x.reshape(kv_heads, x.shape[0] // kv_heads * x.shape[1], -1, x.shape[-1])
        return jnp.moveaxis(x, 0, 1).reshape(sequences, x.shape[1] // sequences, -1, x.shape[-1])

    return {name: one(x) for name, x in arrays.items()}


@jax.jit
def relative_differences(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Norm of the difference over the norm, for each array of b."""
    squares = {n: (jnp.sum((a[n].astype(jnp.float32) - x.astype(jnp.float32)) ** 2), row_dots(x, x).sum())
               for n, x in b.items()}  # fmt: skip
    return {n: jnp.sqrt(part / whole) for n, (part, whole) in squares.items()}


def jax_calls(attention: Callable[..., Any], inputs: Mapping[str, jax.Array]) -> tuple[Calls, dict[str, jax.Array]]:
    """Calls of an attention function, and its results. The backward pass alone: residuals are kept from one forward."""
    q, k, v, d_out = (inputs[name] for name in ("q", "k", "v", "d_out"))
    out, pull = jax.jit(lambda q, k, v: jax.vjp(attention, q, k, v))(q, k, v)
    backward, forward = jax.jit(lambda pull, d_out: pull(d_out)), jax.jit(attention)

    def repeated(function: Callable[..., Any], *arguments: Any) -> Call:
        def call(n: int) -> object:
            for _ in range(n - 1):
                function(*arguments)  # not kept: results are large
            return jax.block_until_ready(function(*arguments))

        return call

    results = {"out": out, **dict(zip(("dq", "dk", "dv"), backward(pull, d_out), strict=True))}
    return {"forward": repeated(forward, q, k, v), "backward": repeated(backward, pull, d_out)}, results


def library_attention(bench: Bench, lengths: Sequence[int], packed: bool, head_dim: int) -> Callable[..., Any]:
    """jax.nn.dot_product_attention. It knows no documents, so packed ones go to the function behind it, which is jax's
    own and may change with any version."""
    if not packed:
        implementation: Any = bench.scale.library
        return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    inner = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    sizes = np.array([lengths], np.int32)
    starts = np.append(np.cumsum(lengths) - lengths, -1).astype(np.int32)[None]
    how = {"scale": head_dim**-0.5, "mask_type": inner.MaskType.PADDING_CAUSAL}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        size, start = jnp.asarray(sizes), jnp.asarray(starts)
        return inner.dot_product_attention(q, k, v, None, None, size, size, start, start, **how)

    return attend


def torch_calls(lengths: Sequence[int], packed: bool, shape: Shape) -> Calls:
    """PyTorch's FlashAttention: scaled_dot_product_attention, or varlen_attn for packed documents. Data of its own."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch sees no GPU")
    head_dim, heads, kv_heads = shape
    n, s = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    sizes = [(s, h, head_dim) if packed else (n, h, s, head_dim) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    if packed:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        known, longest = inspect.signature(varlen).parameters, max(lengths)
        how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        how |= {"enable_gqa": True} if "enable_gqa" in known else {}
        ends = torch.tensor([0, *np.cumsum(lengths).tolist()], device="cuda", dtype=torch.int32)
        attend: Callable[[], Any] = functools.partial(varlen, q, k, v, ends, ends, longest, longest, **how)
    else:
        attention: Any = importlib.import_module("torch.nn.attention")
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def attend() -> Any:
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                return sdpa(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    out = attend()
    d_out = torch.randn_like(out)

    def forward(n: int) -> None:
        with torch.no_grad():
            for _ in range(n):
                attend()
        torch.cuda.synchronize()

    def backward(n: int) -> None:
        for _ in range(n):
            torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
        torch.cuda.synchronize()

    return {"forward": forward, "backward": backward}


def interleaved(calls: Mapping[str, Call], scale: Scale) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds per call of each, in `rounds` rounds in which all take a turn, and why some could not. A turn is as many
    calls in a row as take about `round_seconds`, so that launching them is hidden, as it is in a step."""

    def seconds(call: Call, n: int) -> float:
        start = time.perf_counter()
        call(n)
        return (time.perf_counter() - start) / n

    repeats, failed = {}, {}
    for name, call in calls.items():
        try:
            call(1)  # compiles
            repeats[name] = int(min(max(scale.round_seconds / min(seconds(call, 1), seconds(call, 1)), 1), 20))
        except Exception as error:
            failed[name] = brief(error)
    times: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(scale.rounds):
        for name, into in times.items():
            into.append(seconds(calls[name], repeats[name]))
    for name, reason in failed.items():
        if name.startswith("libra"):
            raise RuntimeError(reason)
    return times, failed


def free_memory() -> None:
    """What the last point has held, PyTorch's too."""
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def measure_speed(bench: Bench, shape: Shape, lengths: Sequence[int], packed: bool) -> dict[str, Any]:
    """TFLOP/s of everyone, both directions, on the same documents; and what cuDNN's results differ by."""
    kernels, (head_dim, heads, kv_heads) = bench.kernels(shape), shape
    tiles, pages, _ = kernels.tables(lengths)
    pairs = causal_pairs(lengths)
    point: dict[str, Any] = {"documents": len(lengths), "longest": max(lengths)}
    point["useful"] = pairs * kv_heads / (pages * bench.scale.block**2)
    assert point["useful"] <= 1.0
    if bench.dry:
        return point | {"compiled": kernels.compiled}
    free_memory()
    calls, left_out, sequences = {"libra": kernels.calls(tiles)}, {}, 1 if packed else len(lengths)
    mine = in_model_layout(kernels.results(calls["libra"]), kv_heads, sequences)
    inputs = in_model_layout(kernels.inputs, kv_heads, sequences)
    others: dict[str, Callable[[], tuple[Calls, dict[str, jax.Array]]]] = {
        "cudnn": lambda: jax_calls(library_attention(bench, lengths, packed, head_dim), inputs),
        "torch": lambda: (torch_calls(lengths, packed, shape), {}),
    }
    if not packed:  # tokamax takes documents as a dense mask alone
        others["tokamax"] = lambda: jax_calls(
            functools.partial(importlib.import_module("tokamax").dot_product_attention, is_causal=True), inputs
        )
    for name, make in others.items():
        try:
            calls[name], theirs = make()
            if name == "cudnn":
                point["differs"] = {n: float(x) for n, x in relative_differences(mine, theirs).items()}
            del theirs
        except Exception as error:
            left_out[name] = brief(error)
    del mine
    for direction, factor in DIRECTIONS.items():
        times, failed = interleaved({name: each[direction] for name, each in calls.items()}, bench.scale)
        left_out |= {f"{name} {direction}": reason for name, reason in failed.items()}
        flops = factor * 4 * head_dim * heads * pairs
        point[direction] = {
            name: {"ms": 1e3 * statistics.median(t), "tflops": flops / statistics.median(t) / 1e12, "seconds": t}
            for name, t in times.items()
        }
    point["left_out"] = left_out
    if not all(x <= 0.01 for x in point.get("differs", {}).values()):
        raise WrongResult(f"differs from cuDNN by more than 0.01 of the norm: {point['differs']}", point)
    return point


def measure_latency(bench: Bench) -> dict[str, Any]:
    """Microseconds from a call to its result, one at a time, for one document of the shortest length."""
    shape, tokens = bench.scale.shapes[0], bench.scale.lengths[0]
    kernels = bench.kernels(shape, tokens)
    if bench.dry:
        return {"compiled": kernels.compiled}
    ours, left_out = kernels.calls(kernels.tables([tokens])[0]), {}
    calls = {f"libra {direction}": call for direction, call in ours.items()}
    try:
        attention = library_attention(bench, [tokens], False, shape[0])
        theirs, _ = jax_calls(attention, in_model_layout(kernels.inputs, shape[2], 1))
        calls |= {f"cudnn {direction}": call for direction, call in theirs.items()}
    except Exception as error:
        left_out["cudnn"] = brief(error)
    times, failed = interleaved(calls, dataclasses.replace(bench.scale, rounds=30, round_seconds=0.0))
    microseconds = {name: 1e6 * statistics.median(t) for name, t in times.items()}
    return {"tokens": tokens, "microseconds": microseconds, "left_out": left_out | failed}


def fit_cost_model(bench: Bench, shape: Shape) -> dict[str, Any]:
    """A `CostModel` from the times of one shape with many documents, written beside the results. In a dry run the
    times are what the default model says, and the fit has to find it again."""
    kernels, total = bench.kernels(shape), bench.scale.tokens
    sizes = [total >> i for i in range(10) if total >> i >= bench.scale.block // 2]
    documents = [[size] * (total // size) for size in sizes]
    documents += [[size] * (total // size // 8) for size in sizes[4:]] + [[total // 4], [total // 16]]
    documents += [sample_documents(corpus, total) for corpus in CORPORA]
    model, seconds = CostModel().scaled(kernels.spec), {direction: [] for direction in DIRECTIONS}
    short, counts = dataclasses.replace(bench.scale, rounds=3, round_seconds=bench.scale.round_seconds / 4), []
    for lengths in documents:
        tiles, pages, blocks = kernels.tables(lengths, real_only=True)
        counts.append((pages, blocks, 1))
        for direction, into in seconds.items():
            if bench.dry:
                into.append(getattr(model, direction)(pages, blocks, 1))
            else:
                times, _ = interleaved({"libra": kernels.calls(tiles)[direction]}, short)
                into.append(statistics.median(times["libra"]))
    pages, blocks, launches = np.array(counts, np.float64).T
    measured = {direction: (pages, blocks, launches, np.array(times)) for direction, times in seconds.items()}
    fitted = CostModel.fit(kernels.spec, measured["forward"], measured["backward"])
    stem = bench.json.stem.removesuffix("_dry_run") + ("_dry_run" if bench.dry else "")
    path = bench.json.with_name(f"{stem}_cost_d{shape[0]}.json")
    fitted.save(path)
    off = {}
    for direction, (*amounts, times) in measured.items():
        off[direction] = float(np.median(np.abs(getattr(fitted, direction)(*amounts) / times - 1)))
    found = {"file": path.name, "off": off, "default": vars(model), "model": vars(fitted)}
    found |= {"counts": counts, "seconds": seconds}
    if CostModel.load(path) != fitted or (bench.dry and max(off.values()) > 1e-6):
        raise WrongResult(f"{path} does not load as what was saved, or is not the model that made the times", found)
    return found


# First the other answers to what the table decides: overlap or not, fewer buffers, narrower tiles.
CANDIDATES: dict[Pass, tuple[Launch, ...]] = {
    "forward": (Launch(128, 128, 8, 5), Launch(128, 128, 8, 5, True), Launch(128, 128, 8, 3, True),
                Launch(128, 64, 8, 5, True), Launch(128, 64, 4, 5, True), Launch(64, 64, 4, 5, True),
                Launch(128, 64, 8, 3), Launch(128, 128, 8, 2)),
    "dq": (Launch(128, 64, 8, 5), Launch(64, 64, 4, 2), Launch(128, 64, 8, 3), Launch(128, 64, 4, 5),
           Launch(128, 32, 8, 5), Launch(64, 64, 4, 5)),
    "dkv": (Launch(64, 128, 8, 5), Launch(64, 128, 8, 5, True), Launch(32, 64, 4, 3, True), Launch(64, 64, 4, 3, True),
            Launch(64, 128, 8, 2), Launch(32, 128, 8, 5), Launch(64, 128, 8, 3, True)),
}  # fmt: skip


def sweep(bench: Bench, which: Pass, shape: Shape, most: int | None) -> dict[str, Any]:
    """Milliseconds of a direction with other launch parameters than the chosen ones, for one pass of it."""
    kernels, length = bench.kernels(shape), bench.scale.lengths[2]
    capability = 90 if bench.dry else compute_capability_of(jax.devices()[0])
    if capability is None:
        return {}

    def launch(overrides: Mapping[str, Launch] | None = None) -> Launch:
        return choose(which, capability, block=bench.scale.block, group=kernels.spec.group, head_dim=shape[0],
                      v_head_dim=shape[0], overrides=overrides)  # fmt: skip

    chosen = launch()
    # `choose` raises where one does not fit a block.
    candidates = [launch({which: each}) for each in CANDIDATES[which][:most] if each != chosen]
    if bench.dry:
        return {"candidates": len(candidates)}
    tiles, _, _ = kernels.tables([length] * (bench.scale.tokens // length))
    direction = "forward" if which == "forward" else "backward"
    calls = {"libra": kernels.calls(tiles)}
    calls["libra"]["forward"](1)
    calls |= {str(tuple(each)): kernels.calls(tiles, ((which, each),)) for each in candidates}
    in_turn = {name: each[direction] for name, each in calls.items()}
    times, left_out = interleaved(in_turn, dataclasses.replace(bench.scale, rounds=3))
    ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    return {"chosen": str(tuple(chosen)), "ms": ms, "left_out": left_out}


def sample_documents(corpus: str, tokens: int) -> list[int]:
    """Lengths drawn from a corpus until the sequence is full; the last one is cut."""
    quantiles = json.loads((DISTRIBUTIONS / f"{corpus}.json").read_text())
    rng, lengths, left = np.random.default_rng(0), [], tokens
    while left:
        drawn = int(np.interp(rng.random(), quantiles["probability"], quantiles["length_tokens"]))
        lengths.append(min(max(drawn, 1), left))
        left -= lengths[-1]
    return lengths


# -------------------------------------------------------------------------------------------------------- how it is run


@dataclasses.dataclass(frozen=True)
class Item:
    section: str
    name: str
    run: Callable[[], dict[str, Any]]

    @property
    def key(self) -> str:
        return f"{self.section}: {self.name}"


def items(bench: Bench, quick: bool, full_sweep: bool) -> Iterator[Item]:
    """Everything there is to do, in order."""
    scale, bind = bench.scale, functools.partial
    shapes = scale.shapes[:1] if quick else scale.shapes
    yield Item("environment", "environment", environment)
    for case in CASES[:1] if quick else CASES:
        yield Item("correctness", case.name, bind(check_kernels, case, bench))
    yield Item("correctness", "operator", bind(check_operator, bench))
    for shape in (*shapes, *(() if quick else scale.more_shapes)):
        name = "{} {}/{}".format(*shape)
        for length in scale.lengths if shape in shapes else scale.lengths[1:4:2]:
            lengths = [length] * (scale.tokens // length)
            yield Item("speed", f"{name} {length}", bind(measure_speed, bench, shape, lengths, False))
        for corpus in CORPORA if shape in shapes else ():
            lengths = sample_documents(corpus, scale.tokens)
            yield Item("speed", f"{name} {corpus}", bind(measure_speed, bench, shape, lengths, True))
    yield Item("speed", "latency", bind(measure_latency, bench))
    for shape in shapes:
        yield Item("cost", f"head dim {shape[0]}", bind(fit_cost_model, bench, shape))
    for shape in shapes if full_sweep else shapes[:1]:
        for which in PASSES:
            yield Item("sweep", f"{which} {shape[0]}", bind(sweep, bench, which, shape, None if full_sweep else 4))


def environment() -> dict[str, Any]:
    """Device, driver, versions, commit, assemblers."""
    device, assemblers = jax.devices()[0], [shutil.which("ptxas")]
    for name, inside in (("triton", "backends/nvidia/bin/ptxas"), ("nvidia", "cu13/bin/ptxas")):
        spec = importlib.util.find_spec(name)
        assemblers += [str(Path(place, inside)) for place in (spec and spec.submodule_search_locations) or ()]
    return {
        "device": device.device_kind,
        "compute_capability": compute_capability_of(device),
        "driver": said_by("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "versions": versions(),
        "commit": said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "date": datetime.date.today().isoformat(),
        "ptxas": {p: said_by(p, "--version").split("release ")[-1] for p in assemblers if p and Path(p).exists()},
    }


def versions() -> dict[str, str]:
    found = {}
    names = ["jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "triton", "numpy", "nvidia-cudnn-cu13", "torch"]
    for name in [*names, "tokamax"]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def said_by(*command: str) -> str:
    """What a program prints, or that it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"no {command[0]}"
    return " ".join((done.stdout.strip() or done.stderr.strip()).split())


def brief(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Journal:
    """Results so far, on disk after each item, and what an earlier run of the same code on the same device left."""

    def __init__(self, path: Path, key: Mapping[str, Any], fresh: bool) -> None:
        self.path, self.key = path, dict(key)
        self.items: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not fresh:
            try:
                before = json.loads(path.read_text())
                if not isinstance(before, dict) or not isinstance(before.get("items"), dict):
                    raise ValueError("no results in it")
            except ValueError as error:
                print(f"{path} is damaged or of something else ({error}): beginning anew")
                return
            changed = [name for name, value in self.key.items() if before.get("key", {}).get(name) != value]
            self.items = {} if changed else before["items"]
            if changed:
                print(f"{path} is of another {', '.join(changed)}: beginning anew")

    def of(self, item: Item) -> dict[str, Any]:
        nothing = {"section": item.section, "name": item.name, "status": "not begun", "result": {}}
        return self.items.get(item.key, nothing)

    def put(self, item: Item, status: str, result: Mapping[str, Any] | None = None, **more: Any) -> None:
        entry = {"section": item.section, "name": item.name, "status": status, **more, "result": dict(result or {})}
        self.items[item.key] = entry
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps({"key": self.key, "items": self.items}, indent=1, default=float) + "\n")
        os.replace(partial, self.path)


def code_version() -> str:
    """A hash of what the results depend on."""
    digest = hashlib.sha256()
    for file in sorted([Path(__file__), *ROOT.glob("libra_jax/*.py"), *ROOT.glob("kernels/libra_kernels/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_all(todo: Sequence[Item], journal: Journal, budget_seconds: float) -> None:
    """Runs what is not done. What failed, or was cut off, in an earlier run comes last: it may take the GPU with it."""
    start = time.monotonic()
    rest = [item for item in todo if journal.of(item)["status"] != "done"]
    if len(rest) < len(todo):
        print(f"{len(todo) - len(rest)} of {len(todo)} items are in {journal.path}, by this code on this device")
    again = [item for item in rest if journal.of(item)["status"] in ("failed", "started")]
    for item in [item for item in rest if item not in again] + again:
        begin, limit = time.monotonic(), budget_seconds * (1.0 if item in again else SECTIONS[item.section])
        if begin - start > limit:
            reason = f"{begin - start:.0f} s were used; {item.section} is begun in the first {limit:.0f} s"
            journal.put(item, "skipped", reason=reason)
            continue
        print(f"[{begin - start:6.1f} s] {item.key} ... ", end="", flush=True)
        journal.put(item, "started", reason="the run ended in it")
        try:
            result = item.run()
            journal.put(item, "done", result, took_seconds=time.monotonic() - begin)
            print(f"{time.monotonic() - begin:.1f} s", flush=True)
        except Exception as error:
            print(f"FAILED: {brief(error)}", flush=True)
            trace = traceback.format_exc()[-4000:]
            journal.put(item, "failed", getattr(error, "numbers", {}), reason=brief(error), traceback=trace)
            if not device_works():
                print("The device no longer answers. Run the same command again: it goes on with what is left.")
                return


def device_works() -> bool:
    try:
        return int(jnp.int32(1) + jnp.int32(1)) == 2
    except Exception:
        return False


# ------------------------------------------------------------------------------------------------------ what is printed


LEGEND = f"""\
- right: the largest error, mean or maximum, of out, dq, dk and dv against float32, in units of what plain JAX in the
  same precision makes (at most 2); log-sum-exp within 2e-5; the same bits when run again, in other slots and (out, lse,
  dq) in two waves; outputs and unused slots held NaN before. operator: `libra_attention` on one device.
- TFLOP/s, useful ones: 4 * head_dim for each query head and each (query, key) pair that the causal document mask
  shows, {DIRECTIONS["backward"]} times that in the backward pass (delta, dQ, dK and dV). useful: those pairs over all
  pairs of the pages visited. Medians of interleaved rounds of calls in a row; bfloat16, block {REAL.block}.
- Every measurement has {REAL.tokens} tokens: documents of one length, or drawn from a distribution and packed.
- cudnn: jax.nn.dot_product_attention, forward without log-sum-exp (packed: the private function behind it). torch:
  PyTorch's FlashAttention.
- published, not measured here: FlashAttention-3 / cuDNN / Triton on an H100, head dim 128, 16384 tokens in all, from
  FlashAttention-3's authors; their backward pass is probably not causal."""

Table = tuple[str, list[str], list[list[str]]]


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def tables_of(entries: Sequence[Mapping[str, Any]], dry: bool) -> Iterator[Table]:
    """Title, columns and rows."""
    of = {section: [(e, e["result"]) for e in entries if e["section"] == section] for section in SECTIONS}
    say = "dry run" if dry else ""

    verdict = {"done": say or "yes", "failed": "NO"}
    rows = [[e["name"], verdict.get(e["status"], ""), number(r.get("error")), r.get("lowered", "")]
            for e, r in of["correctness"]]  # fmt: skip
    yield "Are they right?", ["head dim, case", "right", "error / plain JAX's", "compiled"], rows

    rows, names = [], ["libra", "cudnn", "torch", "tokamax"]
    for e, r in of["speed"]:
        if "useful" not in r:
            continue
        head_dim, heads, kind = e["name"].split(" ", 2)
        one = kind.isdecimal()
        documents = f"{r['documents']} x {kind}" if one else f"{kind}: {r['documents']}, longest {r['longest']}"
        for direction in DIRECTIONS:
            by = {name: r.get(direction, {}).get(name, {}) for name in names}
            speeds = [by[name].get("tflops") for name in names]
            ratio = speeds[0] / speeds[1] if speeds[0] and speeds[1] else None
            published = PUBLISHED[direction].get(r["longest"], "") if one and head_dim == "128" else ""
            rows.append([head_dim, heads, documents, direction, f"{r['useful']:.1%}",
                         *(number(x) or say for x in (by["libra"].get("ms"), *speeds, ratio)), published])  # fmt: skip
    columns = ["dim", "heads", "documents", "pass", "useful", "ms", *names, "/ cudnn", "published"]
    yield "TFLOP/s", columns, rows

    for _, r in of["speed"]:
        times = r.get("microseconds", {})
        title = f"Microseconds from one call to its result, one document of {r.get('tokens')} tokens"
        yield title, list(times), [[number(x, 4) for x in times.values()]] if times else []

    rows = []
    for _, r in of["cost"]:
        for field, value in r.get("model", {}).items():
            if field.endswith("_seconds"):
                off = r["off"]["backward" if field.startswith("backward") else "forward"]
                default = number(1e6 * r["default"][field], 4)
                rows.append([r["file"], field, say or number(1e6 * value, 4), default, say or f"{off:.1%}"])
    yield "Cost model", ["file", "coefficient", "fitted, us", "CostModel(), us", "median error"], rows

    rows = []
    for e, r in of["sweep"]:
        for name, ms in sorted(r.get("ms", {}).items(), key=lambda pair: pair[1]):
            launch = f"{r['chosen']}, the chosen one" if name == "libra" else name
            rows.append([e["name"], launch, number(ms, 4), number(ms / r["ms"]["libra"])])
    yield "Launch parameters", ["pass, dim", "rows, keys, warps, stages", "ms", "/ chosen"], rows

    rows = [
        [f"{e['section']}: {e['name']}", e["status"], e.get("reason", "")] for e in entries if e["status"] != "done"
    ]
    left_out: dict[str, list[str]] = {}
    for e in entries:
        for name, reason in e["result"].get("left_out", {}).items():
            left_out.setdefault(f"{name}: {reason}", []).append(f"{e['section']}: {e['name']}")
    more = [[w[0] + (f" and {len(w) - 1} more" if w[1:] else ""), "without", why] for why, w in left_out.items()]
    yield "Not measured", ["what", "", "why"], rows + more


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for line in (columns, *rows):
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def report(entries: Sequence[Mapping[str, Any]], bench: Bench, path: Path | None) -> None:
    about = next((e["result"] for e in entries if e["section"] == "environment"), {}) or {"device": "unknown"}
    if bench.dry:
        compiled = (
            f"Not compiled: {bench.target}." if isinstance(bench.target, str) else "Compiled for an H100 (rung 4)."
        )
        rung = f"Dry run: nothing was launched on a GPU. {compiled} Calculated on a CPU (rung 1)."
    elif bench.scale is not REAL:
        rung = f"A trial on {about['device']}: xla kernels, and plain XLA under the name of cudnn. No number counts."
    else:
        rung = f"Rung 5: run on {about['device']}."
    facts = [about.get("driver", ""), *(" ".join(pair) for pair in about.get("versions", {}).items())]
    facts += [about.get("date", ""), f"commit {about.get('commit')}"]
    text = ["# The Triton kernels on a GPU", "", rung, "", ", ".join(facts) + ".", "", LEGEND, ""]
    print(f"\n{rung}\n{text[4]}")
    for title, columns, rows in tables_of(entries, bench.dry):
        if rows:
            print("\n" + "\n".join([title, *aligned(columns, rows)]))
            text += [f"## {title}", "", *markdown(columns, rows), ""]
    if path:
        path.write_text("\n".join(text).rstrip() + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="no GPU: build, lower and compile, launch nothing")
    parser.add_argument("--quick", action="store_true", help="one case, one head dim")
    parser.add_argument("--sweep", action="store_true", help="more launch parameters, for both head dims")
    sections = [section for section in SECTIONS if section != "environment"]
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, metavar="SECTION", help="%(choices)s")
    parser.add_argument("--budget-seconds", type=float, default=420.0, help="then begin nothing new (%(default)s)")
    parser.add_argument("--json", type=Path, help="results, partial ones too (gpu_check.json, gpu_check_dry_run.json)")
    parser.add_argument("--report", type=Path, help="write the tables to this file, as Markdown")
    parser.add_argument("--fresh", action="store_true", help="do again what is in the --json file")
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu", help=argparse.SUPPRESS)  # cpu: a trial
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all went well. 1: something failed. 2: there is no GPU."""
    options = parse(arguments)
    no_gpu = options.dry_run or options.platform == "cpu"
    if no_gpu:
        jax.config.update("jax_platforms", "cpu")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants memory too
    try:
        device = jax.devices()[0]
    except RuntimeError:
        device = None
    if not no_gpu and compute_capability_of(device) is None:
        found = "nothing" if device is None else f"only {device.device_kind}"
        print(f"This needs an NVIDIA GPU, and jax finds {found}; --dry-run does everything but the launches.")
        return 2
    path = options.json or Path("gpu_check_dry_run.json" if options.dry_run else "gpu_check.json")
    bench = Bench(TINY if options.platform == "cpu" else REAL, options.dry_run, path)
    todo = [i for i in items(bench, options.quick, options.sweep) if i.section in ("environment", *options.only)]
    key = {"code": code_version(), "device": device.device_kind, "versions": versions()}  # type: ignore[union-attr]
    journal = Journal(path, key | {"kind of run": [options.dry_run, options.platform]}, options.fresh)
    try:
        run_all(todo, journal, options.budget_seconds)
    except KeyboardInterrupt:
        print(f"\nInterrupted. What is done is in {path}; the same command goes on from there.")
        return 130
    report([journal.of(item) for item in todo], bench, options.report)
    failures = sum(journal.of(item)["status"] == "failed" for item in todo)
    print(f"\nResults: {path}; {failures} of {len(todo)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
