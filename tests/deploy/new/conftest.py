"""`nonet new` in this process, in an empty folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest


@pytest.fixture
def new(tmp_path, monkeypatch, command):
    """`nonet new` with these words in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return partial(command, "new")


@pytest.fixture
def refused(new):
    """Return the one line with which `nonet new` refuses, and check that it leaves nothing behind."""

    def run(*words: str) -> str:
        before = sorted(str(path) for path in Path().rglob("*"))
        code, _, err = new(*words)
        assert (code, err.count("\n")) == (2, 1), err
        assert sorted(str(path) for path in Path().rglob("*")) == before
        return err

    return run
