"""OpenCommit: a commit that trainers and shards write while later steps go on.

They copy what they hold when asked, write it on a thread of their own, and answer with what they wrote once it is on disk.
Asking whether they are done is a message that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nonet.background import Written
from nonet.deadlines import Deadline
from nonet.errors import CheckpointError
from nonet.workers.runtime import GroupFuture, WorkerGroup


class OpenCommit:
    """Begun when made: every rank holds its copies. `wait`: the copies are written then, too."""

    def __init__(self, folder: Path, groups: Sequence[WorkerGroup], deadline: Deadline, *, wait: bool):
        self.folder, self._groups, self._deadline = folder, groups, deadline
        self._asked: list[GroupFuture] = [group.save(str(folder), wait) for group in groups]
        self._answers: list[Written | None] = self._answered()

    def written(self, *, wait: bool) -> Written | None:
        """What all of them wrote; None where one still writes and nobody waits. Raises what stopped one."""
        while None in self._answers:
            self._asked = self._asked or [group.saved(wait) for group in self._groups]
            if not wait and not all(future.done() for future in self._asked):
                return None
            self._answers = self._answered()
            if not wait and None in self._answers:
                return None
        return _joined(self.folder, [answer for answer in self._answers if answer is not None])

    def _answered(self) -> list[Written | None]:
        """What every rank of every group says."""
        futures, self._asked = self._asked, []
        return [answer for future in futures for answer in future.get(self._deadline)]


def _joined(folder: Path, answers: Sequence[Written]) -> Written:
    """All files of a commit. Raises CheckpointError where two ranks wrote one."""
    files: Written = {}
    for answer in answers:
        if twice := files.keys() & answer.keys():
            raise CheckpointError(f"{folder / min(twice)} was written by two workers")
        files |= answer
    return files
