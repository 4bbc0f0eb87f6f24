# Sourced in the repository's root by the tools that set Libra beside Hugging Face transformers: makes the environment
# $there, which has torch and transformers, once from tools/parity_requirements.txt; only that needs a network.
# PARITY_PYTHON names the Python it is made with; without it, that of .venv. On Linux torch brings its CUDA libraries,
# 5 GB in all, unless pip finds a build for the CPU (1 GB).
there=.venv-parity
inputs=$(pwd -P && cksum tools/parity_requirements.txt && printf '%s\n' "${PARITY_PYTHON:-}")
if [ ! -e "$there/complete" ] || [ "$(cat "$there/complete")" != "$inputs" ]; then
    echo "Installing torch and transformers into $there (1 to 5 GB, minutes) ..."
    rm -rf "$there"
    "${PARITY_PYTHON:-.venv/bin/python}" -m venv "$there"
    "$there/bin/python" -m pip install -q --disable-pip-version-check --no-input --no-compile \
        -r tools/parity_requirements.txt
    printf '%s\n' "$inputs" >"$there/complete"
fi
