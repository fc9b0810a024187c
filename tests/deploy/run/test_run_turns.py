"""Runs whose groups take turns on a device or change between stages: interrupted, resumed, at another world size, on an npu."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests_ring import make_ring

import nonet
from nonet import yaml
from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import to_document
from nonet.controller.session import session as sessions
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.workers.engines import MEASURED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = "pools={small: {memory: 6.2MB}}"
TWO = "{trainer: {workers: 2}, rollout: {fuse: trainer, workers: 2}, embedding: {fuse: trainer, workers: 2}}"
ONE = "{trainer: {workers: 1}, rollout: {workers: 1}, embedding: {fuse: trainer, workers: 1}}"
HERE = Path(__file__).parents[1]

KILLER = '''
from pathlib import Path

import nonet


class Killer(nonet.Reward):
    """Ends the worker `whom` once, in step 2, while the rewards score."""

    def __init__(self, mark: str, whom: str):
        self.mark, self.whom = Path(mark), whom

    def score(self, r):
        import ray

        if r.step == 2 and not self.mark.exists():
            self.mark.touch()
            for found in ray.util.list_named_actors(all_namespaces=True):
                if found["name"].endswith("/" + self.whom):
                    ray.kill(ray.get_actor(found["name"], found["namespace"]))
        return r.item < 20
'''


@pytest.fixture(scope="module")
def ring(ray_local, tmp_path_factory) -> Path:
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    (folder / "rewards" / "killer.py").write_text(KILLER)
    return folder


def run(folder, name, *changes):
    """Run a scenario, and return its report and what it printed."""
    out = io.StringIO()
    made = api.scenario(folder / "ring.yaml", list(changes))
    return api.run(made, run_dir=folder / name, panel=Panel(out, live=False)), out


def commits(folder: Path) -> dict[str, dict[str, str]]:
    found = (folder / "checkpoints").glob("step-*/manifest.json")
    return {path.parent.name: read_manifest(path.parent).files for path in found}


def killer(folder: Path, name: str) -> str:
    own = f"{{use: 'rewards/killer.py:Killer', mark: {folder / name}.mark, whom: trainer-0}}"
    return f"stages.rl.rewards={{hit: {{}}, own: {own}}}"


def test_a_trainer_killed_while_it_is_offloaded_is_replaced_and_the_run_ends_the_same(ring):
    """In a stage of its own roles: the run goes on in it, with its groups."""
    own = (SMALL, "roles={trainer: {pool: small}}", "stages.rl.roles={rollout: {collocate: trainer}}")
    (ring / "calm.mark").touch()
    calm, calm_out = run(ring, "calm", *own, killer(ring, "calm"))
    rough, out = run(ring, "rough", *own, killer(ring, "rough"))
    assert (ring / "rough.mark").exists()
    assert "continuing from its newest checkpoint" in out.getvalue()
    assert "going on" not in calm_out.getvalue()
    assert rough.report["stages"] == calm.report["stages"]
    assert rough.report["rewards"] == calm.report["rewards"]
    assert commits(rough.folder.path) == commits(calm.folder.path)


def test_what_a_fused_trainer_alone_holds_takes_turns_with_the_rollout_bit_for_bit(ring, monkeypatch):
    def by_hand(name: str) -> tuple[list[dict], dict]:
        made = api.scenario(ring / "ring.yaml", []).scenario
        with nonet.Session(made, folder=ring, run=RunFolder(ring / name)) as s:
            records = []
            for step, prompts in s.iterate_prompts("rl"):
                beams = s.rollout.generate(prompts)
                records.append(s.trainer.update(s.stage, step, beams, s.reward.score(beams)))
                s.publish()
                s.commit(step)
            return [
                {k: v for k, v in r.items() if k not in MEASURED} for r in records
            ], s.groups.offloader.list_counts()

    plain, none = by_hand("fused")
    real = sessions.plan_live

    def tight(scenario):
        made = real(scenario)
        from nonet.controller.plan.memory_ledger import LedgerLine

        lines = [
            LedgerLine("rl", phase, "trainer", "CPU", {"trainer.weights": 1}, 0, away)
            for phase, away in (
                ("rollout", ("trainer/trainer",)),
                ("score", ("trainer/trainer",)),
                ("update", ()),
                ("publish", ()),
            )
        ]
        return replace(made, ledger=replace(made.ledger, lines=(*made.ledger.lines, *lines)))

    monkeypatch.setattr(sessions, "plan_live", tight)
    turned, moved = by_hand("fused-turns")
    assert none == {}
    assert turned == plain
    offloads = moved["trainer/trainer"]["offload"]
    assert offloads == 1 + 4 + 1, (
        "for the first beams, after every publish, and after the commit that goes on"
    )
    assert moved["trainer/trainer"]["bytes"] > 8 * 3e6
    assert commits(ring / "fused-turns") == commits(ring / "fused")


def test_two_trainers_then_one_with_a_rollout_apart_ends_as_a_run_resumed_with_these_roles(ring):
    """World size is free between stages: what pretrain of two trainers committed, one trainer goes on from, to the bit."""
    changed, _ = run(ring, "two-one", f"roles={TWO}", f"stages.rl.roles={ONE}")
    rebound = [r for r in read_journal(changed.folder.journal) if "rebound" in r]
    assert [(r["rebound"], r["starts"]) for r in rebound] == [("rl", {"trainer": 1, "rollout": 1})]
    path, manifest = Checkpoints(changed.folder.checkpoints).find_newest()
    assert manifest.participants == {"trainer": 1, "embedding": 1}
    start = read_manifest(Checkpoints(changed.folder.checkpoints).find_stage_end("finetune"))
    assert start.participants == {"trainer": 2, "embedding": 2}

    shutil.copytree(changed.folder.path, ring / "resumed")
    one = api.scenario(ring / "ring.yaml", [f"roles={ONE}"]).scenario
    text = yaml.dump(to_document(one))
    (ring / "resumed" / "scenario.yaml").write_text(text)
    Checkpoints(ring / "resumed" / "checkpoints").delete_after(start.step)
    for file in (ring / "resumed" / "checkpoints").glob("step-*/manifest.json"):
        body = json.loads(file.read_text())
        body["scenario"] = hashlib.sha256(text.encode()).hexdigest()
        file.write_text(json.dumps(body))
    for file in ("report.json", "outcome.json"):
        (ring / "resumed" / file).unlink(missing_ok=True)
    resumed = api.resume(ring / "resumed", panel=Panel(io.StringIO(), live=False))
    assert commits(resumed.folder.path)[path.name] == manifest.files
    assert resumed.report["stages"] == changed.report["stages"]
    assert resumed.report["rewards"] == changed.report["rewards"]


def test_a_run_stopped_in_a_stage_of_its_own_roles_resumes_in_it_and_roles_come_back_after_it(ring):
    steps = ("stages.finetune.epochs=3", f"stages.finetune.roles={ONE}")
    calm, _ = run(ring, "back", *steps)
    assert [r["rebound"] for r in read_journal(calm.folder.journal) if "rebound" in r] == ["finetune", "rl"]
    made = api.scenario(ring / "ring.yaml", list(steps)).scenario
    stopped = RunFolder(ring / "back-stopped")
    with nonet.Session(made, folder=ring, run=stopped) as s:
        for name, last in (("pretrain", 18), ("finetune", 7)):
            stage = s.stages[name]
            for step in range(s.begin(name), last):
                s.trainer.train(stage, step, step + 1)
                s.commit(step)
    with nonet.Session(made, folder=ring, run=stopped, resume=True) as s:
        assert {g.name for g in s.groups.binding.groups} >= {"trainer", "rollout"}
        assert (s.restored.stage, s.restored.stage_step) == ("finetune", 6)
        stage = s.stages["finetune"]
        for step in range(s.begin("finetune"), stage.steps):
            s.trainer.train(stage, step, step + 1)
            s.commit(step)
    end = Checkpoints(stopped.checkpoints).find_stage_end("finetune")
    assert read_manifest(end).files == commits(calm.folder.path)[end.name]


def test_a_rollout_that_moves_to_an_npu_for_rl_gives_the_bits_of_the_cpu(tmp_path):
    folder = make_ring(tmp_path)
    (folder / "counts").mkdir()
    path = f"{HERE.parent / 'npu_standin'}:${{PYTHONPATH}}"
    env = f"{{vars: {{PYTHONPATH: '{path}', NONET_NPU_COUNTS: {folder / 'counts'}}}}}"
    found = []
    for name, pool in (("host", "{}"), ("npu", f"{{device: npu, env: {env}}}")):
        roles = "stages.rl.roles={rollout: {pool: x, workers: 2}, trainer: {pool: cpu}}"
        arguments = [str(folder), name, '{"NPU": 2}', f"pools={{x: {pool}, cpu: {{}}}}", roles]
        done = subprocess.run(
            [sys.executable, str(HERE / "ring_process.py"), *arguments],
            capture_output=True,
            text=True,
            timeout=400,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
            | {"NONET_ATTENTION": "reference"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append((commits(folder / name), (folder / name / "results" / "rl.json").read_text()))
    assert found[0] == found[1]
    assert len(list((folder / "counts").glob("*.json"))) == 2, "both rollouts did their sums on the npu"
