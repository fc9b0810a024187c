"""Pipeline: a session from tables to report: tokenise, each stage, comparisons. Baselines and commits are ranked beside stages.

Results are kept a file a subject under RUN/results, so a resumed run repeats nothing that was finished before the commit
it goes on from.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from nonet.atomic import write_whole
from nonet.controller.record import (
    Manifest,
    Recorder,
    list_subjects_beside,
    make_rerank_name,
    make_unselected_name,
)
from nonet.controller.report import make_report, select_headline
from nonet.controller.scenario import Scenario
from nonet.controller.scenario.settings import describe_duplicates, describe_repeats, describe_shared_codes
from nonet.controller.session import Session
from nonet.controller.setup import make_baseline_options
from nonet.controller.stages import (
    make_controls,
    probe_rewards,
    rerank,
    run_stage,
    train_control,
    try_rewards,
)
from nonet.workers.roles.evaluation import EXHAUSTIVE_ITEMS
from nonet.workers.runtime import GroupFuture


class Pipeline:
    """All stages of a session, in order."""

    def __init__(self, session: Session, recorder: Recorder, stopped: Callable[[], bool]):
        self.session, self.recorder, self._stopped = session, recorder, stopped
        self.wall_s: dict[str, float] = dict(session.run.read_json("results/wall.json") or {})
        self._shown: list[dict[str, Any]] | None = None
        self._asked: list[tuple[str, GroupFuture, float]] = []

    def run(self) -> bool:
        """Run everything from start to report.

        Returns:
            False if the run was stopped before its end; it can be resumed then.
        """
        self.session.add_note = lambda text: self.recorder.add_event("note", text=text)
        with self.session as session:
            for name, seconds in session.seconds.items():
                self._add_seconds(name, seconds)
            self._note_start()
            try_rewards(session)
            self._asked_shown = (
                session.evaluator.list_shown_users()
            )  # first of all: who shows a result must not wait for others
            for name in make_baseline_options(session.scenario):
                self._evaluate(name, partial(session.evaluator.evaluate_baseline, name))
            for name in self._list_done_stages(session.restored):
                self._evaluate(name, partial(self._rank_checkpoint, name))
                for subject in list_subjects_beside(name):
                    self._evaluate_aside(subject)
            for name in self._list_open_stages(session.restored):
                if not self._run_stage(name):
                    self._collect()
                    self.recorder.add_event(
                        "note", text=f"stopped in {name}; go on with: nonet resume {session.run.id}"
                    )
                    return False
            self.recorder.add_event("stage", stage="evaluate", steps=None, done=0)
            self._collect(wait=True)
            self._finish()
        return True

    def _note_start(self) -> None:
        """Record notes on the data, the semantic ids and what is validated and ranked."""
        data, tokens = self.session.facts["data"], self.session.facts["tokenizer"]
        if data["notice"]:
            self.recorder.add_event("note", text=data["notice"])
        self.recorder.add_event(
            "note",
            text=f"{data['users']} users, {data['items']} items, {data['events']} events; held out: "
            + ", ".join(f"{data['held_out'][name]} {name}" for name in ("rl", "valid", "test")),
        )
        validates = hasattr(self.session.evaluator, "validate")
        notes = make_validation_notes(self.session.scenario, self.session.facts, validates=validates)
        ranked = make_evaluation_notes(self.session.scenario, data)
        for text in (*make_data_notes(self.session.facts), *notes, *ranked):
            self.recorder.add_event("note", text=text)
        for text in getattr(self.session.groups, "notes", ()):
            self.recorder.add_event("note", text=text)
        if repeats := describe_repeats(data):
            self.recorder.add_event("note", text=repeats)
        if tokens:
            self.recorder.add_event(
                "note", text=f"semantic ids: codes used {tokens.get('used')} of {tokens.get('codes')}"
            )
        for text in (describe_duplicates(data), describe_shared_codes(tokens or {}, data["items"])):
            if text:
                self.recorder.add_event("note", text=f"warning: {text}")
        if self.session.restored:
            at = self.session.restored
            self.recorder.add_event("note", text=f"resumed from step {at.stage_step} of {at.stage}")

    def _list_done_stages(self, restored: Manifest | None) -> list[str]:
        """Return the stages before the stage of the restored checkpoint, all of which have ended."""
        names = list(self.session.stages)
        return [] if restored is None else names[: names.index(restored.stage)]

    def _list_open_stages(self, restored: Manifest | None) -> list[str]:
        """Return the stages from that of the restored checkpoint on; if it ends its stage, that stage is only evaluated."""
        names = list(self.session.stages)
        return names if restored is None else names[names.index(restored.stage) :]

    def _run_stage(self, name: str) -> bool:
        """Run or resume a stage with the evaluations around it. Returns False if the run was stopped."""
        session = self.session
        at = session.restored
        over = at is not None and at.stage == name and at.last
        body = session.scenario.stages[name]
        if not over:
            self._rebind(name)
            if body.kind.rolls_out:
                self._probe(name, "before")
                if at is None or at.stage != name:
                    self._rerank(name)
            began = time.time()
            with session.trace.record_span(name):
                if not run_stage(session, name, self.recorder, self._tick):
                    return False
            self._add_seconds(name, time.time() - began)
        if body.kind.rolls_out:
            self._probe(name, "after")
        self._keep_join_counts(name)
        self._evaluate(name, partial(self._rank_checkpoint, name))
        self._evaluate_aside(make_unselected_name(name))
        return self._train_controls(name)

    def _train_controls(self, name: str) -> bool:
        """Train and rank the controls of an RL stage, and go on from the stage's own end. False when stopped before its end."""
        session = self.session
        controls = make_controls(session, name) if session.scenario.stages[name].kind.rolls_out else []
        for control in controls:
            subject, folder, began = control.setup.name, None, time.time()
            if not (session.run.results / f"{subject}.npz").exists():
                with session.trace.record_span(subject):
                    folder = train_control(session, control, self.recorder, self._tick)
                if folder is None:
                    session.groups.load(session.checkpoint_log.find_stage_end(name), None)
                    return False
                self._add_seconds(subject, time.time() - began)
            self._evaluate(subject, partial(session.evaluator.evaluate, subject, str(folder)))
        if controls:
            session.groups.load(session.checkpoint_log.find_stage_end(name), None)
        return True

    def _rerank(self, name: str) -> None:
        """Re-rank the lists of the policy before an RL stage by its rewards, unless that is done or not requested."""
        subject = make_rerank_name(name)
        control = getattr(self.session.scenario.stages[name], "control", False)
        if control and getattr(control, "rerank", None) is not False:
            if self.session.run.read_json(f"results/{subject}.json") is not None:
                return
            began = time.time()
            with self.session.trace.record_span(subject):
                rerank(self.session, name, self.recorder)
            self._add_seconds(subject, time.time() - began)

    def _evaluate_aside(self, subject: str) -> None:
        """Evaluate a checkpoint from which no stage continues: a control, or the best step if the start was selected."""
        folders = list((self.session.run.path / "controls" / subject).glob("step-*"))
        known = self.session.run.read_json(f"results/{subject}.json") is not None
        if known or len(folders) == 1:  # the training of a control keeps the best one alone
            self._evaluate(subject, lambda: self.session.evaluator.evaluate(subject, str(folders[0])))

    def _rebind(self, name: str) -> None:
        """Have the groups of a stage; what an evaluator that ends was asked is waited for."""
        due = self.session.groups.find_due_change(name)
        if not due:
            return
        if any(
            group.name in due.stops
            for group in self.session.groups.binding.groups
            if "evaluator" in group.roles
        ):
            self._collect(wait=True)
            self._fetch_shown_users()
            self._keep_join_counts()
        began = time.time()
        self.session.prepare(name)
        self._add_seconds(f"rebind {name}", time.time() - began)
        self.recorder.add_event("note", text=f"before {name}: {due.describe()}")

    def _tick(self) -> bool:
        """Collect what the evaluator has finished and report failed heartbeats between steps; return whether to stop."""
        _ = self.session.evaluator
        self._collect()
        if warning := self.session.groups.pop_warning():
            self.recorder.add_event("note", text=warning)
        self.session.trace.collect_due(self.session.groups.hosts.values())
        return self._stopped()

    def _rank_checkpoint(self, name: str) -> GroupFuture:
        """Have a stage's commit ranked: by the evaluator, a share of the events by each where there are several."""
        evaluator, folder = self.session.evaluator, str(self.session.checkpoint_log.find_stage_end(name))
        if not hasattr(evaluator, "evaluate_share") or evaluator.world == 1:
            return evaluator.evaluate(name, folder)
        return evaluator.combine_shares(name, evaluator.evaluate_share(folder))

    def _evaluate(self, name: str, ask: Callable[[], GroupFuture]) -> None:
        """Ask the evaluator, which works beside the stages; what a run before had found is shown as it is."""
        result = self.session.run.read_json(f"results/{name}.json")
        if result is not None and (self.session.run.results / f"{name}.npz").exists():
            self._show(name, result)
            return
        self._asked.append((name, ask(), time.time()))

    def _collect(self, *, wait: bool = False) -> None:
        """Keep and show the evaluator's answers, in the order they were asked for; all of them when `wait`."""
        while self._asked and (wait or self._asked[0][1].done()):
            name, future, began = self._asked.pop(0)
            result = future.get(self.session.deadlines.evaluate)
            if "fitting" in result:  # in parts, so that a validation waits for one of them
                self._asked.append((name, self.session.evaluator.evaluate_baseline(name), began))
                continue
            self.session.run.write_json(f"results/{name}.json", result)
            self._add_seconds(f"evaluate {name}", time.time() - began)
            self._show(name, result)

    def _show(self, name: str, result: dict[str, Any]) -> None:
        """Record the headline metrics of a result, and its recommendations for a few users."""
        users = self._fetch_shown_users()
        self.recorder.add_event(
            "result",
            name=name,
            metrics=select_headline(result),
            shown=result["shown"],
            users=users,
            baseline=name not in self.session.stages,
        )
        for how, parts in result["detail"].get("test", {}).items():
            values = {f"{name}/{key}": value for key, value in parts["all"].items()}
            self.recorder.record_metrics(f"evaluate/{how}", 0, values, role="evaluator")

    def _fetch_shown_users(self) -> list[dict[str, Any]]:
        shown = self._shown
        if shown is None:
            shown = self._shown = self._asked_shown.get(self.session.deadlines.evaluate)
        return shown

    def _probe(self, name: str, when: str) -> None:
        """Keep what the rewards say of held-out users, before and after RL."""
        file = self.session.run.results / f"{name}.rewards.{when}.npz"
        if not file.exists():
            content = io.BytesIO()
            np.savez(content, **probe_rewards(self.session, name))  # type: ignore[arg-type]
            write_whole(file, content.getvalue())

    def _finish(self) -> None:
        """Compare the stages with the baselines, and write the report."""
        session = self.session
        order = list(session.stages)
        baselines = make_baseline_options(session.scenario)
        pairs = [(last, other) for last in order for other in (*baselines, *order[: order.index(last)])]
        aside = [(name, subject) for name in order for subject in list_subjects_beside(name)]
        pairs += [each for each in aside if (session.run.results / f"{each[1]}.npz").exists()]
        paired = (
            session.evaluator.compare(pairs).get(self.session.deadlines.evaluate)
            if session.facts["data"]["held_out"]["test"]
            else {}
        )
        shown = self._fetch_shown_users()
        self._keep_join_counts()
        session.run.write_json("results/comparison.json", {"paired": paired, "shown": shown})
        session.trace.collect(session.groups.hosts.values())
        work = {
            "idle": session.trace.compute_idle_shares(),
            "bytes_out": session.trace.count_returned_bytes(),
            "moved": session.groups.offloader.list_counts(),
            "published": session.trainer.count_published(),
        }
        make_report(session.run, session.scenario, session.size(), self.wall_s, work)

    def _keep_join_counts(self, stage: str | None = None) -> None:
        """Add the rows that joins looked up to results/joins.json: those of a stage's trainers and rewards, or the evaluator's.

        The evaluator is asked only when it has nothing else to do, because a call waits for those before it.
        """
        session = self.session
        if not session.scenario.data.join:
            return
        readers: dict[str, Any] = {"evaluator": session.evaluator}
        if stage is not None:
            readers = {"trainer": session.trainer.group}
            if session.scenario.stages[stage].kind.rolls_out:
                groups = session.get_rewards(stage).groups
                readers |= {f"reward {name}": group for name, group in groups.items()}
        kept = session.run.read_json("results/joins.json") or {}
        for reader, group in readers.items():
            if not hasattr(group, "join_counts"):
                continue
            for counts in group.join_counts().get(session.deadlines.step):
                for join, values in counts.items():
                    sums = kept.setdefault(join, {}).setdefault(reader, {})
                    for key, value in values.items():
                        sums[key] = sums.get(key, 0) + value
        session.run.write_json("results/joins.json", kept)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self.wall_s[name] = round(self.wall_s.get(name, 0.0) + seconds, 3)
        self.session.run.write_json("results/wall.json", self.wall_s)


def make_validation_notes(scenario: Scenario, facts: Mapping[str, Any], *, validates: bool) -> Iterator[str]:
    """Yield a note if stages that could be validated are not, and why."""
    stages = [name for name, body in scenario.stages.items() if body.kind.validates]
    held_out = facts["data"]["held_out"]["valid"]
    if stages and not (held_out and validates):
        why = "this evaluator has no validate" if held_out else "no validation events (data.split.valid)"
        yield f"{why}: {', '.join(stages)} run all their steps and end with their last checkpoint"


def make_evaluation_notes(scenario: Scenario, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes if not all users are ranked, or if models are ranked by beam alone."""
    ask, tested = scenario.evaluate, data["users"] - data.get("users_only_trained", 0)
    if not scenario.model.spec.makes_lists:
        return
    if ask.most_users is not None and tested > ask.most_users:
        yield f"{ask.most_users:,} of {tested:,} tested users are ranked, drawn by the seed (evaluate.users)"
    off = data["items"] > EXHAUSTIVE_ITEMS if ask.exhaustive is None else ask.exhaustive == "off"
    if off:
        yield (
            f"models are ranked by beam alone among {data['items']:,} items (evaluate.exhaustive): what a beam does not hold is "
            "missed, so their metrics are lower bounds"
        )


def make_data_notes(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on columns that were dropped and on what a warm start knows."""
    if dropped := facts["data"].get("dropped"):
        yield f"not read, for they hold neither numbers nor text: {', '.join(dropped)}"
    if start := facts.get("init"):
        yield (
            f"starts from {start['run']} after {start['stage']}: {start['known_users']} of {start['users']} users and "
            f"{start['known_items']} of {start['items']} items are known"
        )
