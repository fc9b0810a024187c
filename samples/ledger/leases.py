"""Leases: slices to workers that come, go and die, in the order of global steps.

A worker leases the first free slice of the steps under way. A step is applied when each of its slices is done; at most
`ahead` later steps are open meanwhile. What a worker that is gone had leased is free again, before anything newer, and nobody
waits for it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Any

from nonet.samples.ledger.ledger import Ledger
from nonet.samples.ledger.order import Slice, Steps


class Leases:
    """Steps [first, stop) of `steps` over a ledger. `answers` of a step's slices, by their part, wait until all are there."""

    def __init__(self, ledger: Ledger, steps: Steps, first: int, stop: int, ahead: int = 1):
        self.ledger, self.steps, self.stop, self.ahead = ledger, steps, stop, ahead
        self.step = first
        self._opened = first
        self._free: list[tuple[int, int, Slice]] = []
        self._answers: dict[int, dict[int, Any]] = defaultdict(dict)
        self._open()

    @property
    def over(self) -> bool:
        """Whether every step is applied."""
        return self.step >= self.stop

    def lease(self, worker: str) -> Slice | None:
        """The next slice for a worker; None where all that is open is leased."""
        if not self._free:
            return None
        part = heapq.heappop(self._free)[-1]
        self.ledger.lease(part, worker)
        return part

    def done(self, worker: str, part: Slice, answer: Any) -> bool:
        """A worker is done with a slice. False where it is no longer the worker's: then its answer does not count."""
        if self.ledger.holder(part) != worker:
            return False
        self._answers[part.step][part.part] = answer
        return True

    def left(self, worker: str) -> None:
        """A worker is gone: what it leased and did not finish is free again."""
        for part in self.ledger.held_by(worker):
            if part.part not in self._answers[part.step]:
                self.ledger.release(part)
                heapq.heappush(self._free, (part.step, part.part, part))

    def applied(self) -> list[Any] | None:
        """The answers of the step under way by slice, once all are there: then its rows are done. None before."""
        slices = self.steps.slices(self.step) if not self.over else []
        answers = self._answers.get(self.step, {})
        if not slices or len(answers) < len(slices):
            return None
        for part in slices:
            self.ledger.apply(part)
        del self._answers[self.step]
        self.step += 1
        self._open()
        return [answers[part.part] for part in slices]

    def _open(self) -> None:
        while self._opened < min(self.stop, self.step + 1 + self.ahead):
            for part in self.steps.slices(self._opened):
                heapq.heappush(self._free, (part.step, part.part, part))
            self._opened += 1
