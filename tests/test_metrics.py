"""The numbers of a step: FLOPs, balance and exchange as planned, their definitions, and files that keep them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from train_base import TINY, TINY_MOE

from libra_jax.models.qwen3 import QWEN3_0_6B, QWEN3_8B, QWEN3_30B_A3B
from libra_jax.processes import run_processes
from libra_jax.targets import TARGETS
from libra_jax.train.config import MetricsConfig
from libra_jax.train.flops import PEAK_FLOPS, model_flops, multiplied_parameters, peak_flops
from libra_jax.train.measure import everywhere, plan_numbers, planned_of
from libra_jax.train.metrics import EvaluationRecord, MetricsFile, StepRecord, read_metrics
from libra_jax.train.profile import StepProfile
from libra_jax.train.tensorboard import EventFiles

TESTS = Path(__file__).parent


def test_flops_are_those_of_the_products_that_documents_need() -> None:
    """By hand: 32 wide, 48 inside, 2 layers, 4 query and 2 key/value heads of 8, 64 words."""
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v, o; gate, up and down
    assert multiplied_parameters(TINY) == 2 * layer + 64 * 32
    assert multiplied_parameters(TINY_MOE) == 2 * (layer - 3 * 32 * 48 + 32 * 8 + 2 * 3 * 32 * 16) + 64 * 32
    # Documents of 3, 1 and 2 tokens: 6 + 1 + 3 pairs, 9 where a query sees two keys at most. Per pair, head and layer
    # two products of 8 multiply-adds, forward, and four backward.
    weights = 6 * 6 * multiplied_parameters(TINY)
    assert model_flops(TINY, [[3], [1, 2], []]) == weights + 10 * 2 * 4 * (2 + 4) * 2 * 8
    assert model_flops(TINY, [[3], [1, 2], []], window=2) == weights + 9 * 2 * 4 * (2 + 4) * 2 * 8


def test_flops_are_what_xla_counts_for_the_same_products() -> None:
    """One document without packing, every query on every key: twice the pairs, but for the diagonal."""
    n, width, heads, kv_heads, head_dim = 16, TINY.hidden_size, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim
    shapes = {
        "q": (width, heads, head_dim), "k": (width, kv_heads, head_dim), "v": (width, kv_heads, head_dim),
        "o": (heads, head_dim, width), "gate": (width, TINY.intermediate_size), "up": (width, TINY.intermediate_size),
        "down": (TINY.intermediate_size, width),
    }  # fmt: skip

    def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("tf,fhd->htd", x, w[name]) for name in "qkv")
        k, v = (jnp.repeat(y, heads // kv_heads, axis=0) for y in (k, v))
        x = jnp.einsum("htd,hdf->tf", jnp.einsum("hqk,hkd->hqd", jnp.einsum("hqd,hkd->hqk", q, k), v), w["o"])
        return ((x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def counted(function: Any) -> float:
        inputs = {name: jnp.zeros(shape) for name, shape in shapes.items()}, jnp.zeros((n, width))
        return jax.jit(function).lower(*inputs).compile().cost_analysis()["flops"]

    model = dataclasses.replace(TINY, num_layers=1)
    tables = 6 * n * TINY.vocab_size * width
    ours = model_flops(model, [[n]]) - tables + 12 * heads * head_dim * (n * n - n * (n + 1) // 2)
    assert counted(layer) == pytest.approx(ours / 3, rel=0.02)

    def forward_and_backward(w: dict[str, jax.Array], x: jax.Array) -> Any:
        y, backward = jax.vjp(layer, w, x)
        return y, backward(x)

    both = counted(forward_and_backward)
    assert both == pytest.approx(ours, rel=0.02)


def test_multiplied_parameters_of_published_models() -> None:
    """From the model cards: 6.95 billion without embeddings in 8B, 0.44 in 0.6B; the output matrix comes on top."""
    for model, billions in ((QWEN3_8B, 6.95), (QWEN3_0_6B, 0.44)):
        head = model.vocab_size * model.hidden_size
        assert (multiplied_parameters(model) - head) / 1e9 == pytest.approx(billions, abs=0.005)
    active = QWEN3_30B_A3B.active_parameters - QWEN3_30B_A3B.vocab_size * QWEN3_30B_A3B.hidden_size
    assert multiplied_parameters(QWEN3_30B_A3B) == pytest.approx(active, rel=1e-3)


def test_peaks_are_those_of_the_published_devices_and_none_is_made_up() -> None:
    for target in TARGETS.values():
        by_units = target.cores * target.fma_rate * 2 * target.matrix_clock_ghz * 1e9
        assert peak_flops(target.name, "bfloat16") == pytest.approx(by_units, rel=0.02)
    assert peak_flops("cpu", "bfloat16") is None and peak_flops("NVIDIA H200 MIG 1g.18gb", "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float32") is None and min(PEAK_FLOPS.values()) == 312e12


# Two micro-steps, three pools of two ranks: pages and bytes of each rank, [micro-step][pool].
WORK = np.array([[[8, 0], [4, 4], [1, 1]], [[1, 2], [3, 6], [2, 0]]])
SENT = np.array([[[10, 0], [0, 5], [2**40, 0]], [[0, 30], [0, 0], [0, 7]]])


def fake_batch(held: list[int]) -> dict[str, Any]:
    plans = [
        SimpleNamespace(work=WORK[m, p], sent_bytes=SENT[m, p], fallback="no room" if (m, p) == (1, 1) else None)
        for m in range(2)
        for p in held
    ]
    return {"pool_numbers": np.array(held), "pools": 3, "stats": plans}


def test_balance_and_exchange_as_planned() -> None:
    planned = planned_of(plan_numbers(fake_batch([0, 1, 2]), 2), ranks=2, layers=5)
    # 32 pages over 6 ranks. Busiest ranks: 8 and 6. Fullest pools: 8 and 9 pages, on two ranks each.
    assert planned.imbalance_libra == pytest.approx(14 / (32 / 6))
    assert planned.imbalance_pools == pytest.approx((4 + 4.5) / (32 / 6))
    assert planned.imbalance_ranks == pytest.approx(14 / 8.5)
    assert planned.exchange_bytes_busiest == 5 * 2**40
    assert planned.exchange_bytes_mean == pytest.approx(5 * (52 + 2**40) / 6, rel=1e-15)
    assert planned.fallbacks == 1
    nothing = planned_of(np.zeros((3, 7)), 2, 5)
    assert (nothing.imbalance_libra, nothing.imbalance_pools, nothing.imbalance_ranks) == (1, 1, 1)
    several = planned_of(np.fmax(plan_numbers(fake_batch([0, 1]), 2), plan_numbers(fake_batch([1, 2]), 2)), 2, 5)
    assert several == planned


def test_processes_bring_together_what_each_knows_of_its_pools() -> None:
    """Two processes hold pools 0 and 1, and 1 and 2: both have the numbers of all three, to the last bit."""
    program = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from libra_jax.processes import join_processes
address, count, index = sys.argv[1:]
join_processes((address, count, index), devices=1)
from test_metrics import *
index = int(index)
numbers, waited = everywhere(plan_numbers(fake_batch([[0, 1], [1, 2]][index]), 2), np.array([0.1 + index, 5.0 - index]))
np.testing.assert_array_equal(numbers, plan_numbers(fake_batch([0, 1, 2]), 2))
print(waited.tolist())
"""
    printed = run_processes([sys.executable, "-c", program], 2, timeout_seconds=200)
    assert [lines.strip().splitlines()[-1] for lines in printed] == ["[1.1, 5.0]"] * 2
    array = np.array([1.0, np.nan])
    assert everywhere(array)[0] is array, "one process has nobody to ask"


def test_every_number_has_its_definition() -> None:
    page = (TESTS.parent / "docs/metrics.md").read_text()
    step, evaluation = page.split("## An evaluation")
    for part, kind in ((step, StepRecord), (evaluation, EvaluationRecord)):
        defined = re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)
        assert sorted(defined) == sorted(field.name for field in dataclasses.fields(kind))


RECORD = StepRecord(1, 2.0, 1.0, 1e-3, 10, 12, 0.5, 24.0, 1.5, 1.2, 1.01, 0, mfu=0.25, skipped=False, skipped_total=0)


def test_a_curve_with_skipped_steps_is_json_and_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    skipped = dataclasses.replace(RECORD, step=2, loss=math.nan, grad_norm=math.inf, skipped=True, skipped_total=1)
    for record in (RECORD, skipped):
        file.append(record)
    file.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert (lines[1]["loss"], lines[1]["grad_norm"], lines[1]["skipped"]) == ("nan", "inf", True)
    one, two = read_metrics(path)
    assert one == RECORD and math.isnan(two.loss) and two.grad_norm == math.inf
    MetricsFile(path, 2).close()
    assert len(read_metrics(path)) == 2

    other = tmp_path / "evaluation.jsonl"
    evaluations = MetricsFile(other, 0, EvaluationRecord)
    for step in (2, 4):
        evaluations.append(EvaluationRecord(step, 1.5 / step, 7, 0.1))
    evaluations.close()
    MetricsFile(other, 3, EvaluationRecord).close()
    assert read_metrics(other, EvaluationRecord) == [EvaluationRecord(2, 0.75, 7, 0.1)]


def events_of(folder: Path) -> list[list[Event]]:
    """By file, in the order of their names. A record is its length, a checksum, itself and another checksum."""
    files = []
    for path in sorted(folder.iterdir()):
        content, at, events = path.read_bytes(), 0, []
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            events.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += length + 16
        files.append(events)
    return files


def test_tensorboard_has_every_number_when_it_was_added(tmp_path: Path) -> None:
    events = EventFiles(tmp_path, 0)
    events.add(RECORD)
    events.add(EvaluationRecord(1, 1.5, 7, 0.1))
    (found,) = events_of(tmp_path)  # before it is closed
    assert found[0].file_version.startswith("brain.Event")
    scalars = {value.tag: value.simple_value for event in found for value in event.summary.value}
    assert {event.step for event in found if event.summary.value} == {1}
    numbers = {f"step/{name}": value for name, value in dataclasses.asdict(RECORD).items() if value is not None}
    numbers |= {"evaluation/eval_loss": 1.5, "evaluation/eval_targets": 7, "evaluation/eval_seconds": 0.1}
    del numbers["step/step"]
    assert scalars == {name: pytest.approx(float(value)) for name, value in numbers.items()}
    events.close()
    (tmp_path / "later").mkdir()
    EventFiles(tmp_path / "later", 20).close()  # a start that goes on: what was said of step 21 and on is taken back
    (start,) = (event for event in events_of(tmp_path / "later")[0] if event.HasField("session_log"))
    assert (start.session_log.status, start.step) == (start.session_log.START, 21)


def test_a_profile_is_of_the_chosen_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    trace, step = jax.profiler.start_trace, 0
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: (begun.append(step), trace(folder)))
    with StepProfile(tmp_path / "profile", (2, 3)) as profile:
        written = []
        for step in range(1, 6):
            profile.before(step)
            jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(3)))
            if profile.after(step):
                written.append(step)
    assert begun == [2] and written == [3]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    with StepProfile(tmp_path / "broken", (1, 9)) as profile:
        profile.before(1)
    assert list((tmp_path / "broken").rglob("*.xplane.pb")), "what was traced until the run broke off"
    with StepProfile(tmp_path / "none", None) as profile:
        profile.before(1)
        assert not profile.after(1)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match=r"profile_steps \(3, 2\) must be two steps"):
        MetricsConfig(profile_steps=(3, 2))
