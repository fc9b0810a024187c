"""Dynamic batching: merges the requests ("questions") of all callers into batches, within their deadlines.

One thread computes. When it is free, it takes waiting questions into the next batch, the nearest deadline first, until the cost
reaches `most_cost` or the batch would take too long for the nearest deadline. The duration of a batch is estimated as
a + b * cost, fitted to earlier batches. So an idle engine adds no delay, and a busy one forms larger batches. Questions whose
deadline has passed get `TooLate` and are not computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from nonet.errors import ConfigError, DeadlineExceeded, NonetError

Q = TypeVar("Q")
A = TypeVar("A")

_log = logging.getLogger(__name__)
_WEIGHT_DECAY = 0.95  # Factor of the weights of earlier batches in the fit, for each new batch.
_MAX_TIME_SHARE = (
    0.8  # Maximum estimated duration of a batch, relative to the time until its nearest deadline.
)


class TooLate(DeadlineExceeded):
    """The deadline of a question passed before it was computed."""


class Closed(ConfigError):
    """The queue is closed and accepts no more questions."""


class QueueDied(NonetError):
    """The thread of the queue ended with an error."""


@dataclass(slots=True)
class QueueStats:
    """Statistics of a queue.

    Attributes:
        batches: Number of computed batches.
        questions: Number of answered questions.
        cost: Sum of their costs.
        seconds: Seconds that the batches took.
        newest: Number of questions in the newest batch.
        late: Number of questions whose deadline had passed.
    """

    batches: int = 0
    questions: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    newest: int = 0
    late: int = 0


@dataclass(slots=True)
class _PendingQuestion(Generic[Q, A]):
    """A question in the queue, with its cost, its deadline and the future of its answer."""

    question: Q
    cost: float
    deadline: float  # in seconds of the monotonic clock
    future: Future[A] = field(default_factory=Future)


class TensorBatch(Generic[Q, A]):
    """A queue that merges questions into batches and computes them on a thread of its own.

    Args:
        answer: Maps a list of questions to a list of as many answers.
        cost: Returns the cost of a question.
        most_cost: Maximum cost per batch; a single question may cost more.
        most: Maximum number of questions per batch; 1 answers them one at a time.
        turn: Lock that is held while a batch is computed, so that several engines on the same cores take turns.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Sequence[A]],
        cost: Callable[[Q], float],
        *,
        most_cost: float = 4096.0,
        most: int = 256,
        turn: Any = None,
    ):
        self._answer, self._cost, self._most_cost, self._most = answer, cost, most_cost, most
        self._compute_lock = turn or threading.Lock()
        self._duration = _DurationEstimate()
        self._pending: list[_PendingQuestion[Q, A]] = []
        self._condition, self._closed = threading.Condition(), False
        self._fatal_error: BaseException | None = None
        self._in_progress: list[_PendingQuestion[Q, A]] = []
        self.measures = QueueStats()
        self._thread = threading.Thread(target=self._run_thread, name="tensor-batch", daemon=True)
        self._thread.start()

    def submit(self, question: Q, within_s: float) -> Future[A]:
        """Return a future of the answer; it fails with TooLate or with the exception that `answer` raised.

        Raises:
            Closed: The queue is closed.
            QueueDied: The thread of the queue has ended.
        """
        pending = _PendingQuestion[Q, A](question, self._cost(question), time.monotonic() + within_s)
        with self._condition:
            if self._fatal_error is not None:
                raise _make_queue_died(self._fatal_error)
            if self._closed:
                raise Closed("this queue is closed: its version was replaced")
            self._pending.append(pending)
            self._condition.notify()
        return pending.future

    def __len__(self) -> int:
        """Return the number of waiting questions."""
        return len(self._pending)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False after an error that ended it."""
        return self._thread.is_alive() and self._fatal_error is None

    def close(self) -> None:
        """Accept no more questions, and block until the waiting ones are answered."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run_thread(self) -> None:
        """Compute batches until the queue is closed; an error outside `answer` ends it, and all waiting questions fail."""
        try:
            self._compute_until_closed()
        except BaseException as error:
            with self._condition:
                self._fatal_error, unanswered, self._pending = error, [*self._in_progress, *self._pending], []
            for pending in unanswered:
                _fail(pending, _make_queue_died(error))
            _log.critical("the queue of a version has died", exc_info=error)

    def _compute_until_closed(self) -> None:
        """Compute batches of waiting questions until the queue is closed."""
        while True:
            with self._condition:
                while not self._pending and not self._closed:
                    self._condition.wait()
                if not self._pending:
                    return
            # The batch is chosen with the lock held, since more questions may arrive while another engine computes.
            with self._compute_lock:
                batch, late = self._take_next()
                self._in_progress = [*batch, *late]
                # Callers can cancel their futures until `_start` marks them as running; cancelled ones are left out.
                self._compute([pending for pending in batch if _start(pending)])
            for pending in late:
                if _start(pending):
                    _fail(pending, TooLate("the deadline passed before this question was computed"))
            self._in_progress = []

    def _take_next(self) -> tuple[list[_PendingQuestion[Q, A]], list[_PendingQuestion[Q, A]]]:
        """Remove questions from the queue: those to compute now, the nearest deadline first, and the expired ones."""
        now = time.monotonic()
        with self._condition:
            late = [pending for pending in self._pending if pending.deadline <= now]
            in_time = sorted(
                (pending for pending in self._pending if pending.deadline > now),
                key=lambda pending: pending.deadline,
            )
            batch: list[_PendingQuestion[Q, A]] = []
            batch_cost = 0.0
            for pending in in_time:
                nearest_deadline = batch[0].deadline if batch else pending.deadline
                max_cost = self._duration.compute_max_cost(_MAX_TIME_SHARE * (nearest_deadline - now))
                if batch and (
                    len(batch) == self._most or batch_cost + pending.cost > min(self._most_cost, max_cost)
                ):
                    break
                batch.append(pending)
                batch_cost += pending.cost
            self._pending = in_time[len(batch) :]
        self.measures.late += len(late)
        return batch, late

    def _compute(self, batch: list[_PendingQuestion[Q, A]]) -> None:
        """Compute a batch and set the answers; if it fails, compute each half as a batch of its own."""
        if not batch:
            return
        start, cost = time.perf_counter(), sum(pending.cost for pending in batch)
        try:
            answers = self._answer([pending.question for pending in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} questions got {len(answers)} answers")
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            half = len(batch) // 2  # repeated halving isolates the failing question
            self._compute(batch[:half])
            self._compute(batch[half:])
            return
        seconds = time.perf_counter() - start
        self._duration.add(cost, seconds)
        stats = self.measures
        stats.batches, stats.questions = stats.batches + 1, stats.questions + len(batch)
        stats.cost, stats.seconds, stats.newest = stats.cost + cost, stats.seconds + seconds, len(batch)
        for pending, answer in zip(batch, answers, strict=True):
            pending.future.set_result(answer)


class _DurationEstimate:
    """Model of a batch's seconds as a + b * cost: least squares over the batches so far, older ones with less weight."""

    def __init__(self):
        self._sums = [0.0] * 5  # weighted sums of 1, cost, seconds, cost^2, cost * seconds

    def add(self, cost: float, seconds: float) -> None:
        """Add the cost and the duration of a batch, and reduce the weight of earlier ones."""
        terms = (1.0, cost, seconds, cost * cost, cost * seconds)
        self._sums = [_WEIGHT_DECAY * old + new for old, new in zip(self._sums, terms, strict=True)]

    def compute_max_cost(self, seconds: float) -> float:
        """Return the cost that can be computed in `seconds`; infinite if there are too few different batches for a fit."""
        weight, cost, duration, cost_squared, cost_duration = self._sums
        determinant = weight * cost_squared - cost * cost
        if weight < 3 or determinant <= 1e-9 * max(1.0, cost_squared):
            return float("inf")
        slope = (weight * cost_duration - cost * duration) / determinant
        intercept = (duration - slope * cost) / weight
        return float("inf") if slope <= 0 else (seconds - intercept) / slope


def _start(pending: _PendingQuestion[Any, Any]) -> bool:
    """Mark a question as running, and return whether its caller still waits for the answer."""
    return pending.future.set_running_or_notify_cancel()


def _fail(pending: _PendingQuestion[Any, Any], error: Exception) -> None:
    """Set an error on a question's future, unless it is done or cancelled."""
    with suppress(InvalidStateError):
        pending.future.set_exception(error)


def _make_queue_died(error: BaseException) -> QueueDied:
    """Create the error of questions whose queue ended with `error`."""
    return QueueDied(f"the queue of this version has died: {type(error).__name__}: {error}")
