"""A whole run as a user starts it: `nonet run SCENARIO` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_scenario(scenario: Path, run: Path) -> Path:
    """Run a scenario's file to its end; its folder. Raises RuntimeError with the end of what it printed where it fails."""
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "run", str(scenario)]
    result = subprocess.run([*command, "--run-dir", str(run)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the run failed:\n{(result.stdout + result.stderr)[-4000:]}")
    return run
