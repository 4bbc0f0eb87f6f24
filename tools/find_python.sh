#!/bin/sh
# Prints the path of a Python that Libra can run on (CPython 3.12, 3.13 or 3.14), or says on standard error what was
# tried and exits 1. Candidates are judged by running them, since a name on PATH may be a shim that does not run or
# a build without ssl. PYTHON=... in the environment names the one to use and is never replaced by another.
# A Python that can make a virtual environment by itself (ensurepip) is preferred; where only one without is found
# (Debian splits it off), that one is printed and tools/setup.sh brings pip from elsewhere.
set -u
here=$(dirname "$0")

# Written for any Python from 2.7 on. Prints "full PATH", "bare PATH" (no ensurepip) or "no REASON". PATH is the
# interpreter under a virtual environment, so that .venv itself can be rebuilt from a shell that has it active.
probe='
import sys
name = "%d.%d.%d" % sys.version_info[:3]
def verdict(kind, text):
    sys.stdout.write(kind + " " + text + "\n")
    sys.exit(0)
if not (3, 12) <= sys.version_info[:2] <= (3, 14):
    verdict("no", "is Python " + name)
if sys.implementation.name != "cpython":
    verdict("no", "is " + sys.implementation.name + ", not CPython")
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    verdict("no", "is a free-threaded build of Python " + name)
try:
    import ctypes, ssl, venv, zlib
except ImportError as error:
    verdict("no", "is Python " + name + ", but broken: " + str(error))
import importlib.util, os
path = getattr(sys, "_base_executable", None) or sys.executable
if not os.access(path, os.X_OK):
    verdict("no", "is Python " + name + " of a virtual environment whose base is gone")
verdict("full" if importlib.util.find_spec("ensurepip") else "bare", path)
'

tried=""
bare=""
# Leaves in $verdict what the candidate $1 is; on success the first word is full or bare.
judge() {
    verdict=$("$1" -c "$probe" </dev/null 2>/dev/null) || verdict="no does not run"
    [ -n "$verdict" ] || verdict="no does not run"
}

consider() {
    judge "$1"
    case $verdict in
        "full "*)
            printf '%s\n' "${verdict#full }"
            exit 0
            ;;
        "bare "*) [ -n "$bare" ] || bare=${verdict#bare } ;;
        *) tried="$tried${tried:+, }$1 ${verdict#no }" ;;
    esac
}

if [ -n "${PYTHON:-}" ]; then
    judge "$PYTHON"
    case $verdict in
        "no "*)
            echo "PYTHON=$PYTHON ${verdict#no }; Libra needs CPython 3.12, 3.13 or 3.14." >&2
            exit 1
            ;;
    esac
    printf '%s\n' "${verdict#* }"
    exit 0
fi

# The name $1 in every folder of PATH: a shim that does not run may stand before the real one.
consider_on_path() {
    IFS=:
    for folder in $PATH; do
        if [ -x "$folder/$1" ]; then consider "$folder/$1"; fi
    done
    unset IFS
}

# What the user's shell calls Python comes first; then by version, wherever it lies.
consider_on_path python3
consider_on_path python
pyenv_root=$(pyenv root 2>/dev/null) || pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
uv_pythons=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}
for version in 3.12 3.13 3.14; do
    consider_on_path "python$version"
    for path in \
        "$pyenv_root/versions/$version"*/bin/python \
        "$uv_pythons/cpython-$version"*/bin/python3 \
        "$here/../.bootstrap/python/cpython-$version"*/bin/python3; do
        if [ -x "$path" ]; then consider "$path"; fi
    done
done

if [ -n "$bare" ]; then
    printf '%s\n' "$bare"
    exit 0
fi
echo "${tried:-there is no python3 or python on PATH}" >&2
exit 1
