"""PromptGroups: which prompts are asked, what becomes of their answers, and what is trained, under a bound on staleness.

Pure: no clock, no Ray, no thread. A group is a piece of a step's prompts that is asked, answered and trained as one. It is known
by its number in the stage's order of prompts: group n belongs to step n // batch where nothing is asked again.

    accepted + running <= (staleness + step + 1) x batch

`step` counts updates, and a version is the step whose weights it holds. So a group that nobody overtakes is never too old. One
that was overtaken may be: then it is aborted when it arrives, and asked again under the newest version.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from typing import Literal

Verdict = Literal["accepted", "stale", "dropped"]


class PromptGroups:
    """batch: groups a step; steps: of the stage; staleness: updates that may lie between an answer's version and its own update.

    step, trained   where a stage goes on: updates so far, and the numbers of the groups they were made from
    """

    def __init__(
        self, batch: int, steps: int, staleness: int, *, step: int = 0, trained: Collection[int] = ()
    ):
        self.batch, self.steps, self.staleness, self.step = batch, steps, staleness, step
        self.running: dict[int, int] = {}  # number: the version it was asked under
        self.aborted = self.dropped = 0
        self._trained = set(trained)
        self._left = [n for n in range(batch * steps) if n not in self._trained]
        self._ready: deque[tuple[int, int]] = deque()  # (number, version), in the order of arrival

    @property
    def accepted(self) -> int:
        """Groups trained, being trained, or waiting for it."""
        return len(self._trained) + len(self._ready)

    @property
    def over(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps

    def ask(self) -> int | None:
        """The group to ask now, under the newest version; None where the bound forbids one more, or none is left."""
        allowed = (self.staleness + self.step + 1) * self.batch
        if not self._left or self.accepted + len(self.running) >= allowed:
            return None
        number = heapq.heappop(self._left)
        self.running[number] = self.step
        return number

    def answered(self, number: int, version: int) -> Verdict:
        """What becomes of an answer. The first that is fresh enough is accepted; others of the same group are dropped."""
        if number not in self.running:
            self.dropped += 1
            return "dropped"
        if self.accepted // self.batch - version > self.staleness:
            if (
                self.running[number] > version
            ):  # a late answer of an earlier asking: the newer one is under way
                self.dropped += 1
                return "dropped"
            self.lost(number)
            return "stale"
        del self.running[number]
        self._ready.append((number, version))
        return "accepted"

    def lost(self, number: int) -> None:
        """A running group is aborted; it will be asked again."""
        del self.running[number]
        self.aborted += 1
        heapq.heappush(self._left, number)

    def take(self) -> list[tuple[int, int]] | None:
        """(number, version) of the groups of the next update, by number; None while there are too few."""
        if len(self._ready) < self.batch:
            return None
        batch = [self._ready.popleft() for _ in range(self.batch)]
        self._trained.update(number for number, _ in batch)
        return sorted(batch)

    def applied(self) -> None:
        """The update is applied: there is a new version."""
        self.step += 1
