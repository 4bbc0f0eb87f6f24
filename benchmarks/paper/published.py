"""Numbers that others have published, each with its unit and where it stands, for models to be held to.

`PUBLISHED[name]` is a `Published`. Whole profiles lie in `data/` (see the README there). Where a publication prints a
number in a figure only, it is not here. Numbers that were worked out of printed ones say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Published:
    """One number. name: what it is called here. source: publication and place in it."""

    name: str
    value: float
    unit: str
    source: str


_WLB = "WLB-LLM (arXiv 2503.17924, OSDI 2025)"
_DISTCA = "DistCA (arXiv 2510.18121)"
_LIBRA = "Libra (arXiv 2607.23250)"
_TRITONBENCH = "meta-pytorch/tritonbench pull request {}: FlashAttention-3, H100, bf16, batch 4, 48 heads of 128, {}"
_FA4 = (
    "Dao-AILab/flash-attention pull request 2280: FlashAttention-4, B200, bf16, 8,192 tokens, batch 4, 16 heads of 128"
)


def _all() -> Iterator[Published]:
    comparison = "FlashAttention-3 (arXiv 2407.08608), H100, head dim 128, causal forward: Triton"
    for tokens, rate in ((2048, 323.0), (4096, 353.0), (8192, 369.0), (16_384, 378.0)):
        yield Published(f"triton forward {tokens}", rate, "TFLOP/s", comparison)
    causal = _TRITONBENCH.format(1267, "causal")
    for tokens, forward, backward in (
        (1024, 141.6, 709.7),
        (2048, 368.0, 1631.0),
        (4096, 1237.0, 4643.0),
        (8192, 4817.0, 15308.0),
    ):
        yield Published(f"tritonbench fa3 causal forward {tokens}", forward, "us", causal)
        yield Published(f"tritonbench fa3 causal backward {tokens}", backward, "us", causal)
    whole = _TRITONBENCH.format(1254, "not causal")
    for tokens, rate in ((1024, 541.0), (2048, 618.0), (4096, 628.0), (8192, 639.0)):
        yield Published(f"tritonbench fa3 full forward {tokens}", rate, "TFLOP/s", whole)
    for mask, forward, backward in (("full", 1535.0, 1360.0), ("causal", 1418.0, 1209.0)):
        yield Published(f"fa4 {mask} forward", forward, "TFLOP/s", f"{_FA4}, {mask}")
        yield Published(f"fa4 {mask} backward", backward, "TFLOP/s", f"{_FA4}, {mask}")

    yield Published(
        "nccl port", 48.5, "GB/s", "NVIDIA/nccl-tests issue 267: 48 to 49 GB/s of a 400 Gb/s port is the top"
    )
    yield Published(
        "nccl all-gather of 32 nodes",
        200.0,
        "GB/s",
        "NVIDIA/nccl issue 1218: bus bandwidth of 2 GB over 256 H100, one user's report",
    )

    table = f"{_WLB}, Table 2: largest over mean forward latency of 4 micro-batches, 7B, 128K"
    for name, value in (
        ("original", 1.44),
        ("fixed greedy", 1.41),
        ("1 queue", 1.24),
        ("2 queues", 1.05),
        ("3 queues", 1.05),
    ):
        yield Published(f"wlb imbalance {name}", value, "x", table)
    figure = f"{_WLB}, Figure 13: speed-up over Plain-4D, 7B, 128K, 64 H100"
    for name, value in (("per document", 1.02), ("adaptive", 1.05), ("packing and delay", 1.28), ("all", 1.33)):
        yield Published(f"wlb speed-up {name}", value, "x", figure)

    sweep = f"{_DISTCA}, section 6, no pipeline: speed-up over WLB-ideal, 8B and 34B, 128K to 512K, 64 to 256 H200"
    yield Published("distca least speed-up", 1.07, "x", sweep + ', "Pretrain" documents')
    yield Published("distca most speed-up", 1.20, "x", sweep + ', "Pretrain" documents')
    yield Published("distca least speed-up ProLong", 1.05, "x", sweep + ", ProLong documents")
    yield Published("distca most speed-up ProLong", 1.12, "x", sweep + ", ProLong documents")
    motivation = f"{_DISTCA}, motivation: idle share with variable-length packing, 8B, 512K"
    for dp, value in ((2, 0.02), (4, 0.192), (8, 0.554)):
        yield Published(f"distca idle packing {dp}", value, "share", motivation)
    yield Published("distca idle", 0.02, "share", f"{_DISTCA}: idle share of DistCA itself, 8B, 512K")
    gather = f"{_DISTCA}, motivation: all-gather's share of the latency, per-document CP, 8B, documents of 32K"
    yield Published("distca gather share 2", 0.03, "share", gather)
    yield Published("distca gather share 32", 0.40, "share", gather + " (about)")

    llama = "Llama 3 (arXiv 2407.21783), Table 4: BF16 TFLOP/s a GPU, 405B, 16,384 H100, TP 8, PP 16"
    yield Published("llama 3 8K", 400.0, "TFLOP/s", f"{llama}, CP 1, DP 128, 8,192 tokens")
    yield Published("llama 3 128K", 380.0, "TFLOP/s", f"{llama}, CP 16, DP 8, 131,072 tokens")

    scaling = f"{_LIBRA}: throughput at DP 16 over DP 1, Qwen3-30B-A3B"
    micro = f"{_LIBRA}: micro-batch forward time, largest over mean"
    pools = f"{_LIBRA}: imbalance between pools, P = 8, before and after VRSP (second-hand)"
    for length, ulysses, libra in (("256K", 7.63, 13.66), ("1M", 4.42, 11.25)):
        yield Published(f"libra scaling ulysses {length}", ulysses, "x", f"{scaling}, {length}")
        yield Published(f"libra scaling libra {length}", libra, "x", f"{scaling}, {length}")
    for length, before, after in (("256K", 6.98, 2.63), ("1M", 23.1, 1.57)):
        yield Published(f"libra micro-batch before {length}", before, "x", f"{micro}, {length}")
        yield Published(f"libra micro-batch after {length}", after, "x", f"{micro}, {length}")
    for length, before, after in (("256K", 1.08, 0.005), ("1M", 0.52, 0.007)):
        yield Published(f"libra pool imbalance before {length}", before, "share", f"{pools}, {length}")
        yield Published(f"libra pool imbalance after {length}", after, "share", f"{pools}, {length}")


PUBLISHED: Mapping[str, Published] = {each.name: each for each in _all()}
"""All of them, by name."""


def value(name: str) -> float:
    """The number of that name. Raises KeyError where there is none."""
    return PUBLISHED[name].value
