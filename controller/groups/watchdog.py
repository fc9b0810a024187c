"""Explains a wait that exceeded its deadline: which worker hangs, what it is doing, and which workers wait for it.

A rank in a collective may be late because another rank is late. Ranks that train together are therefore inspected together.
The one that is busy and does not wait, or does not answer, is the one that hangs. The stacks of all of them are written to a
file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nonet.workers import WorkerActivity
from nonet.workers.roles.kinds import get_gang_roles
from nonet.workers.runtime import ActorGroup

_MAX_NAMED = 3  # workers of each kind that a message names


class Watchdog:
    """The inspector of a run's groups.

    Args:
        folder: The folder of the run, to which stacks are written.
        hosts: All groups of the run, by name.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, ActorGroup]):
        self._folder, self._hosts = folder, hosts

    def describe_late(self, group: ActorGroup, ranks: Sequence[int]) -> str:
        """Describe, for an error message, what the late ranks of a group and the ranks that they may wait for are doing."""
        activities = {group.name: group.describe_activities()} | {
            other.name: other.describe_activities() for other in self._find_partners(group)
        }
        late = [activities[group.name][rank] for rank in ranks]
        others = [
            worker
            for name, workers in activities.items()
            for worker in workers
            if name != group.name or worker not in late
        ]
        return f"{describe_hang(late, others)}. Stacks: {self._write([*late, *others])}"

    def _find_partners(self, group: ActorGroup) -> list[ActorGroup]:
        """Return other groups whose ranks take part in collectives with this group."""
        if not get_gang_roles() & set(group.specs):
            return []
        return [
            other
            for other in self._hosts.values()
            if other is not group and get_gang_roles() & set(other.specs)
        ]

    def _write(self, activities: Sequence[WorkerActivity]) -> Path:
        """Write the stacks of workers to a new file in the folder of the run, and return its path."""
        path = self._folder / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        text = "\n\n".join(f"# {activity.describe()}\n{activity.stacks}".rstrip() for activity in activities)
        path.write_text(text + "\n", encoding="utf-8")
        return path


def describe_hang(late: Sequence[WorkerActivity], others: Sequence[WorkerActivity] = ()) -> str:
    """Describe who hangs and who waits for whom.

    If all ranks of a group gave up waiting, no rank is late; then one of the others hangs.
    """
    busy = [one for one in (*late, *others) if one.call and not one.silent]
    silent = [one for one in (*late, *others) if one.silent]
    waiting = [one for one in busy if one.waits]
    working = [one for one in busy if not one.waits and (one in late or waiting or not late)]
    idle = [one for one in late if not one.call and not one.silent]
    parts = [f"{one.who} does not even answer what it is doing" for one in silent[:_MAX_NAMED]]
    parts += [
        f"{one.describe()} and waits for nobody: it hangs, or needs longer" for one in working[:_MAX_NAMED]
    ]
    awaited = "for it" if silent or working else "for other ranks, all of them"
    parts += [f"{one.describe()} and waits {awaited}" for one in waiting[:_MAX_NAMED]]
    parts += [
        f"{one.who} is idle: the call, or what it is to work on, has not reached it"
        for one in idle[:_MAX_NAMED]
    ]
    unnamed_count = len(silent) + len(working) + len(waiting) + len(idle) - len(parts)
    parts = parts or ["nobody seems to hang now"]
    return "; ".join([*parts, *([f"and {unnamed_count} more"] if unnamed_count > 0 else [])])
