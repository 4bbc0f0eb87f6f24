"""What one optimizer step takes, and what it loses to the ideal split.

Takes a `StepPlan` of any policy. A layer is its attention (`attention.group_seconds`) and its matrix products, priced
by tokens; layers are gathered and their gradients summed by FSDP; stages of a pipeline are followed tick by tick
(`pipeline_events`). Where ranks meet in every layer (`sync="layer"`, FSDP) a micro-step takes as long as its slowest
group, pass by pass; where they meet once a step (`sync="step"`, replicated weights) groups that are behind in one
micro-step may catch up in another.

Letters: M micro-steps, G groups side by side, S stages.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from libra_jax.memory import attention_bytes
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.policies.base import Group, RunShape, Sequences, StepPlan
from libra_jax.simulate.attention import GroupSeconds, Network, group_seconds
from libra_jax.simulate.constants import Constants, links
from libra_jax.simulate.pipeline_events import follow
from libra_jax.train.flops import model_flops
from libra_jax.train.pipeline import kept_inputs
from libra_jax.workload import CostModel, causal_pairs

Sync = Literal["layer", "step"]
LOSSES = ("padding", "kernels", "between pools", "within pools", "exposed exchange", "gathers", "bubble")
"""What a step loses to the ideal, in the order in which it is taken apart; each is what the step takes longer when this
is counted too."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model on a cluster. run.dp * run.cp * pp GPUs."""

    model: Qwen3Config
    run: RunShape
    table: Constants
    cost: CostModel
    network: Network
    pp: int = 1
    sync: Sync = "layer"

    def __post_init__(self) -> None:
        if self.pp < 1 or self.model.num_layers % self.pp:
            raise ValueError(f"pp ({self.pp}) must divide the model's layers ({self.model.num_layers})")
        shape, run = self.model, self.run
        heads, given = (shape.num_heads, shape.num_kv_heads), (run.num_heads, run.num_kv_heads)
        if heads != given or shape.head_dim != run.head_dim:
            raise ValueError(f"the run's heads {given} x {run.head_dim} are not the model's {heads} x {shape.head_dim}")

    @classmethod
    def of(
        cls,
        model: Qwen3Config,
        table: Constants,
        cost: CostModel,
        seq_len: int,
        dp: int,
        cp: int,
        micro_steps: int,
        *,
        pp: int = 1,
        sync: Sync = "layer",
        strided: bool = False,
    ) -> Setting:
        """From the model and the table of constants, which say the rest. strided: see `Network`."""
        run = RunShape(
            seq_len, dp, cp, micro_steps, model.num_heads, model.num_kv_heads, model.head_dim,
            cost=cost, links=links(table), token_seconds=sum(token_seconds(model, table)),
        )  # fmt: skip
        network = Network(run.links, int(table["pod_nodes"].value), table["oversubscription"].value, strided)
        return cls(model, run, table, cost, network, pp, sync)

    @property
    def gpus(self) -> int:
        return self.run.ranks * self.pp


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One step, modelled. Seconds, unless a name says otherwise.

    step: all of it. ideal: the documents' pairs at the kernel's best rate and their tokens' products, spread evenly
    over all GPUs; what is done again in the backward pass counts, and with stages a second forward pass; nothing else.
    losses: by name of `LOSSES`; they add up to step - ideal.
    pool_imbalance: attention work of the heaviest group over the mean of its micro-step, by rank. rank_imbalance: of
    the busiest rank's kernels over the mean of all. micro_step_imbalance: the longest micro-step's forward attention
    over the mean. Each is 1 at best, and a mean over micro-steps but for the last.
    busiest_bytes, ulysses_bytes: the busiest rank's of a layer and micro-step, sent or received, both passes; and what
    a rank moves by Ulysses. across_bytes: of the busiest, between nodes.
    memory: GiB of the fullest rank. planning: processor time. heaviest: the costliest sequence's attention over the
    mean.
    """

    step: float
    ideal: float
    losses: dict[str, float]
    tokens: int
    flops: float
    pool_imbalance: float
    rank_imbalance: float
    micro_step_imbalance: float
    busiest_bytes: float
    ulysses_bytes: float
    across_bytes: float
    memory: float
    planning: float
    micro_steps: int
    fill: float
    heaviest: float

    def numbers(self, gpus: int, peak: float) -> dict[str, float]:
        """One number under each name, for tables and JSON; rates and shares worked out."""
        values: dict[str, Any] = dataclasses.asdict(self)
        losses = values.pop("losses")
        values["tokens per gpu second"] = self.tokens / self.step / gpus
        values["mfu"] = self.flops / self.step / gpus / peak
        values["efficiency"] = self.ideal / self.step
        return values | {f"lost to {name}": seconds / self.step for name, seconds in losses.items()}


def simulate_step(plan: StepPlan, setting: Setting) -> StepResult:
    """Prices a step. Raises ValueError where it has nothing to do, where more ranks are asked for than the run has, or,
    with sync="step" or several stages, where micro-steps have groups of different ranks."""
    if not any(plan.micro_steps):
        raise ValueError("a step needs at least one micro-step with a group of ranks, and this one has none")
    products = token_seconds(setting.model, setting.table)
    found = [
        [group_seconds(group, setting.cost, setting.network, products) for group in groups]
        for groups in plan.micro_steps
    ]
    layers = _Layers(plan, found, setting)
    values = [layers.mean(layers.pure, real=True), layers.mean(layers.pure), layers.mean(layers.even)]
    values += [layers.total(layers.even), layers.total(layers.slowest), layers.total(layers.attention)]
    gathers = layers.gathers()
    values.append(values[-1] + gathers)
    end = layers.end() + gathers
    values.append(max(end, values[-1]))
    documents = [group.documents for groups in plan.micro_steps for group in groups]
    tokens = sum(map(sum, documents))
    forward = np.array([max((each.attention[0] for each in groups), default=0.0) for groups in found])
    run, row = setting.run, setting.run.spec(1)
    memory = memory_gib(plan, setting)
    if not np.isfinite([*values, memory]).all():
        raise ValueError(
            f"a step of {values[-1]:g} s and {memory:g} GiB is no result: a constant or a kernel's price is too large"
        )
    return StepResult(
        step=values[-1],
        ideal=values[0],
        losses=dict(zip(LOSSES, np.diff(values).tolist(), strict=True)),
        tokens=tokens,
        flops=float(model_flops(setting.model, documents)),
        pool_imbalance=_mean_ratio(layers.even.sum(axis=2), layers.ranks, run.ranks),
        rank_imbalance=_mean_ratio(layers.slowest.sum(axis=2), layers.ranks, run.ranks, layers.even.sum(axis=2)),
        micro_step_imbalance=float(forward.max() / forward.mean()) if forward.any() else 1.0,
        busiest_bytes=float(max(max(each.sent.max(), each.received.max()) for groups in found for each in groups)),
        # Forward q, k, v there and outputs back; backward q, k, v and gradients of outputs, and three gradients back.
        ulysses_bytes=float(row.tokens_per_rank * row.head_dim * row.item_bytes * (run.cp - 1) / run.cp)
        * (2 * row.num_heads + 2 * row.num_kv_heads + 3 * row.num_heads + 4 * row.num_kv_heads),
        across_bytes=max(each.across for groups in found for each in groups),
        memory=memory,
        planning=sum(group.planning_seconds for groups in plan.micro_steps for group in groups),
        micro_steps=len(plan.micro_steps),
        fill=tokens / max(sum(group.tokens * group.ranks for groups in plan.micro_steps for group in groups), 1),
        heaviest=heaviest_over_mean(
            [each for groups in plan.micro_steps for group in groups for each in group.sequences]
        ),
    )


def heaviest_over_mean(sequences: Sequences) -> float:
    """Attention of the costliest sequence over the mean of the step, by pairs."""
    pairs = np.array([causal_pairs(sequence) for sequence in sequences])
    return float(pairs.max() / pairs.mean()) if pairs.any() else 1.0


class _Layers:
    """Seconds of one layer by micro-step, group and pass: (M, G, 2). Where micro-steps have fewer groups, the rest is 0
    and has no ranks."""

    def __init__(self, plan: StepPlan, found: list[list[GroupSeconds]], setting: Setting) -> None:
        self.setting = setting
        count, most = len(found), max(map(len, found))
        self.pure, self.even, self.slowest, self.attention = (np.zeros((count, most, 2)) for _ in range(4))
        self.ranks, self.tokens, self.real = (np.zeros((count, most)) for _ in range(3))
        for m, groups in enumerate(found):
            for g, each in enumerate(groups):
                group = plan.micro_steps[m][g]
                self.pure[m, g], self.even[m, g] = each.pure, each.even
                self.slowest[m, g], self.attention[m, g] = each.slowest_kernel, each.attention
                self.ranks[m, g], self.tokens[m, g] = group.ranks, group.tokens
                self.real[m, g] = sum(group.documents) / group.ranks
        if self.ranks.sum(axis=1).max() > setting.run.ranks:
            used = int(self.ranks.sum(axis=1).max())
            raise ValueError(f"a micro-step's groups have {used} ranks, more than dp * cp ({setting.run.ranks})")
        if (setting.sync == "step" or setting.pp > 1) and (self.ranks != self.ranks[0]).any():
            what = 'sync="step"' if setting.sync == "step" else f"pp ({setting.pp}) above 1"
            raise ValueError(
                f"{what} follows each group through its micro-steps, so all must have the same groups, but there are "
                f"{_groups(self.ranks[0])} and {_groups(self.ranks[(self.ranks != self.ranks[0]).any(1)][0])}"
            )

    def mean(self, attention: np.ndarray, real: bool = False) -> float:
        """Seconds of the step if all of the run's ranks shared this evenly."""
        share = self.ranks / self.setting.run.ranks
        attention = (attention * share[..., None]).sum(axis=1, keepdims=True)
        tokens = ((self.real if real else self.tokens) * share).sum(axis=1, keepdims=True)
        return sum(float(part.sum()) for part in self._passes(attention, tokens)) / self.setting.pp

    def total(self, attention: np.ndarray) -> float:
        """Seconds of the step, a mean over stages, with these groups' attention and nobody waiting for a stage."""
        forward, backward = self._passes(*self._together(attention))
        return float((forward + backward).sum(axis=(0, 1)).max()) / self.setting.pp

    def end(self) -> float:
        """When the last stage of the slowest group is done."""
        forward, backward = self._passes(*self._together(self.attention))
        return max(
            follow(forward[:, :, g], backward[:, :, g], "1f1b").end for g in range(forward.shape[2])
        )  # fmt: skip

    def gathers(self) -> float:
        """What gathers of weights and sums of gradients take beside what computation hides."""
        setting, table = self.setting, self.setting.table
        layers, weights = setting.model.num_layers / setting.pp, layer_weights(setting.model)
        hides = table["gather_overlap"].value
        gather = gathered_seconds(weights * table["gather_bytes"].value, setting)
        reduce = gathered_seconds(weights * table["reduce_bytes"].value, setting)
        forward, backward = self._layer(*self._together(self.attention))
        if setting.sync == "step":
            return layers * max(gather + reduce - hides * float(backward[-1].max()), 0.0)
        exposed = np.maximum(gather - hides * forward, 0) + np.maximum(gather + reduce - hides * backward, 0)
        return layers * float(exposed.sum())

    def _together(self, attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Attention (M, G, 2) and tokens (M, G) of groups that go on alone: of one, where all meet in every layer. The
        tokens are such that the two passes together take as long as the slowest group, pass by pass."""
        if self.setting.sync == "step":
            return attention, self.tokens
        forward, backward = self._layer(attention, self.tokens)
        tokens = self.tokens.max(axis=1, keepdims=True)
        products = np.stack(self._layer(np.zeros_like(attention[:, :1]), tokens), axis=-1)
        slowest = np.stack([forward.max(axis=1), backward.max(axis=1)], axis=-1)[:, None]
        return slowest - products, tokens

    def _layer(self, attention: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return layer_seconds(self.setting.model, self.setting.table, attention, tokens)

    def _passes(self, attention: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return stage_passes(self.setting.model, self.setting.table, attention, tokens, self.setting.pp)


def _groups(ranks: np.ndarray) -> str:
    """Ranks (G,) of groups in words: 2 groups of 8 ranks, 4 of 4."""
    sizes, counts = np.unique(ranks[ranks > 0].astype(int), return_counts=True)
    return ", ".join(f"{count} groups of {size} ranks" for size, count in zip(sizes, counts, strict=True)) or "none"


def _mean_ratio(slowest: np.ndarray, ranks: np.ndarray, all_ranks: int, even: np.ndarray | None = None) -> float:
    """Mean over micro-steps of the largest group's seconds (M, G) over the mean of all ranks."""
    mean = ((slowest if even is None else even) * ranks).sum(axis=1) / all_ranks
    return float(np.mean(slowest.max(axis=1)[mean > 0] / mean[mean > 0])) if mean.any() else 1.0


# ------------------------------------------------------------------------------------------------- the rest of a model


def layer_products(model: Qwen3Config) -> tuple[int, int]:
    """Weights of a layer that one token is multiplied with, and of these what the last product of its MLP has."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    if model.moe is None:
        return attention + 3 * model.hidden_size * model.intermediate_size, model.hidden_size * model.intermediate_size
    last = model.moe.experts_per_token * model.hidden_size * model.moe.intermediate_size
    return attention + 3 * last + model.hidden_size * model.moe.num_experts, last


def layer_weights(model: Qwen3Config) -> int:
    """All weights of a layer, of all experts: what FSDP gathers."""
    tables = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return (model.num_parameters - tables - model.hidden_size) // model.num_layers


def token_seconds(model: Qwen3Config, table: Constants) -> tuple[float, float]:
    """A layer's matrix products for one token, forward and backward. Where layers are computed again, all but the last
    product of the MLP is done once more: nobody reads that."""
    weights, last = layer_products(model)
    again = (weights - last) if table["recompute"].value else 0
    rate = table["products"].value
    return 2 * weights / rate, 2 * (2 * weights + again) / rate


def layer_seconds(
    model: Qwen3Config, table: Constants, attention: np.ndarray, tokens: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward passes of a layer, (...,) each. attention: (..., 2) seconds. tokens: (...,) of a rank."""
    there, back = token_seconds(model, table)
    return attention[..., 0] + there * tokens, attention[..., 1] + back * tokens


def stage_passes(
    model: Qwen3Config, table: Constants, attention: np.ndarray, tokens: np.ndarray | float, stages: int
) -> tuple[np.ndarray, np.ndarray]:
    """(S, ...) seconds of forward passes, and of backward passes, as `libra_jax.train.pipeline` runs them: a backward
    pass runs its stage forward again, and the last stage has no forward pass of its own, and the head.

    attention: (..., 2) of one layer. tokens: (...,) of a rank.
    """
    layers = model.num_layers / stages
    forward, backward = layer_seconds(model, table, attention, tokens)
    there = np.repeat(layers * forward[None], stages, axis=0)
    back = np.repeat(layers * (backward + forward)[None], stages, axis=0)
    there[-1] = 0
    back[-1] += head_seconds(model, table) * tokens
    return there, back


def head_seconds(model: Qwen3Config, table: Constants) -> float:
    """The output matrix for one token, forward and backward; its products are done again in the backward pass."""
    return 2 * 4 * model.hidden_size * model.vocab_size / table["products"].value


def gathered_seconds(count: float, setting: Setting) -> float:
    """An all-gather of `count` bytes over all ranks of a stage, or the sum the other way."""
    table, ranks = setting.table, setting.run.ranks
    if ranks == 1:
        return 0.0
    inside, node = count * (ranks - 1) / ranks / table["inside"].value, int(table["ranks_per_node"].value)
    if ranks <= node:
        return inside + table["inside_latency"].value
    slow = table["oversubscription"].value if ranks > node * table["pod_nodes"].value else 1.0
    ports = count * (ranks - 1) / ranks * slow / (node * table["across"].value)
    return max(inside, ports) + table["across_latency"].value


def memory_gib(plan: StepPlan, setting: Setting) -> float:
    """GiB of the fullest rank: weights and optimizer states, what layers keep, one layer's attention and MLP at work,
    two gathered layers, logits of a chunk. `libra preflight` compiles the step and knows better."""
    model, table, run = setting.model, setting.table, setting.run
    share = run.ranks if setting.sync == "layer" else 1
    states = model.num_parameters / setting.pp * table["state_bytes"].value / share
    gathered = 2 * layer_weights(model) * table["gather_bytes"].value if setting.sync == "layer" else 0
    # A stage keeps its inputs of several micro-batches, and what its layers keep of the one that it takes back.
    inputs = kept_inputs("1f1b", len(plan.micro_steps), setting.pp) if setting.pp > 1 else 0
    layer = 2 * model.hidden_size + 2 * model.num_heads * model.head_dim + 4 * model.num_heads
    kept_token = layer * model.num_layers / setting.pp + 2 * model.hidden_size * inputs
    inner = model.intermediate_size
    if model.moe is not None:
        inner = model.moe.experts_per_token * model.moe.intermediate_size
    most = 0.0
    for groups in plan.micro_steps:
        for group in groups:
            work = group.tokens * 2 * (3 * inner + 4 * model.hidden_size)
            most = max(most, group.tokens * kept_token + work + _attention_room(group))
    logits = 3 * 4 * min(model.loss_chunk, run.seq_len) * model.vocab_size
    return (states + gathered + most + logits) / 2**30


def _attention_room(group: Group) -> float:
    spec = group.spec
    if group.executor is not None:
        roomy = spec if spec.room.blocks < 4 * spec.home_blocks else dataclasses.replace(spec, capacity=None)
        room = attention_bytes(roomy)
        return max(room.forward.total, room.backward.total) + room.tables
    longest = sum(max(group.sequences, key=sum, default=()))
    gathered = longest if group.exchange != "ring" else 2 * group.tokens
    return gathered * spec.num_kv_heads * (spec.head_dim + spec.value_dim) * (spec.item_bytes + 4)
