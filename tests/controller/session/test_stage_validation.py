"""Stages that are validated while they train: when they stop, which commit goes on, and that no delay and no kill changes it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from participant import written
from stand_ins import Now, Recorder, Trace

from nonet.controller.groups.handles import TrainerHandle
from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.controller.record.checkpoint_log import CheckpointLog
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.session.bound_run import BoundRun
from nonet.controller.session.stage_run import StageRun
from nonet.controller.stages._loops import run_stage
from nonet.errors import WorkerLost
from nonet.workers.roles.settings import Schedule, StageSetup, make_ranks_name

STEPS = 12
FALLS = {2: 0.1, 4: 0.3, 6: 0.2, 8: 0.25, 10: 0.2, 12: 0.5}  # best at 4; with patience 2 the stage ends at 10


class KilledError(Exception):
    """The run ends here."""


class Late:
    """An answer that is made when it is taken, and said to be there after so many looks."""

    def __init__(self, make: Any, looks: int):
        self._make, self._looks = make, looks

    def done(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def get(self, timeout_s: float | None = None) -> Any:
        return self._make()


class Trainer:
    """Weights are the steps that were applied to them."""

    def __init__(self, world: World):
        self.world, self.weights, self.hosts = world, [], SimpleNamespace(actors=[])

    world_size = 1

    def begin(self, stage: StageSetup) -> Now:
        self.weights.append(f"{stage.name} begins at {stage.first}")
        return Now()

    def train(self, stage: StageSetup, start: int, stop: int) -> Now:
        if self.world.kill_before is not None and start >= self.world.kill_before:
            raise KilledError
        self.weights += [f"{stage.name} {step}" for step in range(start, stop)]
        records = [{"loss": 1.0, "events": 1.0, "lr": 1.0, "norm": 1.0} for _ in range(start, stop)]
        return Now(records)

    def save(self, folder: str, wait: bool) -> Now:
        top = Path(folder)
        (top / "dense").mkdir()
        (top / "dense" / "weights.json").write_text(json.dumps(self.weights))
        self._saved = written(top)
        return Now([self._saved if wait else None])

    def poll_save(self, wait: bool) -> Any:
        return Late(lambda: [self._saved], 0 if wait else self.world.delay)


class World:
    """scores: what validation finds after a step; delay: looks until an answer is there; kill_before: a step that is not done.

    undefined: the metrics that are null in every validation.
    """

    def __init__(
        self,
        folder: Path,
        scores=FALLS,
        *,
        delay=0,
        kill_before=None,
        resume=False,
        valid=1,
        keep_last=1,
        undefined=(),
        **keys: Any,
    ):
        self.run, self.scores, self.delay, self.kill_before = RunFolder(folder), scores, delay, kill_before
        self.asked: list[int] = []
        self.undefined = undefined
        folder.mkdir(exist_ok=True)
        body = {
            "name": "validated",
            "data": {"interactions": "events.parquet", "split": {"use": "leave_last_out", "valid": valid}},
            "sparse": {"tables": {"item": {"dim": 8}}},
            "stages": {
                "pretrain": {"epochs": 1, "stop": keys.pop("stop", {"patience": 2})},
                "finetune": {"epochs": 1, "stop": "off"},
            },
            "evaluate": {"metrics": ["ndcg@10"], **({"every": 2} if valid else {})},
            "checkpoint": {"every": 3, "keep": {"last": keep_last, **keys}},
        }
        scenario = make_scenario(body)
        rate = Schedule(peak=1e-3)
        stages = {
            "pretrain": StageSetup("pretrain", first=0, steps=STEPS, users=4, lr=rate, base=1e-3),
            "finetune": StageSetup("finetune", first=STEPS, steps=4, users=4, lr=rate, base=1e-3),
        }
        self.trainer = Trainer(self)
        self.trainer.world = self
        group = _Group(self.trainer)
        shards = _Shards(group.hosts)
        log = CheckpointLog(self.run, "s", keep_last)
        processes = SimpleNamespace(
            run=self.run,
            scenario=scenario,
            plan=None,
            deadlines=scenario.deadlines,
            binding=SimpleNamespace(list_dead_workers=lambda: self.dead),
        )
        groups = SimpleNamespace(
            trainer=TrainerHandle(group, shards),  # type: ignore[arg-type]
            evaluator=SimpleNamespace(validate=self._validate),
            find_due_change=lambda name: None,
            load=self._load,
        )
        self.recorder, self.dead = Recorder(), list[str]()
        self.resumed_from = log.find_resume_checkpoint() if resume else None
        bound_run = BoundRun(
            processes,  # type: ignore[arg-type]
            log,
            Trace(),  # type: ignore[arg-type]
            None,
            self.resumed_from,
            lambda text: None,
            lambda *_: None,
        )
        facts = {"artifacts": {}, "data": {"held_out": {"valid": valid}}}
        self.session = StageRun(bound_run, facts, stages, groups)  # type: ignore[arg-type]

    def play(self, stage: str = "pretrain", stopped=lambda: False) -> World:
        if self.resumed_from:
            self.session.restore()
            self.resumed_from = None
        assert run_stage(self.session, stage, self.recorder, stopped) in (True, False)
        return self

    @property
    def outcome(self) -> dict[str, Any]:
        """What must not depend on how fast anything was: history, end, weights, commits."""
        found = self.run.read_json("results/pretrain.validation.json")
        return {"found": found, "weights": self.trainer.weights, "commits": self.commits}

    @property
    def commits(self) -> dict[str, bool]:
        """Folder -> whether it ends its stage."""
        folders = sorted(path.parent for path in self.run.checkpoints.glob("step-*/manifest.json"))
        return {folder.name: read_manifest(folder).last for folder in folders}

    def end(self, stage: str = "pretrain") -> list[str]:
        """Return the weights that a stage ended with."""
        return _weights(Checkpoints(self.run.checkpoints).find_stage_end(stage))

    def _validate(self, name: str, folder: str) -> Late:
        manifest = read_manifest(Path(folder))
        self.asked.append(manifest.stage_step)

        def answer() -> dict[str, Any]:
            assert _weights(Path(folder)), "it is there until it is validated"
            score = self.scores[manifest.stage_step]
            values = {"ndcg@10": score, "nats": 10 * score} | dict.fromkeys(self.undefined)
            self.run.results.mkdir(exist_ok=True)
            if not self.dead:
                (self.run.results / make_ranks_name(name, Path(folder).name)).touch()
            return {"metrics": {"ndcg@10": values["ndcg@10"]}, "nats": values["nats"], "events": 1}

        return Late(answer, self.delay)

    def _load(self, path: Path, going_on: StageSetup | None) -> None:
        self.trainer.weights = _weights(path)


class _Group:
    """A group of one rank."""

    world = 1

    def __init__(self, trainer: Trainer):
        self._trainer, self.hosts = trainer, trainer.hosts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class _Shards:
    """Shards whose rows nobody asks for."""

    world = 1

    def __init__(self, hosts: Any):
        self.hosts = hosts

    def __getattr__(self, name: str) -> Any:
        answers = {"save": [{}], "poll_save": [{}], "pop_counts": [], "count_replica_bytes": [0]}
        return lambda *_: Now(answers.get(name))


def _weights(folder: Path) -> list[str]:
    return json.loads((folder / "dense" / "weights.json").read_text())


def steps(upto: int) -> list[str]:
    return ["pretrain begins at 0", *(f"pretrain {step}" for step in range(upto))]


def test_a_stage_whose_validation_falls_stops_after_its_patience_and_its_best_commit_goes_on(tmp_path):
    world = World(tmp_path).play()
    assert world.asked == [2, 4, 6, 8, 10]
    assert world.end() == world.trainer.weights == steps(4)
    assert world.commits["step-000004"], "the best one ends the stage"
    assert max(world.commits) == "step-000004", "what came after it is gone"
    end = {"metric": "ndcg@10", "best": 4, "ran": 10, "steps": 12}
    assert world.run.read_json("results/pretrain.validation.json")["end"] == end
    notes = [body["text"] for kind, body in world.recorder.events if kind == "note"]
    assert notes == [
        "pretrain was best at step 4 of 12 by ndcg@10 of validation (0.3000); stopped after 10; its last 6 steps are not used"
    ]


@pytest.mark.parametrize("resume", [False, True])
def test_where_the_labels_do_not_define_the_metric_the_nats_decide(tmp_path, resume):
    """The nats of `World` are ten times its score, and lower ones are better: best at 2, and no better one up to 6."""
    if resume:
        with pytest.raises(KilledError):
            World(tmp_path, undefined=("ndcg@10",), kill_before=4).play()
    world = World(tmp_path, undefined=("ndcg@10",), resume=resume).play()
    end = {"metric": "nats", "best": 2, "ran": 8, "steps": 12}
    assert world.run.read_json("results/pretrain.validation.json")["end"] == end
    assert world.end() == steps(2)
    assert "by nats of validation (1.0000)" in world.recorder.events[-1][1]["text"]
    assert all("validation ndcg@10" not in body for _, body in world.recorder.events)


def test_where_the_labels_define_nothing_a_stage_ends_with_its_last_step(tmp_path):
    world = World(tmp_path, undefined=("ndcg@10", "nats")).play()
    end = {"metric": "ndcg@10", "best": 12, "ran": 12, "steps": 12}
    assert world.run.read_json("results/pretrain.validation.json")["end"] == end
    assert world.end() == steps(12)
    text = "pretrain ended with its last step, 12 of 12: the labels of the validation events do not define ndcg@10"
    assert world.recorder.events[-1][1]["text"] == text


def test_the_next_stage_counts_its_steps_on_from_the_best_commit(tmp_path):
    world = World(tmp_path).play()
    assert world.session.stages["finetune"].first == 4
    world.scores = {2: 0.1, 4: 0.2}
    world.play("finetune")
    assert world.end("finetune") == [*steps(4), "finetune begins at 4", *(f"finetune {n}" for n in range(4))]
    assert world.commits["step-000008"]
    assert Checkpoints(world.run.checkpoints).find_newest()[1].stage == "finetune"


@pytest.mark.parametrize("delay", [1, 3, 1000])
def test_no_delay_of_evaluator_or_disk_changes_what_is_decided(tmp_path, delay):
    at_once = World(tmp_path / "at once").play().outcome
    assert World(tmp_path / "late", delay=delay).play().outcome == at_once


@pytest.mark.parametrize("delay", [0, 1000])
@pytest.mark.parametrize("kill_before", [3, 4, 6, 9])
def test_a_run_killed_between_validations_and_resumed_decides_as_one_that_was_not(
    tmp_path, kill_before, delay
):
    undisturbed = World(tmp_path / "calm").play()
    killed = World(tmp_path / "rough", delay=delay, kill_before=kill_before)
    with pytest.raises(KilledError):
        killed.play()
    if not killed.commits:
        return  # nothing to go on from
    again = World(tmp_path / "rough", resume=True).play()
    assert again.outcome["found"] == undisturbed.outcome["found"]
    assert again.end() == again.trainer.weights == undisturbed.end()


@pytest.mark.parametrize("call", ["end_stage", "delete_after", "prune"])
def test_a_run_killed_while_its_stage_ends_ends_it_the_same_way(tmp_path, monkeypatch, call):
    undisturbed = World(tmp_path / "calm").play()
    killed = World(tmp_path / "rough")
    target = (
        killed.session.checkpoint_log if call == "end_stage" else killed.session.checkpoint_log.checkpoints
    )
    real = getattr(target, call)

    def dies(*arguments):
        ends_stage = arguments[1:] == ({4},)  # the best step alone is kept
        if call == "prune" and not ends_stage:
            return real(*arguments)
        raise KilledError

    monkeypatch.setattr(target, call, dies)
    with pytest.raises(KilledError):
        killed.play()
    again = World(tmp_path / "rough", resume=True)
    again.session.restore()
    if not again.session.restored.last:
        again.play()
    assert again.end() == again.trainer.weights == undisturbed.end()
    assert again.outcome["found"] == undisturbed.outcome["found"]
    assert again.session.stages["finetune"].first == 4


@pytest.mark.parametrize(("lost", "asked_again"), [(4, [4, 6]), (2, [])])
def test_checkpoints_whose_ranks_were_lost_are_validated_again_if_the_run_has_them_all(
    tmp_path, lost, asked_again
):
    undisturbed = World(tmp_path / "calm").play()
    killed = World(tmp_path / "rough", kill_before=7)
    with pytest.raises(KilledError):
        killed.play()
    (tmp_path / "rough" / "results" / f"pretrain.valid.step-{lost:06d}.npz").unlink()
    again = World(tmp_path / "rough", resume=True).play()
    assert [step for step in again.asked if step < 8] == asked_again
    assert again.outcome["found"] == undisturbed.outcome["found"]
    assert again.end() == undisturbed.end()


def test_a_validation_whose_ranks_died_with_their_worker_is_not_recorded(tmp_path):
    world = World(tmp_path)
    world.dead = ["evaluator-0"]
    with pytest.raises(WorkerLost, match=r"results/pretrain.valid.step-000002.npz was lost with evaluator-0"):
        world.play()
    assert not (world.run.read_json("results/pretrain.validation.json") or {"history": []})["history"]


def test_a_stop_asked_for_at_a_point_is_gone_on_from_as_if_it_was_not(tmp_path):
    undisturbed = World(tmp_path / "calm").play()
    asked = iter([False, False, False, True])
    World(tmp_path / "rough", delay=1000).play(stopped=lambda: next(asked))
    again = World(tmp_path / "rough", resume=True).play()
    assert again.outcome["found"] == undisturbed.outcome["found"]
    assert again.end() == undisturbed.end()


def test_a_resume_from_an_earlier_commit_forgets_what_was_found_later(tmp_path):
    World(tmp_path, keep_last=9).play()
    commits = Checkpoints(tmp_path / "checkpoints")
    commits.delete_after(3)
    again = World(tmp_path, resume=True, keep_last=9)
    again.session.restore()
    found = again.run.read_json("results/pretrain.validation.json")
    assert [entry["step"] for entry in found["history"]] == [2]
    assert found["end"] is None
    again.scores = {step: float(step) for step in FALLS}  # it is another run from here on
    again.play()
    assert again.end() == steps(STEPS)


def test_the_best_commit_and_those_not_validated_yet_outlive_all_that_is_kept(tmp_path):
    seen = []
    world = World(tmp_path, delay=1000, stop="off")
    applied = world.session.checkpoint_log.record_applied_step

    def noted(stage, step):
        seen.append((step + 1, {int(name[-6:]) for name in world.commits}))
        applied(stage, step)

    world.session.checkpoint_log.record_applied_step = noted
    world.play()
    for step, there in seen:
        assert step < 7 or 4 in there, "the best one of the first two points"
    assert world.end() == steps(12)


def test_without_a_patience_all_steps_run_and_the_best_still_goes_on(tmp_path):
    world = World(tmp_path, FALLS | {12: 0.3}, stop="off").play()
    assert world.asked == [2, 4, 6, 8, 10, 12]
    assert world.end() == steps(4), "of equals the earlier"


def test_less_is_better_in_nats(tmp_path):
    world = World(tmp_path, best="nats", stop="off").play()
    assert world.end() == steps(2)


def test_a_stage_that_gets_better_ends_with_its_last_commit_and_nothing_is_loaded(tmp_path):
    world = World(tmp_path, {step: step / 100 for step in FALLS})
    world.session.groups.load = None
    world.play()
    assert world.end() == steps(12)
    assert world.session.stages["finetune"].first == 12


def test_without_validation_events_all_steps_run_and_the_last_commit_ends_the_stage(tmp_path):
    world = World(tmp_path, valid=0, stop="off").play()
    assert not world.asked
    assert world.session.validation is None
    assert world.end() == steps(12)
    assert world.outcome["found"] is None


def test_a_point_whose_commit_is_gone_is_left_out(tmp_path):
    asked = iter([False, False, True])
    World(tmp_path, delay=1000, keep_last=9).play(stopped=lambda: next(asked))
    (tmp_path / "checkpoints" / "step-000002" / "manifest.json").unlink()
    again = World(tmp_path, resume=True, keep_last=9).play()
    assert 2 not in [entry["step"] for entry in again.outcome["found"]["history"]]


def test_validations_are_shown_at_the_step_they_are_of_and_recorded_once(tmp_path):
    world = World(tmp_path, delay=3).play()
    shown = [body for kind, body in world.recorder.events if kind == "step"]
    assert [body["metrics"]["valid ndcg@10"] for body in shown] == [FALLS[step] for step in (2, 4, 6, 8, 10)]


def test_a_stage_that_is_over_before_its_first_point_is_validated_at_its_end(tmp_path):
    world = World(tmp_path, {1: 0.5})
    stage = world.session.stages["pretrain"]
    world.session.stages["pretrain"] = type(stage)(
        stage.name, first=0, steps=1, users=4, lr=stage.lr, base=stage.base
    )
    world.play()
    assert world.asked == [1]
    assert world.end() == steps(1)
