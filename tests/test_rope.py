"""Rotary positions against flax's, against float64 a million tokens away, and YaRN against its formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from libra_jax.rope import YaRN, rotary

S = 24
LENGTHS = [[9, 1, 11], [24]]


def test_rotary_is_flax_rope_document_by_document():
    x = jnp.asarray(np.random.default_rng(8).standard_normal((2, S, 3, 8)), jnp.float32)
    ids = oracle.segments(LENGTHS, S)
    got = rotary(x, jnp.asarray(oracle.restarting_positions(ids)), theta=1000.0)
    rope = nnx.RoPE(theta=1000.0)
    for n, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            want = jax.vmap(rope, in_axes=-2, out_axes=-2)(x[n, start : start + length])
            np.testing.assert_allclose(got[n, start : start + length], want, atol=1e-5)
            start += length


def turned_in_float64(x, positions, frequency, scale=1.0):
    """x (S, D) by pairs, one frequency each; plain complex numbers."""
    half = x.shape[-1] // 2
    x = np.asarray(x, np.float64)
    pairs = (
        (x[:, :half] + 1j * x[:, half:]) * scale * np.exp(1j * np.asarray(positions, np.float64)[:, None] * frequency)
    )
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("theta", [10_000.0, 1e6, 5e6])
def test_far_positions_are_as_exact_as_near_ones(theta):
    """In float32 the angle of the first pair would be off by up to 0.03 at a million tokens."""
    positions = np.array([0, 1, 1023, 1024, 4097, 131_071, 262_143, 999_999, 2**20 - 1], np.int32)
    x = np.random.default_rng(9).standard_normal((len(positions), 128)).astype(np.float32)
    want = turned_in_float64(x, positions, theta ** (-np.arange(64) / 64))
    got = rotary(x[None, :, None], positions[None], theta)[0, :, 0]
    np.testing.assert_allclose(got, want, atol=1e-5)
    narrow = rotary(jnp.asarray(x, jnp.bfloat16)[None, :, None], positions[None], theta)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow[0, :, 0].astype(jnp.float32), want, atol=0.04)


@pytest.mark.parametrize(("factor", "theta"), [(4.0, 1e6), (8.0, 1e6), (32.0, 1e6), (40.0, 10_000.0)])
def test_yarn_slows_what_turns_less_than_once(factor, theta):
    """By pair and by the paper's words: how often does it turn within the original 32,768 positions?"""
    yarn, dim = YaRN(factor), 128
    frequency = np.empty(dim // 2)
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        fast, slow = (dim * math.log(32_768 / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        frequency[pair] = kept * plain + (1 - kept) * plain / factor
        turns = 32_768 * plain / (2 * math.pi)
        if turns > 40:
            assert frequency[pair] == plain
        if turns < 0.8:
            assert frequency[pair] == plain / factor
    positions = np.array([0, 5, 40_000, int(32_768 * factor) - 1], np.int32)
    x = np.random.default_rng(3).standard_normal((4, dim)).astype(np.float32)
    want = turned_in_float64(x, positions, frequency, 0.1 * math.log(factor) + 1)
    got = rotary(x[None, :, None], positions[None], theta, yarn)[0, :, 0]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_yarn_of_factor_one_changes_nothing():
    x = np.random.default_rng(3).standard_normal((1, 3, 2, 16)).astype(np.float32)
    positions = np.array([[0, 7, 1000]], np.int32)
    np.testing.assert_array_equal(rotary(x, positions, 1e4, YaRN(1.0)), rotary(x, positions, 1e4))


@pytest.mark.parametrize(
    "fields",
    [{"factor": 0.5}, {"factor": math.nan}, {"factor": 2, "original_max_positions": 0}, {"factor": 2, "beta_slow": 40}],
)
def test_yarn_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ValueError, match="YaRN"):
        YaRN(**fields)
