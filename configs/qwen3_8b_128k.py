"""Qwen3-8B on sequences of 131,072 tokens: 64 GPUs, two pools of 8 sequences, 4 ranks to a sequence.

`libra preflight qwen3_8b_128k --target h100 --topology 1x8x8` says what it asks of them. The shapes are the published
ones; where the text lies is for you to say: `--data.paths FOLDER`. `libra import WEIGHTS --config qwen3_8b_128k`
starts from published weights.

Rotary positions as the model card gives them for 131,072 tokens: base 1e6, YaRN with factor 131,072 / 32,768.
"""

import dataclasses

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import QWEN3_8B
from libra_jax.rope import YaRN
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=dataclasses.replace(QWEN3_8B, rope_scaling=YaRN(factor=4)),
        data=DataConfig(paths=("corpus",)),
        mesh=MeshConfig(pools=2, pool_size=8, cp=4),
        attention=AttentionConfig(waves=6, ranks_per_node=8),  # pages cross between hosts once, and fan out inside
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=50),
        checkpoint=CheckpointConfig(every=50),
        seq_len=131_072,
        micro_steps=2,
        steps=1000,
        run_dir="runs/qwen3_8b_128k",
    )
