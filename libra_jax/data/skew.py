"""How skewed a corpus is, and what that costs: percentiles, where the attention work is, and imbalance by policy.

Takes document lengths and the shape of a run; packs and places as training would and plans a few optimizer steps.
Work is pages and blocks, priced by a cost model; what the exchange costs beside it is only counted in bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from libra_jax.data.packing import PackedDocuments, cut
from libra_jax.data.sampler import PoolSampler
from libra_jax.placement import place, slot_lower_bound
from libra_jax.plan import plan_pool, policy_work
from libra_jax.planner import Policy, at_home, head_parallel, pooled
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel, causal_pairs

PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 99.9)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Documents of up to `up_to` tokens that are longer than the bucket before: shares of the corpus.

    cut: how many of them are longer than a sequence; their work is that of their pieces.
    """

    up_to: int
    documents: float
    tokens: float
    work: float
    cut: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What `inspect` found. Imbalances are time over time with perfect balance: 1.0 is perfect.

    cut_documents: documents longer than a sequence. work: causal pairs of documents cut to sequences.
    sequences, steps: how much was packed and placed; fill: share of it that is no padding.
    sequence_imbalance: if each sequence were even inside its CP group. pool_imbalance: if each pool were even inside;
        "in order" as packed, "Libra" as placed, "bound" the least that any placement reaches.
    rank_imbalance: of the busiest rank, by policy. seconds: attention of one layer in a step, forward and backward,
        without exchange. libra_sent, libra_sent_busiest: bytes sent, mean and busiest rank, over Ulysses' bytes.
    fallbacks: pools whose plan did not fit the room and was replaced by the head-parallel one.
    before, after: (pools, ranks) pages visited when the first pools * pool_size sequences are one micro-step, by plain
        context parallelism and by Libra.
    """

    documents: int
    tokens: int
    mean: float
    longest: int
    percentiles: dict[str, int]
    cut_documents: int
    buckets: list[Bucket]
    sequences: int
    steps: int
    fill: float
    sequence_imbalance: float
    pool_imbalance: dict[str, float]
    rank_imbalance: dict[str, float]
    seconds: dict[str, float]
    libra_sent: float
    libra_sent_busiest: float
    fallbacks: int
    before: np.ndarray = dataclasses.field(repr=False)
    after: np.ndarray = dataclasses.field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Everything that JSON can hold."""
        fields = dataclasses.asdict(self)
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def inspect(
    lengths: np.ndarray,
    spec: PoolSpec,
    *,
    pools: int = 4,
    micro_steps: int = 2,
    steps: int = 2,
    across: str = "pools",
    cost: CostModel | None = None,
    seed: int = 0,
) -> Report:
    """Describe a corpus of documents of these lengths, (documents,) int, and what training on it would balance.

    Packs as many documents, in random order, as fill `steps` optimizer steps (or all there are; at least one step is
    looked at, its missing sequences empty). Raises ValueError for numbers that do not fit together.
    """
    if steps < 1:
        raise ValueError(f"steps ({steps}) must be at least 1")
    lengths = np.asarray(lengths, np.int64)
    sequences = _packed(lengths, spec, steps * micro_steps * pools * spec.pool_size, seed)
    sampler = PoolSampler(
        sequences, spec, pools=pools, micro_steps=micro_steps, seed=seed, across=across, last_step="pad", cost=cost
    )
    full = len(sequences) // sampler.sequences_per_step
    steps = max(1, min(steps, full))
    model = (cost or CostModel()).scaled(spec)
    balance = [_inspect_step(sampler, step, model) for step in range(steps)]
    total = {name: sum(step[name] for step in balance) for name in balance[0]}
    ideal = total["ideal"] or 1.0
    tokens = sum(sum(sampler.document_lengths(n)) for s in range(steps) for n in sampler.step_sequences(s))
    ulysses = total["ulysses bytes"] or 1.0
    policies = ("plain CP", "Ulysses", "Libra")
    first = sampler.step_sequences(0).reshape(micro_steps, pools, -1)[:1]
    together = first.ravel()[place(sampler.work(first).ravel(), spec.pool_size, pools, across)]
    return Report(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        percentiles={f"{p:g}": int(np.percentile(lengths, p)) for p in PERCENTILES},
        cut_documents=int((lengths > spec.seq_len).sum()),
        buckets=_buckets(lengths, spec),
        sequences=min(len(sequences), steps * sampler.sequences_per_step),
        steps=steps,
        fill=tokens / (steps * sampler.sequences_per_step * spec.seq_len),
        sequence_imbalance=total["sequences"] / ideal,
        pool_imbalance={name: total[f"pools {name}"] / ideal for name in ("in order", "Libra", "bound")},
        rank_imbalance={name: total[name] / ideal for name in policies},
        seconds={name: total[name] / steps for name in policies} | {"perfect balance": total["ideal"] / steps},
        libra_sent=total["sent"] / ulysses,
        libra_sent_busiest=total["sent busiest"] / ulysses,
        fallbacks=int(total["fallbacks"]),
        before=_rank_work(sampler, first, at_home)[0, ..., 0],
        after=_rank_work(sampler, together, pooled)[0, ..., 0],
    )


def _packed(lengths: np.ndarray, spec: PoolSpec, sequences: int, seed: int) -> PackedDocuments:
    """Random documents, as many as fill `sequences`, cut where too long and packed."""
    shuffled = np.random.default_rng(seed).permutation(lengths)
    enough = int(np.searchsorted(np.cumsum(shuffled), 1.05 * sequences * spec.seq_len)) + 1
    return PackedDocuments(shuffled[:enough], spec.seq_len, seed=seed)


def _buckets(lengths: np.ndarray, spec: PoolSpec) -> list[Bucket]:
    """Shares by document length in classes of powers of four; long documents work as their pieces do."""
    document, _, piece = cut(lengths, spec.seq_len)
    # Exact per length: a corpus has many documents, but few that are longer than a few thousand tokens.
    sizes, index = np.unique(piece, return_inverse=True)
    per_size = np.array([causal_pairs([size], spec.window) for size in sizes.tolist()], np.float64)
    work = np.bincount(document, per_size[index], minlength=len(lengths))
    edges = [2**k for k in range(10, 41, 2)]
    edges = edges[: int(np.searchsorted(edges, lengths.max())) + 1]
    first = int(np.searchsorted(edges, lengths.min()))  # leave out classes below the shortest document
    group = np.searchsorted(edges[:-1], lengths)
    buckets = []
    for i, edge in list(enumerate(edges))[min(first, len(edges) - 1) :]:
        here = group == i
        shares = (float(here.mean()), float(lengths[here].sum() / lengths.sum()), float(work[here].sum() / work.sum()))
        buckets.append(Bucket(edge, *shares, cut=int((lengths[here] > spec.seq_len).sum())))
    return buckets


def _inspect_step(sampler: PoolSampler, step: int, cost: CostModel) -> dict[str, float]:
    """Seconds of one layer's attention in this step under different balances, summed over its micro-steps."""
    spec, pools = sampler.spec, sampler.pools
    placed, arrived = sampler[step], sampler.step_sequences(step).reshape(-1, pools, spec.pool_size)
    work = sampler.work(arrived)
    bound = slot_lower_bound(work.ravel(), spec.pool_size, pools, sampler.across)
    plans = [
        plan_pool([sampler.document_lengths(n) for n in pool], spec) for pool in placed.reshape(-1, spec.pool_size)
    ]
    libra = [np.stack([plan.stats.work, plan.stats.blocks], axis=-1) for plan in plans]

    def busiest_pool(slots: np.ndarray) -> float:
        return float(sampler.work(slots).sum(axis=2).max(axis=1).sum()) / spec.ranks

    def busiest_rank(counts: np.ndarray) -> float:
        pages, blocks = counts[..., 0], counts[..., 1]
        return float((cost.forward(pages, blocks) + cost.backward(pages, blocks)).max(axis=(1, 2)).sum())

    return {
        "ideal": float(work.sum()) / (pools * spec.ranks),
        "sequences": float(work.max(axis=(1, 2)).sum()) / spec.cp,
        "pools in order": busiest_pool(arrived),
        "pools Libra": busiest_pool(placed),
        "pools bound": float(bound.sum()) / spec.ranks,
        "plain CP": busiest_rank(_rank_work(sampler, arrived, at_home)),
        "Ulysses": busiest_rank(_rank_work(sampler, arrived, head_parallel)),
        "Libra": busiest_rank(np.stack(libra).reshape(*placed.shape[:2], spec.ranks, 2)),
        "sent": float(np.mean([plan.stats.sent_bytes.mean() for plan in plans])),
        "sent busiest": float(np.mean([plan.stats.sent_bytes.max() for plan in plans])),
        "ulysses bytes": float(np.mean([plan.stats.ulysses_bytes for plan in plans])),
        "fallbacks": sum(plan.stats.fallback is not None for plan in plans),
    }


def _rank_work(sampler: PoolSampler, slots: np.ndarray, policy: Policy) -> np.ndarray:
    """(micro_steps, pools, N, 2) pages and blocks of each rank when `policy` assigns these slots."""
    pools = slots.reshape(-1, sampler.spec.pool_size)
    counts = [policy_work([sampler.document_lengths(n) for n in pool], sampler.spec, policy) for pool in pools]
    return np.stack(counts).reshape(*slots.shape[:2], sampler.spec.ranks, 2)
