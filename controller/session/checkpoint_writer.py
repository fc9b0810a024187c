"""CheckpointWriter: writes the checkpoints of a run, in the background of later steps if wanted.

Each rank copies its state when `save` is called, writes the copy on a background thread, and reports the files once they
are on disk. A checkpoint is open from the call of `save` until all ranks have reported and its manifest is written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nonet.atomic import make_folder
from nonet.background import Written
from nonet.controller.session.artifacts import list_artifact_hashes
from nonet.deadlines import Deadline
from nonet.errors import CheckpointError
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture, WorkerGroup

if TYPE_CHECKING:
    from nonet.controller.session.running_session import RunningSession


class CheckpointWriter:
    """The writer of a run's checkpoints. At most one checkpoint is open, that is still being written, at a time."""

    def __init__(self, session: RunningSession):
        self._session = session
        self._open: OpenCheckpoint | None = None
        self._open_steps = 0  # applied steps of the stage that the open checkpoint holds
        self._open_stage, self._began = "", 0.0  # its stage, and when it was begun in monotonic seconds

    def write(
        self, stage: StageSetup, applied_steps: int, *, wait: bool, as_loaded: bool = False
    ) -> Path | None:
        """Write a checkpoint after `applied_steps` steps, after waiting until the open one is complete.

        Args:
            stage: The stage.
            applied_steps: The number of applied steps of the stage.
            wait: Whether to wait until the new checkpoint is complete.
            as_loaded: Whether the weights were just loaded from another checkpoint, so that their memory is fitted already.

        Returns:
            The folder of the checkpoint, or None if it is still being written.
        """
        self.finish(wait=True)
        session, trainer = self._session, self._session.groups.trainer
        self._open_stage, self._began = stage.name, time.monotonic()
        ranks_by_role = {"trainer": trainer.group.world, "embedding": trainer.shards.world}
        trainer.ensure_on_device(stage)
        if not stage.rolls_out and not as_loaded:
            self._fit_memory()
        # Validation selects the checkpoint that ends the stage later, so that none is marked as the last here.
        is_selected_later = session.validation is not None and stage == session.stage
        staging_dir = session.checkpoint_log.begin_checkpoint(
            stage,
            applied_steps,
            session.version,
            list_artifact_hashes(session.facts),
            ranks_by_role,
            **({"last": False} if is_selected_later else {}),
        )
        self._open, self._open_steps = self._start_saving(staging_dir, wait=wait), applied_steps
        return self.finish(wait=True) if wait else None

    def finish(self, *, wait: bool) -> Path | None:
        """Complete the open checkpoint if all ranks have written it, and request its validation.

        Args:
            wait: Whether to wait for the ranks that are still writing.

        Returns:
            The folder of the checkpoint, or None if there is no open checkpoint or it is not complete yet.
        """
        if self._open is None:
            return None
        written = self._open.collect_written(wait=wait)
        if written is None:
            return None
        self._open = None
        log, validation = self._session.checkpoint_log, self._session.validation
        path = log.complete_checkpoint(written, validation.list_kept_steps() if validation else None)
        self._session.record_metrics(
            self._open_stage,
            self._open_steps,
            {
                "checkpoint seconds": time.monotonic() - self._began,
                "checkpoint bytes": sum(size for _, size in written.values()),
            },
        )
        if validation is not None:
            validation.request(self._open_steps)
        return path

    def save_to_folder(self, folder: Path) -> Path:
        """Save trainers and shards to a folder outside the run's checkpoints, wait for it, and return the folder.

        The run cannot be resumed from it.
        """
        self._fit_memory()
        make_folder(folder)
        written = self._start_saving(folder, wait=True).collect_written(wait=True)
        assert written is not None
        log = self._session.checkpoint_log
        log.add_written(folder, folder, written)
        log.store_changes()
        return folder

    def _fit_memory(self) -> None:
        """Fit the weight of the model's memory on the trainer, if the model has a memory."""
        if self._session.scenario.model.make_vote_options() is not None:
            self._session.groups.trainer.fit_memory()

    def _start_saving(self, folder: Path, *, wait: bool) -> OpenCheckpoint:
        """Make all ranks copy their state, and start to write the copies to a folder."""
        trainer, deadlines = self._session.groups.trainer, self._session.deadlines
        groups, deadline = [trainer.group, trainer.shards], deadlines.save
        if (
            self._session.scenario.storage is not None
        ):  # ranks may wait for the storage before they have uploaded their parts
            deadline = Deadline(deadlines.save + deadlines.storage, deadlines.save.key)
        return OpenCheckpoint(folder, groups, deadline, wait=wait)


class OpenCheckpoint:
    """A checkpoint that is being written; every rank has copied its state when the constructor returns.

    Args:
        folder: The folder that the ranks write to.
        groups: The groups whose ranks save their state.
        deadline: The longest time to wait for a rank.
        wait: Whether the constructor also waits until the copies are on disk.
    """

    def __init__(self, folder: Path, groups: Sequence[WorkerGroup], deadline: Deadline, *, wait: bool):
        self.folder, self._groups, self._deadline = folder, groups, deadline
        self._save_calls: list[GroupFuture] = [group.save(str(folder), wait) for group in groups]
        # The files of each rank, in the order of the groups; None for a rank that is still writing.
        self._answers: list[Written | None] = self._collect_answers()

    def collect_written(self, *, wait: bool) -> Written | None:
        """Return the files that all ranks wrote.

        Args:
            wait: Whether to wait for all ranks.

        Returns:
            The files, or None if `wait` is false and a rank is still writing.
        """
        while None in self._answers:
            self._save_calls = self._save_calls or [group.poll_save(wait) for group in self._groups]
            if not wait and not all(future.done() for future in self._save_calls):
                return None
            self._answers = self._collect_answers()
            if not wait and None in self._answers:
                return None
        return _merge_files(self.folder, [answer for answer in self._answers if answer is not None])

    def _collect_answers(self) -> list[Written | None]:
        """Wait for the calls of all groups, clear them, and return the answers of all ranks."""
        futures, self._save_calls = self._save_calls, []
        return [answer for future in futures for answer in future.get(self._deadline)]


def _merge_files(folder: Path, answers: Sequence[Written]) -> Written:
    """Merge the files of all ranks.

    Raises:
        CheckpointError: Two ranks wrote the same file.
    """
    files: Written = {}
    for answer in answers:
        if written_twice := files.keys() & answer.keys():
            raise CheckpointError(f"{folder / min(written_twice)} was written by two workers")
        files |= answer
    return files
