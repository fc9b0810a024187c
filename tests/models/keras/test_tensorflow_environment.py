"""The Makefile's rule for the interpreter with TensorFlow, with stand-ins for Python and pip."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[3] / "Makefile"
STAND_IN = """#!/bin/sh
here=$(dirname "$(dirname "$0")")
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" "$3/packages" && cp "$0" "$3/bin/python" && touch "$3/made" ;;
  *purelib*) mkdir -p "$here/packages" && echo "$here/packages" ;;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_an_older_interpreter_and_one_that_was_not_completed_are_replaced(tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    for folder in (".venv-tensorflow", ".venv-tensorflow.part"):
        (tmp_path / folder / "lib").mkdir(parents=True)
        os.utime(tmp_path / folder, (1, 1))
    (tmp_path / ".venv" / ".installed").touch()
    command = ["make", "-f", str(MAKEFILE), ".venv-tensorflow"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    made = tmp_path / ".venv-tensorflow"
    assert sorted(path.name for path in made.iterdir()) == ["bin", "made", "packages"]
    assert (made / "packages" / "zz_nonet.pth").read_text() == ".venv/packages\n"
    assert not (tmp_path / ".venv-tensorflow.part").exists()
