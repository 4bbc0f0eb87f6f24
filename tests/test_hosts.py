"""Many hosts, worker processes, another pool size: everybody finds the same steps, without a word to one another."""

import json
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from data_base import batches_of, small_spec, take

from libra_jax.data import Corpus, PoolSampler
from libra_jax.data.batches import ARRAYS, BatchIterator, check_step
from libra_jax.data.placement_sampler import PlacementSampler
from libra_jax.plan import PlanTables, check_batch

LENGTHS = np.random.default_rng(2).integers(17, 65, 100)


def tables_of(plans):
    return {name: getattr(plans, name) for name in PlanTables.table_names()}


@pytest.mark.parametrize("hosts", [1, 2, 4, 8, 16])
def test_each_host_has_its_own_rows_and_the_plans_of_its_pools(hosts):
    """Pools of 4 over 16 rows: with 8 and 16 hosts several share a pool, and each plans it, to the same bits."""
    options = {"pools": 4, "micro_steps": 2, "seed": 5}
    whole = batches_of(LENGTHS, small_spec(pool_size=4), **options)[3]
    check_step(whole)
    per_host = 16 // hosts
    for host in range(hosts):
        rows = range(host * per_host, (host + 1) * per_host)
        mine = batches_of(LENGTHS, small_spec(pool_size=4), rows=rows, **options)[3]
        check_step(mine)
        assert mine["rows"].tolist() == list(rows)
        assert mine["pool_numbers"].tolist() == sorted({row // 4 for row in rows})
        for name in ARRAYS:
            np.testing.assert_array_equal(mine[name], whole[name][:, rows])
        for name, table in tables_of(mine["plans"]).items():
            np.testing.assert_array_equal(table, tables_of(whole["plans"])[name][:, mine["pool_numbers"]])
        assert len(mine["stats"]) == 2 * len(mine["pool_numbers"])
        for name in ("sequence_ids", "lengths"):
            np.testing.assert_equal(mine[name], whole[name])


def test_plans_of_other_rows_are_refused():
    mine, other = (batches_of(LENGTHS, small_spec(pool_size=4), rows=rows, pools=4)[0] for rows in ([2, 3], [6, 7]))
    with pytest.raises(ValueError, match="not this batch's"):
        check_step(mine | {"segment_ids": other["segment_ids"]})


@pytest.mark.parametrize("rows", [[], [3, 2], [1, 1], [-1, 0], [0, 16]])
def test_rows_that_are_not_a_micro_steps_are_refused(rows):
    with pytest.raises(ValueError, match="ascending numbers of a micro-step's 16 rows"):
        batches_of(LENGTHS, small_spec(pool_size=4), rows=rows, pools=4)


def test_a_thousand_hosts_share_a_step_out():
    """8,000 sequences of a step on 1,000 hosts: each goes to exactly one, and hosts that start anew agree."""
    lengths = [[int(n)] for n in np.random.default_rng(0).integers(1, 65, 9000)]

    def sampler():
        return PoolSampler(lengths, small_spec(pool_size=8), pools=1000, last_step="drop")

    slots = sampler()[0].reshape(-1)
    assert len(np.unique(slots)) == 8000
    of_host = {host: slots[host * 8 : (host + 1) * 8].tolist() for host in range(1000)}
    assert sorted(number for numbers in of_host.values() for number in numbers) == sorted(slots.tolist())
    for host in (0, 17, 999):
        assert sampler()[0].reshape(1000, 8)[host].tolist() == of_host[host]


def test_worker_processes_change_nothing_and_any_number_goes_on():
    """Three steps with 2 workers, two more with none, two with 1: the batches of a run without a stop."""
    batches = batches_of(LENGTHS, small_spec(pool_size=2), pools=2)
    expected = [batches[step] for step in range(7)]
    got, state = [], None
    for workers, steps in ((2, 3), (0, 2), (1, 2)):
        iterator = BatchIterator(batches_of(LENGTHS, small_spec(pool_size=2), pools=2), workers=workers)
        if state is not None:
            iterator.set_state(json.loads(state))
        got += take(iterator, steps)
        state = json.dumps(iterator.get_state())
        iterator.close()
    assert json.loads(state)["next_step"] == 7
    for mine, whole in zip(got, expected, strict=True):
        assert mine.pop("waited_seconds") >= 0
        assert mine.keys() == whole.keys()
        check_step(mine)
        for name in (*ARRAYS, "sequence_ids", "rows", "pool_numbers"):
            np.testing.assert_array_equal(mine[name], whole[name])
        for name, table in tables_of(mine["plans"]).items():
            np.testing.assert_array_equal(table, tables_of(whole["plans"])[name])
        assert mine["plans"].spec == whole["plans"].spec
        assert [s.work.tolist() for s in mine["stats"]] == [s.work.tolist() for s in whole["stats"]]


def test_workers_do_not_outlive_a_run_that_was_killed():
    """kill -9 of the process alone, whose workers wait for what it hands them."""
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from test_hosts import BatchIterator, batches_of, small_spec\n"
        "if __name__ == '__main__':\n"
        "    iterator = BatchIterator(batches_of([30] * 9, small_spec(pool_size=1)), workers=1)\n"
        "    next(iterator); print('ready', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    assert children
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_what_a_worker_raises_reaches_the_run():
    """The message of whoever reads, not that of a queue."""
    for workers in (0, 1):
        iterator = BatchIterator(batches_of([30, 40], small_spec(pool_size=1)), workers=workers)
        iterator.batches.vocab_size = 100
        with pytest.raises(Exception, match="1 of documents holds token 1000, and the model's vocabulary"):
            take(iterator, 2)
        iterator.close()


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 0), (3, 0), (2, 1)])
def test_a_step_that_failed_is_the_next_one(prefetch, workers, tmp_path):
    """Whatever was made ahead: a disk that answers again is asked for the step that is missing."""
    batches = batches_of(LENGTHS, small_spec(pool_size=2), pools=2)
    fragile = FailsOnce(batches.corpora[0].documents, tmp_path / "broken", batches[2]["tokens"].max() // 1000)
    batches.corpora[0] = Corpus("documents", fragile, batches.corpora[0].packed)
    iterator = BatchIterator(batches, prefetch, workers)
    take(iterator, 2)
    with pytest.raises(Exception, match="not now"):
        next(iterator)
    assert iterator.get_state()["next_step"] == 2
    (tmp_path / "broken").touch()
    expected = batches_of(LENGTHS, small_spec(pool_size=2), pools=2)
    for step, batch in enumerate(take(iterator, 3), start=2):
        np.testing.assert_array_equal(batch["tokens"], expected[step]["tokens"])
    iterator.close()


class FailsOnce:
    """Documents of which one cannot be read until a file is there."""

    tokenizer, vocab_size, fingerprint = None, None, "fails once"

    def __init__(self, documents, file, number):
        self.lengths, self._documents, self._file, self._number = documents.lengths, documents, file, number

    def read(self, document, start, length, out):
        if self._number in document and not self._file.exists():
            raise ValueError("not now")
        self._documents.read(document, start, length, out)


@pytest.mark.parametrize(
    "state", [{}, {"next_step": 3}, {"data": None}, *({"next_step": n} for n in (-5, 2.7, "7", None, True))]
)
def test_a_state_that_is_none_is_refused(state):
    iterator = BatchIterator(batches_of([8] * 4, small_spec()))
    whole = iterator.get_state()
    with pytest.raises(ValueError, match="no saved position"):
        iterator.set_state({**whole, **state} if "next_step" in state and state["next_step"] != 3 else state)
    iterator.close()


# --------------------------------------------------------------------------------------------- a loader of one's own


@pytest.mark.parametrize(("shards", "workers"), [(1, 0), (2, 0), (4, 0), (1, 2)])
def test_grains_loader_gives_each_shard_its_rows(shards, workers):
    """An already packed dataset behind grain.DataLoader: batches and plans are those of the steps they belong to."""
    spec = small_spec(pool_size=2)
    sampler = PoolSampler([[int(n)] for n in LENGTHS], spec, pools=4, micro_steps=2, last_step="drop")
    rows = [np.where(np.arange(64) < n, i + 1, 0) for i, n in enumerate(LENGTHS)]  # segment id: whose it is, from 1
    served = []
    for shard in range(shards):
        placed = PlacementSampler(sampler, steps=sampler.steps_per_epoch, shards=shards, workers=workers)
        assert placed.records_per_step == 16 // shards
        mine = placed.rows(shard)
        loader = grain.DataLoader(
            data_source=rows,
            sampler=placed,
            operations=[grain.transforms.Batch(2 * len(mine), drop_remainder=True)],
            worker_count=workers,
            shard_options=grain.sharding.ShardOptions(shard, shards, drop_remainder=True),
        )
        batches = list(loader)
        assert len(batches) == sampler.steps_per_epoch
        for step, batch in enumerate(batches):
            by_micro_step = batch.reshape(2, len(mine), 64)
            numbers = by_micro_step[..., 0] - 1
            np.testing.assert_array_equal(numbers, sampler[step].reshape(2, 8)[:, mine])
            check_batch(placed.plans(step, shard), by_micro_step)
            served += numbers.ravel().tolist()
    assert len(served) == len(set(served)) == 96


def test_grains_loader_goes_on_where_it_was():
    spec = small_spec(pool_size=2)

    def loader():
        sampler = PoolSampler([[int(n)] for n in LENGTHS], spec, pools=2, last_step="drop")
        placed = PlacementSampler(sampler, steps=60)
        batch = [grain.transforms.Batch(4, drop_remainder=True)]
        return iter(
            grain.DataLoader(
                data_source=range(100),
                sampler=placed,
                operations=batch,
                worker_count=0,
                shard_options=grain.sharding.NoSharding(),
            )
        )

    first = loader()
    whole = [next(first).tolist() for _ in range(40)]
    start = loader()
    for _ in range(30):
        next(start)
    state = start.get_state()
    rest = loader()
    rest.set_state(state)
    assert [next(rest).tolist() for _ in range(10)] == whole[30:]


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({}, {"shards": 3}, r"shards \(3\) must divide the 4 sequences"),
        ({}, {"steps": 0}, r"steps \(0\)"),
        ({}, {"steps": 3, "workers": 2}, r"workers \(2\) must divide steps \(3\)"),
        ({"last_step": "pad"}, {}, "10 sequences do not fill steps of 4"),
    ],
)
def test_loaders_that_cannot_be_served_are_refused(options, given, words):
    sampler = PoolSampler([[8]] * 10, small_spec(), pools=2, **({"last_step": "drop"} | options))
    with pytest.raises(ValueError, match=words):
        PlacementSampler(sampler, **({"steps": 2} | given))
    with pytest.raises(ValueError, match=r"shard 1 of a sampler with shards=1"):
        PlacementSampler(PoolSampler([[8]] * 8, small_spec(), pools=2), steps=2).plans(0, 1)
    with pytest.raises(IndexError, match="record 8 of 8"):
        PlacementSampler(PoolSampler([[8]] * 8, small_spec(), pools=2), steps=2)[8]
