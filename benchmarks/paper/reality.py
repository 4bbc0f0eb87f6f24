"""The cluster model held to what others have published, and to this project's own measurement on two processes.

Every row has a published value, the same from the model, and the residual: modelled over published, less 1. Nothing is
fitted here and no constant is changed to come nearer: settings are the publications' own where these print them, and
what they leave open is said where it is filled in. Corpora of other systems are not public: their results are modelled
on all shipped distributions of lengths, one row each.

Run: python -m benchmarks.paper.reality [--csv FILE] [--markdown FILE]; under two minutes on one core.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.paper.published import PUBLISHED
from benchmarks.reporting import markdown
from libra_jax.data.lengths import distribution_names, find_lengths, read_lengths
from libra_jax.data.packing import cut
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.policies import packed, sharding
from libra_jax.policies.base import Group, Policy, RunShape, Sequences, StepPlan, check_step
from libra_jax.policies.wlb import WLB, shard
from libra_jax.simulate.attention import Network, _around, group_seconds
from libra_jax.simulate.constants import CURVES, Constants, changed, constants, kernel, links
from libra_jax.simulate.step import Setting, Sync, gathered_seconds, layer_products, token_seconds
from libra_jax.simulate.study import outcome, sample_steps
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel

DATA = Path(__file__).parent / "data"
TWO_RANKS = Path(__file__).parents[1] / "reports" / "two_ranks.json"
STEPS = 8
"""Steps that are priced where a row needs plans."""
HEADS = 64
"""Of the attention profile, which does not state them: assumed."""
LLAMA2_7B = Qwen3Config(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32, num_heads=32, num_kv_heads=32
)
LLAMA3_8B = Qwen3Config(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, published (or measured) and modelled. series: rows that are summed up together."""

    series: str
    what: str
    published: float
    modelled: float
    unit: str
    source: str
    why: str = ""

    @property
    def residual(self) -> float:
        """Modelled over published, less 1."""
        return self.modelled / self.published - 1


@dataclasses.dataclass(frozen=True)
class Part:
    """What is compared, how the model was set up for it, and the rows."""

    title: str
    text: str
    rows: Callable[[], list[Row]]


def _row(series: str, what: str, name: str, modelled: float, why: str = "") -> Row:
    """Against a number of `PUBLISHED`."""
    one = PUBLISHED[name]
    return Row(series, what, one.value, modelled, one.unit, one.source, why)


def read_csv(name: str) -> list[dict[str, str]]:
    """Rows of a file in `DATA`."""
    with open(DATA / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------------------- kernels


def document_seconds(cost: CostModel, length: int, cp: int, heads: int) -> float:
    """Forward pass of the slowest of cp ranks, each with a zigzag share of one document, of so many query heads."""
    pages, blocks = sharding.visited(sharding.by_document([length], cp), cp, 128)
    return float(cost.scaled(PoolSpec(128, 1, 1, heads, 1, 128)).forward(pages, blocks, 1).max())


def attention_rows() -> list[Row]:
    """The profile's lengths, for each kernel; degrees of context and tensor parallelism for one."""
    profile = {
        (int(row["L"]), int(row["cp"]), int(row["tp"])): float(row["duration_per_doc"])
        for row in read_csv("attention-h100.csv")
    }
    source = "data/attention-h100.csv (published with DistCA)"
    rows = []
    for name in ("fa3", "cudnn", "triton"):
        cost = kernel(name, constants("H100"))[0]
        for (length, cp, tp), published in profile.items():
            if (cp, tp) != (1, 1) and name != "triton":
                continue
            size = "from 4,096 tokens" if length >= 4096 else "below"
            split = "" if (cp, tp) == (1, 1) else ", split over cp and tp"
            modelled = 1e3 * document_seconds(cost, length, cp, HEADS // tp)
            if length < 1024:
                why = "launch-bound: the model's launch is 25 us for every shape"
            elif (cp, tp) != (1, 1):
                why = "few tiles for a GPU's processors, which pages and blocks do not know" if length <= 8192 else ""
            else:
                why = "the profile's rate rises from 129 TFLOP/s at 1,024 tokens to 341 at 65,536, with 64 heads"
            what = f"{length:,} tokens, cp {cp}, tp {tp}"
            rows.append(Row(f"{name}{split}, {size}", what, published, modelled, "ms", source, why))
    return rows


def rate_of(cost: CostModel, tokens: int, way: str, causal: bool, sequences: int = 1, launches: int = 0) -> float:
    """TFLOP/s as publications count them: 4 S^2 D of a head forward, 2.5 times that backward, half where causal."""
    n = tokens / cost.block
    pages, blocks = sequences * (n * (n + 1) / 2 if causal else n * n), sequences * n
    seconds = cost.forward(pages, blocks, launches) if way == "forward" else cost.backward(pages, blocks, launches)
    flops = sequences * 4 * tokens**2 * cost.head_dim * (1 if way == "forward" else 2.5) / (2 if causal else 1)
    return flops / seconds / 1e12


def kernel_rows() -> list[Row]:
    """Points that the kernels were fitted to, and points that they were not."""
    rows = []
    table = constants("H100")
    for name in CURVES:
        cost = kernel(name, table)[0]
        for way, points in (("forward", CURVES[name].forward), ("backward", CURVES[name].backward)):
            for tokens, rate in points.items():
                modelled = rate_of(cost, tokens, way, causal=way == "forward")
                what = f"{name} {way}, {tokens:,} tokens"
                why = "a residual of the fit, no check"
                rows.append(
                    Row(f"{name} {way}, rate: fitted", what, rate, modelled, "TFLOP/s", CURVES[name].source, why)
                )
    cost = kernel("triton", table)[0]
    for tokens in (2048, 4096, 8192, 16_384):
        modelled, why = rate_of(cost, tokens, "forward", causal=True), "a residual of the fit, no check"
        what = f"triton forward, {tokens:,} tokens"
        rows.append(_row("triton forward, rate: fitted", what, f"triton forward {tokens}", modelled, why))
    cost = kernel("fa3", table)[0]
    for tokens in (1024, 2048, 4096, 8192):
        for way in ("forward", "backward"):
            name = f"tritonbench fa3 causal {way} {tokens}"
            n = tokens // 128
            pages, blocks = 4 * 48 * n * (n + 1) // 2, 4 * 48 * n
            seconds = cost.forward(pages, blocks, 1) if way == "forward" else cost.backward(pages, blocks, 1)
            why = "a later FlashAttention-3, maybe: 685 TFLOP/s at 8,192 tokens, the curve has 602"
            if way == "backward":
                why = "the curve is taken as not causal and begins at 4,096 tokens"
            rows.append(
                _row(f"fa3 causal {way}, time: independent", f"{tokens:,} tokens, {way}", name, 1e6 * seconds, why)
            )
        modelled = rate_of(cost, tokens, "forward", causal=False, sequences=4 * 48, launches=1)
        name = f"tritonbench fa3 full forward {tokens}"
        rows.append(_row("fa3 full forward, rate: independent", f"{tokens:,} tokens, not causal", name, modelled))
    cost = kernel("fa3", constants("B200"))[0]
    for mask in ("full", "causal"):
        for way in ("forward", "backward"):
            modelled = rate_of(cost, 8192, way, mask == "causal", sequences=4 * 16, launches=1)
            why = "an H100's FlashAttention-3 scaled by peak FLOP/s, against FlashAttention-4"
            rows.append(
                _row("B200, rate: independent", f"8,192 tokens, {mask} {way}", f"fa4 {mask} {way}", modelled, why)
            )
    return rows


# --------------------------------------------------------------------------------------------------------------- wires


def nccl_rows() -> list[Row]:
    """Collectives of one node by size, and two figures of what crosses nodes."""
    table = constants("H100")
    network = Network(links(table))
    rows = []
    for row in read_csv("nccl-one-node.csv"):
        op, gpus, size = row["op"], int(row["ngpu"]), int(row["size_bytes"])
        if op == "all_reduce":  # nothing in the model sums to all
            continue
        modelled = 1e6 * _around(size * (gpus - 1) / gpus, gpus, network)[0]
        what = f"{gpus} GPUs, {size >> 20:,} MiB"
        group = "up to 64 MiB" if size <= 2**26 else "above 64 MiB"
        why = "small messages do not reach the rate" if size <= 2**26 else ""
        if op == "reduce_scatter" and gpus == 2 and size > 2**26:
            why = "two GPUs sum at three quarters of the rate"
        measured = float(row["t_us_out"])
        source = "data/nccl-one-node.csv (published with DistCA)"
        rows.append(Row(f"{op.replace('_', '-')}, {group}", what, measured, modelled, "us", source, why))
        if op == "all_gather" and size == 2**30:
            run = RunShape(8192, gpus, 1, 1)
            setting = Setting(LLAMA3_8B, run, table, run.cost, network)
            modelled = 1e6 * gathered_seconds(size, setting)
            why = "FSDP gathers are priced as if a rank also received its own share: 1 / ranks too much inside a node"
            rows.append(Row("FSDP gather, 1 GiB", what, measured, modelled, "us", source, why))
    across = table["across"].value / 1e9
    rows.append(_row("between nodes, rate", "bytes a second of a port", "nccl port", across, "line rate, no protocol"))
    received = 2e9 * 255 / 256
    rate = received / _around(received, 256, network)[0] / 1e9
    why = "the model has every ring use all 8 ports of a node at full rate; that user's cluster does not"
    rows.append(_row("between nodes, rate", "all-gather of 2 GB on 32 nodes", "nccl all-gather of 32 nodes", rate, why))
    return rows


# ------------------------------------------------------------------------------------------------- other systems' runs


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


def setting_of(
    model: Qwen3Config, table: Constants, kernels: str, seq_len: int, dp: int, cp: int, micro_steps: int,
    pp: int = 1, sync: Sync = "step",
) -> Setting:  # fmt: skip
    cost = kernel(kernels, table)[0]
    run = RunShape(
        seq_len, dp, cp, micro_steps, model.num_heads, model.num_kv_heads, model.head_dim,
        cost=cost, links=links(table), token_seconds=sum(token_seconds(model, table)),
    )  # fmt: skip
    return Setting(model, run, table, cost, Network(run.links), pp, sync)


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
    return setting_of(part, table, kernels, 131_072, 1, 2, 4, pp=4)


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
        _row(f"imbalance, {packing}", name, f"wlb imbalance {packing}", wlb_imbalance(make, name, setting), why)
        for packing, (make, why) in _PACKINGS.items()
        for name in names
    ]
    for variant, (make, why) in _VARIANTS.items():
        for name in names:
            gain = wlb_speed_up(make, name, setting)
            rows.append(_row(f"speed-up, {variant}", name, f"wlb speed-up {variant}", gain, why))
    for name in names:
        gain = wlb_speed_up(lambda: Mixed(thresholds=queues(2), sharding="sequence"), name, setting)
        series = "speed-up, packing and delay, bins mixed"
        rows.append(
            _row(series, name, "wlb speed-up packing and delay", gain, "the same with documents in random order")
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
            rows.append(_row(f"reading: {reading}", f"imbalance, {packing}", f"wlb imbalance {packing}", modelled, why))
        gain = wlb_speed_up(_VARIANTS["all"][0], _SKEWED, other)
        rows.append(_row(f"reading: {reading}", "speed-up, all", "wlb speed-up all", gain, why))
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
        return setting_of(part, tensor_parallel(table, part, 8), "triton", seq_len, dp, cp, batch // dp)
    return setting_of(LLAMA3_8B, table, "triton", seq_len, dp, 8 * cp, batch // dp)


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
                rows.append(_row(series, f"{end}, {name}", f"distca {end} speed-up", modelled, why))
    for name in distribution_names():
        for dp in (2, 4, 8):
            setting = distca_setting(dp, 2**19, dp, 1, dp, True)
            batches = steps_of(name, setting.run, 4 * STEPS)
            longest = max(length for step in batches for sequence in step for length in sequence)
            why = f"one sequence a replica (not stated); longest document {longest:,}"
            modelled = idle_share(WLB(delay=False), batches, setting)
            rows.append(_row(f"idle with packing, {name}", f"DP {dp}", f"distca idle packing {dp}", modelled, why))
        why = "tolerance of its greedy is 0.1; what it ran with for this is not stated"
        setting = distca_setting(8, 2**19, 8, 1, 8, True)
        modelled = idle_share(packed.disaggregated(), steps_of(name, setting.run, STEPS), setting)
        rows.append(_row("idle of DistCA", f"DP 8, {name}", "distca idle", modelled, why))
    for nodes in (2, 32):
        setting = distca_setting(nodes, 32_768 * nodes, 1, nodes, 1, True)
        group = packed.Sharded("document").step([[32_768] * nodes], setting.run).micro_steps[0][0]
        whole = forward_seconds(group, setting)
        kernels = group_seconds(group, setting.cost, setting.network).kernels[0].max()
        products = token_seconds(setting.model, setting.table)[0] * group.tokens
        why = "tokens a node are not stated: here one document; no elementwise work is modelled"
        modelled = 1 - (kernels + products) / whole
        rows.append(_row("gather's share", f"{nodes} nodes", f"distca gather share {nodes}", modelled, why))
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
    for name, seq_len, cp, micro_steps in (("8K", 8192, 1, 16), ("128K", 131_072, 16, 16)):
        setting = setting_of(part, table, "fa3", seq_len, 1, cp, micro_steps, pp=16)
        found = outcome("", packed.Sharded("sequence"), [[[seq_len]] * micro_steps], setting).steps[0]
        again = "stages run forward again in the backward pass, as here; "
        for series, seconds, why in (
            ("as the model runs stages", found.step, again + "1F1B of 16 micro-batches, not interleaved"),
            ("without a bubble", found.step - found.losses["bubble"], again + "all stages always busy"),
        ):
            rate = found.flops / seconds / setting.gpus / 1e12
            rows.append(_row(series, f"405B, {name}", f"llama 3 {name}", rate, why))
        setting = setting_of(part, table, "fa3", seq_len, 1, cp, 1)
        found = outcome("", packed.Sharded("sequence"), [[[seq_len]]], setting).steps[0]
        rate = found.flops / found.step / setting.gpus / 1e12
        why = "an upper bound: interleaving leaves some bubble, and elementwise work is not modelled"
        rows.append(_row("no bubble, nothing done again", f"405B, {name}", f"llama 3 {name}", rate, why))
    return rows


# ----------------------------------------------------------------------------------------------------------- two ranks


def two_rank_rows() -> list[Row]:
    """Speed-up by pooling, measured on two processes of this project's machine, and predicted from its page times."""
    content = json.loads(TWO_RANKS.read_text())
    rows = []
    for each in content["rows"]:
        way = {"forward": "forward", "both": "both ways", "step": "training step"}[each["pass"]]
        what = f"{each['tokens']:,} tokens, one document beside documents of {each['short']}"
        why = "copies into and out of buffers are not modelled" if each["tokens"] <= 4096 else ""
        source = "benchmarks/reports/two_ranks.json: measured by this project, " + content["machine"].split(",")[0]
        rows.append(Row(way, what, each["ratio"], each["predicted"], "x", source, why))
    return rows


# -------------------------------------------------------------------------------------------------------------- report

PARTS: tuple[Part, ...] = (
    Part(
        "Attention kernels against DistCA's H100 profile",
        "Forward attention of one document. The profile does not state its heads; 64 of width 128 are assumed and "
        "nothing is fitted to it. Its times at 65,536 tokens and cp 2, 4 and 8 are a half, a quarter and an eighth: "
        "cp divides work evenly, as a zigzag does, and so it is modelled; tp divides the heads. Packed sequences have "
        "many documents in a launch and fill a GPU better than a short one of these alone.",
        attention_rows,
    ),
    Part(
        "Attention kernels against published speeds",
        "Fitted points say how well two numbers describe a curve. Independent ones, another publication's with other "
        "shapes, were not used. With these a launch of 25 us is counted, as the model counts one for every wave.",
        kernel_rows,
    ),
    Part(
        "Wires",
        "All-gathers inside a node, in which a rank receives all but its own share; a reduce-scatter is modelled as "
        "the same bytes the other way.",
        nccl_rows,
    ),
    Part(
        "WLB-LLM",
        "Llama2-7B, 131,072 tokens, TP 8, CP 2, PP 4, DP 1, 4 micro-batches, FlashAttention-3. A rank stands for one "
        "GPU of a tensor-parallel group and has an eighth of the heads, of the MLP and of the vocabulary; the group's "
        "collectives lower the speed of matrix products. Queues' thresholds are evenly spread. Not as there: stages "
        "are not interleaved, layers are computed again in the backward pass, and the documents. Speed-ups are by "
        "token: with delay, steps are not equally long. 24 steps after 24 that fill the queues. Other readings of "
        "what is not published come last.",
        wlb_rows,
    ),
    Part(
        "DistCA",
        "Llama3-8B on H200, TP 8, no pipeline, 128K to 512K, 64 to 256 GPUs, batches as in its Table 3; Triton's "
        "speeds, which its own profile is nearest to. WLB-LLM's packing without delay, at the best of all splits into "
        "DP and CP, is what it is compared with. TP is modelled in two ways: as in the part above, or as context "
        "parallelism inside a node, one server a node (8 steps; else 32). Published are the least and the most "
        "over all settings, of 8B and 34B together.",
        distca_rows,
    ),
    Part(
        "Llama 3",
        "Absolute throughput. 128 layers for 126 and the embeddings, one document a sequence, activations kept, one "
        "replica.",
        llama_rows,
    ),
    Part(
        "Two processes of this project",
        "Measured, not published: what a pool of two sequences gains over plain packing. Predicted from times of a "
        "page, a block, a launch and a byte, measured on the same machine with equal work.",
        two_rank_rows,
    ),
)
MOST_ROWS = 45
"""Of a part that is printed row by row; the CSV has all."""
COLUMNS = ("series", "what", "published", "modelled", "residual", "why")
READING = (
    "Long documents and large messages are priced well: fitted curves to 1%, all-gathers of more than 64 MiB to a few "
    "percent in the median. Small ones are priced too low: short documents in the backward pass, few queries a rank, "
    "and collectives below 64 MiB, whose latency is several times the constants'.",
    "Publications differ more from each other than the curves from their fit: an independent benchmark's "
    "FlashAttention-3 is faster forward and slower backward, and DistCA's profile is nearest to Triton's speeds and "
    "takes about twice what the FlashAttention-3 curve would, if it has 64 heads. Triton's backward speed is an "
    "assumption: there is no published point to hold it to.",
    "Inside a node FSDP's gathers are too slow, because a rank is charged for its own share, and sums are as fast as "
    "gathers, which they are not. Between nodes all ports run at full rate; one published measurement is far from it.",
    "A step's linear part is probably too fast. Nothing is counted for elementwise work, and Llama 3's published "
    "throughput is well below what the model gives for its computation alone. The runtime's own pipeline, whose stages "
    "run forward twice and are not interleaved, is half as fast as Llama 3's at 16 micro-batches.",
    "Against context parallelism that gathers keys and values, the model is kind to systems that pool attention: "
    "DistCA's least gain is met, its largest is above what is published. Gathers take too large a share with many "
    "nodes, and DistCA's exchange is wholly hidden. What Libra gains over such systems leans the same way.",
    "WLB-LLM's imbalance with delay comes out a little too good. Its imbalance without, and its gain, are met only "
    "where attention takes more of the time than with FlashAttention-3 and tensor parallelism's collectives; what it "
    "takes there is not stated. Sharding per sequence loses more on its packed bins here than there.",
    "Idle shares follow from the longest documents: of the shipped distributions only the lognormal one has enough of "
    "them to be compared, and it makes two and four replicas wait too much.",
    "Gains on two processes are foretold a few percent too high: copies into and out of buffers are not modelled.",
)
"""What the residuals say about the model."""


@functools.cache
def all_rows() -> tuple[tuple[Part, tuple[Row, ...]], ...]:
    """Every part with its rows."""
    return tuple((part, tuple(part.rows())) for part in PARTS)


def summary(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str]]:
    """Of each series: its name, rows, median residual, and the worst one with its row."""
    for series in dict.fromkeys(row.series for row in rows):
        those = [row for row in rows if row.series == series]
        worst = max(those, key=lambda row: abs(row.residual))
        median = float(np.median([row.residual for row in those]))
        yield series, f"{len(those)}", f"{median:+.1%}", f"{worst.residual:+.1%} ({worst.what})"


def _number(amount: float, unit: str) -> str:
    return f"{amount:.1%}" if unit == "share" else f"{amount:,.{0 if amount >= 1000 else 2}f} {unit}"


def _cells(row: Row) -> tuple[str, ...]:
    shown = _number(row.published, row.unit), _number(row.modelled, row.unit)
    return row.series, row.what, *shown, f"{row.residual:+.1%}", row.why


def section() -> list[str]:
    """Markdown: what it says, then of every part how it was modelled, residuals by series, rows where they are few, and
    sources. For a report that has a heading above it."""
    lines = [
        "Residual: modelled over published, less 1; of a time, below 0 is too fast, of a rate or a gain, above 0.",
        "",
    ]
    lines += [*(f"- {each}" for each in READING), ""]
    for part, rows in all_rows():
        lines += [f"### {part.title}", "", part.text, ""]
        lines += markdown(("series", "rows", "median residual", "worst"), [list(each) for each in summary(rows)])
        if len(rows) <= MOST_ROWS:
            lines += ["", *markdown(COLUMNS, [_cells(row) for row in rows])]
        sources = dict.fromkeys(row.source for row in rows)
        lines += ["", "Sources: " + "; ".join(sources) + ".", ""]
    return lines


def rows_csv(path: Path) -> None:
    """Writes all rows, one a line."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("part", *(field.name for field in dataclasses.fields(Row)), "residual"))
        for part, rows in all_rows():
            writer.writerows((part.title, *dataclasses.astuple(row), f"{row.residual:.6f}") for row in rows)


@dataclasses.dataclass(frozen=True)
class Options:
    """Where to write the rows."""

    csv: Path | None = None
    """Write all rows to this file."""
    markdown: Path | None = None
    """Write the section to this file."""


def main(options: Options) -> None:
    console = Console(width=160, highlight=False)
    for each in READING:
        console.print(f"- {each}")
    for part, rows in all_rows():
        console.print(f"[bold]{part.title}[/bold]\n{part.text}")
        short = Table("series", "rows", "median", "worst", box=box.SIMPLE)
        for each in summary(rows):
            short.add_row(*each)
        console.print(short)
        if len(rows) <= MOST_ROWS:
            table = Table(*COLUMNS, box=box.SIMPLE)
            for row in rows:
                table.add_row(*_cells(row))
            console.print(table)
    if options.csv is not None:
        rows_csv(options.csv)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(section()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
