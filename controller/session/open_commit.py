"""A checkpoint that trainers and shards write while later steps run.

Each rank copies its state when it is asked to save, writes the copy on its own thread, and reports the files once they
are on disk. The poll for completion does not block.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nonet.background import Written
from nonet.deadlines import Deadline
from nonet.errors import CheckpointError
from nonet.workers.runtime import GroupFuture, WorkerGroup


class OpenCommit:
    """A checkpoint that is being written; every rank has copied its state when the constructor returns.

    With `wait`, the copies are also on disk by then.
    """

    def __init__(self, folder: Path, groups: Sequence[WorkerGroup], deadline: Deadline, *, wait: bool):
        self.folder, self._groups, self._deadline = folder, groups, deadline
        self._asked: list[GroupFuture] = [group.save(str(folder), wait) for group in groups]
        self._answers: list[Written | None] = self._collect_answers()

    def collect_written(self, *, wait: bool) -> Written | None:
        """Return the files that all ranks wrote.

        Args:
            wait: Whether to wait for all ranks.

        Returns:
            The files, or None if `wait` is false and a rank is still writing.
        """
        while None in self._answers:
            self._asked = self._asked or [group.poll_save(wait) for group in self._groups]
            if not wait and not all(future.done() for future in self._asked):
                return None
            self._answers = self._collect_answers()
            if not wait and None in self._answers:
                return None
        return _merge_files(self.folder, [answer for answer in self._answers if answer is not None])

    def _collect_answers(self) -> list[Written | None]:
        """Collect the answers of all ranks of all groups."""
        futures, self._asked = self._asked, []
        return [answer for future in futures for answer in future.get(self._deadline)]


def _merge_files(folder: Path, answers: Sequence[Written]) -> Written:
    """Merge the files of all ranks.

    Raises:
        CheckpointError: Two ranks wrote the same file.
    """
    files: Written = {}
    for answer in answers:
        if twice := files.keys() & answer.keys():
            raise CheckpointError(f"{folder / min(twice)} was written by two workers")
        files |= answer
    return files
