"""OffloadSchedule: what must be moved before a phase, from the plan's ledger: offloads first, then resumes.

Pure. At no moment, between moves included, does a device hold more than its usable memory; a phase that the ledger did not
account for is a PlacementError. A unit that moves is a group, or "group/role": what one of its fused roles alone holds.
`nonet.controller.groups.offload` carries the moves out on the run's groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nonet.controller.plan.memory_ledger import Ledger, LedgerLine, gigabytes
from nonet.errors import PlacementError


@dataclass(frozen=True, slots=True)
class OffloadMove:
    """`what` is "offload" or "resume"; `unit` a group or group/role."""

    unit: str
    what: str

    @property
    def group(self) -> str:
        """The group that moves, or whose role does."""
        return self.unit.partition("/")[0]

    @property
    def role(self) -> str:
        """The role that moves, "" for all of the group."""
        return self.unit.partition("/")[2]


TOGETHER = (
    "rollout + update"  # the one phase of a stage in which both sides always work: it stands for all of them
)


class OffloadSchedule:
    """The groups of one device over the stages of a run; all are resident at first."""

    def __init__(self, ledger: Ledger, place: str):
        self.place = place
        self._lines = {(line.stage, line.phase): line for line in ledger.lines if line.place == place}
        self.offloaded: set[str] = set()

    def enter(self, stage: str, phase: str) -> list[OffloadMove]:
        """The moves that a phase needs, in the order to carry them out. Raises PlacementError for an unknown phase."""
        line = self._line(stage, phase)
        offloaded = set(line.offloaded)
        working = {key.rsplit(".", 1)[0] for key in line.parts} - offloaded
        back = {unit for unit in self.offloaded - offloaded if unit.partition("/")[0] in working}
        moves = [OffloadMove(unit, "offload") for unit in sorted(offloaded - self.offloaded)]
        moves += [OffloadMove(unit, "resume") for unit in sorted(back)]
        self.offloaded = (self.offloaded | offloaded) - back
        return moves

    def leave(self) -> list[OffloadMove]:
        """Everybody back, for work that the ledger did not account for: a stage rehearsed on another stage's groups."""
        moves = [OffloadMove(unit, "resume") for unit in sorted(self.offloaded)]
        self.offloaded = set()
        return moves

    def knows(self, stage: str) -> bool:
        """Whether the place is there in a stage: re-plans may put groups elsewhere."""
        return any(known == stage for known, _ in self._lines)

    def made_anew(self, group: str) -> None:
        """A group's processes were started afresh: all of it is resident."""
        self.offloaded = {unit for unit in self.offloaded if unit.partition("/")[0] != group}

    def bytes_after(self, stage: str, phase: str) -> int:
        """What the device holds in a phase. Raises PlacementError where that passes what can be used."""
        line = self._line(stage, phase)
        if line.capacity and line.needed > line.capacity:
            raise PlacementError(
                f"stage {stage}, {phase}: {self.place} would hold {gigabytes(line.needed)} of {gigabytes(line.capacity)}"
            )
        return line.needed

    def _line(self, stage: str, phase: str) -> LedgerLine:
        try:
            return self._lines.get((stage, TOGETHER)) or self._lines[stage, phase]
        except KeyError:
            known = ", ".join("/".join(key) for key in self._lines)
            raise PlacementError(
                f"the ledger of {self.place} has no phase {stage}/{phase}; it has {known}: plan again"
            ) from None


def pairs(ledger: Ledger, place: str) -> Iterable[tuple[str, str]]:
    """(stage, phase) of a place in the order of the run."""
    return [(line.stage, line.phase) for line in ledger.lines if line.place == place]
