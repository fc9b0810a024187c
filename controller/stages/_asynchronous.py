"""The loop of an RL stage with `staleness`: rollouts answer and rewards score while trainers learn from what came before.

The journal says of every group of prompts when it was begun, under which version, and then once how it ended: committed, when its
update is applied, or aborted. A resumed stage asks again what was not committed. Weights go out behind the groups under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any, cast

from nonet.controller.groups import Prompts
from nonet.controller.record import Recorder
from nonet.controller.scenario import has_policy
from nonet.controller.session import Session
from nonet.controller.stages._looks import by_pool, validated, validated_reward
from nonet.controller.stages._machine import of_the_machine, without_machine
from nonet.controller.stages._not_finite import ended_early
from nonet.controller.stages._overlap import overlapped
from nonet.controller.stages._prompt_groups import PromptGroups
from nonet.workers.runtime import GroupFuture, end_to_end

Stopped = Callable[[], bool]
Answer = tuple[GroupFuture, dict[str, GroupFuture]]  # beams, and scores by reward

_A_SLOT = 2  # groups a step for each rollout, so that one that is slow holds up few prompts


def asynchronous(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Answers and updates at once, no answer older than the stage's `staleness`. False when asked to stop before its end."""
    run = _Asynchronous(session, name)
    try:
        return run.to_the_end(recorder, stopped)
    finally:
        run.threads.shutdown(wait=False, cancel_futures=True)


class _Asynchronous:
    def __init__(self, session: Session, name: str):
        self.session, self.name = session, name
        self.start = session.begin_rl(name)
        self.stage = session.stages[name]
        self.slots = session.rollout.group.world
        self.threads = ThreadPoolExecutor(self.slots + 1, thread_name_prefix=name)
        self._scoring = (
            Lock()
        )  # of the rewards' group calls: what one of them could not score is noted by itself
        log = session.commits.groups_of(name)
        self.parts = log[0]["of"] if log else groups_a_step(self.stage.users, self.slots)
        ended = [number for record in log if record["group"] == "committed" for number in record["numbers"]]
        for number, version in _open(log).items():
            self.note("aborted", number, version)
        staleness = int(cast(Any, session.scenario.stages[name]).rollout.options()["staleness"])
        self.groups = PromptGroups(self.parts, self.stage.steps, staleness, step=self.start, trained=ended)

    def to_the_end(self, recorder: Recorder, stopped: Stopped) -> bool:
        session, name = self.session, self.name
        self.note_quarantined = partial(note_quarantined, session, recorder, name)
        recorder.begin(name, self.stage.steps, self.start)
        began = time.perf_counter()
        for done in overlapped(self.groups, self.slots, self.ask, self.learn, self.note):
            session.commits.note(
                group="committed",
                stage=name,
                numbers=[number for number, _ in done.groups],
                step=done.step,
                of=self.parts,
            )
            session.publish(behind=True)
            now = time.perf_counter()
            recorder.metrics(name, done.step + 1, of_the_machine([done.record]))
            shown = by_pool(session, without_machine(done.record))
            shown["rows/s"] = done.record["prompts"] / (now - began)
            shown |= {"staleness": sum(done.ages) / len(done.ages), "aborted": float(done.aborted)}
            began = now
            show_tables(session, recorder, name, done.step + 1, shown)
            recorder.metrics(name, done.step + 1, {"absent": float(session.rollout.absent)}, role="rollout")
            with self._scoring:
                shown |= validated_reward(session, name, done.step + 1)
            recorder.step(name, done.step + 1, shown)
            halt = stopped() and done.step + 1 < self.stage.steps
            session.commit(done.step, now=halt)
            if ended_early(session, recorder, name, [done.record]):
                return True
            validated(session, recorder, name, done.step + 1, over=done.step + 1 == self.stage.steps)
            if halt:
                return False
        return True

    def ask(self, slot: int, number: int, version: int) -> Future[Answer]:
        """Have one rollout answer a group under the published version, and the rewards score what it says."""
        step, part = divmod(number, self.parts)
        prompts = Prompts(self.name, step, self.stage.users)
        beams = self.session.rollout.generate_group(slot, prompts, (part, self.parts))
        return self.threads.submit(self._scored, step, beams)

    def _scored(self, step: int, beams: GroupFuture) -> Answer:
        """Beams that are there and what the rewards say; rewards are asked when the beams are there, one group at a time."""
        beams.within(self.session.deadlines.step).settle()
        with self._scoring:
            scores = self.session.reward.score(beams)
            self.note_quarantined(step)
        return beams, scores

    def learn(
        self, step: int, groups: Sequence[tuple[int, int]], answers: Sequence[Answer]
    ) -> Future[dict[str, float]]:
        """Have the trainers learn from answers, in the order of their numbers."""
        trainer, asked = self.session.trainer, self.session.steering.asked(step)
        with self._scoring if asked else nullcontext():  # rewards change while none of them is scoring
            self.session.enter_step(step)
        answers = [self._of_now(step, *answer) for answer in answers]
        beams = end_to_end([beams for beams, _ in answers])
        scores = {reward: end_to_end([scores[reward] for _, scores in answers]) for reward in answers[0][1]}
        return self.threads.submit(trainer.update, beams, scores)

    def _of_now(self, step: int, beams: GroupFuture, scores: dict[str, GroupFuture]) -> Answer:
        """A group's answer with the rewards that there are now: one attached since is asked, one detached is left out."""
        there = self.session.reward.groups
        missing = there.keys() - scores.keys()
        if missing:
            with self._scoring:
                scores = scores | self.session.reward.score(beams, names=missing)
                self.note_quarantined(step)
        return beams, {name: scores[name] for name in there}

    def note(self, what: str, number: int, version: int) -> None:
        """One line of the journal."""
        self.session.commits.note(group=what, stage=self.name, number=number, version=version, of=self.parts)


def groups_a_step(users: int, slots: int) -> int:
    """Groups that a step's prompts are asked in: equal ones, two a rollout or the next number that divides them."""
    return next(parts for parts in range(min(users, _A_SLOT * slots), users + 1) if users % parts == 0)


def _open(log: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Groups that were begun and not ended: {number: version}."""
    left: dict[int, int] = {}
    for record in log:
        if record["group"] == "begun":
            left[record["number"]] = record["version"]
        for number in record.get("numbers", [record.get("number")]) if record["group"] != "begun" else ():
            left.pop(number, None)
    return left


def show_tables(session: Session, recorder: Recorder, stage: str, step: int, shown: dict[str, float]) -> None:
    """Note what the sparse tables did; where some refuse or forget rows, show it too."""
    counts = session.trainer.counts()
    recorder.tables(stage, step, counts)
    if has_policy(session.scenario):
        sums = {
            what: sum(every[what] for every in counts.values()) for what in ("rows", "refused", "evicted")
        }
        shown.update({f"sparse {what}": float(count) for what, count in sums.items()})


def note_quarantined(session: Session, recorder: Recorder, stage: str, step: int) -> None:
    """Journal, count and tell which prompts of a step have no score of some reward."""
    rewards = session.reward
    counts = {f"quarantined.{each.reward}": float(len(each.uids)) for each in rewards.quarantined}
    if rewards.retried:
        recorder.metrics(stage, step + 1, counts | {"asked again": float(rewards.retried)}, role="reward")
    for each in rewards.quarantined:
        session.commits.note(
            quarantined=each.reward, stage=stage, step=step, uids=each.uids, users=each.users, why=each.why
        )
        recorder.event("note", text=f"step {step} of {stage}: {each.text()}")
