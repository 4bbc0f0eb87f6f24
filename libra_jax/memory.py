"""What the attention of one layer costs in bytes on one rank, from the shape of the pool alone.

The formula counts the buffers that `waves` makes, with the ragged transport and kernels that take slots. It is held
against what XLA sets aside when it compiles for an H100 (tests/test_memory.py). Letters as in `spec`; H home blocks;
RB, RP, SP room for received blocks, received pages and sent pages. Where pools have relays their exchanges have boxes
of their own.
"""

from __future__ import annotations

import dataclasses
import math

from libra_jax.spec import PoolSpec
from libra_jax.tables import table_shapes


@dataclasses.dataclass(frozen=True)
class PassBytes:
    """One pass at its fullest. Room is set aside in full, whatever a batch needs of it.

    outbox: copies of what is sent, put together before the first wave, and of what relays pass on, put together window
    by window. inputs: blocks and pages by slot, as a wave's
    kernel reads them. results: what the waves update. inboxes: what is received and what comes home, which XLA keeps in
    a memory space of its own, so that it comes on top even where it is needed at another moment.
    """

    outbox: int
    inputs: int
    results: int
    inboxes: int

    @property
    def total(self) -> int:
        return self.outbox + self.inputs + self.results + self.inboxes


@dataclasses.dataclass(frozen=True)
class AttentionBytes:
    """One layer's attention on one rank.

    kept: from the forward pass to the backward pass: q, k, v and the output as the model has them, and the log-sum-exp
    of the blocks that the rank executed. forward, backward: on top of that, while a pass runs; they are free again
    after it, so a model pays for one layer at a time. tables: of the plan; one set serves all layers.
    """

    kept: int
    forward: PassBytes
    backward: PassBytes
    tables: int


def attention_bytes(spec: PoolSpec) -> AttentionBytes:
    """The bytes of a layer's attention, with `ragged`, in `spec.dtype`. See the classes for the parts."""
    tokens, heads = spec.block, spec.block * spec.group
    query, result = (heads * width * spec.item_bytes for width in (spec.head_dim, spec.value_dim))
    first, delta, lse = 4 * tokens, 4 * heads, 8 * heads
    home = spec.home_blocks
    slots = home + (spec.room.blocks if spec.ranks > 1 else 0)
    page_slots = home + (spec.room.pages if spec.ranks > 1 else 0) + _relayed(spec)[0]
    gradient = spec.page_bytes // spec.item_bytes * 4  # summed in float32
    return AttentionBytes(
        kept=home * (query + spec.page_bytes + result) + slots * lse,
        forward=_pass(spec, query + first, result, 0, slots * result),
        backward=_pass(
            spec, query + first + result + delta, query, spec.page_bytes, slots * query + page_slots * gradient
        ),
        tables=4 * sum(math.prod(shape) for shape in table_shapes(spec).values()),
    )


def _pass(spec: PoolSpec, block: int, result: int, gradient: int, results: int) -> PassBytes:
    """block: what travels of a block. result, gradient: what goes home of a block, of a page. results: the state."""
    home, room, page = spec.home_blocks, spec.room, spec.page_bytes
    at_home = home * (block + page)
    if spec.ranks == 1:
        return PassBytes(0, at_home, results, 0)
    passed, relayed = _relayed(spec)
    without_passed = (home + room.blocks) * block + (home + room.pages) * page
    by_slot = without_passed + passed * page
    dispatched = home * block + room.sent_pages * page
    returned = room.blocks * result + room.pages * gradient
    received = room.blocks * block + room.pages * page
    came_home = home * result + room.sent_pages * gradient
    # What a wave reads is copied out of the inbox before the next exchange writes to it. With two waves and fewer
    # nothing is left to send by then, with more than three there are results in the outbox too. Of three waves only
    # the last reads passed pages, and what is sent by then are results.
    if spec.waves == 1:
        outbox, inputs = max((dispatched, 0), (0, by_slot), key=sum)
    elif spec.waves == 2:
        outbox, inputs = max((dispatched, at_home), (0, by_slot), key=sum)
    elif spec.waves == 3:
        outbox, inputs = max((dispatched + relayed * page, without_passed), (returned, by_slot), key=sum)
    else:
        inside = relayed * page + (passed * gradient if spec.waves > 4 else 0)
        outbox, inputs = returned + max(dispatched + inside, passed * gradient), by_slot
    if gradient and returned > outbox + inputs:
        outbox, inputs = returned, 0
    inboxes = max(received, came_home) if spec.waves <= 2 else received + came_home
    inboxes += passed * page + relayed * gradient
    return PassBytes(outbox, inputs, results, inboxes)


def _relayed(spec: PoolSpec) -> tuple[int, int]:
    """Room for passed pages and for relayed ones; none where there are no relays."""
    return (spec.room.passed_pages, spec.room.relayed_pages) if spec.node_ranks > 1 else (0, 0)
