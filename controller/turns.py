"""Turns: which groups must be moved before a phase, from the plan's ledger: offloads first, then resumes.

Pure. At no moment, between moves included, does a device hold more than its usable memory; a phase that the ledger did not
account for is a PlacementError. `nonet.workers.residency` carries the moves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nonet.controller.ledger import Ledger, Line, gigabytes
from nonet.errors import PlacementError


@dataclass(frozen=True, slots=True)
class Move:
    """`what` is "offload" or "resume"."""

    group: str
    what: str


class Turns:
    """The groups of one device over the stages of a run; all are resident at first."""

    def __init__(self, ledger: Ledger, place: str):
        self.place = place
        self._lines = {(line.stage, line.phase): line for line in ledger.lines if line.place == place}
        self.offloaded: set[str] = set()

    def enter(self, stage: str, phase: str) -> list[Move]:
        """The moves that a phase needs, in the order to carry them out. Raises PlacementError for an unknown phase."""
        line = self._line(stage, phase)
        wanted = set(line.offloaded)
        working = {key.rsplit(".", 1)[0] for key in line.parts} - wanted
        moves = [Move(group, "offload") for group in sorted(wanted - self.offloaded)]
        moves += [Move(group, "resume") for group in sorted(self.offloaded & working)]
        self.offloaded = (self.offloaded | wanted) - working
        return moves

    def bytes_after(self, stage: str, phase: str) -> int:
        """What the device holds in a phase. Raises PlacementError where that passes what can be used."""
        line = self._line(stage, phase)
        if line.capacity and line.needed > line.capacity:
            raise PlacementError(
                f"stage {stage}, {phase}: {self.place} would hold {gigabytes(line.needed)} of {gigabytes(line.capacity)}"
            )
        return line.needed

    def _line(self, stage: str, phase: str) -> Line:
        try:
            return self._lines[stage, phase]
        except KeyError:
            known = ", ".join("/".join(key) for key in self._lines)
            raise PlacementError(
                f"the ledger of {self.place} has no phase {stage}/{phase}; it has {known}: plan again"
            ) from None


def pairs(ledger: Ledger, place: str) -> Iterable[tuple[str, str]]:
    """(stage, phase) of a place in the order of the run."""
    return [(line.stage, line.phase) for line in ledger.lines if line.place == place]
