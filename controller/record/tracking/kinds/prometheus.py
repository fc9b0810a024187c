"""Prometheus: the metrics of a run on the metrics port of the controller's Ray node, which a cluster's Prometheus scrapes.

Ray prefixes the names with `ray_` and adds the labels of the process. A value stays on the port after the run has ended, so
`nonet_run_active` says whether it is current.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nonet.controller.record.tracking.kinds.base import MetricPoint, TrackedRun, TrackerKind, TrackerSink


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric that runs export.

    Attributes:
        kind: Whether it is the newest value, or a sum that only grows.
        description: What it is, with its unit.
        labels: The names of its labels, besides `run`.
    """

    kind: Literal["gauge", "counter"]
    description: str
    labels: tuple[str, ...] = ()


_START = "nonet_train_start_timestamp_seconds"
# By name, as Ray exports them without the prefix `ray_`.
FAMILIES = {
    "nonet_run_active": MetricFamily("gauge", "1 while the run works, 0 when it has ended"),
    "nonet_run_failed": MetricFamily("gauge", "1 when the run has failed"),
    "nonet_run_updated_timestamp_seconds": MetricFamily("gauge", "When the controller was last alive"),
    "nonet_run_workers": MetricFamily("gauge", "Workers of a group", ("group",)),
    "nonet_run_silent_workers": MetricFamily("gauge", "Workers that did not answer the last heartbeat"),
    "nonet_run_waits": MetricFamily("gauge", "Things that the run waits for, while it makes no progress"),
    "nonet_run_restarts": MetricFamily("gauge", "Recoveries from lost workers and controllers"),
    "nonet_run_isolated_nodes": MetricFamily("gauge", "Nodes that the run does not use because probes failed"),
    "nonet_run_unsent_bytes": MetricFamily("gauge", "Bytes of metrics.jsonl that a tracker lacks", ("tracker",)),
    _START: MetricFamily("gauge", "When training began, or was continued"),
    "nonet_train_step": MetricFamily("gauge", "Applied steps of a stage", ("stage",)),
    "nonet_train_steps": MetricFamily("gauge", "Planned steps of a stage", ("stage",)),
    "nonet_train_progress_timestamp_seconds": MetricFamily("gauge", "When the last step was reported", ("stage",)),
    "nonet_train_loss_nats": MetricFamily("gauge", "Loss", ("stage",)),
    "nonet_train_rows_per_second": MetricFamily("gauge", "Rows, or prompts in RL, per second", ("stage",)),
    "nonet_train_rows_total": MetricFamily("counter", "Trained rows, or prompts in RL", ("stage",)),
    "nonet_train_skipped_steps_total": MetricFamily("counter", "Steps with an infinite loss or gradient", ("stage",)),
    "nonet_train_reward": MetricFamily("gauge", "Mean of a reward in the last step", ("stage", "reward")),
    "nonet_train_phase_seconds_total": MetricFamily("counter", "Seconds of the first trainer", ("stage", "phase")),
    "nonet_train_metric": MetricFamily("gauge", "Any other metric of metrics.jsonl", ("stage", "role", "name")),
    "nonet_checkpoint_seconds": MetricFamily("gauge", "Seconds from the copy to the complete newest checkpoint"),
    "nonet_checkpoint_bytes": MetricFamily("gauge", "Bytes that the newest checkpoint wrote"),
    "nonet_checkpoint_timestamp_seconds": MetricFamily("gauge", "When the newest checkpoint was complete"),
    "nonet_checkpoints_total": MetricFamily("counter", "Complete checkpoints"),
    "nonet_storage_requests_total": MetricFamily("counter", "Requests of the controller to storage", ("operation",)),
    "nonet_storage_repetitions_total": MetricFamily("counter", "Repeated conditional writes", ("operation",)),
    "nonet_storage_failures_total": MetricFamily("counter", "Requests that failed after repetitions", ("operation",)),
    "nonet_storage_seconds_total": MetricFamily("counter", "Seconds of requests to storage", ("operation",)),
}  # fmt: skip

# Metrics of metrics.jsonl that have a family of their own.
_GAUGES = {
    "loss": "nonet_train_loss_nats",
    "rows/s": "nonet_train_rows_per_second",
    "checkpoint seconds": "nonet_checkpoint_seconds",
    "checkpoint bytes": "nonet_checkpoint_bytes",
}
_COUNTERS = {
    "events": "nonet_train_rows_total",
    "prompts": "nonet_train_rows_total",
    "skipped": "nonet_train_skipped_steps_total",
}
_PHASES = ("data wait", "sparse", "dense", "communication", "optimizer", "seconds")  # of `machine PHASE`
_TOTAL = "seconds"  # the phase of the whole step
_REWARD = "reward."


class PrometheusSink(TrackerSink):
    """The exported metrics of a run; nothing in a process without Ray."""

    def __init__(self, run: TrackedRun):
        self._run = run.id
        self._metrics: dict[str, Any] = {}  # Ray's metrics by name
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}  # newest known sum by counter and labels
        self._groups: set[str] = set()
        self._status: Mapping[str, Any] = {}  # the newest one
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}  # newest value by gauge and labels

    def begin(self, stage: str, steps: int, applied_steps: int) -> None:
        """Export the number of steps of a stage, and when the first one began."""
        if (_START, ()) not in self._gauges:
            self._set(_START, time.time())
        self._set("nonet_train_steps", steps, stage)
        self._set("nonet_train_step", applied_steps, stage)

    def write(self, points: Sequence[MetricPoint]) -> None:
        """Export the values of points."""
        for point in points:
            self._write_point(point)

    def set_status(self, status: Mapping[str, Any]) -> None:
        """Export the state of the run, its workers, waits, recoveries and requests to storage, and all gauges once more."""
        self._status = status
        for (gauge, labels), value in list(self._gauges.items()):  # Ray forgets a value that is not renewed
            self._set(gauge, value, *labels)
        self._set("nonet_run_updated_timestamp_seconds", time.time())
        self._set("nonet_run_active", float(status["state"] in ("starting", "running")))
        self._set("nonet_run_failed", float(status["state"] == "failed"))
        groups = status.get("groups", {})
        for group in self._groups | groups.keys():
            self._set("nonet_run_workers", groups.get(group, {}).get("workers", 0), group)
        self._groups |= groups.keys()
        self._set("nonet_run_silent_workers", status.get("silent_workers", 0))
        self._set("nonet_run_waits", len(status.get("waits", ())))
        self._set("nonet_run_isolated_nodes", len(status.get("isolated", ())))
        self._set("nonet_run_restarts", status.get("restarts", 0))
        for tracker, entry in status.get("tracking", {}).items():
            self._set("nonet_run_unsent_bytes", entry["unsent_bytes"], tracker)
        for operation, counts in status.get("storage", {}).items():
            for name, value in counts.items():
                self._raise_to(f"nonet_storage_{name}_total", value, operation)

    def close(self, state: str) -> None:
        """Export that the run has ended."""
        # What still is, such as workers, is none; what was, such as recoveries, stays.
        self.set_status({**self._status, "state": state, "groups": {}, "waits": (), "silent_workers": 0})

    def _write_point(self, point: MetricPoint) -> None:
        """Export one value."""
        name, stage = point.name, point.stage
        if point.role == "trainer" and name in _COUNTERS:
            self._add(_COUNTERS[name], point.value, stage)
            self._set("nonet_train_step", point.step, stage)
            self._set("nonet_train_progress_timestamp_seconds", point.time, stage)
        elif name in _GAUGES:
            labels = (stage,) if FAMILIES[_GAUGES[name]].labels else ()
            self._set(_GAUGES[name], point.value, *labels)
            if name == "checkpoint bytes":
                self._add("nonet_checkpoints_total", 1)
                self._set("nonet_checkpoint_timestamp_seconds", point.time)
        elif name.startswith(_REWARD):
            self._set("nonet_train_reward", point.value, stage, name.removeprefix(_REWARD))
        elif (phase := name.removeprefix("machine ")) != name and phase in _PHASES:
            label = "all" if phase == _TOTAL else phase
            self._add("nonet_train_phase_seconds_total", point.value, stage, label)
        elif phase == name:
            self._set("nonet_train_metric", point.value, stage, point.role, name)

    def _set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._gauges[name, labels] = value
        if metric := self._get_metric(name):
            metric.set(float(value), self._make_tags(name, labels))

    def _add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter; Ray refuses amounts that are not above 0."""
        if amount > 0 and math.isfinite(amount) and (metric := self._get_metric(name)):
            metric.inc(float(amount), self._make_tags(name, labels))

    def _raise_to(self, name: str, total: float, *labels: str) -> None:
        """Raise a counter to a total that this process counts."""
        before = self._totals.get((name, labels), 0.0)
        self._totals[name, labels] = max(before, total)
        self._add(name, total - before, *labels)

    def _make_tags(self, name: str, labels: Sequence[str]) -> dict[str, str]:
        """Return the labels of a value by name."""
        return {"run": self._run, **dict(zip(FAMILIES[name].labels, labels, strict=True))}

    def _get_metric(self, name: str) -> Any:
        """Return Ray's metric of a name; None in a process without Ray."""
        if name not in self._metrics:
            import ray  # takes a second to import
            from ray.util import metrics

            if not ray.is_initialized():
                return None
            family = FAMILIES[name]
            metric_class = metrics.Gauge if family.kind == "gauge" else metrics.Counter
            self._metrics[name] = metric_class(name, family.description, tag_keys=("run", *family.labels))
        return self._metrics[name]


SPEC = TrackerKind(PrometheusSink, remote=False)
