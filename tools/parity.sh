#!/bin/sh
# Compares Libra with Hugging Face transformers on the CPU, in the environment that tools/parity_env.sh makes.
# Arguments are handed on to tools/parity_table.py.
set -eu
cd "$(dirname "$0")/.."
. tools/parity_env.sh
PYTHONPATH=tests exec .venv/bin/python tools/parity_table.py "$there/bin/python" "$@"
