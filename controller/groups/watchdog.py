"""Explains a wait that ran out: which worker hangs, what it is doing, and who waits for it; all stacks are written to a file.

A rank in a collective is late because another one is. Ranks that train together are therefore inspected together, and the
one that is busy and does not wait, or does not answer, is the one that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nonet.workers import WorkerActivity
from nonet.workers.roles.kinds import get_gang_roles
from nonet.workers.runtime import ActorGroup

_MOST = 3  # workers named in a message


class Watchdog:
    """The inspector of a run's groups, which writes stacks to the folder of the run."""

    def __init__(self, folder: Path, hosts: Mapping[str, ActorGroup]):
        self._folder, self._hosts = folder, hosts

    def describe_late(self, group: ActorGroup, ranks: Sequence[int]) -> str:
        """Describe what the late ranks of a group are doing, and those that they may wait for, for an error message."""
        seen = {group.name: group.describe_activities()} | {
            other.name: other.describe_activities() for other in self._find_partners(group)
        }
        late = [seen[group.name][rank] for rank in ranks]
        others = [
            one for name, ranked in seen.items() for one in ranked if name != group.name or one not in late
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

    def _write(self, seen: Sequence[WorkerActivity]) -> Path:
        path = self._folder / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        text = "\n\n".join(f"# {one.describe()}\n{one.stacks}".rstrip() for one in seen)
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
    parts = [f"{one.who} does not even answer what it is doing" for one in silent[:_MOST]]
    parts += [f"{one.describe()} and waits for nobody: it hangs, or needs longer" for one in working[:_MOST]]
    whom = "for it" if silent or working else "for other ranks, all of them"
    parts += [f"{one.describe()} and waits {whom}" for one in waiting[:_MOST]]
    parts += [
        f"{one.who} is idle: the call, or what it is to work on, has not reached it" for one in idle[:_MOST]
    ]
    left = len(silent) + len(working) + len(waiting) + len(idle) - len(parts)
    parts = parts or ["nobody seems to hang now"]
    return "; ".join([*parts, *([f"and {left} more"] if left > 0 else [])])
