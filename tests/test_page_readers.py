"""Which entries visit which page rows: what the dK/dV kernel reads, held against plain loops over real plans, and the
two promises of `Tiles` it rests on."""

import jax
import jax.numpy as jnp
import numpy as np
import operator_base as base
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from libra_kernels import PADDING, Tiles
from libra_kernels.triton import page_readers

import libra_jax
from libra_jax.targets import target_mesh


def expected(tiles: Tiles) -> tuple[np.ndarray, list[list[int]]]:
    """(L, 4), and the visiting entries of each row, from the definition."""
    entries, pages, first_visible = (np.asarray(x) for x in tiles[:3])
    block = first_visible.shape[1]
    readers, visitors = np.zeros((pages.size, 4), np.int64), []
    for row in range(pages.size):
        visiting, whole = [], []
        for x in range(int(tiles.start), int(tiles.stop)):
            slot, number, first_page, num_pages, base_row = (int(c) for c in entries[x])
            if base_row <= row < base_row + num_pages:
                page = first_page + row - base_row
                visiting.append(x)
                if number > page and all(int(first) <= page * block for first in first_visible[slot]):
                    whole.append(x)
        visitors.append(visiting)
        if visiting:
            readers[row, :2] = visiting[0], visiting[-1] + 1
        if whole and whole == list(range(whole[0], whole[-1] + 1)):
            readers[row, 2:] = whole[0], whole[-1] + 1
    return readers, visitors


def rank_tiles(tables, spec: libra_jax.PoolSpec, rank: tuple[int, int], wave: int) -> Tiles:
    """One rank's tables of one wave, with the first-visible positions that its executed blocks would bring along."""
    entries = tables.entries[rank]
    first_visible = np.full((spec.home_blocks + spec.room.blocks, spec.block), PADDING, np.int32)
    by_sequence = tables.first_visible.reshape(spec.pool_size, -1, spec.block)
    home = np.arange(spec.home_blocks) % spec.blocks_per_rank
    first_visible[: spec.home_blocks] = by_sequence[rank[0], rank[1] * spec.blocks_per_rank + home]
    for slot, number, first_page, num_pages, _ in entries[: tables.wave_offsets[rank][-1]]:
        if slot >= spec.home_blocks:  # a block of some sequence of the pool: the one whose pages start and end there
            for sequence in by_sequence:
                starts = sequence[number][sequence[number] < PADDING]
                if starts.size and starts.min() // spec.block == first_page and number - first_page + 1 == num_pages:
                    first_visible[slot] = sequence[number]
    start, stop = tables.wave_offsets[rank][wave], tables.wave_offsets[rank][wave + 1]
    return Tiles(*(jnp.asarray(x) for x in (entries, tables.pages[rank], first_visible, start, stop)))


@pytest.mark.parametrize("policy", ["pooled", "random"])
@pytest.mark.parametrize(("waves", "window"), [(1, None), (2, None), (3, 150)])
def test_readers_are_neighbours_and_as_the_loops_find_them(waves: int, window: int | None, policy: str) -> None:
    spec = libra_jax.PoolSpec(
        seq_len=512, pool_size=2, cp=2, num_heads=2, num_kv_heads=2, head_dim=16, block=32, waves=waves, window=window,
        capacity=4,
    )  # fmt: skip
    lengths = base.skewed_lengths(np.random.default_rng(waves), 2, 512)
    tables = libra_jax.plan_pool(lengths, spec, policy=base.POLICIES[policy]).tables
    for rank in np.ndindex(2, 2):
        for wave in range(waves):
            tiles = rank_tiles(tables, spec, rank, wave)
            want, visitors = expected(tiles)
            np.testing.assert_array_equal(_tidy(np.asarray(page_readers(tiles))), _tidy(want))
            visited = [row for row, visiting in enumerate(visitors) if visiting]
            slots = np.asarray(tiles.pages)[visited]
            assert len(set(slots.tolist())) == len(visited), "a wave reads a page slot by two rows"
            for visiting in visitors:
                some = [x for x in visiting if tiles.entries[x, 3] > 0]
                assert some == list(range(some[0], some[-1] + 1)) if some else True
                blocks = [int(tiles.entries[x, 1]) for x in some]
                assert blocks == sorted(set(blocks))


def _tidy(readers: np.ndarray) -> np.ndarray:
    """Empty runs as 0, 0 wherever they start."""
    readers = readers.copy()
    for pair in (readers[:, :2], readers[:, 2:]):
        pair[pair[:, 0] >= pair[:, 1]] = 0
    return readers


def test_nothing_of_rows_times_entries_is_stored_on_a_gpu() -> None:
    """Sizes of a rank at 256K tokens: the comparison has 50 million results, and is one fused reduction."""
    on_gpu = NamedSharding(target_mesh("h100", (1,), ("x",)), PartitionSpec())
    shapes = ((4096, 5), (12288,), (4096, 128), (), ())
    tiles = Tiles(*(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=on_gpu) for shape in shapes))
    memory = jax.jit(page_readers).lower(tiles).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1e6


def test_a_gap_among_those_that_see_the_page_whole_masks_all() -> None:
    """Padding in the middle (no plan makes it) must not be taken for rows that see everything."""
    entries = np.array([[0, 0, 0, 1, 0], [1, 1, 0, 2, 0], [2, 2, 0, 3, 0], [3, 3, 0, 4, 0]], np.int32)
    first_visible = np.zeros((4, 64), np.int32)
    first_visible[2, 60:] = PADDING
    pages = np.arange(4, dtype=np.int32)
    tiles = Tiles(*(jnp.asarray(x) for x in (entries, pages, first_visible, np.int32(0), np.int32(4))))
    readers = np.asarray(page_readers(tiles))
    assert readers[0, :2].tolist() == [0, 4] and readers[0, 2] == readers[0, 3]
    assert readers[2].tolist() == [2, 4, 3, 4]
