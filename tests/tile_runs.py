"""How a tile problem runs in Triton's interpreter, and how its results are held against the float64 oracle and against
plain JAX in the same low precision."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import libra_kernels
import numpy as np
import oracle
from libra_kernels import launch
from tile_problems import GARBAGE, Case, Dense, Tables, by_unit, random_dense
from triton_interpreter import Interpreter, Launch

ALL = ("out", "lse", "dq", "dk", "dv")
FLOAT32 = np.dtype(np.float32)


class Results(NamedTuple):
    """What the kernels left, by slot or by unit. lse: (…, 2) from a kernel, whole from the oracle."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Work(NamedTuple):
    """What each pass did, summed over waves: `triton_interpreter.Finished` without the arrays."""

    multiply_adds: dict[str, int]
    tile_comparisons: dict[str, int]


@functools.cache
def interpreter() -> Interpreter:
    """One process for all tests of this one."""
    process = Interpreter(Path(libra_kernels.__file__).parent / "triton_kernels.py")
    atexit.register(process.close)
    return process


def run(
    case: Case,
    tables: Tables,
    dense: Dense | None = None,
    base: tuple[np.ndarray, np.ndarray] | None = None,
    delta: np.ndarray | None = None,
    **options: Any,
) -> Results:
    """Places a problem in its slots, runs it, and gives the results by unit. base: what dk and dv hold before, by
    unit; None: zeros. delta: (U, B, G) by unit; None: from the output. options: as for `run_slots`."""
    results, _ = _run(case, tables, dense, base, delta, **options)
    slot_of = (tables.q_slot,) * 3 + (tables.page_slot,) * 2
    return Results(*(x[slot] for x, slot in zip(results, slot_of, strict=True)))


def work_of(case: Case, tables: Tables) -> Work:
    """What the kernels do for a problem."""
    return _run(case, tables)[1]


def _run(
    case: Case,
    tables: Tables,
    dense: Dense | None = None,
    base: tuple[np.ndarray, np.ndarray] | None = None,
    delta: np.ndarray | None = None,
    **options: Any,
) -> tuple[Results, Work]:
    dense = random_dense(case) if dense is None else dense
    slots = tables.first_visible.shape[0]

    def placed(slot: np.ndarray, values: np.ndarray) -> np.ndarray:
        array = poisoned((slots, *values.shape[1:]), values.dtype)
        array[slot] = values
        return array

    q, d_out = (placed(tables.q_slot, by_unit(case, x)) for x in (dense.q, dense.d_out))
    k, v = (placed(tables.page_slot, by_unit(case, x)[:, :, 0]) for x in (dense.k, dense.v))
    zeros = (np.zeros(x[tables.page_slot].shape, FLOAT32) for x in (k, v))
    dk, dv = (placed(tables.page_slot, x) for x in (zeros if base is None else base))
    if delta is not None:
        options["delta"] = placed(tables.q_slot, delta.astype(FLOAT32))
    return run_slots(case, Dense(q, k, v, d_out), (dk, dv), tables, **options)


def run_slots(
    case: Case,
    slots: Dense,
    gradients: tuple[np.ndarray, np.ndarray],
    tables: Tables,
    *,
    delta: np.ndarray | None = None,
    hole: int = 0,
    launches: Mapping[str, launch.Launch] | None = None,
) -> tuple[Results, Work]:
    """All waves: forward, then dq and dkv. out, lse and dq are poisoned before.

    slots: q (Q, B, G, D), k (K, B, D), v (K, B, E), d_out (Q, B, G, E). gradients: dk (K, B, D) and dv (K, B, E) to
    add to. delta: (Q, B, G); None: from the output, as the operator makes it. hole: slots that are missing in front of
    the first; `tables` count without them. launches: tile sizes of each pass; None: the case's own.

    Asserts that no slot of an entry that ran holds NaN afterwards, and that all others have kept every bit.
    """
    q, k, v, d_out = slots
    (blocks, size, group, _), value_dim = q.shape, v.shape[-1]
    out, dq = poisoned((*q.shape[:3], value_dim), q.dtype), poisoned(q.shape, q.dtype)
    lse, (dk, dv) = poisoned((*q.shape[:3], 2), FLOAT32), gradients
    active = np.concatenate([np.arange(start, stop) for start, stop, _ in tables.waves])
    entries, pages = tables.entries.copy(), tables.pages + np.int32(hole) * (tables.pages != GARBAGE)
    entries[active, 0] += hole
    inputs: dict[str, np.ndarray] = {
        "q": q, "k": k, "v": v, "d_out": d_out, "entries": entries, "pages": pages,
        "first_visible": tables.first_visible,
    }  # fmt: skip
    per_slot = {"q": q, "k": k, "v": v, "d_out": d_out, "first_visible": tables.first_visible, "out": out, "lse": lse}
    per_slot |= {"delta": lse[..., 0], "exponent": lse[..., 0], "dq": dq, "dk": dk, "dv": dv}
    holes = {name: hole * x[0].size for name, x in per_slot.items()}
    work = Work({}, {})

    def call(which: str, wave: tuple[int, int, np.ndarray], written: dict[str, np.ndarray]) -> list[np.ndarray]:
        sizes = (launches or {}).get(which) or case_launch(case)
        start, stop, readers = wave
        arrays = inputs | written | {"readers": readers}
        arrays |= {"start": np.array([start], np.int32), "stop": np.array([stop], np.int32)}
        constants = launch.constants(
            sizes, block=size, group=group, head_dim=q.shape[-1], v_head_dim=value_dim, scale=case.logit_scale,
            soft_cap=case.soft_cap,
        )  # fmt: skip
        programs = len(pages) * (size // sizes.keys) if which == "dkv" else len(entries) * (size * group // sizes.rows)
        done = interpreter().run(Launch(f"{which}_kernel", programs, arrays, tuple(written), constants, holes))
        for total, number in zip(work, (done.multiply_adds, done.tile_comparisons), strict=True):
            total[which] = total.get(which, 0) + number
        return [done.arrays[name] for name in written]

    for wave in tables.waves:
        out, lse = call("forward", wave, {"out": out, "lse": lse})
    if delta is None:
        delta = (out.astype(np.float32) * d_out.astype(np.float32)).sum(axis=-1)
    exponent = (lse[..., 0] + lse[..., 1]) * np.float32(np.log2(np.e))
    inputs |= {"exponent": exponent, "delta": delta}
    for wave in tables.waves:
        (dq,) = call("dq", wave, {"dq": dq})
        dk, dv = call("dkv", wave, {"dk": dk, "dv": dv})

    ran, visited = np.zeros(blocks, bool), np.zeros(k.shape[0], bool)
    for slot, _, _, count, page_base in tables.entries[active]:
        ran[slot] = True
        visited[tables.pages[page_base : page_base + count]] = True
    before = [*(np.broadcast_to(poisoned((1,), x.dtype), x.shape) for x in (out, lse, dq)), *gradients]
    for name, x, start, touched in zip(ALL, (out, lse, dq, dk, dv), before, (ran,) * 3 + (visited,) * 2, strict=True):
        assert same_bits(x[~touched], start[~touched]), f"{name}: slots that no entry uses have changed"
        assert not np.isnan(x[touched]).any(), f"{name}: NaN"
    return Results(out, lse, dq, dk, dv), work


def case_launch(case: Case) -> launch.Launch:
    """The case's tile, cut to what divides a block."""
    rows = case.rows
    while case.block * case.group % rows:
        rows //= 2
    return launch.Launch(rows, min(case.keys, case.block), 4, 2, case.overlap)


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """NaN of a bit pattern that no arithmetic makes."""
    pattern = {"bfloat16": 0x7FE5, "float16": 0x7EA5, "float32": 0x7FE5A5A5}[dtype.name]
    return np.full(shape, pattern, f"u{dtype.itemsize}").view(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def assert_same_bits(got: Results, want: Results, names: Sequence[str] = ALL) -> None:
    for name in names:
        x, y = getattr(got, name), getattr(want, name)
        assert same_bits(x, y), f"{name}: {int((x != y).sum())} of {x.size} numbers differ"


def truth(case: Case, dense: Dense) -> Results:
    """The float64 oracle's results by unit."""
    t = oracle.attention(
        *dense[:3], case.segment_ids(), dense.d_out, window=case.window, scale=case.logit_scale, soft_cap=case.soft_cap
    )
    assert t.dq is not None and t.dk is not None and t.dv is not None
    dk, dv = by_unit(case, t.dk)[:, :, 0], by_unit(case, t.dv)[:, :, 0]
    return Results(by_unit(case, t.out), by_unit(case, t.lse[..., None])[..., 0], by_unit(case, t.dq), dk, dv)


def plain_jax(case: Case, dense: Dense) -> Results:
    """The same attention by plain JAX in the case's dtype with float32 accumulation, by unit; no lse."""
    visible = jnp.asarray(oracle.visibility(case.segment_ids(), case.window))
    with jax.numpy_dtype_promotion("standard"):  # inside jax.nn
        results = _plain(*dense, visible, case.logit_scale, case.soft_cap)
    out, dq, dk, dv = (np.asarray(x) for x in results)
    out = np.where((case.segment_ids() > 0)[:, :, None, None], out, 0)  # softmax over nothing is uniform there
    dk, dv = by_unit(case, dk)[:, :, 0], by_unit(case, dv)[:, :, 0]
    return Results(by_unit(case, out), np.empty(0), by_unit(case, dq), dk, dv)


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap"))
def _plain(q, k, v, d_out, visible, scale, soft_cap):
    def attention(q, k, v):
        if soft_cap is None and q.shape[-1] == v.shape[-1] and q.dtype == jnp.bfloat16:  # float16: not on CPUs
            return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None], scale=scale)
        n, s, kv_heads, _ = k.shape
        grouped = q.reshape(n, s, kv_heads, -1, q.shape[-1])
        logits = jnp.einsum("nqkgd,npkd->nkgqp", grouped, k, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], logits, -1e30), axis=-1).astype(v.dtype)
        out = jnp.einsum("nkgqp,npke->nqkge", weights, v, preferred_element_type=jnp.float32)
        return out.reshape(n, s, -1, v.shape[-1]).astype(q.dtype)

    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(d_out)


def errors(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """The largest error and the root of the mean square."""
    difference = got.astype(np.float64) - want
    return float(np.abs(difference).max()), float(np.sqrt((difference**2).mean()))


def assert_lse(case: Case, got: np.ndarray, want: np.ndarray) -> None:
    """Both parts of the log-sum-exp: they add up to it; -inf where a row sees nothing.

    Both are float32 throughout. A logit, and the sum of the weights, keep a handful of roundings of 6e-8: 8 of them are
    granted, of the largest value, or of the soft cap: cap * (1 - 2 / (...)) is rounded beside 1.
    """
    total = got.astype(np.float64).sum(axis=-1)
    empty = np.isneginf(want)
    assert np.array_equal(np.isneginf(total), empty)
    want, total, rest = want[~empty], total[~empty], got[..., 1][~empty]
    if want.size:
        allowed = 8 * 2.0**-24 * max(1.0, float(np.abs(want).max()), case.soft_cap or 0.0)
        assert np.abs(total - want).max() <= allowed, (np.abs(total - want).max(), allowed)
        assert rest.min() >= -allowed and rest.max() <= np.log(case.seq_len) + allowed, "the part beside the largest"


def assert_padding_is_zero(case: Case, got: Results) -> None:
    """Rows and keys of padding have zero output and gradients, to the bit."""
    padding = np.repeat((case.segment_ids() == 0)[:, :, None, None], case.kv_heads, axis=2)
    padding = by_unit(case, padding)[:, :, 0, 0]
    for name in ("out", "dq", "dk", "dv"):
        assert not getattr(got, name)[padding].astype(np.float32).any(), f"{name}: padding"


def assert_as_good_as_plain_jax(case: Case, got: Results, dense: Dense) -> None:
    """Errors against float64 at most twice those of plain JAX in the same dtype.

    Both round the same inputs, keep logits and sums in float32, round weights once to 16 bits, and results as well;
    the kernels' gradients of logits, which plain JAX keeps in float32, make up for its rounded dk and dv. Twice leaves
    room for the largest of some ten thousand errors, which is a matter of luck. Plain JAX can be exact where the
    kernels subtract two float32 numbers of some tens, each a few roundings of 6e-8 off: 1e-5 of the result's size, a
    fiftieth of what 16 bits cost.
    """
    want, plain = truth(case, dense), plain_jax(case, dense)
    for name in ("out", "dq", "dk", "dv"):
        mine, theirs = (errors(getattr(x, name), getattr(want, name)) for x in (got, plain))
        floor = 1e-5 * max(1.0, float(np.abs(getattr(want, name)).max()))
        for kind, m, t in zip(("largest", "root mean square"), mine, theirs, strict=True):
            assert m <= 2 * t + floor, f"{name}: {kind} error {m:.2e}, plain JAX {t:.2e}"
    assert_lse(case, got.lse, want.lse)
    assert_padding_is_zero(case, got)
