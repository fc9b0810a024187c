"""Moves groups that share a device to and from it, as the plan schedules; free for a run whose groups fit together.

Before a phase, the groups that must not be on the device are offloaded, then the working groups are resumed. Each move
has ended on all ranks before the next begins, so that a device never holds both. Moves are counted and appear in the
trace and the report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nonet.controller.plan import MemoryLedger, OffloadMove, OffloadSchedule
from nonet.controller.record import CONTROLLER, ChromeTrace
from nonet.deadlines import Deadlines
from nonet.workers.runtime import ActorGroup


class Offloader:
    """The executor of a plan's offload schedule.

    Attributes:
        stages: The stages whose groups are the current ones.
    """

    def __init__(
        self, ledger: MemoryLedger, hosts: Mapping[str, ActorGroup], trace: ChromeTrace, deadlines: Deadlines
    ):
        self._hosts, self._trace, self._deadlines = hosts, trace, deadlines
        places = dict.fromkeys(line.place for line in ledger.list_offloading_lines())
        self._turns = [OffloadSchedule(ledger, place) for place in places]
        self.stages: frozenset[str] = frozenset()
        self._counted: dict[str, dict[str, Any]] = {}

    def enter(self, stage: str, phase: str) -> None:
        """Make the moves before a phase of a stage; in a stage with other groups, resume everything.

        Raises:
            PlacementError: A move has no room.
            WorkerLost: A worker died.
            DeadlineExceeded: A worker did not finish in time.
        """
        for turns in self._turns:
            away = set(turns.offloaded)
            known = stage in self.stages and turns.has_stage(stage)
            for move in turns.enter(stage, phase) if known else turns.leave():
                if move.group in self._hosts:
                    away = away | {move.unit} if move.what == "offload" else away - {move.unit}
                    self._carry_out(move, away, f"{stage}/{phase}")

    def mark_resident(self, group: str) -> None:
        """Record that the processes of a group were restarted, which makes all of it resident."""
        for turns in self._turns:
            turns.mark_resident(group)

    def list_counts(self) -> dict[str, dict[str, Any]]:
        """Return the number of offloads and resumes with their bytes and seconds, by unit."""
        return {unit: dict(counts) for unit, counts in sorted(self._counted.items())}

    def _carry_out(self, move: OffloadMove, away: set[str], phase: str) -> None:
        """Move one unit, and record the move in the trace and the counters."""
        began, hosts = time.time(), self._hosts[move.group]
        roles = {unit.partition("/")[2] for unit in away if unit.startswith(f"{move.group}/")}
        moved = hosts.offload_roles(
            sorted(hosts.specs if move.group in away else roles), self._deadlines.step.scale_by(2)
        )
        size = sum(getattr(each, move.what) for each in moved)
        ended = time.time()
        self._trace.add(CONTROLLER, move.what, began, ended, unit=move.unit, bytes=size, phase=phase)
        counts = self._counted.setdefault(move.unit, {"offload": 0, "resume": 0, "bytes": 0, "seconds": 0.0})
        counts[move.what] += 1
        counts["bytes"] += size
        counts["seconds"] = round(counts["seconds"] + ended - began, 4)
