"""Every policy that is a plan, on whatever devices JAX sees: first whether results are right, then what takes how long.

The attention operator, forward and with its backward pass, and the trainer's whole step run under each policy of
`libra_jax.policies.plans.PLANS`, all on the same sequences, in turn: on virtual CPU devices, the GPUs of one node, or
those of many nodes. `mesh_report.LEGEND` says what each column means; docs/mesh.md has the commands.

    python -m benchmarks.mesh --cpu-devices 8                      on a machine without a GPU
    python -m benchmarks.mesh                                      on the GPUs of one node
    srun python -m benchmarks.mesh --multihost slurm               on many nodes

Exit status 0: all went well. 1: a result is wrong, and nothing was timed. 2: it could not start.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console

from benchmarks import mesh_report as report
from benchmarks import mesh_runs as runs
from benchmarks.mesh_case import Case, Options, make_case, model_name
from benchmarks.reporting import machine
from libra_jax.links import Links
from libra_jax.modelled import counted_seconds, plan_counts

Row = dict[str, Any]


def main(options: Options) -> int:
    began = time.monotonic()
    try:
        case = make_case(options)
    except (ValueError, OSError) as error:
        print(f"benchmarks.mesh: {error}", file=sys.stderr)
        return 2
    first = jax.process_index() == 0
    console = Console(highlight=False, width=max(Console().width, 190), quiet=not first)
    about = describe(options, case)
    console.print(about, soft_wrap=True)
    bench = Bench(options, case, console)
    correct, planned = bench.check()
    failed = [row["policy"] for row in correct if not row["ok"]]
    rows = [] if failed else bench.time(planned)
    notes = [] if failed else report.notes(planned, case.platform)
    for title, lines in report.tables(correct, rows).items():
        report.show(console, title, lines)
    if failed:
        console.print(f"WRONG: {', '.join(failed)}. Nothing was timed.", style="bold red")
    console.print("\n".join(notes), soft_wrap=True)
    if first:
        found = {
            "machine": machine("jax", "numpy"),
            "about": about,
            "minutes": (time.monotonic() - began) / 60,
            "options": dataclasses.asdict(options),
            "mesh": {name: getattr(case.config.mesh, name) for name in ("pools", "pool_size", "cp")},
            "platform": case.platform,
            "base": case.base,
            "correct": correct,
            "rows": rows,
            "notes": notes,
        }
        legend = report.LEGEND.format(
            base=case.base,
            rounding=runs.ROUNDING[case.config.spec.dtype],
            check=case.check_spec.seq_len,
            rounds=options.rounds,
        )
        report.write(found, legend, options.json, options.report)
    return 1 if failed else 0


class Bench:
    """A run, and the programs that were compiled for it."""

    def __init__(self, options: Options, case: Case, console: Console) -> None:
        self.options, self.case, self.console = options, case, console
        self.how = runs.How(options.implementation, options.transport)
        self.operators = runs.Operators(case.mesh, self.how)
        self.trainer: runs.Trainer | None = None
        self.inputs: list[Any] = []

    def check(self) -> tuple[list[Row], dict[str, runs.Planned]]:
        """A row for each policy: whether its results are right. And the plans of the steps to time."""
        case, seed = self.case, self.options.seed
        try:
            small_plans, planned = self._plans()
        except runs.NoPlan as error:
            name, reason = error.args
            return [{"policy": name, "ok": False, "why": [f"no plan: {reason}"]}], {}
        lengths = [sequence for pool in case.check_step for sequence in pool]
        host = runs.host_inputs(case.check_spec, len(lengths), seed)
        arrays = [runs.place(x, case.mesh, runs.SEQUENCE_SPEC) for x in host]
        reference, small_bits, bits = runs.Reference(host, lengths, case.mesh), runs.SameBits(), runs.SameBits()
        self.inputs = runs.device_inputs(case.config.spec, len(lengths), seed, case.mesh)
        if "step" in self.options.passes:
            self.trainer = runs.Trainer(case.config, case.mesh, case.steps, seed)
        rows: list[Row] = []
        for name, policy in planned.items():
            self._say(f"checking {name}")
            small = small_plans[name]
            row: Row = {"policy": name}
            plans = runs.place_tables(runs.tables_of(small, 0), case.mesh)
            results = self.operators[small.spec].run("both", *arrays, plans)
            row |= {**reference.errors(results), "bits": small_bits.differ(results)}
            tables = runs.tables_of(policy, 0)
            results = self.operators[policy.spec].run("both", *self.inputs, runs.place_tables(tables, case.mesh))
            row |= {"full_bits": bits.differ(results), "fallback": policy.fallback or small.fallback}
            del results
            if self.trainer is not None:
                row |= runs.first_losses(self.trainer, policy, tables)
            row["why"] = wrong(row, rows[0] if rows else row, case.config.spec.dtype)
            rows.append(row | {"ok": not row["why"]})
        return rows, planned

    def _plans(self) -> tuple[dict[str, runs.Planned], dict[str, runs.Planned]]:
        """Of the check, and of the steps to time. Where sequences are of one length they share programs."""
        case, room = self.case, self.options.room
        if case.check_spec != case.config.spec:
            small = runs.plan_steps([case.check_step], case.check_spec, case.policies, room)
            return small, runs.plan_steps(case.steps, case.config.spec, case.policies, room)
        together = runs.plan_steps([case.check_step, *case.steps], case.check_spec, case.policies, room)
        small, large = (
            {
                name: dataclasses.replace(policy, steps=policy.steps[part], lacks=policy.lacks[part])
                for name, policy in together.items()
            }
            for part in (slice(0, 1), slice(1, None))
        )
        return small, large

    def time(self, planned: Mapping[str, runs.Planned]) -> list[Row]:
        """A row for each policy: how long everything takes, and what its plans say."""
        base, steps = self.case.base, self.case.steps
        seconds: dict[str, dict[str, list[float]]] = {}
        for which in self.options.passes:
            self._say(f"timing {report.PASSES[which]}")
            if which == "step":
                assert self.trainer is not None
                self.trainer.begin()
            seconds[which] = runs.in_turn(self._calls(which, planned), self.options.rounds)
        self._say("timing kernels of each rank")
        busy = runs.busy_seconds(planned, self.case.mesh, self.how, self.options.rounds)
        modelled = {name: self._modelled(policy) for name, policy in planned.items()}
        tokens = sum(sum(sequence) for step in steps for pool in step for sequence in pool) / len(steps)
        last = "step" if "step" in seconds else self.options.passes[-1]
        rows = []
        for name, policy in planned.items():
            stats = [[plan.stats for plan in step] for step in policy.steps]
            sent = np.array([np.concatenate([s.sent_bytes for s in step]) for step in stats])
            row: Row = {"policy": name}
            for which, found in seconds.items():
                ratios = np.array(found[name]) / np.array(found[base])
                row[which] = {"seconds": found[name], "over_base": float(np.median(ratios))}
            row |= {
                "tokens_per_second": tokens / float(np.median(seconds[last][name])),
                "imbalance": float(np.mean([max(s.imbalance for s in step) for step in stats])),
                "busy_seconds": busy[name].tolist(),
                "busy_most": float(busy[name].max(axis=1).mean()),
                "busy_imbalance": float((busy[name].max(axis=1) / busy[name].mean(axis=1)).mean()),
                "pages": [np.concatenate([s.work for s in step]).tolist() for step in stats],
                "sent_most_bytes": float(sent.max(axis=1).mean()),
                "sent_mean_bytes": float(sent.mean()),
                "ulysses_bytes": stats[0][0].ulysses_bytes,
                "modelled_seconds": modelled[name],
                "modelled_over_base": modelled[name] / modelled[base],
                "lack": policy.lack,
            }
            rows.append(row)
        return rows

    def _calls(self, which: str, planned: Mapping[str, runs.Planned]) -> dict[str, list[runs.Call]]:
        def call(policy: runs.Planned, step: int) -> runs.Call:
            tables = runs.tables_of(policy, step)
            if which == "step" and self.trainer is not None:
                return self.trainer.call(policy, step, tables)
            operator, plans = self.operators[policy.spec], runs.place_tables(tables, self.case.mesh)
            return lambda: operator.run(which, *self.inputs, plans)

        return {name: [call(policy, i) for i in range(len(policy.steps))] for name, policy in planned.items()}

    def _modelled(self, policy: runs.Planned) -> float:
        """Seconds of a layer's attention, of the slowest pool, forward and backward; mean of the steps. Documents and
        blocks are as long as before they were divided: at a few thousand tokens all plans are latency."""
        spec, longer = policy.spec, max(round(self.case.shrink), 1)
        spec = dataclasses.replace(spec, seq_len=spec.seq_len * longer, block=spec.block * longer)
        links = Links(ranks_per_node=self.options.gpus_per_node)
        each = [
            max(counted_seconds(plan_counts(plan.tables), spec, self.case.cost, links).total for plan in step)
            for step in policy.steps
        ]
        return float(np.mean(each))

    def _say(self, line: str) -> None:
        self.console.print(f"  {line}", style="dim")


def wrong(row: Row, first: Row, dtype: str) -> list[str]:
    """What is not as it has to be, in words."""
    found = []
    for name in runs.NAMES:
        if not row[name] <= runs.ROUNDING[dtype]:  # NaN too
            found.append(f"{name}: error {row[name]:.1e}, allowed {runs.ROUNDING[dtype]:g}")
    for name, where in (("bits", "in the check"), ("full_bits", "at full size")):
        if row[name]:
            found.append(f"{row[name]} entries of output and dq differ from {first['policy']}'s {where}")
    if row["fallback"]:
        found.append(f"it fell back to the head-parallel plan: {row['fallback']}")
    if "losses" in row:
        for number, (loss, other) in enumerate(zip(row["losses"], first["losses"], strict=True), 1):
            if not abs(loss - other) <= runs.LOSS_ROUNDING[dtype] * abs(other):
                found.append(f"loss of step {number}: {loss:.7g}, {first['policy']}'s {other:.7g}")
        if not row["finite"]:
            found.append("weights are not finite, or an update was skipped")
    return found


def describe(options: Options, case: Case) -> str:
    """Devices, shapes and documents, in one paragraph."""
    device, spec, config = case.mesh.devices.flat[0], case.config.spec, case.config
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    divided = f", lengths divided by {case.shrink:g}" if case.shrink != 1 else ""
    return (
        f"{case.mesh.size} devices ({device.device_kind}){processes}: {config.mesh.in_words}. Sequences of "
        f"{spec.seq_len} tokens, {options.corpus}{divided}. Heads {spec.num_heads}/{spec.num_kv_heads} of "
        f"{spec.head_dim}, block {spec.block}, {spec.dtype}, {spec.waves} waves, room {options.room}. Training step: "
        f"{model_name(options, device.platform)}, {config.model.num_layers} of its layers."
    )


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
