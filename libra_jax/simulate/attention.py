"""What a group's attention takes in one layer, and the bytes its ranks move: a `policies.Group`, priced.

Plans go through `libra_jax.modelled`, wave by wave. Shardings are priced here: kernels by the runs of tokens that each
rank computes, bytes by what the exchange of the policy moves (`policies.base.Exchange`). Host side: NumPy only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from libra_jax.links import Links
from libra_jax.modelled import PlanCounts, PlanSeconds, counted_seconds
from libra_jax.policies import sharding
from libra_jax.policies.base import Group
from libra_jax.policies.packed import pages_of
from libra_jax.policies.travel import travel
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, causal_pairs


@dataclasses.dataclass(frozen=True)
class Network:
    """links: of a rank. pod_nodes: nodes with full bandwidth among them. oversubscription: what leaves a pod has
    1 / oversubscription of a rank's bandwidth. strided: the ranks of a sequence lie on different nodes, as on a mesh
    whose data-parallel axis is the innermost, and a node's ranks hold the same part of different sequences; else
    neighbouring ranks share nodes."""

    links: Links = dataclasses.field(default_factory=Links)
    pod_nodes: int = 32
    oversubscription: float = 1.0
    strided: bool = False

    def links_of(self, spec: PoolSpec) -> Links:
        """The wires as a group sees them: ranks_per_node of its own ranks share a node."""
        if not self.strided:
            return self.links
        return dataclasses.replace(self.links, ranks_per_node=min(spec.pool_size, self.links.ranks_per_node))


@dataclasses.dataclass(frozen=True, eq=False)
class GroupSeconds:
    """One layer's attention of a group. Pairs are of the forward and the backward pass.

    attention: until the slowest rank is done. kernels: (2, N) of each rank, launches included. pure: the group's pairs
    of queries and keys at the kernel's best rate, spread evenly over its ranks: no padding of tiles, no launches.
    sent, received: (N,) bytes of both passes; across: of the busiest rank's, sent or received, what crosses nodes.
    """

    attention: tuple[float, float]
    kernels: np.ndarray
    pure: tuple[float, float]
    sent: np.ndarray
    received: np.ndarray
    across: float

    @property
    def slowest_kernel(self) -> tuple[float, float]:
        forward, backward = self.kernels.max(axis=1).tolist()
        return forward, backward

    @property
    def even(self) -> tuple[float, float]:
        """All kernels spread evenly over the ranks."""
        forward, backward = self.kernels.mean(axis=1).tolist()
        return forward, backward


def group_seconds(
    group: Group, cost: CostModel, network: Network, products: tuple[float, float] = (0.0, 0.0)
) -> GroupSeconds:
    """cost: of any shape; scaled to the group's. products: seconds of a layer's matrix products for a token, forward
    and backward: what another micro-batch computes meanwhile, where a policy runs two (`ping_pong`)."""
    cost = cost.scaled(group.spec)
    network = dataclasses.replace(network, links=network.links_of(group.spec))
    if group.executor is not None:
        return _planned(group, group.executor, cost, network, products)
    return _sharded(group, cost, network)


def pure_seconds(sequences: Sequence[Sequence[int]], spec: PoolSpec, cost: CostModel) -> np.ndarray:
    """(2,) causal pairs at the page rate, over all ranks of the spec. cost: scaled to the spec."""
    pairs = sum(causal_pairs(sequence, spec.window) for sequence in sequences)
    pages = spec.num_kv_heads * pairs / spec.block**2 / spec.ranks
    return np.array([cost.forward(pages), cost.backward(pages)])


# --------------------------------------------------------------------------------------------------------------- plans


def _planned(
    group: Group, executor: np.ndarray, cost: CostModel, network: Network, products: tuple[float, float]
) -> GroupSeconds:
    spec = group.spec
    counts = group.counts or travel(executor, *pages_of(group.sequences, spec), spec).counts
    if network.strided:
        counts = strided(counts, spec)
    moved = network.links
    if network.oversubscription > 1:
        moved = dataclasses.replace(moved, across=moved.across / _slower(counts, spec, network))
    found = counted_seconds(counts, spec, cost, moved)
    kernels = [price(counts.pages, counts.blocks, 1).sum(axis=1) for price in (cost.forward, cost.backward)]
    sent = found.inside_sent.sum(axis=0) + found.across_sent.sum(axis=0)
    received = found.inside_received.sum(axis=0) + found.across_received.sum(axis=0)
    across = max(found.across_sent.sum(axis=0).max(), found.across_received.sum(axis=0).max())
    pure = pure_seconds(group.sequences, spec, cost)
    attention = found.forward, found.backward
    if group.exchange == "ping_pong":
        attention = _beside(found, np.stack(kernels).max(axis=1), np.array(products) * group.tokens, moved, spec)
    return GroupSeconds(attention, np.stack(kernels), (pure[0], pure[1]), sent, received, float(across))


def _beside(
    found: PlanSeconds, slowest: np.ndarray, products: np.ndarray, links: Links, spec: PoolSpec
) -> tuple[float, float]:
    """Attention of one micro-batch whose exchange runs beside kernels and products of another: a layer takes the longer
    of the two, pass by pass, and a latency. slowest, products: (2,) seconds."""
    inside = np.maximum(found.inside_sent, found.inside_received).max(axis=1) / links.inside
    across = np.maximum(found.across_sent, found.across_received).max(axis=1) / links.across
    latency = links.inside_latency if spec.ranks <= links.ranks_per_node else links.across_latency
    exchange = np.maximum(inside, across) + 2 * latency
    forward, backward = (np.maximum(slowest + products, exchange) - products).tolist()
    return forward, backward


def strided(counts: PlanCounts, spec: PoolSpec) -> PlanCounts:
    """The same plan with its ranks in another order: the first of each sequence, then the second of each, and so on.
    Only without relays, which belong to the ranks of a node."""
    if spec.ranks_per_node is not None:
        raise ValueError(f"ranks_per_node ({spec.ranks_per_node}) must be None where neighbours are on different nodes")
    order = np.arange(spec.ranks).reshape(spec.pool_size, spec.cp).T.reshape(-1)
    both = {
        name: getattr(counts, name)[order][:, :, order]
        for name in ("sent_blocks", "sent_pages", "returned_pages", "passed_pages", "returned_passed")
    }
    return counts._replace(pages=counts.pages[order], blocks=counts.blocks[order], **both)


def _slower(counts: PlanCounts, spec: PoolSpec, network: Network) -> float:
    """By how much longer the bytes between nodes take, until the slowest rank's are through, because some leave the
    pod."""
    node = np.arange(spec.ranks) // network.links.ranks_per_node
    pod = node // network.pod_nodes
    if pod[-1] == 0:
        return 1.0
    rows = spec.block_bytes * counts.sent_blocks.sum(axis=1) + spec.page_bytes * counts.sent_pages.sum(axis=1)
    across = np.where(node[:, None] == node, 0, rows)
    slowed = np.where(pod[:, None] == pod, across, network.oversubscription * across)
    usual, longest = (max(each.sum(axis=0).max(), each.sum(axis=1).max()) for each in (across, slowed))
    return float(longest / usual) if usual else 1.0


# ----------------------------------------------------------------------------------------------------------- shardings


def _sharded(group: Group, cost: CostModel, network: Network) -> GroupSeconds:
    spec, parts = group.spec, group.parts
    assert parts is not None and spec.pool_size == 1
    C, K = spec.cp, spec.num_kv_heads
    seen = sharding.visited(parts, C, spec.block)
    kernels = np.stack([
        price(K * seen.pages, K * seen.blocks, 1) for price in (cost.forward, cost.backward)
    ])  # fmt: skip
    row = K * (spec.head_dim + spec.value_dim) * spec.item_bytes  # keys and values of a token
    if group.exchange == "needed":
        moved = sharding.needed(parts, C) * row
    else:
        moved = np.repeat(sharding.held(parts, C)[:, None], C, axis=1) * row
        np.fill_diagonal(moved, 0)
    # Backward: keys and values once more, and their gradients the other way.
    sent, received = 2 * moved.sum(axis=1) + moved.sum(axis=0), 2 * moved.sum(axis=0) + moved.sum(axis=1)
    if group.exchange == "needed":
        there, back = _one_by_one(moved, network), _one_by_one(moved.T, network)
        local = kernels * local_share(parts, C)
        rest = kernels - local
        forward = np.maximum(local[0], there) + rest[0]
        backward = np.maximum(local[1], there) + rest[1] + back
        attention = float(forward.max()), float(backward.max())
        node = np.arange(C) // network.links.ranks_per_node
        out, into = (np.where(node[:, None] == node, 0, moved).sum(axis=axis) for axis in (1, 0))
        across = float(np.maximum(2 * out + into, out + 2 * into).max())
    else:
        ring = group.exchange == "ring"
        most = float(moved.sum(axis=0).max())
        gather, across = _around(most, C, network, 1 if ring else None)
        across *= max(sent.max(), received.max()) / max(most, 1.0)
        slowest = kernels.max(axis=1)
        if ring:  # a step of the ring runs beside the kernel of the step before it
            hidden = slowest * (C - 1) / C
            attention = (
                float(slowest[0] + max(gather - hidden[0], 0.0)),
                float(slowest[1] + max(2 * gather - hidden[1], 0.0)),
            )
        else:
            attention = float(gather + slowest[0]), float(2 * gather + slowest[1])
    pure = pure_seconds(group.sequences, spec, cost)
    return GroupSeconds(attention, kernels, (pure[0], pure[1]), sent, received, float(across))


def _around(received: float, ranks: int, network: Network, ports: int | None = None) -> tuple[float, float]:
    """Seconds of an all-gather in which a rank gets so many bytes, and what of them crosses nodes for a rank.

    ports: of a node, through which all bytes come in where a group has several nodes. None: every rank's, as of a
    collective that has a ring for each. 1: ranks pass on to the next rank what they got from the one before."""
    links = network.links
    ports = ports or links.ranks_per_node
    if ranks == 1:
        return 0.0, 0.0
    if ranks <= links.ranks_per_node:
        return received / links.inside + links.inside_latency, 0.0
    slow = network.oversubscription if ranks > links.ranks_per_node * network.pod_nodes else 1.0
    return max(
        received / links.inside, received * slow / (ports * links.across)
    ) + links.across_latency, received / ports


def _one_by_one(moved: np.ndarray, network: Network) -> np.ndarray:
    """(C,) seconds until each rank has its bytes and has sent them. moved: (C, C) bytes from rank to rank."""
    links = network.links
    ranks = len(moved)
    node = np.arange(ranks) // links.ranks_per_node
    pod = node // network.pod_nodes
    inside = np.where(node[:, None] == node, moved, 0)
    across = (moved - inside) * np.where(pod[:, None] == pod, 1.0, network.oversubscription)
    latency = 0.0 if ranks == 1 else links.inside_latency if node[-1] == 0 else links.across_latency
    inside, across = (np.maximum(part.sum(axis=0), part.sum(axis=1)) for part in (inside, across))
    return np.maximum(inside / links.inside, across / links.across) + latency


def local_share(parts: sharding.Parts, ranks: int) -> np.ndarray:
    """(C,) share of a rank's pairs whose keys it holds itself."""
    length = (parts.end - parts.begin).astype(np.float64)
    order = np.lexsort((parts.begin, parts.rank, parts.document))
    key = parts.document[order] * ranks + parts.rank[order]
    before = np.cumsum(length[order]) - length[order]
    first = np.ones(len(order), bool)
    first[1:] = key[1:] != key[:-1]
    before -= np.repeat(before[first], np.diff(np.append(np.flatnonzero(first), len(order))))
    own = np.bincount(parts.rank[order], length[order] * before + length[order] * (length[order] + 1) / 2, ranks)
    return own / np.maximum(sharding.pairs(parts, ranks), 1)
