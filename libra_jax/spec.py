"""The shape of a pool: everything about a run that the plan tables and the compiled program depend on.

One `PoolSpec` serves a whole run. It is frozen, hashable and validated when made, so that a wrong number is
refused on the host before anything compiles. Host side: NumPy-free, JAX-free.

Letters used in this package: P sequences in a pool, C ranks in a CP group, N = P * C ranks in a pool, K key/value
heads, G query heads that share one, B tokens in a block, D head dim of queries and keys, E head dim of values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any, SupportsIndex

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST_TOKENS = 2**30  # positions from here on mark padding (`workload.PADDING`)
_MOST_WAVES = 64


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The room a rank sets aside, each in units of its home blocks (num_kv_heads * seq_len / (cp * block)).

    Buffers and tables have these sizes whatever the batch, which is what keeps one compilation for a whole run. A
    plan that needs more is replaced by the head-parallel one, which always fits, and says so in `stats.fallback`.

    blocks: query blocks a rank may receive, all waves together.
    pages: key/value pages a rank may receive, all waves together.
    sent_pages: page copies a rank may send from home, all waves together (a page sent to three ranks counts three
        times).
    pair_blocks, pair_pages: what one rank may send to one other in one wave. Only the padded transports
        (`all_to_all`, `ppermute`) allocate by pair; None means the most that the other three allow.
    passed_pages: pages a rank may get from relays in its node, all waves together, besides `pages`. Only with
        `PoolSpec.ranks_per_node`; None means as many as `pages`.
    relayed_pages: page copies a relay may pass on to its node, all waves together; None means as many as `pages`.
    """

    blocks: float
    pages: float
    sent_pages: float
    pair_blocks: float | None = None
    pair_pages: float | None = None
    passed_pages: float | None = None
    relayed_pages: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is dataclasses.MISSING:
                object.__setattr__(self, field.name, _room_number(f"capacity.{field.name}", value))


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Shapes of one pool and of the attention that runs in it.

    seq_len: tokens in a packed sequence, padding included; a multiple of cp * block.
    pool_size: packed sequences in a pool (P).
    cp: ranks that hold one sequence (C).
    num_heads, num_kv_heads: query heads, and key/value heads that divide them.
    head_dim: width of queries and keys.
    block: tokens in a block and in a page; what the kernel works on at once.
    v_head_dim: width of values; None: bytes are counted as if values were as wide as keys, and the operator takes the
        width from v itself.
    waves: kernel launches a pass of attention is cut into. 1: all work after one exchange. W > 1: wave 0 is work that
        needs no exchange, and each of the W - 1 exchanges feeds one later wave and runs under the wave before it.
    capacity: room for received blocks and pages. None chooses what balances real corpora (benchmarks/planner.py). A
        number gives every kind that many times the home blocks, or what the head-parallel plan needs if that is more,
        so 0 is as little as possible. A `Capacity` sets each by itself, and is refused where it is less than that.
    window: a query sees at most this many keys, its own included. None: all earlier keys of its document.
    dtype: the type of q, k and v that plans count bytes in ("float32", "bfloat16" or "float16").
    ranks_per_node: neighbouring ranks of a pool that share a node. A page that several ranks of another node read then
        crosses once, to one of them, its relay, which passes it on inside the node while the next wave computes: so it
        takes at least 3 waves. None: every page comes straight from its home, also where a pool lies within one node.

    Raises ValueError with the rule and both numbers.
    """

    seq_len: int
    pool_size: int
    cp: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block: int = 128
    v_head_dim: int | None = None
    waves: int = 2
    capacity: Capacity | float | None = None
    window: int | None = None
    dtype: str = "bfloat16"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "pool_size", "cp", "num_heads", "num_kv_heads", "head_dim", "block", "waves"):
            object.__setattr__(self, name, _positive_int(name, getattr(self, name)))
        for name in ("v_head_dim", "window", "ranks_per_node"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive_int(name, getattr(self, name)))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.seq_len % (self.cp * self.block):
            raise ValueError(
                f"seq_len ({self.seq_len}) must be a multiple of cp * block "
                f"({self.cp} * {self.block} = {self.cp * self.block})"
            )
        if self.seq_len >= _MOST_TOKENS:
            raise ValueError(
                f"seq_len ({self.seq_len}) must be below {_MOST_TOKENS}: positions from there mark padding"
            )
        if self.waves > _MOST_WAVES:
            raise ValueError(f"waves ({self.waves}) must be at most {_MOST_WAVES}")
        if self.ranks_per_node is not None:
            self._check_node(self.ranks_per_node)
        if self.window is not None:  # one longer than the sequence is as long as the sequence
            object.__setattr__(self, "window", min(self.window, self.seq_len))
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"dtype ({self.dtype!r}) must be one of {sorted(_ITEM_BYTES)}")
        room = self.capacity
        if room is not None and not isinstance(room, Capacity):
            room = _room_number("capacity", room)
            need = head_parallel_capacity(self)
            room = Capacity(max(room, need.blocks), max(room, need.pages), max(room, need.sent_pages))
            object.__setattr__(self, "capacity", room)
        if room is not None:
            self._check_capacity(room)

    def _check_capacity(self, room: Capacity) -> None:
        need = head_parallel_capacity(self)
        for field in dataclasses.fields(Capacity):
            got, least = getattr(room, field.name), getattr(need, field.name)
            if got is None or least is None:
                continue
            if got < least and round(got * self.home_blocks) < round(least * self.home_blocks):
                raise ValueError(
                    f"capacity.{field.name} ({got:g}) must be at least {least:g}: that is what the head-parallel "
                    f"plan, which has to fit always, needs with cp {self.cp} and {self.num_kv_heads} kv heads"
                )

    def _check_node(self, node: int) -> None:
        larger, smaller = max(node, self.ranks), min(node, self.ranks)
        if larger % smaller:
            raise ValueError(
                f"ranks_per_node ({node}) must divide pool_size * cp ({self.pool_size} * {self.cp} = {self.ranks}) or "
                "be a multiple of it: pools begin and end with nodes"
            )
        if node >= self.ranks or node == 1:  # nothing to pass on
            object.__setattr__(self, "ranks_per_node", None)
        elif self.waves < 3:
            raise ValueError(
                f"waves ({self.waves}) must be at least 3 with ranks_per_node ({node}) in a pool of {self.ranks}: "
                "what a relay passes on arrives a wave later"
            )

    # Sizes that follow from the fields.
    @property
    def ranks(self) -> int:
        """Ranks in a pool, N = pool_size * cp. Rank p * cp + c holds part c of sequence p."""
        return self.pool_size * self.cp

    @property
    def node_ranks(self) -> int:
        """Ranks among which relays pass pages on; 1 where there are no relays. Rank r is in node r // node_ranks."""
        return self.ranks_per_node or 1

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def blocks_per_sequence(self) -> int:
        return self.seq_len // self.block

    @property
    def blocks_per_rank(self) -> int:
        """Blocks of one lane that one rank is home to."""
        return self.blocks_per_sequence // self.cp

    @property
    def home_blocks(self) -> int:
        """(block, kv head) pairs that one rank is home to; the unit of `Capacity`."""
        return self.num_kv_heads * self.blocks_per_rank

    @property
    def tokens_per_rank(self) -> int:
        return self.seq_len // self.cp

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def exchanges(self) -> int:
        """Dispatches in a forward pass; exchange x feeds wave x + 1, or wave 0 when there is only one wave."""
        return max(self.waves - 1, 1)

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """A query block's way out and its output's way back: B * G * (D + E) elements."""
        return self.block * self.group * (self.head_dim + self.value_dim) * self.item_bytes

    @property
    def page_bytes(self) -> int:
        """One page of keys and values: B * (D + E) elements."""
        return self.block * (self.head_dim + self.value_dim) * self.item_bytes

    @functools.cached_property
    def room(self) -> Room:
        """The capacity in whole blocks and pages, as tables and buffers use it."""
        return _resolve(self)


@dataclasses.dataclass(frozen=True)
class Room:
    """`Capacity` in whole blocks and pages. No field exceeds what a pool of this size could ever need, and none is 0,
    not even in a pool of one rank: XLA's partitioner crashes on arrays of size 0 in a differentiated scan."""

    blocks: int
    pages: int
    sent_pages: int
    pair_blocks: int
    pair_pages: int
    passed_pages: int = 1
    relayed_pages: int = 1
    pair_passed: int = 1
    """What a relay may pass on to one rank in one wave."""


@functools.lru_cache(maxsize=256)
def head_parallel_capacity(spec: PoolSpec) -> Capacity:
    """The least capacity with which the head-parallel plan (`planner.head_parallel`) fits, whatever the documents.

    One document as long as the sequence needs most: with any others a block sees no page that it does not see there.
    So this counts that case, home rank by home rank, and is exact (with a window: an upper bound).
    """
    cp, kv_heads, width = spec.cp, spec.num_kv_heads, spec.blocks_per_rank
    blocks = [[0] * cp for _ in range(cp)]  # [home][executor], all heads
    pages = [[0] * cp for _ in range(cp)]
    for executor in range(cp):
        # The executor takes shares executor * K .. + K - 1 of the K * cp; here they are cut at the ends of heads.
        begin, end = executor * kv_heads, (executor + 1) * kv_heads
        while begin < end:
            cut = min(end, (begin // cp + 1) * cp)
            low, high = begin % cp, (cut - 1) % cp + 1
            last = _last_folded(spec.blocks_per_sequence, low, high, cp)
            for home in range(cp):
                if home != executor:
                    start = home * width
                    blocks[home][executor] += _folded(start + width, low, high, cp) - _folded(start, low, high, cp)
                    pages[home][executor] += min(max(last + 1 - start, 0), width)
            begin = cut
    return Capacity(
        blocks=max(map(sum, zip(*blocks, strict=True))) / spec.home_blocks,
        pages=max(map(sum, zip(*pages, strict=True))) / spec.home_blocks,
        sent_pages=max(map(sum, pages)) / spec.home_blocks,
        pair_blocks=max(map(max, blocks)) / spec.home_blocks,
        pair_pages=max(map(max, pages)) / spec.home_blocks,
    )


def _folded(end: int, low: int, high: int, cp: int) -> int:
    """How many of the blocks 0 .. end - 1 are in shares low .. high - 1 of a head that is folded into cp shares."""
    rounds, rest = divmod(end, 2 * cp)
    rising = min(max(rest - low, 0), high - low)
    falling = min(max(rest - (2 * cp - high), 0), high - low)
    return rounds * 2 * (high - low) + rising + falling


def _last_folded(end: int, low: int, high: int, cp: int) -> int:
    """The last of the blocks 0 .. end - 1 that is in one of these shares; end is a multiple of cp."""
    return end - 1 - low if (end // cp) % 2 == 0 else end - cp + high - 1


def _resolve(spec: PoolSpec) -> Room:
    need, home, others = head_parallel_capacity(spec), spec.home_blocks, spec.ranks - 1
    asked = spec.capacity
    if asked is None:
        # Where one document is nearly all of the pool's work, ranks / kv heads ranks share each of its lanes, and all
        # of them read its first page: perfect balance then needs that many copies.
        if spec.ranks_per_node is None:
            readers = spec.ranks / spec.num_kv_heads + 1
            asked = Capacity(blocks=1.0, pages=max(4.0, need.pages), sent_pages=max(6.0, need.sent_pages, readers))
        else:
            # With relays a page goes to the nodes of these ranks (a lane may share its first and its last node with
            # others), and to each reader in its home's own. The last block of a document as long as its sequence reads
            # cp / kv heads home blocks of pages.
            node, lanes = spec.ranks_per_node, spec.num_kv_heads
            copies = 2 * spec.ranks / (lanes * node) + (node - 1) / lanes + 1
            pages = max(4.0, need.pages, spec.cp / lanes + 1)
            passed = max(3.0, spec.cp / lanes)
            asked = Capacity(1.0, pages, max(4.0, need.sent_pages, copies), passed_pages=passed, relayed_pages=passed)
    assert isinstance(asked, Capacity)

    def whole(fraction: float) -> int:
        return max(round(min(fraction, others) * home), 1)

    blocks, pages, sent_pages = whole(asked.blocks), whole(asked.pages), whole(asked.sent_pages)
    pair_blocks = min(home, blocks)
    if asked.pair_blocks is not None:
        pair_blocks = min(whole(asked.pair_blocks), pair_blocks)
    pair_pages = min(home, pages, sent_pages)
    if asked.pair_pages is not None:
        pair_pages = min(whole(asked.pair_pages), pair_pages)
    if spec.ranks_per_node is None:
        return Room(blocks, pages, sent_pages, pair_blocks, pair_pages)
    passed = pages if asked.passed_pages is None else whole(asked.passed_pages)
    relayed = pages if asked.relayed_pages is None else whole(asked.relayed_pages)
    return Room(blocks, pages, sent_pages, pair_blocks, pair_pages, passed, relayed, min(passed, relayed))


def _positive_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} ({value!r}) must be a whole number")
    if value.__index__() < 1:
        raise ValueError(f"{name} ({value}) must be at least 1")
    return value.__index__()


def _room_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} ({value!r}) must be a number" + ("" if "." in name else ", a Capacity or None"))
    if not math.isfinite(float(value)) or float(value) < 0:
        raise ValueError(f"{name} ({value}) must be a finite number, 0 or more")
    return float(value)


def _dtype_name(dtype: Any) -> str:
    """The name of a type given as a string, a NumPy dtype or a scalar type such as `jax.numpy.bfloat16`."""
    if isinstance(dtype, str):
        return dtype
    return str(getattr(getattr(dtype, "dtype", dtype), "name", None) or getattr(dtype, "__name__", dtype))


def spec_differences(one: PoolSpec, other: PoolSpec) -> str:
    """The fields in which two specs differ, each with both values, for messages."""
    pairs = [(f.name, getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(PoolSpec)]
    return ", ".join(f"{name} {here!r} there and {there!r} here" for name, here, there in pairs if here != there)
