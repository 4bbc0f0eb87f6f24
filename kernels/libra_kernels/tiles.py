"""What a tile kernel reads and writes: blocks of queries, pages of keys and values, and the tables that join them.

Letters: Q query block slots, K page slots, X entries, L page-table rows, B tokens in a block or page, G query heads
that share the key/value head, D width of queries and keys, E width of values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Int

from libra_kernels.launch import Launch

PADDING = 2**30
"""First-visible position of a padding row: later than any key, so the row sees nothing."""

Q_SLOT, BLOCK, FIRST_PAGE, NUM_PAGES, PAGE_BASE = range(5)
"""Columns of `Tiles.entries`."""


class Tiles(NamedTuple):
    """Which pages each block visits. Entries `start <= x < stop` are executed; the others cost nothing.

    entries: one row per executed block: its query slot; its number in the sequence (query row i stands at position
        block * B + i); the number of the first page it visits; how many pages, ascending; and where in `pages` the
        first one stands. A query slot occurs in at most one entry. Entries of one wave that visit the same row of
        `pages` are neighbours, in ascending order of their blocks.
    pages: page slots. Page j of entry x lies in slot pages[PAGE_BASE + j] and its key i stands at position
        (FIRST_PAGE + j) * B + i. Of the rows that one wave visits, no two hold the same slot.
    first_visible: per query slot and row the lowest key position the row may see; PADDING for padding rows. The row
        sees the keys from there to its own position. Document starts and sliding windows are both expressed by it.
    """

    entries: Int[Array, "X 5"]
    pages: Int[Array, " L"]
    first_visible: Int[Array, "Q B"]
    start: Int[Array, ""]
    stop: Int[Array, ""]


class TileOptions(NamedTuple):
    """Static numbers of the attention itself, and how `triton` launches it.

    soft_cap: logits become soft_cap * tanh(logits / soft_cap).
    compute_capability: of the device that will run it, times ten (90 for an H100); None: of the GPU that is there,
        and 90 where none is.
    launches: pairs (pass, `launch.Launch`) that take the place of the table's, passes being "forward", "dq" and "dkv".
    """

    scale: float
    soft_cap: float | None = None
    compute_capability: int | None = None
    launches: tuple[tuple[str, Launch], ...] = ()


def cap_logits(logits: jax.Array, options: TileOptions) -> jax.Array:
    """Scaled logits after the soft cap, if there is one."""
    if options.soft_cap is None:
        return logits
    return options.soft_cap * jax.numpy.tanh(logits / options.soft_cap)


def cap_slope(capped: jax.Array, options: TileOptions) -> jax.Array | float:
    """Derivative of `cap_logits` at logits whose capped value is `capped`."""
    if options.soft_cap is None:
        return 1.0
    return 1.0 - (capped / options.soft_cap) ** 2
