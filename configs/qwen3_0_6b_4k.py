"""Qwen3-0.6B on sequences of 4,096 tokens: 8 devices, one pool of 2 sequences, 4 ranks to a sequence.

The devices are virtual ones where JAX runs on a CPU: slow, and 10 GB for state and gradients alone. Or they are the
GPUs of a node, which have room for more: `--mesh.pool-size 8 --mesh.cp 1 --micro-steps 16`. The shapes are the
published ones; where the text lies is for you to say: `--data.paths FOLDER`.
`libra import WEIGHTS --config qwen3_0_6b_4k` starts from published weights.
"""

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import QWEN3_0_6B
from libra_jax.train.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=QWEN3_0_6B,
        data=DataConfig(paths=("corpus",)),
        mesh=MeshConfig(pools=1, pool_size=2, cp=4, cpu_devices=8),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=50),
        checkpoint=CheckpointConfig(every=50),
        seq_len=4096,
        steps=1000,
        run_dir="runs/qwen3_0_6b_4k",
    )
