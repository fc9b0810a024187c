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
from collections.abc import Callable, Iterable, Iterator, Mapping

from nonet.errors import ConfigError
from nonet.workers.runtime import NAMESPACE, ActorGroup

ORPHAN_TIMEOUT_S = 60.0  # the default of $NONET_ORPHAN_TIMEOUT_S
CONTROLLER = "controller"  # the actor {run}/controller
_REAP_TIMEOUT_S = 20.0  # how long `reap_run` waits until killed processes have disappeared
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

    Args:
        beat: The function; it returns a text per failure, or None.
        every_s: Seconds between two calls.
    """

    def __init__(self, beat: Callable[[], Iterable[str] | None], every_s: float):
        self._beat, self._every_s, self._ended = beat, every_s, threading.Event()
        self._failure_counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        """Call the function until stopped, and count failures."""
        while not self._ended.wait(self._every_s):
            try:
                causes = list(self._beat() or ())
            except Exception as error:
                causes = [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]
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
    import ray
    from ray.util.placement_group import get_placement_group, remove_placement_group

    actor_names, placement_groups = list_remains(run)
    for name in actor_names:
        with contextlib.suppress(ValueError):  # the actor has ended in the meantime
            ray.kill(ray.get_actor(name, NAMESPACE), no_restart=True)
    for name in placement_groups:
        with contextlib.suppress(ValueError):  # the placement group has been removed in the meantime
            remove_placement_group(get_placement_group(name))
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while any(list_remains(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(actor_names) + len(placement_groups)


def reap_orphaned_runs() -> list[str]:
    """Remove the actors and placement groups of runs that have no controller, and return the ids of these runs."""
    names = list(_list_actor_names())
    controlled_runs = {name.rsplit("/", 1)[0] for name in names if name.endswith(f"/{CONTROLLER}")}
    runs = {name.rsplit("/", 1)[0] for name in (*names, *_list_placement_groups()) if "/" in name}
    return [run for run in sorted(runs - controlled_runs) if reap_run(run)]


def _list_actor_names() -> Iterator[str]:
    """Yield the names of the live actors of all runs."""
    import ray

    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE:  # pyright: ignore[reportArgumentType]
            yield entry["name"]  # pyright: ignore[reportArgumentType]


def _list_placement_groups() -> Iterator[str]:
    """Yield the names of placement groups that belong to runs and have not been removed."""
    from ray.util.placement_group import placement_group_table

    for entry in placement_group_table().values():
        if entry["state"] != "REMOVED" and "/" in entry["name"]:
            yield entry["name"]
