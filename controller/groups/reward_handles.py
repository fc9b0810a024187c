"""The rewards of a stage as its loop sees them: scores as futures, and what becomes of prompts that have none.

A prompt that a reward fails on is asked once more, of another rank where there is one, by itself. Without a score then it is
quarantined: its row is NaN, trainers leave it out, and `quarantined` names it. A rank that does not even answer late is ended
and started again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nonet.deadlines import DEFAULTS, Deadlines
from nonet.errors import DataError, DeadlineExceeded, NonetError, WorkerFailed, WorkerLost
from nonet.workers.runtime import GroupFuture, PerRank, WorkerGroup, all_there

_LOOK_S = 1.0  # between looks at whether the beams are there, so that rewards are timed from then
_GRACE_S = 5.0  # above its time-out, which a rank keeps by itself
_BARREN = 3  # steps in a row without any score, after which a reward ends the run

Enter = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Prompts of one step that a reward gave no score, twice: uids, users, and why of the first."""

    reward: str
    uids: tuple[str, ...]
    users: tuple[str, ...]
    why: str
    prompts: int

    def text(self) -> str:
        """One line for a person."""
        users = ", ".join(self.users[:5]) + (", ..." if len(self.users) > 5 else "")
        return f"reward {self.reward!r} gave no score to {len(self.uids)} of {self.prompts} prompts (users {users}): {self.why}"


def _nothing(stage: str, phase: str) -> None:
    """Groups that fit together take no turns."""


class RewardHandles:
    """Every reward's group of one stage. `quarantined`: of the newest `score`; `retried`: prompts of it that were asked twice."""

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        timeouts_s: Mapping[str, float],
        stage: str = "",
        enter: Enter = _nothing,
        deadlines: Deadlines = DEFAULTS,
    ):
        self.groups, self._timeouts_s, self.deadlines = dict(groups), dict(timeouts_s), deadlines
        self._stage, self._enter = stage, enter
        self.quarantined: list[Quarantined] = []
        self.retried = 0
        self._barren: dict[str, int] = {}

    def add(self, name: str, group: WorkerGroup, timeout_s: float) -> None:
        """One more reward, from the next call on."""
        self.groups[name], self._timeouts_s[name] = group, timeout_s

    def remove(self, name: str) -> WorkerGroup:
        """One reward less; its group, which still runs."""
        return self.groups.pop(name)

    def score(
        self, beams: GroupFuture, *, strict: bool = False, names: Collection[str] | None = None
    ) -> dict[str, GroupFuture]:
        """Scores by reward, of those in `names` or of all; futures that are there. A worker that died is restarted and asked
        once more.

        Rewards are asked at once, but their time counts from when the beams are there. `strict`: a prompt without a score
        raises what was wrong. Raises DeadlineExceeded that names who is late where that is whoever makes the beams.
        """
        self._enter(self._stage, "score")
        self.quarantined, self.retried = [], 0
        groups = {name: group for name, group in self.groups.items() if names is None or name in names}
        scores = {name: group.score(beams, strict, retries=1) for name, group in groups.items()}
        told = {name: self.groups[name].troubles(future) for name, future in scores.items()}
        beams.within(self.deadlines.step)
        while not all_there(_LOOK_S, beams, *scores.values(), *told.values()) and not beams.late_or_done():
            pass  # one wait for all of them, looked up from so that each reward is timed by itself
        beams.settle()
        for name, future in scores.items():
            future.within(self._timeouts_s[name] + _GRACE_S)
        scores = {name: self._settled(name, future, beams, strict) for name, future in scores.items()}
        return {name: self._with_retries(name, future, told[name], beams) for name, future in scores.items()}

    def means(self, scores: Mapping[str, GroupFuture]) -> dict[str, np.ndarray]:
        """Each reward's mean score a beam by prompt [U]; NaN without a score."""
        means = {name: self.groups[name].means(future, retries=1) for name, future in scores.items()}
        return {name: future.get(self.deadlines.step) for name, future in means.items()}

    def _settled(self, name: str, future: GroupFuture, beams: GroupFuture, strict: bool) -> GroupFuture:
        """Scores that are there; a rank that hangs is ended and asked again once, then its prompts have none."""
        limit = self._timeouts_s[name] + _GRACE_S
        for last in (False, True):
            try:
                return future.settle()
            except DeadlineExceeded as error:
                if strict:
                    raise DeadlineExceeded(
                        f"reward {name!r} has not answered within {self._timeouts_s[name]:g} s; raise its timeout_s or its "
                        f"workers ({error})"
                    ) from None
                ranks = future.end_late()
            except WorkerLost as error:
                if strict:
                    raise
                ranks = [error.rank]
            if last or not ranks:
                break
            future.within(limit)
        blank = self.groups[name].nothing(beams)
        blank.settle(self.deadlines.start)
        for rank in ranks:
            future.fill(rank, blank)
        return future.within(limit).settle()

    def _with_retries(
        self, name: str, scores: GroupFuture, told: GroupFuture, beams: GroupFuture
    ) -> GroupFuture:
        """Scores in which prompts that had none were asked once more, elsewhere; those that still have none are noted."""
        troubles = self._troubles(name, scores, told)
        if not any(troubles):
            self._barren[name] = 0
            return scores
        counts = scores.row_counts()
        starts, world, total = np.cumsum([0, *counts]), len(troubles), int(sum(counts))
        again: list[list[int]] = [[] for _ in range(world)]
        for rank, wrong in enumerate(troubles):
            for nth, each in enumerate(wrong):
                again[(rank + 1 + nth) % world].append(int(starts[rank]) + each.row)
        self.retried += sum(map(len, again))
        rows = [row for part in again for row in part]
        left = {int(starts[rank]) + each.row: each for rank, wrong in enumerate(troubles) for each in wrong}
        scores, left = self._asked_again(name, scores, beams, again, rows, left, total)
        if left:
            first = next(iter(left.values()))
            named = tuple(each.uid for each in left.values()), tuple(each.user for each in left.values())
            self.quarantined.append(Quarantined(name, *named, first.why, total))
        self._barren[name] = self._barren.get(name, 0) + 1 if len(left) == total else 0
        if self._barren[name] >= _BARREN:
            raise DataError(
                f"reward {name!r} scored none of the prompts of {_BARREN} steps in a row: {next(iter(left.values())).why}"
            )
        return scores

    def _asked_again(
        self,
        name: str,
        scores: GroupFuture,
        beams: GroupFuture,
        again: Sequence[Sequence[int]],
        rows: Sequence[int],
        left: dict[int, Any],
        total: int,
    ) -> tuple[GroupFuture, dict[int, Any]]:
        """Patched scores, and the rows without one; where the second call fails as a whole, the scores as they were."""
        group = self.groups[name]
        asked = group.score_again(beams, PerRank(again)).within(2 * self._timeouts_s[name] + _GRACE_S)
        told = group.troubles(asked)
        try:
            asked.settle()
            wrong = told.get(self.deadlines.step)
            patched = group.patched(scores, asked, list(rows), total).settle(self.deadlines.step)
        except DeadlineExceeded:
            asked.end_late()
            return scores, left
        except (WorkerLost, WorkerFailed):
            return scores, left
        still = {again[rank][each.row]: each for rank, part in enumerate(wrong) for each in part}
        return patched, {row: still[row] for row in sorted(still)}

    def _troubles(self, name: str, scores: GroupFuture, told: GroupFuture) -> list[list[Any]]:
        """By rank, the prompts without a score; fetched only where there are some."""
        try:
            if not any(told.row_counts()):
                return []
            return told.get(self.deadlines.step)
        except NonetError:  # of a rank that was lost since: its scores are others
            return self.groups[name].troubles(scores).get(self.deadlines.step)
