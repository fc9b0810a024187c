"""A tiny scenario with staleness on real Ray actors: every prompt is trained once and never too old, also over a resume."""

from __future__ import annotations

import io
from collections import Counter

import pytest

from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.errors import ConfigError

APART = "roles={rollout: {workers: 2}, embedding: {workers: 1}}"
ROLLOUT = "stages.rl.rollout={width: 4, staleness: 1}"


@pytest.fixture(scope="module")
def ring(ray_local, tmp_path_factory):
    from tests_ring import make_ring

    return make_ring(tmp_path_factory.mktemp("ring"))


def groups(folder) -> list[dict]:
    return [record for record in read_journal(folder / "journal.jsonl") if "group" in record]


def test_a_run_whose_rollouts_do_not_wait_trains_every_group_once_and_none_too_old(ring):
    panel = Panel(io.StringIO(), live=False)
    scenario = api.scenario(ring / "ring.yaml", [APART, ROLLOUT])
    finished = api.run(scenario, run_dir=ring / "whole", panel=panel)
    log, steps = groups(ring / "whole"), 4
    parts = log[0]["of"]
    assert parts > 1
    begun = Counter(record["number"] for record in log if record["group"] == "begun")
    aborted = Counter(record["number"] for record in log if record["group"] == "aborted")
    committed = Counter(n for record in log if record["group"] == "committed" for n in record["numbers"])
    assert committed == Counter(range(parts * steps))
    assert begun == committed + aborted
    version = {record["number"]: record["version"] for record in log if record["group"] == "begun"}
    ages = [r["step"] - version[n] for r in log if r["group"] == "committed" for n in r["numbers"]]
    assert set(ages) == {0, 1}, "rollout and training overlap, one step apart at most"
    assert finished.state == "done"


@pytest.mark.slow
def test_a_stage_that_was_stopped_asks_again_what_was_not_trained(ring):
    from nonet.controller.record import Recorder
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage

    folder = RunFolder(ring / "stopped")
    changes = [APART, ROLLOUT, "stages.rl.steps=6"]
    for resume in (False, True):
        with Session(ring / "ring.yaml", folder=ring, run=folder, changes=changes, resume=resume) as session:
            recorder = Recorder(folder.path, folder.id)
            ended = run_stage(session, "rl", recorder, (lambda: True, lambda: False)[resume])
            assert ended is resume
    log = groups(folder.path)
    committed = Counter(n for record in log if record["group"] == "committed" for n in record["numbers"])
    assert committed == Counter(range(log[0]["of"] * 6))
    assert any(record["group"] == "aborted" for record in log), "what was under way when the run was stopped"
    begun = Counter(record["number"] for record in log if record["group"] == "begun")
    assert begun == committed + Counter(r["number"] for r in log if r["group"] == "aborted")


def test_staleness_with_a_rollout_that_shares_live_weights_is_refused_before_anything_starts(ring):
    with pytest.raises(ConfigError, match="staleness: 1 wants a rollout with weights of its own"):
        api.scenario(ring / "ring.yaml", [ROLLOUT]).plan()
