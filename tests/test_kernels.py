"""The kernels on one device: the oracle against finite differences, `reference_attention` and the tile
implementations against the oracle, and both against plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from libra_kernels import PADDING, TileOptions, Tiles, reference_attention, tile_backward, tile_forward

LENGTHS = [[13, 1, 18], [32], [7, 9]]
S, H, K, D, E = 32, 4, 2, 8, 6


def make_inputs(seed, heads=H, kv_heads=K, value_dim=E):
    rng = np.random.default_rng(seed)
    shapes = ((heads, D), (kv_heads, D), (kv_heads, value_dim), (heads, value_dim))
    return [rng.standard_normal((len(LENGTHS), S, *shape)).astype(np.float32) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("window", "scale", "soft_cap"))
def reference_and_gradients(q, k, v, cotangent, segment_ids, positions=None, window=None, scale=None, soft_cap=None):
    out, pull = jax.vjp(
        lambda q, k, v: reference_attention(q, k, v, segment_ids, positions, window, scale, soft_cap), q, k, v
    )
    return out, *pull(cotangent)


def assert_close(got, want, tolerance=2e-5):
    for name, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        g = np.asarray(g, np.float64)
        assert np.isfinite(g).all(), name
        np.testing.assert_allclose(g, w, atol=tolerance * max(1.0, np.abs(w).max()), rtol=0, err_msg=name)


def truth_of(arrays, ids, **options):
    truth = oracle.attention(*arrays[:3], ids, arrays[3], **options)
    return truth.out, truth.dq, truth.dk, truth.dv


# The oracle itself.


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"scale": 0.7, "soft_cap": 1.5}], ids=["plain", "window", "soft_cap"]
)
def test_oracle_gradients_are_finite_differences(options):
    arrays = [x.astype(np.float64) for x in make_inputs(0)]
    ids = oracle.segments(LENGTHS, S)
    truth = oracle.attention(*arrays[:3], ids, arrays[3], **options)
    rng, step = np.random.default_rng(1), 1e-5
    for which, gradient in enumerate((truth.dq, truth.dk, truth.dv)):
        for _ in range(4):
            entry = tuple(int(rng.integers(n)) for n in gradient.shape)
            losses = []
            for sign in (1, -1):
                moved = [x.copy() for x in arrays[:3]]
                moved[which][entry] += sign * step
                losses.append((oracle.attention(*moved, ids, **options).out * arrays[3]).sum())
            slope = (losses[0] - losses[1]) / (2 * step)
            np.testing.assert_allclose(gradient[entry], slope, rtol=1e-6, atol=1e-8)


def test_oracle_equals_dense_softmax_of_jax():
    q, k, v, _ = make_inputs(2, value_dim=D)
    ids = oracle.segments(LENGTHS, S)
    mask = jnp.asarray(oracle.visibility(ids)[:, None])
    plain = jax.nn.dot_product_attention(q, k, v, mask=mask)
    real = ids > 0
    np.testing.assert_allclose(np.asarray(plain)[real], oracle.attention(q, k, v, ids).out[real], atol=2e-6)


# reference_attention.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 5},
        {"window": S},
        {"scale": 0.5},
        {"soft_cap": 2.0},
        {"window": 4, "soft_cap": 3.0},
    ],
    ids=str,
)
def test_reference_matches_oracle(options):
    arrays, ids = make_inputs(3), oracle.segments(LENGTHS, S)
    got = reference_and_gradients(*arrays, ids, **options)
    assert_close(got, truth_of(arrays, ids, **options))
    assert all(not np.any(np.asarray(x)[ids == 0] != 0) for x in got)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (6, 6), (28, 7)])
def test_reference_head_layouts(heads, kv_heads):
    arrays, ids = make_inputs(4, heads, kv_heads), oracle.segments(LENGTHS, S)
    assert_close(reference_and_gradients(*arrays, ids), truth_of(arrays, ids))


def test_reference_matches_jax_with_a_dense_mask():
    q, k, v, cotangent = make_inputs(5, value_dim=D)
    ids = oracle.segments([[13, 19], [32], [7, 25]], S)
    mask = jnp.asarray(oracle.visibility(ids)[:, None])
    out, pull = jax.vjp(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask), q, k, v)
    assert_close(reference_and_gradients(q, k, v, cotangent, ids), (out, *pull(cotangent)))


def test_reference_reads_positions_as_order_in_the_document():
    arrays, ids = make_inputs(6), oracle.segments(LENGTHS, S)
    plain = reference_and_gradients(*arrays, ids, window=4)
    restart = oracle.restarting_positions(ids)
    through = np.broadcast_to(np.arange(S, dtype=np.int32), ids.shape)
    arbitrary = np.where(ids == 0, 977, restart).astype(np.int32)
    for positions in (restart, through, arbitrary):
        got = reference_and_gradients(*arrays, ids, positions, window=4)
        assert all(np.array_equal(a, b) for a, b in zip(got, plain, strict=True))


def test_reference_follows_positions_when_tokens_are_stored_in_another_order():
    arrays, ids = make_inputs(7), oracle.segments([[20, 12]] * 3, S)
    order = np.concatenate([np.random.default_rng(0).permutation(20), 20 + np.arange(12)])
    positions = oracle.restarting_positions(ids)[:, order]
    shuffled = reference_and_gradients(*(x[:, order] for x in arrays), ids, positions, window=6)
    want = truth_of(arrays, ids, window=6)
    assert_close(shuffled, [x[:, order] for x in want])


def test_segment_ids_of_any_size_and_order():
    ids = np.array(
        [[5] * 9 + [2] * 11 + [-1] * 12, [7] * 15 + [3] * 4 + [900] * 13, [3] * 2 + [2] * 20 + [1] * 6 + [0] * 4]
    )
    ids = ids.astype(np.int32)
    arrays = make_inputs(8)
    arrays[3][ids <= 0] = 0
    got = [np.asarray(x) for x in reference_and_gradients(*arrays, ids)]
    real = ids > 0
    for g, w in zip(got, truth_of(arrays, np.where(real, ids, 0)), strict=True):
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g[real], w[real], atol=2e-5)
        assert not np.any(g[ids == 0] != 0)


def test_padding_between_documents_shifts_nothing():
    ids = np.array([[1] * 9 + [0] * 3 + [2] * 7 + [0] * 4 + [3] * 9] * 3, np.int32)
    arrays = make_inputs(9)
    assert_close(reference_and_gradients(*arrays, ids), truth_of(arrays, ids))


def test_non_finite_padding_stays_where_it_is():
    arrays, ids = make_inputs(10), oracle.segments(LENGTHS, S)
    for array, value in zip(arrays, (np.nan, np.inf, np.nan, -np.inf), strict=True):
        array[ids == 0] = value
    assert_close(reference_and_gradients(*arrays, ids), truth_of(arrays, ids))


def test_reference_refuses_shapes_that_do_not_fit():
    q, k, v, _ = make_inputs(11)
    ids = oracle.segments(LENGTHS, S)
    with pytest.raises(ValueError, match=r"segment_ids \(3, 31\).*\(3, 32\)"):
        reference_attention(q, k, v, ids[:, 1:])
    with pytest.raises(ValueError, match=r"positions \(3, 31\).*\(3, 32\)"):
        reference_attention(q, k, v, ids, ids[:, 1:])
    with pytest.raises(ValueError, match="dividing"):
        reference_attention(q[:, :, :3], k, v, ids)


# The tile kernels: blocks and pages in shuffled slots, joined by tables.

BLOCK_SIZE = 8
SPARE = 3
"""Slots that no table names; they hold NaN."""


def tile_problem(rng, arrays, ids, window):
    """One lane for each (sequence, kv head), its blocks and pages in random slots. Returns the arrays by slot, the
    tables with entries in random order, and where each (lane, block) went."""
    n, s, heads, _ = arrays[0].shape
    kv_heads = arrays[1].shape[2]
    group, per_lane = heads // kv_heads, s // BLOCK_SIZE
    lanes = n * kv_heads
    visible = oracle.visibility(ids, window)
    first = np.where(visible.any(2), visible.argmax(2), PADDING).astype(np.int32)

    def split(x, per_head):  # (N, S, K * per_head, W) -> (lanes * blocks, B, per_head, W)
        x = x.reshape(n, per_lane, BLOCK_SIZE, kv_heads, per_head, x.shape[-1])
        return x.transpose(0, 3, 1, 2, 4, 5).reshape(lanes * per_lane, BLOCK_SIZE, per_head, -1)

    units = lanes * per_lane
    q_slot, page_slot = rng.permutation(units + SPARE)[:units], rng.permutation(units + SPARE)[:units]

    def scatter(slot, values):
        slots = np.full((units + SPARE, *values.shape[1:]), np.nan, np.float32)
        slots[slot] = values
        return slots

    q, d_out = scatter(q_slot, split(arrays[0], group)), scatter(q_slot, split(arrays[3], group))
    k, v = scatter(page_slot, split(arrays[1], 1)[:, :, 0]), scatter(page_slot, split(arrays[2], 1)[:, :, 0])
    first_visible = np.full((units + SPARE, BLOCK_SIZE), PADDING, np.int32)
    entries, pages = [], []
    for unit in rng.permutation(units):
        lane, block = divmod(int(unit), per_lane)
        rows = first[lane // kv_heads, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        first_visible[q_slot[unit]] = rows
        low = rows.min() // BLOCK_SIZE if rows.min() < PADDING else block + 1
        entries.append([q_slot[unit], block, low, block + 1 - low, len(pages)])
        pages += [page_slot[lane * per_lane + page] for page in range(low, block + 1)]
    tables = np.array(entries, np.int32), np.array(pages + [0] * 5, np.int32), first_visible
    return (q, k, v, d_out), tables, (q_slot, page_slot, split)


@functools.partial(jax.jit, static_argnames=("options", "implementation"))
def run_tiles(q, k, v, d_out, tables, cut, options, implementation):
    """Two launches, entries before and after `cut`, with every output poisoned first."""
    entries, pages, first_visible = tables
    out = jnp.full((*q.shape[:-1], v.shape[-1]), jnp.nan, q.dtype)
    lse = jnp.full((*q.shape[:-1], 2), jnp.nan, jnp.float32)
    dq = jnp.full(q.shape, jnp.nan, q.dtype)
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    waves = [(jnp.int32(0), cut), (cut, jnp.int32(entries.shape[0]))]
    for start, stop in waves:
        tiles = Tiles(entries, pages, first_visible, start, stop)
        out, lse = tile_forward(q, k, v, tiles, out, lse, options=options, implementation=implementation)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    for start, stop in waves:
        tiles = Tiles(entries, pages, first_visible, start, stop)
        dq, dk, dv = tile_backward(
            q, k, v, d_out, lse, delta, tiles, dq, dk, dv, options=options, implementation=implementation
        )
    return out, lse, dq, dk, dv


TILE_CASES = {
    "plain": {"heads": 4, "kv_heads": 2},
    "window": {"heads": 2, "kv_heads": 2, "window": 5},
    "soft_cap": {"heads": 6, "kv_heads": 2, "soft_cap": 2.0, "scale": 0.6},
}


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("case", list(TILE_CASES))
def test_tile_kernels_match_oracle(implementation, case):
    settings = dict(TILE_CASES[case])
    window, soft_cap, scale = settings.pop("window", None), settings.pop("soft_cap", None), settings.pop("scale", None)
    arrays, ids = make_inputs(12, **settings), oracle.segments(LENGTHS, S)
    for array in arrays:
        array[ids == 0] = 0  # the operator zeroes padding before the kernel sees it
    problem, tables, (q_slot, page_slot, split) = tile_problem(np.random.default_rng(13), arrays, ids, window)
    problem = [np.where(np.isnan(x), 0, x) for x in problem] if implementation == "reference" else problem
    options = TileOptions(D**-0.5 if scale is None else scale, soft_cap)
    got = run_tiles(*problem, tables, jnp.int32(7), options, implementation)
    out, lse, dq, dk, dv = (np.asarray(x) for x in got)
    truth = oracle.attention(*arrays[:3], ids, arrays[3], window=window, scale=scale, soft_cap=soft_cap)
    group = settings["heads"] // settings["kv_heads"]
    for name, g, w in (
        ("out", out[q_slot], split(truth.out, group)),
        ("lse", lse[q_slot].sum(axis=-1), split(truth.lse[..., None], group)[..., 0]),
        ("dq", dq[q_slot], split(truth.dq, group)),
        ("dk", dk[page_slot], split(truth.dk, 1)[:, :, 0]),
        ("dv", dv[page_slot], split(truth.dv, 1)[:, :, 0]),
    ):
        np.testing.assert_allclose(g, w, atol=2e-5, err_msg=name)
    spare = np.setdiff1d(np.arange(out.shape[0]), q_slot)
    assert np.isnan(out[spare]).all() and np.isnan(dq[spare]).all(), "slots that no entry names keep what they held"
