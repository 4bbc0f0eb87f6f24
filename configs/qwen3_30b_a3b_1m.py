"""Qwen3-30B-A3B on sequences of 1,048,576 tokens: 128 GPUs, one pool of 8 sequences, 16 ranks to a sequence.

`libra preflight qwen3_30b_a3b_1m --target h100 --topology 1x16x8` says what it asks of them. The shapes are the
published ones; where the text lies is for you to say: `--data.paths FOLDER`.
`libra import WEIGHTS --config qwen3_30b_a3b_1m` starts from published weights.

Rotary positions by the model card's rule, factor = tokens / 32,768: base 1e6, YaRN with factor 32. Qwen has validated
it up to factor 4. The later -2507 weights have base 1e7 and know 262,144 tokens without YaRN: with them
`--model.rope-theta 1e7 --model.rope-scaling.factor 4 --model.rope-scaling.original-max-positions 262144`.
"""

import dataclasses

from libra_jax.data import DataConfig
from libra_jax.models.qwen3 import QWEN3_30B_A3B
from libra_jax.rope import YaRN
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        # Experts are gathered: a layer has 1.2 GB of them, while a rank's 65,536 tokens, sent to 8 experts each and
        # back, would take 4.3 GB, and ranks with experts in demand would keep the others waiting.
        model=dataclasses.replace(QWEN3_30B_A3B, rope_scaling=YaRN(factor=32)),
        data=DataConfig(paths=("corpus",)),
        mesh=MeshConfig(pools=1, pool_size=8, cp=16),
        attention=AttentionConfig(waves=6, ranks_per_node=8),  # pages cross between hosts once, and fan out inside
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=50),
        checkpoint=CheckpointConfig(every=50),
        seq_len=1_048_576,
        steps=1000,
        run_dir="runs/qwen3_30b_a3b_1m",
    )
