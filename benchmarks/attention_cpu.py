"""The `xla` kernel against dense attention on this CPU: what skipping pages is worth.

`libra_attention` against `jax.nn.dot_product_attention` with a dense mask for the packed documents, on the same inputs,
in one process, runs alternating: on a mesh of one device, and with the sequence over one device per core, which is how
the operator uses several cores (dense attention uses them all by itself). Run: python -m benchmarks.attention_cpu
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType, NamedSharding
from rich.console import Console
from rich.table import Table

import libra_jax
from benchmarks.reporting import machine, markdown
from libra_jax.attention import PLAN_SPEC, SEQUENCE_SPEC

TOLERANCE = 2e-3
CORES = os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    tokens: tuple[int, ...] = (2048, 8192)
    head_dims: tuple[int, ...] = (64, 128)
    num_heads: int = 8
    num_kv_heads: int = 2
    block: int = 128
    short: int = 256
    """Tokens in each document of the many-documents case."""
    spread_tokens: int = 2048
    """Longest sequence that is measured over all cores as well."""
    seconds: float = 6.0
    """Time spent on each row, at least one round."""
    json: Path | None = None
    """Write all rows to this file."""
    report: Path | None = None
    """Write the table to this file, as Markdown."""


LEGEND = f"""\
`libra_attention` against `jax.nn.dot_product_attention` with a dense mask, float32, in one process, in turn. Rung 1:
they agree within {TOLERANCE} before they are timed.

- dense: median milliseconds; it uses all cores. libra 1, libra {CORES}: median milliseconds of the operator on a mesh
  of one device and of {CORES}, the sequence cut over them (cp {CORES}), with its exchange. x: dense over libra. Longer
  sequences are left out there: devices of one process share XLA:CPU's threads, one that waits in a collective keeps
  its thread, and the other then takes tens of seconds for what takes it seconds alone.
- promise: pages of the dense matrix over pages that Libra visits, the ratio if a page cost the same."""


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", CORES)
    rows = []
    for head_dim in options.head_dims:
        for tokens in options.tokens:
            for name, lengths in (
                ("one", [tokens]),
                (f"{options.short}-token", [options.short] * (tokens // options.short)),
            ):
                rows += measure(tokens, head_dim, name, lengths, options)
    cells = [[f"{x:.3g}" if isinstance(x, float) and x < 1000 else f"{x:.0f}" if isinstance(x, float) else str(x)
              for x in row.values()] for row in rows]  # fmt: skip
    title = f"heads {options.num_heads}/{options.num_kv_heads}, block {options.block}"
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    Console(width=max(Console().width, 110)).print(table)
    about = machine("jax", "numpy")
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "options": str(options), "rows": rows}, indent=1) + "\n")
    if options.report:
        text = ["# The xla kernel against dense attention on a CPU", "", about, "", LEGEND, "", f"## {title}", ""]
        options.report.write_text("\n".join([*text, *markdown(list(rows[0]), cells)]) + "\n")


def measure(
    tokens: int, head_dim: int, name: str, lengths: list[int], options: Options
) -> list[dict[str, str | int | float]]:
    """Rows for the forward pass, and for forward and backward."""
    widths = (options.num_heads, options.num_kv_heads, options.num_kv_heads, options.num_heads)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (1, tokens, h, head_dim)) for key, h in zip(keys, widths, strict=True)]
    segment_ids = jnp.asarray(np.repeat(np.arange(len(lengths)) + 1, lengths))[None]
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)

    sides: list[tuple[Attention, list[jax.Array]]] = [(dense, arrays)]
    pages = 0.0
    devices_of = [1, CORES] if tokens <= options.spread_tokens and CORES > 1 else [1]
    for devices in devices_of:
        spec = libra_jax.PoolSpec(
            seq_len=tokens, pool_size=1, cp=devices, num_heads=options.num_heads, num_kv_heads=options.num_kv_heads,
            head_dim=head_dim, block=options.block, dtype="float32", waves=1, capacity=0,
        )  # fmt: skip
        kinds = (AxisType.Auto,) * 3
        mesh = jax.make_mesh((1, 1, devices), ("pool", "dp", "cp"), axis_types=kinds, devices=jax.devices()[:devices])
        plan = libra_jax.plan_pool([lengths], spec)
        pages = float(plan.stats.work.sum())
        plans = jax.device_put(libra_jax.stack_plans([plan]), NamedSharding(mesh, PLAN_SPEC))
        spread = [jax.device_put(array, NamedSharding(mesh, SEQUENCE_SPEC)) for array in arrays]
        sides.append((pooled(plans, spec, mesh), spread))

    rows = []
    for label, wrap in (("forward", _forward), ("both", _both)):
        calls = [(wrap(attention), inputs) for attention, inputs in sides]
        wanted, *got = [jax.tree.leaves(call(*inputs)) for call, inputs in calls]
        for results in got:
            for a, b in zip(results, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        dense_ms, *ours_ms = alternate(calls, options.seconds)
        row: dict[str, str | int | float] = {"head_dim": head_dim, "tokens": tokens, "documents": name, "pass": label}
        row["dense"] = dense_ms
        for devices in (1, CORES):
            row |= {f"libra {devices}": "", f"x{devices}": ""}
        for devices, ms in zip(devices_of, ours_ms, strict=True):
            row |= {f"libra {devices}": ms, f"x{devices}": dense_ms / ms}
        rows.append(row | {"promise": (tokens // options.block) ** 2 * options.num_kv_heads / pages})
    return rows


Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Call = Callable[..., object]


def pooled(plans: libra_jax.PlanTables, spec: libra_jax.PoolSpec, mesh: jax.sharding.Mesh) -> Attention:
    return lambda q, k, v: libra_jax.libra_attention(q, k, v, plans, spec=spec, mesh=mesh)


def _forward(attention: Attention) -> Call:
    return jax.jit(lambda q, k, v, d_out: attention(q, k, v))


def _both(attention: Attention) -> Call:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> object:
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(d_out)

    return jax.jit(run)


def alternate(calls: Sequence[tuple[Call, list[jax.Array]]], seconds: float) -> list[float]:
    """Median milliseconds of each call, measured in turn, each turn after a run that is not timed: dense attention
    leaves caches and gigabytes of freed memory behind, which would be counted to the next. All are compiled before."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.monotonic() + seconds
    while time.monotonic() < end or not times[0]:
        for (call, inputs), into in zip(calls, times, strict=True):
            jax.block_until_ready(call(*inputs))
            start = time.perf_counter()
            jax.block_until_ready(call(*inputs))
            into.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(ms) for ms in times]


if __name__ == "__main__":
    main(tyro.cli(Options))
