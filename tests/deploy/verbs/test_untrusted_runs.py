"""A run folder from somebody else: verbs that read run none of its code, and others ask first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nonet import trust

READING = [["report"], ["report", "--json"], ["status"], ["why"], ["versions"], ["runs"], ["logs"]]
RUNNING = [
    ["evaluate"],
    ["recommend", "--user=1"],
    ["export", "out"],
    ["resume"],
    ["publish", "--step", "3"],
    ["serve", "--port", "18080"],
    ["tradeoff", "stages.rl.rewards.own.weight=1,2"],
]


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run whose scenario names code of the run as its tokenizer."""
    monkeypatch.setattr(trust, "_guarded", {})
    monkeypatch.setattr(trust, "_approved", set())
    monkeypatch.setattr(trust, "_settings", {"approves": False, "imports": True})
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/evil-20261128-101500-1a2b"
    (run / "sources").mkdir(parents=True)
    mark = str(tmp_path / "mark")
    (run / "sources/evil.py").write_text(f"open({mark!r}, 'w').close()\nSPEC = None\n")
    (run / "sources.json").write_text(json.dumps([{"use": "evil.py", "copy": "evil.py", "sha256": ""}]))
    (run / "scenario.yaml").write_text(
        "name: evil\ndata: {interactions: movielens-small}\ntokenizer: {use: 'evil.py:SPEC'}\nstages: {}\n"
    )
    (run / "report.json").write_text(
        json.dumps({"run": run.name, "name": "evil", "stages": {}, "wall_s": {"total": 1.0}, "baselines": {}})
    )
    (run / "status.json").write_text(json.dumps({"state": "done", "run": run.name}))
    (run / "checkpoints/step-000003").mkdir(parents=True)
    (run / "checkpoints/step-000003/manifest.json").write_text("{}")
    return run


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_verb_that_reads_runs_no_code_of_a_run(command, evil, tmp_path, words):
    verb, *options = words
    command(verb, *([] if verb == "runs" else [evil]), *options)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("words", RUNNING, ids=" ".join)
def test_other_verbs_refuse_code_that_is_not_approved_in_one_line(command, evil, tmp_path, words):
    verb, *options = words
    if verb == "resume":
        (evil / "report.json").unlink()
    code, out, err = command(verb, evil, *options)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert (
        "evil.py) that you have neither started nor approved on this machine; read it, then add --trust"
        in err
    )
    assert not (tmp_path / "mark").exists()


def test_a_scenario_that_names_a_run_asks_before_it_runs_code_of_this_run(command, evil, tmp_path):
    (tmp_path / "own.yaml").write_text(f"extends: quickstart\ninit: {{from: {evil}}}\n")
    code, _, err = command("plan", "own.yaml")
    assert (code, "read it, then add --trust" in err) == (2, True), err
    assert not (tmp_path / "mark").exists()


def test_an_approved_run_runs_its_code(command, evil, tmp_path):
    _, _, err = command("evaluate", evil, "--trust")
    assert (tmp_path / "mark").exists()
    assert "--trust" not in err
