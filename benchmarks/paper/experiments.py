"""The experiments behind the report: each gives rows, one CSV each. `python -m benchmarks.paper` runs them all.

An experiment is a list of jobs, functions without arguments that give rows; they run side by side in processes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.paper.base import (
    ASSUMED,
    CP,
    LOGNORMAL,
    MODEL_NAMES,
    TOKENS,
    WITHOUT_DELAY,
    WLB,
    Case,
    Row,
    fewer_steps,
    numbers,
    warm_up_of,
)
from benchmarks.pools import CORPORA
from libra_jax.memory import attention_bytes
from libra_jax.placement import place, slot_lower_bound
from libra_jax.policies import packed
from libra_jax.policies.base import Sequences
from libra_jax.policies.distca import distca
from libra_jax.policies.names import policy as policy_named
from libra_jax.policies.paper import paper_placer
from libra_jax.policies.wlb import WLB as WLBPolicy
from libra_jax.simulate.attention import group_seconds
from libra_jax.simulate.step import Setting, token_seconds
from libra_jax.workload import sequence_seconds

Job = Callable[[], list[Row]]


def run(job: Job) -> list[Row]:
    return job()


# ----------------------------------------------------------------------------- 1: imbalance between pools, by pool size

POOL_SIZES = (1, 2, 4, 8, 16, 32)
PLACED = 128
"""Sequences of an optimizer step, all placed together."""


def placement(corpus: str, tokens: str, steps: int) -> list[Row]:
    """max/mean - 1 of the attention of all slots of a step: as packed, as placed over the whole step (the paper's),
    and, within micro-steps of 32 sequences, as placed for training without a pipeline.
    """
    case = Case(tokens=tokens, corpus=corpus, dp=32, micro_steps=PLACED // 32, steps=steps)
    setting = case.setting()
    found: dict[tuple[int, str], list[float]] = {}
    for sequences in case.batches():
        work = np.array([sequence_seconds(s, setting.run.spec(1), setting.cost) for s in sequences])
        for size in POOL_SIZES:
            slots = {
                "as packed": np.arange(len(work)).reshape(-1, size),
                "placed over the step": place(work, size, across="all").reshape(-1, size),
            }
            for name, index in slots.items():
                sums = work[index].sum(axis=1)
                found.setdefault((size, name), []).append(float(sums.max() / sums.mean() - 1))
            bound = float(slot_lower_bound(work, size).max())
            found.setdefault((size, "lower bound"), []).append(bound / float(work.sum() / len(work) * size) - 1)
            inside = work[place(work, size, 32 // size, across="pools")].sum(axis=2)
            value = float((inside.max(axis=1).sum() / inside.mean(axis=1).sum()) - 1)
            found.setdefault((size, "like sequences together"), []).append(value)
    return [
        {"corpus": corpus, "tokens": tokens, "pool size": size, "placement": name, "steps": len(values)}
        | {"imbalance": float(np.mean(values))}
        | dict(zip(("p5", "p95"), np.quantile(values, [0.05, 0.95]).tolist(), strict=True))
        for (size, name), values in found.items()
    ]


def placement_jobs(steps: int) -> list[Job]:
    return [functools.partial(placement, c, t, steps) for c, t in itertools.product(CORPORA, TOKENS)]


# -------------------------------------------------------------------------------------------------------- 2: DP scaling

DEGREES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def scaling(model: str, tokens: str, corpus: str, steps: int) -> list[Row]:
    """Throughput at every DP degree over the same policy's at DP 1, four micro-steps each."""
    rows = []
    start: dict[str, float] = {}
    whole = model == MODEL_NAMES[0] and corpus == LOGNORMAL  # others as far as the paper's figure goes
    for dp in DEGREES if whole else (1, 16):
        case = fewer_steps(Case(model, tokens, corpus, steps=steps), dp)
        size = min(8, dp)
        policies = {name: name for name in ("ulysses", "ulysses-sorted", WITHOUT_DELAY, ASSUMED)}
        policies["libra"] = f"libra:{size}"
        if dp <= 16:  # places tile by tile, in Python
            policies["libra-paper"] = f"libra-paper:{size}"
        if dp <= 64 and whole:
            policies["distca"] = "distca"
        for short, name in policies.items():
            found = case.measured(name)
            start.setdefault(short, found.efficiency)
            rows.append(
                case.words() | numbers(found, case) | {"policy": short, "speedup": dp * found.efficiency / start[short]}
            )
    return rows


def scaling_jobs(steps: int) -> list[Job]:
    cases = [(m, t, LOGNORMAL) for m, t in itertools.product(MODEL_NAMES, TOKENS)]
    cases += [(MODEL_NAMES[0], t, c) for t, c in itertools.product(TOKENS, CORPORA[1:])]
    return [functools.partial(scaling, *case, max(steps // 2, 2)) for case in cases]


# ------------------------------------------------------------------- 3 and 4: micro-batches, stragglers, by micro-batch

STRAGGLERS = (
    "ulysses", "ulysses-sorted", "zigzag", "per-document", "magi", "wlb-micro-shuffled", "wlb-micro-delay-shuffled",
    "distca", "libra-paper:8", "libra:8", "libra-all:8",
)  # fmt: skip


def micro_batches(model: str, tokens: str, corpus: str, steps: int) -> list[Row]:
    """Forward seconds of a layer in all groups of all micro-steps: the longest over the mean, and the slowest rank."""
    case = Case(model, tokens, corpus, dp=16, micro_steps=4, steps=steps)
    setting, rows = case.setting(), []
    products = token_seconds(setting.model, setting.table)
    for name in STRAGGLERS:
        policy, forward, slowest, even = policy_named(name), [], [], []
        batches = case.batches(warm_up_of(name))
        for number, sequences in enumerate(batches):
            plan = policy.step(sequences, setting.run)
            if number < len(batches) - steps:
                continue
            for groups in plan.micro_steps:
                found = [group_seconds(group, setting.cost, setting.network, products) for group in groups]
                own = [each.attention[0] for each in found]
                forward += [a + products[0] * group.tokens for a, group in zip(own, groups, strict=True)]
                slowest.append(max(own))
                even.append(
                    sum(each.even[0] * g.ranks for each, g in zip(found, groups, strict=True)) / setting.run.ranks
                )
        ratio = np.array(slowest) / np.array(even)
        rows.append(
            case.words()
            | {
                "policy": name,
                "steps": steps,
                "max over mean": float(np.max(forward) / np.mean(forward)),
                "micro-batches": len(forward),
                "straggler ms": 1e3 * float(np.mean(slowest)),
                "straggler over mean": float(np.mean(slowest) / np.mean(even)),
                "median": float(np.median(ratio)),
                "p95": float(np.quantile(ratio, 0.95)),
            }
        )
    return rows


def micro_batch_jobs(steps: int) -> list[Job]:
    cases = [(MODEL_NAMES[0], t, c) for t, c in itertools.product(TOKENS, CORPORA)]
    cases += [(m, t, LOGNORMAL) for m, t in itertools.product(MODEL_NAMES[1:], TOKENS)]
    return [functools.partial(micro_batches, *case, steps) for case in cases]


# -------------------------------------------------------------------------------------------- 5: end to end on 256 GPUs

ALL = ("ulysses", "ulysses-sorted", "per-document", "magi", "dynamic-cp", *WLB, "distca", "libra-paper:8", "libra:8")


def end_to_end(
    model: str, tokens: str, corpus: str, steps: int, extra: tuple[tuple[str, object], ...] = ()
) -> list[Row]:
    """Every policy on 256 GPUs; gain: how many times as fast Libra's steps are, each over its own ideal."""
    dp = 256 // CP[tokens]
    case = Case(model, tokens, corpus, dp=dp, micro_steps=128 // dp, steps=steps)
    case = dataclasses.replace(case, **dict(extra))  # type: ignore[arg-type]
    slow = {"libra-paper:8", "dynamic-cp"}  # these plan tile by tile and document by document, in Python
    names = [name for name in ALL if name not in slow or (model == MODEL_NAMES[0] and not extra)]
    rows = [case.words() | numbers(case.measured(name), case) for name in names]
    best = next(row["efficiency"] for row in rows if row["policy"] == "libra:8")
    return [row | {"gain": best / row["efficiency"], "change": ", ".join(f"{k} {v}" for k, v in extra)} for row in rows]


def end_to_end_jobs(steps: int) -> list[Job]:
    return [
        functools.partial(end_to_end, m, t, c, steps) for m, t, c in itertools.product(MODEL_NAMES, TOKENS, CORPORA)
    ]


def own_kernel(model: str, tokens: str, corpus: str, steps: int) -> list[Row]:
    """Libra at Triton's speed, which is what its kernels are written in, on the steps of `end_to_end`."""
    dp = 256 // CP[tokens]
    case = Case(model, tokens, corpus, dp=dp, micro_steps=128 // dp, steps=steps, kernel="triton")
    return [case.words() | numbers(case.measured("libra:8"), case)]


def own_kernel_jobs(steps: int) -> list[Job]:
    return [
        functools.partial(own_kernel, m, t, c, steps) for m, t, c in itertools.product(MODEL_NAMES, TOKENS, CORPORA)
    ]


def tail_jobs(steps: int) -> list[Job]:
    """Where ranks meet, and how long documents are: the same comparison for Qwen3-8B."""
    jobs = []
    few = max(steps // 2, 2)
    for tokens in TOKENS:
        changes: list[tuple[tuple[str, object], ...]] = [(("sync", "step"),)]
        changes += [(("longest", TOKENS[tokens] // part),) for part in (2, 5, 10, 20)]
        jobs += [functools.partial(end_to_end, MODEL_NAMES[0], tokens, LOGNORMAL, few, extra) for extra in changes]
    return jobs


# ------------------------------------------------------------------------------------- 6: pool size and exchange; tiles


def pool_sizes(tokens: str, corpus: str, steps: int) -> list[Row]:
    """Libra with pools of 1 to 32 sequences: one and two levels of exchange, neighbours on one node or on many."""
    rows = []
    near = Case(tokens=tokens, corpus=corpus, dp=32, micro_steps=4, steps=steps)
    far = dataclasses.replace(near, strided=True)
    for size in POOL_SIZES:
        two_levels = near.measured(f"libra:{size}", packed.libra(size))
        one_level = near.measured_in(f"libra:{size}", packed.libra(size, relays=False), [far])
        names = ("two levels", "one level", "strided over nodes")
        for what, found, case in zip(names, (two_levels, *one_level), (near, near, far), strict=True):
            across = float(np.mean([step.across_bytes / step.ulysses_bytes for step in found.steps]))
            row = {"pool size": size, "exchange": what, "across over ulysses": across}
            rows.append(case.words() | row | numbers(found, case))
    return rows


def tiles(tokens: str, corpus: str, steps: int) -> list[Row]:
    """The paper's placer with tiles of other lengths, and the runs of blocks that Libra cuts as built."""
    case = Case(tokens=tokens, corpus=corpus, dp=16, micro_steps=4, steps=steps)
    rows = []
    for length in (2048, 4096, 8192, 16384, 32768):
        policy = packed.Pools(paper_placer(1.02, length), 8, order="pools", room=packed.ROOMY)
        rows.append(
            case.words() | {"tile": f"{length:,} tokens"} | numbers(case.measured(f"tiles of {length}", policy), case)
        )
    rows.append(case.words() | {"tile": "runs as built"} | numbers(case.measured("libra:8"), case))
    return rows


def pool_size_jobs(steps: int) -> list[Job]:
    few = max(steps // 2, 2)
    return [functools.partial(pool_sizes, t, c, few) for t, c in itertools.product(TOKENS, CORPORA)]


def tile_jobs(steps: int) -> list[Job]:
    return [functools.partial(tiles, t, LOGNORMAL, max(steps // 4, 2)) for t in TOKENS]


# ------------------------------------------------------------------------------------- 7: exchange per rank as DP grows

GROWTH = (16, 64, 256, 1024, 4096)


def growth(dp: int, policy: str) -> list[Row]:
    """One micro-step of dp sequences of 256K: a rank's bytes a layer, forward and backward, and planning time."""
    case = Case(dp=dp, micro_steps=1, steps=1)
    setting = case.setting()
    sequences = case.batches()[0]
    start = time.process_time()
    if policy == "distca":
        found = _servers(sequences, setting)
        seconds = time.process_time() - start
        busiest, across, beyond, peers, pools = None, found.busiest, found.beyond_pod, found.peers, 1
    else:
        plan = policy_named(f"libra:{8 if policy == 'libra' else dp}").step(sequences, setting.run)
        seconds = time.process_time() - start
        groups = [group_seconds(group, setting.cost, setting.network) for group in plan.micro_steps[0]]
        busiest = max(float(max(each.sent.max(), each.received.max())) for each in groups)
        beyond = 0.0 if groups[0].sent.size <= setting.network.pod_nodes * setting.run.links.ranks_per_node else None
        peers = groups[0].sent.size // setting.run.links.ranks_per_node - 1  # at most: all nodes of the pool
        across, pools = max(each.across for each in groups), len(groups)
    spec = setting.run.spec(8 if policy == "libra" else dp, waves=6, relays=policy != "distca")
    return [
        {
            "dp": dp,
            "policy": policy,
            "busiest GB": None if busiest is None else busiest / 1e9,
            "beyond pods GB": None if beyond is None else beyond / 1e9,
            "peers": peers,
            "across GB": across / 1e9,
            "planning s": seconds,
            "planning s a pool": seconds / pools,
            "tables MB a rank": attention_bytes(spec).tables / 1e6
            if policy != "distca" and spec.ranks <= 8192
            else None,
        }
    ]


class Servers(NamedTuple):
    """Of one micro-step, both passes, a layer: the busiest rank's bytes between servers, the mean, the busiest rank's
    that leave its pod, and with how many servers the busiest one exchanges."""

    busiest: float
    mean: float
    beyond_pod: float
    peers: int


def _servers(sequences: Sequences, setting: Setting) -> Servers:
    """DistCA with a node as a server, where ranks are too many for a matrix of pairs.

    A server's ranks share what it executes by heads, evenly; what is home to a rank comes from that rank. Counted as in
    `libra_jax.modelled`: q and pages there, o back; q, do and pages there, dq and gradients of pages back. Not counted:
    what travels inside a server.
    """
    run, ranks = setting.run, setting.run.links.ranks_per_node
    spec = run.spec(run.dp, waves=1, room=packed.ROOMY)
    first, count = packed.pages_of(sequences, spec)
    assert ranks == spec.cp, "a sequence is home to one server"
    servers = distca(0.1, ranks)(first, count, spec, np.ones(spec.ranks))[:, 0] // ranks
    query = spec.block * spec.group * spec.head_dim * spec.item_bytes * spec.num_kv_heads
    page = spec.page_bytes * spec.num_kv_heads
    sent, received, far_sent, far_received = np.zeros((4, spec.pool_size, spec.cp))
    peers: list[set[int]] = [set() for _ in range(spec.pool_size)]
    home = np.arange(spec.blocks_per_sequence) // spec.blocks_per_rank
    for p in range(spec.pool_size):
        away = np.flatnonzero((servers[p] != p) & (count[p] > 0))
        for server in np.unique(servers[p][away]):
            blocks = away[servers[p][away] == server]
            seen = np.zeros(spec.blocks_per_sequence + 1, np.int64)
            np.add.at(seen, first[p][blocks], 1)
            np.add.at(seen, blocks + 1, -1)
            pages = np.flatnonzero(np.cumsum(seen)[:-1])
            of_blocks, of_pages = (np.bincount(home[each], minlength=spec.cp) for each in (blocks, pages))
            there = 3 * query * of_blocks + 2 * page * of_pages
            back = 2 * query * of_blocks + page * of_pages
            far = p // setting.network.pod_nodes != server // setting.network.pod_nodes
            for out, into in ((sent, received), (far_sent, far_received))[: 1 + far]:
                out[p] += there
                into[p] += back
                into[server] += there.sum() / spec.cp
                out[server] += back.sum() / spec.cp
            peers[p].add(int(server))
            peers[server].add(p)
    beyond = float(np.maximum(far_sent, far_received).max())
    return Servers(float(np.maximum(sent, received).max()), float(sent.mean()), beyond, max(map(len, peers)))


def growth_jobs(steps: int) -> list[Job]:
    jobs: list[Job] = [functools.partial(growth, dp, "libra") for dp in GROWTH]
    jobs += [functools.partial(growth, dp, "libra-global") for dp in GROWTH[:3]]
    return jobs + [functools.partial(growth, dp, "distca") for dp in GROWTH[:4]]


# ----------------------------------------------------------------------- bounded pools against a global one, by network


BOUNDED = 64
"""Sequences side by side."""
NETWORKS = ((1, 32), (2, 16), (4, 16), (8, 16))
"""Oversubscription, nodes of a pod."""


def bounded(tokens: str, name: str, steps: int) -> list[Row]:
    """A policy on 64 sequences side by side, in networks that are oversubscribed more and more."""
    cases = [
        Case(tokens=tokens, dp=BOUNDED, micro_steps=2, steps=steps, values=(("oversubscription", o), ("pod_nodes", p)))
        for o, p in NETWORKS
    ]
    return [
        case.words() | numbers(found, case) | {"oversubscription": over, "pod nodes": pod}
        for case, found, (over, pod) in zip(
            cases, cases[0].measured_in(name, policy_named(name), cases[1:]), NETWORKS, strict=True
        )
    ]


def bounded_jobs(steps: int) -> list[Job]:
    """Pools of 8, 16 and all 64 sequences, all planned by this package with two levels, and DistCA's global pool."""
    names = ("libra:8", "libra:16", f"libra:{BOUNDED}", "distca")
    return [functools.partial(bounded, tokens, name, steps) for tokens, name in itertools.product(TOKENS, names)]


# ---------------------------------------------------------------------------------------------------------- sensitivity

AGAINST = ("ulysses", "ulysses-sorted", "wlb-micro-shuffled", "wlb-micro-delay-shuffled", "distca")


def sensitivity(tokens: str, name: str, case: Case) -> list[Row]:
    """Libra's gain over others with one thing changed."""
    ours = case.measured("libra:8").efficiency
    return [
        {
            "tokens": tokens,
            "changed": name,
            "against": other,
            "steps": case.steps,
            "gain": ours / case.measured(other).efficiency,
        }
        for other in AGAINST
    ]


def sensitivity_jobs(steps: int) -> list[Job]:
    jobs: list[Job] = []
    for tokens in TOKENS:
        dp = 256 // CP[tokens]
        base = Case(tokens=tokens, dp=dp, micro_steps=128 // dp, steps=max(steps // 2, 2))
        cases = {"nothing": base}
        for name, most in (("across", 2), ("inside", 2), ("products", 1.25)):  # products cannot pass the peak
            value = base.setting().table[name].value
            cases |= {
                f"{name} x {factor:g}": dataclasses.replace(base, values=((name, factor * value),))
                for factor in (0.5, most)
            }
        cases |= {
            "latencies x 4": dataclasses.replace(base, values=(("inside_latency", 180e-6), ("across_latency", 240e-6))),
            "gathers not hidden": dataclasses.replace(base, values=(("gather_overlap", 0.0),)),
            "nothing computed again": dataclasses.replace(base, values=(("recompute", 0.0),)),
            "kernels: triton": dataclasses.replace(base, kernel="triton"),
            "kernels: cudnn": dataclasses.replace(base, kernel="cudnn"),
            "ranks meet once a step": dataclasses.replace(base, sync="step"),
            "half the micro-steps": dataclasses.replace(base, micro_steps=max(base.micro_steps // 2, 1)),
            "twice the micro-steps": dataclasses.replace(base, micro_steps=base.micro_steps * 2),
            "another seed": dataclasses.replace(base, seed=1),
        }
        jobs += [functools.partial(sensitivity, tokens, name, case) for name, case in cases.items()]
    return jobs


def wlb_settings(tokens: str, steps: int) -> list[Row]:
    """How WLB-LLM's own choices move it: token cap, thresholds of its queues."""
    dp = 256 // CP[tokens]
    case = Case(tokens=tokens, dp=dp, micro_steps=128 // dp, steps=steps)
    ours, rows = case.measured("libra:8").efficiency, []
    caps = [(cap, (1 / 3, 2 / 3)) for cap in (1.0, 1.25, 1.5, 2.0)]
    for cap, thresholds in [*caps, (1.25, (0.5,)), (1.25, (0.25, 0.5, 0.75)), (1.25, (0.1, 0.2, 0.4, 0.8))]:
        policy = WLBPolicy(cap=cap, scope="micro_step", thresholds=thresholds)
        found = case.measured("wlb-micro-delay-shuffled", policy)
        rows.append(
            case.words()
            | {"cap": cap, "thresholds": " ".join(f"{t:.2g}" for t in thresholds), "gain": ours / found.efficiency}
            | numbers(found, case)
        )
    return rows


def wlb_jobs(steps: int) -> list[Job]:
    return [functools.partial(wlb_settings, tokens, steps) for tokens in TOKENS]


EXPERIMENTS: dict[str, Callable[[int], list[Job]]] = {
    "1_placement": placement_jobs,
    "2_scaling": scaling_jobs,
    "3_micro_batches": micro_batch_jobs,
    "5_end_to_end": end_to_end_jobs,
    "5_own_kernel": own_kernel_jobs,
    "5_tail": tail_jobs,
    "5_wlb": wlb_jobs,
    "6_pool_size": pool_size_jobs,
    "6_tiles": tile_jobs,
    "7_growth": growth_jobs,
    "7_bounded": bounded_jobs,
    "sensitivity": sensitivity_jobs,
}
"""By the name of its CSV. Tables 3 and 4 are of one experiment."""
