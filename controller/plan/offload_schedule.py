"""OffloadSchedule: the offloads and resumes that are needed before each phase, derived from the plan's memory ledger.

Offloads come first, then resumes. A device never holds more than its usable memory, not even between two moves. A phase
that the ledger does not contain is a PlacementError. A move concerns a unit: a group, or "group/role" for the part
of one role in a group that several roles share. `nonet.controller.groups.offload` carries out the moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nonet.controller.plan.memory_ledger import LedgerLine, MemoryLedger
from nonet.errors import PlacementError


@dataclass(frozen=True, slots=True)
class OffloadMove:
    """One move of a unit between device and host memory.

    Attributes:
        unit: A group, or "group/role".
        what: "offload" or "resume".
    """

    unit: str
    what: str

    @property
    def group(self) -> str:
        """The group of the unit."""
        return self.unit.partition("/")[0]

    @property
    def role(self) -> str:
        """The role of the unit; "" if the whole group moves."""
        return self.unit.partition("/")[2]


# The only phase of a stage in which rollout and update overlap: the ledger has it instead of their separate phases.
TOGETHER = "rollout + update"


class OffloadSchedule:
    """Tracks which units of one device are offloaded; all are resident at the start of a run.

    Args:
        ledger: The memory ledger of the plan.
        place: The name of the device in the ledger: the group that owns it.
    """

    def __init__(self, ledger: MemoryLedger, place: str):
        self.place = place
        self._line_by_phase = {(line.stage, line.phase): line for line in ledger.lines if line.place == place}
        self.offloaded: set[str] = set()

    def enter(self, stage: str, phase: str) -> list[OffloadMove]:
        """Record that a phase begins, and return the moves that it needs in the order in which they must be carried out.

        Args:
            stage: The name of the stage.
            phase: The name of the phase.

        Raises:
            PlacementError: The ledger does not contain the phase.
        """
        line = self._find_line(stage, phase)
        phase_offloaded = set(line.offloaded)
        # The keys of `parts` are "group.part".
        resident_groups = {key.rsplit(".", 1)[0] for key in line.parts} - phase_offloaded
        resumed = {
            unit for unit in self.offloaded - phase_offloaded if unit.partition("/")[0] in resident_groups
        }
        moves = [OffloadMove(unit, "offload") for unit in sorted(phase_offloaded - self.offloaded)]
        moves += [OffloadMove(unit, "resume") for unit in sorted(resumed)]
        self.offloaded = (self.offloaded | phase_offloaded) - resumed
        return moves

    def leave(self) -> list[OffloadMove]:
        """Record that all units become resident, and return the moves for that.

        They are needed before work that the ledger does not contain, such as the rehearsal of a stage on another stage's
        groups.
        """
        moves = [OffloadMove(unit, "resume") for unit in sorted(self.offloaded)]
        self.offloaded = set()
        return moves

    def has_stage(self, stage: str) -> bool:
        """Return whether the ledger has lines of this device for a stage; a re-plan may have moved all its groups elsewhere."""
        return any(known_stage == stage for known_stage, _ in self._line_by_phase)

    def mark_resident(self, group: str) -> None:
        """Record that the processes of a group were restarted, so that all of it is resident."""
        self.offloaded = {unit for unit in self.offloaded if unit.partition("/")[0] != group}

    def _find_line(self, stage: str, phase: str) -> LedgerLine:
        """Return the ledger line of a phase, or that of the overlapped phase if the stage has one."""
        try:
            return self._line_by_phase.get((stage, TOGETHER)) or self._line_by_phase[stage, phase]
        except KeyError:
            known_phases = ", ".join("/".join(key) for key in self._line_by_phase)
            raise PlacementError(
                f"the ledger of {self.place} has no phase {stage}/{phase}; it has {known_phases}: plan again"
            ) from None


def list_phases(ledger: MemoryLedger, place: str) -> Iterable[tuple[str, str]]:
    """Return the (stage, phase) pairs of a device in the order of the run."""
    return [(line.stage, line.phase) for line in ledger.lines if line.place == place]
