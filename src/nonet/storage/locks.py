"""Locks of files, by which processes of a node agree on folders that they share.

A lock ends with its process. Tests replace the locks, because a lock that waits blocks its thread.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from nonet.errors import DeadlineExceeded

_POLL_S = 0.01


class Locks(Protocol):
    """How files are locked."""

    def hold(self, file: Path) -> AbstractContextManager[None]:
        """Lock a file while a block runs, after waiting for other holders."""
        ...

    def take(self, file: Path, *, shared: bool = False) -> Callable[[], None] | None:
        """Lock a file without waiting.

        Args:
            file: The file, which is created if needed.
            shared: Whether other shared locks may be held at the same time.

        Returns:
            A function that releases the lock; None if another holder excludes it.
        """
        ...


class FileLocks:
    """Locks between processes (`flock`) of the file that is at the path when the lock is taken."""

    @contextmanager
    def hold(self, file: Path) -> Iterator[None]:
        """Lock a file while a block runs, after waiting for other holders."""
        descriptor = _lock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    def take(self, file: Path, *, shared: bool = False) -> Callable[[], None] | None:
        """Lock a file without waiting; see `Locks`."""
        try:
            descriptor = _lock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return lambda: os.close(descriptor)


@contextmanager
def hold_lock_within(file: Path, timeout_s: float, action: str) -> Iterator[None]:
    """Lock a file between processes while a block runs, after waiting for other holders for a limited time.

    Args:
        file: The file, which is created if needed.
        timeout_s: Seconds to wait.
        action: What other holders do, for the message.

    Raises:
        DeadlineExceeded: Another process holds the lock, for example since it is suspended.
    """
    deadline = time.monotonic() + timeout_s
    while (release := FILE_LOCKS.take(file)) is None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"another process is {action} and does not end within {timeout_s:g} s, so nothing was changed; it may be "
                f"suspended: find it with `fuser {file}`, continue or end it, and try again"
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        release()


def _lock(file: Path, mode: int) -> int:
    """Lock a file, and return the descriptor; a file that its holder has deleted meanwhile is created again."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, mode)
            if _is_at(file, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(file: Path, descriptor: int) -> bool:
    """Return whether a descriptor is that of the file at a path."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


FILE_LOCKS = FileLocks()
