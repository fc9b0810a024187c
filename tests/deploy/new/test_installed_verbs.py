"""Verbs that installed packages add to the command line."""

from __future__ import annotations

import sys

import pytest

from nonet import contracts
from nonet.deploy import cli

VERBS = """
def count(run: str = "last") -> None:
    \"\"\"Count the runs.\"\"\"
    print(f"counted {run}")

def silent():
    pass
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    def make(**verbs):
        (tmp_path / "own_verbs.py").write_text(VERBS)
        facts = tmp_path / "own_verbs-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-verbs\nVersion: 1.0\n")
        lines = [f"{name} = own_verbs:{function}" for name, function in verbs.items()]
        (facts / "entry_points.txt").write_text("\n".join(["[nonet.verbs]", *lines, ""]))
        monkeypatch.syspath_prepend(str(tmp_path))
        contracts._read_entry_points.cache_clear()

    yield make
    sys.modules.pop("own_verbs", None)
    contracts._read_entry_points.cache_clear()


def call(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["nonet", *args])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    return code, *capsys.readouterr()


def test_a_verb_of_an_installed_package_is_called_and_listed(install, monkeypatch, capsys):
    install(count="count")
    assert call(monkeypatch, capsys, "count", "--run", "this") == (0, "counted this\n", "")
    code, out, _ = call(monkeypatch, capsys, "--help")
    assert code == 0
    assert "count" in out
    assert "Count the runs." in out
    assert "bench" in out


@pytest.mark.parametrize(
    ("verbs", "called", "said"),
    [
        (
            {"runs": "count"},
            "runs",
            "verb 'runs' (own_verbs:count): the name is taken, Nonet ships it; choose another",
        ),
        (
            {"silent": "silent"},
            "silent",
            "(own_verbs:silent): expected a function with a docstring, or a typer.Typer",
        ),
        ({"gone": "gone"}, "gone", "there is no 'gone' in own_verbs"),
    ],
)
def test_a_verb_that_breaks_its_contract_is_one_line_with_exit_code_2(
    install, monkeypatch, capsys, verbs, called, said
):
    install(**verbs)
    code, out, err = call(monkeypatch, capsys, called)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
