#!/bin/sh
# Runs the tests of the Triton kernels with the older Triton that GPU images carry, and each jax-triton that goes with it.
# Everything else comes from .venv. Arguments are handed on to pytest.
set -eu
cd "$(dirname "$0")/.."
triton=3.6.0
for jax_triton in 0.3.1 0.4.1; do
    there=.venv/triton-$triton-$jax_triton
    if [ ! -e "$there/complete" ]; then
        rm -rf "$there"
        .venv/bin/python -m venv "$there"
        "$there/bin/python" -m pip install -q --disable-pip-version-check --no-compile --no-deps \
            "triton==$triton" "jax-triton==$jax_triton"
        main=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        own=$("$there/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        printf 'import site; site.addsitedir("%s")\n' "$main" >"$own/the_rest.pth"
        : >"$there/complete"
    fi
    printf 'Triton %s, jax-triton %s\n' "$triton" "$jax_triton"
    "$there/bin/python" -m pytest -q tests/test_compile_gpu.py tests/test_triton_interpreter.py "$@"
done
