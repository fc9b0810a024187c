"""Files written on a background thread and hashed by the process that writes them.

Each rank that writes a part of a checkpoint returns a `Written` record of the files that it wrote and synced, so that these
need not be read again to hash them. A process has one such thread, which writes saves in order. On Linux the thread has a
lower scheduling priority than training steps.
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
from nonet.deadlines import suggest_longer_deadline
from nonet.errors import CheckpointError, DeadlineExceeded
from nonet.storage import find_upload_timeout, upload_written

# (sha256, size in bytes) of files whose content is on disk, by relative path
Written = dict[str, tuple[str, int]]


class BackgroundWrite:
    """A write of files below a folder that runs on the background thread from the constructor on.

    If the folder is in a run that is in object storage, the files are uploaded too. An outage of the storage does not count
    against the timeouts of the write; requests are repeated until the deadline of the storage.

    Args:
        folder: The folder that the files are written to.
        what: The plural noun that error messages use for the files, for example "sparse rows".
        write: The function that writes and syncs the files and returns their record.
    """

    def __init__(self, folder: Path, what: str, write: Callable[[], Written]):
        self.folder, self._what = folder, what

        self._written = get_writer_thread().submit(write)
        self._future = get_writer_thread().submit(self._upload)

    def _upload(self) -> Written:
        """Upload the written files, if the folder is in a run that is in object storage."""
        written = self._written.result()
        upload_written(self.folder, written)
        return written

    @property
    def done(self) -> bool:
        """Whether writing has ended, with or without an error."""
        return self._future.done()

    def wait(self, timeout_s: float = 3600.0) -> Written:
        """Wait until the files are on disk.

        Args:
            timeout_s: The longest time to wait, in seconds.

        Returns:
            The record of the written files.

        Raises:
            CheckpointError: Writing failed; the message says why.
            DeadlineExceeded: Writing did not end in time.
        """
        wait([self._written], timeout_s)
        if self._written.done():
            wait([self._future], timeout_s + find_upload_timeout(self.folder))
        if not self.done:
            raise DeadlineExceeded(
                f"{self._what} are still being written to {self.folder} after {timeout_s:g} s{suggest_longer_deadline(timeout_s)}"
            )
        error = self._future.exception()
        if error is not None:
            raise CheckpointError(
                f"{self._what} could not be written to {self.folder}: {type(error).__name__}: {error}"
            ) from error
        return self._future.result()

    def poll_result(self, wait: bool, timeout_s: float) -> Written | None:
        """Return the record of the written files; None if they are still being written and `wait` is false.

        Args:
            wait: Whether to block until writing has ended.
            timeout_s: The longest time to block, in seconds.

        Raises:
            CheckpointError: Writing failed; the message says why.
            DeadlineExceeded: Writing did not end in time.
        """
        return self.wait(timeout_s) if wait or self.done else None


def seal_files(folder: Path, paths: Iterable[Path]) -> Written:
    """Sync files below a folder, hash them while their bytes are in the page cache, and return their record."""
    return {str(path.relative_to(folder)): _seal_file(path) for path in paths}


def get_writer_thread() -> ThreadPoolExecutor:
    """Return the background thread of this process, started at the first call; a forked child has its own."""
    return _start_writer_thread(os.getpid())


def _seal_file(path: Path) -> tuple[str, int]:
    """Sync one file and return its sha256 and its size in bytes."""
    sync(path)
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest(), path.stat().st_size


@cache
def _start_writer_thread(process: int) -> ThreadPoolExecutor:
    """Start the background thread of a process and wait until it runs, so that the first save does not wait for it."""
    executor = ThreadPoolExecutor(1, f"save-{process}", initializer=_lower_priority)
    executor.submit(int).result()  # wait until the thread has started
    return executor


def _lower_priority() -> None:
    """Lower the scheduling priority of the calling thread, so that training steps run before it."""
    if sys.platform == "linux":  # on Linux, nice() changes the priority of the calling thread only
        os.nice(5)  # of at most 19, so that the thread still makes progress
