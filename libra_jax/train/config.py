"""Everything that defines a training run, as frozen dataclasses.

A file in `configs/` is a Python function `config() -> TrainConfig`; `libra train` lets a user override any field by
name. Numbers that belong together are stated once: the mesh says how many pools, sequences in a pool and ranks to a
sequence there are, the model says the heads, and the `PoolSpec` of the run follows from both. Fields made with `free`
may change when a run is resumed; any other must stay as it was, because data, weights or ranks depend on it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from libra_jax.data import DataConfig, PoolSizes
from libra_jax.links import Links
from libra_jax.modelled import check_prices
from libra_jax.models.moe import check_experts
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.plan import TOLERANCE, check_tolerance
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel


def free(default: Any) -> Any:
    """A field with this default that may change between a run and its resumption."""
    return dataclasses.field(default=default, metadata={"may_change": True})


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} ({value!r}) must be a whole number")
    _at_least(name, value, 1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are laid out: pools * pool_size * cp * tp * pp of them. A run may go on with another layout, as
    long as its optimizer steps hold as many sequences: it trains on the same ones."""

    pools: int = free(1)
    """Pools side by side (mesh axis "pool")."""
    pool_size: int = free(1)
    """Packed sequences in a pool (mesh axis "dp")."""
    cp: int = free(1)
    """Ranks that hold one sequence, each its share of the tokens (mesh axis "cp")."""
    tp: int = free(1)
    """Ranks that share the heads and the features of a dense MLP among them (mesh axis "tp"); neighbours, best inside a
    node. Pools and plans are then of one such rank's heads: `attention.ranks_per_node` counts a node's GPUs over tp."""
    pp: int = free(1)
    """Stages of a pipeline (mesh axis "pp"), each with its share of the layers; micro-steps pass through them."""
    schedule: Literal["1f1b", "gpipe"] = free("1f1b")
    """How micro-steps pass through a pipeline: back as soon as they can be, or after all have gone forward, which keeps
    more. See `train.pipeline`."""
    pool_sizes: tuple[int, ...] = free(())
    """Further pool sizes, beside pool_size: the same devices in fewer, larger pools, or in more, smaller ones. Each is
    compiled ahead, and each step takes the one with the least modelled time."""
    least_saving: float = free(0.02)
    """Of two pool sizes a step takes the larger if it saves more than this share of the attention's modelled time."""
    links: Links = dataclasses.field(default_factory=Links, metadata={"may_change": True})
    """What the wires between ranks carry: prices exchanges, for plans and for the choice of a pool size."""
    cpu_devices: int | None = free(None)
    """Virtual devices to make when the platform is cpu; None leaves it as JAX has it."""

    def __post_init__(self) -> None:
        if not isinstance(self.pool_sizes, tuple):
            raise TypeError(f"mesh.pool_sizes ({self.pool_sizes!r}) must be a tuple of whole numbers")
        check_prices(None, self.links)
        if self.schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"mesh.schedule ({self.schedule!r}) must be '1f1b' or 'gpipe'")
        for name in ("pools", "pool_size", "cp", "tp", "pp"):
            _whole(f"mesh.{name}", getattr(self, name))
        if not (isinstance(self.least_saving, int | float) and 0 <= self.least_saving < 1):
            raise ValueError(f"mesh.least_saving ({self.least_saving!r}) must be at least 0 and below 1")
        for size in self.pool_sizes:
            _whole("mesh.pool_sizes: each of them", size)
            if self.sequences % size:
                raise ValueError(
                    f"mesh.pool_sizes: {size} must divide pools * pool_size ({self.pools} * {self.pool_size} = "
                    f"{self.sequences}), as pools of every size lie on the same devices"
                )
            if (self.pool_size, *self.pool_sizes).count(size) > 1:
                raise ValueError(
                    f"mesh.pool_sizes {self.pool_sizes} and pool_size ({self.pool_size}) must name a size once, and "
                    f"{size} is there twice"
                )
        if self.cpu_devices is not None:
            _at_least("mesh.cpu_devices", self.cpu_devices, 1)

    @property
    def sequences(self) -> int:
        """Packed sequences in one micro-step."""
        return self.pools * self.pool_size

    @property
    def axes(self) -> dict[str, int]:
        """{mesh axis: its length}, in order; "pp" where there is a pipeline."""
        stages = {"pp": self.pp} if self.pp > 1 else {}
        return {**stages, "pool": self.pools, "dp": self.pool_size, "cp": self.cp, "tp": self.tp}

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def in_words(self) -> str:
        words = f"{self.pools} pools x {self.pool_size} sequences x {self.cp} ranks"
        words += f" x {self.tp} parts of the heads" if self.tp > 1 else ""
        return words + (f", in {self.pp} stages" if self.pp > 1 else "")

    @property
    def sizes(self) -> tuple[int, ...]:
        """All pool sizes that a step may take, in ascending order."""
        return tuple(sorted((self.pool_size, *self.pool_sizes)))


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The pooled attention operator."""

    block: int = 128
    """Tokens in a block and in a page."""
    waves: int = free(2)
    """Kernel launches a pass of attention is cut into, see `PoolSpec`."""
    capacity: float | None = free(None)
    """Room for what a rank receives, in units of its home blocks; None chooses."""
    window: int | None = None
    """A query sees at most this many keys, its own included; None: its whole document."""
    ranks_per_node: int | None = free(None)
    """Neighbouring ranks in one node, where pages are to cross between nodes once and be passed on inside; for pools of
    several nodes, and 3 waves or more. None: every page comes straight from its home. See `PoolSpec`."""
    tolerance: float = free(TOLERANCE)
    """How much more than its share a rank may have to do: see `plan_pool`."""
    cost_model: str | None = free(None)
    """File with measured prices of kernels (`CostModel.save`), for placement, plans and the choice of a pool size.
    None: the defaults of `CostModel`."""

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, gradients clipped by their global norm, warm-up from zero and a fall to a share of the peak. Weights and
    moments are float32."""

    learning_rate: float = free(3e-4)
    """Peak of the schedule."""
    warmup_steps: int = free(100)
    """Steps from zero to the peak."""
    schedule: Literal["cosine", "wsd"] = free("cosine")
    """After the warm-up: half a cosine down to the end, or stable at the peak and a decay at the end (WSD)."""
    decay_steps: int | None = free(None)
    """Step at which the schedule ends; None: the last step of the run."""
    decay_share: float = free(0.1)
    """Share of decay_steps, at their end, in which "wsd" decays."""
    decay_shape: Literal["1-sqrt", "linear"] = free("1-sqrt")
    """How "wsd" decays: by the square root of the share done, or in a line."""
    final_share: float = free(0.1)
    """Learning rate after decay_steps, as a share of the peak."""
    b1: float = free(0.9)
    """Decay of the mean of gradients."""
    b2: float = free(0.95)
    """Decay of the mean of squared gradients."""
    eps: float = free(1e-8)
    """Added to the root of the mean square."""
    weight_decay: float = free(0.1)
    """Pull of weights towards zero, times the learning rate; norms, embeddings and output matrix are left out."""
    clip_norm: float = free(1.0)
    """Gradients longer than this are shortened to it."""
    stop_after_skipped: int = free(3)
    """A step with a loss or gradient that is not finite updates nothing. The run stops with a message at so many of
    them in a row; 1: at the first."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} ({getattr(self, name)}) must be above 0 and finite")
        if not math.isfinite(self.weight_decay):
            raise ValueError(f"optimizer.weight_decay ({self.weight_decay}) must be finite")
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0)
        for name in ("b1", "b2", "final_share", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name} ({getattr(self, name)}) must be between 0 and 1")
        for name, choices in {"schedule": ("cosine", "wsd"), "decay_shape": ("1-sqrt", "linear")}.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"optimizer.{name} ({getattr(self, name)!r}) must be one of {choices}")
        _whole("optimizer.stop_after_skipped", self.stop_after_skipped)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves itself. The last step is always saved."""

    every: int = free(100)
    """Steps between checkpoints."""
    keep: int = free(2)
    """Newest checkpoints to keep; older ones are deleted."""
    keep_best: int = free(0)
    """Beside them, this many with the lowest loss on held-out documents, of those saved right after an evaluation."""
    keep_every: int | None = free(None)
    """Beside them, for ever: those of steps that this number divides. None: none."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 1)
        _at_least("checkpoint.keep", self.keep, 1)
        _at_least("checkpoint.keep_best", self.keep_best, 0)
        if self.keep_every is not None:
            _whole("checkpoint.keep_every", self.keep_every)


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How long the processes of a run wait for one another. A run of one process waits for nobody."""

    start_timeout_seconds: float = free(3600.0)
    """A process ends, with a message, where none of its first step's phases (reading, packing, compiling, restoring)
    has come to an end for this long."""
    step_timeout_seconds: float = free(1800.0)
    """The same after the first step: the longest that a batch, a step, an evaluation or a checkpoint may take."""
    heartbeat_timeout_seconds: int = free(100)
    """A process that has given no sign of life for this long counts as dead, and the others end."""
    join_timeout_seconds: int = free(300)
    """How long processes wait at the start until all of them are there."""

    def __post_init__(self) -> None:
        for name in ("start_timeout_seconds", "step_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"launch.{name} ({getattr(self, name)}) must be above 0")
        for name in ("heartbeat_timeout_seconds", "join_timeout_seconds"):
            _whole(f"launch.{name}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The loss on documents that are never trained on (data.held_out)."""

    every: int = free(0)
    """Steps between evaluations; the last step has one, too. 0: never."""
    micro_steps: int = free(8)
    """Micro-steps of held-out sequences, the same every time, or as many as there are."""

    def __post_init__(self) -> None:
        _at_least("evaluation.every", self.every, 0)
        _whole("evaluation.micro_steps", self.micro_steps)


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """What a run writes down of itself, beside metrics.jsonl; docs/metrics.md says what every number means."""

    tensorboard: bool = free(True)
    """Write event files to run_dir/tensorboard."""
    peak_flops: float | None = free(None)
    """FLOP/s that a device has at most, which MFU is a share of; None: what is known of it, or no MFU."""
    profile_steps: tuple[int, int] | None = free(None)
    """First and last step to trace with JAX's profiler, into run_dir/profile; None: none. On CPU every small operation
    is an event, of which a step of a second or more has more than memory holds."""

    def __post_init__(self) -> None:
        if self.peak_flops is not None and not self.peak_flops > 0:
            raise ValueError(f"metrics.peak_flops ({self.peak_flops}) must be above 0, or None")
        if self.profile_steps is not None and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(f"metrics.profile_steps {self.profile_steps} must be two steps, from 1, in their order")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: Qwen3Config
    data: DataConfig
    mesh: MeshConfig
    attention: AttentionConfig = AttentionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    launch: LaunchConfig = LaunchConfig()
    seq_len: int = 4096
    """Tokens in a packed sequence, padding included."""
    micro_steps: int = free(1)
    """Micro-steps whose gradients are added up for one optimizer step; each has pools * pool_size sequences."""
    steps: int = free(1000)
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Of the first weights and of the order of the data."""
    run_dir: str = free("runs/default")
    """Folder for checkpoints, metrics and pictures; started again with the same folder, a run goes on."""
    xla: tuple[str, ...] = free(())
    """Options of the compiler, each NAME=VALUE, over those that Libra sets itself."""

    def __post_init__(self) -> None:
        self._check_tp()
        if self.checkpoint.keep_best and not self.evaluation.every:
            raise ValueError(
                f"checkpoint.keep_best ({self.checkpoint.keep_best}) goes by evaluations, and evaluation.every is 0: "
                "set --evaluation.every, with --data.held-out above 0"
            )
        if self.model.num_layers % self.mesh.pp:
            raise ValueError(
                f"model.num_layers ({self.model.num_layers}) must be a multiple of mesh.pp ({self.mesh.pp}), whose "
                "stages have as many layers each"
            )
        _at_least("micro_steps", self.micro_steps, 1)
        _at_least("steps", self.steps, 1)
        if self.evaluation.every and not self.data.held_out:
            raise ValueError(
                f"evaluation.every ({self.evaluation.every}) needs documents to evaluate on, and data.held_out is "
                f"{self.data.held_out}: set it above 0 (a run that has begun cannot, it trains on them already)"
            )
        for size in self.mesh.sizes:
            self.spec_of(size)  # refuses shapes that do not fit together
        if self.model.moe is not None:
            check_experts(self.model.moe, self.mesh.pool_size, self.mesh.cp)
            if self.model.moe.experts == "spread" and self.mesh.pool_sizes:
                raise ValueError(
                    f"mesh.pool_sizes {self.mesh.pool_sizes} with model.moe.experts='spread': experts lie over the "
                    "ranks of a pool of one size; use experts='gathered', or one pool size"
                )

    def _check_tp(self) -> None:
        tp, model = self.mesh.tp, self.model
        shared = [("model.num_heads", model.num_heads), ("model.num_kv_heads", model.num_kv_heads)]
        if model.moe is None:
            shared.append(("model.intermediate_size", model.intermediate_size))
        for name, size in shared:
            if size % tp:
                raise ValueError(f"{name} ({size}) must be a multiple of mesh.tp ({tp}), whose ranks share them")
        if self.seq_len % (self.mesh.cp * tp):
            raise ValueError(
                f"seq_len ({self.seq_len}) must be a multiple of mesh.cp * mesh.tp ({self.mesh.cp} * {tp} = "
                f"{self.mesh.cp * tp}): outside of attention these ranks share a sequence's tokens"
            )

    @property
    def spec(self) -> PoolSpec:
        """The pool's shapes, as model, mesh and attention state them; heads are those of one rank of axis "tp"."""
        return self.spec_of(self.mesh.pool_size)

    def spec_of(self, pool_size: int) -> PoolSpec:
        """The shapes of a pool of another size."""
        return PoolSpec(
            seq_len=self.seq_len,
            pool_size=pool_size,
            cp=self.mesh.cp,
            num_heads=self.model.num_heads // self.mesh.tp,
            num_kv_heads=self.model.num_kv_heads // self.mesh.tp,
            head_dim=self.model.head_dim,
            block=self.attention.block,
            waves=self.attention.waves,
            capacity=self.attention.capacity,
            window=self.attention.window,
            dtype=self.model.compute_dtype,
            ranks_per_node=self.attention.ranks_per_node,
        )

    @property
    def pool_sizes(self) -> PoolSizes:
        """What a step chooses its pool size from, and how."""
        further = tuple(self.spec_of(size) for size in self.mesh.pool_sizes)
        nodes = self.attention.ranks_per_node or self.mesh.links.ranks_per_node  # where there are relays, these say it
        links = dataclasses.replace(self.mesh.links, ranks_per_node=nodes)
        return PoolSizes(further, self.mesh.least_saving, links, self.attention.tolerance)

    def at_pool_size(self, size: int) -> TrainConfig:
        """The same run, all of its steps in pools of one size on the same devices; `size` is one of `mesh.sizes`."""
        if size not in self.mesh.sizes:
            raise ValueError(f"pool size {size!r} must be one of the config's, {self.mesh.sizes}")
        mesh = dataclasses.replace(self.mesh, pools=self.mesh.sequences // size, pool_size=size, pool_sizes=())
        return dataclasses.replace(self, mesh=mesh)

    @property
    def step_data(self) -> DataConfig:
        """`data`, with sequences placed as the mesh needs them where it does not say how."""
        across = self.data.across or ("all" if self.mesh.pp > 1 else "pools")
        return dataclasses.replace(self.data, across=across)

    @property
    def cost(self) -> CostModel:
        """What kernels are priced with. Raises OSError or ValueError where its file cannot be read."""
        path = self.attention.cost_model
        try:
            return CostModel() if path is None else CostModel.load(path)
        except OSError as error:
            raise OSError(
                f"attention.cost_model ({path}) cannot be read: {error.strerror}; benchmarks.gpu_check writes one"
            ) from error

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step, padding included."""
        return self.micro_steps * self.mesh.sequences * self.seq_len


def every_value(config: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted field name: value} of all fields."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        values |= every_value(value, name + ".") if dataclasses.is_dataclass(value) else {name: value}
    return values


def fixed_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted field name: value} of all fields that a resumed run must have as they were; values as JSON has them."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if field.metadata.get("may_change"):
            continue
        if dataclasses.is_dataclass(value):
            values |= fixed_values(value, name + ".")
        else:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


def refuse_changes(saved: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Raises ValueError naming every value that differs between a checkpoint and the run that wants to go on from it.

    saved, now: {"config": from `fixed_values`, "data": what the data is}. where: the run's folder, for the message.
    Other data is only spoken of when the config is the same: another config often means other data.
    """
    absent = "nothing"
    for part, way_out in (
        ("config", "Set them back to go on with it, or give another --run-dir to start a new run."),
        ("data", "What it reads, or how it is dealt to steps, has changed. Give another --run-dir to start a new run."),
    ):
        there, here = saved[part], now[part]
        names = [*there, *(name for name in here if name not in there)]
        changed = [name for name in names if there.get(name, absent) != here.get(name, absent)]
        if changed:
            lines = [f"  {n}: {there.get(n, absent)!r} there, {here.get(n, absent)!r} now" for n in changed]
            what = "values" if part == "config" else "data"
            raise ValueError("\n".join([f"the run in {where} was made with other {what}:", *lines, way_out]))
