"""Progress of a run, for those who disturb it (`nonet chaos`): what has been applied, and whether it saves or publishes now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from nonet.controller.record import RunFolder, read_journal
from nonet.workers.runtime import list_pending_waits

Moment = Literal["step", "save", "publish"]
_PUBLISHING_CALLS = frozenset({"export_weights", "receive", "apply", "export", "publish"})
_POLL_S = 0.002


class ProgressReader:
    """Reads how far a run is, in the process of its controller.

    Args:
        run: The folder of the run.
        view_groups: Returns the number of workers and the roles of each group, by its name.
        count_losses: Returns how often the run has lost workers or its controller.
    """

    def __init__(
        self,
        run: RunFolder,
        view_groups: Callable[[], Mapping[str, tuple[int, tuple[str, ...]]]],
        count_losses: Callable[[], int],
    ):
        self._run, self._view_groups, self._count_losses = run, view_groups, count_losses
        self._size, self._applied = -1, 0

    def read(self, moment: Moment = "step", timeout_s: float = 0.0) -> dict[str, Any]:
        """Return the progress of the run, when it writes a checkpoint or publishes weights, or after a time.

        Args:
            moment: What to wait for; "step" for nothing.
            timeout_s: The longest time to wait.

        Returns:
            "applied": the number of applied steps, which after a recovery starts at the checkpoint; "checkpoint": the name of
            the newest checkpoint, "" without one; "groups": {name: [number of workers, roles]}; "losses": how often the run
            has lost workers or its controller; "moment": `moment`, or "step" if it did not come.
        """
        reached = self._wait(moment, timeout_s)
        folders = self._run.checkpoints.glob("step-*/manifest.json")
        return {
            "applied": self._count_applied(),
            "checkpoint": max((path.parent.name for path in folders), default=""),
            "groups": {
                name: [workers, list(roles)] for name, (workers, roles) in self._view_groups().items()
            },
            "losses": self._count_losses(),
            "moment": moment if reached else "step",
        }

    def _wait(self, moment: Moment, timeout_s: float) -> bool:
        """Wait until the run is at a moment; return False if it is not after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self._is_at(moment):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _is_at(self, moment: Moment) -> bool:
        """Return whether the run is at a moment now."""
        if moment == "save":
            return any(self._run.checkpoints.glob("tmp-*"))
        if moment == "publish":
            return any(wait.future.method in _PUBLISHING_CALLS for wait in list_pending_waits())
        return True

    def _count_applied(self) -> int:
        """Return the number of applied steps by the journal, which is read again when its size has changed."""
        journal = self._run.journal
        size = journal.stat().st_size if journal.exists() else 0
        if size != self._size:
            applied = [record["applied"] + 1 for record in read_journal(journal) if "applied" in record]
            self._size, self._applied = size, max(applied, default=0)
        return self._applied
