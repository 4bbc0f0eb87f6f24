"""What policies are called where a user names them, on the command line and in reports.

    ulysses[-sorted], context-parallel, zigzag, per-document, magi, dynamic-cp, distca[-ranks]
    wlb-batch[-delay]-shuffled|-sorted, wlb-micro[-delay]-shuffled (bins stay in their micro-step)
    libra[-all][:P], libra-paper[:P]

P: sequences of a pool; without it 8. Host side: NumPy only.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Literal

from libra_jax.policies import packed
from libra_jax.policies.base import Policy
from libra_jax.policies.dynamic_cp import DynamicCP
from libra_jax.policies.magi import Magi
from libra_jax.policies.wlb import WLB


@dataclasses.dataclass(frozen=True)
class Known:
    """make: a fresh one. about: what it does. source: where it is from. limits: what is not as in the original, or what
    the original does not do. keeps: whether every step keeps the documents that it was given. delays: whether documents
    wait for later steps on purpose, so that the first steps are not like the others. pools: whether sequences share
    their attention."""

    make: Callable[[], Policy]
    about: str
    source: str
    limits: str
    keeps: bool = True
    delays: bool = False
    pools: bool = False


def _wlb(
    scope: Literal["batch", "micro_step"], delay: bool, order: Literal["shuffled", "sorted"]
) -> Callable[[], Policy]:
    return lambda: WLB(scope=scope, delay=delay, order=order)


_WLB_LIMITS = (
    "thresholds of the queues are not published; attention and linear latency come from this model's kernels, not from "
    "a profile of each length"
)
WLB_SCOPES: tuple[tuple[str, Literal["batch", "micro_step"], str], ...] = (
    ("micro", "micro_step", "each micro-step"),
    ("batch", "batch", "the whole batch"),
)
WLB_ORDERS: tuple[Literal["shuffled", "sorted"], ...] = ("shuffled", "sorted")
POLICIES: dict[str, Known] = {
    "ulysses": Known(
        packed.ulysses,
        "sequences as packed; heads dealt to the ranks of each",
        "DeepSpeed Ulysses, arXiv 2309.14509",
        "with more ranks than kv heads a head's pages are sent to several ranks",
    ),
    "ulysses-sorted": Known(
        lambda: packed.ulysses("pools"),
        "as ulysses, with sequences of like cost in a micro-step",
        "ours, to tell the order's part in Libra from the pools'",
        "with more ranks than kv heads a head's pages are sent to several ranks",
    ),
    "context-parallel": Known(
        packed.plain_context_parallel,
        "every rank computes the consecutive tokens it holds, and fetches what they see",
        "the plainest context parallelism",
        "keys and values are fetched wave by wave beside the kernels, as this runtime does",
    ),
    "zigzag": Known(
        lambda: packed.Sharded("sequence"),
        "chunks c and 2C - 1 - c of the sequence on rank c; all keys and values gathered",
        "Llama 3, arXiv 2407.21783; WLB-LLM calls it per-sequence sharding",
        "nothing runs beside the gather",
    ),
    "per-document": Known(
        lambda: packed.Sharded("document"),
        "chunks c and 2C - 1 - c of every document on rank c; all keys and values gathered",
        "WLB-LLM, arXiv 2503.17924",
        "nothing runs beside the gather",
    ),
    "magi": Known(
        Magi,
        "equal chunks dealt by area inside the CP group; keys and values go where they are needed",
        "MagiAttention, SandAI-org, its default dispatch",
        "one stage of overlap, its default; keys and values that two ranks of a node need come twice",
    ),
    "dynamic-cp": Known(
        DynamicCP,
        "as many ranks for a document as its tokens need, a power of two",
        "Megatron-LM, dynamic context parallelism",
        "pipelines are not supported there, and not modelled",
    ),
    "distca": Known(
        packed.disaggregated,
        "one pool of all sequences side by side, a node's ranks as one server; its greedy by deficit",
        "DistCA, arXiv 2510.18121, and its published planner",
        "heads are dealt inside a node, which its tensor parallelism would not have to send; exchange of one level",
        pools=True,
    ),
    "distca-ranks": Known(
        lambda: packed.disaggregated(server_ranks=1),
        "one pool of all sequences side by side, each rank as a server; its greedy by deficit",
        "DistCA, arXiv 2510.18121, and its published planner",
        "not how it is run: its servers are nodes",
        pools=True,
    ),
    **{
        f"wlb-{name}{'-delay' if delay else ''}-{order}": Known(
            _wlb(scope, delay, order),
            f"documents packed anew over {what}, {'with' if delay else 'without'} delay queues; bins {order}",
            "WLB-LLM, arXiv 2503.17924",
            _WLB_LIMITS,
            keeps=False,
            delays=delay,
        )
        for name, scope, what in WLB_SCOPES
        for delay in (False, True)
        for order in (WLB_ORDERS if scope == "batch" else WLB_ORDERS[:1])
    },
}
SIZED: dict[str, tuple[Callable[[int], Policy], str, str, str]] = {
    "libra": (
        lambda size: packed.libra(size),
        "as built: like sequences share a micro-step, pools of P even, tiles pooled, two levels of exchange",
        "this package",
        "plans are the first that plan_pool tries",
    ),
    "libra-all": (
        lambda size: packed.libra(size, order="all"),
        "as libra, with all pools of a step even, as pipelines want them",
        "this package",
        "plans are the first that plan_pool tries",
    ),
    "libra-paper": (
        lambda size: packed.libra_of_the_paper(size),
        "pools of P, all of a step even; tiles of 8,192 tokens by the paper's placer",
        "Libra, arXiv 2607.23250",
        "no code is public; see libra_jax/policies/paper.py for what was read into it",
    ),
}


def known(name: str) -> Known:
    """Raises ValueError with what there is."""
    if name in POLICIES:
        return POLICIES[name]
    plain, colon, size = name.partition(":")
    if plain in SIZED and (not colon or (size.isdecimal() and int(size) > 0)):
        make, about, source, limits = SIZED[plain]
        return Known(lambda: make(int(size or 8)), about, source, limits, pools=True)
    there = [*POLICIES, *(f"{each}[:P]" for each in SIZED)]
    if plain in SIZED and size.isdecimal():
        raise ValueError(f"policy {name!r}: the pool size ({size}) must be at least 1")
    close = difflib.get_close_matches(name.lower(), there, 1)
    hint = f" Was {close[0]} meant?" if close else ""
    raise ValueError(f"no policy is called {name!r}.{hint} There are {', '.join(there)}")


def policy(name: str) -> Policy:
    """A fresh policy, by name."""
    return known(name).make()


def pool_size(name: str, dp: int) -> int:
    """Sequences that share their attention."""
    plain, _, size = name.partition(":")
    if plain in SIZED:
        return int(size or 8)
    return dp if plain.startswith("distca") else 1
