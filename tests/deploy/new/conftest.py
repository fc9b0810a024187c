"""`nonet new` in this process, in an empty folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nonet.deploy import cli


@pytest.fixture
def new(tmp_path, monkeypatch, capsys):
    """`nonet new` with these words in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nonet", "new", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refused(new):
    """What `nonet new` says in one line where it refuses, and leaves nothing behind."""

    def run(*words: str) -> str:
        before = sorted(str(path) for path in Path().rglob("*"))
        code, _, err = new(*words)
        assert (code, err.count("\n")) == (2, 1), err
        assert sorted(str(path) for path in Path().rglob("*")) == before
        return err

    return run
