"""Commands that are typed in this process, as fixtures."""

from __future__ import annotations

import sys

import pytest

from nonet.deploy import cli


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """Type a command; its exit code, what it printed, and what it said on stderr."""

    def type_(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["nonet", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return type_


@pytest.fixture
def refused(typed):
    def type_(*words):
        code, out, err = typed(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
        return err

    return type_
