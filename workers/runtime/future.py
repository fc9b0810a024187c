"""Pending results of group calls.

The value of a `GroupFuture` is returned by `.get(timeout_s)`, which waits at most a day by default, or by `await`.
Iteration yields (rank, value) in the order of completion, and `.refs` are the Ray references. If a future is passed to
another group, its results are not fetched by this process. `.get()` calls `ray.get` once without `ray.wait` before,
which would make a call 1.17 times slower.

A `GroupStream` iterates over the values of a method declared with `collect="stream"`, as the ranks yield them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nonet.deadlines import BARE as DEFAULT_TIMEOUT_S
from nonet.deadlines import suggest_longer_deadline
from nonet.errors import DeadlineExceeded, NonetError, NotAdmitted, WorkerFailed, WorkerLost
from nonet.workers.runtime.payload import concat_rows

# Time limit for counting rows. The actors that hold them count on a control thread, which is never busy for long.
_COUNT_PATIENCE_S = 30.0


_pending_waits: dict[int, PendingWait] = {}  # The waits of all threads of this process, by their numbers.
_wait_numbers = itertools.count()


class RankActors(Protocol):
    """The actors that a call was sent to, one per rank (`ActorGroup`).

    Attributes:
        actors: The actor of each rank.
        hurt: By lost rank, the message of the error that reported its loss.
    """

    actors: list[Any]
    hurt: dict[int, str]

    def explain_late_ranks(self, ranks: list[int]) -> str:
        """Describe what ranks that have not answered are doing, for an error message."""
        ...

    def restart(self, rank: int) -> None:
        """End a rank's process, so that it starts again."""
        ...

    def revive(self, rank: int, cause: str) -> None:
        """Wait until a lost rank has been restarted."""
        ...

    def send(self, message: Any, rank: int) -> Any:
        """Send a call to one rank, and return the reference to its result."""
        ...


class GroupFuture:
    """The pending results of a group call, one per rank.

    Args:
        refs: The reference to the result of each rank.
        hosts: The group that was called.
        role: Role that was called.
        method: Method that was called.
        collect: How the results are combined into one value: "concat", "first", "sum", "mean" or "list".
        timeout_s: Deadline given at the call, None for none.
        retries: Maximum number of times that a call is repeated on a restarted rank if it may have run before.
        sent: The call as it was sent, to repeat it on a restarted rank; None if it cannot be repeated.
        actors: The actor that holds each result; None if result i is that of rank i.
        ranks_per_share: Number of neighbouring ranks that computed the same rows, which are collected once.

    Attributes:
        by_rank: Whether result i is that of rank i of the group.
    """

    def __init__(
        self,
        refs: list[Any],
        hosts: RankActors,
        role: str,
        method: str,
        collect: str,
        timeout_s: float | None = None,
        retries: int = 0,
        sent: Any = None,
        actors: list[Any] | None = None,
        ranks_per_share: int = 1,
    ):
        self.refs, self.role, self.method, self.collect = refs, role, method, collect
        self._group, self._message = hosts, sent
        self._actors = list(hosts.actors) if actors is None else actors
        self.by_rank = actors is None
        self._timeout_s, self._retries, self._ranks_per_share = timeout_s, retries, ranks_per_share
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._count_refs: list[Any] | None = None

    def set_deadline(self, timeout_s: float) -> GroupFuture:
        """Set the deadline to `timeout_s` from now, and return the future itself."""
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        return self

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for all ranks and return the collected value.

        Args:
            timeout_s: Seconds to wait; by default until the call's own deadline, or a day for a call without one.

        Raises:
            DeadlineExceeded: Some ranks, which the message names, have not answered.
            WorkerLost: A worker died and the call could not be repeated.
            WorkerFailed: A worker raised an error.
        """
        while True:
            wait_s = self._get_wait_s(timeout_s)
            try:
                with _record_wait(self, wait_s):
                    values = ray.get(self.refs, timeout=wait_s)
                return self._collect_values(values)
            except GetTimeoutError:
                raise self.make_deadline_error(timeout_s) from None
            except (RayActorError, RayTaskError) as error:
                self._retry_lost_rank(error)

    def settle(self, timeout_s: float | None = None) -> GroupFuture:
        """Wait until every rank has a result, without fetching the results. Waits and raises errors like `get`.

        Returns:
            The future itself.
        """
        while True:
            wait_s = self._get_wait_s(timeout_s)
            deadline = time.monotonic() + wait_s
            with _record_wait(self, wait_s):
                _, late = ray.wait(self.refs, num_returns=len(self.refs), timeout=wait_s, fetch_local=False)
            if late:
                raise self.make_deadline_error(timeout_s)
            try:
                ray.get(
                    self.request_row_counts(), timeout=max(_COUNT_PATIENCE_S, deadline - time.monotonic())
                )
                return self
            except GetTimeoutError:
                raise self.make_deadline_error(timeout_s) from None
            except (RayActorError, RayTaskError) as error:
                self._count_refs = None
                self._retry_lost_rank(error)

    def request_row_counts(self) -> list[Any]:
        """Return references to the row counts of the ranks' results, which are counted in the processes that hold them."""
        if self._count_refs is None:
            self._count_refs = [
                actor.count.remote(ref) for actor, ref in zip(self._actors, self.refs, strict=True)
            ]
        return self._count_refs

    def select_shares(self, items_by_rank: Sequence[Any]) -> list[Any]:
        """Return the items of the first rank of each share, given one item per rank; the other ranks have the same results."""
        return list(items_by_rank)[:: self._ranks_per_share]

    def get_row_counts(self) -> list[int]:
        """Return the row counts of the ranks' results, after `settle`. Raises errors like `get`."""
        try:
            return ray.get(self.request_row_counts(), timeout=_COUNT_PATIENCE_S)
        except GetTimeoutError:
            raise self.make_deadline_error(None) from None
        except (RayActorError, RayTaskError) as error:
            raise to_nonet_error(error, self.role, -1, self.method) from None

    def restart_late_ranks(self) -> list[int]:
        """Restart the processes of ranks that have not answered, so that their calls are repeated; the group must allow restarts.

        Returns:
            The restarted ranks.
        """
        late = self.find_pending_ranks()
        for rank in late:
            self._group.restart(rank)
        return late

    def replace_result(self, rank: int, other: GroupFuture) -> None:
        """Replace the result of a rank by that of another call."""
        self.refs[rank], self._count_refs = other.refs[rank], None  # The rows are counted again.

    def is_late_or_done(self) -> bool:
        """Return whether every rank has answered or the call's own deadline has passed."""
        return self._get_wait_s(None) <= 0 or self.done()

    def done(self) -> bool:
        """Return whether every rank has answered; does not wait."""
        ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        return len(ready) == len(self.refs)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._gather().__await__()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (rank, value) in the order of completion."""
        ranks = {ref: rank for rank, ref in enumerate(self.refs)}
        pending = list(self.refs)
        while pending:
            wait_s = self._get_wait_s(None)
            with _record_wait(self, wait_s):
                ready, pending = ray.wait(pending, num_returns=1, timeout=wait_s)
            if not ready:
                raise self.make_deadline_error(None)
            rank = ranks[ready[0]]
            try:
                yield rank, ray.get(ready[0])
            except (RayActorError, RayTaskError) as error:
                raise to_nonet_error(error, self.role, rank, self.method) from None

    async def _gather(self) -> Any:
        """Wait for all ranks in an event loop and return the collected value."""
        while True:
            try:
                values = await asyncio.wait_for(asyncio.gather(*self.refs), self._get_wait_s(None))
                return self._collect_values(values)
            except TimeoutError:
                raise self.make_deadline_error(None) from None
            except (RayActorError, RayTaskError) as error:
                await asyncio.to_thread(self._retry_lost_rank, error)

    def _get_wait_s(self, timeout_s: float | None) -> float:
        """Return the seconds to wait: the given time-out, else the rest of the call's own deadline, else a day."""
        if timeout_s is not None:
            return timeout_s
        if self._deadline is None:
            return DEFAULT_TIMEOUT_S
        return max(0.0, self._deadline - time.monotonic())

    def find_pending_ranks(self) -> list[int]:
        """Return the ranks that have not answered."""
        done_refs, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        return [rank for rank, ref in enumerate(self.refs) if ref not in done_refs]

    def make_deadline_error(self, timeout_s: float | None) -> DeadlineExceeded:
        """Make an error that names the ranks that have not answered, and says what they are doing if this is known."""
        late = self.find_pending_ranks()
        why = self._group.explain_late_ranks(late) if late and self._message is not None else ""
        limits_s = (timeout_s, self._timeout_s, DEFAULT_TIMEOUT_S)
        waited_s = next(limit_s for limit_s in limits_s if limit_s is not None)
        ranks = ", ".join(map(str, late))
        return DeadlineExceeded(
            f"{self.role}.{self.method}: no answer within {waited_s:g} s from rank {ranks} of {len(self.refs)}"
            f"{suggest_longer_deadline(waited_s)}{why}"
        )

    def _collect_values(self, values: list[Any]) -> Any:
        """Combine the values of the ranks according to `collect`."""
        if self.collect == "first":
            return values[0]
        if self.collect == "list":
            return values
        values = self.select_shares(values)
        if self.collect == "concat":
            return concat_rows(values)
        total = sum(values[1:], start=values[0])
        return total / len(values) if self.collect == "mean" else total

    def _retry_lost_rank(self, error: Exception) -> None:
        """Repeat the call of a lost rank, or raise the error as a NonetError.

        A call that a restarted rank rejected did not run and is always repeated. A call that may have run is repeated
        at most `retries` times. If the lost worker belongs to another group, which this rank called or whose results
        are arguments of the call, the error is raised, since the same arguments would fail again.
        """
        rank, error = self._find_failure(error)
        worker_error = to_nonet_error(error, self.role, rank, self.method)
        if isinstance(worker_error, DeadlineExceeded) and self._message is not None:
            raise DeadlineExceeded(
                f"{worker_error}{self._group.explain_late_ranks(self.find_pending_ranks())}"
            ) from None
        if rank < 0 or self._message is None or not isinstance(worker_error, WorkerLost):
            raise worker_error from None
        if (worker_error.role, worker_error.rank) != (self.role, rank):  # A worker of another group is lost.
            raise worker_error from None
        self._group.hurt[rank] = str(worker_error)
        may_have_run = not isinstance(worker_error, NotAdmitted)
        if may_have_run and self._retries < 1:
            raise worker_error from None
        self._retries -= may_have_run
        self._group.revive(rank, str(worker_error))
        self.refs[rank] = self._group.send(self._message, rank)

    def _find_failure(self, error: Exception) -> tuple[int, Exception]:
        """Return the first rank whose result is an error, and that error; (-1, error) if no rank has one."""
        for rank, ref in enumerate(self.refs):
            try:
                ready, _ = ray.wait([ref], timeout=0)
                if ready:
                    ray.get(ref, timeout=0)
            except (RayActorError, RayTaskError) as failure:
                return rank, failure
            except GetTimeoutError:
                continue
        return -1, error


@dataclass(frozen=True, slots=True)
class PendingWait:
    """A thread of this process that waits for the results of a call.

    Attributes:
        future: The results.
        began_s: When the wait began, in monotonic seconds.
        limit_s: Seconds after which it fails.
    """

    future: GroupFuture
    began_s: float
    limit_s: float

    def describe(self) -> str:
        """Return a clause such as "trainer.update: rank 1 of 2 has not answered for 12 s; its deadline ends in 288 s"."""
        elapsed_s = time.monotonic() - self.began_s
        ranks = self.future.find_pending_ranks()
        shown = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return (
            f"{self.future.role}.{self.future.method}: {shown} of {len(self.future.refs)} "
            f"{'have' if len(ranks) > 1 else 'has'} not answered for {elapsed_s:.0f} s; "
            f"the deadline ends in {max(0.0, self.limit_s - elapsed_s):.0f} s"
        )


def list_pending_waits() -> list[PendingWait]:
    """Return the waits of this process for results that have not arrived, the longest first."""
    waits = [_pending_waits[number] for number in sorted(_pending_waits.copy()) if number in _pending_waits]
    return [wait for wait in waits if wait.future.find_pending_ranks()]


@contextmanager
def _record_wait(future: GroupFuture, limit_s: float) -> Iterator[None]:
    """Record that this thread waits for a future, while the context is open."""
    number = next(_wait_numbers)
    _pending_waits[number] = PendingWait(future, time.monotonic(), limit_s)
    try:
        yield
    finally:
        del _pending_waits[number]


def to_nonet_error(error: Exception, role: str, rank: int, method: str) -> NonetError:
    """Convert a Ray error into a NonetError that names the worker, the call and the cause.

    Args:
        error: The error of Ray. If a worker raised a NonetError, that one is returned as it is.
        role: Role that was called.
        rank: Rank whose result is the error, -1 if it is not known.
        method: Method that was called.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, NonetError):
        return cause
    who = f"{role}-{rank}" if rank >= 0 else f"a worker of {role!r}"
    message = " ".join(str(cause or error).split())
    if isinstance(cause, RayActorError) or isinstance(error, RayActorError):
        return WorkerLost(f"{who} died during {method}: {message}", role=role, rank=rank)
    return WorkerFailed(f"{who}: {method}: {message}", role=role, rank=rank, traceback=str(error))


def concat_futures(futures: Sequence[GroupFuture]) -> GroupFuture:
    """Concatenate the results of several calls, each collected by 'concat', into one future."""
    first = futures[0]
    refs = [ref for future in futures for ref in future.select_shares(future.refs)]
    actors = [actor for future in futures for actor in future.select_shares(future._actors)]
    return GroupFuture(refs, first._group, first.role, first.method, first.collect, actors=actors)


def get_all(timeout_s: float, *futures: GroupFuture) -> list[Any]:
    """Wait for several calls at once and return the value of each.

    Raises errors like `get`, for the first call that failed or is late.
    """
    refs = [ref for future in futures for ref in future.refs]
    try:
        if refs:
            with _record_wait(futures[0], timeout_s):
                ray.get(refs, timeout=timeout_s)
    except GetTimeoutError:
        for future in futures:
            if not future.done():
                raise future.make_deadline_error(timeout_s) from None
    except (RayActorError, RayTaskError):
        pass  # `get` below repeats the failed call or raises its error.
    return [future.get(timeout_s) for future in futures]


def wait_for_results(timeout_s: float, *futures: GroupFuture) -> bool:
    """Wait for several calls, without fetching results.

    Returns:
        Whether every rank of all calls had a result or an error within `timeout_s`.
    """
    count_refs = [ref for future in futures for ref in future.request_row_counts()]
    if not count_refs:
        return True
    _, late = ray.wait(count_refs, num_returns=len(count_refs), timeout=timeout_s, fetch_local=False)
    return not late


class GroupStream:
    """The values that the ranks yield in a call, available while the ranks still work.

    Args:
        streams: The generator of references to values, for each rank.
        role: Role that was called.
        method: Method that was called.
        timeout_s: Seconds from submission to the last value; a day by default.
    """

    def __init__(self, streams: list[Any], role: str, method: str, timeout_s: float | None):
        self.role, self.method = role, method
        self._rank_by_stream = {stream: rank for rank, stream in enumerate(streams)}
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + self._timeout_s

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (rank, value) in the order of arrival, holding one value at a time."""
        pending = list(self._rank_by_stream)
        while pending:
            left_s = max(0.0, self._deadline - time.monotonic())
            ready, _ = ray.wait(pending, num_returns=1, timeout=left_s)
            if not ready:
                late = ", ".join(str(self._rank_by_stream[stream]) for stream in pending)
                raise DeadlineExceeded(
                    f"{self.role}.{self.method}: the stream of rank {late} did not end within {self._timeout_s:g} s"
                    f"{suggest_longer_deadline(self._timeout_s)}"
                )
            stream = ready[0]
            try:
                yield self._rank_by_stream[stream], ray.get(next(stream))  # pyright: ignore[reportArgumentType]
            except StopIteration:
                pending.remove(stream)
            except (RayActorError, RayTaskError) as error:
                raise to_nonet_error(error, self.role, self._rank_by_stream[stream], self.method) from None

    def get(self) -> list[list[Any]]:
        """Return all values, one list for each rank in the order in which they were yielded."""
        values: list[list[Any]] = [[] for _ in self._rank_by_stream]
        for rank, value in self:
            values[rank].append(value)
        return values
