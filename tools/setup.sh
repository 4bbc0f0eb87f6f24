#!/bin/sh
# Makes .venv: a Python that fits, the pinned requirements, and this package installed so that edits show at once.
# Needs a POSIX sh and either Python 3.12 to 3.14 or some older Python 3 or uv, with which one is fetched. Reads
# packages only from the index that pip (and uv) are configured for. `.venv/setup-stamp`, written last, says for which
# inputs the environment is complete; when it still holds, nothing is done. An environment that set-up did not finish
# is made anew; one made by hand is kept if its Python fits.
set -u
cd "$(dirname "$0")/.." || exit 1
root=$(pwd -P)
stamp=.venv/setup-stamp
unfinished=.venv/setup-unfinished

say() { printf '%s\n' "$*"; }
fail() {
    printf '\nSet-up stopped: %s\n' "$*" >&2
    exit 1
}
# Which installation of Python this is: the same for a Python and for the environments made from it.
base() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' </dev/null 2>/dev/null; }

inputs=$(say "$root" && cksum requirements.txt pyproject.toml tools/setup.sh tools/cpu_by_default.pth) || exit 1
is_complete() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ] && .venv/bin/python -c '' 2>/dev/null; }
# With PYTHON=... an environment of another Python is not the one that was asked for.
is_as_asked() { [ -z "${PYTHON:-}" ] || [ "$(base "$PYTHON")" = "$(base .venv/bin/python)" ]; }
if is_complete && is_as_asked; then exit 0; fi

# Sets $uv to a uv that runs: one that is there, or one installed into .bootstrap with an older Python.
get_uv() {
    for uv in uv "${HOME:-}/.local/bin/uv" "$root/.bootstrap/bin/uv" "$root/.bootstrap/lib/bin/uv"; do
        if "$uv" --version >/dev/null 2>&1; then return 0; fi
    done
    IFS=:
    for folder in $PATH; do
        unset IFS
        if [ -x "$folder/python3" ] && install_uv "$folder/python3"; then return 0; fi
    done
    unset IFS
    return 1
}

install_uv() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1 || return 1
    say "Installing uv into .bootstrap with $("$1" --version 2>&1), to bring what is missing ..."
    mkdir -p .bootstrap
    if "$1" -m venv .bootstrap >/dev/null 2>&1 && .bootstrap/bin/python -m pip install -q uv; then
        uv=$root/.bootstrap/bin/uv
    elif "$1" -m pip install -q --target .bootstrap/lib uv; then
        uv=$root/.bootstrap/lib/bin/uv
    fi
    "$uv" --version >/dev/null 2>&1
}

fetch_python() {
    get_uv || return 1
    say "Fetching Python 3.12 with $("$uv" --version) ..."
    UV_PYTHON_INSTALL_DIR=${UV_PYTHON_INSTALL_DIR:-$root/.bootstrap/python} UV_PYTHON_INSTALL_BIN=0 \
        "$uv" python install 3.12
}

give_pip() { # to .venv, made by the Python $1, which has no ensurepip
    say "$1 comes without ensurepip: bringing pip another way ..."
    "$1" -m pip --python .venv/bin/python install -q pip 2>/dev/null && return 0
    get_uv && "$uv" pip install -q --python .venv/bin/python pip
}

make_venv() {
    if ! python=$(sh tools/find_python.sh 2>&1); then
        [ -z "${PYTHON:-}" ] || fail "$python"
        tried=$python
        fetch_python
        python=$(sh tools/find_python.sh 2>&1) || fail "Libra needs Python 3.12, 3.13 or 3.14." \
            "None was found ($tried), and fetching one with uv did not work either." \
            "Install one (for example: apt install python3.12 python3.12-venv, or pyenv install 3.12, or" \
            "uv python install 3.12), or name one that is not on PATH: make PYTHON=/path/to/python3.12"
    fi
    say "Making .venv with $("$python" --version) ($python) ..."
    rm -rf .venv || fail "the old .venv could not be removed"
    mkdir .venv || fail ".venv could not be made"
    : >"$unfinished"
    if ! "$python" -m venv .venv >/dev/null 2>&1; then
        "$python" -m venv --without-pip .venv || fail "$python could not make .venv"
        give_pip "$python" || fail "$python has neither ensurepip nor pip (on Debian or Ubuntu:" \
            "apt install python3-venv, or python3.12-venv for that version)"
    fi
}

is_usable() {
    [ ! -e "$unfinished" ] && PYTHON=.venv/bin/python sh tools/find_python.sh >/dev/null 2>&1 &&
        .venv/bin/python -m pip --version >/dev/null 2>&1
}
if is_usable && is_as_asked; then rm -f "$stamp"; else make_venv; fi
: >"$unfinished"

say "Installing $(grep -c '^[a-z0-9]' requirements.txt) pinned packages into .venv (minutes the first time) ..."
# --no-compile: Python compiles what is imported; compiling all that is installed doubles the time.
install="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install --no-input --no-compile -q"
$install -r requirements.txt || fail "the pinned requirements could not be installed (pip says why above)"
$install --no-build-isolation --no-deps -e . || fail "this package could not be installed (pip says why above)"
# XLA's compiler for GPUs is in here, the libraries that running takes are not. Without this, every start of jax would
# try them and print why it could not. With CUDA's libraries installed (the extra `cuda`) it does nothing.
for packages in .venv/lib/python3*/site-packages; do
    if [ -d "$packages" ]; then cat tools/cpu_by_default.pth >"$packages/cpu_by_default.pth"; fi
done
PYTHONDONTWRITEBYTECODE='' .venv/bin/python tools/first_start.py ||
    fail "what was installed cannot be imported (Python says why above)"
rm -f "$unfinished"
printf '%s\n' "$inputs" >"$stamp" || fail "$stamp could not be written"
say "Set-up is complete."
