"""`lax.ragged_all_to_all` on CPU devices, where XLA has none: a lowering of our own, for tests only.

Everybody's rows and tables are gathered, and each rank takes from them the rows that are addressed to it. Rows that
nobody writes keep what `output` held there, as the primitive promises. Slow, and as plain as possible: it is what the
ragged transport's tables are tested against. Lowerings for other platforms are left alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.lax import ragged_all_to_all_p

from libra_jax.exchange import RAGGED_PLATFORMS


def install() -> None:
    """Registers the lowering. Before the first program that needs it is lowered."""
    RAGGED_PLATFORMS.add("cpu")
    mlir.register_lowering(
        ragged_all_to_all_p, mlir.lower_fun(_gather_and_pick, multiple_results=False), platform="cpu"
    )


def _gather_and_pick(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: tuple[str, ...],
    axis_index_groups: tuple[tuple[int, ...], ...] | None,
) -> jax.Array:
    """operand (M, ...), output (R, ...); the tables (N * slices,), the slices of each peer side by side."""
    axes = tuple(axis_name)
    groups = axis_index_groups or (tuple(range(lax.axis_size(axes))),)
    ranks = len(groups[0])
    places = {rank: place for group in groups for place, rank in enumerate(group)}
    me = jnp.asarray([places[rank] for rank in range(lax.axis_size(axes))], jnp.int32)[lax.axis_index(axes)]
    gather = functools.partial(lax.all_gather, axis_name=axes, axis_index_groups=axis_index_groups)

    def to_me(table: jax.Array) -> jax.Array:
        """(senders, slices): what every rank's table says of what it sends here."""
        everybodys = gather(table.reshape(ranks, -1))
        return lax.dynamic_index_in_dim(everybodys, me, axis=1, keepdims=False)

    begin, size, land = (to_me(table) for table in (input_offsets, send_sizes, output_offsets))
    # A sender and a receiver that do not agree on sizes would hang on GPUs; here nothing arrives.
    size = jnp.where(size == recv_sizes.reshape(size.shape), size, 0)
    rows = gather(operand)
    row = jnp.arange(output.shape[0], dtype=land.dtype)
    for sender in range(ranks):
        for piece in range(begin.shape[1]):
            step = row - land[sender, piece]
            arrived = (step >= 0) & (step < size[sender, piece])
            picked = rows[sender].at[begin[sender, piece] + step].get(mode="clip")
            output = jnp.where(arrived.reshape(-1, *(1,) * (output.ndim - 1)), picked, output)
    return output
