"""A whole run as a user starts it: `nonet run SCENARIO` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_scenario(scenario: Path, run: Path) -> Path:
    """Run a scenario file to its end, and return the folder of the run.

    Raises:
        RuntimeError: The run failed; the message has the end of its output.
    """
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "run", str(scenario)]
    result = subprocess.run([*command, "--run-dir", str(run)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the run failed:\n{(result.stdout + result.stderr)[-4000:]}")
    return run
