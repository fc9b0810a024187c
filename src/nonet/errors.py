"""The exceptions that users can see, in one tree.

    NonetError              exit code 1 unless stated otherwise
    ├── ConfigError         a mistake of the caller: a scenario, an argument, a command line (exit code 2)
    │   ├── ServiceMissing      an actor that the scenario names does not run (exit code 2)
    │   ├── ClusterUnreachable  no Ray dashboard answers at the given address (exit code 2)
    │   └── DataError       invalid input data: a table, a column, a row, the return value of a reward (exit code 2)
    ├── PlacementError      the cluster does not have the resources that the plan needs
    │   └── NotResident     a call to a group whose buffers are offloaded to host memory; the call did not run
    ├── WorkerLost          a worker died or cannot be reached; has the role, the rank and the cause that Ray reports
    │   └── NotAdmitted     a worker was restarted and is not initialised yet; the call did not run
    ├── WorkerFailed        a method of a worker raised; has the role, the rank and the traceback
    ├── DeadlineExceeded    a wait timed out; names who waited for whom
    ├── StoreError          a sample store cannot be reached or timed out; names the store and the next step
    ├── StorageError        object storage cannot be used; names the address and the cause
    │   └── StorageConflict another process wrote an object first, such as the head of a run
    ├── CheckpointError     a checkpoint is missing, incomplete or belongs to another run
    └── StaleVersion        a reader has a version that is not published, or a call is from an older gang epoch

A message is one line and says what is wrong, which value was found, which values are allowed, and what to do next.
"""

from __future__ import annotations

import errno

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")


class NonetError(Exception):
    """Base class of all exceptions that Nonet raises on purpose."""

    exit_code = 1


class ConfigError(NonetError):
    """The caller gave something invalid; nothing was started."""

    exit_code = 2


class DataError(ConfigError):
    """A table, a column, a row or the return value of a reward is invalid."""


class ServiceMissing(ConfigError):
    """An actor that the scenario names does not run; a run that has lost a node waits for it."""


class ClusterUnreachable(ConfigError):
    """No Ray dashboard answers at the given address."""


class PlacementError(NonetError):
    """The cluster does not have the resources that the plan needs."""


class NotResident(PlacementError):
    """A worker rejected a call because its buffers are offloaded to host memory; the call did not run."""


class WorkerLost(NonetError):
    """A worker died or cannot be reached; `role` and `rank` identify it (-1 if unknown)."""

    def __init__(self, message: str, *, role: str = "", rank: int = -1):
        super().__init__(message)
        self.role, self.rank = role, rank


class NotAdmitted(WorkerLost):
    """A worker rejected a call because it was restarted and is not initialised yet; the call did not run."""


class WorkerFailed(NonetError):
    """A method of a worker raised an exception.

    Args:
        message: The error message.
        role: The role of the worker.
        rank: The rank of the worker, -1 if it is unknown.
        traceback: The traceback in the worker.
        caller_fault: Whether the cause is a ConfigError; the exit code is then 2.
    """

    def __init__(
        self, message: str, *, role: str = "", rank: int = -1, traceback: str = "", caller_fault: bool = False
    ):
        super().__init__(message)
        self.role, self.rank, self.traceback = role, rank, traceback
        self.exit_code = 2 if caller_fault else 1

    def __reduce__(self):
        return (
            _rebuild_worker_failed,
            (str(self), self.role, self.rank, self.traceback, self.exit_code == 2),
        )


class DeadlineExceeded(NonetError):
    """A wait timed out; the message names who waited for whom."""


class StoreError(NonetError):
    """A store of samples or features cannot be reached or timed out; the message names it and the next step."""


class StorageError(NonetError):
    """Object storage cannot be used; the message names the address and the cause."""


class StorageConflict(StorageError):
    """Another process wrote an object first, such as the head of a run that it has opened."""


class CheckpointError(NonetError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class StaleVersion(NonetError):
    """A reader has another version than the one that an update starts from, or a call is from an older gang epoch."""


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error says that a disk is full; libraries such as safetensors say so only in their text."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return True
    return any(text in str(error) for text in _DISK_FULL_TEXTS)


def _rebuild_worker_failed(
    message: str, role: str, rank: int, traceback: str, caller_fault: bool
) -> WorkerFailed:
    """Rebuild a WorkerFailed error when it is unpickled."""
    return WorkerFailed(message, role=role, rank=rank, traceback=traceback, caller_fault=caller_fault)
