"""Models over packed sequences with pooled attention. qwen3.py: the dense decoder."""
