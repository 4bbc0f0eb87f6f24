"""Parameters spread over all ranks (FSDP, ZeRO-3, arXiv 1910.02054): where each lies, and how it is had whole.

A parameter is float32 and lies along one dimension. To use it, ranks gather it in the type they compute in, half the
bytes; its gradient is summed and scattered back in float32, so no rank ever keeps a whole one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.attention import MESH_AXES


def spread_dimension(shape: tuple[int, ...], ranks: int) -> int | None:
    """The dimension along which an array of this shape is spread: the longest that the ranks divide, if there is one.
    Without one, every rank keeps the array."""
    fits = [d for d, size in enumerate(shape) if size % ranks == 0]
    return max(fits, key=lambda d: shape[d]) if fits else None


def spread_spec(shape: tuple[int, ...], ranks: int, first: int = 0) -> PartitionSpec:
    """How an array lies on the mesh. Dimensions before `first` are not spread: a scan takes one slice at a time."""
    along = spread_dimension(shape[first:], ranks)
    return PartitionSpec() if along is None else PartitionSpec(*[None] * (first + along), MESH_AXES)


def gather(weights: Any, mesh: Mesh, dtype: jnp.dtype) -> Any:
    """Every array whole on every rank: matrices as they are in `dtype`, vectors (norms) exactly; all still float32.

    weights: arrays, or a tree of them, that lie as `spread_spec` says. Their gradients lie so, too, summed in float32.
    """

    def one(w: jax.Array) -> jax.Array:
        exact = w.ndim < 2
        return _gathered(w, mesh, spread_spec(w.shape, mesh.size), w.dtype if exact else dtype)

    return jax.tree.map(one, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(w: jax.Array, mesh: Mesh, home: PartitionSpec, dtype: Any) -> jax.Array:
    # Kept on its shard until it is cast: the compiler may not gather float32 and cast afterwards.
    narrow = lax.with_sharding_constraint(w.astype(dtype), NamedSharding(mesh, home))
    return lax.with_sharding_constraint(narrow, NamedSharding(mesh, PartitionSpec())).astype(w.dtype)


def _gathered_forward(w: jax.Array, mesh: Mesh, home: PartitionSpec, dtype: Any) -> tuple[jax.Array, None]:
    return _gathered(w, mesh, home, dtype), None


def _gathered_backward(mesh: Mesh, home: PartitionSpec, dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (lax.with_sharding_constraint(gradient, NamedSharding(mesh, home)),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_on_rank(shard: jax.Array, along: int | None, dtype: Any) -> jax.Array:
    """What `gather` does, inside `jax.shard_map` over the whole mesh: a rank's shard -> the whole matrix.

    along: `spread_dimension` of the whole; None: the shard is the whole, and shard_map sums its gradient.
    """
    if along is None:
        return shard.astype(dtype).astype(shard.dtype)
    return lax.all_gather(shard.astype(dtype), MESH_AXES, axis=along, tiled=True).astype(shard.dtype)


def _on_rank_forward(shard: jax.Array, along: int | None, dtype: Any) -> tuple[jax.Array, None]:
    return gather_on_rank(shard, along, dtype), None


def _on_rank_backward(along: int | None, dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    if along is None:
        return (gradient,)
    return (lax.psum_scatter(gradient, MESH_AXES, scatter_dimension=along, tiled=True),)


gather_on_rank.defvjp(_on_rank_forward, _on_rank_backward)


@jax.custom_vjp
def together(x: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; backward, neither gradient is there before the other. So what uses x's next does not start
    while the gradient of a whole parameter still waits to be scattered, which could be until the end of the step."""
    return x, shard


def _together_backward(_: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return lax.optimization_barrier(gradients)


together.defvjp(lambda x, shard: ((x, shard), None), _together_backward)
