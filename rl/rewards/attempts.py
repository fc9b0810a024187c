"""Calls of a reward with a time limit, so that a prompt for which it fails loses only its own row.

A call that raises, hangs or returns invalid values leaves its rows without a score (NaN). `score_one_by_one` then finds the
failing prompts by bisection: halves of the failing set are called again until single prompts are left. All calls of one step
together take at most three times `timeout_s`. A service that cannot be reached is called again with growing pauses, since no
single prompt is the cause.

Several calls may run at once where the reward allows it. Python cannot end a thread. A call that exceeds its limit is
interrupted where it runs Python code, and the reward is created anew, so that no state is shared with it. `hung` reports that
such a call may still run; its process should then be replaced.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.rl.rewards.api import Reward
from nonet.rl.rewards.checks import Unreachable, describe_non_finite, score_allowing_nan
from nonet.types import Rollouts

# Shapes: U users, W beams.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_HOPELESS = 8  # single prompts that fail without one that succeeds, after which the others are not tried


@dataclass(frozen=True, slots=True)
class PromptFailure:
    """A prompt without a score.

    Attributes:
        row: Its row among those that were asked about.
        uid: Its uid.
        user: Its user.
        why: What went wrong.
    """

    row: int
    uid: str
    user: str
    why: str


class RewardTimeout(DataError):
    """A call that did not return in time."""


class RewardCalls:
    """Calls of one reward.

    Args:
        make: Makes the reward, set up and opened.
        name: Its name, for messages.
        timeout_s: How long one call may take.
    """

    def __init__(self, make: Callable[[], Reward], name: str, timeout_s: float):
        self._make, self.name, self.timeout_s = make, name, timeout_s
        self.reward = make()
        self._stuck, self._remaking = False, threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def hung(self) -> bool:
        """Whether a call that exceeded its limit may still run in this process."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return bool(self._threads)

    def score(
        self, rollouts: Rollouts, timeout_s: float | None = None
    ) -> tuple[np.ndarray, list[PromptFailure]]:
        """Call the reward once.

        Args:
            rollouts: The beams to be scored.
            timeout_s: How long the call may take; by default that of the reward.

        Returns:
            Scores [U, W] float32, NaN in whole rows that have none, and these rows.
        """
        try:
            return self._drop_non_finite(
                self._call_with_limit(self.timeout_s if timeout_s is None else timeout_s, rollouts), rollouts
            )
        except DataError as error:
            return _make_empty_scores(rollouts), _make_failures(
                rollouts, np.arange(len(rollouts.uid)), str(error)
            )

    def score_one_by_one(
        self, prompts: Sequence[Rollouts], budget_s: float | None = None
    ) -> tuple[list[np.ndarray], list[PromptFailure]]:
        """Score prompts for which a call failed, and find those that cause the failure.

        Args:
            prompts: Rollouts of one prompt each.
            budget_s: Limit of all calls together; by default twice the reward's `timeout_s`.

        Returns:
            Scores [1, W] of each prompt, NaN without a score, and the prompts that have none.
        """
        if not prompts:
            return [], []
        rollouts = Rollouts.concat(prompts)
        deadline = time.monotonic() + (2 * self.timeout_s if budget_s is None else budget_s)
        scores, troubles = _make_empty_scores(rollouts), {}
        sets, scored, failed_alone = [np.arange(len(prompts))], False, 0
        error: DataError | None = None
        late = self._stuck  # the call that failed on all of them was late
        while sets:
            rows = sets.pop()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (failed_alone >= _HOPELESS and not scored):
                why = "" if error is None else str(error)
                told = why if left_s > 0 or why else f"reward {self.name!r} had no time left"
                troubles |= {int(row): told for row in rows}
                continue
            some = rollouts.take(rows)
            try:
                found, wrong = self._call_with_retries(some, left_s, late=late)
            except DataError as failure:
                error, late = failure, isinstance(failure, RewardTimeout)
                if len(rows) == 1:
                    failed_alone += 1
                    troubles[int(rows[0])] = str(failure)
                    continue
                half = len(rows) // 2
                sets += [rows[half:], rows[:half]]
                continue
            scored = True
            scores[rows] = found
            troubles |= {int(rows[each.row]): each.why for each in wrong}
        named = [
            replace(_make_failures(rollouts, np.array([row]), why)[0], row=row)
            for row, why in sorted(troubles.items())
        ]
        return [scores[row : row + 1] for row in range(len(prompts))], named

    def _call_with_retries(
        self, some: Rollouts, left_s: float, *, late: bool
    ) -> tuple[np.ndarray, list[PromptFailure]]:
        """Call the reward; while it cannot be reached, retry with growing pauses for a third of the time left.

        If an earlier call exceeded its limit, each call gets a share of half of the time left, so that the bisection completes
        and the other half remains for the other prompts.
        """
        until, pause_s = time.monotonic() + left_s / 3, _FIRST_PAUSE_S
        levels = math.ceil(math.log2(max(1, len(some.uid))))
        limit_s = left_s / 2 / (levels + 1) if late else min(self.timeout_s, left_s)
        while True:
            try:
                return self._drop_non_finite(self._call_with_limit(limit_s, some), some)
            except Unreachable:
                if time.monotonic() + pause_s >= until:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            limit_s = min(self.timeout_s, max(0.0, until - time.monotonic()))

    def _drop_non_finite(
        self, scores: np.ndarray, rollouts: Rollouts
    ) -> tuple[np.ndarray, list[PromptFailure]]:
        """Replace the scores of prompts with scores that are not finite by NaN, and report these prompts."""
        bad = np.flatnonzero(~np.isfinite(scores).all(1))
        why = describe_non_finite(scores, self.name, rollouts)
        scores[bad] = np.nan
        return scores, _make_failures(rollouts, bad, why)

    def _call_with_limit(self, limit_s: float, rollouts: Rollouts) -> np.ndarray:
        """Return the scores of one call that may take `limit_s` seconds.

        Raises:
            DataError: The call raised an error.
            Late: The call did not return in time.
        """
        with self._remaking:
            if self._stuck:
                self.reward, self._stuck = self._make(), False
        reward, answers = self.reward, SimpleQueue[Any]()

        def work() -> None:
            try:
                answers.put(score_allowing_nan(reward, self.name, rollouts))
            except BaseException as error:
                answers.put(error)

        began = time.monotonic()
        thread = threading.Thread(target=work, name=f"reward {self.name}", daemon=True)
        thread.start()
        try:
            answer = answers.get(timeout=limit_s)
        except Empty:
            self._stuck = True
            self._threads.append(thread)
            _interrupt(thread)
            waited = time.monotonic() - began
            raise RewardTimeout(f"reward {self.name!r} has not answered within {waited:.3g} s") from None
        if isinstance(answer, DataError):
            raise answer
        if isinstance(answer, BaseException):
            raise DataError(f"reward {self.name!r}: {type(answer).__name__}: {answer}") from answer
        return answer


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread at its next step of Python code; a call into C code goes on."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _make_empty_scores(rollouts: Rollouts) -> np.ndarray:
    return np.full(rollouts.valid.shape, np.nan, np.float32)


def _make_failures(rollouts: Rollouts, rows: np.ndarray, why: str) -> list[PromptFailure]:
    return [PromptFailure(int(row), str(rollouts.uid[row]), str(rollouts.user_id[row]), why) for row in rows]
