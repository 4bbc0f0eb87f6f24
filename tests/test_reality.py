"""The cluster model held to published numbers: these have sources, residuals are what they say, none is missing."""

import csv
import math

import numpy as np
import pytest

from benchmarks.paper import reality, reality_kernels, reality_rows, reality_runs
from benchmarks.paper.published import PUBLISHED, value
from benchmarks.paper.reality_kernels import rate_of
from benchmarks.paper.reality_rows import Row
from libra_jax.policies import packed
from libra_jax.policies.base import RunShape
from libra_jax.policies.wlb import WLB
from libra_jax.simulate.constants import CURVES, constants, kernel
from libra_jax.workload import CostModel

QUICK = (
    reality_kernels.attention_rows,
    reality_kernels.kernel_rows,
    reality_kernels.nccl_rows,
    reality_runs.llama_rows,
    reality.two_rank_rows,
)  # those that need no corpus


def test_residual_is_modelled_over_published():
    assert Row("series", "what", 2.0, 2.5, "x", "source").residual == pytest.approx(0.25)
    assert Row("series", "what", 4.0, 3.0, "ms", "source").residual == pytest.approx(-0.25)


def test_summary_has_the_median_and_the_worst():
    rows = [Row("a", what, 1.0, modelled, "x", "s") for what, modelled in (("p", 1.1), ("q", 0.5), ("r", 1.2))]
    assert list(reality.summary([*rows, Row("b", "t", 1.0, 1.0, "x", "s")])) == [
        ("a", "3", "+10.0%", "-50.0% (q)"),
        ("b", "1", "+0.0%", "+0.0% (t)"),
    ]


def test_every_published_number_has_unit_and_source():
    for name, each in PUBLISHED.items():
        assert each.name == name
        assert each.unit in ("x", "share", "us", "GB/s", "TFLOP/s"), name
        assert len(each.source) > 20, name
        assert math.isfinite(each.value) and each.value > 0, name
    assert value("libra scaling libra 256K") == 13.66
    assert value("wlb imbalance original") == 1.44


def test_profiles_parse():
    attention = reality_rows.read_csv("attention-h100.csv")
    assert len(attention) == 11 * 4 * 4
    assert {int(row["cp"]) for row in attention} == {int(row["tp"]) for row in attention} == {1, 2, 4, 8}
    assert all(float(row["duration_per_doc"]) > 0 for row in attention)
    nccl = reality_rows.read_csv("nccl-one-node.csv")
    assert {row["op"] for row in nccl} == {"all_gather", "all_reduce", "reduce_scatter"}
    for row in nccl:  # bus bandwidth is what a rank receives in that time: sizes are of the whole buffer
        ranks, size, seconds = int(row["ngpu"]), int(row["size_bytes"]), float(row["t_us_out"]) * 1e-6
        shares = (2 if row["op"] == "all_reduce" else 1) * (ranks - 1) / ranks
        assert float(row["busbw_out_gbs"]) == pytest.approx(size * shares / seconds / 1e9, rel=0.01)


def test_triton_meets_the_points_it_is_fitted_to():
    for tokens in (2048, 4096, 8192, 16_384):
        modelled = rate_of(CostModel(), tokens, "forward", causal=True)
        assert modelled == pytest.approx(value(f"triton forward {tokens}"), rel=0.03)


@pytest.mark.parametrize("name", CURVES)
def test_kernels_meet_the_points_they_are_fitted_to(name):
    cost = kernel(name, constants("H100"))[0]
    for way, points in (("forward", CURVES[name].forward), ("backward", CURVES[name].backward)):
        for tokens, rate in points.items():
            assert rate_of(cost, tokens, way, causal=way == "forward") == pytest.approx(rate, rel=0.03)


def test_a_document_on_several_ranks():
    """By hand: 8 blocks of 128 on 2 ranks, chunks 0 and 3, 1 and 2: 18 pages each, and 4 blocks."""
    cost = CostModel()
    seconds = 18 * cost.page_seconds + 4 * cost.block_seconds
    assert reality_kernels.document_seconds(cost, 1024, 2, 1) == pytest.approx(seconds + cost.launch_seconds)
    assert reality_kernels.document_seconds(cost, 1024, 2, 8) == pytest.approx(8 * seconds + cost.launch_seconds)


def test_a_rank_of_a_tensor_parallel_group_has_its_share():
    whole, part = reality_rows.LLAMA3_8B, reality_runs.share_of_heads(reality_rows.LLAMA3_8B, 8)
    assert 8 * reality_runs.layer_products(part)[0] == reality_runs.layer_products(whole)[0]
    table = constants("H200")
    lowered = reality_runs.tensor_parallel(table, part, 8)["products"].value
    flops, received = 2 * reality_runs.layer_products(part)[0], 4 * 2 * 4096 * 7 / 8
    assert flops / lowered == pytest.approx(flops / table["products"].value + received / table["inside"].value)


def test_imbalance_and_idleness_by_hand():
    setting = reality_runs.wlb_setting()
    even = [[[131_072]] * 4] * 2
    assert reality_runs.imbalance(packed.Sharded("sequence"), even, setting, 1) == pytest.approx(1)
    skewed = [[[131_072], *[[1024] * 128] * 3]]
    assert 1.1 < reality_runs.imbalance(packed.Sharded("sequence"), skewed, setting, 0) < 4
    # Same bins, whatever the order: adaptive sharding is never slower than per sequence.
    gains = reality_runs.imbalance(reality_runs.Adaptive(), skewed, setting, 0)
    assert gains >= 1

    servers = reality_runs.distca_setting(2, 2**17, 2, 1, 2, True)
    assert reality_runs.idle_share(WLB(delay=False), [[[2**16], [2**16]]], servers) == pytest.approx(0)
    one = reality_runs.idle_share(WLB(delay=False), [[[2**17], []]], servers)
    assert one == pytest.approx(0.5, abs=0.01)  # the other one has nothing but a launch


@pytest.mark.parametrize("count", [1, 2, 3])
def test_thresholds_are_evenly_spread(count):
    assert np.allclose(np.diff([0, *reality_runs.queues(count), 1]), 1 / (count + 1))


@pytest.mark.parametrize("make", QUICK, ids=lambda make: make.__name__)
def test_rows_are_numbers_with_sources(make):
    rows = make()
    assert rows
    for row in rows:
        assert math.isfinite(row.modelled) and row.modelled > 0, row
        assert math.isfinite(row.published) and row.published > 0, row
        assert row.source and row.unit and row.series and row.what


def test_speed_up_over_the_best_split_on_a_small_cluster(monkeypatch):
    steps = [[[2**17], [1024] * 128, [2048] * 64, [4096] * 32]]
    monkeypatch.setattr(reality_runs, "steps_of", lambda name, run, count: steps)
    gain = reality_runs.distca_speed_up("any", 4, 2**17, 4, True)
    assert 1 < gain < 4


def test_report_and_csv_hold_every_row(monkeypatch, tmp_path):
    parts = [part for part in reality.PARTS if part.rows in QUICK]
    monkeypatch.setattr(reality, "all_rows", lambda: tuple((part, tuple(part.rows())) for part in parts))
    sums, text = "\n".join(reality.section()), "\n".join(reality.rows_text())
    for part in parts:
        assert f"| {part.title} |" in sums and f"## {part.title}" in text
    reality.rows_csv(tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(part.rows()) for part in parts)
    first = rows[0]
    assert float(first["residual"]) == pytest.approx(float(first["modelled"]) / float(first["published"]) - 1, abs=1e-6)


def test_run_shapes_are_the_published_ones():
    run = reality_runs.wlb_setting().run
    assert run == RunShape(
        131_072, 1, 2, 4, 4, 4, cost=run.cost, links=run.links, token_seconds=run.token_seconds
    )  # 32 heads over TP 8
    assert reality_runs.wlb_setting().gpus * 8 == 64
