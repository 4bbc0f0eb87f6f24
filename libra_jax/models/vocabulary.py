"""Both ends of a language model, on a mesh: token ids -> embeddings, and hidden states -> loss.

The two are where a vocabulary of 150 thousand words costs memory. Tables are gathered for use as in `fsdp`; logits are
made for a chunk of a rank's own tokens at a time, forward and again backward (as in arXiv 2410.10989), so that neither
the logits of a sequence nor tokens of other ranks are ever held.

Letters: N sequences, S tokens of one, D width, V words.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from libra_jax.attention import in_context
from libra_jax.models.axes import rank_axes, rank_count, token_spec
from libra_jax.models.fsdp import gather_on_rank, spread_dimension, spread_spec, together


def look_up(
    table: Float[Array, "V D"], tokens: Int[Array, "N S"], mesh: Mesh, dtype: jnp.dtype
) -> Float[Array, "N S D"]:
    """Rows of the table, in dtype. tokens lie as `token_spec` says, and so does what is returned."""
    along, axes, home = spread_dimension(table.shape, rank_count(mesh)), rank_axes(mesh), token_spec(mesh)

    def on_rank(shard: jax.Array, tokens: jax.Array) -> jax.Array:
        return _rows(gather_on_rank(shard, along, axes, dtype), tokens).astype(dtype)

    specs = spread_spec(table.shape, mesh), home
    mapped = jax.shard_map(
        on_rank, mesh=in_context(mesh), in_specs=specs, out_specs=home, axis_names=set(axes), check_vma=False
    )
    return mapped(table, tokens)


def chunked_cross_entropy_sum(
    x: Float[Array, "N S D"], table: Float[Array, "V D"], targets: Int[Array, "N S"], mesh: Mesh, *, chunk: int
) -> TokenSums:
    """`cross_entropy_sum` of the logits x @ table.T, without the logits. Equal to it within rounding.

    x, targets: lie as `token_spec` says. table: float32, lies as `spread_spec` says; multiplied in x's dtype.
    chunk: tokens of a rank whose logits are held at once, at most.
    """
    along, axes, home = spread_dimension(table.shape, rank_count(mesh)), rank_axes(mesh), token_spec(mesh)

    def on_rank(x: jax.Array, shard: jax.Array, targets: jax.Array) -> TokenSums:
        x, shard = together(x, shard)
        whole, x, targets = gather_on_rank(shard, along, axes, x.dtype), x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        size = _divisor(targets.size, chunk)

        @jax.checkpoint
        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, cross_entropy_sum(_logits(part[0], whole), part[1])), None

        parts = x.reshape(-1, size, x.shape[-1]), targets.reshape(-1, size)
        nothing = TokenSums(*(jnp.zeros((), kind) for kind in (jnp.float32, jnp.float32, jnp.int32)))
        sums, _ = jax.lax.scan(add, nothing, parts)
        return jax.tree.map(lambda s: s.reshape(1, 1), sums)

    specs = home, spread_spec(table.shape, mesh), home
    mapped = jax.shard_map(
        on_rank, mesh=in_context(mesh), in_specs=specs, out_specs=home, axis_names=set(axes), check_vma=False
    )
    return jax.tree.map(jnp.sum, mapped(x, table, targets))


class TokenSums(NamedTuple):
    """Sums over the tokens that have a target. They add up over shards, chunks, sequences and micro-steps, so a mean
    over any of them is sum / targets of the whole: never a mean of means.

    loss: of -log softmax(logits)[target]. squares: of logsumexp(logits) ** 2, for the z-loss (arXiv 2204.02311). Both
    float32. targets: how many there are, int32.
    """

    loss: Float[Array, ""]
    squares: Float[Array, ""]
    targets: Int[Array, ""]


def cross_entropy_sum(logits: Float[Array, "*batch vocab"], targets: Int[Array, "*batch"]) -> TokenSums:
    """logits: float32. targets: -1 where there is none."""
    has_target = targets >= 0
    picked = jnp.take_along_axis(logits, jnp.where(has_target, targets, 0)[..., None], axis=-1)[..., 0]
    normal = jax.nn.logsumexp(logits, axis=-1)
    return TokenSums(
        jnp.sum(jnp.where(has_target, normal - picked, 0.0)),
        jnp.sum(jnp.where(has_target, normal * normal, 0.0)),
        jnp.sum(has_target, dtype=jnp.int32),
    )


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table[tokens], for a gradient whose table of zeros is not made before it is used, at the end of the step."""
    return _rows_of(table, tokens, table.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_of(table: jax.Array, tokens: jax.Array, words: int) -> jax.Array:
    return table[tokens]


def _rows_forward(table: jax.Array, tokens: jax.Array, words: int) -> tuple[jax.Array, jax.Array]:
    return table[tokens], tokens


def _rows_backward(words: int, tokens: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    gradient, zero = jax.lax.optimization_barrier((gradient, jnp.zeros((), gradient.dtype)))
    return jnp.full((words, gradient.shape[-1]), zero).at[tokens].add(gradient), None


_rows_of.defvjp(_rows_forward, _rows_backward)


@jax.custom_vjp
def _logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """x (S, D) in the type to multiply in, table (V, D) float32 -> (S, V) float32. All three products multiply in x's
    type and add in float32: the gradient of the logits, left float32, would make two slow float32 products."""
    return jnp.einsum("sd,vd->sv", x, table.astype(x.dtype), preferred_element_type=jnp.float32)


def _logits_forward(x: jax.Array, table: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _logits(x, table), (x, table)


def _logits_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, table = kept
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    gradient = gradient.astype(x.dtype)
    return product("sv,vd->sd", gradient, table.astype(x.dtype)).astype(x.dtype), product("sv,sd->vd", gradient, x)


_logits.defvjp(_logits_forward, _logits_backward)


def _divisor(size: int, most: int) -> int:
    """The largest divisor of size that is at most `most`."""
    return next(d for d in range(min(size, most), 0, -1) if size % d == 0)
