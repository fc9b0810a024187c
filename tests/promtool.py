"""The checks of Prometheus, `promtool`, on files for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from nonet import yaml

_PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(_PROMTOOL is None, reason="no promtool here: apt-get install prometheus")


def check_with_promtool(folder: Path, config: str, expressions: Sequence[str], rule_tests: str) -> None:
    """Check a configuration in a folder with its rules, the expressions of a dashboard, and when the rules fire.

    Args:
        folder: The folder of the configuration and its rules.
        config: The name of the configuration.
        expressions: The expressions of the dashboard's panels.
        rule_tests: The unit tests of the rules, as promtool reads them.
    """
    recorded = [{"record": f"panel{at}", "expr": expression} for at, expression in enumerate(expressions)]
    (folder / "panels.yaml").write_text(yaml.dump({"groups": [{"name": "panels", "rules": recorded}]}))
    (folder / "test.yaml").write_text(rule_tests)
    for verb in (
        ["check", "config", config],
        ["check", "rules", "panels.yaml"],
        ["test", "rules", "test.yaml"],
    ):
        done = subprocess.run([str(_PROMTOOL), *verb], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
