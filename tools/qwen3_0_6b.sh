#!/bin/sh
# Trains a model of the shape of Qwen3-0.6B from a Hugging Face folder and back into one, on the CPU, in the environment
# that tools/parity_env.sh makes. Arguments are handed on to tools/qwen3_0_6b.py.
set -eu
cd "$(dirname "$0")/.."
. tools/parity_env.sh
PYTHONPATH=.:tests exec .venv/bin/python tools/qwen3_0_6b.py "$there/bin/python" "$@"
