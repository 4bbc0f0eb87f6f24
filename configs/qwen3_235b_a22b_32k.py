"""Qwen3-235B-A22B on sequences of 32,768 tokens: 256 GPUs, 32 pools of 4 sequences, 2 ranks to a sequence.

`libra preflight qwen3_235b_a22b_32k --target h100 --topology 1x32x8` says what it asks of them. The shapes are the
published ones; where the text lies is for you to say: `--data.paths FOLDER`.
`libra import WEIGHTS --config qwen3_235b_a22b_32k` starts from published weights.

A pool is one node, so attention exchanges over NVLink alone. Rotary positions are the model's own: base 1e6, made for
32,768 tokens. The later -2507 weights have base 5e6 and know 262,144 tokens without YaRN: with them
`--model.rope-theta 5e6`.
"""

import dataclasses

from libra_jax.data import DataConfig
from libra_jax.models.moe import MoEConfig
from libra_jax.models.qwen3 import QWEN3_235B_A22B
from libra_jax.train.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        # Experts are spread: a pool is a node, so tokens reach them over NVLink, and a rank has 16 of a layer's 128
        # in use, not 4.8 GB of them.
        model=dataclasses.replace(
            QWEN3_235B_A22B,
            moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=1536, experts="spread"),
        ),
        data=DataConfig(paths=("corpus",)),
        mesh=MeshConfig(pools=32, pool_size=4, cp=2),
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=50),
        checkpoint=CheckpointConfig(every=100),
        seq_len=32_768,
        steps=1000,
        run_dir="runs/qwen3_235b_a22b_32k",
    )
