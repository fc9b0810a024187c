"""Deadlines of a run: the timeout of each wait in seconds, with the scenario key that sets it.

The wait itself reports who is late; the deadline reports which key to raise. `Deadlines` holds the section
`deadlines:` of a scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class Deadline(float):
    """A timeout in seconds that knows the scenario key that sets it.

    Attributes:
        key: The scenario key to raise if a healthy run needs more time.
    """

    key: str

    def __new__(cls, seconds: float, key: str) -> Deadline:
        """Create a deadline of `seconds` that is set by the scenario key `key`."""
        made = super().__new__(cls, seconds)
        made.key = key
        return made

    def __reduce__(self):
        return Deadline, (float(self), self.key)

    def scale_by(self, factor: float) -> Deadline:
        """Return a deadline that is `factor` times as long, with the same key."""
        return Deadline(factor * self, self.key)


def suggest_longer_deadline(timeout_s: float | None) -> str:
    """Return a message suffix that names the scenario key to raise, or an empty string if no key sets this timeout."""
    return f"; raise {timeout_s.key} if this is slow and healthy" if isinstance(timeout_s, Deadline) else ""


BARE = Deadline(
    86_400.0, "the timeout_s of the call or of get()"
)  # the default of waits without a deadline: one day


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadlines of a run.

    Attributes:
        start: Starting the processes of a group, their environment and the setup of their roles.
        step: A training step, a rollout and every short call. Collectives of process groups wait twice as long.
        open: Opening the artifacts of a run, or loading a checkpoint, in every role.
        save: Saving a checkpoint.
        tokenise: Reading, splitting and tokenising the tables.
        evaluate: Ranking one evaluation subject.
        reshard: Moving the rows of all sparse tables.
    """

    start: Deadline = Deadline(120.0, "deadlines.start")
    step: Deadline = Deadline(120.0, "deadlines.step")
    open: Deadline = Deadline(300.0, "deadlines.open")
    save: Deadline = Deadline(300.0, "deadlines.save")
    tokenise: Deadline = Deadline(3600.0, "deadlines.tokenise")
    evaluate: Deadline = Deadline(1800.0, "deadlines.evaluate")
    reshard: Deadline = Deadline(3600.0, "deadlines.reshard")

    @classmethod
    def from_seconds(cls, seconds: Mapping[str, float]) -> Deadlines:
        """Build deadlines from the section `deadlines:` of a scenario; keys that are left out keep their defaults."""
        return cls(**{name: Deadline(value, f"deadlines.{name}") for name, value in seconds.items()})


DEFAULTS = Deadlines()
