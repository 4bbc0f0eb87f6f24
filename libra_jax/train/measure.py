"""The record of one step: what the program gave, what its batch and plans say, and what machine and clock say.

In a run of several processes each plans the pools that it holds rows of, and waits for its own batches. What they know
is brought together here, in one small exchange a step, so that the record is that of the whole run in every process.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from libra_jax.train import metrics
from libra_jax.train.config import TrainConfig
from libra_jax.train.flops import model_flops, peak_flops
from libra_jax.train.metrics import StepRecord


def measure_step(
    config: TrainConfig, mesh: Mesh, step: int, batch: dict[str, Any], numbers: dict[str, Any], seconds: float
) -> StepRecord:
    """The record of a step. batch: of `BatchIterator`. numbers: what the program gave, on the host, but "micro_steps".

    Every process must call it for every step. seconds: from asking for the batch to having the numbers.
    """
    arrived = metrics.baselines(batch["lengths"], config.spec, config.mesh.pools)
    tokens = sum(map(sum, batch["lengths"]))
    device_bytes, host_bytes = peak_bytes(mesh)
    here = np.array([batch["planning_seconds"], batch["waited_seconds"], device_bytes or 0, host_bytes], np.float64)
    layers = config.model.num_layers // config.mesh.pp  # that a rank has
    planned, most = everywhere(plan_numbers(batch, config.micro_steps), here)
    skipped = numbers.pop("skipped")
    flops = model_flops(config.model, batch["lengths"], config.attention.window)
    rate = flops / seconds / mesh.size
    peak = config.metrics.peak_flops or peak_flops(mesh.devices.flat[0].device_kind, config.model.compute_dtype)
    return StepRecord(
        step=step,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        imbalance_home=metrics.imbalance(arrived["home"]),
        imbalance_ulysses=metrics.imbalance(arrived["ulysses"]),
        **dataclasses.asdict(planned_of(planned, config.spec_of(batch["pool_size"]).ranks, layers)),
        pool_size=batch["pool_size"],
        planning_seconds=float(most[0]),
        waited_seconds=float(most[1]),
        skipped=bool(skipped["in_a_row"] > 0),
        skipped_total=int(skipped["total"]),
        model_flops=float(flops),
        flops_per_second_per_device=rate,
        mfu=None if peak is None else rate / peak,
        device_peak_bytes=int(most[2]) or None,
        host_peak_bytes=int(most[3]),
        **{name: value.item() for name, value in numbers.items()},
    )


@dataclasses.dataclass(frozen=True)
class Planned:
    """What the plans of a step say; see `StepRecord`."""

    imbalance_libra: float
    imbalance_pools: float
    imbalance_ranks: float
    exchange_bytes_mean: float
    exchange_bytes_busiest: int
    fallbacks: int


def plan_numbers(batch: dict[str, Any], micro_steps: int) -> np.ndarray:
    """(pools, 2 * micro_steps + 3) float64, NaN for pools that this process has no plans of.

    Of each pool: pages visited in each micro-step, by all ranks together; by the busiest of them in each micro-step;
    bytes sent in the forward pass of one layer, all micro-steps together, by all ranks and by the busiest; fallbacks.
    """
    held, stats = batch["pool_numbers"], batch["stats"]
    work, sent = (
        np.stack([getattr(plan, name) for plan in stats]).reshape(micro_steps, len(held), -1)
        for name in ("work", "sent_bytes")
    )
    bytes_by_rank = sent.sum(axis=0)
    fallbacks = np.array([plan.fallback is not None for plan in stats]).reshape(micro_steps, len(held)).sum(axis=0)
    columns = [work.sum(axis=2).T, work.max(axis=2).T]
    columns += [x[:, None] for x in (bytes_by_rank.sum(axis=1), bytes_by_rank.max(axis=1), fallbacks)]
    numbers = np.full((batch["pools"], 2 * micro_steps + 3), np.nan)
    numbers[held] = np.concatenate(columns, axis=1)
    return numbers


def planned_of(numbers: np.ndarray, ranks: int, layers: int) -> Planned:
    """What follows from the numbers of all pools (`plan_numbers`). ranks: of a pool. layers: of a rank."""
    micro_steps, pools = (numbers.shape[1] - 3) // 2, len(numbers)
    pages, busiest = numbers[:, :micro_steps], numbers[:, micro_steps : 2 * micro_steps]
    sent, most_sent, fallbacks = numbers[:, 2 * micro_steps :].T
    even = pages.sum() / (pools * ranks)  # pages that every rank would visit if all were alike
    between_pools = pages.max(axis=0).sum() / ranks  # that those of the fullest pools would, shared evenly inside
    slowest = busiest.max(axis=0).sum()
    return Planned(
        imbalance_libra=float(slowest / even) if even else 1.0,
        imbalance_pools=float(between_pools / even) if even else 1.0,
        imbalance_ranks=float(slowest / between_pools) if even else 1.0,
        exchange_bytes_mean=float(layers * sent.sum() / (pools * ranks)),
        exchange_bytes_busiest=int(layers * most_sent.max()),
        fallbacks=int(fallbacks.sum()),
    )


def everywhere(*numbers: np.ndarray) -> list[np.ndarray]:
    """The largest of each number over all processes, which all must call it; NaN is no number. float64 arrays."""
    if jax.process_count() == 1:
        return list(numbers)
    flat = np.concatenate([array.ravel() for array in numbers])
    found = np.asarray(multihost_utils.process_allgather(flat.view(np.uint8)))  # bytes: JAX would make it float32
    largest = np.fmax.reduce(np.ascontiguousarray(found).view(np.float64), axis=0)
    ends = np.cumsum([array.size for array in numbers])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(largest, ends), numbers, strict=True)]


def peak_bytes(mesh: Mesh) -> tuple[int | None, int]:
    """Most memory taken so far: of this process' devices, the fullest; None where the platform does not say. And that
    of this process on its host."""
    found = [device.memory_stats() for device in mesh.local_devices]
    used = [stats["peak_bytes_in_use"] for stats in found if stats and "peak_bytes_in_use" in stats]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(used, default=None), resident
