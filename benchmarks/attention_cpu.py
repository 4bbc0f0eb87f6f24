"""The `xla` kernel against dense attention on this CPU: what skipping pages is worth.

`libra_attention` on a mesh of one device against `jax.nn.dot_product_attention` with a dense mask for the packed
documents, on the same inputs, in one process, runs alternating. Run: python -m benchmarks.attention_cpu
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType
from rich.console import Console
from rich.table import Table

import libra_jax


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    tokens: tuple[int, ...] = (2048, 8192)
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block: int = 128
    short: int = 256
    """Tokens in each document of the many-documents case."""
    seconds: float = 20.0
    """Time spent on each row, at least two runs of either side."""
    json: Path | None = None


def main(options: Options) -> None:
    rows = []
    for tokens in options.tokens:
        for name, lengths in (
            ("one", [tokens]),
            (f"{options.short}-token", [options.short] * (tokens // options.short)),
        ):
            rows += measure(tokens, name, lengths, options)
    table = Table(title=f"heads {options.num_heads}/{options.num_kv_heads}, head_dim {options.head_dim}, float32, CPU")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(tokens: int, name: str, lengths: list[int], options: Options) -> list[dict[str, str | int | float]]:
    spec = libra_jax.PoolSpec(
        seq_len=tokens, pool_size=1, cp=1, num_heads=options.num_heads, num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim, block=options.block, dtype="float32", waves=1,
    )  # fmt: skip
    mesh = jax.make_mesh((1, 1, 1), ("pool", "dp", "cp"), axis_types=(AxisType.Auto,) * 3)
    plan = libra_jax.plan_pool([lengths], spec)
    plans = libra_jax.stack_plans([plan])
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, tokens, options.num_heads, options.head_dim)
    kv_shape = (1, tokens, options.num_kv_heads, options.head_dim)
    arrays = [
        jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, (shape, kv_shape, kv_shape, shape), strict=True)
    ]
    segment_ids = jnp.asarray(np.repeat(np.arange(len(lengths)) + 1, lengths))[None]
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]

    def pooled(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return libra_jax.libra_attention(q, k, v, plans, spec=spec, mesh=mesh)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)

    dense_pages = (tokens // options.block) ** 2 * options.num_kv_heads
    rows = []
    for label, wrap in (("forward", _forward), ("forward + backward", _both)):
        ours, theirs = wrap(pooled), wrap(dense)
        for a, b in zip(jax.tree.leaves(ours(*arrays)), jax.tree.leaves(theirs(*arrays)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
        ours_ms, theirs_ms = alternate(ours, theirs, arrays, options.seconds)
        rows.append({
            "tokens": tokens, "documents": name, "pass": label, "dense ms": theirs_ms, "libra ms": ours_ms,
            "ratio": theirs_ms / ours_ms, "pages skipped promise": dense_pages / float(plan.stats.work.sum()),
        })  # fmt: skip
    return rows


def _forward(attention: Callable[..., jax.Array]) -> Callable[..., object]:
    return jax.jit(lambda q, k, v, d_out: attention(q, k, v))


def _both(attention: Callable[..., jax.Array]) -> Callable[..., object]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> object:
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(d_out)

    return jax.jit(run)


def alternate(
    a: Callable[..., object], b: Callable[..., object], arguments: list[jax.Array], seconds: float
) -> tuple[float, float]:
    """Median milliseconds of both, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in (a, b):
        jax.block_until_ready(run(*arguments))
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 2:
        for run, into in zip((a, b), times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            into.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main(tyro.cli(Options))
