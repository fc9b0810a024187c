"""A tiny scenario with staleness on real Ray actors: every prompt is trained once and never too old, also over a resume."""

from __future__ import annotations

import io
import json
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


FRESH = """
import nonet


@nonet.reward
def fresh(item):
    return item % 7
"""


@pytest.mark.timeout(300)
def test_rewards_come_and_go_while_rollouts_do_not_wait(ring):
    """Groups that were scored before a reward came are scored by it as they are learned from."""
    from nonet.controller.record import Recorder
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage
    from nonet.deploy.run import steer

    folder, own = RunFolder(ring / "steered"), ring / "fresh.py"
    own.write_text(FRESH)
    changes = [APART, ROLLOUT, "stages.rl.steps=6", "stages.rl.best=last"]
    with Session(ring / "ring.yaml", folder=ring, run=folder, changes=changes) as session:
        recorder, looks = Recorder(folder.path, folder.id), Counter()
        attached = steer.attach(folder.path, f"{own}:fresh", weight=0.2)[1]
        detached = []

        def stopped() -> bool:
            looks["at"] += 1
            if looks["at"] == 3:
                detached.append(steer.detach(folder.path, "fresh")[1])
            return False

        assert run_stage(session, "rl", recorder, stopped)
    for command in (attached, *detached):
        assert steer.wait_for_answer(folder, command, 0.0)["state"] == "taken"
    metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    fresh = {each["step"] for each in metrics if each["name"] == "reward.fresh" and each["role"] == "trainer"}
    hits = {each["step"] for each in metrics if each["name"] == "reward.hit" and each["role"] == "trainer"}
    assert hits == set(range(1, 7))
    assert {1, 2, 3} <= fresh < hits


def test_staleness_with_a_rollout_that_shares_live_weights_is_refused_before_anything_starts(ring):
    with pytest.raises(ConfigError, match="staleness: 1 wants a rollout with weights of its own"):
        api.scenario(ring / "ring.yaml", [ROLLOUT]).plan()
