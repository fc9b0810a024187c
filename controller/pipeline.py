"""Pipeline: runs all stages of a session, evaluates their checkpoints, and writes the report.

The evaluator ranks baselines and checkpoints while stages train. The result of each subject, which is a baseline, a stage
or a control, is in a file of RUN/results, so a resumed run does not repeat evaluations that have finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nonet.atomic import write_arrays
from nonet.controller.record import (
    PREVIOUS_RUN,
    Manifest,
    Recorder,
    list_subjects_beside,
    make_rerank_name,
    make_unselected_name,
)
from nonet.controller.report import make_report, select_headline
from nonet.controller.session import Session, make_start_notes
from nonet.controller.setup import make_baseline_options
from nonet.controller.stages import (
    make_controls,
    probe_rewards,
    rerank,
    run_stage,
    train_control,
    try_rewards,
)
from nonet.storage import read_address
from nonet.workers.runtime import GroupFuture, WorkerGroup


class Pipeline:
    """All stages of a session, in order.

    Args:
        session: The session, which is not open yet.
        recorder: Takes metrics and notes.
        stopped: Returns whether the user has requested that the run stop.
    """

    def __init__(self, session: Session, recorder: Recorder, stopped: Callable[[], bool]):
        self.session, self.recorder, self._is_stop_requested = session, recorder, stopped
        self.wall_s: dict[str, float] = dict(session.run.read_json("results/wall.json") or {})
        self._shown_users: list[dict[str, Any]] | None = None
        # (subject, result, time of the request), in the order of the requests
        self._pending_results: list[tuple[str, GroupFuture, float]] = []

    def run(self) -> bool:
        """Run everything from start to report.

        Returns:
            False if the run was stopped before its end; it can be resumed then.
        """
        self.session.add_note = lambda text: self.recorder.add_event("note", text=text)
        self.session.record_metrics = partial(self.recorder.record_metrics, role="controller")
        with self.session as session:
            for name, seconds in session.seconds.items():
                self._add_seconds(name, seconds)
            for text in make_start_notes(session):
                self.recorder.add_event("note", text=text)
            try_rewards(session)
            # Requested first, because every shown result needs them.
            self._shown_users_call = session.evaluator.list_shown_users()
            for name in make_baseline_options(session.scenario):
                self._evaluate(name, partial(session.evaluator.evaluate_baseline, name))
            self._evaluate_previous_run()
            for name in self._list_done_stages(session.restored):
                self._evaluate(name, partial(self._rank_checkpoint, name))
                for subject in list_subjects_beside(name):
                    self._evaluate_side_checkpoint(subject)
            for name in self._list_open_stages(session.restored):
                if not self._run_stage(name):
                    self._collect_results()
                    self.recorder.add_event(
                        "note",
                        text=f"stopped in {name}; go on with: nonet resume {read_address(session.run.path) or session.run.id}",
                    )
                    return False
            session.scaling.refuse_waiting("all stages have ended")
            self.recorder.add_event("stage", stage="evaluate", steps=None, done=0)
            self._collect_results(wait=True)
            self._finish()
        return True

    def _list_done_stages(self, restored: Manifest | None) -> list[str]:
        """Return the stages before the stage of the restored checkpoint, all of which have ended."""
        names = list(self.session.stages)
        return [] if restored is None else names[: names.index(restored.stage)]

    def _list_open_stages(self, restored: Manifest | None) -> list[str]:
        """Return the stages from that of the restored checkpoint on, which `_run_stage` only evaluates if it has ended."""
        names = list(self.session.stages)
        return names if restored is None else names[names.index(restored.stage) :]

    def _run_stage(self, name: str) -> bool:
        """Run or resume a stage, with its evaluations and controls; return False if the run was stopped."""
        session = self.session
        restored = session.restored
        has_ended = restored is not None and restored.stage == name and restored.last
        stage_options = session.scenario.stages[name]
        if not has_ended:
            self._change_groups(name)
            if stage_options.kind.rolls_out:
                self._probe(name, "before")
                if restored is None or restored.stage != name:
                    self._rerank(name)
            began = time.time()
            with session.trace.record_span(name):
                while not run_stage(session, name, self.recorder, self._poll_between_steps):
                    if self._is_stop_requested() or not session.scaling.is_due:
                        return False
                    self._change_workers()
            self._add_seconds(name, time.time() - began)
        if stage_options.kind.rolls_out:
            self._probe(name, "after")
        self._add_join_counts(name)
        self._evaluate(name, partial(self._rank_checkpoint, name))
        self._evaluate_side_checkpoint(make_unselected_name(name))
        return self._train_controls(name)

    def _train_controls(self, name: str) -> bool:
        """Train and rank the controls of an RL stage, then load the stage's end; return False if the run was stopped."""
        session = self.session
        controls = make_controls(session, name) if session.scenario.stages[name].kind.rolls_out else []
        for control in controls:
            subject, began = control.setup.name, time.time()
            folder = self._find_side_checkpoint(subject)
            if not (session.run.results / f"{subject}.npz").exists():
                with session.trace.record_span(subject):
                    folder = train_control(session, control, self.recorder, self._poll_in_control)
                if folder is None:
                    session.load(session.checkpoint_log.find_stage_end(name))
                    return False
                self._add_seconds(subject, time.time() - began)
            self._evaluate(subject, partial(session.evaluator.evaluate, subject, str(folder)))
        if controls:
            session.load(session.checkpoint_log.find_stage_end(name))
        return True

    def _rerank(self, name: str) -> None:
        """Re-rank the lists of the policy before an RL stage by its rewards, unless that is done or disabled."""
        subject = make_rerank_name(name)
        control = getattr(self.session.scenario.stages[name], "control", False)
        if control and getattr(control, "rerank", None) is not False:
            if self.session.run.read_json(f"results/{subject}.json") is not None:
                return
            began = time.time()
            with self.session.trace.record_span(subject):
                rerank(self.session, name, self.recorder)
            self._add_seconds(subject, time.time() - began)

    def _evaluate_side_checkpoint(self, subject: str) -> None:
        """Evaluate a checkpoint from which no stage continues: a control, or the best step if the start was selected."""
        folder = self._find_side_checkpoint(subject)
        if folder or self._read_result(subject) is not None:
            self._evaluate(subject, lambda: self.session.evaluator.evaluate(subject, str(folder)))

    def _find_side_checkpoint(self, subject: str) -> Path | None:
        """Return the checkpoint folder of a control or an unselected step; None if its training did not end."""
        folders = list((self.session.run.path / "controls" / subject).glob("step-*"))
        # When the training of a control ends, it deletes all checkpoints except the best one.
        return folders[0] if len(folders) == 1 else None

    def _change_groups(self, name: str) -> None:
        """Start the groups of a stage, and stop those that it replaces; first wait for the results of an evaluator among them."""
        change = self.session.groups.find_due_change(name)
        if not change:
            return
        if any(
            group.name in change.stops
            for group in self.session.groups.binding.groups
            if "evaluator" in group.roles
        ):
            self._collect_evaluator_results()
        began = time.time()
        self.session.prepare(name)
        self._add_seconds(f"rebind {name}", time.time() - began)
        self.recorder.add_event("note", text=f"before {name}: {change.describe()}")

    def _change_workers(self) -> None:
        """Change the number of workers within a stage; first wait for the results of evaluators that stop."""
        if self.session.scaling.stops_evaluators:
            self._collect_evaluator_results()
        began = time.time()
        self.session.scaling.apply()
        self._add_seconds("scale", time.time() - began)

    def _collect_evaluator_results(self) -> None:
        """Wait for everything that was requested from evaluators, which are about to be stopped."""
        self._collect_results(wait=True)
        self._fetch_shown_users()
        self._add_join_counts()

    def _poll_between_steps(self) -> bool:
        """Do the work between two steps of a stage, and return whether the stage must be left for now.

        It is left if the user has requested a stop, or if the number of workers changes.
        """
        self._poll_workers()
        return self._is_stop_requested() or self.session.scaling.poll()

    def _poll_in_control(self) -> bool:
        """Do the work between two steps of a control, and return whether the user has requested a stop."""
        self._poll_workers()
        return self._is_stop_requested()

    def _poll_workers(self) -> None:
        """Write the results that have arrived, and report failed heartbeats and warnings of the storage."""
        _ = self.session.evaluator  # raises the error with which the evaluator failed to open
        if warning := self.session.checkpoint_log.check_writer():
            self.recorder.add_event("note", text=warning)
        self._collect_results()
        if warning := self.session.groups.processes.pop_warning():
            self.recorder.add_event("note", text=warning)
        self.session.trace.collect_due(self.session.groups.hosts.values())

    def _evaluate_previous_run(self) -> None:
        """Evaluate the weights that a continued run has started from, unless they have been deleted or moved meanwhile."""
        evaluator, facts = self.session.evaluator, self.session.facts
        if "new" not in facts["data"]:
            return
        checkpoint = facts["init"]["commit"]
        if self._read_result(PREVIOUS_RUN) is None and not Path(checkpoint).exists():
            text = (
                f"run {facts['init']['run']} is no longer where it was, so it is not compared with this run"
            )
            self.recorder.add_event("note", text=text)
            return
        self._evaluate(PREVIOUS_RUN, lambda: evaluator.evaluate(PREVIOUS_RUN, checkpoint))

    def _rank_checkpoint(self, name: str) -> GroupFuture:
        """Request the ranking of a stage's last checkpoint; if there are several evaluators, each ranks a share of the events."""
        evaluator, folder = self.session.evaluator, str(self.session.checkpoint_log.find_stage_end(name))
        if not hasattr(evaluator, "evaluate_share") or evaluator.world == 1:
            return evaluator.evaluate(name, folder)
        return evaluator.combine_shares(name, evaluator.evaluate_share(folder))

    def _evaluate(self, subject: str, request: Callable[[], GroupFuture]) -> None:
        """Show the result of a subject if a file has it; else request its evaluation, which runs while stages train."""
        if (result := self._read_result(subject)) is not None:
            self._show(subject, result)
            return
        self._pending_results.append((subject, request(), time.time()))

    def _read_result(self, subject: str) -> dict[str, Any] | None:
        """Return the result of a subject; None unless the file of its ranks exists too."""
        result = self.session.run.read_json(f"results/{subject}.json")
        return result if (self.session.run.results / f"{subject}.npz").exists() else None

    def _collect_results(self, *, wait: bool = False) -> None:
        """Write and show the results that have arrived, in the order of their requests; wait for all of them if `wait`.

        Raises:
            WorkerLost: The worker that has ranked a subject died before its file of ranks was stored.
        """
        while self._pending_results and (wait or self._pending_results[0][1].done()):
            subject, future, began = self._pending_results.pop(0)
            result = future.get(self.session.deadlines.evaluate)
            if "fitting" in result:  # a baseline is fitted in parts, so that validations wait for one part
                self._pending_results.append(
                    (subject, self.session.evaluator.evaluate_baseline(subject), began)
                )
                continue
            self.session.require_stored(self.session.run.results / f"{subject}.npz")
            self.session.run.write_json(f"results/{subject}.json", result)
            self._add_seconds(f"evaluate {subject}", time.time() - began)
            self._show(subject, result)

    def _show(self, subject: str, result: dict[str, Any]) -> None:
        """Record the headline metrics of a result, and its recommendations for a few users."""
        users = self._fetch_shown_users()
        self.recorder.add_event(
            "result",
            name=subject,
            metrics=select_headline(result),
            shown=result["shown"],
            users=users,
            baseline=subject not in self.session.stages,
        )
        for ranking, metrics_by_segment in result["detail"].get("test", {}).items():
            values = {
                f"{subject}/{key}": value
                for key, value in metrics_by_segment["all"].items()
                if value is not None  # its metric is not defined
            }
            self.recorder.record_metrics(f"evaluate/{ranking}", 0, values, role="evaluator")

    def _fetch_shown_users(self) -> list[dict[str, Any]]:
        """Return the few users whose recommendations are shown, which the evaluator has chosen."""
        shown = self._shown_users
        if shown is None:
            shown = self._shown_users = self._shown_users_call.get(self.session.deadlines.evaluate)
        return shown

    def _probe(self, name: str, when: str) -> None:
        """Write the rewards of held-out users to RUN/results, unless the file exists; `when` is "before" or "after" RL."""
        file = self.session.run.results / f"{name}.rewards.{when}.npz"
        if not file.exists():
            write_arrays(file, **probe_rewards(self.session, name))

    def _finish(self) -> None:
        """Compare the stages with the baselines, and write the report."""
        session = self.session
        stages = list(session.stages)
        baselines = [*make_baseline_options(session.scenario)]
        baselines += [PREVIOUS_RUN] if self._read_result(PREVIOUS_RUN) is not None else []
        pairs = [(stage, other) for stage in stages for other in (*baselines, *stages[: stages.index(stage)])]
        stages_and_subjects = [(name, subject) for name in stages for subject in list_subjects_beside(name)]
        pairs += [pair for pair in stages_and_subjects if (session.run.results / f"{pair[1]}.npz").exists()]
        paired = (
            session.evaluator.compare(pairs).get(self.session.deadlines.evaluate)
            if session.facts["data"]["held_out"]["test"]
            else {}
        )
        shown = self._fetch_shown_users()
        self._add_join_counts()
        session.run.write_json("results/comparison.json", {"paired": paired, "shown": shown})
        session.trace.collect(session.groups.hosts.values())
        self.recorder.flush_trackers()
        work = {
            "idle": session.trace.compute_idle_shares(),
            "bytes_out": session.trace.count_returned_bytes(),
            "moved": session.groups.offloader.list_counts(),
            "published": session.trainer.count_published(),
            "tracking": self.recorder.get_tracking(),
        }
        make_report(session.run, session.scenario, session.size(), self.wall_s, work)

    def _add_join_counts(self, stage: str | None = None) -> None:
        """Add to results/joins.json how many rows joins have looked up, in a stage's trainers and rewards.

        Without a stage, those of the evaluator are added. That must happen when it has no other calls, because a call waits
        for those before it.
        """
        session = self.session
        if not session.scenario.data.join:
            return
        readers: dict[str, WorkerGroup] = {"evaluator": session.evaluator}
        if stage is not None:
            readers = {"trainer": session.trainer.group}
            if session.scenario.stages[stage].kind.rolls_out:
                groups = session.get_rewards(stage).groups
                readers |= {f"reward {name}": group for name, group in groups.items()}
        counts_by_join = session.run.read_json("results/joins.json") or {}
        for reader, group in readers.items():
            if not hasattr(group, "join_counts"):
                continue
            for rank_counts in group.join_counts().get(session.deadlines.step):
                for join, reader_counts in rank_counts.items():
                    totals = counts_by_join.setdefault(join, {}).setdefault(reader, {})
                    for key, value in reader_counts.items():
                        totals[key] = totals.get(key, 0) + value
        session.run.write_json("results/joins.json", counts_by_join)

    def _add_seconds(self, name: str, seconds: float) -> None:
        """Add the seconds of a part of the run to results/wall.json."""
        self.wall_s[name] = round(self.wall_s.get(name, 0.0) + seconds, 3)
        self.session.run.write_json("results/wall.json", self.wall_s)
