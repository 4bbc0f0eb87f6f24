"""Every case of `cases/attention_cases.json`, on one device through `reference_attention` and on a mesh through
`libra_attention`. The file's `conventions` say what its fields mean; most cases are faults that other projects had."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from libra_kernels import reference_attention
from operator_base import (
    Inputs,
    Result,
    assert_close,
    assert_padding_zero,
    make_mesh,
    make_plans,
    random_inputs,
    run,
    same_bits,
)

import libra_jax
from libra_jax.spec import PoolSpec

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases/attention_cases.json").read_text())["hand"]}
RUN = ("match", "match_or_refuse")


def case_ids(level: str, refused: bool = False) -> list[str]:
    return [
        name
        for name, case in CASES.items()
        if level in case["levels"] and (case["must_hold"]["expect"] == "refuse") == refused
    ]


def spec_of(case: dict, **changes) -> PoolSpec:
    fields = {
        "seq_len": case["seq_len"],
        "pool_size": case["pool"],
        "cp": case["cp"],
        "num_heads": case["heads"],
        "num_kv_heads": case["kv_heads"],
        "head_dim": case["head_dim"],
        "v_head_dim": case.get("v_dim"),
        "block": case["block"],
        "window": case["window"],
        "dtype": case["dtype"],
    }
    return PoolSpec(**fields | changes)


def segment_ids_of(case: dict) -> np.ndarray:
    if case.get("segment_ids") is not None:
        return np.array(case["segment_ids"], np.int32)
    return oracle.segments(case["doc_lengths"], case["seq_len"])


def inputs_of(case: dict) -> Inputs:
    """Random numbers seeded by the case's name, or those that `values` asks for; padding as `pad_fill` says."""
    rng = np.random.default_rng(zlib.crc32(case["id"].encode()))
    inputs = random_inputs(rng, case["dp"], spec_of(case))
    values = case.get("values", {"kind": "normal"})
    if values["kind"] == "integers":
        whole = (rng.integers(values["low"], values["high"] + 1, x.shape).astype(x.dtype) for x in inputs[:2])
        q, k = whole
        inputs = inputs._replace(q=q * np.float32(values["q_times"]), k=k)
    elif values["kind"] == "constant":
        inputs = inputs._replace(q=np.full_like(inputs.q, values["q"]), k=np.full_like(inputs.k, values["k"]))
    else:
        assert values["kind"] == "normal", values
    padding = segment_ids_of(case) == 0
    for letter, fill in case.get("pad_fill", {}).items():
        getattr(inputs, {"g": "cotangent"}.get(letter, letter))[padding] = float(fill)
    return inputs


def truth_of(case: dict, inputs: Inputs) -> Result:
    ids = segment_ids_of(case)
    ids = np.where(ids > 0, ids, 0)
    truth = oracle.attention(*inputs[:3], ids, inputs.cotangent, window=case["window"], scale=case.get("scale"))
    return Result(truth.out, truth.dq, truth.dk, truth.dv)


def with_other_windows(case: dict) -> list[dict]:
    return [case | {"window": window} for window in (case["window"], *case.get("also_windows", []))]


def run_kernel(case: dict, inputs: Inputs, positions: np.ndarray | None = None) -> Result:
    ids = segment_ids_of(case)

    @jax.jit
    def both(q, k, v, cotangent):
        out, pull = jax.vjp(
            lambda q, k, v: reference_attention(q, k, v, ids, positions, case["window"], case.get("scale")), q, k, v
        )
        return out, *pull(cotangent)

    return Result(*(np.asarray(x) for x in both(*inputs)))


def run_operator(case: dict, inputs: Inputs, speed: list[float] | None = None) -> Result:
    spec, mesh = spec_of(case), make_mesh(case["dp"] // case["pool"], case["pool"], case["cp"])
    plans = make_plans(case["doc_lengths"], spec, speed=speed)
    options = {"scale": case["scale"]} if "scale" in case else {}
    return run(inputs, plans, spec, mesh, **options)


def check_probe(case: dict, inputs: Inputs, before: Result, runner) -> None:
    """Changes one document: no bit of another row's output may move, and no value of its gradients."""
    ids = segment_ids_of(case)
    probe = case["probe"]
    mine = np.zeros(ids.shape, bool)
    mine[probe["sequence"]] = ids[probe["sequence"]] == probe["document"] + 1
    changed = Inputs(*(x.copy() for x in inputs))
    for array in changed:
        array[mine] = -3 * array[mine] + 1
    after = runner(case, changed)
    assert same_bits(after.out[~mine], before.out[~mine]) and not same_bits(after.out[mine], before.out[mine])
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(after, name)[~mine], getattr(before, name)[~mine]), name


@pytest.mark.parametrize("name", case_ids("kernel"))
def test_kernel(name):
    for case in with_other_windows(CASES[name]):
        inputs = inputs_of(case)
        ids = segment_ids_of(case)
        if (ids < 0).any():  # ids that are neither documents nor padding: no gradient flows in from there
            inputs.cotangent[ids < 0] = 0
        result, want = run_kernel(case, inputs), truth_of(case, inputs)
        assert all(np.isfinite(array).all() for array in result)
        real = ids > 0
        assert_close(Result(*(x[real] for x in result)), Result(*(x[real] for x in want)), inputs=inputs)
        for array in result:
            assert not np.any(array[ids == 0] != 0)
        for field in ("dq", "dk", "dv"):
            assert not np.any(getattr(result, field)[ids < 0] != 0)
        for _ in range(case.get("repeat", 1) - 1):
            assert all(same_bits(a, b) for a, b in zip(result, run_kernel(case, inputs), strict=True))
        if "probe" in case:
            check_probe(case, inputs, result, run_kernel)
        for kind in case.get("positions", []):
            restart = oracle.restarting_positions(ids)
            through = np.broadcast_to(np.arange(case["seq_len"], dtype=np.int32), ids.shape)
            positions = np.where(ids > 0, {"restart": restart, "global": through}[kind], 10**6).astype(np.int32)
            assert all(same_bits(a, b) for a, b in zip(result, run_kernel(case, inputs, positions), strict=True))
    if "also_windows" in CASES[name]:
        whole, none = (CASES[name] | {"window": w} for w in (CASES[name]["seq_len"], None))
        assert same_bits(run_kernel(whole, inputs).out, run_kernel(none, inputs).out)


@pytest.mark.parametrize("name", case_ids("operator"))
def test_operator(name):
    for case in with_other_windows(CASES[name]):
        inputs = inputs_of(case)
        result = run_operator(case, inputs)
        assert_close(result, truth_of(case, inputs), inputs=inputs)
        assert_padding_zero(result, case["doc_lengths"], case["seq_len"])
        for _ in range(case.get("repeat", 1) - 1):
            assert all(same_bits(a, b) for a, b in zip(result, run_operator(case, inputs), strict=True))
        if "probe" in case:
            check_probe(case, inputs, result, run_operator)
        for change in case.get("variants", []):
            speed = change.get("speed")
            other = run_operator(case | {k: v for k, v in change.items() if k != "speed"}, inputs, speed)
            assert same_bits(other.out, result.out) and same_bits(other.dq, result.dq), change
            assert_close(other, truth_of(case, inputs))


def test_every_case_runs_at_every_level_it_names():
    levels = [(name, level) for name, case in CASES.items() for level in case["levels"]]
    tested = {(n, level) for level in ("kernel", "operator") for refused in (0, 1) for n in case_ids(level, refused)}
    assert set(levels) == tested and len(CASES) == 25
    assert case_ids("operator", refused=True) == ["A07", "A25"] and case_ids("kernel", refused=True) == []


def assert_names(message: str, names: list[str]) -> None:
    for name in names:
        assert re.search(name, message), f"{name!r} is missing from: {message}"


def test_refuses_documents_of_length_zero():
    case = CASES["A07"]
    with pytest.raises(ValueError) as refusal:
        libra_jax.plan_pool(case["doc_lengths"], spec_of(case))
    assert_names(str(refusal.value), [*case["names"], "sequence 0", "entry 0"])


@pytest.mark.parametrize("bad", CASES["A25"]["bad"], ids=lambda bad: bad["what"])
def test_refuses_bad_input(bad):
    case = CASES["A25"]
    spec = spec_of(case, **bad.get("spec", {}))
    mesh = make_mesh(*bad.get("mesh", (1, spec.pool_size, spec.cp)))
    with pytest.raises((ValueError, TypeError)) as refusal:
        plans = libra_jax.stack_plans([libra_jax.plan_pool(bad["lengths"], spec)])
        inputs = random_inputs(np.random.default_rng(0), spec.pool_size, spec)
        libra_jax.libra_attention(*inputs[:3], plans, spec=spec, mesh=mesh)
    assert_names(str(refusal.value), bad["names"])
