"""Models over packed sequences with pooled attention. qwen3.py: Qwen3, dense or with moe.py's mixture of experts;
vocabulary.py: embeddings and loss; fsdp.py: how parameters lie; hugging_face*.py: published weights in and out."""
