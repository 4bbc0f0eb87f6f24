"""The report's text, written from its CSVs: what the paper says, what the model says here, and why they differ.

Every number in it is read from a CSV beside it, or from `published`; sentences that explain are ours to keep true.
"""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import figures
from benchmarks.paper.base import ASSUMED, LOGNORMAL, MODEL_NAMES, TOKENS, WITHOUT_DELAY, WLB
from benchmarks.paper.figures import Row, chosen, names_of
from benchmarks.paper.published import PUBLISHED
from benchmarks.reporting import machine, markdown
from libra_jax.policies import names
from libra_jax.simulate.constants import KERNELS, constants, kernel

Rows = Sequence[Row]
MODEL = MODEL_NAMES[0]


def read(folder: Path, name: str) -> list[Row]:
    """A CSV's rows; cells that are numbers as such. [] where it was not made."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _value(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text and "e" not in text else number


def write_report(folder: Path) -> list[str]:
    """Pictures and README.md in `folder`, from the CSVs there; or the names of those that are missing."""
    tables = {path.stem: read(folder, path.stem) for path in folder.glob("*.csv")}
    drawings: dict[str, Callable[[], None]] = {
        "1_placement": lambda: figures.placement(folder, tables["1_placement"]),
        "2_scaling": lambda: figures.scaling(folder, tables["2_scaling"]),
        "3_micro_batches": lambda: figures.stragglers(folder, tables["3_micro_batches"]),
        "5_end_to_end": lambda: (
            figures.gains(folder, tables["5_end_to_end"]),
            figures.losses(folder, tables["5_end_to_end"]),
        )[0],
        "5_tail": lambda: figures.tail(folder, tables["5_tail"], tables["5_end_to_end"]),
        "6_pool_size": lambda: figures.pool_size(folder, tables["6_pool_size"]),
        "7_growth": lambda: figures.growth(folder, tables["7_growth"]),
        "7_bounded": lambda: figures.bounded(folder, tables["7_bounded"]),
        "sensitivity": lambda: figures.sensitivity(folder, tables["sensitivity"]),
    }
    missing = [name for name in [*drawings, "5_wlb", "6_tiles"] if not tables.get(name)]
    if missing:
        return missing
    for draw in drawings.values():
        draw()
    text = "\n".join(_text(tables)).rstrip() + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    return []


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return ["", *markdown(columns, [[str(cell) for cell in row] for row in rows]), ""]


def paper(name: str) -> float:
    return PUBLISHED[name].value


def one(rows: Rows, **wanted: Any) -> Row:
    (row,) = chosen(rows, **wanted)
    return row


def span(values: Sequence[float], digits: int = 2) -> str:
    """Least, median and most."""
    low, middle, high = (f"{x:.{digits}f}" for x in (min(values), float(np.median(values)), max(values)))
    return low if low == high else f"{middle} ({low} to {high})"


def say(text: str) -> list[str]:
    """A paragraph, or a list whose entries begin with "- ", at the width of the other documents."""
    lines = []
    for part in re.split(r"\n\s*(?=- )", text.strip()):
        indent = "  " if part.startswith("- ") else ""
        words = " ".join(part.split())
        lines += textwrap.wrap(words, 120, subsequent_indent=indent, break_on_hyphens=False)
    return [*lines, ""]


def picture(name: str, what: str) -> list[str]:
    return ["", f"![{what}]({name}.png)", ""]


# ---------------------------------------------------------------------------------------------------------- the parts


def _text(tables: dict[str, list[Row]]) -> list[str]:
    from benchmarks.paper import reality

    return [
        *_head(tables),
        *_placement(tables["1_placement"]),
        *_scaling(tables["2_scaling"]),
        *_micro_batches(tables["3_micro_batches"]),
        *_stragglers(tables["3_micro_batches"]),
        *_end_to_end(tables["5_end_to_end"], tables["5_tail"], tables["5_wlb"]),
        *_pool_size(tables["6_pool_size"], tables["6_tiles"]),
        *_growth(tables["7_growth"], tables["7_bounded"]),
        *_sensitivity(tables["sensitivity"]),
        *_claims(tables),
        "## Held to reality",
        "",
        *reality.section(),
        *_documents(tables["5_end_to_end"]),
        *_constants(),
    ]


def _head(tables: dict[str, list[Row]]) -> list[str]:
    rows = tables["5_end_to_end"]
    gains = {name: [row["gain"] for row in chosen(rows, policy=name)] for name in names_of(rows, "policy")}
    triton = chosen(tables["sensitivity"], changed="kernels: triton", against="ulysses-sorted")
    networks = []
    for tokens in TOKENS:
        by = {
            row["policy"]: row["efficiency"] for row in chosen(tables["7_bounded"], tokens=tokens, oversubscription=4)
        }
        networks.append(f"{by['libra:8'] / by['distca']:.2f} ({tokens})")
    return [
        "# Is it worth it?",
        "",
        *say("""What a training step takes under Libra and under other systems, by the cluster model of `libra simulate`
            (docs/simulate.md), and how that compares with what the Libra paper (arXiv 2607.23250) and others have
            published."""),
        *say("""**A model: no GPU was used.** All policies see the same sampled steps and run the same kernels,
            FlashAttention-3's published speed on H100, unless a row says otherwise. A gain is a ratio of efficiencies,
            each policy's modelled steps over the ideal split of the same documents, so that a policy that holds
            documents back is not paid for it. Made by `python -m benchmarks.paper`; every figure has its CSV beside it.
            Numbers of Qwen3-8B rest on 20 steps (section 5) or as many as the CSV's experiment says, 5 at least but for
            DP above 64; of the other models on 10."""),
        machine("numpy"),
        "",
        "## In short",
        "",
        *say(f"""- Against plain packing with Ulysses, Libra's steps are {span(gains["ulysses"])} times as fast on
            256 GPUs:
            median (least to most) over three models, two lengths, three corpora.
            - Most of that is order. Sequences of like cost in one micro-step (`ulysses-sorted`), which needs no pools,
            leave Libra {span(gains["ulysses-sorted"])} times as fast; the more micro-steps a step has, the less.
            - Against WLB-LLM it depends on what that is: {span(gains[WITHOUT_DELAY])} without its delay queues, each
            micro-step packed by itself (`{WITHOUT_DELAY}`); {span(gains["wlb-batch-sorted"])} packed over the whole
            batch
            with like bins together (`wlb-batch-sorted`); {span(gains[ASSUMED])} with delay queues (`{ASSUMED}`);
            {span(gains["wlb-batch-delay-sorted"])} with queues, the whole batch and order
            (`wlb-batch-delay-sorted`). The
            last is as fast as Libra, and trains on other documents at other times.
            - Against one global pool whose exchange a second micro-batch hides entirely (`distca`) it is
            {span(gains["distca"])} times as fast: on a network without oversubscription bounded pools gain nothing in
            time over such a pool, and hiding exchange under matrix products is what Libra could learn from it. Where
            bandwidth beyond 16 nodes is a quarter, pools of 8 are {" and ".join(networks)} times as fast.
            - All this is with equal kernels. With Triton's published speed for all, gains over `ulysses-sorted` are
            {" and ".join(f"{row['gain']:.2f} ({row['tokens']})" for row in triton)}. With FlashAttention-3 in the other
            systems and Triton here, Libra loses at 256K: `libra simulate` says by how much."""),
    ]


def _placement(rows: Rows) -> list[str]:
    cells = []
    for tokens in TOKENS:
        for corpus in names_of(rows, "corpus"):
            here = chosen(rows, tokens=tokens, corpus=corpus, **{"pool size": 8})
            value = {row["placement"]: row for row in here}
            cells.append([
                tokens, corpus,
                *("{:.4f} ({:.3f} to {:.3f})".format(*(max(value[n][k], 0.0) for k in ("imbalance", "p5", "p95")))
                  for n in ("as packed", "placed over the step", "lower bound", "like sequences together")),
            ])  # fmt: skip
        cells.append([
            tokens, "**the paper's**",
            *(f"**{paper(f'libra pool imbalance {n} {tokens}'):g}**" for n in ("before", "after")), "", "",
        ])  # fmt: skip
    return [
        "## 1. Imbalance between pools, before and after placement",
        *picture("1_placement", "Imbalance between pools by pool size"),
        "max/mean - 1 of the attention of pools of 8, 128 sequences in a step; mean (5th to 95th percentile of steps).",
        *table(
            ["tokens", "corpus", "as packed", "placed (VRSP)", "no placement can be below", "like sequences together"],
            cells,
        ),
        *say("""**Why they differ.** Where no sequence outweighs a pool the placement here is within 0.0001 of perfect,
            below the paper's 0.005 and 0.007: slots are improved pair by pair after the paper's longest-first. Where
            one
            sequence does, every placement is bound by that sequence and the seven lightest, and ours meets the
            bound; the
            rest is for larger pools, or for putting like sequences side by side, which the last column does within
            micro-steps of 32 sequences. Wikipedia has documents of 1.8 million tokens, cut to whole windows, among very
            short ones: one such window outweighs pools of any size here. What is "before" hangs on the corpus and on
            how
            many pools a step has; the paper's corpus is not public."""),
    ]


def _scaling(rows: Rows) -> list[str]:
    cells = []
    for tokens in TOKENS:
        for policy, theirs in (("ulysses", "ulysses"), ("libra-paper", "libra"), ("libra", None)):
            here = chosen(rows, tokens=tokens, policy=policy, dp=16)
            mine = one(here, model=MODEL, corpus=LOGNORMAL)["speedup"]
            every = [row["speedup"] for row in here]
            published = f"{paper(f'libra scaling {theirs} {tokens}'):.2f}" if theirs else ""
            whole = chosen(rows, tokens=tokens, policy=policy, dp=256, model=MODEL, corpus=LOGNORMAL)
            cells.append([
                tokens, policy, published, f"{mine:.2f}", span(every), f"{whole[0]['speedup']:.0f}" if whole else "",
            ])  # fmt: skip
    return [
        "## 2. Scaling of data parallelism",
        *picture("2_scaling", "Throughput by DP degree"),
        "Throughput at DP 16 over the same policy's at DP 1.",
        *table(["tokens", "policy", "paper", "here, 8B, lognormal", "here, all models and corpora", "DP 256"], cells),
        *say("""**Why they differ.** Ulysses loses what the heaviest of 16 sequences costs beyond the mean, so this
            is the
            corpus: the lognormal here has the paper's median and 99th percentile, and a tail of its own.
            `libra-paper` is
            the paper's placement and tile placer as re-implemented here; what it loses is exchange that its kernels
            do not
            hide. `libra` is as built here: like sequences in a micro-step, two levels of exchange."""),
    ]


def _micro_batches(rows: Rows) -> list[str]:
    cells = []
    for tokens in TOKENS:
        cells.append([
            tokens, "**the paper's**", f"**{paper(f'libra micro-batch before {tokens}'):g}**", "",
            f"**{paper(f'libra micro-batch after {tokens}'):g}**", "",
        ])  # fmt: skip
        for model, corpus in dict.fromkeys((row["model"], row["corpus"]) for row in rows):
            here = chosen(rows, tokens=tokens, model=model, corpus=corpus)
            value = {row["policy"]: row for row in here}
            cells.append([
                tokens, f"{model}, {corpus}",
                *(f"{value[n]['max over mean']:.2f}" for n in ("ulysses", "libra-paper:8", "libra-all:8", "libra:8")),
            ])  # fmt: skip
    return [
        "## 3. Micro-batches: forward time, the longest over the mean",
        "",
        "A layer's forward pass of every sequence (Ulysses) or pool (Libra), over all micro-steps of 10 steps.",
        *table(["tokens", "", "ulysses", "libra-paper:8", "libra-all:8", "libra:8"], cells),
        *say("""**Why they differ.** The maximum of a sample grows with the sample: here it is over 640 sequences,
            how many
            the paper took is not known, and its 23.1 needs a heavier tail than any but wikipedia's here. Products of
            matrices, which are alike for all, are in these times; with attention alone the ratios are larger. Libra as
            built (`libra:8`) makes micro-steps unlike each other on purpose: without a pipeline only what runs side by
            side has to be alike. `libra-all:8` is for pipelines and evens out all of a step; what is left are steps
            that
            differ, and sequences that outweigh a pool."""),
    ]


def _stragglers(rows: Rows) -> list[str]:
    cells = []
    for tokens in TOKENS:
        for policy in names_of(rows, "policy"):
            mine = one(rows, tokens=tokens, policy=policy, model=MODEL, corpus=LOGNORMAL)
            others = [row["straggler over mean"] for row in chosen(rows, tokens=tokens, policy=policy)]
            cells.append([
                tokens, policy, f"{mine['straggler ms']:.1f}", f"{mine['straggler over mean']:.2f}",
                f"{mine['p95']:.2f}", span(others),
            ])  # fmt: skip
    return [
        "## 4. Stragglers",
        *picture("4_stragglers", "Slowest rank over an even split"),
        *say("""The slowest rank of a micro-step, one layer's forward attention with its exchange, DP 16, Qwen3-8B,
            lognormal; over what an even split of the kernels would take; the 95th percentile of that over micro-steps;
            and the mean over all models and corpora."""),
        *table(["tokens", "policy", "ms", "over even", "95% of micro-steps", "all models and corpora"], cells),
        *say("""The paper shows Libra below Ulysses, WLB-LLM and DistCA here, in a figure whose numbers we do not
            have. So
            it is here against the first two without delay queues. DistCA's global pool is about as even inside, and
            with
            all of its exchange hidden beside a second micro-batch it is ahead where attention is light and exchange is
            what is left. Corpora of short documents have little attention, of which latencies and exchange are a large
            share: that is what "over even" shows for them."""),
    ]


def _end_to_end(rows: Rows, tail: Rows, wlb: Rows) -> list[str]:
    cells = []
    for policy in names_of(rows, "policy"):
        if policy == "libra:8":
            continue
        by = [[row["gain"] for row in chosen(rows, policy=policy, tokens=tokens)] for tokens in TOKENS]
        whole = [row["gain"] for row in chosen(rows, policy=policy)]
        cells.append([policy, *(span(each) for each in by), f"{np.mean(whole):.2f}"])
    detail = []
    for tokens in TOKENS:
        for model in MODEL_NAMES:
            for corpus in names_of(rows, "corpus"):
                here = {row["policy"]: row for row in chosen(rows, tokens=tokens, model=model, corpus=corpus)}
                detail.append([
                    tokens, model, corpus, f"{100 * here['libra:8']['efficiency']:.1f}",
                    f"{100 * here['libra:8']['mfu']:.1f}", f"{here['libra:8']['memory']:.0f}",
                    *(f"{here[name]['gain']:.2f}" for name in ("ulysses", "ulysses-sorted", *WLB, "distca")),
                ])  # fmt: skip
    changes = []
    for tokens in TOKENS:
        for change in names_of(chosen(tail, tokens=tokens), "change"):
            here = {row["policy"]: row for row in chosen(tail, tokens=tokens, change=change)}
            changes.append([
                tokens, change, f"{here['ulysses']['heaviest']:.1f}",
                *(f"{here[name]['gain']:.2f}" for name in ("ulysses", "ulysses-sorted", *WLB, "distca")),
            ])  # fmt: skip
    settings = []
    for row in wlb:
        came, left = row["tokens from other steps"], row["tokens left out"]
        share = f"{100 * came / max(came + left, 1):.0f}"
        gain = f"{row['gain']:.2f}"
        settings.append([row["tokens"], row["cap"], row["thresholds"], gain, f"{row['memory']:.0f}", share])
    short = ["ulysses", "ulysses-sorted", *(name.removeprefix("wlb-") for name in WLB), "distca"]
    return [
        "## 5. End to end on 256 GPUs",
        *picture("5_gains", "Gain of Libra over every policy"),
        "Times as fast: Libra with pools of 8, as built. Median (least to most) over three models and three corpora.",
        *table(["over", *TOKENS, "mean of all"], cells),
        *say(f"""The paper: +44% over WLB-LLM on average, up to +68%. It leaves the delay queues out, as DistCA does,
            since
            they change what a step trains on: that is `{WITHOUT_DELAY}` here, or, if its packing sees the whole global
            batch, `wlb-batch-shuffled`; with bins in order of cost besides, `wlb-batch-sorted`. The paper's gain lies
            between these. The names: micro or batch is what is packed together; delay, with outlier queues; shuffled or
            sorted, which bins share a micro-step."""),
        *table(["tokens", "model", "corpus", "Libra % of ideal", "MFU %", "GiB", *short], detail),
        *say("""GiB are the formula's, with layers that keep attention's results: Qwen3-235B at these shapes (cp 8
            and 16)
            does not fit 79.1 GiB. At 256K it does with cp 16 (71.9 GiB, compiled); 1M needs full recomputation as well.
            Its rows compare policies, and are no advice."""),
        *picture("5_losses", "What a step is made of"),
        "### What it hangs on",
        *picture("5_tail", "Gain by the longest document"),
        "Qwen3-8B, lognormal corpus, documents cut to a length; and ranks that meet once a step, not in every layer.",
        *table(["tokens", "change", "heaviest/mean", *short], changes),
        f"WLB-LLM's own settings (`{ASSUMED}`): token cap and thresholds, both in windows.",
        *table(["tokens", "cap", "thresholds", "Libra's gain", "GiB", "of moved tokens, % that came"], settings),
    ]


def _pool_size(rows: Rows, tiles: Rows) -> list[str]:
    cells = []
    for tokens in TOKENS:
        for size in names_of(rows, "pool size"):
            here = {
                row["exchange"]: row
                for row in chosen(rows, tokens=tokens, corpus=LOGNORMAL, **{"pool size": size})
            }  # fmt: skip
            cells.append([
                tokens, size,
                *(f"{100 * here[n]['efficiency']:.1f}" for n in ("two levels", "one level", "strided over nodes")),
                f"{here['two levels']['bytes over ulysses']:.2f}",
                *(f"{here[n]['across over ulysses']:.2f}" for n in ("two levels", "one level", "strided over nodes")),
                f"{here['two levels']['planning ms']:.0f}",
            ])  # fmt: skip
    shapes = [
        [row["tokens"], row["tile"], f"{row['rank_imbalance']:.3f}", f"{row['bytes over ulysses']:.2f}",
         f"{100 * row['lost to exposed exchange']:.1f}", f"{100 * row['efficiency']:.1f}"]
        for row in tiles
    ]  # fmt: skip
    return [
        "## 6. Pool size, mapping to nodes, and tile shapes",
        *picture("6_pool_size", "Pool size and exchange"),
        "Qwen3-8B, lognormal, DP 32. Busiest rank's bytes of a layer, both passes, over Ulysses'; of these,",
        "between nodes.",
        *table(
            ["tokens", "pool", "% of ideal: two levels", "one level", "strided", "bytes", "between nodes: two levels",
             "one level", "strided", "planning ms a micro-step"],
            cells,
        ),
        *say("""Strided: a sequence's ranks lie on different nodes. What stayed inside a node then crosses, with any
            pool size: CP groups belong inside nodes. Two levels send fewer bytes between nodes, most at 1M. At 256K
            they cost more than that gives: what relays pass on is a second collective, and comes a wave later."""),
        "The paper's placer with tiles of other lengths, by one kv head, DP 16, pools of 8:",
        *table(["tokens", "tile", "max/mean ranks", "busiest bytes", "exposed, %", "% of ideal"], shapes),
    ]  # fmt: skip


def _growth(rows: Rows, bounded: Rows) -> list[str]:
    def cell(row: Row, name: str, digits: int) -> str:
        return "" if row[name] == "" else f"{row[name]:.{digits}f}"

    names = {
        "across GB": 3,
        "busiest GB": 3,
        "beyond pods GB": 3,
        "peers": 0,
        "planning s a pool": 2,
        "planning s": 1,
        "tables MB a rank": 1,
    }
    cells = [[row["policy"], row["dp"], *(cell(row, name, digits) for name, digits in names.items())] for row in rows]
    nets = []
    for tokens in TOKENS:
        for over in names_of(bounded, "oversubscription"):
            here = chosen(bounded, tokens=tokens, oversubscription=over)
            nets.append([tokens, over, here[0]["pod nodes"], *(f"{100 * row['efficiency']:.1f}" for row in here)])
    policies = names_of(bounded, "policy")
    planning = [
        [tokens, *(f"{one(bounded, tokens=tokens, oversubscription=1, policy=p)['planning ms']:.0f}" for p in policies)]
        for tokens in TOKENS
    ]
    return [
        "## 7. Exchange per rank while data parallelism grows",
        *picture("7_growth", "Bytes and planning time by DP degree"),
        *say("""One micro-step, 256K tokens, 8 GPUs to a sequence. libra: pools of 8. libra-global: one pool of all,
            same
            planner, two levels. distca: one pool of all, its greedy, a node a server. GB of the busiest rank, a layer,
            both passes."""),
        *table(
            ["policy", "DP", "between nodes", "all of it", "beyond pods of 32 nodes", "nodes it talks to, at most",
             "planning a pool, s", "all pools, s", "plan tables, MB a rank"],
            cells,
        ),
        *say("""**Why this differs.** Bytes are flat for Libra to DP 4,096, as the paper says. They are flat for a
            global
            pool as well, if its planner is any good: a sequence that is too heavy is shared among as many servers as
            its
            work needs, however many there are. What grows with a global pool is the share of its bytes that leaves a
            pod
            (all of them at DP 256), the time to plan it (each pool of 8 takes as long at DP 4,096 as at 16, and
            hosts plan
            their own), and the tables of a plan. DistCA's greedy as re-implemented here needs 20 s at DP 1,024; at
            4,096
            it would keep 34 GB of booleans, and was not run."""),
        "### Bounded pools or one pool: by network",
        *picture("7_bounded", "Efficiency by oversubscription"),
        *say("""Qwen3-8B, lognormal, DP 64 (64 nodes at 256K, 128 at 1M). Steps, % of the ideal, with bandwidth beyond a
            pod divided by the oversubscription:"""),
        *table(["tokens", "oversubscription", "pod, nodes", *policies], nets),
        "Planning a micro-step, processor milliseconds:",
        *table(["tokens", *policies], planning),
    ]  # fmt: skip


def _sensitivity(rows: Rows) -> list[str]:
    against = names_of(rows, "against")
    cells = [
        [tokens, changed, *(f"{one(rows, tokens=tokens, changed=changed, against=o)['gain']:.2f}" for o in against)]
        for tokens in TOKENS
        for changed in names_of(chosen(rows, tokens=tokens), "changed")
    ]

    def gain(changed: str) -> str:
        found = (one(rows, tokens=tokens, changed=changed, against="ulysses-sorted")["gain"] for tokens in TOKENS)
        return " and ".join(f"{value:.2f} ({tokens})" for tokens, value in zip(TOKENS, found, strict=True))

    return [
        "## Sensitivity",
        *picture("sensitivity", "Gain with each constant changed"),
        *say(f"""Libra's gain, Qwen3-8B, lognormal, 256 GPUs, with one thing changed. No constant was chosen for a
            result. What it gains over sorted sequences hangs on how many there are to sort: with half the micro-steps
            {gain("half the micro-steps")}, with twice as many {gain("twice the micro-steps")}. Over packing that no one
            sorted it hangs on whether ranks meet in every layer or once a step. No speed of kernels, products or wires,
            doubled or halved, moves a gain by more than a fifth."""),
        *table(["tokens", "changed", *(f"over {name}" for name in against)], cells),
    ]


def _claims(tables: dict[str, list[Row]]) -> list[str]:
    """What a throw-away model had found, and what this one says."""
    rows, tail, bounded = tables["5_end_to_end"], tables["5_tail"], tables["7_bounded"]
    mine = chosen(rows, model=MODEL, corpus=LOGNORMAL)
    wlb = [row["gain"] for row in mine if row["policy"] in WLB]
    by_corpus = [
        row["gain"] for row in chosen(rows, model=MODEL, policy=WITHOUT_DELAY) if row["tokens"] == "256K"
    ]  # fmt: skip
    meets = [
        f"{one(mine, tokens=t, policy=WITHOUT_DELAY)['gain']:.2f} to "
        f"{one(tail, tokens=t, policy=WITHOUT_DELAY, change='sync step')['gain']:.2f} ({t})"
        for t in TOKENS
    ]  # fmt: skip
    fifth = chosen(tail, tokens="1M", change=f"longest {TOKENS['1M'] // 5}")
    short = {row["policy"]: row["gain"] for row in fifth}
    near = []
    for tokens in TOKENS:
        for over in names_of(bounded, "oversubscription"):
            here = {row["policy"]: row["efficiency"] for row in chosen(bounded, tokens=tokens, oversubscription=over)}
            best = max(here["libra:8"], here["libra:16"])
            near.append(f"{best / here['libra:64']:.2f} ({tokens}, {over}x)")
    return [
        "## What an earlier, throw-away model had found",
        *table(
            ["it said", "this model"],
            [
                [
                    "the gain over WLB-LLM hangs first on how it is set up, from 2.3x to 1.05x",
                    f"confirmed: {max(wlb):.2f}x to {min(wlb):.2f}x over its six set-ups (8B, lognormal, both lengths)",
                ],
                [
                    "then on the tail of the corpus",
                    f"confirmed: {span(by_corpus)} over three corpora at 256K ({WITHOUT_DELAY}), and section 5's cuts",
                ],
                [
                    "then on whether ranks meet in every layer or once a step",
                    f"over {WITHOUT_DELAY}, from every layer to once a step: {'; '.join(meets)}",
                ],
                [
                    "with short documents only (a fifth of the window at 1M) nothing is gained",
                    f"over plain Ulysses still {short['ulysses']:.2f}x, over ulysses-sorted "
                    f"{short['ulysses-sorted']:.2f}x; over {WITHOUT_DELAY} {short[WITHOUT_DELAY]:.2f}x, which is "
                    "exchange: packing alone is even by then",
                ],
                [
                    "a global pool with two levels comes within 9% of bounded pools, "
                    "unless the network is oversubscribed",
                    f"bounded over global, same planner: {', '.join(near)}",
                ],
            ],
        ),
        *say("""So the case for bounded pools is not the time of a step on a network that gives all nodes full
            bandwidth. It is oversubscribed networks, planning that does not grow with the cluster, and plans, tables
            and programs of one size."""),
    ]


def _documents(rows: Rows) -> list[str]:
    cells = []
    for name in names_of(rows, "policy"):
        each = names.known(name)
        here = one(rows, policy=name, model=MODEL, tokens="256K", corpus=LOGNORMAL)
        moved = here["documents left out"] + here["documents from other steps"]
        what = "none" if moved == 0 else f"{here['documents left out']:,} of {here['documents']:,} went to later steps"
        cells.append([f"`{name}`", each.about, each.source, each.limits, what])
    return [
        "## The policies, and what they do to a step's documents",
        "",
        "Qwen3-8B, 256K, lognormal: documents of 20 steps that were trained on in another step than the loader's.",
        *table(["policy", "what it does", "source", "known limits", "documents moved"], cells),
    ]


def _constants() -> list[str]:
    cells = [[each.name, f"{each.value:g}", each.unit, each.source] for each in constants("H100").values()]
    speeds = []
    for name in KERNELS:
        model, source = kernel(name, constants("H100"))
        rate = 4 * model.block**2 * model.head_dim * model.group / 1e12
        speeds.append([
            name, f"{rate / model.page_seconds:.0f}", f"{2.5 * rate / model.backward_page_seconds:.0f}",
            f"{model.block_seconds / model.page_seconds:.2f}",
            f"{model.backward_block_seconds / model.backward_page_seconds:.2f}", source,
        ])  # fmt: skip
    return [
        "## Constants",
        *table(["name", "value", "unit", "source"], cells),
        "Kernels: TFLOP/s on whole pages, and what a block costs besides, in pages.",
        *table(["kernel", "forward", "backward", "block, forward", "block, backward", "source"], speeds),
    ]
