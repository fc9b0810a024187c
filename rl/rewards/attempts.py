"""Calls of a reward with a time limit, so that a prompt for which the reward fails loses only its own scores.

A call that raises, hangs or returns invalid values leaves its rows without a score (NaN). `score_one_by_one` then finds the
failing prompts by bisection: the reward is called again with each half of a failing set, until single prompts are left. All
calls of one step together take at most three times `timeout_s`: the first call once, the bisection twice. A service that cannot
be reached is called again with growing pauses, since no single prompt is the cause.

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
from nonet.rl.rewards.bisection import BisectedRows
from nonet.rl.rewards.checks import Unreachable, describe_non_finite, score_allowing_nan
from nonet.types import Rollouts

# Shapes: U users, W beams.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = (
    0.1,
    5.0,
)  # between calls of a service that cannot be reached; doubled after each call
_MAX_LONE_FAILURES = (
    8  # single prompts that fail before any call succeeds; the remaining prompts are then not tried
)


@dataclass(frozen=True, slots=True)
class PromptFailure:
    """A prompt for which a reward gave no scores.

    Attributes:
        row: Row of the prompt in the rollouts of the call.
        uid: Unique id of the prompt, `Rollouts.uid`.
        user: Id of the prompt's user.
        why: The error message.
    """

    row: int
    uid: str
    user: str
    why: str


class RewardTimeout(DataError):
    """The error of a call of a reward that did not return in time."""


class RewardCalls:
    """Calls one reward with a time limit, and creates it anew after a call that exceeded the limit.

    Args:
        make: Creates the reward, set up and opened.
        name: Name of the reward, for messages.
        timeout_s: How long one call may take.
    """

    def __init__(self, make: Callable[[], Reward], name: str, timeout_s: float):
        self._make, self.name, self.timeout_s = make, name, timeout_s
        self.reward = make()
        self._must_recreate, self._recreate_lock = False, threading.Lock()
        self._late_threads: list[threading.Thread] = []  # of calls that exceeded their limit

    @property
    def hung(self) -> bool:
        """Whether a call that exceeded its limit may still run in this process."""
        self._late_threads = [thread for thread in self._late_threads if thread.is_alive()]
        return bool(self._late_threads)

    def score(
        self, rollouts: Rollouts, timeout_s: float | None = None
    ) -> tuple[np.ndarray, list[PromptFailure]]:
        """Call the reward once.

        Args:
            rollouts: The beams to be scored.
            timeout_s: How long the call may take; by default that of the reward.

        Returns:
            Scores [U, W] float32, and the prompts without scores, whose rows are NaN.
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
            budget_s: Time limit of all calls together; by default twice the reward's `timeout_s`.

        Returns:
            Scores [1, W] of each prompt, and the prompts without scores, for which they are NaN; `row` is the index in `prompts`.
        """
        if not prompts:
            return [], []
        rollouts = Rollouts.concat(prompts)
        deadline = time.monotonic() + (2 * self.timeout_s if budget_s is None else budget_s)
        scores, message_by_row = _make_empty_scores(rollouts), {}
        any_call_succeeded, lone_failures = False, 0
        last_error: DataError | None = None
        last_timed_out = (
            self._must_recreate
        )  # whether the caller's own call, which had all these prompts, exceeded its limit
        for rows in (row_sets := BisectedRows(np.arange(len(prompts)))):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (lone_failures >= _MAX_LONE_FAILURES and not any_call_succeeded):
                message = "" if last_error is None else str(last_error)
                why = message if left_s > 0 or message else f"reward {self.name!r} had no time left"
                message_by_row |= {int(row): why for row in rows}
                continue
            subset = rollouts.take(rows)
            try:
                subset_scores, subset_failures = self._call_with_retries(subset, left_s, late=last_timed_out)
            except DataError as error:
                last_error, last_timed_out = error, isinstance(error, RewardTimeout)
                if len(rows) == 1:
                    lone_failures += 1
                    message_by_row[int(rows[0])] = str(error)
                row_sets.halve(rows)
                continue
            any_call_succeeded = True
            scores[rows] = subset_scores
            message_by_row |= {int(rows[failure.row]): failure.why for failure in subset_failures}
        failures = [
            replace(_make_failures(rollouts, np.array([row]), why)[0], row=row)
            for row, why in sorted(message_by_row.items())
        ]
        return [scores[row : row + 1] for row in range(len(prompts))], failures

    def _call_with_retries(
        self, rollouts: Rollouts, left_s: float, *, late: bool
    ) -> tuple[np.ndarray, list[PromptFailure]]:
        """Call the reward; while it cannot be reached, retry with growing pauses for a third of the time left.

        If the previous call exceeded its limit (`late`), the limit of this call is half of the time left, divided by the number
        of calls from this set down to a single prompt. The bisection then completes, and half of the time is left for the other
        prompts.

        Returns:
            Scores and failures, as `score` returns them.
        """
        retry_deadline, pause_s = time.monotonic() + left_s / 3, _FIRST_PAUSE_S
        halvings = math.ceil(math.log2(max(1, len(rollouts.uid))))
        limit_s = left_s / 2 / (halvings + 1) if late else min(self.timeout_s, left_s)
        while True:
            try:
                return self._drop_non_finite(self._call_with_limit(limit_s, rollouts), rollouts)
            except Unreachable:
                if time.monotonic() + pause_s >= retry_deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            limit_s = min(self.timeout_s, max(0.0, retry_deadline - time.monotonic()))

    def _drop_non_finite(
        self, scores: np.ndarray, rollouts: Rollouts
    ) -> tuple[np.ndarray, list[PromptFailure]]:
        """Set the rows of `scores` with a value that is not finite to NaN in place, and return `scores` and these prompts."""
        bad_rows = np.flatnonzero(~np.isfinite(scores).all(1))
        why = describe_non_finite(scores, self.name, rollouts)
        scores[bad_rows] = np.nan
        return scores, _make_failures(rollouts, bad_rows, why)

    def _call_with_limit(self, limit_s: float, rollouts: Rollouts) -> np.ndarray:
        """Return the scores [U, W] of one call that may take `limit_s` seconds; some may not be finite.

        Raises:
            DataError: The call raised an error.
            RewardTimeout: The call did not return in time; the next call creates the reward anew.
        """
        with self._recreate_lock:
            if self._must_recreate:
                self.reward, self._must_recreate = self._make(), False
        reward, result_queue = self.reward, SimpleQueue[Any]()

        def score_in_thread() -> None:
            try:
                result_queue.put(score_allowing_nan(reward, self.name, rollouts))
            except BaseException as error:
                result_queue.put(error)

        began = time.monotonic()
        thread = threading.Thread(target=score_in_thread, name=f"reward {self.name}", daemon=True)
        thread.start()
        try:
            result = result_queue.get(timeout=limit_s)
        except Empty:
            self._must_recreate = True
            self._late_threads.append(thread)
            _interrupt(thread)
            waited_s = time.monotonic() - began
            raise RewardTimeout(f"reward {self.name!r} has not answered within {waited_s:.3g} s") from None
        if isinstance(result, DataError):
            raise result
        if isinstance(result, BaseException):
            raise DataError(f"reward {self.name!r}: {type(result).__name__}: {result}") from result
        return result


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread at its next step of Python code; a call into C code goes on."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _make_empty_scores(rollouts: Rollouts) -> np.ndarray:
    """Return scores [U, W] float32 that are all NaN."""
    return np.full(rollouts.valid.shape, np.nan, np.float32)


def _make_failures(rollouts: Rollouts, rows: np.ndarray, why: str) -> list[PromptFailure]:
    """Return a failure with the message `why` for each of `rows` of the rollouts."""
    return [PromptFailure(int(row), str(rollouts.uid[row]), str(rollouts.user_id[row]), why) for row in rows]
