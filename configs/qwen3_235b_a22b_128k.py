"""Qwen3-235B-A22B on sequences of 131,072 tokens: 256 GPUs, four pools of 8 sequences, 8 ranks to a sequence.

`libra preflight qwen3_235b_a22b_128k --target h100 --topology 1x32x8` says what it asks of them. The shapes are the
published ones; where the text lies is for you to say: `--data.paths FOLDER`.
`libra import WEIGHTS --config qwen3_235b_a22b_128k` starts from published weights.

Rotary positions as the model card gives them for 131,072 tokens: base 1e6, YaRN with factor 131,072 / 32,768. The
later -2507 weights have base 5e6 and know 262,144 tokens without YaRN: with them
`--model.rope-theta 5e6 --model.rope-scaling.factor 1`.
"""

import dataclasses

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import QWEN3_235B_A22B
from libra_jax.rope import YaRN
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        # Experts are gathered: a layer's 4.8 GB of them reach a node once, 0.6 GB through each of its ports, while a
        # rank's 16,384 tokens, sent to 8 experts each and back, would take 2 GB through its own.
        # Layers keep attention's results beside their input: 71.4 GiB at the peak, a close fit. With
        # `--model.remat full` they keep their input alone: 24 GiB less, and every layer's attention runs forward twice.
        model=dataclasses.replace(QWEN3_235B_A22B, rope_scaling=YaRN(factor=4)),
        data=DataConfig(paths=("corpus",)),
        mesh=MeshConfig(pools=4, pool_size=8, cp=8),
        attention=AttentionConfig(waves=6, ranks_per_node=8),  # pages cross between hosts once, and fan out inside
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=50),
        checkpoint=CheckpointConfig(every=100),
        seq_len=131_072,
        steps=1000,
        run_dir="runs/qwen3_235b_a22b_128k",
    )
