"""Runs whose number of workers changes within stages, by `nonet scale`, against runs that were stopped and restarted."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests_ring import make_ring

from nonet import yaml
from nonet.controller.pipeline import Pipeline
from nonet.controller.record import SCALE, CommandQueue, Recorder
from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.session import Session

pytestmark = pytest.mark.timeout(900)

Place = tuple[str, int]  # a stage, and a number of applied steps


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Plan one thread for every number of workers, because some CPUs round matrix products by the number of threads."""
    monkeypatch.setattr("nonet.controller.plan.placement.MOST_THREADS", 1)


@pytest.fixture(scope="module")
def ring(ray_local, tmp_path_factory) -> Path:
    return make_ring(tmp_path_factory.mktemp("ring"))


def drive(
    folder: Path,
    name: str,
    *changes: str,
    scale: dict[Place, dict[str, int]] | None = None,
    stop: Place | None = None,
    resume: bool = False,
) -> RunFolder:
    """Run the ring, or resume it, ask for other numbers of workers at some places, and stop at a place."""
    run, waiting = RunFolder(folder / name), dict(scale or {})
    run.path.mkdir(exist_ok=True)
    scenario = run.scenario if resume else folder / "ring.yaml"
    session = Session(scenario, folder=folder, run=run, changes=list(changes), resume=resume, life_s=60)

    def poll() -> bool:
        place = (session.stage.name, session.applied_steps)
        if workers := waiting.pop(place, None):
            CommandQueue(run).ask(verb=SCALE, name=str(workers), workers=workers)
        return place == stop

    recorder = Recorder(run.path, run.id)
    ended = Pipeline(session, recorder, poll).run()
    recorder.close()
    assert ended is (stop is None)
    assert not waiting, "every place was reached"
    return run


def change_workers(run: RunFolder, **workers_by_role: int) -> None:
    """Change the number of workers in the scenario of a run that was stopped."""
    document: Any = yaml.parse(run.scenario.read_text(), "scenario")
    for role, workers in workers_by_role.items():
        document["roles"][role]["workers"] = workers
    text = yaml.dump(document)
    run.scenario.write_text(text)
    for file in run.checkpoints.glob("step-*/manifest.json"):
        manifest = json.loads(file.read_text())
        file.write_text(json.dumps(manifest | {"scenario": hashlib.sha256(text.encode()).hexdigest()}))


def list_checkpoints(run: RunFolder) -> dict[str, tuple[dict[str, int], dict[str, str]]]:
    """Return the number of ranks and the SHA-256 of every file of each checkpoint, by its name."""
    manifests = {path.name: read_manifest(path) for path in run.checkpoints.glob("step-*")}
    return {name: (manifest.participants, manifest.files) for name, manifest in manifests.items()}


def list_ranks(run: RunFolder) -> dict[str, bytes]:
    """Return the content of the files with the rank of every held-out item, by subject."""
    return {path.name: path.read_bytes() for path in run.results.glob("*.npz")}


def count_applied(run: RunFolder) -> Counter[int]:
    """Return how often each step was applied."""
    return Counter(record["applied"] for record in read_journal(run.journal) if "applied" in record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [("own", ""), ("zero", "engine: {use: deepspeed, zero: 2}"), ("fsdp2", "engine: {use: fsdp2}")],
)
def test_trainers_scaled_within_stages_end_as_a_run_that_was_stopped_and_restarted_there(ring, name, engine):
    changes = (f"roles={{trainer: {{workers: 2, {engine}}}}}", "checkpoint={every: 3, keep: {last: 20}}")
    first, second = ("pretrain", 6), ("rl", 2)
    scaled = drive(ring, f"{name}-scaled", *changes, scale={first: {"trainer": 1}, second: {"trainer": 3}})
    restarted = drive(ring, f"{name}-restarted", *changes, stop=first)
    change_workers(restarted, trainer=1)
    drive(ring, restarted.id, stop=second, resume=True)
    change_workers(restarted, trainer=3)
    drive(ring, restarted.id, resume=True)
    found = list_checkpoints(scaled)
    assert found == list_checkpoints(restarted)
    trainers = [participants["trainer"] for _, (participants, _) in sorted(found.items())]
    assert trainers == sorted(trainers, key=[2, 1, 3].index)
    assert set(trainers) == {1, 2, 3}
    assert list_ranks(scaled) == list_ranks(restarted)
    assert count_applied(scaled) == Counter(range(len(count_applied(scaled)))), "each step was applied once"


@pytest.mark.slow
def test_a_resumed_run_changes_its_workers_again_at_the_same_steps(ring):
    changes = ("roles={trainer: {workers: 2}}", "checkpoint={every: 3, keep: {last: 20}}")
    scale = {("pretrain", 6): {"trainer": 1}, ("rl", 2): {"trainer": 2, "hit": 2}}
    whole = drive(ring, "whole", *changes, scale=scale)
    again = RunFolder(ring / "again")
    shutil.copytree(whole.path, again.path)
    Checkpoints(again.checkpoints).delete_after(18)  # before the second command, after the first one
    (again.path / "report.json").unlink()
    drive(ring, "again", resume=True)
    assert list_checkpoints(again) == list_checkpoints(whole)
    assert list_ranks(again) == list_ranks(whole)
    rebound = [record for record in read_journal(again.journal) if "rebound" in record]
    assert [record["rebound"] for record in rebound] == ["pretrain", "rl"]


def test_rollouts_and_rewards_change_between_two_rl_steps_and_no_bit_differs(ring):
    changes = ("roles={rollout: {workers: 1}, embedding: {fuse: trainer}}", "stages.rl.control=false")
    calm = drive(ring, "calm", *changes)
    scale = {
        ("pretrain", 3): {"trainer": 500},
        ("pretrain", 6): {"trainer": 1},
        ("rl", 1): {"rollout": 2, "own": 2},
        ("rl", 3): {"rollout": 1},
    }
    scaled = drive(ring, "scaled", *changes, scale=scale)
    refused, same, *taken = CommandQueue(scaled).list_taken()
    assert "needs 125 CPU" in refused["refused"]
    assert same["text"] == "nothing to change: trainer to 1 already"
    assert [(command["stage"], command["step"]) for command in taken] == [("rl", 1), ("rl", 3)]
    assert taken[0]["text"].startswith("scaled rollout to 2, own to 2, from step 1 of rl on")
    starts = [record["starts"] for record in read_journal(scaled.journal) if "rebound" in record]
    assert starts == [{"rollout": 2, "rl.reward.own": 2}, {"rollout": 1}]
    assert list_ranks(scaled) == list_ranks(calm)
    report = json.loads((scaled.path / "report.json").read_text())
    assert [command["verb"] for command in report["commands"]] == ["scale"] * 4


@pytest.mark.slow
def test_overlapped_rl_scales_its_rollouts_and_trains_every_group_once(ring):
    changes = (
        "roles={rollout: {workers: 1}, embedding: {workers: 1}}",
        "stages.rl.rollout={width: 4, staleness: 1}",
        "stages.rl.steps=6",
    )
    run = drive(ring, "overlapped", *changes, scale={("rl", 2): {"rollout": 3}, ("rl", 4): {"trainer": 2}})
    log = [record for record in read_journal(run.journal) if "group" in record]
    committed = Counter(n for record in log if record["group"] == "committed" for n in record["numbers"])
    assert committed == Counter(range(log[0]["of"] * 6))
    begun = Counter(record["number"] for record in log if record["group"] == "begun")
    assert begun == committed + Counter(r["number"] for r in log if r["group"] == "aborted")
