"""Hugging Face folders written: the bytes that were read, whole or not at all, and about a shard of memory."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hugging_face_base import (
    INDEX,
    LARGER,
    MOE,
    assert_equal,
    expected_params,
    published,
    random_sharding,
    read_folder,
    same_bytes,
    shapes_like,
    tensors_of,
    with_tests,
    write_folder,
)
from train_base import TINY

from libra_jax.models.hugging_face import config_from_hugging_face
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.hugging_face_write import write_weights
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.processes import run_processes


@pytest.mark.parametrize("model", [TINY, dataclasses.replace(TINY, tied_embeddings=True), MOE], ids=["", "tied", "moe"])
def test_what_is_read_and_written_again_has_the_same_bytes(tmp_path: Path, model: Qwen3Config) -> None:
    tensors = tensors_of(model)
    odd = np.array([0x8000, 0x0001, 0x807F, 0x7F80, 0xFF7F, 0x0080], np.uint16)  # -0, subnormal, infinite, least normal
    tensors["model.layers.1.self_attn.o_proj.weight"].reshape(-1)[:6] = odd.view(ml_dtypes.bfloat16)
    source = write_folder(tmp_path / "hf", tensors, published(model) | {"eos_token_id": 77, "of_the_future": [1]})
    expected = expected_params(tensors, model)
    params = read_weights(source, shapes_like(expected, random_sharding(np.random.default_rng(2))))
    files = write_weights(tmp_path / "new", params, model, shard_bytes=5000, companions=source)
    new, where = read_folder(tmp_path / "new")
    assert same_bytes(new, tensors)

    index = json.loads((tmp_path / "new" / INDEX).read_text())
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    shards = sorted(set(where.values()))
    assert sorted(files) == sorted([*shards, INDEX, "config.json", "tokenizer.json"])
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for shard in shards:
        sizes = [tensors[name].nbytes for name, file in where.items() if file == shard]
        assert len(sizes) == 1 or sum(sizes) <= 5000
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert config_from_hugging_face(tmp_path / "new") == config_from_hugging_face(source)
    assert json.loads((tmp_path / "new/config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert_equal(
        read_weights(tmp_path / "new", shapes_like(expected, random_sharding(np.random.default_rng(3)))), expected
    )


def test_float32_stays_as_it_is_and_bfloat16_is_the_nearest(tmp_path: Path) -> None:
    tensors = tensors_of(TINY, dtype=np.float32)
    params = expected_params(tensors, TINY)
    assert write_weights(tmp_path / "f32", params, TINY, "float32") == ["config.json", "model.safetensors"]
    assert same_bytes(read_folder(tmp_path / "f32")[0], tensors)
    write_weights(tmp_path / "bf16", params, TINY)
    for name, got in read_folder(tmp_path / "bf16")[0].items():
        bits = tensors[name].view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
        np.testing.assert_array_equal(got.view(np.uint16), nearest.astype(np.uint16), err_msg=name)
    for folder, dtype in (("f32", "float32"), ("bf16", "bfloat16")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["torch_dtype"] == dtype


TWO = """
import sys
from pathlib import Path
import numpy as np
from libra_jax.processes import join_processes
join_processes(sys.argv[-3:], devices=4)
import jax
import hugging_face_base as t
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.hugging_face_write import write_weights

place = Path(sys.argv[1])
want = t.expected_params(t.tensors_of(t.MOE), t.MOE)
shapes = t.shapes_like(want, t.random_sharding(np.random.default_rng(4)))
params = read_weights(place / "hf", shapes)
for ours, whole in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
    for shard in ours.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
write_weights(place / "new", params, t.MOE, shard_bytes=20_000)
assert (place / "new" / "config.json").is_file()
"""


def test_two_processes_read_and_write_the_same(tmp_path: Path) -> None:
    tensors = tensors_of(MOE)
    write_folder(tmp_path / "hf", tensors)
    environment = with_tests() | {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=3600"}
    command = [sys.executable, "-W", "ignore", "-c", TWO, str(tmp_path)]
    run_processes(command, 2, timeout_seconds=300, environment=environment)
    assert same_bytes(read_folder(tmp_path / "new")[0], tensors)


# The memory of a host

MEMORY = """
import dataclasses, resource, sys
from pathlib import Path
import jax
import hugging_face_base as t
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.hugging_face_write import write_weights

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def both(model, place):
    shapes, folder = t.params_of(model), place / "hf"
    before = peak()
    params = read_weights(folder, shapes)
    taken = peak() - before - sum(4 * x.size for x in jax.tree.leaves(shapes))
    before = peak()
    write_weights(place / "new", params, model, shard_bytes=float(sys.argv[2]))
    return taken, peak() - before

place = Path(sys.argv[1])
both(t.TINY, place / "tiny")  # compilers and libraries are in memory now
print(*both(t.LARGER, place / "larger"))
"""


def test_a_host_holds_about_one_shard_beside_the_arrays(tmp_path: Path) -> None:
    """In a process of its own: 117 MB of bfloat16 in 8 files; 233 MB of float32 on devices, which are memory here."""
    for name, model in (("tiny", TINY), ("larger", LARGER)):
        (tmp_path / name).mkdir()
        tensors = tensors_of(model)
        write_folder(tmp_path / name / "hf", tensors, files=8)
    total = sum(t.nbytes for t in tensors.values())
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(total / 8)], capture_output=True, text=True, check=True,
        env=with_tests(),
    )  # fmt: skip
    read_bytes, written_bytes = map(int, done.stdout.split())
    assert read_bytes < total / 3
    assert written_bytes < total / 3


# Nothing half-written


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    params = expected_params(tensors_of(TINY), TINY)
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="is there already"):
        write_weights(tmp_path / "there", params, TINY)
    with pytest.raises(ValueError, match="tied_embeddings is True, and the parameters are those with a head"):
        write_weights(tmp_path / "new", params, dataclasses.replace(TINY, tied_embeddings=True))
    with pytest.raises(ValueError, match=r"dtype \(int8\) must be one of bfloat16, float32"):
        write_weights(tmp_path / "new", params, TINY, "int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"shard_bytes \(0\)"):
        write_weights(tmp_path / "new", params, TINY, shard_bytes=0)
    with pytest.raises(ValueError, match=r"has nothing for these parameters: layers\.mlp\.bias"):
        params["layers"]["mlp"]["bias"] = np.zeros((2, 48), np.float32)
        write_weights(tmp_path / "new", params, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = expected_params(tensors_of(TINY), TINY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # no file may be larger
    try:
        with pytest.raises(OSError, match=r"new could not be written: File too large\. Nothing is left of it"):
            write_weights(tmp_path / "new", params, TINY, shard_bytes=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)._replace(free=1234)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    total = sum(x.size for x in jax.tree.leaves(params)) * 4
    with pytest.raises(
        OSError, match=f"new could not be written: it takes {total:,} bytes, and there is room for 1,234"
    ):
        write_weights(tmp_path / "new", params, TINY, "float32")
    assert not list(tmp_path.iterdir())


STUCK = """
import sys, time
from pathlib import Path
import hugging_face_base as t
from libra_jax.models import hugging_face_write as w

write = w._write_shard
def stuck(out, *args):
    write(out, *args)
    if "model-00002-" in out.name:
        print("two shards", flush=True)
        time.sleep(600)
w._write_shard = stuck
w.write_weights(Path(sys.argv[1]), t.expected_params(t.tensors_of(t.TINY), t.TINY), t.TINY, shard_bytes=20_000)
"""


def test_a_process_that_is_killed_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    folder, unfinished = tmp_path / "new", tmp_path / "new.unfinished"
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(folder)], stdout=subprocess.PIPE, text=True, env=with_tests()
    )
    params = expected_params(tensors_of(TINY), TINY)
    try:
        assert process.stdout is not None and process.stdout.readline() == "two shards\n"
        assert not folder.exists() and len(list(unfinished.iterdir())) == 2
        with pytest.raises(ValueError, match="another process is writing"):
            write_weights(folder, params, TINY)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not folder.exists() and len(list(unfinished.iterdir())) == 2
    (unfinished / "of another try").write_text("")
    write_weights(folder, params, TINY, shard_bytes=30_000)
    assert not unfinished.exists() and not (folder / "of another try").exists()
    assert same_bytes(read_folder(folder)[0], tensors_of(TINY))
