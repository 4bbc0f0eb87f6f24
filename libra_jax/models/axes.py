"""Axes of a mesh beyond those of the pooled operator, and how arrays lie over all of them.

"tp" (tensor parallelism, arXiv 1909.08053): its ranks share the heads of a sequence, and the features inside a dense
MLP. Outside of these products they share its tokens (sequence parallelism, arXiv 2205.05198), and everything treats
them like further ranks of "cp". "pp" (pipeline parallelism): its ranks are stages, each with its own layers; what
belongs to a stage lies over the other axes only. A mesh may have neither.
"""

from __future__ import annotations

import math

from jax.sharding import Mesh, PartitionSpec

from libra_jax.attention import SEQUENCE_SPEC

TENSOR_AXIS = "tp"
PIPELINE_AXIS = "pp"


def rank_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a stage: all but "pp"."""
    return tuple(axis for axis in mesh.axis_names if axis != PIPELINE_AXIS)


def rank_count(mesh: Mesh) -> int:
    """Ranks of a stage."""
    return math.prod(mesh.shape[axis] for axis in rank_axes(mesh))


def tensor_ranks(mesh: Mesh) -> int:
    """Ranks that share the heads of a sequence: the length of axis "tp"."""
    return mesh.shape.get(TENSOR_AXIS, 1)


def token_spec(mesh: Mesh) -> PartitionSpec:
    """How (sequences, seq_len, ...) arrays lie where no rank needs another's tokens: over "tp" as well."""
    return PartitionSpec(("pool", "dp"), ("cp", TENSOR_AXIS)) if TENSOR_AXIS in mesh.shape else SEQUENCE_SPEC
