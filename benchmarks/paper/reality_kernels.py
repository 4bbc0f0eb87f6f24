"""Kernels and wires of the cluster model beside published profiles and speeds: rows for `reality`."""

from __future__ import annotations

from benchmarks.paper.reality_rows import LLAMA3_8B, Row, read_csv, row_of
from libra_jax.policies import sharding
from libra_jax.policies.base import RunShape
from libra_jax.simulate.attention import Network, _around
from libra_jax.simulate.constants import CURVES, constants, kernel, links
from libra_jax.simulate.step import Setting, gathered_seconds
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel

HEADS = 64
"""Of the attention profile, which does not state them: assumed."""


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
        rows.append(row_of("triton forward, rate: fitted", what, f"triton forward {tokens}", modelled, why))
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
                row_of(f"fa3 causal {way}, time: independent", f"{tokens:,} tokens, {way}", name, 1e6 * seconds, why)
            )
        modelled = rate_of(cost, tokens, "forward", causal=False, sequences=4 * 48, launches=1)
        name = f"tritonbench fa3 full forward {tokens}"
        rows.append(row_of("fa3 full forward, rate: independent", f"{tokens:,} tokens, not causal", name, modelled))
    cost = kernel("fa3", constants("B200"))[0]
    for mask in ("full", "causal"):
        for way in ("forward", "backward"):
            modelled = rate_of(cost, 8192, way, mask == "causal", sequences=4 * 16, launches=1)
            why = "an H100's FlashAttention-3 scaled by peak FLOP/s, against FlashAttention-4"
            rows.append(
                row_of("B200, rate: independent", f"8,192 tokens, {mask} {way}", f"fa4 {mask} {way}", modelled, why)
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
    rows.append(
        row_of("between nodes, rate", "bytes a second of a port", "nccl port", across, "line rate, no protocol")
    )
    received = 2e9 * 255 / 256
    rate = received / _around(received, 256, network)[0] / 1e9
    why = "the model has every ring use all 8 ports of a node at full rate; that user's cluster does not"
    rows.append(
        row_of("between nodes, rate", "all-gather of 2 GB on 32 nodes", "nccl all-gather of 32 nodes", rate, why)
    )
    return rows
