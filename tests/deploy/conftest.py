"""The small world of tests_ring.py and the command line as fixtures."""

from __future__ import annotations

import sys

import pytest
from tests_ring import make_ring

from nonet.deploy import cli


@pytest.fixture
def ring(tmp_path):
    """Make a folder with tables, ring.yaml and its reward file."""
    return make_ring(tmp_path)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nonet", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
