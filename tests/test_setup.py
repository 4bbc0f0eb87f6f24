"""Set-up on machines this is not: shims, old and odd Pythons, none at all, an interrupted first run.

The scripts run in a small checkout of their own, with a PATH of stubs: shell scripts that stand for a Python and answer
the finder's probe as that Python would, and for `-m venv`, pip and uv note the call and make the files.
"""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("sh", "cat", "cksum", "dirname", "env", "grep", "mkdir", "rm")  # all that the scripts take from the system

FULL = ""
OLD = "sys.version_info = (3, 11, 2, 'final', 0)"
TOO_NEW = "sys.version_info = (3, 15, 0, 'final', 0)"
BARE = "import importlib.util; importlib.util.find_spec = lambda name: None"
FREE_THREADED = "import sysconfig; sysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED'"
BROKEN = "sys.modules['ssl'] = None"

PYTHON_STUB = """#!/bin/sh
case "$1 $2" in
    "-c "*) exec '{real}' -c "import sys
sys._base_executable, sys.base_prefix = '$0', '{name}'
{traits}
$2" ;;
    "--version "*) echo "Python 3.x (a stub)" ;;
    "-m venv")
        echo "venv $*" >>'{log}'
        for last in "$@"; do :; done
        {venv_rule}
        mkdir -p "$last/bin" && cat "$0" >"$last/bin/python" && chmod +x "$last/bin/python" ;;
    "-m pip")
        [ "$3" = --version ] || echo "$*" >>'{log}'
        case "$*" in *--python*) {has_pip} ;; esac
        if [ -e '{pip_fails}' ]; then exit 1; fi ;;
    "tools/first_start.py "*) [ -z "$PYTHONDONTWRITEBYTECODE" ] || exit 2 ;;
    *) exit 2 ;;
esac
"""

UV_STUB = """#!/bin/sh
echo "uv $*" >>'{log}'
case "$1 $2" in
    "--version "*) echo "uv 0.0 (a stub)" ;;
    "python install")
        [ -e '{fetched}' ] || exit 2
        mkdir -p "$UV_PYTHON_INSTALL_DIR/cpython-3.12.9-linux/bin"
        cat '{fetched}' >"$UV_PYTHON_INSTALL_DIR/cpython-3.12.9-linux/bin/python3"
        chmod +x "$UV_PYTHON_INSTALL_DIR/cpython-3.12.9-linux/bin/python3" ;;
    "pip install") ;;
    *) exit 2 ;;
esac
"""


@dataclasses.dataclass
class Machine:
    """A checkout whose path has a space, a PATH with nothing but stubs and the few tools needed, and an empty home."""

    folder: Path

    def __post_init__(self) -> None:
        self.checkout = self.folder / "a checkout"
        self.bin = self.folder / "bin"
        self.log = self.folder / "log"
        self.pip_fails = self.folder / "pip_fails"
        for path in (self.checkout, self.bin, self.folder / "home"):
            path.mkdir()
        shutil.copytree(ROOT / "tools", self.checkout / "tools")
        (self.checkout / "requirements.txt").write_text("numpy==2.1\n")
        (self.checkout / "pyproject.toml").write_text("")
        for tool in (*NEEDED, "chmod"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def add(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def add_python(self, name: str, traits: str = FULL, has_pip: bool = True) -> Path:
        rule = "" if traits != BARE else 'case "$*" in *--without-pip*) ;; *) exit 1 ;; esac'
        text = PYTHON_STUB.format(
            real=sys.executable, traits=traits, name=name, log=self.log, pip_fails=self.pip_fails, venv_rule=rule,
            has_pip=":" if has_pip else "exit 1",
        )  # fmt: skip
        return self.add(name, text)

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        variables = {"PATH": str(self.bin), "HOME": str(self.folder / "home"), **variables}
        return subprocess.run(
            ["sh", str(self.checkout / "tools" / script)], env=variables, capture_output=True, text=True, timeout=60
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (OLD, "is Python 3.11.2"),
        (TOO_NEW, "is Python 3.15.0"),
        (FREE_THREADED, "is a free-threaded build of Python 3."),
        (BROKEN, f"is Python {sys.version.split()[0]}, but broken: import of ssl halted"),
        ("raise SystemExit(127)", "does not run"),
        ("raise SystemExit(0)", "does not run"),
    ],
)
def test_what_does_not_fit_is_skipped_and_its_reason_told(machine: Machine, traits: str, reason: str) -> None:
    machine.add_python("python3", traits)
    none = machine.run("find_python.sh")
    assert none.returncode == 1
    assert f"{machine.bin}/python3 {reason}" in none.stderr
    other = machine.add_python("python3.13")
    assert machine.run("find_python.sh").stdout == f"{other}\n"


def test_every_place_is_looked_at(machine: Machine) -> None:
    assert "no python3 or python on PATH" in machine.run("find_python.sh").stderr
    versions = "home/.pyenv/versions"
    machine.add_python(f"../{versions}/3.13.9t/bin/python", FREE_THREADED)
    last = machine.add_python("../a checkout/.bootstrap/python/cpython-3.14.0-linux/bin/python3")
    by_uv = machine.add_python("../home/.local/share/uv/python/cpython-3.14.0-linux/bin/python3")
    by_pyenv = machine.add_python(f"../{versions}/3.13.9/bin/python")
    by_number = machine.add_python("python3.12")
    bare = machine.add_python("python", BARE)  # only where there is nothing better
    assert [machine.run("find_python.sh").stdout.strip()] == [str(by_number)]
    for found, following in ((by_number, by_pyenv), (by_pyenv, by_uv), (by_uv, last), (last, bare)):
        found.unlink()
        path = machine.run("find_python.sh").stdout.strip()
        assert path and Path(path).resolve() == following.resolve()


def test_a_shim_does_not_hide_the_real_one(machine: Machine) -> None:
    machine.add_python("python3.12", "raise SystemExit(127)")
    real = machine.add_python("further/python3.12")
    assert machine.run("find_python.sh", PATH=f"{machine.bin}:/no/such:{real.parent}").stdout == f"{real}\n"


def test_the_python_asked_for_is_taken_or_refused(machine: Machine) -> None:
    machine.add_python("python3.12")
    mine = machine.add_python("mine/python", BARE)
    assert machine.run("find_python.sh", PYTHON=str(mine)).stdout == f"{mine}\n"
    old = machine.add_python("old/python", OLD)
    for script in ("find_python.sh", "setup.sh"):
        refused = machine.run(script, PYTHON=str(old))
        assert refused.returncode == 1
        assert f"PYTHON={old} is Python 3.11.2; Libra needs CPython 3.12, 3.13 or 3.14." in refused.stderr


def test_first_run_installs_and_second_does_nothing(machine: Machine) -> None:
    machine.add_python("python3.12")
    first = machine.run("setup.sh", PYTHONDONTWRITEBYTECODE="1")
    assert first.returncode == 0, first.stderr
    made, requirements, package = machine.calls()
    assert made == "venv -m venv .venv"
    assert requirements.endswith("install --no-input --no-compile -q -r requirements.txt")
    assert package.endswith("install --no-input --no-compile -q --no-build-isolation --no-deps -e .")
    second = machine.run("setup.sh")
    assert (second.returncode, second.stdout, second.stderr, machine.calls()) == (0, "", "", [])


def test_changed_pins_are_installed_into_the_same_environment(machine: Machine) -> None:
    machine.add_python("python3.12")
    machine.run("setup.sh")
    (machine.checkout / "requirements.txt").write_text("numpy==2.2\n")
    assert machine.run("setup.sh").returncode == 0
    assert not any(call.startswith("venv") for call in machine.calls())
    assert any("-r requirements.txt" in call for call in machine.calls())
    machine.run("setup.sh")
    assert machine.calls() == []


def test_an_unfinished_run_is_not_taken_for_complete(machine: Machine) -> None:
    machine.add_python("python3.12")
    machine.pip_fails.touch()
    stopped = machine.run("setup.sh")
    assert stopped.returncode == 1
    assert "the pinned requirements could not be installed" in stopped.stderr
    machine.pip_fails.unlink()
    assert machine.run("setup.sh").returncode == 0
    assert machine.calls()[0] == "venv -m venv .venv"


@pytest.mark.parametrize("traits", [OLD, "raise SystemExit(127)"])
def test_an_environment_with_a_wrong_python_is_rebuilt(machine: Machine, traits: str) -> None:
    machine.add_python("python3.12")
    machine.run("setup.sh")
    machine.add_python("../a checkout/.venv/bin/python", traits)
    if traits == OLD:  # one that runs is judged only when there is no stamp: then it was made by hand
        (machine.checkout / ".venv" / "setup-stamp").unlink()
    assert machine.run("setup.sh").returncode == 0
    assert machine.calls()[0] == "venv -m venv .venv"


def test_another_python_asked_for_rebuilds(machine: Machine) -> None:
    first, second = machine.add_python("python3.12"), machine.add_python("python3.13")
    machine.run("setup.sh", PYTHON=str(first))
    machine.run("setup.sh", PYTHON=str(first))
    assert machine.calls() == []
    machine.run("setup.sh", PYTHON=str(second))
    assert machine.calls()[0] == "venv -m venv .venv"


def test_a_moved_checkout_is_set_up_again(machine: Machine) -> None:
    machine.add_python("python3.12")
    machine.run("setup.sh")
    machine.checkout = machine.checkout.rename(machine.folder / "moved")
    assert machine.run("setup.sh").returncode == 0
    assert machine.calls()


def test_python_without_ensurepip_gets_pip_another_way(machine: Machine) -> None:
    machine.add_python("python3.12", BARE)
    assert machine.run("setup.sh").returncode == 0
    assert "-m pip --python .venv/bin/python install -q pip" in machine.calls()
    shutil.rmtree(machine.checkout / ".venv")

    machine.add_python("python3.12", BARE, has_pip=False)
    refused = machine.run("setup.sh")
    assert refused.returncode == 1
    assert "neither ensurepip nor pip (on Debian or Ubuntu: apt install python3-venv" in refused.stderr

    machine.add("uv", UV_STUB.format(log=machine.log, fetched=machine.folder / "none"))
    assert machine.run("setup.sh").returncode == 0
    assert "uv pip install -q --python .venv/bin/python pip" in machine.calls()


def test_uv_fetches_a_python_where_there_is_none(machine: Machine) -> None:
    machine.add_python("python3", OLD)
    fetched = machine.add_python("../fetched")
    machine.add("uv", UV_STUB.format(log=machine.log, fetched=fetched))
    assert machine.run("setup.sh").returncode == 0
    assert "uv python install 3.12" in machine.calls()
    assert "venv -m venv .venv" in machine.calls()
    machine.run("setup.sh")
    assert machine.calls() == []


def test_an_older_python_brings_uv(machine: Machine) -> None:
    machine.add_python("python3", OLD)
    stopped = machine.run("setup.sh")
    assert "Installing uv into .bootstrap" in stopped.stdout
    assert "-m pip install -q uv" in machine.calls()
    assert stopped.returncode == 1  # the stub's pip brings nothing


def test_where_no_python_can_be_had_one_sentence_says_so(machine: Machine) -> None:
    machine.add_python("python3", OLD)
    machine.add_python("python3.12", "raise SystemExit(127)")
    machine.add("uv", UV_STUB.format(log=machine.log, fetched=machine.folder / "none"))
    stopped = machine.run("setup.sh")
    assert stopped.returncode == 1
    last = stopped.stderr.strip().splitlines()[-1]
    assert last.startswith("Set-up stopped: Libra needs Python 3.12, 3.13 or 3.14.")
    assert f"{machine.bin}/python3 is Python 3.11.2, {machine.bin}/python3.12 does not run" in last
    assert "make PYTHON=/path/to/python3.12" in last
    assert not (machine.checkout / ".venv").exists()
