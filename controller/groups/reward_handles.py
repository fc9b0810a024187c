"""Handles of a stage's rewards: they return scores as futures, and quarantine the prompts that have no score.

A prompt that a reward fails on is scored once more, by another rank if there are several. If that fails, the prompts of the
call are halved until those that cause the failure are found: inside a rank if scoring raises or hangs, and here if it ends
the rank's process. A prompt that still has no score is quarantined: its row of scores is NaN, trainers leave it out, and
`quarantined` names it. A rank whose process hangs is killed and started again. All attempts of a call together take at most
three times the reward's `timeout_s`, and those after the first no longer than a step may. Two waits are not included: until a
killed process has started again, and until a rank has answered earlier calls.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING

import numpy as np

from nonet.controller.groups.handles import Enter, ignore_phase
from nonet.deadlines import DEFAULTS, Deadlines
from nonet.errors import DataError, DeadlineExceeded, NonetError, WorkerFailed, WorkerLost
from nonet.rl.rewards import BisectedRows
from nonet.workers.runtime import GroupFuture, PerRank, WorkerGroup, wait_for_results

if TYPE_CHECKING:
    from nonet.rl.rewards import PromptFailure

_POLL_S = 1.0  # between checks whether the beams are available, from when on rewards are timed
_GRACE_S = 5.0  # added to the timeout of a rank, so that the rank reports its own timeout first
_MAX_BARREN_STEPS = 3  # consecutive steps without any score, after which a reward ends the run
_ATTEMPTS = 3  # all attempts of a call together may take this many times the reward's `timeout_s`


@dataclass(frozen=True, slots=True)
class QuarantinedPrompts:
    """The prompts of one call to which a reward gave no score, in two attempts.

    Attributes:
        reward: The name of the reward.
        uids: The ids of the prompts.
        users: The user of each prompt.
        why: Why the first of them has no score.
        prompts: The number of all prompts of the call.
    """

    reward: str
    uids: tuple[str, ...]
    users: tuple[str, ...]
    why: str
    prompts: int

    def describe(self) -> str:
        """Return one line that says how many prompts have no score, of which users, and why."""
        users = ", ".join(self.users[:5]) + (", ..." if len(self.users) > 5 else "")
        return f"reward {self.reward!r} gave no score to {len(self.uids)} of {self.prompts} prompts (users {users}): {self.why}"


class RewardScores(dict[str, GroupFuture]):
    """The scores [U, W] of one call by reward, as futures that are complete.

    Attributes:
        quarantined: Prompts that have no score of some reward.
        retried: The number of prompts that were scored again.
        groups: By reward, the worker group that scored. A reward that is attached under the name of another has another one.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup]):
        super().__init__()
        self.groups = groups
        self.quarantined: list[QuarantinedPrompts] = []
        self.retried = 0


class RewardHandles:
    """The worker groups of all rewards of one stage. Several threads may call `score` at once.

    Attributes:
        groups: The worker group of each reward, by name.
        quarantined: The prompts without a score of the newest call of `score`.
        retried: The number of prompts of that call that were scored again.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        timeouts_s: Mapping[str, float],
        stage: str = "",
        enter: Enter = ignore_phase,
        deadlines: Deadlines = DEFAULTS,
    ):
        self.groups, self._timeouts_s, self.deadlines = dict(groups), dict(timeouts_s), deadlines
        self._stage, self._enter = stage, enter
        self.quarantined: list[QuarantinedPrompts] = []
        self.retried = 0
        self._barren_steps: dict[str, set[int]] = {}
        self._stepless_calls = 0
        self._running_calls, self._calls_changed = Counter[str](), Condition()

    def add(self, name: str, group: WorkerGroup, timeout_s: float) -> None:
        """Add a reward, from the next call on."""
        with self._calls_changed:
            self.groups[name], self._timeouts_s[name] = group, timeout_s

    def remove(self, name: str) -> WorkerGroup:
        """Remove a reward, wait until no call of `score` computes it, and return its group, which still runs."""
        with self._calls_changed:
            group = self.groups.pop(name)
            self._calls_changed.wait_for(lambda: not self._running_calls[name])
        self._barren_steps.pop(name, None)
        return group

    def score(
        self,
        beams: GroupFuture,
        *,
        strict: bool = False,
        names: Collection[str] | None = None,
        step: int | None = None,
    ) -> RewardScores:
        """Score beams with the rewards, and wait for the scores. If a worker dies, it is restarted and its call is repeated once.

        All rewards run concurrently. Their timeouts start when the beams are available.

        Args:
            beams: Rollouts as encoded by `to_wire`, which may not be available yet.
            strict: Whether a prompt without a score raises the error that caused it.
            names: The names of the rewards to compute; by default all.
            step: The step that the scores are for; by default, each call counts as a step of its own. Pass -1 for scores that
                no training step uses; they do not count towards the consecutive steps without any score.

        Raises:
            DeadlineExceeded: The beams or, if `strict`, the scores of a reward did not arrive in time; the message names who
                is late.
            DataError: A reward scored nothing in three consecutive steps or, if `strict`, has no score for a prompt.
        """
        self._enter(self._stage, "score")
        with self._calls_changed:
            groups = {name: group for name, group in self.groups.items() if names is None or name in names}
            earlier_calls = {name: self._running_calls[name] for name in groups}
            self._running_calls.update(list(groups))
        try:
            return self._score(beams, groups, earlier_calls, self._choose_step(step), strict=strict)
        finally:
            with self._calls_changed:
                self._running_calls.subtract(list(groups))
                self._calls_changed.notify_all()

    def _score(
        self,
        beams: GroupFuture,
        groups: Mapping[str, WorkerGroup],
        earlier_calls: Mapping[str, int],
        step: int,
        *,
        strict: bool,
    ) -> RewardScores:
        """Score beams with rewards; `earlier_calls` is the number of calls of each reward that have not ended yet.

        Each of those calls may take all its attempts before a rank answers this one, which extends its time limit.
        """
        results = RewardScores(groups)
        call_ids = {name: secrets.token_hex(8) for name in groups}
        futures = {
            name: group.score(beams, strict, call_ids[name], retries=1) for name, group in groups.items()
        }
        failures = {
            name: groups[name].list_failures(future, call_ids[name]) for name, future in futures.items()
        }
        beams.set_deadline(self.deadlines.step)
        while (
            not wait_for_results(_POLL_S, beams, *futures.values(), *failures.values())
            and not beams.is_late_or_done()
        ):
            pass  # the wait ends early if all scores have arrived, and else when the beams have
        beams.settle()
        limits = {  # in seconds, from now on
            name: (1 + _ATTEMPTS * earlier_calls[name]) * self._timeouts_s[name] + _GRACE_S for name in groups
        }
        for name, future in futures.items():
            future.set_deadline(limits[name])
        calls = {
            name: _RewardCall(self, name, group, beams, call_ids[name]) for name, group in groups.items()
        }
        for name, call in calls.items():
            futures[name] = call.settle_scores(futures[name], limits[name], strict=strict)
        for name, call in calls.items():
            results[name] = call.retry_missing(futures[name], failures[name], results, step)
        self.quarantined, self.retried = results.quarantined, results.retried
        return results

    def compute_means(self, scores: Mapping[str, GroupFuture]) -> dict[str, np.ndarray]:
        """Return, by reward, the mean score [U] over each prompt's beams; NaN for a prompt without a score."""
        means = {name: self.groups[name].compute_means(future, retries=1) for name, future in scores.items()}
        return {name: future.get(self.deadlines.step) for name, future in means.items()}

    def get_timeout_s(self, name: str) -> float:
        """Return how long one call of a reward may take."""
        return self._timeouts_s[name]

    def note_barren(self, name: str, step: int, reason: str | None) -> None:
        """Record whether a reward scored anything in a step.

        Args:
            name: The name of the reward.
            step: The step; if it is below 0, a step without any score is not counted.
            reason: Why no prompt has a score; None if some prompt has one.

        Raises:
            DataError: It is the third consecutive step without any score.
        """
        if reason is None:
            self._barren_steps.pop(name, None)
        elif step >= 0:
            steps = self._barren_steps.setdefault(name, set())
            steps.add(step)
            if len(steps) >= _MAX_BARREN_STEPS:
                raise DataError(
                    f"reward {name!r} scored none of the prompts of {_MAX_BARREN_STEPS} steps in a row: {reason}"
                )

    def _choose_step(self, step: int | None) -> int:
        """Return `step`, or the number of this call if it is None."""
        if step is None:
            self._stepless_calls += 1
            return self._stepless_calls
        return step


class _RewardCall:
    """The scoring of beams with one reward, repeated for the prompts to which it gave no score.

    Args:
        handles: The rewards of the stage.
        name: The name of the reward.
        group: The group of the reward.
        beams: The beams that are scored.
        call_id: The id of the first attempt.
    """

    def __init__(
        self,
        handles: RewardHandles,
        name: str,
        group: WorkerGroup,
        beams: GroupFuture,
        call_id: str,
    ):
        self._handles, self._name, self._group, self._beams = handles, name, group, beams
        self._call_id = call_id
        self._deadlines, self._timeout_s = handles.deadlines, handles.get_timeout_s(name)

    def settle_scores(self, scores: GroupFuture, limit_s: float, *, strict: bool) -> GroupFuture:
        """Wait for the scores, and return them. Unless `strict`, prompts of a rank that fails get blank scores.

        A rank that is late is restarted. If `strict`, the error of a late or lost rank is raised.
        """
        try:
            return scores.settle()
        except DeadlineExceeded as error:
            if strict:
                raise DeadlineExceeded(
                    f"reward {self._name!r} has not answered within {self._timeout_s:g} s; raise its timeout_s or its "
                    f"workers ({error})"
                ) from None
            ranks_without_scores = scores.restart_late_ranks()
        except WorkerLost as error:
            if strict:
                raise
            ranks_without_scores = [error.rank]
        blank_scores = self._group.make_blank_scores(self._beams, self._call_id, retries=1)
        blank_scores.settle(self._deadlines.start)
        for rank in ranks_without_scores:
            scores.replace_result(rank, blank_scores)
        return scores.set_deadline(limit_s).settle()

    def retry_missing(
        self, scores: GroupFuture, failures: GroupFuture, results: RewardScores, step: int
    ) -> GroupFuture:
        """Score the prompts without a score again, and return all scores; prompts that still have none are recorded.

        Args:
            scores: The scores of the first attempt.
            failures: The failures of the first attempt, by rank.
            results: The results of the whole call; its lists of quarantined and retried prompts are updated.
            step: The step that the scores are for.
        """
        failures_by_rank = self._fetch_failures(scores, failures)
        if not any(failures_by_rank):
            self._handles.note_barren(self._name, step, reason=None)
            return scores
        row_counts = scores.get_row_counts()
        starts, prompt_count = np.cumsum([0, *row_counts]), int(sum(row_counts))
        failure_by_row: dict[int, PromptFailure] = {}
        rank_by_row: dict[int, int] = {}
        for rank, rank_failures in enumerate(failures_by_rank):
            for failure in rank_failures:
                row = int(starts[rank]) + failure.row
                failure_by_row[row], rank_by_row[row] = failure, rank
        results.retried += len(failure_by_row)
        scores, unscored = self._score_again(scores, failure_by_row, rank_by_row, prompt_count)
        self._restart_hung_ranks()
        reason = unscored[0].why if unscored else None
        if reason is not None:
            uids, users = tuple(each.uid for each in unscored), tuple(each.user for each in unscored)
            results.quarantined.append(QuarantinedPrompts(self._name, uids, users, reason, prompt_count))
        self._handles.note_barren(self._name, step, reason if len(unscored) == prompt_count else None)
        return scores

    def _score_again(
        self,
        scores: GroupFuture,
        unscored: dict[int, PromptFailure],
        rank_by_row: Mapping[int, int],
        prompt_count: int,
    ) -> tuple[GroupFuture, list[PromptFailure]]:
        """Score rows again, and return all scores with the failures of the rows that still have none, in their order.

        Rows whose call ends a process are halved until the row that causes it is alone.

        Args:
            scores: The scores of all rows.
            unscored: The failures of the rows without a score, by row; updated in place.
            rank_by_row: The rank that failed on each of these rows.
            prompt_count: The number of all rows.
        """
        budget_s = (_ATTEMPTS - 1) * self._timeout_s  # the first attempt had one `timeout_s`
        until_s = time.monotonic() + float(self._deadlines.step)
        for row_set in (row_sets := BisectedRows(sorted(unscored))):
            if (remaining_s := until_s - time.monotonic()) <= 0:
                break
            try:
                scores, new_failures = self._score_rows(
                    scores, row_set, rank_by_row, prompt_count, min(budget_s, remaining_s)
                )
            except DeadlineExceeded:  # the time for these rows is over; others may still be scored
                continue
            except (WorkerLost, WorkerFailed):
                row_sets.halve(row_set)
                continue
            for row in row_set:
                unscored.pop(row, None)
            unscored |= new_failures
        return scores, [unscored[row] for row in sorted(unscored)]

    def _score_rows(
        self,
        scores: GroupFuture,
        rows: Sequence[int],
        rank_by_row: Mapping[int, int],
        prompt_count: int,
        budget_s: float,
    ) -> tuple[GroupFuture, dict[int, PromptFailure]]:
        """Score rows again, each by another rank than before if there are several.

        Returns:
            The scores of all rows, and the failures of these rows by row.

        Raises:
            DeadlineExceeded: A rank did not answer in time; it was restarted.
            WorkerLost: The process of a rank ended.
            WorkerFailed: A call failed as a whole.
        """
        group, call_id = self._group, secrets.token_hex(8)
        rows_by_rank: list[list[int]] = [[] for _ in range(group.world)]
        for index, row in enumerate(rows):
            rows_by_rank[(rank_by_row[row] + 1 + index) % group.world].append(row)
        rescored = group.score_again(self._beams, PerRank(rows_by_rank), call_id, budget_s)
        rescored.set_deadline(budget_s + _GRACE_S)
        failures = group.list_failures(rescored, call_id)
        try:
            rescored.settle()
        except DeadlineExceeded:
            rescored.restart_late_ranks()
            raise
        failures_by_rank = failures.get(self._deadlines.step)
        order = [row for rank_rows in rows_by_rank for row in rank_rows]
        patched = group.patch_scores(scores, rescored, order, prompt_count).settle(self._deadlines.step)
        return patched, {
            rows_by_rank[rank][failure.row]: failure
            for rank, rank_failures in enumerate(failures_by_rank)
            for failure in rank_failures
        }

    def _fetch_failures(self, scores: GroupFuture, failures: GroupFuture) -> list[list[PromptFailure]]:
        """Return, by rank, the failures of the prompts without a score; an empty list if no rank has any."""
        try:
            return failures.get(self._deadlines.step) if any(failures.get_row_counts()) else []
        except NonetError:
            # A rank was lost meanwhile: its scores and failures are those of the repeated call.
            return self._group.list_failures(scores, self._call_id).get(self._deadlines.step)

    def _restart_hung_ranks(self) -> None:
        """Restart the ranks in which a late call still runs, and wait until Ray has started them again."""
        try:
            hung = self._group.is_hung(retries=1).get(_GRACE_S)
            for rank, is_hung in enumerate(hung):
                if is_hung:
                    self._group.hosts.restart(rank)
            if any(hung):
                self._group.is_hung(retries=1).get(self._deadlines.start)
        except NonetError:  # a rank that does not answer is restarted by the next wait for its scores
            return
