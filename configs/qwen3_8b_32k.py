"""Qwen3-8B on sequences of 32,768 tokens: 32 GPUs, four pools of 8 sequences, one rank to a sequence.

`libra preflight qwen3_8b_32k --target h100 --topology 1x4x8` says what it asks of them. The shapes are the published
ones; where the text lies is for you to say: `--data.paths FOLDER`. `libra import WEIGHTS --config qwen3_8b_32k` starts
from published weights.

A pool is one node, so attention exchanges over NVLink alone. One node takes the same steps, more slowly:
`--mesh.pools 1 --micro-steps 16`. Rotary positions are the model's own: base 1e6, made for 32,768 tokens.
"""

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import QWEN3_8B
from libra_jax.train.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=QWEN3_8B,
        data=DataConfig(paths=("corpus",)),
        mesh=MeshConfig(pools=4, pool_size=8, cp=1),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=50),
        checkpoint=CheckpointConfig(every=50),
        seq_len=32_768,
        micro_steps=4,
        steps=1000,
        run_dir="runs/qwen3_8b_32k",
    )
