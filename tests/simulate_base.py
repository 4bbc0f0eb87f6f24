"""What tests of the cluster model share: a tiny model and cluster whose seconds are round numbers.

A page takes 1 ms forward and 2 ms backward, a token's products of a layer 1 ms and 2.8 ms, its share of the head 1 ms.
"""

import numpy as np

from libra_jax import CostModel
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.policies.base import RunShape
from libra_jax.simulate.attention import Network
from libra_jax.simulate.constants import changed, constants, links
from libra_jax.simulate.step import Setting

WIRES = {"inside": 5120.0, "across": 512.0, "inside_latency": 0.01, "across_latency": 0.02, "ranks_per_node": 8}
FREE_WIRES = {"inside": 1e30, "across": 1e30, "inside_latency": 0.0, "across_latency": 0.0}

# Weights of a layer that a token is multiplied with: attention 8 * 8 * 2 * (1 + 1) = 256, MLP 3 * 8 * 16 = 384, in all
# 640; 128 of them are in the last product of the MLP, which is not done again. Forward 2 * 640 = 1280 FLOPs, backward
# 2 * (2 * 640 + 512) = 3584. The head: 8 * 8 * 20 = 1280, its second forward pass included. At 1.28e6 FLOP/s:
MODEL = Qwen3Config(
    vocab_size=20, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=8
)
PRODUCTS = 1.28e6
THERE, BACK, HEAD = 1e-3, 2.8e-3, 1e-3

COST = CostModel(
    page_seconds=1e-3,
    block_seconds=1e-4,
    launch_seconds=1e-2,
    backward_page_seconds=2e-3,
    backward_block_seconds=3e-4,
    backward_launch_seconds=2e-2,
    block=4,
    group=1,
    head_dim=8,
    v_head_dim=8,
)
# Blocks of one token: pages are pairs, so that tiles have no padding.
EXACT = CostModel(1e-3, 0.0, 0.0, 2e-3, 0.0, 0.0, block=1, group=1, head_dim=8, v_head_dim=8)


def setting_of(
    seq_len=32, dp=1, cp=2, micro_steps=1, *, cost=COST, wires=WIRES, model=MODEL, pp=1, sync="layer", strided=False,
    gather_free=False, **values,
) -> Setting:  # fmt: skip
    """gather_free: FSDP takes no time. values: other constants."""
    table = changed(constants("H100"), {"products": PRODUCTS, "peak": 1e7, **wires, **values})
    wired = links(table)
    if gather_free:
        table = changed(table, FREE_WIRES)
    run = RunShape(
        seq_len, dp, cp, micro_steps, model.num_heads, model.num_kv_heads, model.head_dim, block=cost.block, cost=cost,
        links=wired, token_seconds=THERE + BACK,
    )  # fmt: skip
    network = Network(wired, int(table["pod_nodes"].value), table["oversubscription"].value, strided)
    return Setting(model, run, table, cost, network, pp, sync)


def exact_setting(seq_len=32, dp=1, cp=1, micro_steps=1, **other) -> Setting:
    """Nothing is lost to tiles, launches, wires and gathers."""
    return setting_of(seq_len, dp, cp, micro_steps, **{"cost": EXACT, "wires": FREE_WIRES, **other})


def random_step(setting: Setting, rng: np.random.Generator, full=False) -> list[list[int]]:
    """Documents from 1 token to a sequence, about as many short ones as long ones."""
    sequences = []
    for _ in range(setting.run.sequences):
        left, documents = setting.run.seq_len, []
        while left:
            length = min(left, int(np.exp(rng.uniform(0, np.log(setting.run.seq_len + 1)))))
            documents.append(length)
            left -= length
        sequences.append(documents if full else documents[: max(len(documents) - int(rng.integers(0, 2)), 1)])
    return sequences


def only(losses: dict[str, float], name: str, wanted: float) -> None:
    """Asserts that a step loses so much to this and nothing to anything else."""
    for each, seconds in losses.items():
        np.testing.assert_allclose(seconds, wanted if each == name else 0.0, rtol=1e-9, atol=1e-12, err_msg=each)
