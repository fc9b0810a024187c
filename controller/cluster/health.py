"""HealthRecord: the nodes and devices that a run does not use, because their probes failed.

A node or a device is isolated when two probes in a row fail. It is probed again after a pause that doubles with each failure,
and readmitted when it passes. RUN/health.json has all isolations of the run, oldest first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from nonet.atomic import read_json, refuse_damage, write_whole

_FILE = "health.json"
_FIRST_PAUSE_S, _MAX_PAUSE_S = 15.0, 600.0  # between two probes of an isolated node or device


@dataclass(slots=True)
class Isolation:
    """A time during which a run does not use a node or a device.

    Attributes:
        node: The id of the node.
        device: The kind and id of the device, such as "cuda 3"; "" for the whole node.
        why: What the probe found.
        since: When it was isolated, in unix seconds.
        until: When it was readmitted or the node was lost; None while it is isolated.
        failures: The number of probes that have failed.
        next_probe: When it is probed again.
    """

    node: str
    device: str
    why: str
    since: float
    until: float | None = None
    failures: int = 2
    next_probe: float = 0.0

    @property
    def name(self) -> str:
        """The node, or the device and its node, such as "cuda 3 of node 48e3f34f"."""
        return f"{f'{self.device} of ' if self.device else ''}node {self.node[:8]}"

    def describe(self) -> str:
        """Describe it in one clause."""
        return f"{self.name} is isolated: {self.why}"


class HealthRecord:
    """The isolations of a run.

    Args:
        folder: The folder of the run.
        read_clock: Returns unix seconds.
    """

    def __init__(self, folder: Path, read_clock: Callable[[], float] = time.time):
        self._path, self._read_clock = folder / _FILE, read_clock
        self._entries = read_isolations(folder)

    def list_isolated(self) -> list[Isolation]:
        """Return the current isolations."""
        return [entry for entry in self._entries if entry.until is None]

    def find(self, node: str, device: str = "") -> Isolation | None:
        """Return the current isolation of a node or a device."""
        return next((e for e in self.list_isolated() if (e.node, e.device) == (node, device)), None)

    def is_due(self, entry: Isolation) -> bool:
        """Return whether it is time to probe an isolated node or device again."""
        return self._read_clock() >= entry.next_probe

    def record_failure(self, node: str, why: str, device: str = "") -> Isolation | None:
        """Record that a node or device failed twice, or failed again while it is isolated.

        Returns:
            The isolation if it is new.
        """
        now, entry = self._read_clock(), self.find(node, device)
        is_new = entry is None
        if entry is None:
            entry = Isolation(node, device, why, now)
            self._entries.append(entry)
        else:
            entry.why, entry.failures = why, entry.failures + 1
        entry.next_probe = now + min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (entry.failures - 2))
        self._store()
        return entry if is_new else None

    def record_success(self, node: str, device: str = "") -> Isolation | None:
        """Record that a node or device passed a probe; return its isolation if it was isolated, which ends it."""
        entry = self.find(node, device)
        if entry is not None:
            entry.until = self._read_clock()
            self._store()
        return entry

    def end_lost(self, living_nodes: Collection[str]) -> None:
        """End the isolations of nodes that are no longer part of the cluster."""
        lost = [entry for entry in self.list_isolated() if entry.node not in living_nodes]
        for entry in lost:
            entry.until = self._read_clock()
        if lost:
            self._store()

    def _store(self) -> None:
        """Write the file."""
        write_whole(self._path, json.dumps([asdict(entry) for entry in self._entries], indent=1).encode())


def read_isolations(folder: Path) -> list[Isolation]:
    """Return all isolations of a run, oldest first. Raises ConfigError if their file is damaged."""
    path = folder / _FILE
    with refuse_damage(path):
        return [Isolation(**entry) for entry in read_json(path)] if path.exists() else []
