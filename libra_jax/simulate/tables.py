"""What `libra simulate` prints: tables of outcomes, losses, constants and policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature

from rich import box
from rich.table import Table

from libra_jax.policies import names
from libra_jax.policies.packed import disaggregated, libra
from libra_jax.policies.wlb import WLB
from libra_jax.simulate.constants import KERNEL_COLUMNS, Constants, kernel_rows
from libra_jax.simulate.step import Setting
from libra_jax.simulate.study import Outcome, Spread


def numbers_table(outcomes: Sequence[Outcome], setting: Setting, title: str, pick: Callable[[Spread], float]) -> Table:
    """A row for each policy. pick: which of mean, 5th and 95th percentile."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=title)
    table.add_column("policy", no_wrap=True)
    for name in ("step s", "tok/s/GPU", "MFU %", "pools", "ranks", "micro-steps", "bytes", "across", "GiB"):
        table.add_column(name, justify="right")
    for each in outcomes:
        numbers = {name: pick(spread) for name, spread in each.numbers(setting).items()}
        ulysses = numbers["ulysses_bytes"]
        table.add_row(
            each.policy,
            f"{numbers['step']:.4g}",
            f"{numbers['tokens per gpu second']:.0f}",
            f"{100 * numbers['mfu']:.1f}",
            *(f"{numbers[name]:.2f}" for name in ("pool_imbalance", "rank_imbalance", "micro_step_imbalance")),
            *(f"{numbers[name] / ulysses:.2f}" if ulysses else "-" for name in ("busiest_bytes", "across_bytes")),
            f"{each.memory:.1f}",
        )
    return table


def losses_table(outcomes: Sequence[Outcome]) -> Table:
    """Shares of all steps' time; with the ideal they add up to 100."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Where the time goes, %")
    table.add_column("policy", no_wrap=True)
    for name in ("ideal", *outcomes[0].losses):
        table.add_column(name, justify="right", overflow="fold")
    for each in outcomes:
        shares = [each.efficiency, *each.losses.values()]
        table.add_row(each.policy, *(f"{100 * share:.1f}" for share in shares))
    return table


def changed_sentence(each: Outcome) -> str:
    """What a policy does to the steps' documents."""
    left, tokens, came, came_tokens = each.changed
    return (
        f"{each.policy} changes what steps train on: of {each.documents:,} documents {left:,} ({tokens:,} tokens) went "
        f"to later steps, {came:,} ({came_tokens:,} tokens) came from earlier ones; at the end {each.waiting:,} wait"
    )


def constants_table(table: Constants) -> Table:
    """Every constant with its source."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Constants")
    for name in ("name", "value", "unit", "source"):
        shown.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    for each in table.values():
        shown.add_row(each.name, f"{each.value:g}", each.unit, each.source)
    return shown


def kernels_table(table: Constants) -> Table:
    """Speeds of kernels with their sources."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Kernels: TFLOP/s, and a block of queries in pages")
    for name in KERNEL_COLUMNS:
        shown.add_column(name, justify="left" if name in ("kernel", "source") else "right", overflow="fold")
    for row in kernel_rows(table):
        shown.add_row(*row)
    return shown


def settings_sentence() -> str:
    """What policies are run with where nothing else is said."""
    ours, theirs, wlb = (signature(each).parameters for each in (libra, disaggregated, WLB))
    thresholds = " and ".join(f"{each:.2f}" for each in wlb["thresholds"].default)
    return (
        f"settings: Libra's tolerance {ours['tolerance'].default:g}, {ours['waves'].default} waves, two levels of "
        f"exchange; DistCA's tolerance {theirs['tolerance'].default:g}; WLB-LLM's token "
        f"cap {wlb['cap'].default:g} windows, thresholds {thresholds} of a window"
    )


def policies_table() -> Table:
    """Every policy with its source and its limits."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Policies")
    for name in ("name", "what it does", "source", "known limits", "keeps a step's documents"):
        shown.add_column(name, overflow="fold")
    for name in [*names.POLICIES, *names.SIZED]:
        each = names.known(name)
        shown.add_row(name, each.about, each.source, each.limits, "yes" if each.keeps else "no")
    return shown
