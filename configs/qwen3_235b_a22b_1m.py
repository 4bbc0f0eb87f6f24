"""Qwen3-235B-A22B on sequences of 1,048,576 tokens: 256 GPUs, one pool of 4 sequences, 64 ranks to a sequence.

`libra preflight qwen3_235b_a22b_1m --target h100 --topology 1x32x8` says what it asks of them. The shapes are the
published ones; where the text lies is for you to say: `--data.paths FOLDER`.
`libra import WEIGHTS --config qwen3_235b_a22b_1m` starts from published weights.

Rotary positions by the model card's rule, factor = tokens / 32,768: base 1e6, YaRN with factor 32. Qwen has validated
it up to factor 4. The later -2507 weights have base 5e6 and know 262,144 tokens without YaRN: with them
`--model.rope-theta 5e6 --model.rope-scaling.factor 4 --model.rope-scaling.original-max-positions 262144`.
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
        # Layers keep their input alone: with attention's results as well XLA gets to 73.9 GiB, by computing 50
        # others twice.
        model=dataclasses.replace(QWEN3_235B_A22B, rope_scaling=YaRN(factor=32), remat="full"),
        data=DataConfig(paths=("corpus",)),
        mesh=MeshConfig(pools=1, pool_size=4, cp=64),
        attention=AttentionConfig(waves=6, ranks_per_node=8),  # pages cross between hosts once, and fan out inside
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=50),
        checkpoint=CheckpointConfig(every=100),
        seq_len=1_048_576,
        micro_steps=2,
        steps=1000,
        run_dir="runs/qwen3_235b_a22b_1m",
    )
