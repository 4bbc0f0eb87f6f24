"""Parameters spread over all ranks (FSDP, ZeRO-3, arXiv 1910.02054): where each lies, and how it is had whole.

A parameter is float32 and lies along one dimension. To use it, ranks gather it in the type they compute in, half the
bytes; its gradient is summed and scattered back in float32, so no rank ever keeps a whole one.

On a mesh with an axis "tp" a rank has and uses its own heads' part of the attention's matrices, and its own features'
part of a dense MLP's; the other axes gather only that (see `axes`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from libra_jax.attention import in_context
from libra_jax.models.axes import TENSOR_AXIS, rank_axes, rank_count, tensor_ranks

_TENSOR_DIMENSIONS: dict[tuple[str, ...], int] = {  # heads, and the features inside a dense MLP
    ("attention", "q_proj", "kernel"): 1,
    ("attention", "k_proj", "kernel"): 1,
    ("attention", "v_proj", "kernel"): 1,
    ("attention", "o_proj", "kernel"): 0,
    ("mlp", "gate", "kernel"): 1,
    ("mlp", "up", "kernel"): 1,
    ("mlp", "down", "kernel"): 0,
}


def spread_dimension(shape: tuple[int, ...], ranks: int) -> int | None:
    """The dimension along which an array of this shape is spread: the longest that the ranks divide, if there is one.
    Without one, every rank keeps the array."""
    fits = [d for d, size in enumerate(shape) if size % ranks == 0]
    return max(fits, key=lambda d: shape[d]) if fits else None


def tensor_dimension(path: tuple[Any, ...], mesh: Mesh) -> int | None:
    """The dimension of a layer's parameter that "tp" spreads, None if there is none. path: jax's, to the array; the
    layer axis does not count."""
    if tensor_ranks(mesh) == 1:
        return None
    names = [name for key in path if isinstance(name := getattr(key, "key", None), str)]
    return _TENSOR_DIMENSIONS.get(tuple(names[-3:]))


def spread_spec(shape: tuple[int, ...], mesh: Mesh, first: int = 0, tensor: int | None = None) -> PartitionSpec:
    """How a parameter lies over the ranks of a stage.

    first: dimensions before it are not spread: a scan takes one slice at a time. tensor: `tensor_dimension`, counted
    from `first`; that one lies over "tp", and over the other axes too where it is the longest they divide.
    """
    if tensor is None:
        along = spread_dimension(shape[first:], rank_count(mesh))
        return PartitionSpec() if along is None else PartitionSpec(*[None] * (first + along), rank_axes(mesh))
    others = tuple(axis for axis in rank_axes(mesh) if axis != TENSOR_AXIS)
    own = list(shape[first:])
    own[tensor] //= tensor_ranks(mesh)
    axes: list[tuple[str, ...]] = [(TENSOR_AXIS,) if d == tensor else () for d in range(len(own))]
    if (along := spread_dimension(tuple(own), math.prod(mesh.shape[axis] for axis in others))) is not None:
        axes[along] += others
    return PartitionSpec(*[None] * first, *(names or None for names in axes))


def gather(weights: Any, mesh: Mesh, dtype: jnp.dtype) -> Any:
    """Every array whole on every rank, or its part for the rank's heads and features: matrices as they are in `dtype`,
    vectors (norms) exactly; all still float32.

    weights: a tree of a layer's parameters by their names, or one that is no layer's, lying as `spread_spec` says.
    Their gradients lie so, too, summed in float32.
    """

    mesh = in_context(mesh)

    def one(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
        exact, tensor = w.ndim < 2, tensor_dimension(path, mesh)
        used = PartitionSpec() if tensor is None else PartitionSpec(*[None] * tensor, TENSOR_AXIS)
        home = spread_spec(w.shape, mesh, tensor=tensor)
        return _gathered(w, NamedSharding(mesh, home), NamedSharding(mesh, used), w.dtype if exact else dtype)

    return jax.tree.map_with_path(one, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(w: jax.Array, home: NamedSharding, used: NamedSharding, dtype: Any) -> jax.Array:
    # Kept on its shard until it is cast: the compiler may not gather float32 and cast afterwards.
    narrow = lax.with_sharding_constraint(w.astype(dtype), home)
    return lax.with_sharding_constraint(narrow, used).astype(w.dtype)


def _gathered_forward(w: jax.Array, home: NamedSharding, used: NamedSharding, dtype: Any) -> tuple[jax.Array, None]:
    return _gathered(w, home, used, dtype), None


def _gathered_backward(
    home: NamedSharding, used: NamedSharding, dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (lax.with_sharding_constraint(gradient, home),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_on_rank(shard: jax.Array, along: int | None, axes: tuple[str, ...], dtype: Any) -> jax.Array:
    """What `gather` does, inside `jax.shard_map` over the whole mesh: a rank's shard -> the whole matrix.

    along: `spread_dimension` of the whole, over `axes`; None: the shard is the whole, and shard_map sums its gradient.
    """
    if along is None:
        return shard.astype(dtype).astype(shard.dtype)
    return lax.all_gather(shard.astype(dtype), axes, axis=along, tiled=True).astype(shard.dtype)


def _on_rank_forward(shard: jax.Array, along: int | None, axes: tuple[str, ...], dtype: Any) -> tuple[jax.Array, None]:
    return gather_on_rank(shard, along, axes, dtype), None


def _on_rank_backward(
    along: int | None, axes: tuple[str, ...], dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    if along is None:
        return (gradient,)
    return (lax.psum_scatter(gradient, axes, scatter_dimension=along, tiled=True),)


gather_on_rank.defvjp(_on_rank_forward, _on_rank_backward)


@jax.custom_vjp
def together(x: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; backward, neither gradient is there before the other. So what uses x's next does not start
    while the gradient of a whole parameter still waits to be scattered, which could be until the end of the step."""
    return x, shard


def _together_backward(_: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return lax.optimization_barrier(gradients)


together.defvjp(lambda x, shard: ((x, shard), None), _together_backward)
