"""Plans for the batches of other loaders, with segment ids as MaxText and Levanter have them. Batches and the lengths
in them are written by hand."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import libra_jax
from libra_jax import PlanTables, PoolSpec, check_batch, plan_pool, planner, plans_from_segment_ids, stack_plans
from libra_jax.workload import sequence_seconds

SPEC = PoolSpec(seq_len=12, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=8, block=2, capacity=10.0)
SPEEDS = [[1.0, 1.0, 1.0, 2.0], [3.0, 1.0, 1.0, 1.0]]

# MaxText: documents of a sequence count from 1, padding is 0.
MAXTEXT = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 2, 3, 3, 3, 3, 3, 0, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)
# Levanter: padding is -1; documents count from 0 in each sequence, or through the corpus, or as a caller says.
LEVANTER = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1, -1],
        [907, 907, 907, 907, 12, 12, 12, 12, 907, 907, 907, -1],
        [-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
    ],
    np.int64,
)
LENGTHS = [[12], [3, 1, 5], [4, 4, 3], []]
PLANS = stack_plans([plan_pool(LENGTHS[:2], SPEC), plan_pool(LENGTHS[2:], SPEC)])


def assert_same_tables(got: PlanTables, wanted: PlanTables) -> None:
    assert got.spec == wanted.spec
    for name in PlanTables.table_names():
        table, other = getattr(got, name), getattr(wanted, name)
        assert table.dtype == np.int32
        np.testing.assert_array_equal(table, other, err_msg=name, strict=True)


@pytest.mark.parametrize(("ids", "padding_id"), [(MAXTEXT, 0), (LEVANTER, -1)], ids=["MaxText", "Levanter"])
def test_plans_are_those_of_the_documents(ids: np.ndarray, padding_id: int) -> None:
    assert libra_jax.lengths_from_segment_ids(ids, padding_id) == LENGTHS
    plans = plans_from_segment_ids(ids, SPEC, padding_id)
    assert_same_tables(plans, PLANS)
    check_batch(plans, ids, padding_id)
    with pytest.raises(ValueError, match="the plans are not this batch's: in sequence 0, token 3"):
        check_batch(plans, ids[[1, 0, 2, 3]], padding_id)
    with pytest.raises(ValueError, match="read-only"):
        plans.pages[:] = 0


@pytest.mark.parametrize(("ids", "padding_id"), [(MAXTEXT, 0), (LEVANTER, -1)], ids=["MaxText", "Levanter"])
def test_micro_steps_lead_every_table(ids: np.ndarray, padding_id: int) -> None:
    steps = np.stack([ids, ids[[2, 3, 0, 1]], ids])
    plans = plans_from_segment_ids(steps, SPEC, padding_id)
    assert plans.entries.shape[:4] == (3, 2, 2, 2)  # micro-steps, pools, dp, cp
    assert_same_tables(plans.map(lambda table: table[0]), PLANS)
    assert_same_tables(plans.map(lambda table: table[1]), PLANS.map(lambda table: table[::-1]))
    check_batch(plans, steps, padding_id)
    check_batch(plans, steps.reshape(-1, 12), padding_id)
    check_batch(plans.map(lambda table: table[1]), steps[1], padding_id)
    with pytest.raises(
        ValueError, match=r"in sequence 0 of micro-step 1, token 4 may see keys from 0 .* 4 in the plan"
    ):
        check_batch(plans, np.stack([ids, ids, ids]), padding_id)
    with pytest.raises(ValueError, match=r"\(4, 12\), the plans are for \(3, 4, 12\)"):
        check_batch(plans, ids, padding_id)
    with pytest.raises(ValueError, match=r"\(2, 6, 12\), the plans are for \(3, 4, 12\)"):
        check_batch(plans, steps.reshape(2, 6, 12), padding_id)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[list[int]], int]:
    """Segment ids of [micro-steps of] two pools, the lengths in them, the padding id. Ids come again, in any order."""
    padding_id = draw(st.sampled_from([0, -1, 5]))
    leading = draw(st.sampled_from([(4,), (1, 4), (2, 4)]))
    lengths, ids = [], np.full((*leading, 12), padding_id)
    for row in ids.reshape(-1, 12):
        documents, used, last = [], 0, padding_id
        while used < 12 and draw(st.integers(0, 5)):
            documents.append(draw(st.integers(1, 12 - used)))
            last = draw(st.integers(0, 9).filter(lambda number, last=last: number not in (padding_id, last)))
            row[used : used + documents[-1]] = last
            used += documents[-1]
        lengths.append(documents)
    return ids, lengths, padding_id


@settings(deadline=None, max_examples=60)
@given(batches())
def test_any_ids_give_the_plans_of_their_lengths(case: tuple[np.ndarray, list[list[int]], int]) -> None:
    ids, lengths, padding_id = case
    plans = plans_from_segment_ids(ids, SPEC, padding_id)
    pools = stack_plans([plan_pool(lengths[i : i + 2], SPEC) for i in range(0, len(lengths), 2)])
    assert_same_tables(plans.map(lambda table: table.reshape(-1, *table.shape[-(table.ndim - ids.ndim + 1) :])), pools)
    check_batch(plans, ids, padding_id)


def test_options_are_those_of_plan_pool() -> None:
    options: dict[str, Any] = {"policy": planner.at_home}
    wanted = [plan_pool(LENGTHS[:2], SPEC, **options), plan_pool(LENGTHS[2:], SPEC, **options)]
    assert_same_tables(plans_from_segment_ids(MAXTEXT, SPEC, **options), stack_plans(wanted))
    wanted = [plan_pool(LENGTHS[:2], SPEC, SPEEDS[0], tries=3), plan_pool(LENGTHS[2:], SPEC, SPEEDS[0], tries=3)]
    assert_same_tables(plans_from_segment_ids(MAXTEXT, SPEC, speed=SPEEDS[0], tries=3), stack_plans(wanted))
    wanted = [plan_pool(LENGTHS[:2], SPEC, SPEEDS[0]), plan_pool(LENGTHS[2:], SPEC, SPEEDS[1])]
    assert_same_tables(plans_from_segment_ids(MAXTEXT, SPEC, speed=SPEEDS), stack_plans(wanted))
    steps = plans_from_segment_ids(np.stack([MAXTEXT, MAXTEXT]), SPEC, speed=np.array(SPEEDS))
    for step in range(2):
        assert_same_tables(steps.map(lambda table, step=step: table[step]), stack_plans(wanted))
    with pytest.raises(TypeError, match="tolerence"):
        plans_from_segment_ids(MAXTEXT, SPEC, tolerence=0.1)
    with pytest.raises(ValueError, match="speed has 3 rows for 2 pools"):
        plans_from_segment_ids(MAXTEXT, SPEC, speed=np.ones((3, 4)))
    with pytest.raises(ValueError, match=r"speed has shape \(3,\); the pool has 4 ranks"):
        plans_from_segment_ids(MAXTEXT, SPEC, speed=np.ones((2, 3)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint64])
def test_any_whole_numbers_do(dtype: type) -> None:
    ids = MAXTEXT.astype(dtype)
    assert_same_tables(plans_from_segment_ids(ids, SPEC), PLANS)
    check_batch(PLANS, ids)
    assert_same_tables(plans_from_segment_ids(MAXTEXT.tolist(), SPEC), PLANS)


def test_what_turns_into_an_array_is_one() -> None:
    class OnDevice:  # as an array of JAX's: no NumPy array, but one can be made of it
        shape = MAXTEXT.shape
        is_fully_addressable = True

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return MAXTEXT

    ids: Any = OnDevice()
    assert_same_tables(plans_from_segment_ids(ids, SPEC), PLANS)
    check_batch(PLANS, ids)
    ids.is_fully_addressable = False
    with pytest.raises(ValueError, match="this process's"):
        plans_from_segment_ids(ids, SPEC)


def changed(ids: np.ndarray, index: tuple[int, ...], value: int) -> np.ndarray:
    ids = ids.copy()
    ids[index] = value
    return ids


BOTH = np.stack([MAXTEXT, MAXTEXT])


@pytest.mark.parametrize(
    ("ids", "padding_id", "words"),
    [
        (MAXTEXT[:, :8], 0, ["(4, 8)", "seq_len (12)"]),
        (MAXTEXT.T, 0, ["(12, 4)", "seq_len (12)"]),
        (MAXTEXT[:3], 0, ["3 sequences", "multiple of pool_size (2)"]),
        (BOTH[:, :3], 0, ["(2, 3, 12)", "3 sequences in each micro-step", "pool_size (2)"]),
        (MAXTEXT[:0], 0, ["0 sequences", "pool_size (2)"]),
        (BOTH[:0], 0, ["(0, 4, 12)"]),
        (MAXTEXT.astype(np.float32), 0, ["whole numbers", "float32", "(4, 12)"]),
        (MAXTEXT > 0, 0, ["whole numbers", "bool"]),
        (MAXTEXT[0], 0, ["(sequences, seq_len)", "(12,)"]),
        (BOTH[None], 0, ["(1, 2, 4, 12)"]),
        (changed(MAXTEXT, (2, 5), 0), 0, ["segment id 0", "must come last", "sequence 2 has tokens after"]),
        (changed(BOTH, (1, 2, 5), 0), 0, ["must come last", "sequence 2 of micro-step 1 has"]),
        (LEVANTER, 0, ["segment id -1", "sequence 1, token 9", "padding_id is 0", "Was padding_id=-1 meant?"]),
        (LEVANTER[[0, 0, 2, 2]], 0, ["segment id -1", "sequence 2, token 11", "padding_id=-1"]),
        (np.stack([LEVANTER[[0, 0]], LEVANTER[[0, 2]]]), 0, ["sequence 1 of micro-step 1, token 11"]),
        (
            np.repeat([[0, 0, 1, 2]], 3, axis=1)[[0, 0]],
            0,
            ["sequence 0", "Where 0 is a document, padding_id is another"],
        ),
        (changed(LEVANTER, (3, 11), -2), -1, ["segment id -2", "sequence 3, token 11", "padding_id is -1"]),
        (MAXTEXT.astype(np.uint32), -1, ["padding_id (-1)", "uint32"]),
        (MAXTEXT, True, ["padding_id (True)"]),
        (MAXTEXT, 0.0, ["padding_id (0.0)"]),
    ],
)
def test_batches_that_do_not_fit_are_refused_with_both_numbers(
    ids: np.ndarray, padding_id: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        plans_from_segment_ids(ids, SPEC, padding_id)
    assert all(word in str(error.value) for word in words), error.value
    with pytest.raises(ValueError, match=r"\(4, 12\)|segment id|padding_id"):
        check_batch(PLANS, ids, padding_id)


def test_plans_of_another_window_or_padding_are_refused() -> None:
    narrow = dataclasses.replace(SPEC, window=3)
    plans = plans_from_segment_ids(MAXTEXT, narrow)
    check_batch(plans, MAXTEXT)
    assert_same_tables(plans, stack_plans([plan_pool(LENGTHS[:2], narrow), plan_pool(LENGTHS[2:], narrow)]))
    # Read with another padding id than was meant, padding is one more document.
    with pytest.raises(ValueError, match="in sequence 1, token 9 may see keys from 9 in the batch, but from padding"):
        check_batch(plans, MAXTEXT, padding_id=-1)
    spec: Any = {"seq_len": 12}
    with pytest.raises(TypeError, match="PoolSpec, got dict"):
        plans_from_segment_ids(MAXTEXT, spec)


def test_jax_is_not_imported() -> None:
    program = """
import sys
import numpy as np
import libra_jax
spec = libra_jax.PoolSpec(seq_len=16, pool_size=1, cp=1, num_heads=1, num_kv_heads=1, head_dim=8, block=4)
ids = np.repeat([[1, 2, 0]], [3, 9, 4], axis=1)
libra_jax.check_batch(libra_jax.plans_from_segment_ids(ids, spec), ids)
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_place_gives_an_order_as_the_docstring_says() -> None:
    """Two heavy sequences side by side, two light ones behind them: each pool gets one of either."""
    ids = np.array([[1] * 12, [4] * 12, [1, 2, 3] * 4, [8, 7, 6] * 4])
    work = [sequence_seconds(documents, SPEC) for documents in libra_jax.lengths_from_segment_ids(ids)]
    order = libra_jax.place(work, SPEC.pool_size).reshape(-1)
    assert {frozenset(order[:2] < 2), frozenset(order[2:] < 2)} == {frozenset([True, False])}
    plans = plans_from_segment_ids(ids[order], SPEC)
    check_batch(plans, ids[order])
    with pytest.raises(ValueError, match="not this batch's"):
        check_batch(plans, ids)
