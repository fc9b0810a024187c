"""The lifetime of a run's processes, and the removal of processes that a killed run left behind.

The controller, workers and placement groups of a run are detached and named `{run}/...` in the namespace `nonet`. A
foreground run has a lease that its driver renews; the run stops when the lease expires. Workers that receive no calls exit.
`reap_orphaned_runs` removes the workers and placement groups of killed controllers (docs/explanation/design.md, section 5).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)

from nonet.controller.cluster import list_dead_actors
from nonet.errors import ConfigError
from nonet.workers.runtime import NAMESPACE, ActorGroup

ORPHAN_TIMEOUT_S = 60.0  # the default of $NONET_ORPHAN_TIMEOUT_S
CONTROLLER = "controller"  # the actor {run}/controller
_REAP_PATIENCE_S = 20.0  # how long `reap_run` waits until killed processes have disappeared
_MAX_WARNING_CAUSES = 8  # causes of failed heartbeats that a warning names


def read_orphan_timeout_s() -> float:
    """Return $NONET_ORPHAN_TIMEOUT_S: seconds without a heartbeat after which workers exit and a foreground run stops.

    Raises:
        ConfigError: The variable is not a number above 0.
    """
    text = os.environ.get("NONET_ORPHAN_TIMEOUT_S", "")
    try:
        seconds = float(text or ORPHAN_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(
            f"NONET_ORPHAN_TIMEOUT_S={text!r} is not a number of seconds above 0; leave it unset for {ORPHAN_TIMEOUT_S:g}"
        )
    return seconds


class Lease:
    """The permission to continue a run. It expires when the driver stops renewing it; that of a detached run never expires."""

    def __init__(self, timeout_s: float, *, detached: bool = False):
        self._timeout_s, self._detached, self._renewed = timeout_s, detached, time.monotonic()

    def renew(self) -> None:
        """Record that the driver is alive, which renews the lease."""
        self._renewed = time.monotonic()

    @property
    def is_expired(self) -> bool:
        """Whether the driver has not renewed the lease within the timeout; never for a detached run."""
        return not self._detached and time.monotonic() - self._renewed > self._timeout_s


class Heartbeat:
    """A thread that calls a function periodically until it is stopped.

    Failures do not stop the thread. Each exception, and each text that the function returns, is counted as a failure.

    Attributes:
        last_failures: The number of failures of the last call.

    Args:
        beat: The function; it returns a text per failure, or None.
        every_s: Seconds between two calls.
    """

    def __init__(self, beat: Callable[[], Iterable[str] | None], every_s: float):
        self._beat, self._every_s, self._ended = beat, every_s, threading.Event()
        self._failure_counts: Counter[str] = Counter()
        self.last_failures = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        """Call the function until stopped, and count failures."""
        while not self._ended.wait(self._every_s):
            try:
                causes = list(self._beat() or ())
            except Exception as error:
                causes = [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]
            self.last_failures = len(causes)
            with self._lock:
                self._failure_counts.update(causes)

    def pop_warning(self) -> str:
        """Return a warning with the number and causes of the failures since the last call; "" without failures."""
        with self._lock:
            failures, self._failure_counts = self._failure_counts, Counter()
        causes = ", ".join(f"{cause} ({count})" for cause, count in failures.most_common(_MAX_WARNING_CAUSES))
        return f"warning: {failures.total()} failed heartbeats: {causes}" if failures else ""

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()


def keep_alive(hosts: Mapping[str, ActorGroup], timeout_s: float) -> Heartbeat:
    """Start a heartbeat that calls every worker six times per timeout.

    A worker that has not answered before the next beat counts as a failure.
    """

    def check_workers() -> list[str]:
        return [
            f"{worker} did not answer" for group in list(hosts.values()) for worker in group.send_heartbeats()
        ]

    return Heartbeat(check_workers, every_s=timeout_s / 6)


@dataclass(frozen=True, slots=True)
class RunRemains:
    """What a run has on the cluster at one moment, except its controller, by handle.

    A later attempt of the run has other handles under the same names.

    Attributes:
        placement_groups: The placement groups by name.
        actors: The actors by name.
    """

    placement_groups: Mapping[str, PlacementGroup]
    actors: Mapping[str, Any]

    @property
    def count(self) -> int:
        """The number of placement groups and actors."""
        return len(self.placement_groups) + len(self.actors)

    def remove(self) -> None:
        """Remove the placement groups and kill the actors, without waiting."""
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        for group in self.placement_groups.values():
            remove_placement_group(group)

    def has_survivors(self) -> bool:
        """Return whether any of the placement groups or actors still exists."""
        ids = _list_placement_groups().values()
        return any(group.id.hex() in ids for group in self.placement_groups.values()) or any(
            (current := _find_actor(name)) is not None and current._actor_id == actor._actor_id
            for name, actor in self.actors.items()
        )


def list_remains(run: str) -> tuple[list[str], list[str]]:
    """Return the names of a run's workers, without its controller, and those of its placement groups that still exist."""
    return (
        [
            name
            for name in _list_actor_names()
            if name.startswith(f"{run}/") and name != f"{run}/{CONTROLLER}"
        ],
        [name for name in _list_placement_groups() if name.startswith(f"{run}/")],
    )


def reap_run(run: str) -> int:
    """Remove the actors and placement groups of a run except its controller, and wait at most 20 seconds until they are gone.

    Returns:
        The number of actors and placement groups that were found.
    """
    remains = _find_remains().get(run)
    if remains is None:
        return 0
    remains.remove()
    _wait_until_gone([remains])
    return remains.count


def reap_orphaned_runs() -> list[str]:
    """Remove the actors and placement groups of runs whose controllers have ended for good, and return the ids of these runs.

    Other runs may start, resume or restart their controllers meanwhile, so nothing is removed that a living controller may
    have made. A controller exists before its placement groups and actors. Therefore these are looked for first, by handle,
    and then the controllers: what a controller made that is not found then came too late to be among the handles. A run
    without any controller, such as a user's own loop with a `Session`, is left to the guards of its workers.
    """
    remains = _find_remains()
    if not remains.keys() - list_controlled_runs():
        return []
    dead_controllers = list_dead_actors(NAMESPACE)
    controlled_runs = list_controlled_runs()
    orphaned = {
        run: found
        for run, found in remains.items()
        if run not in controlled_runs and f"{run}/{CONTROLLER}" in dead_controllers
    }
    for found in orphaned.values():
        found.remove()
    _wait_until_gone(orphaned.values())
    return sorted(orphaned)


def _find_remains() -> dict[str, RunRemains]:
    """Return what each run has on the cluster except its controller; the placement groups are looked for first."""
    groups: dict[str, dict[str, PlacementGroup]] = {}
    for name in _list_placement_groups():
        with contextlib.suppress(ValueError):  # it has been removed in the meantime
            groups.setdefault(_get_run(name), {})[name] = get_placement_group(name)
    actors: dict[str, dict[str, Any]] = {}
    for name in _list_actor_names():
        if not name.endswith(f"/{CONTROLLER}") and "/" in name and (actor := _find_actor(name)) is not None:
            actors.setdefault(_get_run(name), {})[name] = actor
    return {
        run: RunRemains(groups.get(run, {}), actors.get(run, {})) for run in groups.keys() | actors.keys()
    }


def _wait_until_gone(remains: Collection[RunRemains]) -> None:
    """Wait until removed actors and placement groups are gone, at most `_REAP_PATIENCE_S` seconds."""
    deadline = time.monotonic() + _REAP_PATIENCE_S
    while any(found.has_survivors() for found in remains) and time.monotonic() < deadline:
        time.sleep(0.1)


def _get_run(name: str) -> str:
    """Return the id of the run that an actor or a placement group belongs to by its name."""
    return name.rsplit("/", 1)[0]


def _find_actor(name: str) -> Any:
    """Return the handle of a named actor, or None if there is none."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def list_controlled_runs() -> set[str]:
    """Return the ids of the runs whose controllers exist, also while Ray starts or restarts them."""
    return {_get_run(name) for name in _list_actor_names() if name.endswith(f"/{CONTROLLER}")}


def _list_actor_names() -> list[str]:
    """Return the names of the actors of all runs that have not ended."""
    return [
        entry["name"]  # pyright: ignore[reportArgumentType]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE  # pyright: ignore[reportArgumentType]
    ]


def _list_placement_groups() -> dict[str, str]:
    """Return the id of each placement group that belongs to a run and has not been removed, by its name."""
    return {
        entry["name"]: entry["placement_group_id"]
        for entry in placement_group_table().values()
        if entry["state"] != "REMOVED" and "/" in entry["name"]
    }
