"""What the tests of the flax layers share: a small spec and mesh, batches, stock blocks, a dense oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from flax import linen, nnx
from operator_base import make_mesh

from libra_jax.layers import attention_fn
from libra_jax.spec import PoolSpec

S, FEATURES = 64, 32
BATCHES = [[[64], [9, 1, 30]], [[20, 44], [7] * 9], [[5], [33, 31]]]
LENGTHS = BATCHES[0]


def make_spec(heads=4, kv_heads=2, **others) -> PoolSpec:
    fields = {"seq_len": S, "head_dim": 8, "block": 8, "dtype": "float32"} | others
    return PoolSpec(pool_size=2, cp=2, num_heads=heads, num_kv_heads=kv_heads, **fields)


SPEC = make_spec()
MESH = make_mesh(1, 2, 2)
FN = attention_fn(SPEC, mesh=MESH)


def dense_attention(lengths):
    """What a block has without Libra: flax's way of calling, and a dense mask of the documents."""
    ids = oracle.segments(lengths, S)
    visible, real = jnp.asarray(oracle.visibility(ids)[:, None]), jnp.asarray(ids > 0)[:, :, None, None]

    def dense(query, key, value, *, mask=None, is_causal=True, deterministic=True, dtype=None, **_):
        assert mask is None and is_causal and deterministic
        return jnp.where(real, jax.nn.dot_product_attention(query, key, value, mask=visible), 0)

    return dense


def hidden(seed: int, sequences: int = 2) -> jax.Array:
    x = np.random.default_rng(seed).standard_normal((sequences, S, FEATURES)).astype(np.float32)
    return jnp.asarray(x)


def assert_trees_close(got, want, tolerance=2e-5) -> None:
    (got, structure), (want, other) = (jax.tree.flatten(tree) for tree in (got, want))
    assert structure == other and got
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=tolerance * max(1.0, float(jnp.abs(w).max())), rtol=0)


# Stock transformer blocks, as a flax user writes them. Nothing in them knows of Libra.


class NnxBlock(nnx.Module):
    def __init__(self, attention_fn, *, num_kv_heads=2, normalize_qk=True, rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(FEATURES, rngs=rngs), nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=FEATURES, num_kv_heads=num_kv_heads, normalize_qk=normalize_qk, decode=False,
            attention_fn=attention_fn, rngs=rngs,
        )  # fmt: skip
        self.up, self.down = nnx.Linear(FEATURES, 48, rngs=rngs), nnx.Linear(48, FEATURES, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class LinenBlock(linen.Module):
    attention_fn: object

    @linen.compact
    def __call__(self, x):
        attention = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=self.attention_fn)
        x = x + attention(linen.LayerNorm()(x))
        return x + linen.Dense(FEATURES)(linen.gelu(linen.Dense(48)(linen.LayerNorm()(x))))


def loss_of(y, lengths) -> jax.Array:
    """Of the real tokens only: what flax's layers do to padding is nobody's business."""
    real = jnp.asarray(oracle.segments(lengths, S) > 0)[:, :, None]
    return jnp.sum(jnp.where(real, jnp.sin(y), 0))


def nnx_attention(**keywords):
    return nnx.MultiHeadAttention(**{
        "num_heads": 4, "in_features": FEATURES, "num_kv_heads": 2, "decode": False, "attention_fn": FN,
        "rngs": nnx.Rngs(0),
    } | keywords)  # fmt: skip
