"""Deadlines of a run: the timeout of each wait in seconds, with the scenario key that sets it.

The error of a wait that timed out names who is late, and the key to raise. `Deadlines` is the section `deadlines:` of a
scenario.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetPydanticSchema, PlainSerializer, ValidationInfo

from nonet.options import StrictModel
from nonet.units import Seconds


class Deadline(float):
    """A timeout in seconds that knows the scenario key that sets it.

    Attributes:
        key: The scenario key to raise if a healthy run needs more time.
    """

    key: str

    def __new__(cls, seconds: float, key: str) -> Deadline:
        """Create a deadline of `seconds` that is set by the scenario key `key`."""
        deadline = super().__new__(cls, seconds)
        deadline.key = key
        return deadline

    def __reduce__(self):
        return Deadline, (float(self), self.key)

    def scale_by(self, factor: float) -> Deadline:
        """Return a deadline that is `factor` times as long, with the same key."""
        return Deadline(factor * self, self.key)


def suggest_longer_deadline(timeout_s: float | None) -> str:
    """Return a message suffix that names the scenario key to raise, or an empty string if no key sets this timeout."""
    return f"; raise {timeout_s.key} if this is slow and healthy" if isinstance(timeout_s, Deadline) else ""


# The default of waits without a deadline: one day. What its message says to raise is no scenario key.
BARE = Deadline(86_400.0, "the timeout_s of the call or of get()")


def _to_deadline(seconds: float, info: ValidationInfo) -> Deadline:
    """Convert the value of a field of `Deadlines` into a deadline with the key of the field."""
    return Deadline(seconds, f"deadlines.{info.field_name}")


# The type of the fields: a positive number of seconds, or text such as "2m", which is stored as a Deadline.
_Wait = Annotated[
    Deadline,
    GetPydanticSchema(lambda _, handler: handler(Annotated[Seconds, Field(gt=0)])),
    AfterValidator(_to_deadline),
    PlainSerializer(float),
]


def _make_field(seconds: float, description: str) -> Any:
    """Return a field whose default is converted into a `Deadline` too."""
    return Field(default=seconds, validate_default=True, description=description)


class Deadlines(StrictModel):
    """Timeouts of a run's waits, in seconds."""

    start: _Wait = _make_field(
        120.0,
        "the start of a group's processes, including their environment, or the restart of the controller",
    )
    step: _Wait = _make_field(120.0, "a training step or a rollout; ranks wait twice as long for each other")
    open: _Wait = _make_field(300.0, "the opening of the artifacts, or of a checkpoint, in every role")
    save: _Wait = _make_field(300.0, "the writing of a checkpoint")
    tokenise: _Wait = _make_field(3600.0, "the reading and tokenising of the tables")
    evaluate: _Wait = _make_field(1800.0, "the ranking of one stage or baseline")
    replace: _Wait = _make_field(
        600.0, "the wait for nodes that can take the place of lost ones, before the run fails"
    )
    probe: _Wait = _make_field(120.0, "the probe of a node or of its devices before workers are placed")
    reshard: _Wait = _make_field(3600.0, "the moving of all tables' rows")
    storage: _Wait = _make_field(
        900.0, "an outage of the object storage of a run, before the run ends; longer than `save`"
    )


DEFAULTS = Deadlines()
