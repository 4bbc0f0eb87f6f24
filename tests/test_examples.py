"""The examples run as they are, and print what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {"prepared_folder.py": "step 2: loss 5.", "grain_sampler.py": "step 2: |output|", "own_loader.py": "batch 2:"}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTED.keys()


@pytest.mark.parametrize("name", PRINTED)
def test_example(name):
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout
