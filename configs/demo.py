"""A small Qwen3 on the text of installed Python packages: eight virtual CPU devices, a few minutes on two cores.

Documents are files, from one line to hundreds of thousands of bytes, so attention work is spread as unevenly as it is
in long-context corpora. Nothing is downloaded.
"""

from libra_jax.data import VOCAB_SIZE, DataConfig
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.train.config import AttentionConfig, CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=96,
            intermediate_size=256,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            rope_theta=10_000.0,
            tied_embeddings=True,
            compute_dtype="float32",
        ),
        # All of them come with libra-jax.
        data=DataConfig(packages=("rich", "optax", "flax", "tyro", "etils", "absl", "grain", "orbax", "markdown_it")),
        mesh=MeshConfig(pools=2, pool_size=2, cp=2, cpu_devices=8),
        attention=AttentionConfig(block=64),
        # decay_steps is not tied to steps: going on for more steps gives the curve of one longer run.
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, decay_steps=200),
        checkpoint=CheckpointConfig(every=5),
        seq_len=8192,
        micro_steps=2,
        steps=30,
        run_dir="runs/demo",
    )
