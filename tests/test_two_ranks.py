"""The benchmark of two ranks: what it predicts, by hand, and that its plans fit the room it gives them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.two_ranks import Options, predict
from libra_jax.plan import plan_pool
from libra_jax.spec import PoolSpec
from libra_jax.workload import CostModel


def test_the_prediction_is_the_busier_ranks_time_with_the_exchange_and_what_is_not_attention() -> None:
    cost = CostModel(
        page_seconds=1.0, block_seconds=0.5, launch_seconds=2.0,
        backward_page_seconds=3.0, backward_block_seconds=0.0, backward_launch_seconds=1.0,
    )  # fmt: skip
    found: dict[str, Any] = {
        "cost_model": dataclasses.asdict(cost),
        "wire_seconds": {"per_byte": 0.01, "per_exchange": 1.5},
        "rest_seconds": {"64": {"step": 100.0, "pages": [4, 4], "blocks": [4, 4]}},
    }
    row: dict[str, Any] = {
        "tokens": 64, "pass": "forward", "work": {"plain": [40, 4], "pooled": [20, 24]},
        "blocks": {"plain": [8, 4], "pooled": [4, 8]}, "moved_bytes": {"forward": 100, "backward": 300}, "exchanges": 2,
    }  # fmt: skip
    forward = 40 + 4 + 2, 24 + 4 + 2
    backward = 120 + 1, 72 + 1
    assert predict(row, found) == pytest.approx(forward[0] / (forward[1] + 1 + 3))
    both = forward[0] + backward[0], forward[1] + backward[1] + 4 + 6
    assert predict(row | {"pass": "both"}, found) == pytest.approx(both[0] / both[1])
    rest = 100 - (4 + 2 + 2) - (12 + 1)
    assert predict(row | {"pass": "step"}, found) == pytest.approx((rest + both[0]) / (rest + both[1]))


def test_every_plan_fits_the_room_and_is_nearly_balanced() -> None:
    options = Options()
    assert len(options.tokens) == len(options.rounds) == len(options.skews) == len(options.steps)
    for tokens in options.tokens:
        spec = PoolSpec(
            seq_len=tokens, pool_size=2, cp=1, num_heads=options.num_heads, num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim, block=options.block, waves=options.waves, capacity=options.capacity,
        )  # fmt: skip
        for short in options.documents:
            short = short or tokens // 2
            stats = plan_pool([[tokens], [short] * (tokens // short)], spec).stats
            assert stats.fallback is None and stats.imbalance < 1.05, (tokens, short, stats)
