"""Files written on a thread beside the work, hashed by whoever writes them.

A participant of a commit answers with a `Written`: what it wrote and synced, and nobody reads those bytes again to hash them.
A process has one such thread, which keeps the order of the saves. On Linux it has a lower priority, so steps go first.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

from nonet.atomic import sync
from nonet.deadlines import way_out
from nonet.errors import CheckpointError, DeadlineExceeded

Written = dict[
    str, tuple[str, int]
]  # path under the folder -> (sha256, bytes) of a file whose content is on disk


class Writing:
    """Files that are being written under `folder`; `wait` until they are on disk. `what`: of errors, "sparse rows", say."""

    def __init__(self, folder: Path, what: str, write: Callable[[], Written]):
        self.folder, self._what = folder, what
        self._written = thread().submit(write)

    @property
    def done(self) -> bool:
        """Whether the writing has ended, well or not."""
        return self._written.done()

    def wait(self, timeout_s: float = 3600.0) -> Written:
        """What was written. Raises CheckpointError that says what stopped it, or DeadlineExceeded."""
        wait([self._written], timeout_s)
        if not self.done:
            raise DeadlineExceeded(
                f"{self._what} are still being written to {self.folder} after {timeout_s:g} s{way_out(timeout_s)}"
            )
        error = self._written.exception()
        if error is not None:
            raise CheckpointError(
                f"{self._what} could not be written to {self.folder}: {type(error).__name__}: {error}"
            ) from error
        return self._written.result()

    def answer(self, wait: bool, timeout_s: float) -> Written | None:
        """What was written; None while it is being written and nobody wants to wait. Raises as `wait`."""
        return self.wait(timeout_s) if wait or self.done else None


def sealed(folder: Path, paths: Iterable[Path]) -> Written:
    """Sync these files under a folder, and hash them while their bytes are still in memory."""
    return {str(path.relative_to(folder)): _sealed(path) for path in paths}


def thread() -> ThreadPoolExecutor:
    """The thread that writes for this process; a forked child has one of its own."""
    return _thread(os.getpid())


def _sealed(path: Path) -> tuple[str, int]:
    sync(path)
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest(), path.stat().st_size


@cache
def _thread(process: int) -> ThreadPoolExecutor:
    """It stays, for a step that begins a save would wait until a fresh one runs."""
    executor = ThreadPoolExecutor(1, f"save-{process}", _step_aside)
    executor.submit(int).result()  # it runs
    return executor


def _step_aside() -> None:
    """A step that wants the core goes first, but not for ever: it may wait for what this thread holds."""
    if sys.platform == "linux":  # where the priority is this thread's alone
        os.nice(5)
