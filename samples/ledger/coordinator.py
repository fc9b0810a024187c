"""Coordinator: leases of slices over a socket, for worker processes that join, leave and die.

    serve(Coordinator(leases, applied), address)                 # one process, which also keeps the model
    with Worker(address, "w3") as worker:                        # any number of others, at any time
        for part in worker.slices():
            worker.done(part, learn(feed.read(part)))

A worker whose connection ends, or that holds a slice longer than `lease_s`, is gone: its slices go to others. `applied` is called
with each step's answers in the order of steps, so the history does not depend on who worked. It commits model and ledger
together: killed, the coordinator goes on from that commit, and workers that find it again get what is not in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from nonet.errors import DeadlineExceeded
from nonet.samples.ledger.leases import Leases
from nonet.samples.ledger.order import Slice

Address = tuple[str, int] | str
_KEY = b"nonet samples"
_WAIT_S = 0.2  # that a worker waits for a free slice before it asks again
_RETRY_S = 0.02


class Coordinator:
    """Leases behind a lock. `applied(step, answers by slice)` is called once a step, in order, under the lock."""

    def __init__(self, leases: Leases, applied: Callable[[int, list[Any]], None], lease_s: float = 60.0):
        self._leases, self._applied, self._lease_s = leases, applied, lease_s
        self._since: dict[str, float] = {}
        self._changed = threading.Condition()

    @property
    def over(self) -> bool:
        return self._leases.over

    def lease(self, worker: str) -> Slice | str:
        """A slice for a worker; "wait" where none is free for now, "over" after the last step."""
        with self._changed:
            until = time.monotonic() + _WAIT_S
            while not self._leases.over:
                self._drop_late()
                if part := self._leases.lease(worker):
                    self._since[worker] = time.monotonic()
                    return part
                if not self._changed.wait(until - time.monotonic()):
                    return "wait"
            return "over"

    def done(self, worker: str, part: Slice, answer: Any) -> bool:
        """A slice is done; whether it counts."""
        with self._changed:
            counts = self._leases.done(worker, part, answer)
            while (answers := self._leases.applied()) is not None:
                self._applied(self._leases.step - 1, answers)
            self._changed.notify_all()
            return counts

    def left(self, worker: str) -> None:
        """A worker is gone."""
        with self._changed:
            self._since.pop(worker, None)
            self._leases.left(worker)
            self._changed.notify_all()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for worker in [name for name, since in self._since.items() if now - since > self._lease_s]:
            del self._since[worker]
            self._leases.left(worker)


def serve(coordinator: Coordinator, address: Address) -> None:
    """Answer workers until the last step is applied."""
    with Listener(address, authkey=_KEY) as listener:
        threading.Thread(target=_accept, args=(listener, coordinator), daemon=True).start()
        while not coordinator.over:
            time.sleep(_RETRY_S)
        time.sleep(2 * _WAIT_S)  # so that workers hear that it is over


def _accept(listener: Listener, coordinator: Coordinator) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:
            return
        except EOFError:  # a worker that died while it joined
            continue
        threading.Thread(target=_answer, args=(connection, coordinator), daemon=True).start()


def _answer(connection: Connection, coordinator: Coordinator) -> None:
    worker = ""
    try:
        worker = connection.recv()
        while True:
            what, *arguments = connection.recv()
            connection.send(getattr(coordinator, what)(worker, *arguments))
    except (EOFError, OSError):
        coordinator.left(worker)


class Worker:
    """One worker's line to the coordinator; a lost one is looked for during `patience_s`, then DeadlineExceeded."""

    def __init__(self, address: Address, name: str, patience_s: float = 30.0):
        self._address, self._name, self._patience_s = address, name, patience_s
        self._line: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.close()

    def slices(self) -> Iterator[Slice]:
        """Slices to work on, until the last step is applied."""
        while (part := self._ask("lease")) != "over":
            if part not in ("wait", None):
                yield part

    def done(self, part: Slice, answer: Any) -> bool:
        """What came of a slice; whether it counts: not where the slice went to somebody else meanwhile."""
        return bool(self._ask("done", part, answer))

    def _ask(self, *question: Any) -> Any:
        """The coordinator's answer; None where it was lost, and is there again with no memory of this worker."""
        try:
            line = self._line or self._joined()
            line.send(question)
            return line.recv()
        except (EOFError, OSError):
            self._line = None
            return None

    def _joined(self) -> Connection:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                self._line = Client(self._address, authkey=_KEY)
                self._line.send(self._name)
                return self._line
            except (OSError, EOFError):
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"worker {self._name} waited {self._patience_s:g} s for the coordinator at {self._address}"
                    ) from None
                time.sleep(_RETRY_S)
