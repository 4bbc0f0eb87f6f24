"""Arithmetic on runs of neighbours, against plain loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libra_jax.intervals import covering, expand, offsets, rows, stable_order, starts_within

small = st.integers(0, 6)


@given(st.lists(st.tuples(st.integers(0, 50), small, st.integers(1, 5))))
def test_expand(runs):
    first, count, step = (np.array([run[i] for run in runs], np.int64) for i in range(3))
    assert expand(first, count).tolist() == [a + i for a, n, _ in runs for i in range(n)]
    assert expand(first, count, step).tolist() == [a + i * s for a, n, s in runs for i in range(n)]
    assert expand(first, count).dtype == np.int32


@given(st.lists(st.tuples(small, st.integers(0, 100_000))))
def test_stable_order_is_lexsort(pairs):
    minor, major = np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.int64)
    assert stable_order(minor, major).tolist() == np.lexsort((minor, major)).tolist()


@given(st.lists(st.tuples(small, small), max_size=20))
def test_starts_and_rows(runs):
    runs = sorted(runs, key=lambda run: run[0])
    owner, count = np.array([r[0] for r in runs], np.int64), np.array([r[1] for r in runs], np.int64)
    values = np.arange(1, count.sum() + 1)
    starts, lists = [], [[] for _ in range(7)]
    for (who, n), end in zip(runs, np.cumsum(count), strict=True):
        starts.append(len(lists[who]))
        lists[who] += values[end - n : end].tolist()
    assert starts_within(owner, count, 7).tolist() == starts
    size = max(map(len, lists)) + 2
    assert rows(owner, count, values, 7, size).tolist() == [row + [0] * (size - len(row)) for row in lists]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=8), st.sets(st.integers(0, 40)))
def test_covering(intervals, more):
    low = np.array([a for a, _ in intervals], np.int64)
    high = np.array([a + n for a, n in intervals], np.int64)
    points = np.unique(np.concatenate([low, high, np.array(sorted(more), np.int64)]))
    which, element = covering(low, high, points)
    pairs = list(zip(which.tolist(), element.tolist(), strict=True))
    for i in range(low.size):
        cover = [x for e in (e for j, e in pairs if j == i) for x in range(points[e], points[e + 1])]
        assert cover == list(range(low[i], high[i]))


def test_offsets():
    assert offsets(np.array([[1, 2, 3], [0, 0, 4]])).tolist() == [[0, 1, 3, 6], [0, 0, 0, 4]]
