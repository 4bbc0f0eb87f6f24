"""Whole runs of other systems, modelled as near as this model's terms allow, beside what they published: rows for
`reality`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.paper.reality_rows import LLAMA2_7B, LLAMA3_8B, Row, row_of
from libra_jax.data.lengths import distribution_names, find_lengths, read_lengths
from libra_jax.data.packing import cut
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.policies import packed
from libra_jax.policies.base import Group, Policy, RunShape, Sequences, StepPlan, check_step
from libra_jax.policies.wlb import WLB, shard
from libra_jax.simulate.attention import group_seconds
from libra_jax.simulate.constants import Constants, changed, constants, kernel
from libra_jax.simulate.step import Setting, layer_products, token_seconds
from libra_jax.simulate.study import outcome, sample_steps
from libra_jax.spec import PoolSpec

STEPS = 8
"""Steps that are priced where a row needs plans."""


def share_of_heads(model: Qwen3Config, tp: int) -> Qwen3Config:
    """What one rank of a tensor-parallel group has: its heads, its part of the MLP and of the vocabulary."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(model.num_kv_heads // tp, 1),
        intermediate_size=model.intermediate_size // tp,
        vocab_size=model.vocab_size // tp,
    )


def tensor_parallel(table: Constants, part: Qwen3Config, tp: int) -> Constants:
    """The table for ranks that each stand for one GPU of a tensor-parallel group inside a node: its peers are on other
    nodes, and `products` is lowered by what the group's collectives take (two all-gathers and two reduce-scatters of a
    token's hidden vector a layer, nothing beside them)."""
    received = 4 * 2 * part.hidden_size * (tp - 1) / tp
    flops = 2 * layer_products(part)[0]
    seconds = flops / table["products"].value + received / table["inside"].value
    return changed(table, {"ranks_per_node": 1, "products": flops / seconds})


@functools.cache
def documents_of(name: str) -> np.ndarray:
    """Lengths drawn from a shipped distribution: more tokens than any run here takes."""
    return read_lengths(find_lengths(name), least_tokens=2**29)


@functools.cache
def steps_of(name: str, run: RunShape, steps: int) -> list[list[list[int]]]:
    """The first of 512 packed sequences: where few are packed, those that are not full weigh too much."""
    many = max(steps, -(-512 // run.sequences))
    return sample_steps(cut(documents_of(name), run.seq_len).length, run, many)[:steps]


class Adaptive:
    """Sequences as packed, each sharded the cheaper way: WLB-LLM's section 5 without its section 4."""

    def step(self, sequences: Sequences, run: RunShape) -> StepPlan:
        check_step(sequences, run)
        spec = run.spec(1)
        groups = [
            Group((tuple(each),), spec, "all_gather", spec.tokens_per_rank, parts=shard(each, run, spec, "adaptive"))
            for each in sequences
        ]
        return StepPlan([groups[i : i + run.dp] for i in range(0, len(groups), run.dp)])


class Mixed(WLB):
    """The same bins, the documents of each in random order: WLB puts the longest first, where a zigzag over the
    sequence gives one rank its cheap beginning and the other its dear end. The paper does not say how they lie."""

    def _packed(self, sequences: Sequences, bins: int, run: RunShape, spec: PoolSpec) -> list[list[int]]:
        return [self._random.permutation(each).tolist() for each in super()._packed(sequences, bins, run, spec)]


def forward_seconds(group: Group, setting: Setting) -> float:
    """One layer's forward pass of a micro-batch."""
    attention = group_seconds(group, setting.cost, setting.network).attention[0]
    return attention + token_seconds(setting.model, setting.table)[0] * group.tokens


def imbalance(policy: Policy, batches: Sequence[Sequences], setting: Setting, warm_up: int) -> float:
    """Largest over mean forward latency of a step's micro-batches, a mean over steps."""
    found = []
    for number, sequences in enumerate(batches):
        plan = policy.step(sequences, setting.run)
        if number >= warm_up:
            seconds = [forward_seconds(group, setting) for groups in plan.micro_steps for group in groups]
            found.append(max(seconds) / np.mean(seconds))
    return float(np.mean(found))


def queues(count: int) -> tuple[float, ...]:
    """Thresholds of so many delay queues, evenly between 0 and a sequence: the paper prints none, and tunes them."""
    return tuple(i / (count + 1) for i in range(1, count + 1))


def wlb_setting(kernels: str = "fa3", collectives: bool = True, recompute: bool = True) -> Setting:
    """TP 8, CP 2, PP 4, DP 1, 4 micro-batches: Llama2-7B, 131,072 tokens. The rest is not published."""
    part = share_of_heads(LLAMA2_7B, 8)
    table = changed(constants("H100"), {"ranks_per_node": 1, "recompute": float(recompute)})
    if collectives:
        table = tensor_parallel(table, part, 8)
    return Setting.of(part, table, kernel(kernels, table)[0], 131_072, 1, 2, 4, pp=4, sync="step")


_SKEWED = "lognormal-644-71k"
_FILL = 3 * STEPS
"""Steps before the priced ones, for WLB-LLM's queues."""
_PACKINGS: dict[str, tuple[Callable[[], Policy], str]] = {
    "original": (lambda: packed.Sharded("sequence"), "skew of the corpus, and attention's share of the time"),
    "fixed greedy": (lambda: WLB(cap=1.0, delay=False), "a long document fills most of a sequence of fixed length"),
    "1 queue": (lambda: WLB(thresholds=queues(1)), "threshold at half a sequence, not tuned on the corpus"),
    "2 queues": (lambda: WLB(thresholds=queues(2)), "thresholds evenly spread, not tuned on the corpus"),
    "3 queues": (lambda: WLB(thresholds=queues(3)), "thresholds evenly spread, not tuned on the corpus"),
}
_VARIANTS: dict[str, tuple[Callable[[], Policy], str]] = {
    "per document": (lambda: packed.Sharded("document"), "depends on how many documents share a sequence"),
    "adaptive": (Adaptive, "kernels of short runs cost too little, so that per document nearly always wins"),
    "packing and delay": (
        lambda: WLB(thresholds=queues(2), sharding="sequence"),
        "a zigzag over the sequence splits one document evenly, not a long one among short ones; there it costs 4%",
    ),
    "all": (lambda: WLB(thresholds=queues(2)), "too little imbalance to win back, see the readings below"),
}


def wlb_rows() -> list[Row]:
    """WLB-LLM's Table 2 and Figure 13 on every distribution, and what other readings of the set-up would change."""
    setting, names = wlb_setting(), distribution_names()
    rows = [
        row_of(f"imbalance, {packing}", name, f"wlb imbalance {packing}", wlb_imbalance(make, name, setting), why)
        for packing, (make, why) in _PACKINGS.items()
        for name in names
    ]
    for variant, (make, why) in _VARIANTS.items():
        for name in names:
            gain = wlb_speed_up(make, name, setting)
            rows.append(row_of(f"speed-up, {variant}", name, f"wlb speed-up {variant}", gain, why))
    for name in names:
        gain = wlb_speed_up(lambda: Mixed(thresholds=queues(2), sharding="sequence"), name, setting)
        series = "speed-up, packing and delay, bins mixed"
        rows.append(
            row_of(series, name, "wlb speed-up packing and delay", gain, "the same with documents in random order")
        )
    for reading, other in (
        ("Triton's kernels", wlb_setting("triton")),
        ("no collectives of TP", wlb_setting(collectives=False)),
        ("nothing recomputed", wlb_setting(recompute=False)),
        ("all three", wlb_setting("triton", False, False)),
    ):
        why = f"{_SKEWED}: with attention a larger part of the time, imbalance and gain grow"
        for packing in ("original", "2 queues"):
            modelled = wlb_imbalance(_PACKINGS[packing][0], _SKEWED, other)
            rows.append(
                row_of(f"reading: {reading}", f"imbalance, {packing}", f"wlb imbalance {packing}", modelled, why)
            )
        gain = wlb_speed_up(_VARIANTS["all"][0], _SKEWED, other)
        rows.append(row_of(f"reading: {reading}", "speed-up, all", "wlb speed-up all", gain, why))
    return rows


def wlb_imbalance(make: Callable[[], Policy], name: str, setting: Setting) -> float:
    return imbalance(make(), steps_of(name, setting.run, 2 * _FILL), setting, _FILL)


def wlb_speed_up(make: Callable[[], Policy], name: str, setting: Setting) -> float:
    """Over sequences as packed, sharded per sequence; by token."""
    batches = steps_of(name, setting.run, 2 * _FILL)
    plain, better = (
        outcome("", policy, batches, setting, _FILL) for policy in (packed.Sharded("sequence"), make())
    )  # fmt: skip
    return plain.seconds_per_token / better.seconds_per_token


def distca_setting(nodes: int, seq_len: int, dp: int, cp: int, batch: int, heads: bool) -> Setting:
    """Llama3-8B on nodes of 8 H200 with TP 8. heads: a rank is one GPU of each tensor-parallel group, with an eighth of
    the heads; else TP is taken as cp inside the node, and all of a node's ranks are a sequence's."""
    table = constants("H200")
    if heads:
        part = share_of_heads(LLAMA3_8B, 8)
        table = tensor_parallel(table, part, 8)
        return Setting.of(part, table, kernel("triton", table)[0], seq_len, dp, cp, batch // dp, sync="step")
    cost = kernel("triton", table)[0]
    return Setting.of(LLAMA3_8B, table, cost, seq_len, dp, 8 * cp, batch // dp, sync="step")


def distca_speed_up(name: str, nodes: int, seq_len: int, batch: int, heads: bool, steps: int = STEPS) -> float:
    """Over the fastest split of the nodes into data and context parallelism with WLB-LLM's packing, no delay."""
    ours = distca_setting(nodes, seq_len, min(batch, nodes), max(nodes // batch, 1), batch, heads)
    batches = steps_of(name, ours.run, steps)
    servers = packed.disaggregated(server_ranks=1 if heads else 8)
    seconds = outcome("", servers, batches, ours).seconds_per_token
    others = []
    for dp in (1, 2, 4, 8, 16, 32):
        if dp <= min(nodes, batch):
            setting = distca_setting(nodes, seq_len, dp, nodes // dp, batch, heads)
            others.append(outcome("", WLB(delay=False), batches, setting).seconds_per_token)
    return min(others) / seconds


def distca_rows() -> list[Row]:
    """DistCA's speed-ups without pipelines, idle shares, and what gathers take as nodes are added."""
    rows = []
    sizes = [(nodes, seq_len, nodes * 131_072 // seq_len) for nodes in (8, 16, 32) for seq_len in (2**17, 2**18, 2**19)]
    for name in distribution_names():
        for heads in (True, False):
            found = {
                (nodes, seq_len): distca_speed_up(name, nodes, seq_len, batch, heads, 4 * STEPS if heads else STEPS)
                for nodes, seq_len, batch in sizes
                if heads or nodes == 8
            }
            as_what = "TP as an eighth of the heads" if heads else "TP as cp, 64 GPUs"
            for end, of in (("least", min), ("most", max)):
                nodes, seq_len = of(found, key=lambda key: found[key])
                why = f"on {8 * nodes} GPUs with {seq_len // 1024}K"
                if end == "most":
                    why += "; WLB's gathers are all exposed, DistCA's exchange is all hidden"
                series = f"speed-up, {as_what}"
                modelled = found[nodes, seq_len]
                rows.append(row_of(series, f"{end}, {name}", f"distca {end} speed-up", modelled, why))
    for name in distribution_names():
        for dp in (2, 4, 8):
            setting = distca_setting(dp, 2**19, dp, 1, dp, True)
            batches = steps_of(name, setting.run, 4 * STEPS)
            longest = max(length for step in batches for sequence in step for length in sequence)
            why = f"one sequence a replica (not stated); longest document {longest:,}"
            modelled = idle_share(WLB(delay=False), batches, setting)
            rows.append(row_of(f"idle with packing, {name}", f"DP {dp}", f"distca idle packing {dp}", modelled, why))
        why = "tolerance of its greedy is 0.1; what it ran with for this is not stated"
        setting = distca_setting(8, 2**19, 8, 1, 8, True)
        modelled = idle_share(packed.disaggregated(), steps_of(name, setting.run, STEPS), setting)
        rows.append(row_of("idle of DistCA", f"DP 8, {name}", "distca idle", modelled, why))
    for nodes in (2, 32):
        setting = distca_setting(nodes, 32_768 * nodes, 1, nodes, 1, True)
        group = packed.Sharded("document").step([[32_768] * nodes], setting.run).micro_steps[0][0]
        whole = forward_seconds(group, setting)
        kernels = group_seconds(group, setting.cost, setting.network).kernels[0].max()
        products = token_seconds(setting.model, setting.table)[0] * group.tokens
        why = "tokens a node are not stated: here one document; no elementwise work is modelled"
        modelled = 1 - (kernels + products) / whole
        rows.append(row_of("gather's share", f"{nodes} nodes", f"distca gather share {nodes}", modelled, why))
    return rows


def idle_share(policy: Policy, batches: Sequence[Sequences], setting: Setting) -> float:
    """Share of the ranks' time in which they wait for the one with the most to compute, forward and backward."""
    products = sum(token_seconds(setting.model, setting.table))
    idle, run = [], setting.run
    for sequences in batches:
        busy = np.zeros(run.ranks)
        for groups in policy.step(sequences, run).micro_steps:
            kernels = [group_seconds(group, setting.cost, setting.network).kernels.sum(axis=0) for group in groups]
            busy += np.concatenate(kernels) + np.repeat(
                [products * group.tokens for group in groups], [group.ranks for group in groups]
            )
        idle.append(1 - busy.mean() / busy.max())
    return float(np.mean(idle))


def llama_rows() -> list[Row]:
    """Llama 3's absolute throughput, its sequences taken as one document each."""
    rows = []
    whole = Qwen3Config(
        vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248, num_layers=128, num_heads=128, num_kv_heads=8
    )
    part = share_of_heads(whole, 8)
    table = changed(tensor_parallel(constants("H100"), part, 8), {"recompute": 0})
    cost = kernel("fa3", table)[0]
    for name, seq_len, cp, micro_steps in (("8K", 8192, 1, 16), ("128K", 131_072, 16, 16)):
        setting = Setting.of(part, table, cost, seq_len, 1, cp, micro_steps, pp=16, sync="step")
        found = outcome("", packed.Sharded("sequence"), [[[seq_len]] * micro_steps], setting).steps[0]
        again = "stages run forward again in the backward pass, as here; "
        for series, seconds, why in (
            ("as the model runs stages", found.step, again + "1F1B of 16 micro-batches, not interleaved"),
            ("without a bubble", found.step - found.losses["bubble"], again + "all stages always busy"),
        ):
            rate = found.flops / seconds / setting.gpus / 1e12
            rows.append(row_of(series, f"405B, {name}", f"llama 3 {name}", rate, why))
        setting = Setting.of(part, table, cost, seq_len, 1, cp, 1, sync="step")
        found = outcome("", packed.Sharded("sequence"), [[[seq_len]]], setting).steps[0]
        rate = found.flops / found.step / setting.gpus / 1e12
        why = "an upper bound: interleaving leaves some bubble, and elementwise work is not modelled"
        rows.append(row_of("no bubble, nothing done again", f"405B, {name}", f"llama 3 {name}", rate, why))
    return rows
