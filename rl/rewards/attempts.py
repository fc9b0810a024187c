"""Attempts: a reward asked with a time limit, so that a prompt it fails on costs its own row alone.

A call that raises, hangs or answers nonsense leaves its rows without a score (NaN) and says why of each. `one_by_one` asks
a user at a time and so finds those that are to blame. A call that is late goes on in a thread that nobody waits for; the reward
is then made anew, so that no state is shared with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.rl.rewards.api import Reward
from nonet.rl.rewards.checks import not_finite, score_loosely
from nonet.types import Rollouts


@dataclass(frozen=True, slots=True)
class Trouble:
    """A prompt without a score: its row among those asked, uid, user, and why."""

    row: int
    uid: str
    user: str
    why: str


class Attempts:
    """make: makes the reward, set up and opened; timeout_s: how long one call may take."""

    def __init__(self, make: Callable[[], Reward], name: str, timeout_s: float):
        self._make, self.name, self.timeout_s = make, name, timeout_s
        self.reward = make()
        self._stuck = False

    def score(self, rollouts: Rollouts, timeout_s: float | None = None) -> tuple[np.ndarray, list[Trouble]]:
        """Scores [U, W] float32, NaN in whole rows that have none; and those rows."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            scores = self._within(limit, rollouts)
        except DataError as error:
            nothing = np.full(rollouts.valid.shape, np.nan, np.float32)
            return nothing, _troubles(rollouts, np.arange(len(nothing)), str(error))
        bad = np.flatnonzero(~np.isfinite(scores).all(1))
        why = not_finite(scores, self.name, rollouts)
        scores[bad] = np.nan
        return scores, _troubles(rollouts, bad, why)

    def one_by_one(self, prompts: Sequence[Rollouts]) -> tuple[list[np.ndarray], list[Trouble]]:
        """As `score`, of one prompt after the other: each has its share of twice the time, so all that hang cost that."""
        limit = min(self.timeout_s, 2 * self.timeout_s / max(1, len(prompts)))
        parts: list[np.ndarray] = []
        troubles: list[Trouble] = []
        for row, prompt in enumerate(prompts):
            scores, wrong = self.score(prompt, limit)
            parts.append(scores)
            troubles += [replace(each, row=row) for each in wrong]
        return parts, troubles

    def _within(self, limit_s: float, rollouts: Rollouts) -> np.ndarray:
        if self._stuck:
            self.reward, self._stuck = self._make(), False
        reward, answers = self.reward, SimpleQueue[Any]()

        def work() -> None:
            try:
                answers.put(score_loosely(reward, self.name, rollouts))
            except BaseException as error:
                answers.put(error)

        began = time.monotonic()
        threading.Thread(target=work, name=f"reward {self.name}", daemon=True).start()
        try:
            answer = answers.get(timeout=limit_s)
        except Empty:
            self._stuck = True
            waited = time.monotonic() - began
            raise DataError(f"reward {self.name!r} has not answered within {waited:.3g} s") from None
        if isinstance(answer, DataError):
            raise answer
        if isinstance(answer, BaseException):
            raise DataError(f"reward {self.name!r}: {type(answer).__name__}: {answer}") from answer
        return answer


def _troubles(rollouts: Rollouts, rows: np.ndarray, why: str) -> list[Trouble]:
    return [Trouble(int(row), str(rollouts.uid[row]), str(rollouts.user_id[row]), why) for row in rows]
