"""A pipeline of five overlapping stages: read, route, fetch, compute and update.

The results equal those of sequential execution bit for bit. One thread reads and routes, one thread communicates
(it fetches and updates in a fixed order, the same on all ranks), and the caller's thread computes. With one trainer,
`depth` batches are in flight, and the trainer keeps the rows that they share (`in_flight`), so that sparse and dense
computation overlap. With several trainers a batch is fetched after the update of the previous batch, so only reading
and routing overlap.
"""

# Shapes: N requested keys, D width.

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nonet.deadlines import suggest_longer_deadline
from nonet.embedding.exchange import get_codec
from nonet.embedding.training.in_flight import (
    FetchPlan,
    FetchPlanner,
    InFlightRows,
    can_carry_rows,
    sum_gradients,
)
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import ConfigError, DeadlineExceeded

Read = Callable[[int], Any]  # (batch number) -> batch
Keys = Callable[[Any], Mapping[str, Tensor]]  # (batch) -> keys [N] by table
# (batch number, batch, rows [N, D] by table) -> (gradients [N, D] by table, result for the list that run() returns).
# The gradients are None, on all ranks alike, if the step is skipped; rows do not change then.
Compute = Callable[[int, Any, Mapping[str, Tensor]], tuple[Mapping[str, Tensor] | None, Any]]
_POLL_S = 0.05  # The interval at which a waiting thread checks whether the pipeline has stopped.
_END_PATIENCE_S = 5.0  # Time for the last exchange to end after an error; a longer one is waiting for a rank that has failed.


@dataclass(slots=True)
class InFlightBatch:
    """A batch that has been read and whose update has not ended.

    Attributes:
        number: The number of the batch.
        data: The batch as `Read` returned it.
        keys: Keys [N] by table.
        plans: Fetch plans by table, if rows are kept between batches.
        rows: Rows [N, D] by table, if rows are not kept between batches.
        read_at: Time at which the batch was read (`time.perf_counter`).
    """

    number: int
    data: Any
    keys: Mapping[str, Tensor]
    plans: dict[str, FetchPlan] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    read_at: float = 0.0


class PrefetchPipeline:
    """Runs batches over sharded tables, with several batches in flight.

    Args:
        world: The sharded tables.
        read: Reads a batch.
        keys: Returns the keys of a batch.
        compute: Computes the gradients and the result of a batch.
        depth: Maximum number of batches in flight; 1 runs them one after the other.
        step: Returns the training step of a batch number; by default the number plus 1.
        lr: Returns the learning rate of a batch and table; None uses the table's own rate.
        timeout_s: Maximum time that a stage waits for another one.
        learns: Whether rows are trained; without training the depth is 1.

    Attributes:
        depth: Maximum number of batches in flight.
        carries: Whether rows are kept between the batches in flight instead of being fetched again.
        sparse_s: Seconds that the computing thread has spent on rows; callers may reset it to 0.
        waited_s: Seconds that the computing thread waited for the last batch.
    """

    def __init__(
        self,
        world: ShardedTables,
        read: Read,
        keys: Keys,
        compute: Compute,
        *,
        depth: int = 3,
        step: Callable[[int], int] = lambda number: number + 1,
        lr: Callable[[int, str], float | None] = lambda number, table: None,
        timeout_s: float = 600.0,
        learns: bool = True,
    ):
        if depth < 1:
            raise ConfigError(f"a pipeline wants depth >= 1, got {depth}; 1 does not overlap")
        self._world, self._read, self._keys, self._compute = world, read, keys, compute
        self.depth = depth if learns else 1
        self._learns = learns
        self._step, self._lr, self._timeout_s = step, lr, timeout_s
        self.carries = self.depth > 1 and can_carry_rows(world)
        self.sparse_s = 0.0
        self.waited_s = 0.0

    def run(self, start: int, stop: int) -> list[Any]:
        """Run the batches [start, stop) and return their results; no batch is in flight before or after the call.

        Raises:
            DeadlineExceeded: If a stage waits for longer than `timeout_s`.
        """
        if self.depth == 1:
            return [self._run_batch(number) for number in range(start, stop)]
        return _PipelineRun(self, start, stop).run()

    def _run_batch(self, number: int) -> Any:
        """Run one batch without overlap: read, pull, compute and push."""
        began = time.perf_counter()
        batch = self._read_batch(number)
        self.waited_s = batch.read_at - began
        rows = {
            table: self._world.pull(table, keys, train=self._learns) for table, keys in batch.keys.items()
        }
        self.sparse_s += time.perf_counter() - batch.read_at
        grads, result = self._compute(number, batch.data, rows)
        if grads is None:
            return result
        began = time.perf_counter()
        for table, keys in batch.keys.items():
            self._world.push(table, keys, grads[table], self._step(number), self._lr(number, table))
        self.sparse_s += time.perf_counter() - began
        return result

    def _read_batch(self, number: int) -> InFlightBatch:
        """Read a batch and its keys."""
        data = self._read(number)
        return InFlightBatch(number, data, self._keys(data), read_at=time.perf_counter())


class _PipelineRun:
    """The threads and queues of one call of `PrefetchPipeline.run`."""

    def __init__(self, pipeline: PrefetchPipeline, start: int, stop: int):
        self._pipeline, self._world = pipeline, pipeline._world
        self._numbers = range(start, stop)
        # The number of batches that are fetched before the first update.
        self._ahead = pipeline.depth if pipeline.carries else 1
        world = self._world
        self._windows = {  # The kept rows by table, if rows are kept between batches.
            name: InFlightRows(name, spec, world.codec if world.layout.world > 1 else get_codec("fp32"))
            for name, spec in world.specs.items()
            if pipeline.carries
        }
        # Batches pass from the reading to the communication thread, to the computing thread, and back with their gradients.
        self._routed: queue.Queue = queue.Queue(pipeline.depth)
        self._ready: queue.Queue = queue.Queue()
        self._updates: queue.Queue = queue.Queue()
        self._error: BaseException | None = None
        self._stopped = threading.Event()

    def run(self) -> list[Any]:
        """Start the threads, compute all batches in the caller's thread, and return their results."""
        threads = [
            threading.Thread(
                target=self._run_guarded, args=(work,), name=f"sparse-{work.__name__}", daemon=True
            )
            for work in (self._route_batches, self._run_wire)
        ]
        for thread in threads:
            thread.start()
        _, wire_thread = threads
        try:
            results = [self._compute_batch(number) for number in self._numbers]
            for thread in threads:
                thread.join(self._pipeline._timeout_s)
        except _Stopped:
            results = []
        finally:
            self._stopped.set()
            wire_thread.join(_END_PATIENCE_S)  # Otherwise rows could change after run() has raised the error.
        if self._error is not None:
            raise self._error
        if any(thread.is_alive() for thread in threads):
            raise DeadlineExceeded(
                f"the last updates took longer than {self._pipeline._timeout_s:g} s"
                f"{suggest_longer_deadline(self._pipeline._timeout_s)}"
            )
        return results

    def _compute_batch(self, number: int) -> Any:
        """Wait for the rows of a batch, compute it, and queue its gradients."""
        began = time.perf_counter()
        flight: InFlightBatch = self._wait_for_next(self._ready, f"the rows of batch {number}")
        self._pipeline.waited_s = max(0.0, flight.read_at - began)
        rows = flight.rows or {
            table: self._windows[table].read_rows(plan.route) for table, plan in flight.plans.items()
        }
        self._pipeline.sparse_s += time.perf_counter() - max(began, flight.read_at)
        grads, result = self._pipeline._compute(number, flight.data, rows)
        began = time.perf_counter()
        if flight.plans and grads is not None:
            self._updates.put((flight, self._apply_carried(flight, grads)))
        else:
            self._updates.put((flight, grads))
        self._pipeline.sparse_s += time.perf_counter() - began
        return result

    def _apply_carried(self, flight: InFlightBatch, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum the gradients [N, D] over equal keys, apply them to the kept rows, and return the sums by table."""
        step, lr = self._pipeline._step(flight.number), self._pipeline._lr
        summed = {table: sum_gradients(plan.route, grads[table]) for table, plan in flight.plans.items()}
        for table, plan in flight.plans.items():
            self._windows[table].apply(plan.route, summed[table], step, lr(flight.number, table))
        return summed

    def _route_batches(self) -> None:
        """Read all batches, plan which rows each one has to fetch, and queue them (the loop of the reading thread)."""
        planners = {name: FetchPlanner(self._pipeline.depth) for name in self._windows}
        for number in self._numbers:
            flight = self._pipeline._read_batch(number)
            for table, keys in flight.keys.items() if planners else ():
                flight.plans[table] = planners[table].plan(self._world.make_route(keys))
            self._put(self._routed, flight)

    def _run_wire(self) -> None:
        """Fetch the rows and push the gradients of all batches in the order of `_schedule` (the communication thread)."""
        for is_fetch, number in _schedule(self._numbers, self._ahead):
            if is_fetch:
                self._fetch(self._wait_for_next(self._routed, f"the keys of batch {number}"))
            else:
                self._update(number)

    def _fetch(self, flight: InFlightBatch) -> None:
        """Fetch the rows of a batch from their owners and queue the batch for the computing thread."""
        for table, plan in flight.plans.items():
            self._windows[table].enter(plan, self._world.take(table, plan.fetch))
        if not flight.plans:
            flight.rows = {table: self._world.pull(table, keys) for table, keys in flight.keys.items()}
        self._ready.put(flight)

    def _update(self, number: int) -> None:
        """Push the gradients of one batch to the tables."""
        flight, grads = self._wait_for_next(self._updates, f"the gradients of batch {number}")
        if grads is None:
            return
        step, lr = self._pipeline._step(number), self._pipeline._lr
        for table, keys in flight.keys.items():
            if plan := flight.plans.get(table):
                self._world.push_summed(table, plan.route, grads[table], step, lr(number, table))
            else:
                self._world.push(table, keys, grads[table], step, lr(number, table))

    def _run_guarded(self, work: Callable[[], None]) -> None:
        """Run the loop of a thread, and stop the pipeline if it raises."""
        try:
            work()
        except _Stopped:
            return
        except BaseException as error:  # Raised again by run().
            self._error = self._error or error
            self._stopped.set()

    def _wait_for_next(self, source: queue.Queue, item_text: str) -> Any:
        """Wait for the next item of a queue and return it; `item_text` names it in error messages.

        Raises:
            _Stopped: If another thread has failed.
            DeadlineExceeded: If the timeout has passed.
        """
        left_s = self._pipeline._timeout_s
        while not self._stopped.is_set():
            try:
                return source.get(timeout=_POLL_S)
            except queue.Empty:
                left_s -= _POLL_S
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"{item_text} did not come within {self._pipeline._timeout_s:g} s"
                    f"{suggest_longer_deadline(self._pipeline._timeout_s)}"
                )
        raise _Stopped(f"the pipeline stopped while waiting for {item_text}")

    def _put(self, target: queue.Queue, flight: InFlightBatch) -> None:
        """Put a batch into a queue as soon as it has space, or drop the batch if the pipeline has stopped."""
        while not self._stopped.is_set():
            try:
                return target.put(flight, timeout=_POLL_S)
            except queue.Full:
                continue
        return None


class _Stopped(Exception):
    """Raised in a stage when another stage has failed, whose error run() raises."""


def _schedule(numbers: range, ahead: int) -> Iterator[tuple[bool, int]]:
    """Yield (True to fetch or False to update, batch number) in order; batch b is fetched after the update of b - ahead."""
    yield from ((True, number) for number in numbers[:ahead])
    for number in numbers:
        yield False, number
        if number + ahead in numbers:
            yield True, number + ahead
