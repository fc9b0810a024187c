"""Every error a user can meet, in one tree.

    NonetError              exit code 1 unless said otherwise
    ├── ConfigError         the caller's mistake: a scenario, an argument, a command line (exit code 2)
    │   └── DataError       the caller's data: a table, a column, a row, a reward's answer (exit code 2)
    ├── PlacementError      the cluster cannot hold what the plan asks
    │   └── NotResident     a call of a group whose buffers wait in host memory: it did not run
    ├── WorkerLost          a worker died or cannot be reached; carries role, rank and what Ray says of the cause
    │   └── NotAdmitted     a worker that was restarted and holds nothing yet: the call did not run
    ├── WorkerFailed        a worker's method raised; carries role, rank and its traceback
    ├── DeadlineExceeded    a wait ran out; names who waited for whom
    ├── StoreError          a store of samples cannot be reached, or did not answer in time; names it and what to try
    ├── CheckpointError     a commit is missing, torn or of another run
    └── StaleVersion        a reader holds another version than the one published, or a call is of an older gang epoch

A message says what, got, allowed and the next step, in one line.
"""

from __future__ import annotations


class NonetError(Exception):
    """Base of all errors that Nonet raises on purpose."""

    exit_code = 1


class ConfigError(NonetError):
    """The caller asked for something that cannot be: nothing was started."""

    exit_code = 2


class DataError(ConfigError):
    """A table, a column, a row or a reward's answer is not what it must be."""


class PlacementError(NonetError):
    """The cluster cannot hold what the plan asks for."""


class NotResident(PlacementError):
    """A worker refused a call, which did not run: its buffers wait in host memory while another group works."""


class WorkerLost(NonetError):
    """A worker died or cannot be reached. `role` and `rank` say which, -1 where that is not known."""

    def __init__(self, message: str, *, role: str = "", rank: int = -1):
        super().__init__(message)
        self.role, self.rank = role, rank


class NotAdmitted(WorkerLost):
    """A worker refused a call, which did not run: it was restarted and is not built again yet."""


class WorkerFailed(NonetError):
    """A worker's method raised.

    `role`, `rank` and `traceback` say where; `caller_fault` is True when the cause is a ConfigError.
    """

    def __init__(
        self, message: str, *, role: str = "", rank: int = -1, traceback: str = "", caller_fault: bool = False
    ):
        super().__init__(message)
        self.role, self.rank, self.traceback = role, rank, traceback
        self.exit_code = 2 if caller_fault else 1

    def __reduce__(self):
        return (_worker_failed, (str(self), self.role, self.rank, self.traceback, self.exit_code == 2))


class DeadlineExceeded(NonetError):
    """A wait ran out of time; the message names who waited for whom."""


class StoreError(NonetError):
    """A store of samples or features cannot be reached or did not answer in time; the message names it and what to try."""


class CheckpointError(NonetError):
    """A commit is missing, torn, or belongs to another run."""


class StaleVersion(NonetError):
    """A reader holds another version than the one an update starts from, or a call comes from an older gang epoch."""


def _worker_failed(message: str, role: str, rank: int, traceback: str, caller_fault: bool) -> WorkerFailed:
    return WorkerFailed(message, role=role, rank=rank, traceback=traceback, caller_fault=caller_fault)
