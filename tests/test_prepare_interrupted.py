"""`libra prepare` interrupted at any moment: it goes on, ends with the bytes of a run that was left alone, and says why
it stopped. Killed, out of disk, stopped by the user, left by a worker, started twice."""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from libra_jax.data import prepare as prepare_module
from libra_jax.data.prepare import PrepareOptions, PrepareStopped, prepare
from libra_jax.data.prepare_folder import UnfinishedFolder
from libra_jax.data.records import Position
from libra_jax.data.tokenization import Tokenizer

DIES = """
import os, signal, sys
calls = int(sys.argv[1])
def counted(call):
    def run(*args):
        global calls
        calls -= 1
        if calls in (0, -1) and os.urandom(1) < b"\\x80":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args)
        if calls <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return run
for name in ("fsync", "rename", "replace"):
    setattr(os, name, counted(getattr(os, name)))
from libra_jax import cli
sys.exit(cli.main(sys.argv[2:]))
"""
HANGS = """
import os, sys
from libra_jax import cli
from libra_jax.data import prepare
listed = prepare.list_inputs
def then_a_pipe(*args):
    found = listed(*args)
    os.remove(sys.argv[1])
    os.mkfifo(sys.argv[1])
    return found
prepare.list_inputs = then_a_pipe
sys.exit(cli.main(sys.argv[2:]))
"""
"""Whoever reads the file that is named first waits for ever."""
RUNS = "import sys; from libra_jax import cli; sys.exit(cli.main(sys.argv[1:]))"


def corpus(folder: Path) -> list[Path]:
    """A few files of every kind, some records of which cannot be read."""
    rng = random.Random(0)
    folder.mkdir()
    texts = ["".join(rng.choices("ab cd\n", k=rng.randrange(3000))) for _ in range(300)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[7:7] = ["", "no JSON"]
    lines[150:150] = ['{"text": 3}', '{"text": ""}']
    (folder / "a.jsonl").write_text("\n".join(lines))
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-9])  # breaks off
    pq.write_table(pa.table({"text": [*texts[:150], None]}), folder / "c.parquet", row_group_size=40)
    for i in range(20):
        (folder / f"d{i}.txt").write_text(texts[i])
    return sorted(folder.iterdir())


def options(out: Path, **changes: object) -> PrepareOptions:
    settings = {"tokenizer": "bytes", "out": out, "workers": 1, "shard_tokens": 100_000, "on_error": "skip"}
    return PrepareOptions(**{**settings, **changes})


def arguments(inputs: list[Path], out: Path, *more: str) -> list[str]:
    words = ["prepare", *map(str, inputs), "--tokenizer", "bytes", "--out", str(out), "--on-error", "skip"]
    return [*words, "--shard-tokens", "100000", *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def command(program: str, *args: str, **keywords: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keywords
    )


def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    prepare(inputs, options(tmp_path / "whole"))
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if name.endswith(".array_record")]) >= 8
    rng = random.Random(int.from_bytes(os.urandom(4)))
    deaths = 0
    out = tmp_path / "out"
    for _ in range(60):
        process = command(DIES, str(rng.randrange(8, 40)), *arguments(inputs, out, "--workers", "1"))
        _, err = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, err
        deaths += 1
    else:
        pytest.fail("60 runs did not finish it")
    assert deaths >= 2
    assert contents(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]


def test_killed_with_its_workers_it_leaves_no_process_behind(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    prepare(inputs, options(tmp_path / "whole"))
    out, rng = tmp_path / "out", random.Random(int.from_bytes(os.urandom(4)))
    for attempt in range(2):
        process = command(RUNS, *arguments(inputs, out, "--workers", "2"))
        deadline = time.monotonic() + 30
        workers: list[int] = []
        while process.poll() is None and time.monotonic() < deadline and len(workers) < 2 - attempt:
            workers = children(process.pid)
        time.sleep(rng.random() * 0.3)
        workers = children(process.pid)
        process.kill()
        process.communicate()
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(alive, workers))
    prepare(inputs, options(out, workers=2))
    assert contents(out) == contents(tmp_path / "whole")


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stopped_by_the_user_it_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "never.txt").write_text("a worker waits for it")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    args = arguments([tmp_path / "a.jsonl", tmp_path / "never.txt"], tmp_path / "out", "--workers", "2")
    process = command(HANGS, str(tmp_path / "never.txt"), *args, start_new_session=True)
    deadline = time.monotonic() + 30
    while not children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers get it, too
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.startswith("libra: stopped by the user; to go on: ") and err.count("\n") == 1
    assert err.strip().endswith(" ".join(args[-4:]))


def test_a_second_run_at_the_same_time_is_refused(tmp_path: Path) -> None:
    (tmp_path / "never.txt").write_text("never read")
    (tmp_path / "other.txt").write_text("of another run")
    args = arguments([tmp_path / "never.txt"], tmp_path / "out", "--workers", "1")
    process = command(HANGS, str(tmp_path / "never.txt"), *args)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "out.unfinished/state.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(PrepareStopped, match=r"another run is at work in .*out\.unfinished"):
            prepare([tmp_path / "other.txt"], options(tmp_path / "out"))
    finally:
        process.kill()
        process.communicate()
    (tmp_path / "never.txt").unlink()
    (tmp_path / "never.txt").write_text("here")
    prepare([tmp_path / "never.txt"], options(tmp_path / "out"))  # the dead run's lock is gone with it


def test_a_worker_that_dies_stops_the_run_which_goes_on_when_started_again(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    prepare(inputs, options(tmp_path / "whole"))

    def kill_first_worker() -> None:
        deadline = time.monotonic() + 30
        while not (workers := multiprocessing.active_children()) and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(workers[0].pid or 0, signal.SIGKILL)

    threading.Thread(target=kill_first_worker).start()
    with pytest.raises(PrepareStopped, match=r"a worker process was killed.*fewer --workers \(2\)"):
        prepare(inputs, options(tmp_path / "out", workers=2))
    assert not multiprocessing.active_children()
    prepare(inputs, options(tmp_path / "out", workers=2))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A file system of `size`, where one may be mounted. Gives whether it is."""
    folder.mkdir()
    mounted = (
        sys.platform == "linux"
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("limit", ["disk", "file"])
def test_out_of_room_it_says_so_and_goes_on_when_there_is_more(tmp_path: Path, limit: str) -> None:
    """disk: a full file system, where one may be mounted. file: files of a limited size, which anybody may set."""
    (tmp_path / "in").mkdir()
    for i in range(8):
        (tmp_path / f"in/{i}.txt").write_bytes(random.Random(i).randbytes(200_000))
    args = ["prepare", str(tmp_path / "in"), "--tokenizer", "bytes", "--workers", "1", "--out"]
    assert command(RUNS, *args, str(tmp_path / "whole"), "--shard-tokens", "300000").wait(60) == 0
    with small_disk(tmp_path / "disk", "1500k") as mounted:
        out = tmp_path / "disk/out"
        args += [str(out), "--shard-tokens", "300000"]
        full = mounted and limit == "disk"
        bound = None if full else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, resource.RLIM_INFINITY))
        process = command(RUNS, *args, preexec_fn=bound)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and err.count("\n") == 1
        assert f"{out}.unfinished/folder" in err and "cannot be written" in err and "the same command goes on" in err
        assert ("No space left on device" if full else "File too large") in err
        if full:
            state = json.loads(Path(f"{out}.unfinished/state.json").read_text())
            assert 2 <= len(state["shards"]) < 4  # so much had room
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=20m", tmp_path / "disk"], check=True)
        process = command(RUNS, *args)
        assert (process.wait(60), process.communicate()[1]) == (0, "")
        assert contents(out) == contents(tmp_path / "whole")


def stopped_after_some_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Path], Path]:
    inputs = corpus(tmp_path / "in")
    monkeypatch.setattr(prepare_module, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(inputs, options(tmp_path / "out"))
    monkeypatch.undo()
    return inputs, tmp_path / "out.unfinished"


def test_what_was_begun_is_only_gone_on_with_as_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, unfinished = stopped_after_some_shards(tmp_path, monkeypatch)
    out = tmp_path / "out"
    way_out = "Start it as it was begun, or remove that folder"
    for again, changes, message in (
        (inputs, {"shard_tokens": 5}, f"shard tokens was 100000 and is 5 now. {way_out}"),
        (inputs, {"text_column": "t"}, f"text column was 'text' and is 't' now. {way_out}"),
        (inputs[1:], {}, "input 1 was .*a.jsonl and is .*b.jsonl.gz now"),
        (inputs, {"on_error": "stop"}, "has left out .* records: go on with --on-error skip"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(again, options(out, **changes))
    was = inputs[0].stat()
    with inputs[0].open("a") as file:
        file.write("\n")
    message = f"its size was {was.st_size:,} bytes and is {was.st_size + 1:,} now"
    with pytest.raises(ValueError, match=message):
        prepare(inputs, options(out))
    os.truncate(inputs[0], was.st_size)
    with pytest.raises(ValueError, match=f"the time of its last change was {was.st_mtime_ns:,} ns"):
        prepare(inputs, options(out))
    os.utime(inputs[0], ns=(was.st_atime_ns, was.st_mtime_ns))
    shard = unfinished / "folder/documents-00001.array_record"
    content = shard.read_bytes()
    os.truncate(shard, 1000)
    with pytest.raises(ValueError, match=f"1.array_record has 1,000 bytes, and .* it has {len(content):,}"):
        prepare(inputs, options(out))
    shard.unlink()
    with pytest.raises(ValueError, match=r"documents-00001.array_record is gone.*remove .*out.unfinished to start"):
        prepare(inputs, options(out))
    shard.write_bytes(content)
    prepare(inputs, options(out))
    prepare(inputs, options(tmp_path / "whole"))
    assert contents(out) == contents(tmp_path / "whole")


def test_a_damaged_unfinished_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, unfinished = stopped_after_some_shards(tmp_path, monkeypatch)
    state, lengths = unfinished / "state.json", unfinished / "folder/lengths.npy"
    good, way_out = state.read_text(), "remove .*out.unfinished to start from the beginning"
    content = json.loads(good)
    for damaged in (
        "", "[]", "null", "{}", "{", "[" * 100_000, '"x"', *(
            json.dumps({**content, name: value})
            for name, value in (
                ("position", None), ("position", {"file": "x", "offset": 0, "record": 0}), ("shards", [{}]),
                ("shards", None), ("settings", []), ("bad", {"x": None}), ("units", -1), ("more", 1),
            )
        ),
    ):  # fmt: skip
        state.write_text(damaged)
        with pytest.raises(ValueError, match=f"state.json is damaged: .*; {way_out}"):
            prepare(inputs, options(tmp_path / "out"))
    state.write_text(good)
    whole = lengths.read_bytes()
    lengths.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    message = r"lengths.npy is damaged: its lengths of documents-00000.array_record .* sha256"
    with pytest.raises(ValueError, match=f"{message}.*; {way_out}"):
        prepare(inputs, options(tmp_path / "out"))
    lengths.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=f"lengths.npy has {len(whole) - 4:,} bytes, and must have .*; {way_out}"):
        prepare(inputs, options(tmp_path / "out"))
    lengths.unlink()
    with pytest.raises(ValueError, match=f"lengths.npy is gone; {way_out}"):
        prepare(inputs, options(tmp_path / "out"))
    lengths.write_bytes(whole)
    (unfinished / "folder/inputs.jsonl").write_text("?")  # known without it: it is written again
    with pytest.raises(ValueError, match=f"inputs files was {len(inputs)} and is 1 now"):
        prepare(inputs[:1], options(tmp_path / "out"))
    prepare(inputs, options(tmp_path / "out"))
    prepare(inputs, options(tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("removes", ["rm -r", "remove", "close"])
def test_a_run_never_removes_what_another_has_in_the_same_place(tmp_path: Path, removes: str) -> None:
    def begin() -> UnfinishedFolder:
        folder = UnfinishedFolder(tmp_path / "out", {"tokenizer": {}, "inputs": {}}, Tokenizer.open("bytes"), [])
        folder.add(np.zeros(3, "<u2"), np.array([3], np.uint32))
        return folder

    first = begin()
    getattr(first, removes, lambda: shutil.rmtree(tmp_path / "out.unfinished"))()
    second = begin()
    with pytest.raises(PrepareStopped, match=r"out\.unfinished was removed while this run was at work in it"):
        first.commit(Position(1))
    first.close()
    first.remove()
    assert (tmp_path / "out.unfinished/folder/writing.array_record").exists()
    with pytest.raises(PrepareStopped, match="another run is at work"):
        begin()
    second.commit(Position(1))
    second.finish()
    assert stored_lengths(tmp_path / "out") == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def stored_lengths(folder: Path) -> list[int]:
    return np.load(folder / "lengths.npy").tolist()


def test_an_input_that_changes_while_it_is_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = corpus(tmp_path / "in")
    take = prepare_module._take

    def change(*args: object) -> None:
        inputs[0].write_text('{"text": "other"}')
        take(*args)

    monkeypatch.setattr(prepare_module, "_take", change)
    with pytest.raises(PrepareStopped, match=r"a.jsonl has changed while it was read: .* bytes.* 17 bytes"):
        prepare(inputs, options(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
