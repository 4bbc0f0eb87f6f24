"""Steps and their batches: the same whenever, wherever and in whatever order they are asked for, and after a resume."""

import dataclasses
import json
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
from data_base import Documents, batches_of, documents_of, served, small_spec, take, write
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.data import Corpus, DataConfig, PackedDocuments, PoolSampler, StepBatches, open_batches
from libra_jax.data.batches import ARRAYS, PADDING_TOKEN, BatchIterator, describe_documents
from libra_jax.data.sampler import EMPTY
from libra_jax.plan import check_batch, plan_pool

# --------------------------------------------------------------------------------------------------------------- order


FEW = {"lengths": [8, 12, 5, 7, 3], "seq_len": 20, "seed": 7}


def packed_and_ordered():
    spec = small_spec(seq_len=20, pool_size=1, cp=1, block=4)
    batches = batches_of(FEW["lengths"], spec, seed=FEW["seed"])
    return documents_of(batches.corpora[0].packed), [batches.sampler[step].tolist() for step in range(8)]


def test_order_is_a_function_of_the_arguments():
    """Drawing from any global random state changes nothing, and none of it is drawn from."""
    import jax

    before = packed_and_ordered()
    random.random()
    np.random.rand(1000)
    np.random.seed(3)
    jax.random.normal(jax.random.key(0), (1000,))
    assert packed_and_ordered() == before
    state = np.random.get_state()[1].tolist()
    packed_and_ordered()
    assert np.random.get_state()[1].tolist() == state


def test_order_is_the_same_in_a_fresh_process():
    code = f"""
import json
from libra_jax.data import PackedDocuments, PoolSampler
from libra_jax.spec import PoolSpec
lengths, seq_len, seed = {FEW["lengths"]}, {FEW["seq_len"]}, {FEW["seed"]}
spec = PoolSpec(seq_len=seq_len, pool_size=1, cp=1, block=4, num_heads=2, num_kv_heads=1, head_dim=8)
packed = PackedDocuments(lengths, seq_len, seed=seed)
sampler = PoolSampler(packed, spec, seed=seed)
documents = [packed.pieces(number).document.tolist() for number in range(len(packed))]
print(json.dumps([documents, [sampler[step].tolist() for step in range(8)]]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(packed_and_ordered()))


def test_steps_can_be_asked_for_in_any_order():
    lengths = np.random.default_rng(1).integers(1, 65, 40)
    spec = small_spec()
    forwards = batches_of(lengths, spec, pools=2)
    backwards = batches_of(lengths, spec, pools=2)
    later = [backwards[step]["tokens"] for step in (5, 0)]
    np.testing.assert_array_equal(forwards[0]["tokens"], later[1])
    np.testing.assert_array_equal(forwards[5]["tokens"], later[0])


# ------------------------------------------------------------------------------------------------------------- sampler


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 8), max_size=4), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from(["pad", "drop"]),
    st.sampled_from(["all", "pools"]),
)
def test_an_epoch_serves_every_sequence_once(lengths, pool_size, pools, micro_steps, last_step, across):
    spec = small_spec(seq_len=32, pool_size=pool_size, cp=1, block=4)
    options = {"pools": pools, "micro_steps": micro_steps, "last_step": last_step, "across": across}
    per_step = pool_size * pools * micro_steps
    if last_step == "drop" and len(lengths) < per_step:
        with pytest.raises(ValueError, match=f"{len(lengths)} sequences .* {per_step}"):
            PoolSampler(lengths, spec, **options)
        return
    sampler = PoolSampler(lengths, spec, **options)
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        for step in steps:
            slots = sampler[step]
            assert slots.shape == (micro_steps, pools, pool_size)
            real = slots[slots != EMPTY].tolist()
            assert len(real) == len(set(real))
            assert sorted(slots.ravel().tolist()) == sorted(sampler.step_sequences(step).tolist())
            assert int(sampler.epochs(step)[0]) == epoch
        seen = [number for step in served(sampler, steps) for number in step if number != EMPTY]
        expected = len(lengths) if last_step == "pad" else len(lengths) // per_step * per_step
        assert len(seen) == len(set(seen)) == expected


def batches_of_eight_steps():
    rng = np.random.default_rng(0)
    spec = small_spec(seq_len=32, pool_size=2, cp=1, block=4)
    documents = Documents(rng.integers(17, 33, 32))  # more than half a sequence each, so 32 sequences
    packed = PackedDocuments(documents.lengths, 32)
    return StepBatches([Corpus("documents", documents, packed)], PoolSampler(packed, spec, pools=2, seed=1))


def test_resume_twice_equals_no_stop():
    """32 sequences, 4 a step, 3 epochs; stopped after steps 2 and 13, each time with new objects.

    Every step has the sequences of a run without a stop; epoch 1 goes on with what was not served yet, epochs 2 and 3
    serve all, each once; the second state is that of step 13.
    """
    whole = BatchIterator(batches_of_eight_steps())
    run_a = take(whole, 24)
    whole.close()
    assert batches_of_eight_steps().sampler.steps_per_epoch == 8

    first = BatchIterator(batches_of_eight_steps())
    run_b = take(first, 2)
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    second = BatchIterator(batches_of_eight_steps())
    second.set_state(state)
    run_b += take(second, 11)
    state = json.loads(json.dumps(second.get_state()))
    second.close()
    assert state["next_step"] == 13
    third = BatchIterator(batches_of_eight_steps())
    third.set_state(state)
    run_b += take(third, 11)
    third.close()

    for a, b in zip(run_a, run_b, strict=True):
        np.testing.assert_array_equal(a["sequence_ids"], b["sequence_ids"])
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
    ids = [batch["sequence_ids"].ravel().tolist() for batch in run_a]
    rest = {number for step in ids[2:8] for number in step}
    assert len(rest) == 24
    assert rest == set(range(32)) - set(ids[0] + ids[1])
    for epoch in (ids[8:16], ids[16:24]):
        assert sorted(number for step in epoch for number in step) == list(range(32))
    assert ids[:8] != ids[8:16]


def test_a_document_that_waits_for_room_survives_a_resume():
    """Saved after the first sequence: over both halves every document is delivered once, 49 tokens."""
    lengths = [10, 9, 4, 7, 16, 3]
    spec = small_spec(seq_len=16, pool_size=1, cp=1, block=4)
    steps = batches_of(lengths, spec).sampler.steps_per_epoch
    whole = BatchIterator(batches_of(lengths, spec))
    expected = take(whole, steps)
    whole.close()
    start = BatchIterator(batches_of(lengths, spec))
    both = take(start, 1)
    state = start.get_state()
    start.close()
    rest = BatchIterator(batches_of(lengths, spec))
    rest.set_state(state)
    both += take(rest, steps - 1)
    rest.close()
    for a, b in zip(expected, both, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
    tokens = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in both])
    assert len(tokens) == len(set(tokens.tolist())) == 49
    assert sorted(tokens.tolist()) == [d * 1000 + t for d, length in enumerate(lengths) for t in range(length)]


def test_host_count_does_not_matter():
    """A step is a function of its number: one position serves any number of hosts, each taking its own rows."""
    batches = batches_of(np.random.default_rng(2).integers(17, 65, 100), small_spec(pool_size=4), pools=4)
    iterator = BatchIterator(batches)
    take(iterator, 3)
    assert set(iterator.get_state()) == {"next_step", "data"}
    expected = next(iterator)
    iterator.close()
    for hosts in (2, 1):
        rows = [batches[3]["tokens"][:, host * 16 // hosts : (host + 1) * 16 // hosts] for host in range(hosts)]
        np.testing.assert_array_equal(np.concatenate(rows, axis=1), expected["tokens"])


def test_all_ranks_have_the_same_steps():
    """10 sequences, 3 ranks, 2 a rank: a step is one thing for all ranks, so none can run ahead."""
    lengths = [[8]] * 10
    spec = small_spec(pool_size=6, cp=1)
    dropped = PoolSampler(lengths, spec, last_step="drop")
    assert dropped.steps_per_epoch == 1
    padded = PoolSampler(lengths, spec, last_step="pad")
    assert padded.steps_per_epoch == 2
    for sampler in (dropped, padded):
        assert [sampler[step].shape for step in range(4)] == [(1, 1, 6)] * 4
        assert served(sampler, [1]) == served(PoolSampler(lengths, spec, last_step=sampler.last_step), [1])
    assert dropped.epochs(1).tolist() == [1.0]


def test_a_partial_step_is_filled_with_padding():
    """3 sequences, 4 a step: the fourth has no target, and no sequence is there twice; or it is refused."""
    batches = batches_of([40, 50, 60], small_spec(pool_size=2), pools=2)
    batch = batches[0]
    assert sorted(batch["sequence_ids"].ravel().tolist()) == [EMPTY, 0, 1, 2]
    empty = batch["sequence_ids"].reshape(1, 4) == EMPTY
    assert (batch["tokens"][empty] == PADDING_TOKEN).all()
    assert (batch["targets"][empty] == -1).all()
    assert (batch["segment_ids"][empty] == 0).all()
    assert (batch["targets"] >= 0).sum() == 40 + 50 + 60 - 3
    with pytest.raises(ValueError, match="3 sequences do not fill one step of 4"):
        PoolSampler([[40], [50], [60]], small_spec(pool_size=2), pools=2, last_step="drop")


def test_each_step_keeps_its_own_sequences():
    """Costs of 64-token sequences; over two steps of 8, placement never moves one to the other step."""
    lengths = [[64], [32, 32], [16] * 4, [8] * 8, [48, 16], [40, 8, 8, 8], [60, 2, 2], [4] * 16] * 2
    for across in ("all", "pools"):
        sampler = PoolSampler(lengths, small_spec(pool_size=2, cp=1), pools=2, micro_steps=2, across=across)
        steps = [sampler.step_sequences(step).tolist() for step in range(2)]
        assert [sorted(s) for s in served(sampler, range(2))] == [sorted(s) for s in steps]
        assert sorted(steps[0] + steps[1]) == list(range(16))


def test_sampler_balances_the_pools_of_a_step():
    rng = np.random.default_rng(4)
    lengths = [[int(x)] for x in rng.integers(1, 2049, 64)]
    sampler = PoolSampler(lengths, small_spec(seq_len=2048, pool_size=4, block=64), pools=4)
    placed, in_order = [], []
    for step in range(4):
        for slots, result in ((sampler[step], placed), (sampler.step_sequences(step).reshape(1, 4, 4), in_order)):
            pools = sampler.work(slots).sum(axis=-1)
            result.append(pools.max() / pools.mean())
    assert np.mean(placed) < 1.02 < 1.2 < np.mean(in_order)


def test_across_pools_micro_steps_differ_so_that_pools_need_not_mix():
    """Half of the sequences one document each, half short ones. Without a pipeline a step takes as long either way,
    and plans move less between ranks where heavy sequences are among themselves."""
    spec = small_spec(seq_len=2048, pool_size=4, block=64)
    long = np.random.default_rng(5).integers(1500, 2049, 16)
    lengths = [[int(n)] for n in long] + [[64] * 32] * 16
    assert PoolSampler(lengths, spec).across == "pools", "the trainer's default, too, without a pipeline"
    seconds, sent = {}, {}
    for across in ("pools", "all"):
        sampler = PoolSampler(lengths, spec, pools=2, micro_steps=4, across=across)
        slots = sampler[0]
        seconds[across] = sampler.work(slots).sum(axis=2)
        pools = [[sampler.document_lengths(n) for n in pool] for pool in slots.reshape(-1, 4)]
        sent[across] = sum(plan_pool(pool, spec).stats.sent_bytes.sum() for pool in pools)
    equal = seconds["pools"].max(axis=1) / seconds["pools"].mean(axis=1)
    assert equal.max() < 1.01, "the pools of one micro-step"
    assert seconds["pools"][0].mean() > 4 * seconds["pools"][3].mean(), "micro-steps may differ"
    assert seconds["all"].max() / seconds["all"].mean() < 1.05
    step = {across: pools.max(axis=1).sum() for across, pools in seconds.items()}
    assert step["pools"] < step["all"] * 1.01
    assert sent["pools"] < 0.75 * sent["all"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pools": 0}, ["pools (0)"]),
        ({"micro_steps": 1.5}, ["micro_steps (1.5)"]),
        ({"last_step": "repeat"}, ["'repeat'"]),
        ({"sequences": []}, ["0 sequences"]),
        ({"sequences": [[8], [70]]}, ["sequence 1", "70", "64"]),
    ],
)
def test_bad_sampler_is_refused_by_name(options, words):
    with pytest.raises(ValueError) as error:
        PoolSampler(**({"sequences": [[8]], "spec": small_spec()} | options))
    for word in words:
        assert word in str(error.value)
    with pytest.raises(IndexError, match=r"step \(-1\)"):
        PoolSampler([[8]], small_spec())[-1]


# ------------------------------------------------------------------------------------------------------------- batches


def rows_of(documents, seq_len):
    """A packed sequence in arrays that held something else before."""
    rows = {name: np.full(seq_len, -7, np.int32) for name in ARRAYS}
    tokens = np.concatenate([np.zeros(0, np.int32), *documents])
    rows["tokens"][: len(tokens)] = tokens
    describe_documents(np.array([len(tokens) for tokens in documents], np.int64), rows)
    return rows


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), max_size=5), st.integers(0, 5))
def test_targets_never_cross_a_document(lengths, padding):
    """Shifting after packing gives the targets of shifting each document before it."""
    documents = [np.arange(length, dtype=np.int32) + 100 * (d + 1) for d, length in enumerate(lengths)]
    seq_len = sum(lengths) + padding
    arrays = rows_of(documents, seq_len)
    shifted_before = [np.append(tokens[1:], -1) for tokens in documents]
    expected = np.concatenate([*shifted_before, np.full(padding, -1)]).astype(int)
    assert arrays["targets"].tolist() == expected.tolist()
    assert all(array.dtype == np.int32 and array.shape == (seq_len,) for array in arrays.values())


def test_boundary_targets():
    """Documents of 5 and 3 tokens in 10: positions 4 and 7 and the padding have no target."""
    arrays = rows_of([np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)], 10)
    assert np.flatnonzero(arrays["targets"] == -1).tolist() == [4, 7, 8, 9]
    assert arrays["segment_ids"].tolist() == [1] * 5 + [2] * 3 + [0] * 2
    assert arrays["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]


def test_a_batch_and_its_plans_belong_together():
    spec = small_spec(seq_len=64, pool_size=2, cp=2)
    batches = batches_of(np.random.default_rng(5).integers(1, 65, 60), spec, pools=2, micro_steps=2)
    batch = batches[1]
    for name in ("tokens", "targets", "segment_ids", "positions"):
        assert batch[name].shape == (2, 4, 64)
        assert batch[name].dtype == np.int32
    plans = batch["plans"]
    assert plans.first_visible.shape == (2, 2, 2, 2, 32)
    for micro_step in range(2):
        check_batch(plans.map(lambda table, m=micro_step: table[m]), batch["segment_ids"][micro_step])
    with pytest.raises(ValueError, match="not this batch's"):
        check_batch(plans.map(lambda table: table[0]), batch["segment_ids"][1])
    assert len(batch["stats"]) == 4
    assert sum(stats.work.sum() for stats in batch["stats"]) > 0
    assert sorted(batch["sequence_ids"].ravel().tolist()) == sorted(batches.sampler.step_sequences(1).tolist())
    packed = batches.corpora[0].packed
    assert batch["lengths"] == [packed.lengths(n).tolist() for n in batches.sampler.step_sequences(1)]
    row = batch["sequence_ids"].reshape(2, 4)[1, 2]
    documents = [1000 * d + np.arange(s, s + n) for d, s, n in zip(*packed.pieces(row), strict=True)]
    np.testing.assert_array_equal(batch["tokens"][1, 2], rows_of(documents, 64)["tokens"])


def test_batches_come_from_text_and_orbax_restores_the_position(tmp_path):
    from orbax.checkpoint import v1 as ocp

    write(tmp_path / "text", {f"{i}.txt": bytes([97 + i % 26]) * (13 * i % 90 + 1) for i in range(60)})
    config = DataConfig(paths=(str(tmp_path / "text"),))
    first = open_batches(config, small_spec(), pools=2)
    take(first, 3)
    ocp.save_checkpointables(tmp_path / "checkpoint", {"data": first})
    expected = take(first, 2)
    first.close()
    second = open_batches(config, small_spec(), pools=2)
    ocp.load_checkpointables(tmp_path / "checkpoint", {"data": second})
    for a, b in zip(expected, take(second, 2), strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        assert a["stats"][0].work.tolist() == b["stats"][0].work.tolist()
    second.close()

    write(tmp_path / "text", {"new.txt": b"one more"})
    third = open_batches(config, small_spec(), pools=2)
    with pytest.raises(Exception) as error:
        ocp.load_checkpointables(tmp_path / "checkpoint", {"data": third})
    assert "belongs to other data" in str(error.value.__cause__)  # Orbax wraps what a restore raises
    third.close()


@pytest.mark.parametrize(
    ("change", "names"),
    [({"seq_len": 128}, ["seq_len", "64", "128"]), ({"pool_size": 4}, ["sequences_per_step", "4 saved", "8 now"])],
)
def test_a_position_of_other_data_is_refused(change, names):
    lengths = np.random.default_rng(6).integers(1, 65, 60)
    start = BatchIterator(batches_of(lengths, small_spec(), pools=2))
    other = BatchIterator(batches_of(lengths, dataclasses.replace(small_spec(), **change), pools=2))
    with pytest.raises(ValueError) as error:
        other.set_state(start.get_state())
    for name in names:
        assert name in str(error.value)
    start.close()
    other.close()


def test_what_does_not_touch_the_data_may_change():
    """Four sequences a step as 2 pools of 2 or 1 pool of 4: the same steps, so a position stays valid."""
    lengths = np.random.default_rng(6).integers(1, 65, 60)
    start = BatchIterator(batches_of(lengths, small_spec(pool_size=2), pools=2))
    take(start, 2)
    other = BatchIterator(batches_of(lengths, small_spec(pool_size=4, cp=1), pools=1), prefetch=0)
    other.set_state(start.get_state())
    assert sorted(next(start)["sequence_ids"].ravel()) == sorted(next(other)["sequence_ids"].ravel())
    start.close()
    other.close()


def test_a_sampler_can_be_sent_to_another_process():
    sampler = PoolSampler([[8 + i] for i in range(20)], small_spec(), pools=2, seed=3)
    copy = pickle.loads(pickle.dumps(sampler))
    assert served(copy, range(8)) == served(sampler, range(8))


def test_lists_that_do_not_belong_together_are_refused():
    sampler = PoolSampler([[8], [8]], small_spec())
    packed = PackedDocuments([8], 64)
    with pytest.raises(ValueError, match=r"\[1\] packed sequences by corpus, but the sampler knows \[2\]"):
        StepBatches([Corpus("documents", Documents([8]), packed)], sampler)


def test_documents_and_sampler_need_neither_grain_nor_jax():
    code = (
        "import sys; import libra_jax.data.documents, libra_jax.data.sampler; from libra_jax.data import DataConfig;"
        "assert not {'grain', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
