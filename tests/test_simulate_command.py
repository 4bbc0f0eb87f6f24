"""`libra simulate`: tables, JSON and picture of small runs, what it says, and what it refuses."""

import contextlib
import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from libra_jax import CostModel
from libra_jax.cli import main
from libra_jax.policies import names
from libra_jax.simulate.advice import (
    ALTERNATIVES,
)
from libra_jax.simulate.command import WARM_UP, setting_of
from libra_jax.simulate.command import SimulateOptions as Options
from libra_jax.simulate.constants import GPUS, changed, constants
from libra_jax.simulate.step import LOSSES
from libra_jax.simulate.study import sample_steps

SMALL = ("--seq-len", "8192", "--cp", "2", "--dp", "4", "--pool", "2", "--micro-steps", "2", "--steps", "2",
         "--model", "qwen3-0.6b")  # fmt: skip


def simulate(*args):
    return main(["simulate", *SMALL, *args])


@pytest.fixture
def lengths_file(tmp_path):
    def write(lengths):
        path = tmp_path / "lengths.json"
        path.write_text(json.dumps(lengths))
        return str(path)

    return write


# -------------------------------------------------------------------------------------------------------------- output


def test_tables(capsys):
    policies = ["ulysses", "per-document", "wlb-batch-delay-shuffled", "distca-ranks", "libra"]
    assert simulate("--quick", "--policies", *policies) == 0
    out, err = capsys.readouterr()
    for name in [*policies[:4], "libra:2", *ALTERNATIVES, *LOSSES, "tok/s/GPU", "MFU %", "across", "GiB"]:
        assert name in out, name
    assert "Means over steps" in out and "percentile" not in out
    assert "8 H100: 2 micro-steps of 4 sequences" in out
    assert "a pool of 2: 4 GPUs on 1 node" in out
    assert "a model, no measurement" in out and "Triton's published forward speed" in out
    assert "wlb-batch-delay-shuffled changes what steps train on: of" in out
    assert "2 steps: percentiles of fewer than 20 are not shown" in err
    # Shares of the time add up, to what is printed of them.
    rows = [line.split() for line in out.partition("Where the time goes")[2].splitlines()]
    rows = [row for row in rows if len(row) == 2 + len(LOSSES) and row[0] in (*policies, *ALTERNATIVES, "libra:2")]
    assert len(rows) == 7
    for _, *shares in rows:
        assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What --json prints of a small run with all advice, and the picture."""
    picture = tmp_path_factory.mktemp("picture") / "steps.png"
    out = io.StringIO()
    policies = ["ulysses", "zigzag", "magi", "dynamic-cp", "wlb-micro-shuffled", "libra", "libra-paper:4"]
    with contextlib.redirect_stdout(out):
        assert simulate("--json", "--plot", str(picture), "--set", "across=40e9", "--policies", *policies) == 0
    return json.loads(out.getvalue()), picture


def test_json_says_where_each_constant_is_from(found):
    content, _ = found
    for constant in content["constants"]:
        assert set(constant) == {"name", "value", "unit", "source"}
        assert constant["source"] and constant["unit"] and math.isfinite(constant["value"])
    by_name = {constant["name"]: constant for constant in content["constants"]}
    assert by_name.keys() == constants("H100").keys()
    assert (by_name["across"]["value"], by_name["across"]["source"]) == (40e9, "set by the user")
    assert "Triton" in content["kernel"]["source"]
    assert content["kernel"]["page_seconds"] == CostModel().page_seconds
    assert content["options"]["seq_len"] == 8192 and content["gpus"] == 8


def test_json_has_mean_and_percentiles_of_every_number(found):
    content, _ = found
    assert [each["policy"] for each in content["policies"]][-2:] == ["libra:2", "libra-paper:4"]
    wanted = {
        *("step", "ideal", "tokens per gpu second", "mfu", "efficiency", "memory", "micro_steps", "fill", "heaviest"),
        *("pool_imbalance", "rank_imbalance", "micro_step_imbalance", "planning"),
        *("busiest_bytes", "ulysses_bytes", "across_bytes"),
        *(f"lost to {name}" for name in LOSSES),
    }
    for each in content["policies"]:
        assert wanted <= each["numbers"].keys()
        for name, (mean, low, high) in each["numbers"].items():
            assert all(math.isfinite(value) for value in (mean, low, high)), name
            assert low <= high and low - 1e-9 <= mean <= high + 1e-9 * abs(high), name  # of two steps
        assert 0 < each["efficiency"] <= 1
        assert sum(each["losses"].values()) + each["efficiency"] == pytest.approx(1)
        assert 0 < each["numbers"]["mfu"][2] <= 1
        kept = names.known(each["policy"]).keeps
        assert (each["changed"]["left_out"] == each["changed"]["from_others"] == 0) or not kept


def test_json_has_advice(found):
    content, _ = found
    assert content["verdict"]["best_other"] in ("ulysses", "zigzag", "magi", "dynamic-cp")
    assert content["verdict"]["pays"] == (content["verdict"]["gain"] >= 1.02)
    best = content["recommendation"]["best"]
    tried = content["recommendation"]["tried"]
    assert (tried[0]["pool_size"], tried[0]["cp"], tried[0]["dp"]) == (2, 2, 4)
    assert best["efficiency"] >= max(each["efficiency"] for each in tried if each["efficiency"]) * 0.98
    assert best["pool_size"] <= best["dp"] and best["dp"] * best["cp"] == 8
    points = content["break_even"]["points"]
    assert [point["longest"] for point in points] == [8192 // 2**i for i in range(7)]
    heaviest = [point["heaviest"] for point in points]
    assert heaviest[0] > heaviest[-1] >= 1


def test_a_picture_is_drawn(found):
    _, picture = found
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 10_000


def test_what_is_said_of_the_corpus_is_of_its_sequences_as_packed(lengths_file, capsys):
    """Whichever policy comes first: here one that packs documents anew, and one that has more micro-steps: a rank
    holds two documents of 1,500 tokens, 8 ranks hold the up to 40 of a step in 3 rounds."""
    path, lines = lengths_file([1500] * 600), []
    for policy in ("ulysses", "wlb-batch-sorted", "dynamic-cp"):
        assert simulate("--quick", "--lengths", path, "--policies", policy) == 0
        lines += [line for line in capsys.readouterr().out.splitlines() if line.startswith("sequences as packed")]
    assert lines == [lines[0], lines[0], f"{lines[0]}, dynamic-cp 3"]
    assert lines[0].startswith("sequences as packed: the heaviest over the mean 1.0 (1.0 to 1.")
    assert lines[0].endswith("%; micro-steps 2")


def test_equal_documents_do_not_pay(lengths_file, capsys):
    path = lengths_file([128] * 4000)
    assert simulate("--lengths", path, "--policies", "ulysses", "libra", "--kernel", "fa3") == 0
    out = capsys.readouterr().out
    assert "Libra does not pay here: with equal kernels steps of libra:2 are" in out
    assert "Libra gains less than 2% even with" in out
    assert "FlashAttention-3 (arXiv 2407.08608)" in out


def test_one_long_document_among_short_ones_pays(lengths_file, capsys):
    path = lengths_file(([32768] + [256] * 896) * 5)
    wide = ("--seq-len", "32768", "--pool", "4", "--quick", "--kernel", "fa3")
    assert simulate("--lengths", path, "--policies", "ulysses", "libra", "distca-ranks", *wide) == 0
    out = capsys.readouterr().out
    assert "Libra pays here, with equal kernels: steps of libra:4 are" in out
    assert "a pool of 4: 8 GPUs on 1 node" in out


def test_documents_cut_short_make_the_verdict_another(capsys):
    assert simulate("--quick", "--longest", "128", "--policies", "ulysses", "libra") == 0
    assert "Libra does not pay here" in capsys.readouterr().out


def test_a_corpus_that_is_too_small_comes_again(lengths_file, capsys):
    assert simulate("--quick", "--lengths", lengths_file([512] * 100), "--policies", "ulysses") == 0
    out, err = capsys.readouterr()
    assert "too few tokens for 2 steps and the 12 that fill delay queues: its documents come" in err
    assert "no verdict: it is about libra" in err
    assert "Libra" not in out  # no verdict without it


def test_a_measured_kernel_is_named(tmp_path, capsys):
    path = tmp_path / "cost.json"
    CostModel(page_seconds=1e-9).save(path)
    assert simulate("--quick", "--json", "--kernel", str(path), "--policies", "ulysses") == 0
    kernel = json.loads(capsys.readouterr().out)["kernel"]
    assert kernel["source"] == f"measured: {path}" and kernel["page_seconds"] == 1e-9


def test_steps_that_do_not_fit_are_named(capsys):
    assert simulate("--quick", "--policies", "ulysses", "--set", "memory=1") == 0
    assert "do not fit in the 1 GiB of a GPU: ulysses (" in capsys.readouterr().out


def test_a_pool_that_is_named_is_the_one_that_is_shown(capsys):
    assert simulate("--quick", "--policies", "ulysses", "libra:4", "--mapping", "strided") == 0
    assert "a pool of 4: 8 GPUs on 2 nodes, a sequence's ranks on different nodes" in capsys.readouterr().out


def test_policies_are_listed(capsys):
    assert simulate("--list-policies") == 0
    out = capsys.readouterr().out
    for name in [*names.POLICIES, *names.SIZED]:
        assert name in out


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policies", "ulyses"], ["no policy is called 'ulyses'", "Was ulysses meant?"]),
        (["--policies", "libra:0"], ["policy 'libra:0': the pool size (0) must be at least 1"]),
        (["--policies", "libra", "--pool", "3"], ["pool (3) must divide dp (4)"]),
        (["--policies", "libra:3"], ["libra:3: pool_size (3) must divide dp (4)"]),
        (["--pp", "3"], ["pp (3) must divide the model's layers (28)"]),
        (["--set", "across"], ["--set across: must be NAME=VALUE"]),
        (["--set", "across=fast"], ["--set across=fast: must be NAME=VALUE with a number"]),
        (["--set", "acros=1"], ["--set acros: no constant is called that", "across"]),
        (["--set", "across=0"], ["--set across=0: must be a finite number above 0"]),
        (["--set", "across=nan"], ["--set across=nan: must be a finite number above 0"]),
        (["--set", "recompute=2"], ["--set recompute=2: must be 0 or 1"]),
        (["--set", "ranks_per_node=1.5"], ["--set ranks_per_node=1.5: must be a whole number of GPUs"]),
        (["--kernel", "no/such/cost.json"], ["no/such/cost.json"]),
        (["--seq-len", "8000"], ["seq_len (8000) must be a multiple of cp * block (2 * 128 = 256)"]),
        (["--lengths", "no/such/corpus"], ["no/such/corpus: no such file or folder", "lognormal-644-71k"]),
        (["--longest", "0"], ["longest (0) must be at least 1"]),
        (["--steps", "0"], ["steps (0) must be at least 1"]),
        (["--micro-steps", "0"], ["micro_steps (0) must be at least 1"]),
        (["--cp", "0"], ["cp (0) must be at least 1"]),
        (["--policies", "dynamic-cp", "--sync", "step"], ['sync="step"', "must have the same groups"]),
        (["--policies", "dynamic-cp", "--pp", "2"], ["dynamic-cp: pp (2)", "must have the same groups"]),
        (["--policies"], ["policies must name one at least"]),
        (["--pool", "0"], ["pool (0) must be at least 1"]),
        (["--seed", "-1"], ["seed (-1) must be at least 0"]),
        (["--lengths", ""], ["lengths must name a file, a folder, or one of"]),
        (["--kernel", "FA3"], ["kernel ('FA3') must be one of triton, fa3, cudnn or a file"]),
        (["--set", "products=1e30"], ["products (1e+30) must be at most peak"]),
        (["--set", "oversubscription=0.5"], ["oversubscription=0.5: must be at least 1"]),
        (["--set", "recompute=0.5"], ["recompute=0.5: must be 0 or 1"]),
        (["--set", "inside_latency=-1"], ["inside_latency=-1: must be a finite number of 0 or more"]),
        (["--plot", "no/such/folder/x.png"], ["plot (no/such/folder/x.png) must be a .png file in a folder"]),
        (["--plot", "step.txt"], ["plot (step.txt) must be a .png file"]),
    ],
)
def test_what_is_refused_says_the_rule_and_the_numbers(args, words, capsys):
    assert simulate("--quick", *args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("libra: ")
    for word in words:
        assert word in err


@pytest.mark.parametrize("option", ["--gpus", "--model", "--sync", "--mapping"])
def test_choices_that_there_are_not(option, capsys):
    with pytest.raises(SystemExit) as refused:
        simulate(option, "H20")
    assert refused.value.code == 2
    out, err = capsys.readouterr()
    assert "H20" in out + err and option in out + err


def test_a_cost_model_that_is_none(tmp_path, capsys):
    path = tmp_path / "cost.json"
    path.write_text("{}")
    assert simulate("--quick", "--kernel", str(path)) == 2
    assert f"cost model {path}: missing" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- its own parts


@pytest.mark.parametrize("gpu", GPUS)
def test_every_constant_has_a_unit_and_a_source(gpu):
    table = constants(gpu)
    for name, constant in table.items():
        assert constant.name == name and constant.unit and len(constant.source) > 10
        assert math.isfinite(constant.value)
    assert table["products"].value < table["peak"].value


def test_changes_are_marked_and_leave_the_table_alone():
    table = constants("H100")
    new = changed(table, {"across_latency": 0, "pod_nodes": 2})
    assert (new["across_latency"].value, new["pod_nodes"].value) == (0, 2)
    assert new["pod_nodes"].source == "set by the user" and table["pod_nodes"].value == 32
    assert new["peak"] is table["peak"]
    with pytest.raises(ValueError, match=r"gpus \('H20'\) must be one of H100, H200, B200"):
        constants("H20")


def test_sampled_steps_hold_documents_once_and_need_enough_of_them():
    run = setting_of(Options(seq_len=8192, cp=2, dp=4, micro_steps=2, pool=4))[0].run
    lengths = [1000 + i for i in range(160)]
    steps = sample_steps(np.array(lengths), run, 2)
    held = [length for step in steps for sequence in step for length in sequence]
    assert len(steps) == 2 and all(len(step) == 8 for step in steps)
    assert len(set(held)) == len(held) and set(held) <= set(lengths)
    assert sample_steps(np.array(lengths), run, 2) == steps != sample_steps(np.array(lengths), run, 2, seed=1)
    with pytest.raises(ValueError, match="3 steps of 8 sequences of 8,192 tokens need 196,608 tokens and 1% more"):
        sample_steps(np.array(lengths), run, 3)
    assert WARM_UP > 0


def test_where_nothing_pays_the_recommendation_says_so(lengths_file, capsys):
    path = lengths_file([128] * 4000)
    assert simulate("--lengths", path, "--policies", "libra:2", "libra:4", "--kernel", "fa3") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Even so Libra does not pay: its steps are" in out and "the best without pools on as many GPUs" in out


def test_constants_may_be_set_one_after_the_other(capsys):
    assert simulate("--constants", "--set", "pod_nodes=16", "--set", "oversubscription=4") == 0
    assert capsys.readouterr().out.count("set by the user") == 2


def test_the_verdict_is_about_the_fastest_pools(lengths_file, capsys):
    path = lengths_file(([8192] + [64] * 900) * 6)
    assert simulate("--quick", "--json", "--lengths", path, "--policies", "libra:1", "libra:4") == 0
    content = json.loads(capsys.readouterr().out)
    by_name = {each["policy"]: each["efficiency"] for each in content["policies"]}
    assert by_name["libra:4"] > by_name["libra:1"]
    assert "steps of libra:4 are" in content["verdict"]["sentence"]
    own = content["verdict"]["with_own_kernels"]
    assert own["pays"] == (own["gain"] >= 1.02)


def test_what_does_not_fit_does_not_pay(lengths_file, capsys):
    path = lengths_file(([32768] + [256] * 896) * 5)
    wide = ("--seq-len", "32768", "--pool", "4", "--quick", "--kernel", "fa3", "--set", "memory=1")
    assert simulate("--lengths", path, "--policies", "libra", *wide) == 0
    assert "Libra does not pay here: its fullest rank needs" in capsys.readouterr().out


def test_constants_alone(capsys):
    assert simulate("--constants", "--set", "across=4e10") == 0
    out = capsys.readouterr().out
    for constant in constants("H100").values():
        assert constant.name in out
    assert "set by the user" in out and "Means over steps" not in out


def test_an_empty_file_of_lengths_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "empty.npy").touch()
    assert simulate("--lengths", str(tmp_path / "empty.npy")) == 2
    assert "empty.npy: " in capsys.readouterr().err


def test_one_rank_a_sequence_has_no_ulysses_to_compare_bytes_with(capsys):
    assert simulate("--quick", "--cp", "1", "--policies", "libra") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("libra:2"))
    assert line.split()[7:9] == ["-", "-"]


# ------------------------------------------------------------------------------------------------- what once broke it


def test_a_policy_that_holds_everything_back_is_named(lengths_file, capsys):
    """Of two kinds of documents the long ones wait, and a step of so few sequences may be long ones alone."""
    path = lengths_file([5000, 8192] * 400)
    few = ("--dp", "2", "--micro-steps", "1", "--steps", "1", "--seed", "22", "--quick", "--json", "--lengths", path)
    assert simulate(*few, "--policies", "libra", "wlb-micro-delay-shuffled") == 0
    content = json.loads(capsys.readouterr().out)
    delayed = next(each for each in content["policies"] if each["policy"].startswith("wlb"))
    assert delayed["efficiency"] == 0
    assert "wlb-micro-delay-shuffled holds back all documents" in content["verdict"]["sentence"]


@pytest.mark.parametrize("change", ["inside_latency=1e308", "state_bytes=1e308", "gather_bytes=1e308"])
def test_what_is_not_finite_is_no_result(change, capsys):
    assert simulate("--quick", "--json", "--policies", "ulysses", "libra", "--set", change) == 2
    out, err = capsys.readouterr()
    assert out == "" and "is no result: a constant or a kernel's price is too large" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "lists in lists without end"),
        ('{"probability": [0, 1], "length_tokens": [5, 1e30]}', "length_tokens ends at 1e+30"),
    ],
)
def test_lengths_that_are_none(tmp_path, capsys, content, words):
    path = tmp_path / "lengths.json"
    path.write_text(content)
    assert simulate("--quick", "--lengths", str(path)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--steps", "1" + "0" * 25], "are sampled"),
        (["--longest", "1"], "cut to 1 tokens these documents are"),
        (["--bytes-per-token", "inf"], "bytes_per_token (inf) must be finite"),
    ],
)
def test_too_much_is_refused_before_it_is_tried(args, words, capsys):
    assert simulate("--quick", "--policies", "ulysses", *args) == 2
    assert words in capsys.readouterr().err


def test_a_picture_that_cannot_be_is_refused_at_once(tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    assert simulate("--quick", "--policies", "ulysses", "--plot", str(tmp_path / "folder.png")) == 2
    assert "must be a .png file in a folder" in capsys.readouterr().err


def test_closed_streams(tmp_path):
    """Without standard output there is no result to be had; what is said of it never ends in the output."""
    command = [sys.executable, "-m", "libra_jax.cli", "simulate", *SMALL, "--quick", "--json", "--policies", "ulysses"]
    for closing, status in ((">&-", 2), ("2>&-", 0)):
        done = subprocess.run(["sh", "-c", f'"$@" {closing}', "sh", *command], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        if status:
            assert "no standard output" in done.stderr
        else:
            assert json.loads(done.stdout)["gpus"] == 8
