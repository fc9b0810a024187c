"""The loop of an RL stage with `staleness`: rollouts generate and rewards score while trainers learn from earlier beams.

Each step's prompts are split into groups, and a rollout generates one group at a time. The journal records for every group
with which version it was begun, and then whether it was committed, which means that its update was applied, or aborted. A
resumed stage generates all groups again that were not committed. Weights are published without waiting for groups that are
being generated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import Any, cast

from nonet.controller.groups import PromptRequest
from nonet.controller.record import Recorder
from nonet.controller.session import Session
from nonet.controller.stages._overlap import run_overlapped
from nonet.controller.stages._policy_scores import rescore_candidates, score_validation
from nonet.controller.stages._prompt_groups import PromptGroups
from nonet.controller.stages._reinforced_options import Reinforced
from nonet.controller.stages._step_report import (
    Stopped,
    finish_stage,
    note_quarantined,
    probe_policy,
    record_report,
    report_policy_step,
)
from nonet.workers.runtime import GroupFuture, concat_futures

Answer = tuple[GroupFuture, dict[str, GroupFuture]]  # beams, and scores by reward

_GROUPS_PER_SLOT = 2  # groups of a step per rollout worker, so that a slow one delays few prompts


def run_asynchronous(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Run an RL stage in which generating and training overlap, with beams at most `staleness` versions old.

    Returns:
        False if the user requested a stop before its end.
    """
    run = _AsynchronousStage(session, name)
    try:
        return run.run_to_end(recorder, stopped)
    finally:
        run.threads.shutdown(wait=False, cancel_futures=True)


class _RewardLock:
    """A shared/exclusive lock on the rewards: groups are scored concurrently, and rewards change while no group is scored."""

    def __init__(self) -> None:
        self._condition, self._scoring_count, self._changing = Condition(), 0, False

    @contextmanager
    def score_together(self) -> Iterator[None]:
        """Hold the lock for scoring, concurrently with other groups; wait while rewards change."""
        with self._condition:
            self._condition.wait_for(lambda: not self._changing)
            self._scoring_count += 1
        try:
            yield
        finally:
            with self._condition:
                self._scoring_count -= 1
                self._condition.notify_all()

    @contextmanager
    def change_alone(self) -> Iterator[None]:
        """Hold the lock exclusively to change rewards, after all groups that are being scored are done."""
        with self._condition:
            self._condition.wait_for(lambda: not self._changing)
            self._changing = True
            self._condition.wait_for(lambda: not self._scoring_count)
        try:
            yield
        finally:
            with self._condition:
                self._changing = False
                self._condition.notify_all()


class _AsynchronousStage:
    """One RL stage with overlap; creating it enters the stage, and records open groups of a killed run as aborted.

    Attributes:
        start: The first step to run.
        stage: The setup of the stage.
        slots: The number of rollout workers, each of which generates one group at a time.
        groups_per_step: The number of groups into which the prompts of a step are split.
        threads: Wait for beams, scores and updates.
        groups: Decides which groups are generated and trained.
    """

    def __init__(self, session: Session, name: str):
        self.session, self.name = session, name
        self.start = session.begin_rl(name)
        self.stage = session.stages[name]
        self.slots = session.rollout.group.world
        self._reward_lock = _RewardLock()
        log = session.checkpoint_log.read_groups(name)
        # A resumed stage keeps its groups, even if the number of rollouts has changed.
        self.groups_per_step = log[0]["of"] if log else count_groups_per_step(self.stage.users, self.slots)
        trained = [number for record in log if record["group"] == "committed" for number in record["numbers"]]
        for number, version in _find_open_groups(log).items():
            self.record_group("aborted", number, version)
        staleness = int(cast(Reinforced, session.scenario.stages[name]).rollout.get_options()["staleness"])
        max_open_groups = (staleness + 1) * self.groups_per_step
        self.threads = ThreadPoolExecutor(self.slots + max_open_groups + 1, thread_name_prefix=name)
        self.groups = PromptGroups(
            self.groups_per_step, self.stage.steps, staleness, step=self.start, trained=trained
        )

    def run_to_end(self, recorder: Recorder, stopped: Stopped) -> bool:
        """Run the stage; return False if the user requested a stop before its end."""
        session, name = self.session, self.name
        self.note_quarantined = partial(note_quarantined, session, recorder, name)
        recorder.begin(name, self.stage.steps, self.start)
        recorder.record_metrics(name, self.start, score_validation(session, name, self.start))
        step_began = time.perf_counter()
        for update in run_overlapped(
            self.groups, self.slots, self.generate_group, self.train_groups, self.record_group
        ):
            session.checkpoint_log.write_record(
                group="committed",
                stage=name,
                numbers=[number for number, _ in update.groups],
                step=update.step,
                of=self.groups_per_step,
            )
            session.publish(behind=True)
            ages = {"staleness": sum(update.ages) / len(update.ages), "aborted": float(update.aborted)}
            now = time.perf_counter()
            probe = partial(self._probe, recorder, update.step + 1)
            report = report_policy_step(
                session, name, update.step, update.record, now - step_began, more=ages, probe=probe
            )
            step_began = now
            state = record_report(session, recorder, name, report, stopped)
            if state != "running":
                return state == "ended"
        finish_stage(session, recorder, name, self.stage.steps)
        return True

    def _probe(self, recorder: Recorder, done: int) -> dict[str, float]:
        """Return metrics of held-out users after `done` steps; if rewards have changed, also score earlier validations again."""
        with self._reward_lock.score_together():
            shown = probe_policy(self.session, self.name, done)
            if self.session.steering.pop_changed():
                rescore_candidates(self.session, self.name, recorder)
        return shown

    def generate_group(
        self, slot: int, number: int, version: int
    ) -> tuple[Future[GroupFuture], Future[Answer]]:
        """Generate a group on one rollout with the published version, and score its beams.

        The first future completes when the beams are generated, and the rollout can then take another group.
        """
        step, part_index = divmod(number, self.groups_per_step)
        prompts = PromptRequest(self.name, step, size=self.stage.users)
        session, part = self.session, (part_index, self.groups_per_step)
        beams = session.groups.rollout.generate_group(slot, prompts, session.version, part)
        beams_future = self.threads.submit(beams.set_deadline(session.deadlines.step).settle)
        return beams_future, self.threads.submit(self._score_group, step, beams_future)

    def _score_group(self, step: int, beams_future: Future[GroupFuture]) -> Answer:
        """Wait for the beams of a group, and return them with their scores; several groups are scored concurrently."""
        beams = beams_future.result()
        with self._reward_lock.score_together():
            scores = self.session.reward.score(beams, step=step)
        self.note_quarantined(step, scores)
        return beams, scores

    def train_groups(
        self, step: int, groups: Sequence[tuple[int, int]], answers: Sequence[Answer]
    ) -> Future[dict[str, float]]:
        """Start an RL step on the beams and scores of `groups`, which are (number, version) pairs in the order of the numbers."""
        trainer = self.session.trainer
        if self.session.steering.has_commands(step):
            with self._reward_lock.change_alone():  # rewards may only change while no group is being scored
                self.session.enter_step(step)
        else:
            self.session.enter_step(step)
        answers = [self._match_current_rewards(step, *answer) for answer in answers]
        beams = concat_futures([beams for beams, _ in answers])
        scores = {
            reward: concat_futures([scores[reward] for _, scores in answers]) for reward in answers[0][1]
        }
        return self.threads.submit(trainer.update, self.stage, step, beams, scores)

    def _match_current_rewards(self, step: int, beams: GroupFuture, scores: dict[str, GroupFuture]) -> Answer:
        """Return beams with the scores of the current rewards: new rewards score them, and removed rewards are left out."""
        groups = self.session.reward.groups
        missing_names = groups.keys() - scores.keys()
        if missing_names:
            with self._reward_lock.score_together():
                new_scores = self.session.reward.score(beams, names=missing_names, step=step)
            scores = scores | new_scores
            self.note_quarantined(step, new_scores)
        return beams, {name: scores[name] for name in groups}

    def record_group(self, event: str, number: int, version: int) -> None:
        """Write to the journal that a group was begun or aborted, as `event` says."""
        self.session.checkpoint_log.write_record(
            group=event, stage=self.name, number=number, version=version, of=self.groups_per_step
        )


def count_groups_per_step(users: int, slots: int) -> int:
    """Return into how many equal groups a step's prompts are split: two per slot, or the next number that divides `users`."""
    return next(
        count for count in range(min(users, _GROUPS_PER_SLOT * slots), users + 1) if users % count == 0
    )


def _find_open_groups(records: Sequence[dict[str, Any]]) -> dict[int, int]:
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
