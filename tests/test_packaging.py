"""One distribution, two import packages: what the wheel holds, and that a wheel and an editable install both work.

Builds from a copy of the tracked sources, without a network: the build backend and the dependencies are those of the
environment that runs the tests, lent to a fresh environment by a .pth file.
"""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import libra_jax

ROOT = Path(__file__).parent.parent
PACKAGES = {"libra_jax": ROOT / "libra_jax", "libra_kernels": ROOT / "kernels" / "libra_kernels"}

USE = """
import sys, pathlib, importlib.metadata, importlib.util
import libra_jax, libra_kernels
assert pathlib.Path(libra_jax.__file__).is_relative_to(sys.argv[1]), libra_jax.__file__
assert pathlib.Path(libra_kernels.__file__).is_relative_to(sys.argv[1]), libra_kernels.__file__
assert importlib.metadata.version("libra-jax") == libra_jax.__version__
spec = libra_jax.PoolSpec(seq_len=64, pool_size=2, cp=2, num_heads=2, num_kv_heads=1, head_dim=8, block=16)
assert libra_jax.plan_pool([[64], [40, 24]], spec).spec == spec
for package in ("data", "models", "train"):
    assert importlib.util.find_spec(f"libra_jax.{package}") is not None
print("works")
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(python: str | Path, *arguments: str | Path, cwd: Path) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--isolated")
    run(sys.executable, "-m", "pip", *quiet, "--python", python, *arguments, "--no-deps", cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that nothing left by an earlier build is packed, and no other test sees this one's."""
    copy = tmp_path_factory.mktemp("source") / "libra jax"
    leave_out = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "runs", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=leave_out)
    return copy


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """The Python of a new environment that sees this one's packages, but not this one's install of libra-jax."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lend = tmp_path / "lent"
    lend.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "libra_jax" not in path.name:
            (lend / path.name).symlink_to(path)
    (site / "lent.pth").write_text(f"{lend}\n")
    return python


def check_command(python: Path) -> None:
    help_text = run(python.with_name("libra"), "--help", cwd=python.parent)
    for command in ("train", "inspect"):
        assert command in help_text


def test_wheel_holds_both_packages_and_nothing_else(source: Path, fresh_python: Path, tmp_path: Path) -> None:
    pip(sys.executable, "wheel", "--no-build-isolation", "--wheel-dir", tmp_path, ".", cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"libra_jax-{libra_jax.__version__}-py3-none-any.whl"
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for pattern in ("*.py", "py.typed", "distributions/*.json")
        for path in folder.rglob(pattern)
    }
    assert {"libra_jax/py.typed", "libra_kernels/py.typed"} <= expected
    info = f"libra_jax-{libra_jax.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if not name.startswith(info)} == expected
    assert info + "licenses/LICENSE" in names

    pip(fresh_python, "install", wheel, cwd=tmp_path)
    assert run(fresh_python, "-c", USE, fresh_python.parent.parent, cwd=tmp_path) == "works\n"
    check_command(fresh_python)


def test_editable_install_imports_from_the_sources(source: Path, fresh_python: Path, tmp_path: Path) -> None:
    pip(fresh_python, "install", "--no-build-isolation", "--editable", ".", cwd=source)
    assert run(fresh_python, "-c", USE, source, cwd=tmp_path) == "works\n"
    check_command(fresh_python)
    module = source / "kernels" / "libra_kernels" / "added_later.py"
    module.write_text("answer = 42\n")
    assert run(fresh_python, "-c", "import libra_kernels.added_later as m; print(m.answer)", cwd=tmp_path) == "42\n"
