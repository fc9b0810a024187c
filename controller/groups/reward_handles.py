"""The rewards of a stage as its loop sees them: scores as futures, and what becomes of prompts that have none.

A prompt that a reward fails on is scored once more, by another rank where there is one. The failing prompts of a call are
halved until those that are to blame are found, inside a rank for what raises or hangs, and here for what ends a rank's
process. Without a score then, a prompt is quarantined: its row is NaN, trainers leave it out, and `quarantined` names it. A
rank whose process hangs is ended and started again. All attempts of a call together take at most three times the reward's
`timeout_s`, and no longer than a step may; the time in which a process is started again, and that of other calls which a rank
answers first, come on top.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from nonet.deadlines import DEFAULTS, Deadlines
from nonet.errors import DataError, DeadlineExceeded, NonetError, WorkerFailed, WorkerLost
from nonet.workers.runtime import GroupFuture, PerRank, WorkerGroup, wait_for_results

if TYPE_CHECKING:
    from nonet.rl.rewards import PromptFailure

_LOOK_S = 1.0  # between looks at whether the beams are there, so that rewards are timed from then
_GRACE_S = 5.0  # above its time-out, which a rank keeps by itself
_BARREN = 3  # steps in a row without any score, after which a reward ends the run
_ATTEMPTS = 3  # times a reward's `timeout_s` that all attempts of a call may take together

Enter = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class QuarantinedPrompts:
    """Prompts of one call that a reward gave no score, twice: uids, users, and why of the first."""

    reward: str
    uids: tuple[str, ...]
    users: tuple[str, ...]
    why: str
    prompts: int

    def describe(self) -> str:
        """Return one line for a person."""
        users = ", ".join(self.users[:5]) + (", ..." if len(self.users) > 5 else "")
        return f"reward {self.reward!r} gave no score to {len(self.uids)} of {self.prompts} prompts (users {users}): {self.why}"


class RewardScores(dict[str, GroupFuture]):
    """Scores by reward, as futures that are complete.

    Attributes:
        quarantined: Prompts that have no score of some reward.
        retried: The number of prompts that were scored again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quarantined: list[QuarantinedPrompts] = []
        self.retried = 0


def _ignore_phase(stage: str, phase: str) -> None:
    """Do nothing: groups that fit together take no turns."""


class RewardHandles:
    """Every reward's group of one stage.

    Several threads may call `score` at once.

    Attributes:
        step: The step of the stage that scores are for; "steps without any score" are counted by it.
        quarantined: Prompts without a score of the newest `score`.
        retried: The number of prompts of the newest `score` that were scored again.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        timeouts_s: Mapping[str, float],
        stage: str = "",
        enter: Enter = _ignore_phase,
        deadlines: Deadlines = DEFAULTS,
    ):
        self.groups, self._timeouts_s, self.deadlines = dict(groups), dict(timeouts_s), deadlines
        self._stage, self._enter = stage, enter
        self.step: int | None = None
        self.quarantined: list[QuarantinedPrompts] = []
        self.retried = 0
        self._barren: dict[str, set[int]] = {}
        self._calls = 0
        self._under_way, self._counting = Counter[str](), Lock()

    def add(self, name: str, group: WorkerGroup, timeout_s: float) -> None:
        """Add a reward, from the next call on."""
        self.groups[name], self._timeouts_s[name] = group, timeout_s

    def remove(self, name: str) -> WorkerGroup:
        """Remove a reward and return its group, which still runs."""
        self._barren.pop(name, None)
        return self.groups.pop(name)

    def score(
        self,
        beams: GroupFuture,
        *,
        strict: bool = False,
        names: Collection[str] | None = None,
        step: int | None = None,
    ) -> RewardScores:
        """Score beams with the rewards. If a worker dies, it is restarted and its call is repeated once.

        All rewards run concurrently. Their timeouts start when the beams are available.

        Args:
            beams: Rollouts as encoded by `to_wire`, which may not be available yet.
            strict: Whether a prompt without a score raises the error that caused it.
            names: The names of the rewards to compute; by default all.
            step: The step that the scores are for, by default the current one. Scores of which a step is learned from count
                towards three barren steps; those of any other call should give -1, for they do not.

        Raises:
            DeadlineExceeded: Beams or, if `strict`, a reward were not there in time; it names who is late.
            DataError: A reward scored nothing in three steps in a row or, if `strict`, has no score for a prompt.
        """
        self._enter(self._stage, "score")
        groups = {name: group for name, group in list(self.groups.items()) if names is None or name in names}
        with self._counting:
            before = {name: self._under_way[name] for name in groups}
            self._under_way.update(list(groups))
        try:
            return self._score(beams, groups, before, self._choose_step(step), strict=strict)
        finally:
            with self._counting:
                self._under_way.subtract(list(groups))

    def _score(
        self,
        beams: GroupFuture,
        groups: Mapping[str, WorkerGroup],
        before: Mapping[str, int],
        step: int,
        *,
        strict: bool,
    ) -> RewardScores:
        """Score beams with rewards; `before` is the number of earlier calls of each reward that have not ended."""
        found = RewardScores()
        calls = {name: secrets.token_hex(8) for name in groups}
        futures = {name: group.score(beams, strict, calls[name], retries=1) for name, group in groups.items()}
        failures = {name: groups[name].list_failures(future, calls[name]) for name, future in futures.items()}
        beams.set_deadline(self.deadlines.step)
        while (
            not wait_for_results(_LOOK_S, beams, *futures.values(), *failures.values())
            and not beams.is_late_or_done()
        ):
            pass  # one wait for all of them, looked up from so that each reward is timed by itself
        beams.settle()
        began = time.monotonic()
        limits = {name: (1 + _ATTEMPTS * before[name]) * self._timeouts_s[name] + _GRACE_S for name in groups}
        for name, future in futures.items():
            future.set_deadline(limits[name])
        for name, future in futures.items():
            futures[name] = self._settle_scores(
                name, groups[name], future, beams, calls[name], limits[name], strict=strict
            )
        for name, future in futures.items():
            one = _RewardCall(self, name, groups[name], beams, began + float(self.deadlines.step))
            found[name] = one.retry_missing(future, failures[name], calls[name], found, step)
        self.quarantined, self.retried = found.quarantined, found.retried
        return found

    def compute_means(self, scores: Mapping[str, GroupFuture]) -> dict[str, np.ndarray]:
        """Return each reward's mean score of a beam by prompt [U]; NaN without a score."""
        means = {name: self.groups[name].compute_means(future, retries=1) for name, future in scores.items()}
        return {name: future.get(self.deadlines.step) for name, future in means.items()}

    def get_timeout_s(self, name: str) -> float:
        """Return how long one call of a reward may take."""
        return self._timeouts_s[name]

    def note_barren(self, name: str, step: int, reason: str | None) -> None:
        """Count a step in which a reward scored nothing. Raises DataError for the third in a row.

        Args:
            name: The reward.
            step: The step; below 0 it is not counted.
            reason: What was wrong; None where some prompt has a score.
        """
        if reason is None:
            self._barren.pop(name, None)
        elif step >= 0:
            barren = self._barren.setdefault(name, set())
            barren.add(step)
            if len(barren) >= _BARREN:
                raise DataError(
                    f"reward {name!r} scored none of the prompts of {_BARREN} steps in a row: {reason}"
                )

    def _choose_step(self, step: int | None) -> int:
        """Return the step that a call is for; without any, each call is a step of its own."""
        if step is None:
            step = self.step
        if step is None:
            self._calls += 1
            return self._calls
        return step

    def _settle_scores(
        self,
        name: str,
        group: WorkerGroup,
        future: GroupFuture,
        beams: GroupFuture,
        call: str,
        limit: float,
        *,
        strict: bool,
    ) -> GroupFuture:
        """Return scores that are there. The process of a rank that hangs is ended, and its prompts have none."""
        try:
            return future.settle()
        except DeadlineExceeded as error:
            if strict:
                raise DeadlineExceeded(
                    f"reward {name!r} has not answered within {self._timeouts_s[name]:g} s; raise its timeout_s or its "
                    f"workers ({error})"
                ) from None
            ranks = future.restart_late_ranks()
        except WorkerLost as error:
            if strict:
                raise
            ranks = [error.rank]
        blank = group.make_blank_scores(beams, call, retries=1)
        blank.settle(self.deadlines.start)
        for rank in ranks:
            future.replace_result(rank, blank)
        return future.set_deadline(limit).settle()


class _RewardCall:
    """The calls of one reward that repeat the prompts without a score, until `until` (monotonic seconds)."""

    def __init__(
        self, handles: RewardHandles, name: str, group: WorkerGroup, beams: GroupFuture, until: float
    ):
        self._handles, self._name, self._group, self._beams = handles, name, group, beams
        self._deadlines, self._until = handles.deadlines, until
        self._budget_s = (_ATTEMPTS - 1) * handles.get_timeout_s(name)  # the first call had one `timeout_s`

    def retry_missing(
        self, scores: GroupFuture, failures: GroupFuture, call: str, found: RewardScores, step: int
    ) -> GroupFuture:
        """Return scores in which prompts without a score were scored again; prompts that still have none are recorded."""
        troubles = self._fetch_troubles(scores, failures, call)
        if not any(troubles):
            self._handles.note_barren(self._name, step, None)
            return scores
        counts = scores.get_row_counts()
        starts, total = np.cumsum([0, *counts]), int(sum(counts))
        left = {int(starts[rank]) + each.row: each for rank, wrong in enumerate(troubles) for each in wrong}
        makers = {int(starts[rank]) + each.row: rank for rank, wrong in enumerate(troubles) for each in wrong}
        found.retried += len(left)
        scores, left = self._score_again(scores, sorted(left), left, makers, total)
        self._end_hung()
        if left:
            first = next(iter(left.values()))
            named = tuple(each.uid for each in left.values()), tuple(each.user for each in left.values())
            found.quarantined.append(QuarantinedPrompts(self._name, *named, first.why, total))
        barren = len(left) == total and total > 0
        self._handles.note_barren(self._name, step, next(iter(left.values())).why if barren else None)
        return scores

    def _score_again(
        self,
        scores: GroupFuture,
        rows: Sequence[int],
        left: dict[int, PromptFailure],
        makers: Mapping[int, int],
        total: int,
    ) -> tuple[GroupFuture, dict[int, PromptFailure]]:
        """Return patched scores, and the rows without one. Rows whose call ends a process are halved until one is left."""
        sets = [list(rows)]
        while sets and (left_s := self._until - time.monotonic()) > 0:
            some = sets.pop()
            try:
                scores, wrong = self._score_rows(scores, some, makers, total, min(self._budget_s, left_s))
            except DeadlineExceeded:  # its budget is spent
                continue
            except (WorkerLost, WorkerFailed):
                if len(some) > 1:
                    half = len(some) // 2
                    sets += [some[half:], some[:half]]
                continue
            for row in some:
                left.pop(row, None)
            left |= wrong
        return scores, {row: left[row] for row in sorted(left)}

    def _score_rows(
        self, scores: GroupFuture, rows: Sequence[int], makers: Mapping[int, int], total: int, budget_s: float
    ) -> tuple[GroupFuture, dict[int, PromptFailure]]:
        """Score rows again, each by another rank than before where there are several.

        Raises DeadlineExceeded, WorkerLost and WorkerFailed where that failed as a whole.
        """
        group, call = self._group, secrets.token_hex(8)
        world = group.world
        again: list[list[int]] = [[] for _ in range(world)]
        for nth, row in enumerate(rows):
            again[(makers[row] + 1 + nth) % world].append(row)
        rescored = group.score_again(self._beams, PerRank(again), call, budget_s).set_deadline(
            budget_s + _GRACE_S
        )
        failures = group.list_failures(rescored, call)
        try:
            rescored.settle()
        except DeadlineExceeded:
            rescored.restart_late_ranks()
            raise
        wrong = failures.get(self._deadlines.step)
        order = [row for part in again for row in part]
        patched = group.patch_scores(scores, rescored, order, total).settle(self._deadlines.step)
        return patched, {again[rank][each.row]: each for rank, part in enumerate(wrong) for each in part}

    def _fetch_troubles(
        self, scores: GroupFuture, failures: GroupFuture, call: str
    ) -> list[list[PromptFailure]]:
        """Return by rank the prompts without a score; they are fetched only where there are some."""
        try:
            if not any(failures.get_row_counts()):
                return []
            return failures.get(self._deadlines.step)
        except NonetError:  # of a rank that was lost since: its scores are others
            return self._group.list_failures(scores, call).get(self._deadlines.step)

    def _end_hung(self) -> None:
        """End the processes in which a call that was late may still run, and wait until Ray has started them again."""
        try:
            hung = self._group.is_hung(retries=1).get(_GRACE_S)
            for rank, is_hung in enumerate(hung):
                if is_hung:
                    self._group.hosts.restart(rank)
            if any(hung):
                self._group.is_hung(retries=1).get(self._deadlines.start)
        except NonetError:  # a rank that does not answer is ended where its scores are waited for
            return
