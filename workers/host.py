"""The process behind a worker: one Ray actor that holds one role, or several fused ones.

Two concurrency groups: `work` (one thread: role methods and collectives, in order) and `control` (two threads: ping,
stacks, counters), which never touches a process group, so a worker deep in a collective still answers.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray

from nonet.errors import ConfigError, WorkerFailed
from nonet.workers import rows
from nonet.workers.worker import DistributeWorker, Place


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to make one role: its class and constructor arguments."""

    cls: type[DistributeWorker]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Argument:
    """How one parameter is put together from the flat values of a call.

    take    how many of them it is joined from
    share   (rank, world) to cut after joining, when group sizes differ
    parts   for a dict of futures: how each of its values is put together
    """

    name: str
    take: int = 1
    share: tuple[int, int] | None = None
    parts: tuple[Argument, ...] = ()


@ray.remote(concurrency_groups={"work": 1, "control": 2})
class Host:
    """One worker process."""

    def __init__(self, place: Place):
        self._place = place
        self._roles: dict[str, DistributeWorker] = {}
        self._spans: list[tuple[str, float, float]] = []
        self._busy = ""

    @ray.method(concurrency_group="work")
    def build(self, specs: dict[str, RoleSpec]) -> dict[str, Any]:
        """Construct every role, give each its peers, then set all up in order. Returns node and process id."""
        if self._place.threads:
            _steady(self._place.threads)
        for role, spec in specs.items():
            worker = spec.cls(*spec.args, **(spec.kwargs or {}))
            worker.place = replace(self._place, role=role, peers=self._roles)
            self._roles[role] = worker
        for role, worker in self._roles.items():
            self._guarded(role, "setup", worker.setup)
        return {"node": self._place.node, "pid": os.getpid()}

    @ray.method(concurrency_group="work")
    def call(self, role: str, method: str, layout: tuple[Argument, ...], *flat: Any) -> Any:
        """Run one role method; errors come back as WorkerFailed with role, rank and traceback."""
        values = iter(flat)
        kwargs = {argument.name: _assemble(argument, values) for argument in layout}
        return self._guarded(role, method, getattr(self._roles[role], method), **kwargs)

    @ray.method(concurrency_group="control")
    def ping(self) -> str:
        """What the work thread is doing now, "" when idle."""
        return self._busy

    @ray.method(concurrency_group="control")
    def spans(self) -> list[tuple[str, float, float]]:
        """(role.method, start, end) of every call since the last time asked; unix seconds."""
        spans, self._spans = self._spans, []
        return spans

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> str:
        """Stacks of all threads of this process, for a watchdog's message."""
        with tempfile.TemporaryFile() as out:
            faulthandler.dump_traceback(out, all_threads=True)
            out.seek(0)
            return out.read().decode()

    @ray.method(concurrency_group="work")
    def stop(self) -> None:
        """Tear every role down, last built first."""
        for worker in reversed(self._roles.values()):
            worker.teardown()

    def _guarded(self, role: str, method: str, function: Any, **kwargs: Any) -> Any:
        start, self._busy = time.time(), f"{role}.{method}"
        try:
            return function(**kwargs)
        except Exception as error:
            where = f"{role}-{self._place.rank} on {self._place.node}"
            text = (
                str(error)
                if isinstance(error, ConfigError)
                else f"{where}: {method} raised {type(error).__name__}: {error}"
            )
            raise WorkerFailed(
                text,
                role=role,
                rank=self._place.rank,
                traceback=traceback.format_exc(),
                caller_fault=isinstance(error, ConfigError),
            ) from None
        finally:
            self._busy = ""
            self._spans.append((f"{role}.{method}", start, time.time()))


def _steady(threads: int) -> None:
    """Same numbers every time: a fixed number of threads, and no kernel that adds in the order threads arrive."""
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nobody reads it; filling costs time


def _assemble(argument: Argument, values: Iterator[Any]) -> Any:
    if argument.parts:
        return {part.name: _assemble(part, values) for part in argument.parts}
    taken = [next(values) for _ in range(argument.take)]
    if argument.share is None:
        return taken[0]
    rank, world = argument.share
    whole = rows.join(taken)
    start, stop = rows.shares(rows.count(whole), world)[rank]
    return rows.cut(whole, start, stop)
