"""The shipped examples run as scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_own_worker_prints_what_it_says():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_worker.py"], capture_output=True, text=True, timeout=800, check=True
    )
    assert done.stdout.splitlines() == ["[2, 4, 6, 8, 10]", "[2, 4]", "[4, 8, 12]"]
