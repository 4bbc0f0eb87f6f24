"""The command: what it answers, how fast help comes, and what mistakes are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from libra_jax import cli

TINY = '''"""A tiny model on this folder."""

from libra_jax.data import VOCAB_SIZE, DataConfig
from libra_jax.models.qwen3 import Qwen3Config
from libra_jax.train.config import AttentionConfig, MeshConfig, TrainConfig


def config():
    return TrainConfig(
        model=Qwen3Config(VOCAB_SIZE, 32, 48, 1, 4, 2, 8),
        data=DataConfig(paths=(FOLDER,)),
        mesh=MeshConfig(2, 2, 2, cpu_devices=8),
        attention=AttentionConfig(block=8),
        seq_len=64,
        steps=200,
        run_dir=FOLDER + "/run",
    )
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with configs/tiny.py and a text file."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(TINY.replace("FOLDER", repr(str(tmp_path))))
    (tmp_path / "text.txt").write_text("some text " * 100)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_does_not_wait_for_jax() -> None:
    program = "\n".join([
        "import sys",
        "from libra_jax.cli import main",
        "assert main(['--help']) == 0 and main(['train', '--help']) == 0 and main(['--version']) == 0",
        "assert main([]) == 2 and main(['tarin']) == 2",
        "try: main(['inspect', '--help'])",
        "except SystemExit as end: assert not end.code",
        "assert not {'jax', 'grain', 'flax', 'matplotlib'} & set(sys.modules), 'help imported what it does not need'",
    ])  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout and "inspect" in done.stdout
    assert "there is no command 'tarin'; did you mean train?" in done.stderr


def test_configs_are_found_by_name_and_by_path_and_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    assert "tiny  A tiny model on this folder." in capsys.readouterr().out
    by_name, by_path = cli.load_config("tiny"), cli.load_config(str(folder / "configs" / "tiny.py"))
    assert by_name == by_path and by_name.mesh.devices == 8
    assert cli.main(["train", "tyni"]) == 2
    assert "there is no config 'tyni'; did you mean tiny? There are: tiny" in capsys.readouterr().err
    assert cli.main(["train", "nowhere.py"]) == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err
    (folder / "own.py").write_text("")
    assert cli.main(["train", "own"]) == 2
    assert "there is no config 'own' in the folder configs; did you mean own.py?" in capsys.readouterr().err


def test_the_repository_s_demo_loads() -> None:
    config = cli.load_config(str(Path(__file__).parents[1] / "configs" / "demo.py"))
    assert (config.mesh.pools, config.mesh.pool_size, config.mesh.cp, config.mesh.cpu_devices) == (2, 2, 2, 8)
    assert config.optimizer.decay_steps is not None, "the curve must not depend on when the run is stopped"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"must have a function `config\(\) -> TrainConfig`, and it has none"),
        ("def config(): return 3", "its config\\(\\) gives int"),
        ("def config(:", "could not be loaded: SyntaxError"),
        ("import nowhere_at_all", "could not be loaded: ModuleNotFoundError"),
        (
            "from libra_jax.train.config import MeshConfig\ndef config(): return MeshConfig(pools=0)",
            r"could not be loaded: ValueError: mesh.pools \(0\) must be at least 1 \(bad.py, line 2\)",
        ),
        ("\n\nx = undefined", r"NameError: name 'undefined' is not defined \(bad.py, line 3\)"),
        ("def deeper(): return {}['key']\ndef config():\n    return deeper()", r"KeyError: 'key' \(bad.py, line 1\)"),
        ("import os\nx = os.nothing", r"AttributeError: .*'nothing' \(bad.py, line 2\)"),
        ("import json\nx = json.loads('{')", r"JSONDecodeError: .* \(bad.py, line 2\)"),
        ("class Odd(Exception): pass\nraise Odd('so')", r"Odd: so \(bad.py, line 2\)"),
    ],
)
def test_a_file_that_gives_no_config_is_told_why(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (folder / "bad.py").write_text(text)
    with pytest.raises(cli.UsageError, match=message):
        cli.load_config("./bad.py")
    assert cli.main(["train", "./bad.py"]) == 2
    assert "libra: bad.py" in capsys.readouterr().err


def test_hints_name_the_program_as_it_was_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "libra"
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for called, named in (
        (".venv/bin/libra", ".venv/bin/libra"),
        ("my env/bin/libra", "'my env/bin/libra'"),
        ("/elsewhere/bin/libra", "/elsewhere/bin/libra"),
        (str(installed), "libra"),  # found on PATH
        (cli.__file__, f"{sys.orig_argv[0]} -m libra_jax.cli"),
        ("/usr/bin/pytest", "libra"),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        assert cli.program() == named
        assert f"{named} COMMAND --help" in cli._overview()


def test_overrides_go_by_name_and_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = cli.load_config("tiny")
    args = ["--steps", "7", "--optimizer.learning-rate", "0.01", "--attention.window", "32", "--model.remat", "none"]
    changed = cli.override(config, args, "libra train tiny")
    assert (changed.steps, changed.optimizer.learning_rate, changed.attention.window) == (7, 0.01, 32)
    assert changed.model.remat == "none" and changed.data == config.data
    for args, words in (
        (["--optimizer.learning-rat", "3"], ["--optimizer.learning-rat", "--optimizer.learning-rate FLOAT"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--model.remat", "some"], ["--model.remat", "attention"]),
        (["--seq-len", "60"], ["seq_len (60) must be a multiple of cp * block (2 * 8 = 16)"]),
    ):
        with pytest.raises(SystemExit) as leave:
            cli.override(config, args, "libra train tiny")
        said = " ".join("".join(capsys.readouterr()).split())
        assert leave.value.code == 2 and all(word in said for word in words), said
    with pytest.raises(SystemExit):
        cli.override(config, ["--help"], "libra train tiny")
    said = capsys.readouterr().out
    assert "--mesh.cp INT" in said and "Ranks that hold one sequence" in said and "(default: 200)" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh.pools", "3"], "3 * 2 * 2 = 12 devices, and there are 8 (cpu)"),
        (["--run-dir", "text.txt"], "the run folder text.txt cannot be written: File exists; set --run-dir"),
        (["--data.paths", "gone"], "gone: no such file or folder"),
        (["--optimizer.warmup-steps", "300"], "optimizer.warmup_steps (300) must be below"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert cli.main(["train", "tiny", *args]) == 2
    said = capsys.readouterr()
    assert message in said.err, said
    assert "Traceback" not in said.err and "compiled" not in said.out


def test_inspect_takes_its_path_without_a_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        cli.main(["inspect"])
    assert leave.value.code == 2
    capsys.readouterr()
    assert cli.main(["inspect", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_mistake_of_the_users():
    command = [sys.executable, "-m", "libra_jax.cli", "simulate", "--quick", "--json", "--steps", "1"]
    command += ["--seq-len", "8192", "--cp", "2", "--dp", "4", "--pool", "2", "--micro-steps", "2"]
    command += ["--policies", "ulysses"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "libra:" not in process.stderr.read()
    assert process.wait() == 1
