"""Moves groups that share a device to and from it, as the plan schedules; without effect if the groups fit together.

Before a phase, the groups that must not be on the device are offloaded to host memory, then the working groups are resumed.
Each move ends on all ranks before the next one begins, so that a device never holds both. Moves are counted, and appear in
the trace and the report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nonet.controller.plan import MemoryLedger, OffloadMove, OffloadSchedule
from nonet.controller.record import CONTROLLER, ChromeTrace
from nonet.deadlines import Deadlines
from nonet.workers.runtime import ActorGroup


class Offloader:
    """The executor of a plan's offload schedules, one per device.

    Attributes:
        stages: The stages all of whose groups are running now; set by the owner.
    """

    def __init__(
        self, ledger: MemoryLedger, hosts: Mapping[str, ActorGroup], trace: ChromeTrace, deadlines: Deadlines
    ):
        self._hosts, self._trace, self._deadlines = hosts, trace, deadlines
        self._schedules = _make_schedules(ledger)
        self.stages: frozenset[str] = frozenset()
        self._counts: dict[str, dict[str, Any]] = {}

    def replace_ledger(self, ledger: MemoryLedger) -> None:
        """Follow the ledger of a new plan; units that were offloaded on a device which it still has stay offloaded."""
        offloaded_by_place = {schedule.place: schedule.offloaded for schedule in self._schedules}
        new_schedules = _make_schedules(ledger)
        new_places = {schedule.place for schedule in new_schedules}
        for schedule in self._schedules:
            if schedule.place not in new_places:
                offloaded = set(schedule.offloaded)
                self._carry_out_all(schedule.leave(), offloaded, "change of workers")
        for schedule in new_schedules:
            schedule.offloaded = set(offloaded_by_place.get(schedule.place, ()))
        self._schedules = new_schedules

    def enter(self, stage: str, phase: str) -> None:
        """Make the moves before a phase of a stage. If the running groups are those of another stage, resume all groups.

        Raises:
            PlacementError: A move has no room.
            WorkerLost: A worker died.
            DeadlineExceeded: A worker did not finish in time.
        """
        for schedule in self._schedules:
            offloaded = set(schedule.offloaded)
            is_scheduled = stage in self.stages and schedule.has_stage(stage)
            moves = schedule.enter(stage, phase) if is_scheduled else schedule.leave()
            self._carry_out_all(moves, offloaded, f"{stage}/{phase}")

    def mark_resident(self, group: str) -> None:
        """Record that the processes of a group were restarted, which makes all of it resident."""
        for schedule in self._schedules:
            schedule.mark_resident(group)

    def list_counts(self) -> dict[str, dict[str, Any]]:
        """Return the number of offloads and resumes with their bytes and seconds, by unit."""
        return {unit: dict(counts) for unit, counts in sorted(self._counts.items())}

    def _carry_out_all(self, moves: Sequence[OffloadMove], offloaded: set[str], phase: str) -> None:
        """Make the moves of one device; `offloaded` are the units that are offloaded before the first of them."""
        units = offloaded
        for move in moves:
            if move.group in self._hosts:
                units = units | {move.unit} if move.what == "offload" else units - {move.unit}
                self._carry_out(move, units, phase)

    def _carry_out(self, move: OffloadMove, offloaded: set[str], phase: str) -> None:
        """Move one unit, and record the move in the trace and the counters; `offloaded` are the units after the move."""
        began, hosts = time.time(), self._hosts[move.group]
        roles = {unit.partition("/")[2] for unit in offloaded if unit.startswith(f"{move.group}/")}
        stats_by_rank = hosts.offload_roles(
            sorted(hosts.specs if move.group in offloaded else roles), self._deadlines.step.scale_by(2)
        )
        moved_bytes = sum(getattr(stats, move.what) for stats in stats_by_rank)
        ended = time.time()
        self._trace.add(CONTROLLER, move.what, began, ended, unit=move.unit, bytes=moved_bytes, phase=phase)
        counts = self._counts.setdefault(move.unit, {"offload": 0, "resume": 0, "bytes": 0, "seconds": 0.0})
        counts[move.what] += 1
        counts["bytes"] += moved_bytes
        counts["seconds"] = round(counts["seconds"] + ended - began, 4)


def _make_schedules(ledger: MemoryLedger) -> list[OffloadSchedule]:
    """Return the schedule of each device on which units take turns."""
    places = dict.fromkeys(line.place for line in ledger.list_offloading_lines())
    return [OffloadSchedule(ledger, place) for place in places]
