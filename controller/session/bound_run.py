"""BoundRun: the processes and records of a run, before the artifacts are opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nonet.controller.groups import GroupProcesses
from nonet.controller.plan import Plan
from nonet.controller.record import CheckpointLog, ChromeTrace, Manifest, RunFolder
from nonet.errors import WorkerLost
from nonet.storage import RunWriter

_PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A run whose processes have started.

    Attributes:
        processes: The processes of the groups.
        checkpoint_log: The checkpoints and the journal.
        trace: The trace of workers and controller.
        writer: The open writer of a run in object storage.
        resumed_from: The folder and the manifest of the checkpoint to continue from; None for a new run.
        add_note: The function that shows a note of the run to its user.
        record_metrics: The function that records metrics of the controller: (stage, step, values by name).
    """

    processes: GroupProcesses
    checkpoint_log: CheckpointLog
    trace: ChromeTrace
    writer: RunWriter | None
    resumed_from: tuple[Path, Manifest] | None
    add_note: Callable[[str], None]
    record_metrics: Callable[[str, int, Mapping[str, float]], None]

    def require_stored(self, *paths: Path) -> None:
        """Commit files or folders that a worker has made, before a result counts that stands for them.

        Raises:
            WorkerLost: A run in object storage lacks one, and workers have died: with them, what they could not tell.
        """
        # The first answer of a worker may be to a question from before it made the files.
        for _ in range(2):
            self.checkpoint_log.store_changes()
            missing = [path for path in paths if not self.checkpoint_log.has_file(path)]
            if not missing:
                return
        if dead := self.processes.binding.list_dead_workers():
            raise WorkerLost(
                f"{missing[0].relative_to(self.processes.run.path)} was lost with {', '.join(dead)}"
            )


def write_plan(run: RunFolder, plan: Plan, add_note: Callable[[str], None]) -> None:
    """Write the plan of a run, and add a note if groups compute with other numbers of threads than in the plan before."""
    earlier = (run.read_json(_PLAN) or {}).get("groups", [])
    earlier_threads = {group["name"]: group["threads"] for group in earlier}
    changes = [
        f"{group.name} {earlier_threads[group.name]} to {group.threads}"
        for group in plan.groups
        if earlier_threads.get(group.name, group.threads) != group.threads
    ]
    if changes:
        add_note(
            f"the number of threads changes with the cores and workers ({', '.join(changes)}): later steps may be "
            "rounded differently"
        )
    run.write_json(_PLAN, plan.as_dict())
