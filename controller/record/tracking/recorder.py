"""The metrics and events that a run publishes while it is running.

Metrics are appended to metrics.jsonl without a buffer, so that they survive a kill. Trackers receive them too:
TensorBoard and Prometheus always, others if the scenario names them. Events (stage, step, note, result) are kept in a feed that
the driver polls, and written to events.jsonl, except steps, which metrics.jsonl has.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nonet.controller.record.tracking.feed import EventFeed
from nonet.controller.record.tracking.follower import MetricsFollower
from nonet.controller.record.tracking.kinds import MetricPoint, TrackedRun, Tracker, TrackerSink
from nonet.journal import LineJournal
from nonet.plugins import load_heavy

# The units of metrics, by name; all others have unit "1".
_UNITS = {
    "seconds": "s",
    "loss": "nats",
    "kl": "nats",
    "validation nats": "nats",
    "rows/s": "1/s",
    "lr": "1",
    "checkpoint seconds": "s",
    "checkpoint bytes": "bytes",
}
# The fields of events.jsonl by kind of event. They are a format: other programs read them.
EVENT_FIELDS = {
    "stage": ("stage", "steps", "done"),
    "note": ("text",),
    "result": ("name", "metrics"),
    "end": ("state",),
}
_LOCAL = ("tensorboard", "prometheus")  # the trackers of every run
_FLUSH_PATIENCE_S = 10.0  # the longest time for which the end of a run waits for a tracker


class Recorder:
    """The writer of one run's metrics and events.

    Args:
        folder: The folder of the run.
        run_id: The id of the run.
        trackers: Further trackers, by name.
        run: The run as trackers see it; by default only its id and folder.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        trackers: Mapping[str, Tracker] | None = None,
        run: TrackedRun | None = None,
    ):
        self._folder, self._run_id, self._start_time = folder, run_id, time.time()
        self._metrics_journal = LineJournal(folder / "metrics.jsonl", durable=False)
        self._events_journal = LineJournal(folder / "events.jsonl", durable=False)
        self._lock = (
            threading.Lock()
        )  # trackers add notes on their threads, also while the recorder is closed
        self._feed = EventFeed()
        tracked_run = run or TrackedRun(run_id, folder)
        options_by_name = {name: Tracker(use=name) for name in _LOCAL} | dict(trackers or {})
        self._sinks: list[TrackerSink] = []
        self._followers: list[MetricsFollower] = []
        for name, tracker in options_by_name.items():
            kind = tracker.spec
            make_sink = partial(_make_sink, kind.sink, tracked_run, tracker.get_options())
            if kind.remote:
                metrics = folder / "metrics.jsonl"
                self._followers.append(MetricsFollower(name, metrics, make_sink, self._warn))
            else:
                self._sinks.append(make_sink())

    def begin(self, stage: str, steps: int, applied_steps: int) -> None:
        """Record that a stage starts, or continues after `applied_steps` steps.

        After a resume, TensorBoard hides the points of later steps, which are written again.

        Args:
            stage: The name of the stage.
            steps: The number of steps of the stage.
            applied_steps: The number of steps that were applied before.
        """
        for sink in self._sinks:
            sink.begin(stage, steps, applied_steps)
        self.add_event("stage", stage=stage, steps=steps, done=applied_steps)

    def record_step(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step, or of several steps under the last of them, and add them to the feed."""
        self.record_metrics(stage, step, values)
        self.add_event("step", stage=stage, step=step, metrics=dict(values))

    def record_metrics(
        self, stage: str, step: int, values: Mapping[str, float], role: str = "trainer"
    ) -> None:
        """Append the metrics of a step to metrics.jsonl, and give them to the local trackers.

        A line of metrics.jsonl holds one value: {"t", "run", "stage", "step", "role", "rank", "name", "value", "unit"}.

        Args:
            stage: The name of the stage.
            step: The step of the stage.
            values: The metrics by name.
            role: The role that measured them.
        """
        now = time.time()
        record = {"t": now, "run": self._run_id, "stage": stage, "step": step, "role": role, "rank": 0}
        self._metrics_journal.append(
            *(
                json.dumps(
                    record | {"name": name, "value": float(value), "unit": _UNITS.get(name, "1")}
                ).encode()
                for name, value in values.items()
            )
        )
        points = [MetricPoint(stage, step, role, name, float(value), now) for name, value in values.items()]
        for sink in self._sinks:
            sink.write(points)

    def record_tables(self, stage: str, step: int, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Record the counters of the sparse tables, such as `<table>.rows` and `<table>.admitted`.

        Args:
            stage: The name of the stage.
            step: The step of the stage.
            counts: Counters by table and name; events are counted since the last record.
        """
        values = {
            f"{table}.{counter}": value
            for table, counters in counts.items()
            for counter, value in counters.items()
        }
        self.record_metrics(stage, step, values, role="embedding")

    def add_event(self, kind: str, **fields: Any) -> None:
        """Add an event to the feed, with the seconds since the start of the run as "at".

        Events other than steps are also written to events.jsonl: {"t", "run", "event"} and those of `EVENT_FIELDS`.
        """
        now = time.time()
        self._feed.add(kind, at=now - self._start_time, **fields)
        if kind in EVENT_FIELDS:
            self._write_event(now, kind, fields)

    def list_since(self, number: int) -> list[dict[str, Any]]:
        """Return the retained events whose number is at least `number`."""
        return self._feed.list_since(number)

    def set_status(self, status: Mapping[str, Any]) -> None:
        """Give the status of the run to the local trackers."""
        for sink in self._sinks:
            sink.set_status(status)

    def get_tracking(self) -> dict[str, dict[str, Any]]:
        """Return by remote tracker the number of sent points, the bytes that are not sent, and the current error."""
        return {follower.name: follower.get_state() for follower in self._followers}

    def flush_trackers(self) -> None:
        """Wait until remote trackers have all metrics or one attempt to send them has failed, at most ten seconds each."""
        for follower in self._followers:
            follower.flush(_FLUSH_PATIENCE_S)

    def close(self, state: str = "done") -> None:
        """Close the metrics file and all trackers; a second call does nothing.

        Args:
            state: How the run ended: done, stopped or failed.
        """
        if self._metrics_journal.closed:
            return
        self._write_event(time.time(), "end", {"state": state})
        self._metrics_journal.close()
        for sink in self._sinks:
            sink.close(state)
        for follower in self._followers:
            follower.close(state, _FLUSH_PATIENCE_S)
        with self._lock:
            self._events_journal.close()

    def _write_event(self, now: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Write an event to events.jsonl, unless the recorder is closed."""
        written = {name: fields[name] for name in EVENT_FIELDS[kind]}
        with self._lock:
            if not self._events_journal.closed:
                record = {"t": now, "run": self._run_id, "event": kind, **written}
                self._events_journal.append(json.dumps(record).encode())

    def _warn(self, text: str) -> None:
        """Show a warning about a tracker as a note."""
        self.add_event("note", text=text)


def _make_sink(sink: Any, run: TrackedRun, options: Mapping[str, Any]) -> TrackerSink:
    """Create a sink of a class, or of the dotted path of a class."""
    return load_heavy(sink)(run, **options)
