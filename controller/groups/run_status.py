"""What a run is doing and what it waits for, written for those who cannot call its controller.

The status is RUN/status.json and also a line of JSON in the log of the controller's process, which Ray's dashboard serves.
It is written when it changes, at most once a second, and at least every `ALIVE_EVERY_S` seconds.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from nonet.controller.record import RunFolder
from nonet.storage import describe_pending_requests, read_address
from nonet.workers.runtime import ActorGroup, list_pending_waits

FORMAT = 1
ALIVE_EVERY_S = 10.0  # at most so many seconds are between two records of a controller that is alive
_EVERY_S = 1.0
_QUIET_PATIENCE_S = 5.0  # without an event, after which the status says what the run waits for
_MAX_WAITS = 8  # entries of a list of waits


@dataclass(frozen=True, slots=True)
class SessionView:
    """The parts of a session that the status shows.

    Attributes:
        phase: What the session does before its first stage, such as "open"; "" after that.
        groups: By group, its roles.
        hosts: The processes of each group.
        activity: Returns a clause about what the controller's own thread has done for some seconds.
        silent_workers: The number of workers that did not answer the last heartbeat.
        isolated: A clause about each node and device that is not used because its probes failed.
        outage: A clause about an outage of the object storage of the run, "" without one.
    """

    phase: str = ""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hosts: Mapping[str, ActorGroup] = field(default_factory=dict)
    activity: Callable[[float], str] = lambda elapsed_s: ""
    silent_workers: int = 0
    isolated: Sequence[str] = ()
    outage: str = ""


class StatusReporter:
    """A thread that writes the status of a run.

    Args:
        run: The folder of the run.
        list_events: Returns the events of the run from a number on (`Recorder.list_since`).
        view_session: Returns the current state of the session.
        detached: Whether the run needs no driver.
        publish: Receives the status once a second, with "silent_workers"; it may not raise.
    """

    def __init__(
        self,
        run: RunFolder,
        list_events: Callable[[int], list[dict[str, Any]]],
        view_session: Callable[[], SessionView],
        *,
        detached: bool,
        publish: Callable[[Mapping[str, Any]], None] = lambda status: None,
    ):
        self._publish = publish
        self._run, self._list_events, self._view_session = run, list_events, view_session
        self._next_event, self._event_at, self._written_at = 0, time.time(), 0.0
        self._waits: list[str] = []
        self._waits_at = 0.0
        self._status: dict[str, Any] = {
            "format": FORMAT,
            "run": run.id,
            "folder": str(run.path),
            "address": read_address(run.path),  # of a run in object storage
            "state": "starting",
            "started": round(time.time(), 3),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "log": _find_own_log(),
            "detached": detached,
        }
        self._written: dict[str, Any] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._run_thread, name="status", daemon=True).start()

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Write the final status: the state of an outcome, and its error."""
        self._ended.set()
        error = {"error": " ".join(str(outcome["error"]).split())} if outcome.get("error") else {}
        with self._lock:
            self._read_events()
            self._waits = []
            self._status |= {"state": outcome["state"], **error}
            self._publish(self._status)
            self._write()

    def _run_thread(self) -> None:
        """Write the status until `finish`."""
        while not self._ended.wait(_EVERY_S):
            with self._lock:
                if not self._ended.is_set():
                    self._update()

    def _update(self) -> None:
        """Bring the status up to date, and write it if it has changed or is old."""
        self._read_events()
        view = self._view_session()
        if view.phase != self._status.get("phase"):
            self._event_at = time.time()
        self._status["state"] = "running" if "stage" in self._status and not view.phase else "starting"
        self._status["phase"] = view.phase
        groups, hosts = dict(view.groups), dict(view.hosts)  # copies, which no other thread changes
        # Rewards that were attached have no group of the plan.
        attached = {name: [name] for name in hosts if name not in groups}
        self._status["groups"] = {
            name: {"roles": list(roles), "workers": hosts[name].world, "pids": hosts[name].list_pids()}
            for name, roles in (groups | attached).items()
            if name in hosts
        }
        self._status["isolated"] = list(view.isolated)
        self._status["storage"] = view.outage
        now = time.time()
        if now - self._event_at < _QUIET_PATIENCE_S:
            self._waits = []
        elif now - self._waits_at >= _QUIET_PATIENCE_S:
            self._waits, self._waits_at = list_waits(self._run.id, view, now - self._event_at), now
        self._publish({**self._status, "waits": self._waits, "silent_workers": view.silent_workers})
        changed = {**self._status, "waits": self._waits} != self._written
        if changed or now - self._written_at >= ALIVE_EVERY_S:
            self._write()

    def _read_events(self) -> None:
        """Take the stage, the step and the metrics from the events since the last call."""
        for event in self._list_events(self._next_event):
            self._next_event, self._event_at = event["number"] + 1, time.time()
            if event["kind"] == "stage":
                self._status |= {"stage": event["stage"], "steps": event["steps"], "step": event["done"]}
                self._status.pop("metrics", None)
            elif event["kind"] == "step":
                metrics = {name: float(f"{value:.6g}") for name, value in event["metrics"].items()}
                self._status |= {"stage": event["stage"], "step": event["step"], "metrics": metrics}

    def _write(self) -> None:
        """Write the status to its file and to the log of this process."""
        self._written, self._written_at = {**self._status, "waits": list(self._waits)}, time.time()
        status = {
            **self._written,
            "at": round(self._written_at, 3),
            "quiet_s": round(time.time() - self._event_at, 1),
        }
        print(json.dumps(status), flush=True)
        try:
            self._run.write_json(self._run.status.name, status)
        except OSError as error:  # a full disk: the run itself reports it, and the log has the status
            print(f"{self._run.status} cannot be written: {error}", flush=True)


def _find_own_log() -> str:
    """Return the path of the file that Ray redirects the standard output of this process to; "" if it is no file."""
    path = os.path.realpath("/proc/self/fd/1")
    return path if os.path.isfile(path) else ""


def list_waits(run: str, view: SessionView, quiet_s: float) -> list[str]:
    """Return what a run waits for, one clause per wait.

    Args:
        run: The id of the run.
        view: The state of its session.
        quiet_s: Seconds since the run last reported progress.
    """
    waits = [wait.describe() for wait in list_pending_waits()]
    waits += _list_unplaced_groups(run)
    for hosts in list(view.hosts.values()):
        waits += [
            activity.describe() + (", where it waits for other ranks" if activity.waits else "")
            for activity in hosts.describe_activities()
            if activity.call or activity.silent
        ]
    waits += describe_pending_requests()
    if not waits and (activity := view.activity(quiet_s)):
        waits.append(activity)
    waits += view.isolated
    return [
        *waits[:_MAX_WAITS],
        *([f"and {len(waits) - _MAX_WAITS} more"] if len(waits) > _MAX_WAITS else []),
    ]


def _list_unplaced_groups(run: str) -> list[str]:
    """Return a clause for each placement group of a run that Ray has not placed."""
    clauses = []
    for entry in placement_group_table().values():
        if entry["name"].startswith(f"{run}/") and entry["state"] in ("PENDING", "RESCHEDULING"):
            reason = entry["stats"].get("scheduling_state", "")
            bundles = entry["bundles"]
            free = {
                name: round(amount, 2)
                for name, amount in ray.available_resources().items()
                if ":" not in name
            }
            clauses.append(
                f"placement group {entry['name']} is not placed ({reason}): {len(bundles)} x "
                f"{next(iter(bundles.values()), {})}; free are {free}"
            )
    return clauses
