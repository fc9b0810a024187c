"""The loop of an RL stage: each step generates beams for prompts, scores them, and updates and publishes the policy.

`run_reinforced` is the loop. By default, `_run_step` generates the beams of a step with the newest weights, and then trainers
learn from them. With `staleness`, rollouts generate and rewards score while trainers learn from earlier beams, and
`OverlappedSteps` runs the steps. Each step's prompts are then split into groups, and a rollout worker, called a slot, generates
one group at a time. The journal records for every group with which version it was begun, and then whether it was committed,
which means that its update was applied, or aborted. A resumed stage generates all groups again that were not committed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, cast

from nonet.controller.groups import PromptRequest, RewardScores
from nonet.controller.record import Recorder
from nonet.controller.session import Session
from nonet.controller.stages._policy_scores import rescore_candidates, score_validation
from nonet.controller.stages._prompt_groups import PromptGroups
from nonet.controller.stages._reinforced_options import Reinforced
from nonet.controller.stages._step_report import (
    Stopped,
    finish_stage,
    note_quarantined,
    record_report,
    report_policy_step,
)
from nonet.workers.runtime import GroupFuture, concat_futures

ScoredBeams = tuple[GroupFuture, RewardScores]  # beams, and scores by reward

_GROUPS_PER_SLOT = 2  # groups of a step per slot, so that a slow one delays few prompts


def run_reinforced(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Run an RL stage: each step generates beams for prompts, scores them and updates the policy.

    Returns:
        False if the user requested a stop before its end.
    """
    stage, has_begun, began = session.stages[name], False, 0.0
    staleness = cast(Reinforced, session.scenario.stages[name]).rollout.drawing.staleness
    overlap: OverlappedSteps | None = None
    try:
        for step, prompts in session.iterate_prompts(name):
            if not has_begun:
                overlap = OverlappedSteps(session, name, recorder, step, staleness) if staleness else None
                recorder.begin(name, stage.steps, step)
                recorder.record_metrics(name, step, score_validation(session, name, step))
                has_begun, began = True, time.perf_counter()
            if session.steering.pop_changed():
                rescore_candidates(session, name, recorder)
            if overlap is None:  # else the step began when the one before was published
                began = time.perf_counter()
                record = _run_step(session, recorder, prompts)
            else:
                record = overlap.run_step(prompts)
            session.publish(behind=overlap is not None)
            published = time.perf_counter()
            more = overlap.metrics if overlap else {}
            report = report_policy_step(session, name, step, record, published - began, more=more)
            began = published
            state = record_report(session, recorder, name, report, stopped)
            if state != "running":
                return state == "ended"
    finally:
        if overlap:
            overlap.close()
    finish_stage(session, recorder, name, stage.steps)
    return True


def _run_step(session: Session, recorder: Recorder, prompts: PromptRequest) -> dict[str, float]:
    """Generate beams for the prompts of a step with the newest weights, score them and update the policy."""
    name, step = prompts.stage, prompts.step
    with session.trace.record_span(f"{name}.generate and score", step=step):
        beams = session.rollout.generate(prompts)
        scores = session.reward.score(beams)
        note_quarantined(session, recorder, name, step, scores)
    with session.trace.record_span(f"{name}.update", step=step):
        return session.trainer.update(session.stages[name], step, beams, scores)


class OverlappedSteps:
    """Runs the steps of a stage while rollouts and rewards work on groups of later prompts.

    One thread makes all decisions; those of the pool only wait for beams, scores and updates. No group begins between two
    calls of `run_step`, so the new weights can be published first. Groups that are generated at that time go on.

    Args:
        session: The session, which has entered the stage.
        name: The RL stage.
        recorder: Takes notes of quarantined prompts.
        start: The first step to run. The groups of a killed run that are still open are recorded as aborted.
        staleness: The largest number of updates between the version that generated a group and the update that uses it.

    Attributes:
        metrics: The mean staleness of the groups of the newest step, and how many groups were too old since the step before.
    """

    def __init__(self, session: Session, name: str, recorder: Recorder, start: int, staleness: int):
        self._session, self._name, self._recorder = session, name, recorder
        self._stage, slots = session.stages[name], session.rollout.group.world
        log = session.checkpoint_log.read_groups(name)
        # A resumed stage keeps its groups, even if the number of rollouts has changed.
        self._groups_per_step = log[0]["of"] if log else count_groups_per_step(self._stage.users, slots)
        trained = [number for record in log if record["group"] == "committed" for number in record["numbers"]]
        for number, version in _find_open_groups(log).items():
            self._record_group("aborted", number, version)
        self._groups = PromptGroups(
            self._groups_per_step, self._stage.steps, staleness, step=start, trained=trained
        )
        max_open_groups = (staleness + 1) * self._groups_per_step
        self._threads = ThreadPoolExecutor(slots + max_open_groups + 1, thread_name_prefix=name)
        self._free_slots = list(range(slots))[::-1]
        # By future of its beams, the slot of a group; by future of its scored beams, the number and version of a group.
        self._busy_slots: dict[Future[GroupFuture], int] = {}
        self._running_groups: dict[Future[ScoredBeams], tuple[int, int]] = {}
        self._accepted: dict[int, ScoredBeams] = {}  # by number of the group
        self.metrics: Mapping[str, float] = {}

    def close(self) -> None:
        """Stop the threads without waiting for groups that are being generated."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def run_step(self, prompts: PromptRequest) -> dict[str, float]:
        """Wait for as many scored groups as a step has, update the policy with them, and return the record of the update."""
        step, aborted = prompts.step, self._groups.aborted
        self._start_groups()
        while (batch := self._groups.take_batch()) is None:
            self._accept_groups()
            self._start_groups()
        beams, scores = self._join_groups(step, [self._accepted.pop(number) for number, _ in batch])
        update = self._threads.submit(self._session.trainer.update, self._stage, step, beams, scores)
        while not update.done():
            self._start_groups()
            self._accept_groups(update)
        record = update.result()
        self._groups.advance_step()
        numbers = [number for number, _ in batch]
        self._session.checkpoint_log.write_record(
            group="committed", stage=self._name, numbers=numbers, step=step, of=self._groups_per_step
        )
        ages = [step - version for _, version in batch]
        self.metrics = {
            "staleness": sum(ages) / len(ages),
            "aborted": float(self._groups.aborted - aborted),
        }
        return record

    def _start_groups(self) -> None:
        """Generate groups in all free slots, or as many as the bound on their staleness allows."""
        while self._free_slots and (number := self._groups.start_group()) is not None:
            version, slot = self._groups.step, self._free_slots.pop()
            self._record_group("begun", number, version)
            step, part_index = divmod(number, self._groups_per_step)
            beams = self._session.groups.rollout.generate_group(
                slot,
                PromptRequest(self._name, step, size=self._stage.users),
                self._session.version,
                (part_index, self._groups_per_step),
            ).set_deadline(self._session.deadlines.step)
            beams_future = self._threads.submit(beams.settle)
            self._busy_slots[beams_future] = slot
            self._running_groups[self._threads.submit(self._score_group, step, beams_future)] = (
                number,
                version,
            )

    def _score_group(self, step: int, beams_future: Future[GroupFuture]) -> ScoredBeams:
        """Wait for the beams of a group, and return them with their scores; several groups are scored concurrently."""
        beams = beams_future.result()
        scores = self._session.reward.score(beams, step=step)
        note_quarantined(self._session, self._recorder, self._name, step, scores)
        return beams, scores

    def _accept_groups(self, update: Future[Any] | None = None) -> None:
        """Wait for the next event, free the slots whose beams are there, and accept groups that are scored and not too old."""
        events = {*self._busy_slots, *self._running_groups, *([update] if update else [])}
        for future in wait(events, return_when=FIRST_COMPLETED).done:
            if future in self._busy_slots:
                self._free_slots.append(self._busy_slots.pop(future))
            elif future in self._running_groups:
                number, version = self._running_groups.pop(future)
                scored_beams = future.result()
                verdict = self._groups.accept_answer(number, version)
                if verdict == "accepted":
                    self._accepted[number] = scored_beams
                elif verdict == "stale":
                    self._record_group("aborted", number, version)

    def _join_groups(
        self, step: int, groups: Sequence[ScoredBeams]
    ) -> tuple[GroupFuture, Mapping[str, GroupFuture]]:
        """Return the beams of all groups and their scores by the current rewards, with which later rewards score them now."""
        current, scores_by_group = self._session.reward.groups, list[Mapping[str, GroupFuture]]()
        for beams, scores in groups:
            missing_names = {name for name, group in current.items() if scores.groups.get(name) is not group}
            new_scores: Mapping[str, GroupFuture] = {}
            if missing_names:
                new_scores = self._session.reward.score(beams, names=missing_names, step=step)
                note_quarantined(self._session, self._recorder, self._name, step, new_scores)
            scores_by_group.append({**scores, **new_scores})
        joined_scores = {
            name: concat_futures([scores[name] for scores in scores_by_group]) for name in current
        }
        return concat_futures([beams for beams, _ in groups]), joined_scores

    def _record_group(self, event: str, number: int, version: int) -> None:
        """Write to the journal that a group was begun or aborted, as `event` says."""
        self._session.checkpoint_log.write_record(
            group=event, stage=self._name, number=number, version=version, of=self._groups_per_step
        )


def count_groups_per_step(users: int, slots: int) -> int:
    """Return into how many equal groups a step's prompts are split: two per slot, or the next number that divides `users`."""
    return next(
        count for count in range(min(users, _GROUPS_PER_SLOT * slots), users + 1) if users % count == 0
    )


def _find_open_groups(records: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the groups that were begun and have not ended in a stage's journal records, as {number: version}."""
    open_groups: dict[int, int] = {}
    for record in records:
        if record["group"] == "begun":
            open_groups[record["number"]] = record["version"]
            continue
        # An update commits several groups with one record; an aborted group has a record of its own.
        for number in record.get("numbers", [record.get("number")]):
            open_groups.pop(number, None)
    return open_groups
