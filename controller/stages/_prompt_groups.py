"""PromptGroups: decides which prompts are sent to rollouts and which beams are trained on, with bounded staleness.

The class uses no clock, no Ray and no thread. A group is a part of a step's prompts that is generated and trained as a
unit. It is identified by its number in the stage's order of prompts: group n belongs to step n // batch if no group is
generated again.

    accepted + running <= (staleness + step + 1) x batch

`step` counts updates, and a version is the step whose weights it holds. A group is therefore never too old, unless groups
that started later are trained before it. A group that is too old when its beams arrive is aborted, and is generated again
with the newest version.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from typing import Literal

Verdict = Literal["accepted", "stale", "dropped"]


class PromptGroups:
    """The state of a stage's prompt groups.

    Attributes:
        batch: The number of groups in a step.
        steps: The number of steps of the stage.
        staleness: The largest number of updates between the version that generated a group and the update that uses it.
        step: The number of updates so far.
        running: The version that generates each running group, by the number of the group.
        aborted: How often a running group was aborted, to be generated again.
        dropped: How often an answer was dropped because its group was no longer running, or running again.
    """

    def __init__(
        self, batch: int, steps: int, staleness: int, *, step: int = 0, trained: Collection[int] = ()
    ):
        self.batch, self.steps, self.staleness, self.step = batch, steps, staleness, step
        self.running: dict[int, int] = {}
        self.aborted = self.dropped = 0
        self._trained = set(trained)
        self._waiting = [n for n in range(batch * steps) if n not in self._trained]
        self._ready: deque[tuple[int, int]] = deque()  # (number, version), in the order of arrival

    @property
    def accepted(self) -> int:
        """The number of groups that are trained, being trained, or ready to be trained."""
        return len(self._trained) + len(self._ready)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps

    def start_group(self) -> int | None:
        """Return the group to generate now with the newest version, or None if the bound forbids one more or none is left."""
        max_groups = (self.staleness + self.step + 1) * self.batch
        if not self._waiting or self.accepted + len(self.running) >= max_groups:
            return None
        number = heapq.heappop(self._waiting)
        self.running[number] = self.step
        return number

    def accept_answer(self, number: int, version: int) -> Verdict:
        """Decide what becomes of an answer, and record it.

        Returns:
            "accepted" if it is the first answer of its group and fresh enough; "stale" if it is too old, so that the group is
            aborted; "dropped" if the group is not running, or running again with a newer version.
        """
        if number not in self.running:
            self.dropped += 1
            return "dropped"
        if self.accepted // self.batch - version > self.staleness:
            if self.running[number] > version:  # a late answer; the group is being generated again
                self.dropped += 1
                return "dropped"
            self.cancel_group(number)
            return "stale"
        del self.running[number]
        self._ready.append((number, version))
        return "accepted"

    def cancel_group(self, number: int) -> None:
        """Abort a running group, which will be generated again."""
        del self.running[number]
        self.aborted += 1
        heapq.heappush(self._waiting, number)

    def take_batch(self) -> list[tuple[int, int]] | None:
        """Remove and return the groups of the next update as (number, version); None while too few are accepted."""
        if len(self._ready) < self.batch:
            return None
        batch = [self._ready.popleft() for _ in range(self.batch)]
        self._trained.update(number for number, _ in batch)
        return sorted(batch)

    def advance_step(self) -> None:
        """Record that an update was applied, which makes a new version."""
        self.step += 1
