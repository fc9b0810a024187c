"""The pipeline against an evaluator that answers when it is told to: training waits for no ranking, and none is lost."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nonet.controller import pipeline
from nonet.controller.pipeline import Pipeline
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.session.bound_run import BoundRun
from nonet.controller.session.start_notes import make_evaluation_notes
from nonet.controller.setup.worker_setup import make_baseline_options
from nonet.deadlines import DEFAULTS
from nonet.errors import WorkerLost

SCENARIO = load_scenario("quickstart", ["stages={pretrain: {epochs: 1}, finetune: {epochs: 1}}"])[0]
BASELINES = list(make_baseline_options(SCENARIO))


class Future:
    def __init__(self, evaluator: Evaluator, name: str):
        self._evaluator, self.name = evaluator, name

    def done(self) -> bool:
        return self.name in self._evaluator.answered

    def get(self, timeout_s: float) -> Any:
        if not self.done():
            self._evaluator.log.append(f"waited for {self.name}")
            self._evaluator.answer(self.name)
        return self._evaluator.answered[self.name]


class Evaluator:
    """Answers in the order it was asked: an answer waits for all before it."""

    def __init__(self, run: RunFolder):
        self.run, self.log = run, []
        self.queue: list[str] = []
        self.answered: dict[str, Any] = {}
        self.stores = True
        self.parts: dict[str, int] = {}  # how often a baseline says that it is fitting

    def _ask(self, name: str) -> Future:
        self.answered.pop(name, None)
        self.queue.append(name)
        self.log.append(f"asked for {name}")
        return Future(self, name)

    def answer(self, upto: str) -> None:
        while upto in self.queue:
            name = self.queue.pop(0)
            self.answered[name] = [] if name == "shown" else {"detail": {}, "shown": [], "of": name}
            if self.parts.get(name):
                self.parts[name] -= 1
                self.answered[name] = {"fitting": 1}
                continue
            if self.stores:
                (self.run.results / f"{name}.npz").touch()

    def list_shown_users(self) -> Future:
        return self._ask("shown")

    def evaluate_baseline(self, name: str) -> Future:
        return self._ask(name)

    def evaluate(self, name: str, folder: str) -> Future:
        return self._ask(name)

    def compare(self, pairs: Any) -> Future:
        return self._ask("compare")


class Session:
    """As much of a session as a pipeline uses; no process."""

    def __init__(self, run: RunFolder):
        self.run, self.scenario, self.seconds, self.restored = run, SCENARIO, {}, None
        self.evaluator = Evaluator(run)
        self.stages = dict.fromkeys(SCENARIO.stages)
        held_out = {"rl": 1, "valid": 1, "test": 1}
        counts = {"notice": "", "users": 1, "items": 1, "events": 1, "held_out": held_out}
        self.facts = {"data": counts, "tokenizer": {}}
        nothing = lambda *_, **__: {}  # noqa: E731
        self.checkpoint_log = SimpleNamespace(
            find_stage_end=lambda stage: f"end of {stage}",
            store_changes=nothing,
            check_writer=str,
            has_file=Path.exists,
        )
        self.trace = SimpleNamespace(
            record_span=lambda *_, **__: contextlib.nullcontext(),
            collect_due=nothing,
            collect=nothing,
            compute_idle_shares=nothing,
            count_returned_bytes=nothing,
        )
        group = SimpleNamespace(name="evaluator", roles=("evaluator",))
        binding = SimpleNamespace(groups=[group], list_dead_workers=list)
        self.processes = SimpleNamespace(
            run=run, binding=binding, pop_warning=lambda: self.warnings.pop() if self.warnings else ""
        )
        self.groups = SimpleNamespace(
            hosts={},
            processes=self.processes,
            binding=binding,
            offloader=SimpleNamespace(list_counts=nothing),
            find_due_change=lambda name: self.changes.get(name),
            notes=(),
        )
        self.scaling = SimpleNamespace(poll=lambda: False, is_due=False, refuse_waiting=nothing)
        self.trainer = SimpleNamespace(count_published=nothing)
        self.plan, self.size, self.deadlines = None, nothing, DEFAULTS
        self.changes: dict[str, Any] = {}
        self.warnings: list[str] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    require_stored = BoundRun.require_stored

    def prepare(self, name: str) -> None:
        self.evaluator.log.append(f"rebound for {name}")


class Recorder:
    def __init__(self, log: list[str]):
        self._log = log

    def add_event(self, kind: str, **body: Any) -> None:
        if kind == "result":
            self._log.append(f"showed {body['name']}")
        if kind == "note" and body["text"].startswith("warning"):
            self._log.append(body["text"])

    def record_metrics(self, *_: Any, **__: Any) -> None:
        pass

    def flush_trackers(self) -> None:
        pass

    def get_tracking(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Make a pipeline whose stages do what `work` says of them: name -> a function of (session, tick)."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(pipeline, "try_rewards", lambda session: None)

    def make(work: dict[str, Any]) -> tuple[Pipeline, Session]:
        session = Session(RunFolder(tmp_path))

        def run_stage(session: Session, name: str, recorder: Any, tick: Any) -> bool:
            session.evaluator.log.append(f"{name} begins")
            goes_on = work.get(name, lambda *_: True)(session, tick)
            session.evaluator.log.append(f"{name} ends")
            return goes_on is not False

        monkeypatch.setattr(pipeline, "run_stage", run_stage)
        monkeypatch.setattr(
            pipeline,
            "make_report",
            lambda run, *_: session.evaluator.log.append(f"report of {_results(run)}"),
        )
        return Pipeline(session, Recorder(session.evaluator.log), lambda: False), session  # type: ignore[arg-type]

    return make


def _results(run: RunFolder) -> list[str]:
    return sorted(
        path.stem for path in run.results.glob("*.npz") if run.read_json(f"results/{path.stem}.json")
    )


def test_training_begins_while_no_baseline_is_ranked_and_shows_each_when_it_is(made):
    def pretrain(session: Session, tick: Any) -> None:
        tick()
        session.evaluator.answer(BASELINES[0])
        tick()

    runner, session = made({"pretrain": pretrain})
    assert runner.run()
    log = session.evaluator.log
    asked = [f"asked for {name}" for name in ("shown", *BASELINES)]
    assert log[: len(asked)] == asked, (
        "who shows a result must not wait behind the rankings for the users to show"
    )
    assert log[len(asked) :][:3] == ["pretrain begins", f"showed {BASELINES[0]}", "pretrain ends"]
    every = [*BASELINES, "pretrain", "finetune"]
    assert [line.removeprefix("showed ") for line in log if line.startswith("showed")] == every
    assert log[-1] == f"report of {sorted(every)}", "the report comes after all of them"


def test_a_run_that_stops_and_goes_on_loses_and_repeats_no_ranking(made):
    def stopped(session: Session, tick: Any) -> bool:
        session.evaluator.answer(BASELINES[0])
        return False

    runner, session = made({"pretrain": stopped})
    assert not runner.run()
    assert f"showed {BASELINES[0]}" in session.evaluator.log, "it was there when the run stopped"
    assert not [line for line in session.evaluator.log if line.startswith("waited")], "a stop waits for none"
    runner, session = made({})
    assert runner.run()
    again = [line for line in session.evaluator.log if line.startswith("asked for")]
    assert f"asked for {BASELINES[0]}" not in again
    assert [again.count(f"asked for {name}") for name in BASELINES[1:]] == [1] * len(BASELINES[1:])
    assert f"showed {BASELINES[0]}" in session.evaluator.log, "what was found before is shown as it is"


def test_a_baseline_that_is_fitted_in_parts_is_asked_again_behind_what_others_asked(made):
    runner, session = made({})
    session.evaluator.parts = {BASELINES[0]: 2}
    assert runner.run()
    log = session.evaluator.log
    assert [log.count(f"asked for {name}") for name in BASELINES] == [3, *[1] * len(BASELINES[1:])]
    assert log.count(f"showed {BASELINES[0]}") == 1
    assert log.index("showed pretrain") < log.index(f"showed {BASELINES[0]}")


def test_a_ranking_whose_file_was_lost_with_its_worker_is_no_result(made):
    runner, session = made({})
    session.groups.binding.list_dead_workers = lambda: ["evaluator-0"]
    session.evaluator.stores = False
    with pytest.raises(WorkerLost, match=rf"results/{BASELINES[0]}.npz was lost with evaluator-0"):
        runner.run()
    assert not (session.run.results / f"{BASELINES[0]}.json").exists()


def test_failed_heartbeats_are_told_between_steps(made):
    runner, session = made({"pretrain": lambda session, tick: bool(tick()) or None})
    session.warnings = ["warning: 2 failed heartbeats: rollout-0 did not answer (2)"]
    assert runner.run()
    assert [line for line in session.evaluator.log if line.startswith("warning")] == [
        "warning: 2 failed heartbeats: rollout-0 did not answer (2)"
    ]


def test_an_evaluator_that_moves_answers_first(made):
    runner, session = made({})
    session.changes["finetune"] = SimpleNamespace(stops=("evaluator",), describe=lambda: "moved")
    assert runner.run()
    log = session.evaluator.log
    before = log[: log.index("rebound for finetune")]
    for name in (*BASELINES, "pretrain"):
        assert f"showed {name}" in before


SMALL = {"users": 900, "users_only_trained": 100, "items": 3500}
LARGE = {"users": 900_000, "users_only_trained": 100_000, "items": 60_000}


@pytest.mark.parametrize(
    ("changes", "data", "said"),
    [
        ([], SMALL, []),
        ([], LARGE, ["20,000 of 800,000 tested users", "beam alone among 60,000 items"]),
        (["evaluate.users=all", "evaluate.exhaustive='on'"], LARGE, []),
        (["evaluate.users=500", "evaluate.exhaustive='off'"], SMALL, ["500 of 800", "beam alone"]),
    ],
)
def test_drawn_users_and_beams_alone_are_told(changes, data, said):
    scenario, _ = load_scenario("quickstart", changes)
    notes = list(make_evaluation_notes(scenario, data))
    assert len(notes) == len(said)
    assert all(words in note for words, note in zip(said, notes, strict=True))


@pytest.mark.parametrize(("kept", "asked"), [(1, True), (2, False), (0, False)])
def test_a_control_that_was_trained_and_not_ranked_is_ranked_by_a_resume_from_a_later_stage(
    made, kept, asked
):
    pipeline, session = made({})
    session.restored = SimpleNamespace(stage="finetune", stage_step=5, last=False)
    for step in range(kept):  # one: the best; more: training did not end
        (session.run.path / "controls" / "pretrain_control" / f"step-{step}").mkdir(parents=True)
    assert pipeline.run()
    assert ("asked for pretrain_control" in session.evaluator.log) == asked
    assert ("showed pretrain_control" in session.evaluator.log) == asked


def test_a_control_whose_ranking_was_cut_short_is_ranked_again_from_its_own_checkpoint(made, monkeypatch):
    runner, session = made({})
    session.scenario = SimpleNamespace(stages={"rl": SimpleNamespace(kind=SimpleNamespace(rolls_out=True))})
    session.load = lambda *_: None
    control = SimpleNamespace(setup=SimpleNamespace(name="rl_control"))
    monkeypatch.setattr(pipeline, "make_controls", lambda session, name: [control])
    monkeypatch.setattr(pipeline, "train_control", lambda *_: pytest.fail("it was trained before"))
    folders = []
    monkeypatch.setattr(session.evaluator, "evaluate", lambda name, folder: folders.append((name, folder)))
    best = session.run.path / "controls" / "rl_control" / "step-000004"
    best.mkdir(parents=True)
    (session.run.results / "rl_control.npz").touch()  # the process ended before the JSON file was written
    assert runner._train_controls("rl")
    assert folders == [("rl_control", str(best))]


def test_copies_of_events_and_shared_codes_are_warned_of_when_the_run_begins(made):
    runner, session = made({})
    session.facts["data"] |= {"events": 3200, "items": 60, "duplicates": 1600}
    session.facts["tokenizer"] = {"used": [8], "codes": [8], "largest_collision": 50}
    assert runner.run()
    said = [text for text in session.evaluator.log if text.startswith("warning: ")]
    assert ["1,600 of 3,200 events are duplicates" in said[0], "50 of 60 items" in said[1]] == [True, True]
