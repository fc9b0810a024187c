"""How long a run's waits may take: seconds, each with the scenario's key that says so.

Who is late is told by the wait; what to raise is told by the deadline. `Deadlines` is `deadlines:` of a scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class Deadline(float):
    """Seconds a wait may take; `key` is what a healthy run that needs longer raises."""

    key: str

    def __new__(cls, seconds: float, key: str) -> Deadline:
        made = super().__new__(cls, seconds)
        made.key = key
        return made

    def __reduce__(self):
        return Deadline, (float(self), self.key)

    def times(self, count: float) -> Deadline:
        """So many times as long, under the same key."""
        return Deadline(count * self, self.key)


def way_out(timeout_s: float | None) -> str:
    """How a wait that ran out is made longer: "; raise deadlines.step where ...", "" where no key says how long it is."""
    return f"; raise {timeout_s.key} if this is slow and healthy" if isinstance(timeout_s, Deadline) else ""


BARE = Deadline(86_400.0, "the timeout_s of the call or of get()")  # what nobody gave a deadline waits a day


@dataclass(frozen=True, slots=True)
class Deadlines:
    """start      a group's processes, their environment and their roles' setup
    step       a training step, a rollout, and every small question; process groups wait twice as long
    open       the artifacts of a run, or a commit, in every role
    save       a commit
    tokenise   reading, cutting and tokenising the tables
    evaluate   ranking one subject
    reshard    moving the rows of all tables
    """

    start: Deadline = Deadline(120.0, "deadlines.start")
    step: Deadline = Deadline(120.0, "deadlines.step")
    open: Deadline = Deadline(300.0, "deadlines.open")
    save: Deadline = Deadline(300.0, "deadlines.save")
    tokenise: Deadline = Deadline(3600.0, "deadlines.tokenise")
    evaluate: Deadline = Deadline(1800.0, "deadlines.evaluate")
    reshard: Deadline = Deadline(3600.0, "deadlines.reshard")

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> Deadlines:
        """From a scenario's `deadlines:`; what it leaves out has its default."""
        return cls(**{name: Deadline(value, f"deadlines.{name}") for name, value in seconds.items()})


DEFAULTS = Deadlines()
