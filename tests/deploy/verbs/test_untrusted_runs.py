"""A run folder from somebody else: verbs that read run none of its code, and others ask first."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nonet import trust
from nonet.controller.record import RunFolder
from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.session.steering import RewardSteering
from nonet.controller.setup import write_run
from nonet.deploy.run import driver
from nonet.errors import ConfigError

EVIL = "evil-20261128-101500-1a2b"
READING = [
    ["report"],
    ["report", "--json"],
    ["report", "--compare", EVIL],
    *(["status"], ["why"], ["versions"], ["runs"], ["logs"], ["top"]),
]
RUNNING = [
    ["evaluate"],
    ["recommend", "--user=1"],
    ["export", "out"],
    ["score", "--data", "rows.csv", "--out", "scores.parquet"],
    ["resume"],
    ["publish", "--step", "3"],
    ["serve", "--port", "18080"],
    ["tradeoff", "stages.rl.rewards.own.weight=1,2"],
    *(["attach", "--reward", "own.py"], ["detach", "own"], ["set", "own.weight=1"], ["scale", "trainer=2"]),
]


def name_tokenizer(run: Path, use: str) -> None:
    """Write a scenario that names code as its tokenizer."""
    (run / "scenario.yaml").write_text(
        f"name: evil\ndata: {{interactions: movielens-small}}\ntokenizer: {{use: '{use}'}}\nstages: {{}}\n"
    )


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run whose scenario names code of the run as its tokenizer."""
    monkeypatch.setattr(trust, "_guarded", {})
    monkeypatch.setattr(trust, "_approved", set())
    monkeypatch.setattr(trust, "_settings", {"approves": False, "imports": True})
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / EVIL
    (run / "sources").mkdir(parents=True)
    mark = str(tmp_path / "mark")
    (run / "sources/evil.py").write_text(f"open({mark!r}, 'w').close()\nSPEC = None\n")
    (run / "sources.json").write_text(json.dumps([{"use": "evil.py", "copy": "evil.py", "sha256": ""}]))
    name_tokenizer(run, "evil.py:SPEC")
    (run / "report.json").write_text(
        json.dumps({"run": run.name, "name": "evil", "stages": {}, "wall_s": {"total": 1.0}, "baselines": {}})
    )
    (run / "status.json").write_text(json.dumps({"state": "done", "run": run.name}))
    (run / "checkpoints/step-000003").mkdir(parents=True)
    (run / "checkpoints/step-000003/manifest.json").write_text("{}")
    return run


@pytest.mark.parametrize("approved", [False, True])
@pytest.mark.parametrize("use", ["evil.py:SPEC", "evil_module:SPEC"])
@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_verb_that_reads_runs_no_code_of_a_run(command, evil, tmp_path, monkeypatch, words, use, approved):
    name_tokenizer(evil, use)
    (tmp_path / "evil_module.py").write_text((evil / "sources/evil.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    if approved:
        trust.approve_code(evil)
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
    assert "evil.py) that you have neither started nor approved on this machine; read it in " in err
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("words", RUNNING, ids=" ".join)
def test_other_verbs_refuse_modules_that_a_run_names(command, evil, tmp_path, monkeypatch, words):
    (tmp_path / "evil_module.py").write_text((evil / "sources/evil.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    (evil / "sources/evil.py").unlink()
    (evil / "sources.json").write_text("[]")
    name_tokenizer(evil, "evil_module:SPEC")
    verb, *options = words
    if verb == "resume":
        (evil / "report.json").unlink()
    code, out, err = command(verb, evil, *options)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert "(evil_module:SPEC) that you have neither started nor approved on this machine" in err
    assert not (tmp_path / "mark").exists()


def test_a_run_that_changes_while_it_is_resumed_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "_guarded", {})
    monkeypatch.setattr(trust, "_approved", set())
    (tmp_path / "own.py").write_text(
        "import nonet\n\n\n@nonet.reward\ndef own(item):\n    return item * 0.0\n"
    )
    scenario = make_scenario(
        {
            "name": "own",
            "data": {"interactions": "interactions.parquet"},
            "stages": {"rl": {"steps": 1, "rewards": {"own": {"use": "own.py"}}}},
        }
    )
    run = RunFolder(tmp_path / "run")
    write_run(scenario, tmp_path, run)
    driver._prepare_records(scenario, tmp_path, run, True, "", detached=False)
    (run.sources / "late.py").write_text(
        ""
    )  # after the command has checked the run, and before workers load it
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        driver._prepare_records(scenario, tmp_path, run, True, "", detached=False)


def test_a_reward_that_somebody_else_has_attached_is_refused_before_it_is_imported(evil):
    trust.approve_code(evil)
    trust.guard_folder(evil)
    steering = object.__new__(RewardSteering)
    steering._session = SimpleNamespace(run=RunFolder(evil), groups=None, get_rewards=lambda stage: None)
    steering.objectives = SimpleNamespace(rewards={})
    command = {"verb": "attach", "name": "x", "options": {"use": "subprocess:getoutput"}, "original": "x"}
    with pytest.raises(ConfigError, match=r"\(subprocess:getoutput\).*NONET_TRUST"):
        steering._execute(command)
    command["options"] = {}
    command["name"] = f"{evil}/sources/evil.py:SPEC"  # the name is the default of `use`
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        steering._execute(command)


@pytest.mark.parametrize("extends", [False, True])
@pytest.mark.parametrize("verb", ["plan", "run", "tune", "manifest", "chaos", "submit"])
def test_the_stored_scenario_of_a_run_is_no_way_around_the_approval(command, evil, tmp_path, verb, extends):
    file = evil / "scenario.yaml"
    if extends:
        file = tmp_path / "own.yaml"
        file.write_text(f"extends: {evil / 'scenario.yaml'}\n")
    (tmp_path / "space.yaml").write_text("stages.pretrain.lr: [1e-3, 1e-2]\n")
    options = {
        "manifest": ["out"],
        "tune": ["--space", "space.yaml"],
        "submit": ["--address", "http://127.0.0.1:9"],
    }
    code, out, err = command(verb, file, *options.get(verb, []))
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert "then add --trust" in err or (extends and "is the stored scenario of a run" in err)
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "out").exists()


def test_the_stored_scenario_of_an_approved_run_runs_its_code(command, evil, tmp_path):
    _, _, err = command("plan", evil / "scenario.yaml", "--trust")
    assert (tmp_path / "mark").exists()
    assert "--trust" not in err


@pytest.mark.parametrize("words", [("items", "add"), ("store", "append")], ids=" ".join)
def test_nothing_is_added_to_a_run_whose_code_is_not_approved(command, evil, tmp_path, words):
    code, out, err = command(*words, evil, "table.parquet")
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert "then add --trust" in err
    assert not (tmp_path / "mark").exists()


def test_a_scenario_that_names_a_run_asks_before_it_runs_code_of_this_run(command, evil, tmp_path):
    (tmp_path / "own.yaml").write_text(f"extends: quickstart\ninit: {{from: {evil}}}\n")
    code, _, err = command("plan", "own.yaml")
    assert (code, "then add --trust" in err) == (2, True), err
    assert not (tmp_path / "mark").exists()


def test_an_approved_run_runs_its_code(command, evil, tmp_path):
    _, _, err = command("evaluate", evil, "--trust")
    assert (tmp_path / "mark").exists()
    assert "--trust" not in err
