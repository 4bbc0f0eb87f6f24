"""The Triton kernels in Triton's interpreter: against the float64 oracle, beside plain JAX in the same low precision,
and bit against bit. Every launch also checks each address, and that whatever it writes has one owner."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libra_kernels import launch
from tile_problems import Case, Dense, Tables, by_unit, make_tables, random_dense
from tile_runs import (
    Results,
    assert_as_good_as_plain_jax,
    assert_lse,
    assert_padding_is_zero,
    assert_same_bits,
    case_launch,
    run,
    truth,
    work_of,
)

RAGGED = [[100, 1, 91], [190]]
CASES = {
    # Widths, alone and together with other blocks.
    "width 64": Case(RAGGED, 192, group=2),
    "width 96": Case(RAGGED, 192, group=2, head_dim=96),
    "width 128": Case(RAGGED, 192, group=2, head_dim=128),
    "width 192": Case(RAGGED, 192, group=2, head_dim=192),
    "width 192, values 128": Case(RAGGED, 192, group=2, head_dim=192, value_dim=128),
    "width 256": Case(RAGGED, 192, group=2, head_dim=256),
    "float16": Case(RAGGED, 192, group=2, dtype="float16"),
    "float16, width 128, values 192": Case(RAGGED, 192, head_dim=128, value_dim=192, dtype="float16"),
    "block 128": Case([[300, 84], [130]], 384, block=128, group=2, head_dim=128, keys=128),
    "block 256": Case([[200, 312], [1, 400]], 512, block=256, keys=128),
    "block 256, group 16": Case([[255, 2]], 512, block=256, group=16, keys=128),
    # Heads that share a key/value head.
    **{f"group {g}": Case([[100, 1, 91]], 192, group=g) for g in (1, 3, 5, 6, 8, 16)},
    "three key/value heads": Case(RAGGED, 192, group=2, kv_heads=3),
    # What rows may see.
    "window 1": Case(RAGGED, 192, group=2, window=1),
    "window 5": Case(RAGGED, 192, group=2, window=5),
    "window of a block": Case([[256], [250]], 256, window=64),
    "window across blocks": Case([[384], [200, 30, 154]], 384, group=2, window=100),
    "documents of one token": Case([[1] * 128, [1] * 70], 128, group=2),
    "documents of one block": Case([[64] * 4, [64, 128]], 256),
    "one document": Case([[512]], 512, head_dim=128, block=128),
    "padding between documents": Case([[70, -100, 22, -30, 34], [-64, 100]], 256, group=2),
    "a sequence of padding": Case([[], [-256], [1]], 256),
    # The logits.
    "soft cap": Case(RAGGED, 192, group=2, soft_cap=2.0),
    "soft cap, window, float16": Case(RAGGED, 192, group=3, soft_cap=30.0, window=50, dtype="float16"),
    "soft cap and scale": Case(RAGGED, 192, soft_cap=1.0, scale=0.7, head_dim=96),
    # Tile sizes.
    **{
        f"tile {m}x{n}": Case([[150, 106]], 256, block=128, group=2, rows=m, keys=n)
        for m, n in ((16, 32), (16, 128), (32, 64), (64, 32), (256, 64), (64, 128), (128, 128))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_good_as_plain_jax(name):
    case = CASES[name]
    tables, dense = make_tables(case, np.random.default_rng(1), waves=2), random_dense(case)
    assert_as_good_as_plain_jax(case, run(case, tables, dense), dense)


@pytest.mark.parametrize("head_dim", launch.HEAD_DIMS)
def test_the_tile_sizes_that_are_launched(head_dim):
    """The table's, each combination once whatever the architecture."""
    case = Case([[150, 106]], 256, block=128, group=2, head_dim=head_dim)
    tables, dense = make_tables(case, np.random.default_rng(2)), random_dense(case)
    chosen = {}
    for arch in launch.ARCHITECTURES:
        for which in launch.PASSES:
            sizes = launch.choose(which, arch, block=128, group=2, head_dim=head_dim, v_head_dim=head_dim)
            chosen.setdefault(which, {})[sizes.rows, sizes.keys] = sizes
    for i in range(max(len(sizes) for sizes in chosen.values())):
        launches = {which: list(sizes.values())[i % len(sizes)] for which, sizes in chosen.items()}
        assert_as_good_as_plain_jax(case, run(case, tables, dense, launches=launches), dense)


PEAKED = {
    "scale 1": Case(RAGGED, 192, group=2, scale=1.0),
    "scale 1, float16": Case(RAGGED, 192, group=2, scale=1.0, dtype="float16"),
    "logits of thousands": Case(RAGGED, 192, group=2, scale=200.0),
    "logits of thousands, float16": Case(RAGGED, 192, group=2, scale=200.0, dtype="float16"),
}


@pytest.mark.parametrize("name", PEAKED)
def test_large_logits(name):
    """With an exact delta. The operator makes it from the output in 16 bits, as FlashAttention does; where one key has
    nearly all the weight that alone is two to three times plain JAX's error, and none of the kernels' doing."""
    case = PEAKED[name]
    tables, dense = make_tables(case, np.random.default_rng(1)), random_dense(case)
    want = truth(case, dense)
    delta = (want.out * by_unit(case, dense.d_out.astype(np.float64))).sum(axis=-1)
    assert_as_good_as_plain_jax(case, run(case, tables, dense, delta=delta), dense)


# Bit against bit.

BITS = Case([[150, 1, 70], [100, 156]], 256, group=2, kv_heads=2, window=120)


def test_same_bits_run_to_run_and_wherever_blocks_and_pages_lie():
    straight = run(BITS, make_tables(BITS, np.random.default_rng(0), shuffle=False))
    for seed in (0, 1):
        assert_same_bits(run(BITS, make_tables(BITS, np.random.default_rng(seed))), straight)


def test_out_and_dq_have_the_same_bits_for_any_waves():
    whole = run(BITS, make_tables(BITS, np.random.default_rng(0)))
    for waves in (2, 5):
        parts = run(BITS, make_tables(BITS, np.random.default_rng(waves), waves=waves))
        assert_same_bits(parts, whole, ("out", "lse", "dq"))
        for name in ("dk", "dv"):  # sums in another order: float32 roundings, a few for each wave
            got, want = getattr(parts, name), getattr(whole, name)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=name)


def test_pages_that_nobody_sees_change_no_bit():
    needed = run(BITS, make_tables(BITS, np.random.default_rng(0)))
    assert_same_bits(run(BITS, make_tables(BITS, np.random.default_rng(0), wide=True)), needed)


def test_position_in_the_sequence_changes_no_bit():
    early = run(BITS, make_tables(BITS, np.random.default_rng(0)))
    # A million blocks later: token 67 million, still below the position that stands for padding.
    assert_same_bits(run(BITS, make_tables(BITS, np.random.default_rng(0), later=2**20)), early)


def test_addresses_beyond_32_bits():
    tables = make_tables(BITS, np.random.default_rng(0))
    near = run(BITS, tables)
    # 2 ** 25 slots further on: 2 ** 38 elements of q, and 2 ** 32 of lse.
    assert_same_bits(run(BITS, tables, hole=2**25), near)


def test_gradients_are_added_to_what_is_there():
    tables, rng = make_tables(BITS, np.random.default_rng(0)), np.random.default_rng(7)
    alone = run(BITS, tables)
    base = tuple(rng.standard_normal(x.shape).astype(np.float32) for x in (alone.dk, alone.dv))
    added = run(BITS, tables, base=base)
    assert_same_bits(added, alone._replace(dk=base[0] + alone.dk, dv=base[1] + alone.dv))


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("factor", [1.5, 1e4])
def test_another_document_changes_no_bit(factor, soft_cap):
    """Also where its logits are so large that their weights, if they were not masked, would be infinite."""
    case = Case([[90, 40, 62]], 192, group=2, soft_cap=soft_cap)
    tables, dense = make_tables(case, np.random.default_rng(3)), random_dense(case)
    changed = Dense(*(x.copy() for x in dense))
    for x in changed:
        x[:, 90:130] = (x[:, 90:130].astype(np.float32) * factor).astype(x.dtype)
    rows = np.arange(192).reshape(3, 64)
    others = (rows < 90) | (rows >= 130)
    before, after = run(case, tables, dense), run(case, tables, changed)
    assert_same_bits(*(Results(*(x[others] for x in results)) for results in (after, before)))
    assert (before.out != after.out).any()


def test_overflow_between_documents_stays_out():
    """Finite numbers of two documents that share a page, whose product is infinite: 0 * inf must not become NaN."""
    case = Case([[90, 40, 62]], 192, group=2)
    tables, dense = make_tables(case, np.random.default_rng(3)), random_dense(case)
    plain = run(case, tables, dense)
    large = Dense(*(x.copy() for x in dense))
    large.d_out[:, 130:] = (large.d_out[:, 130:].astype(np.float32) * 2.0**70).astype(large.d_out.dtype)
    large.v[:, 90:130] = (large.v[:, 90:130].astype(np.float32) * 2.0**70).astype(large.v.dtype)
    got = run(case, tables, large)  # which looks for NaN everywhere
    rows = np.arange(192).reshape(3, 64)
    assert_same_bits(*(Results(*(x[rows < 90] for x in results)) for results in (got, plain)))


# Tables with nothing in them.


def test_nothing_to_do_touches_nothing():
    tables = make_tables(BITS, np.random.default_rng(0))
    none = np.zeros((len(tables.pages), 4), np.int32)
    for start in (0, 3, len(tables.entries)):
        # `run` holds the slots that no entry uses, here all of them, against what they held.
        run(BITS, tables._replace(waves=[(start, start, none)]))


def test_empty_readers_of_any_form():
    tables = make_tables(BITS, np.random.default_rng(0))
    ((start, stop, readers),) = tables.waves
    odd = np.where((readers[:, :1] == readers[:, 1:2]), np.array([[5, 5, 9, 2]], np.int32), readers)
    want = run(BITS, tables)
    assert_same_bits(run(BITS, tables._replace(waves=[(start, stop, odd)])), want)


# Random tables, in float32 and with small tiles: the logic alone, with nothing hidden by 16 bits.


@st.composite
def problems(draw: st.DrawFn) -> tuple[Case, Tables]:
    block = draw(st.sampled_from([32, 64]))
    seq_len = block * draw(st.integers(1, 4))
    sequences = []
    for _ in range(draw(st.integers(1, 2))):
        documents, left = [], draw(st.integers(0, seq_len))
        while left:
            documents.append(draw(st.integers(1, left)) * draw(st.sampled_from([1, 1, 1, -1])))
            left -= abs(documents[-1])
        sequences.append(documents)
    widths = st.sampled_from([16, 48])
    case = Case(
        sequences, seq_len, block=block, group=draw(st.sampled_from([1, 2, 3, 5])), kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(widths), value_dim=draw(widths), window=draw(st.none() | st.integers(1, seq_len)),
        soft_cap=draw(st.sampled_from([None, 3.0])), dtype="float32", rows=draw(st.sampled_from([32, 64])),
        keys=draw(st.sampled_from([16, 32, 64])), seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    later = draw(st.sampled_from([0, 1, 1000]))
    return case, make_tables(case, rng, waves=draw(st.integers(1, 3)), wide=draw(st.booleans()), later=later)


@given(problems())
@settings(max_examples=20, deadline=None)
def test_random_tables(problem):
    case, tables = problem
    dense = random_dense(case)
    got, want = run(case, tables, dense), truth(case, dense)
    for name in ("out", "dq", "dk", "dv"):
        w = getattr(want, name)
        # float32 throughout: some hundred roundings of 6e-8 at most, on sums of up to 320 terms
        np.testing.assert_allclose(getattr(got, name), w, rtol=0, atol=5e-6 * max(1.0, np.abs(w).max()), err_msg=name)
    assert_lse(case, got.lse, want.lse)
    assert_padding_is_zero(case, got)


# What is done, and what is left out.


def count_tiles(case: Case, m: int, n: int) -> tuple[int, int]:
    """Tiles of m rows and n keys in which some row sees some key, and those among them where not all see all."""
    visible = oracle.visibility(case.segment_ids(), case.window)
    token = np.arange(case.seq_len * case.group) // case.group
    seen = visible[:, token].reshape(len(visible), -1, m, case.seq_len // n, n).transpose(0, 1, 3, 2, 4)
    some, every = seen.any(axis=(3, 4)), seen.all(axis=(3, 4))
    return case.kv_heads * int(some.sum()), case.kv_heads * int((some & ~every).sum())


@pytest.mark.parametrize("wide", [False, True], ids=["", "with pages that nobody sees"])
@pytest.mark.parametrize(
    "case",
    [
        Case([[512], [100, 50, 1, 200, 90]], 512, block=128, group=2, keys=128, overlap=False),
        Case([[512], [300, 212]], 512, block=128, group=2, window=200, rows=64, overlap=False),
        Case([[512]], 512, block=256, group=4, keys=128, kv_heads=2, overlap=False),
        Case([[512], [300, 212]], 512, block=128, group=2, window=200, rows=64),
    ],
    ids=["documents", "window", "block 256", "overlap"],
)
def test_only_tiles_that_somebody_sees_are_visited_and_only_edges_masked(case, wide):
    tables, sizes = make_tables(case, np.random.default_rng(0), wide=wide), case_launch(case)
    m, n = sizes.rows, sizes.keys
    visited, edges = count_tiles(case, m, n)
    work = work_of(case, tables)
    dots = {"forward": 2, "dq": 3, "dkv": 4}
    for which in ("forward", "dq"):
        # With overlap each program multiplies one tile of weights more, of zeros.
        more = sum(stop - start for start, stop, _ in tables.waves) * (case.block * case.group // m)
        extra = more if which == "forward" and case.overlap else 0
        assert work.multiply_adds[which] == (visited * dots[which] + extra) * m * n * case.head_dim
        assert work.tile_comparisons[which] <= edges * 2
    if not wide:
        # By blocks and pages here: what reads a page, by the row of the table, is masked where not all see it whole.
        whole_blocks, edge_blocks = count_tiles(case, case.block * case.group, case.block)
        tiles = case.block * case.group // m * (case.block // n)
        assert work.multiply_adds["dkv"] <= whole_blocks * tiles * dots["dkv"] * m * n * case.head_dim
        assert work.tile_comparisons["dkv"] <= edge_blocks * tiles * 2
