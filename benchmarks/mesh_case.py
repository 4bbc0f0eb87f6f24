"""What benchmarks/mesh.py is asked for, and what follows from it: devices, shapes, policies and documents."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import mesh_report as report
from benchmarks import mesh_runs as runs
from libra_jax.assignments import Policy
from libra_jax.data import DataConfig
from libra_jax.data.lengths import find_lengths, holds_quantiles, read_lengths
from libra_jax.models.qwen3 import QWEN3_0_6B, QWEN3_8B, QWEN3_30B_A3B, Qwen3Config
from libra_jax.placement import place
from libra_jax.policies.paper import TILE_TOKENS, paper_placer
from libra_jax.policies.plans import PLANS
from libra_jax.spec import PoolSpec
from libra_jax.train.config import AttentionConfig, LaunchConfig, MeshConfig, OptimizerConfig, TrainConfig
from libra_jax.train.launch import find_launch, join, several_were_started, share_of
from libra_jax.train.mesh import make_mesh, start_devices
from libra_jax.workload import CostModel, sequence_seconds

TINY = Qwen3Config(256, 128, 256, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=32)
MODELS = {"tiny": TINY, "qwen3-0.6b": QWEN3_0_6B, "qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}
LAYERS = 4
"""Of a published shape, unless told otherwise: what is compared is the attention of one layer against what is around
it, and that is the same in every layer."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run. What is None follows from the devices."""

    seq_len: int | None = None
    """Tokens of a packed sequence; None: 131072 on GPUs, 4096 on CPUs."""
    pools: int | None = None
    """Pools side by side; None: as many as there is room for."""
    pool_size: int | None = None
    """Sequences of a pool; None: what is left of the devices, 8 at most."""
    cp: int | None = None
    """Ranks that hold one sequence; None: about the square root of the devices."""
    model: Literal["tiny", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"] | None = None
    """Shape of the training step's model, and of the operator's heads; None: qwen3-8b on GPUs, tiny on CPUs."""
    layers: int | None = None
    """Layers of the model; None: 4 of a published one, the tiny one's 1."""
    heads: int | None = None
    """Query heads; None: the model's."""
    kv_heads: int | None = None
    """Key/value heads; None: the model's."""
    head_dim: int | None = None
    """Width of a head; None: the model's."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """None: bfloat16 on GPUs, float32 on CPUs."""
    block: int = 128
    waves: int = 4
    """Kernel launches of a pass; 6 with relays is what plans are made for."""
    relays: bool = False
    """Pages cross between nodes once, where a pool has more than one; for all policies alike."""
    corpus: str = "lognormal-644-71k"
    """A shipped distribution, a file of lengths or a prepared corpus: what `libra inspect` takes."""
    shrink: float | None = None
    """Documents' lengths are divided by this, so that short sequences are packed like long ones; None: 1 on GPUs, on
    CPUs 262144 / seq_len."""
    steps: int = 1
    """Different steps to time, each with documents of its own; times are of a step, their mean."""
    rounds: int = 5
    """How often each is timed."""
    passes: tuple[Literal["forward", "both", "step"], ...] = ("forward", "both", "step")
    """Of the operator, its forward pass alone and with the backward pass; of the trainer, a whole step."""
    policies: tuple[str, ...] = ()
    """Names, see docs/mesh.md; (): all."""
    room: Literal["shared", "own"] = "shared"
    """shared: one program for all policies, with the room that the neediest needs. own: one for each, with its own."""
    implementation: Literal["triton", "xla", "reference"] | None = None
    """Of the operator; the training step chooses by itself."""
    transport: Literal["ragged", "all_to_all", "ppermute"] | None = None
    """Of the operator; the training step chooses by itself."""
    check_tokens: int | None = None
    """Tokens of the sequences that are held against dense float32 attention; None: 1024 or so."""
    seed: int = 0
    cost_model: Path | None = None
    """Measured prices of kernels for the modelled time (benchmarks.gpu_check writes one); None: an H100's."""
    gpus_per_node: int = 8
    """Neighbouring ranks that share a node, for the modelled time and for relays."""
    json: Path | None = None
    """Write everything to this file."""
    report: Path | None = None
    """Write the tables to this file, as Markdown."""
    cpu_devices: int | None = None
    """Virtual CPU devices to run on, of all processes together; None: the devices that there are."""
    multihost: Literal["auto", "slurm", "openmpi", "kubernetes", "explicit"] | None = None
    """This is one of several processes, and what has started them; auto: look."""
    coordinator: str | None = None
    """HOST:PORT where process 0 listens; goes with --multihost, as the next three do."""
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None
    """GPUs of its host that this process takes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run. config: of the training step; its spec is the operator's, with the room it has by default. steps: to
    time. check_spec, check_step: of the sequences that are held against dense attention. shrink: what documents'
    lengths were divided by."""

    config: TrainConfig
    mesh: Mesh
    policies: Mapping[str, Policy]
    cost: CostModel
    steps: Sequence[runs.Step]
    check_spec: PoolSpec
    check_step: runs.Step
    shrink: float

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def base(self) -> str:
        """The policy that others are compared with."""
        return "libra" if "libra" in self.policies else next(iter(self.policies))


def make_case(options: Options) -> Case:
    """Joins the other processes, if there are any, lays out the devices and draws the documents.

    Raises ValueError or OSError where things do not fit together or cannot be read.
    """
    for name in ("steps", "rounds", "layers", "check_tokens", "gpus_per_node", "shrink"):
        value = getattr(options, name)
        if value is not None and not (value >= 1 and math.isfinite(value)):
            raise ValueError(f"{name} ({value}) must be at least 1")
    if options.seed < 0:
        raise ValueError(f"seed ({options.seed}) must be 0 or more")
    for name in ("json", "report"):
        path = getattr(options, name)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{name} ({path}) must be a file in a folder that is there")
    if not options.passes:
        raise ValueError(f"passes must name at least one of {list(report.PASSES)}")
    unknown = [name for name in options.policies if name not in PLANS]
    if unknown:
        raise ValueError(f"policies {unknown} are not known; there are {list(PLANS)}")
    policies = {name: policy for name, policy in PLANS.items() if not options.policies or name in options.policies}
    cost = CostModel() if options.cost_model is None else CostModel.load(options.cost_model)
    mesh, config = start(options)
    spec, sequences = config.spec, config.mesh.sequences
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shrink = options.shrink or (max(262_144 / spec.seq_len, 1.0) if on_cpu else 1.0)
    if "libra-paper" in policies and shrink > 1:  # its tiles are so many tokens of sequences that are not shrunk
        policies["libra-paper"] = paper_placer(tile_tokens=max(int(TILE_TOKENS / shrink), spec.block))
    least = spec.cp * spec.block
    check = options.check_tokens or min(spec.seq_len, max(1024 // least, 2) * least)
    awkward = runs.awkward_lengths(sequences, check)
    size = spec.pool_size
    return Case(
        config,
        mesh,
        policies,
        cost,
        steps=draw_steps(options, config, shrink),
        check_spec=dataclasses.replace(spec, seq_len=check),
        check_step=[awkward[i : i + size] for i in range(0, sequences, size)],
        shrink=shrink,
    )


def start(options: Options) -> tuple[Mesh, TrainConfig]:
    """Joins the other processes, if there are any, and lays out the devices. Raises ValueError as these do."""
    wanted = MeshConfig(cpu_devices=options.cpu_devices)
    launch = None
    given = options.coordinator, options.num_processes, options.process_id, options.local_device_ids
    if options.multihost is not None:
        launch = find_launch(options.multihost, os.environ, *given)
    elif any(value is not None for value in given):
        raise ValueError("who is who among several processes needs --multihost beside it")
    elif sign := several_were_started(os.environ):
        raise ValueError(f"{sign} processes were started together; --multihost makes them one run")
    if options.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
    start_devices(wanted if launch is None else share_of(wanted, launch))
    if launch is not None:
        join(launch, LaunchConfig())
    config = config_of(options, len(jax.devices()), jax.devices()[0].platform)
    return make_mesh(config.mesh), config


def config_of(options: Options, devices: int, platform: str) -> TrainConfig:
    """The training step's config; the operator's spec is its spec."""
    cpu = platform == "cpu"
    model = MODELS[model_name(options, platform)]
    own = {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
    own |= {"num_layers": options.layers or min(LAYERS, model.num_layers)}
    own |= {"compute_dtype": options.dtype or ("float32" if cpu else "bfloat16")}
    model = dataclasses.replace(model, **{name: value for name, value in own.items() if value is not None})
    mesh = layout(devices, options.pools, options.pool_size, options.cp)
    several_nodes = options.relays and mesh.pool_size * mesh.cp > options.gpus_per_node
    attention = AttentionConfig(
        block=options.block, waves=options.waves, ranks_per_node=options.gpus_per_node if several_nodes else None
    )
    return TrainConfig(
        model,
        DataConfig(paths=("none",)),
        mesh,
        attention,
        OptimizerConfig(warmup_steps=1),
        seq_len=options.seq_len or (4096 if cpu else 131_072),
        seed=options.seed,
    )


def model_name(options: Options, platform: str) -> str:
    return options.model or ("tiny" if platform == "cpu" else "qwen3-8b")


def layout(devices: int, pools: int | None, pool_size: int | None, cp: int | None) -> MeshConfig:
    """A mesh of so many devices, with what is given as it is. Raises ValueError with both numbers if there is none."""
    given = [n for n in (pools, pool_size, cp) if n is not None]
    if any(n < 1 for n in given) or devices % int(np.prod(given)):
        words = f"pools {pools}, pool_size {pool_size}, cp {cp} (None: any)"
        raise ValueError(f"{words} must be at least 1, and their product divide the {devices} devices")
    left = devices // int(np.prod(given))

    def largest(limit: float) -> int:
        return max(n for n in range(1, left + 1) if left % n == 0 and n <= limit)

    if cp is None:
        cp = left if pool_size is not None and pools is not None else largest(max(left**0.5, 1))
        left //= cp
    if pool_size is None:
        pool_size = left if pools is not None else largest(8)
        left //= pool_size
    if pools is None:
        pools, left = left, 1
    if left != 1:
        raise ValueError(f"pools {pools} * pool_size {pool_size} * cp {cp} must be the {devices} devices")
    return MeshConfig(pools, pool_size, cp)


def draw_steps(options: Options, config: TrainConfig, shrink: float) -> list[runs.Step]:
    """The documents of each step, sequences placed so that its pools cost alike. Raises ValueError or OSError where the
    corpus cannot be read."""
    spec, mesh = config.spec, config.mesh
    path = find_lengths(options.corpus)
    tokens = options.steps * mesh.sequences * spec.seq_len
    lengths = read_lengths(path, least_tokens=int(tokens * shrink) + 1, seed=options.seed)
    if not holds_quantiles(path):  # a corpus' own documents, in their order
        lengths = np.random.default_rng(options.seed).permutation(lengths)
    lengths = np.maximum(lengths // shrink, 1).astype(np.int64)
    sequences = fill(lengths, spec.seq_len, options.steps * mesh.sequences)
    steps = []
    for i in range(0, len(sequences), mesh.sequences):
        some = sequences[i : i + mesh.sequences]
        slots = place([sequence_seconds(documents, spec) for documents in some], mesh.pool_size, mesh.pools)
        steps.append([[some[n] for n in pool] for pool in slots[0]])
    return steps


def fill(lengths: np.ndarray, seq_len: int, count: int) -> list[list[int]]:
    """`count` sequences full of these documents, in order, over and over; one that does not fit is split."""
    total = count * seq_len
    lengths = np.tile(lengths, -(-total // int(lengths.sum())))
    cuts = np.unique(np.concatenate([np.cumsum(lengths), np.arange(1, count + 1) * seq_len]))
    cuts = cuts[cuts <= total]
    sequence, parts = (cuts - 1) // seq_len, np.diff(cuts, prepend=0)
    return [part.tolist() for part in np.split(parts, np.flatnonzero(np.diff(sequence)) + 1)]
