"""The interface of trackers: programs outside Nonet that show the metrics of runs, such as MLflow.

A kind of tracker names a class of sinks. A sink of a local tracker is called while the run waits. A remote tracker may wait for
a server, so its sink has a thread of its own, which reads metrics.jsonl and may be late (`nonet.controller.record.tracking`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from nonet.options import StrictModel
from nonet.plugins import PluginRegistry
from nonet.replaceable import Replaceable
from nonet.yaml import is_map


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run whose metrics a tracker receives.

    Attributes:
        id: The id of the run.
        folder: The folder of the run.
        name: The name of the scenario.
        facts: Facts about the run as plain texts and numbers, by dotted key of the scenario.
    """

    id: str
    folder: Path
    name: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One value of a metric.

    Attributes:
        stage: The stage, or the ranking of an evaluation such as "evaluate/beam".
        step: The number of applied steps of the stage.
        role: The role that measured it.
        name: The name of the metric.
        value: The value, which may be infinite or NaN.
        time: When it was measured, in unix seconds.
    """

    stage: str
    step: int
    role: str
    name: str
    value: float
    time: float


class TrackerSink(ABC):
    """The connection of one run to a tracker.

    The constructor takes the run and the options of the tracker as keywords. It continues an earlier part of the same run.
    Any method of a remote sink may raise; it is then created again later, and receives the same points again.
    """

    @abstractmethod
    def write(self, points: Sequence[MetricPoint]) -> None:
        """Send points, and return when the tracker has them."""

    def begin(self, stage: str, steps: int, applied_steps: int) -> None:
        """Begin a stage of `steps` steps, or continue it after `applied_steps` steps. Only local sinks are called."""
        return

    def set_status(self, status: Mapping[str, Any]) -> None:
        """Receive the status of the run (RUN/status.json), at most once a second. Only local sinks are called."""
        return

    def close(self, state: str) -> None:
        """End the connection.

        Args:
            state: How the run ended: done, stopped or failed.
        """
        return


@dataclass(frozen=True)
class TrackerKind:
    """A kind of tracker.

    Attributes:
        sink: The class of its sinks, or the dotted path of the class.
        options: The class of its keys in a scenario.
        needs: The package that it imports; "" for none.
        remote: Whether a sink may wait for a server.
    """

    sink: str | type[TrackerSink]
    options: type[StrictModel] = StrictModel
    needs: str = ""
    remote: bool = True


TRACKERS = PluginRegistry(
    "tracker", TrackerKind, "nonet.controller.record.tracking.kinds", contract={"sink": TrackerSink}
)


class Tracker(Replaceable):
    """A tracker that receives the metrics of a run."""

    registry: ClassVar[PluginRegistry[Any] | None] = TRACKERS


def parse_trackers(value: Any) -> Any:
    """Return the key `tracking` of a scenario with a `use` in each tracker, by default its name."""
    if not is_map(value):
        return value
    return {name: {"use": name, **(options or {})} if options is None or is_map(options) else options
            for name, options in value.items()}  # fmt: skip
