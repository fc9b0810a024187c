"""The shipped stages over a session that answers at once: what they do in which order, and the numbers they show."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from stand_ins import LoopSession, Now, Recorder

from nonet.controller import pipeline as pipelines
from nonet.controller.pipeline import Pipeline
from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.stages._loops import run_stage
from nonet.deadlines import DEFAULTS
from nonet.workers.roles.settings import Schedule, StageSetup

BODY = {
    "name": "loops",
    "data": {"interactions": "events.parquet", "split": {"use": "leave_last_out", "rl": 2}},
    "sparse": {"tables": {"item": {"dim": 8}}},
    "stages": {
        "pretrain": {"epochs": 1},
        "finetune": {"epochs": 1},
        "rl": {"steps": 4, "users": 2, "rewards": {"hit": {"weight": 1.0}, "rank": {"weight": 0.25}}},
    },
    "checkpoint": {"every": 4},
}
SCENARIO = make_scenario(BODY)
PRETRAIN = StageSetup("pretrain", first=0, steps=23, users=8, lr=Schedule(peak=1e-3), base=1e-3)
RL = StageSetup(
    "rl",
    first=23,
    steps=3,
    users=2,
    lr=Schedule(peak=1e-3),
    base=1e-3,
    weights={"hit": 1.0, "rank": 0.25},
    rolls_out=True,
    phases=("update", "publish"),
)


def record(step):
    return {"loss": float(step), "events": 1.0 if step % 2 else 3.0, "lr": step / 100, "norm": 1.0 + step}


def never():
    return False


# --- supervised -------------------------------------------------------------------------------------------------------


def test_supervised_steps_run_once_each_and_calls_end_where_a_commit_is_due():
    session, recorder = LoopSession(SCENARIO, {"pretrain": PRETRAIN}, record), Recorder()
    assert run_stage(session, "pretrain", recorder, never)
    calls = [done[1:] for done in session.done if done[0] == "train"]
    assert [step for start, stop in calls for step in range(start, stop)] == list(range(23))
    assert {4, 8, 12, 16, 20, 23} <= {stop for _, stop in calls}
    assert [done[1] for done in session.done if done[0] == "commit"] == list(range(23))
    assert recorder.begun == [("pretrain", 23, 0)]
    for start, stop in calls:  # a commit follows its own steps and precedes the next
        assert session.done.index(("train", start, stop)) < session.done.index(("commit", stop - 1, False))


def test_a_call_of_several_steps_shows_the_mean_over_its_events():
    recorder = Recorder()
    run_stage(LoopSession(SCENARIO, {"pretrain": PRETRAIN}, record), "pretrain", recorder, never)
    stage, step, shown = recorder.steps[0]
    assert (stage, step) == ("pretrain", 4)
    assert shown["loss"] == pytest.approx((0 * 3 + 1 * 1 + 2 * 3 + 3 * 1) / 8)
    assert shown["events"] == 8
    assert (shown["lr"], shown["norm"]) == (0.03, 4.0)


def test_further_losses_of_a_call_and_the_scale_of_fp16_are_told():
    def more(step):
        return record(step) | {
            "align_loss": float(step),
            "scale": 8.0 / (1 + step),
            "skipped": float(step < 2),
        }

    recorder, told = Recorder(), []
    recorder.record_metrics = lambda stage, step, values, **_: told.append((step, values))
    run_stage(LoopSession(SCENARIO, {"pretrain": PRETRAIN}, more), "pretrain", recorder, never)
    assert next(values for step, values in told if step == 4 and "scale" in values) == {
        "align_loss": 1.5,
        "scale": 2.0,
        "skipped": 2.0,
    }


def test_a_stage_goes_on_from_where_its_commit_is_and_stops_when_asked():
    session = LoopSession(SCENARIO, {"pretrain": PRETRAIN}, record, at=8)
    asked = iter([False, True])
    assert not run_stage(session, "pretrain", Recorder(), lambda: next(asked))
    assert session.done[0] == ("train", 8, 12)
    assert session.done[-2:] == [("commit", 11, False), "save"]
    fresh = LoopSession(SCENARIO, {"pretrain": PRETRAIN}, record)
    assert not run_stage(fresh, "pretrain", Recorder(), lambda: True)
    assert fresh.done == ["save"]  # which writes nothing if no step was applied


def test_a_call_ends_at_the_step_where_an_earlier_part_of_the_run_changed_its_workers():
    session = LoopSession(SCENARIO, {"pretrain": PRETRAIN}, record)
    session.replay_steps = [6]
    assert run_stage(session, "pretrain", Recorder(), never)
    assert [done[1:] for done in session.done if done[0] == "train"][:3] == [(0, 4), (4, 6), (6, 8)]


# --- reinforced -------------------------------------------------------------------------------------------------------

SCORES = {"hit": np.array([[1.0, 0.0], [0.0, 0.0]]), "rank": np.array([[-1.0, -1.0], [0.0, 0.0]])}


def test_an_rl_step_updates_then_publishes_then_commits():
    session = LoopSession(SCENARIO, {"rl": RL}, scores=SCORES)
    assert run_stage(session, "rl", Recorder(), never)
    assert session.done == [
        step for n in range(3) for step in (("update", n), "publish", ("commit", n, False))
    ]


def test_what_the_trainers_say_of_a_step_is_shown_with_its_rows_a_second():
    recorder = Recorder()
    run_stage(LoopSession(SCENARIO, {"rl": RL}, scores=SCORES), "rl", recorder, never)
    stage, step, shown = recorder.steps[0]
    assert (stage, step, shown["loss"]) == ("rl", 1, 0.5)
    assert shown["rows/s"] > 0


def test_rl_that_is_stopped_commits_the_step_it_did():
    session = LoopSession(SCENARIO, {"rl": RL}, scores=SCORES, at=1)
    assert not run_stage(session, "rl", Recorder(), lambda: True)
    assert session.done == [("update", 1), "publish", ("commit", 1, False), "save"]
    last = LoopSession(SCENARIO, {"rl": RL}, scores=SCORES, at=2)
    assert run_stage(last, "rl", Recorder(), lambda: True)  # the stage is over anyway


# --- the pipeline -----------------------------------------------------------------------------------------------------


class PipelineSession:
    """A session whose stages run at once; the evaluator's answers name what was asked."""

    def __init__(self, run, restored=None):
        self.scenario, self.run, self.restored, self.seconds = SCENARIO, run, restored, {}
        self.stages, self.deadlines = dict.fromkeys(SCENARIO.stages), DEFAULTS
        self.checkpoint_log = SimpleNamespace(
            find_stage_end=lambda name: f"end of {name}",
            store_changes=lambda: None,
            check_writer=lambda: None,
        )
        self.facts = {
            "data": {
                "users": 1,
                "items": 1,
                "events": 1,
                "notice": "",
                "held_out": {"rl": 1, "valid": 1, "test": 1},
            }
        }
        self.facts["tokenizer"] = None
        self.require_stored = lambda *paths: None
        self.log, self.trace = (
            [],
            SimpleNamespace(
                record_span=self._span, collect_due=lambda hosts: None, collect=lambda hosts: None
            ),
        )
        self.trace.compute_idle_shares = self.trace.count_returned_bytes = dict
        self.groups = SimpleNamespace(
            find_due_change=lambda name: None,
            notes=(),
            processes=SimpleNamespace(pop_warning=str),
            hosts={},
            offloader=SimpleNamespace(list_counts=dict),
            binding=SimpleNamespace(groups=[]),
        )
        self.scaling = SimpleNamespace(poll=lambda: False, is_due=False, refuse_waiting=lambda reason: None)
        self.trainer = SimpleNamespace(count_published=dict)
        self.evaluator = SimpleNamespace(
            evaluate_baseline=lambda name: self._asked("baseline", name),
            evaluate=lambda name, folder: self._asked("evaluate", name, folder),
            list_shown_users=lambda: Now([]),
            compare=self._compare,
        )
        self.plan = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.log.append("closed")

    def size(self):
        return {}

    def _span(self, name, **facts):
        from contextlib import nullcontext

        return nullcontext()

    def _asked(self, *what):
        self.log.append(what)
        return Now({"detail": {}, "shown": []})

    def _compare(self, pairs):
        self.log.append(("compare", tuple(pairs)))
        return Now({})


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run the pipeline; what was done, in order, and whether it came to its end."""
    from nonet.controller.record.run_folder import RunFolder

    def played(restored=None, stop_in=None, folder="run"):
        session = PipelineSession(RunFolder(tmp_path / folder), restored)
        log = session.log
        monkeypatch.setattr(pipelines, "try_rewards", lambda session: log.append("try_rewards"))
        monkeypatch.setattr(
            pipelines, "run_stage", lambda session, name, *_: log.append(("run", name)) or name != stop_in
        )
        monkeypatch.setattr(
            pipelines,
            "probe_rewards",
            lambda session, name: log.append(("probe", name)) or {"user": np.zeros(1)},
        )
        monkeypatch.setattr(pipelines, "make_controls", lambda session, name: [])
        monkeypatch.setattr(pipelines, "rerank", lambda session, name, recorder: log.append(("rerank", name)))
        monkeypatch.setattr(pipelines, "make_report", lambda *_: log.append("report"))
        (tmp_path / folder / "results").mkdir(parents=True, exist_ok=True)
        ended = Pipeline(session, Recorder(), never).run()
        return log, ended

    return played


def test_stages_run_in_order_each_evaluated_at_its_end_and_rl_probed_around(play, tmp_path):
    log, ended = play()
    assert ended
    assert log[0] == "try_rewards"
    assert {("baseline", "popularity"), ("baseline", "transition_counter")} <= set(log)
    steps = [step for step in log if step[0] in ("run", "probe", "evaluate")]
    assert steps == [
        ("run", "pretrain"),
        ("evaluate", "pretrain", "end of pretrain"),
        ("run", "finetune"),
        ("evaluate", "finetune", "end of finetune"),
        ("probe", "rl"),
        ("run", "rl"),
        ("probe", "rl"),
        ("evaluate", "rl", "end of rl"),
    ]
    assert {path.name for path in (tmp_path / "run" / "results").glob("rl.rewards.*")} == {
        "rl.rewards.before.npz",
        "rl.rewards.after.npz",
    }
    assert log[-2:] == ["report", "closed"]
    ((_, pairs),) = [step for step in log if step[0] == "compare"]
    assert set(pairs) == {
        *(
            (stage, baseline)
            for stage in SCENARIO.stages
            for baseline in ("popularity", "transition_counter", "attribute_counter")
        ),
        ("finetune", "pretrain"),
        ("rl", "pretrain"),
        ("rl", "finetune"),
    }


def test_a_pipeline_that_is_stopped_in_a_stage_does_nothing_after_it(play):
    log, ended = play(stop_in="finetune")
    assert not ended
    assert ("run", "rl") not in log
    assert ("evaluate", "finetune", "end of finetune") not in log
    assert "report" not in log
    assert log[-1] == "closed"


def test_a_resumed_pipeline_evaluates_what_was_done_and_runs_what_was_not(play):
    under_way = SimpleNamespace(stage="finetune", stage_step=3, last=False)
    log, _ = play(under_way, folder="under way")
    assert [step for step in log if step[0] in ("run", "evaluate")][:3] == [
        ("evaluate", "pretrain", "end of pretrain"),
        ("run", "finetune"),
        ("evaluate", "finetune", "end of finetune"),
    ]
    over = SimpleNamespace(stage="rl", stage_step=4, last=True)
    log, _ = play(over, folder="over")
    assert [step for step in log if step[0] in ("run", "probe", "evaluate")] == [
        ("evaluate", "pretrain", "end of pretrain"),
        ("evaluate", "finetune", "end of finetune"),
        ("probe", "rl"),
        ("evaluate", "rl", "end of rl"),
    ]


def test_what_was_evaluated_before_is_not_asked_again(play, tmp_path):
    play(folder="again")
    results = tmp_path / "again" / "results"
    for name in ("popularity", "pretrain"):
        np.savez(results / f"{name}.npz", x=np.zeros(1))
    log, _ = play(folder="again")
    assert ("baseline", "popularity") not in log
    assert ("evaluate", "pretrain", "end of pretrain") not in log
    assert ("baseline", "transition_counter") in log  # its ranks are not there
    assert ("probe", "rl") not in log
