"""Dynamic batching: questions of all callers are merged by their cost, within their deadlines.

One thread computes. When it is free, the waiting questions become the next batch, the nearest deadline first, up to `most_cost`
and to what the tightest deadline allows: the duration of a batch is modelled as a + b * cost, fitted to the batches so far. So
an idle engine adds no delay, and a busy one merges more. Expired questions get `TooLate` and are not computed.
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
_FORGET = 0.95  # what an older batch still weighs in the fit
_SPENT = 0.8  # of the time that the most urgent question has left, a batch may take


class TooLate(DeadlineExceeded):
    """The deadline of a question passed before it was computed."""


class Closed(ConfigError):
    """The queue is closed and accepts no more questions."""


class QueueDied(NonetError):
    """The thread of the queue ended with an error."""


@dataclass(slots=True)
class QueueStats:
    """Statistics of a queue: batches, questions, cost, seconds computed, size of the newest batch, and expired questions."""

    batches: int = 0
    questions: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    newest: int = 0
    late: int = 0


@dataclass(slots=True)
class _WaitingQuestion(Generic[Q, A]):
    question: Q
    cost: float
    until: float
    future: Future[A] = field(default_factory=Future)


class TensorBatch(Generic[Q, A]):
    """Merges questions into batches for `answer`, which maps a list of questions to a list of as many answers.

    `most` is the maximum number of questions per batch; 1 answers them one at a time. `turn` is a lock that is held while a batch
    is computed, so that several engines on the same cores take turns.
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
        self._turn = turn or threading.Lock()
        self._seconds = _DurationEstimate()
        self._waiting: list[_WaitingQuestion[Q, A]] = []
        self._change, self._closed = threading.Condition(), False
        self._died: BaseException | None = None
        self._under_way: list[_WaitingQuestion[Q, A]] = []
        self.measures = QueueStats()
        self._thread = threading.Thread(target=self._work, name="tensor-batch", daemon=True)
        self._thread.start()

    def submit(self, question: Q, within_s: float) -> Future[A]:
        """Return a future of the answer; it fails with TooLate or with what `answer` raised.

        Raises:
            Closed: The queue is closed.
            QueueDied: The thread of the queue has ended.
        """
        waiting = _WaitingQuestion[Q, A](question, self._cost(question), time.monotonic() + within_s)
        with self._change:
            if self._died is not None:
                raise _make_queue_died(self._died)
            if self._closed:
                raise Closed("this queue is closed: its version was replaced")
            self._waiting.append(waiting)
            self._change.notify()
        return waiting.future

    def __len__(self) -> int:
        """Return the number of waiting questions."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False after an error that ended it."""
        return self._thread.is_alive() and self._died is None

    def close(self) -> None:
        """Accept no more questions, and return when the waiting ones are answered."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    def _work(self) -> None:
        """Compute until closed; an error outside of a question's own ends the queue and is passed to all waiting callers."""
        try:
            self._compute_until_closed()
        except BaseException as error:
            with self._change:
                self._died, left, self._waiting = error, [*self._under_way, *self._waiting], []
            for waiting in left:
                _fail(waiting, _make_queue_died(error))
            _log.critical("the queue of a version has died", exc_info=error)

    def _compute_until_closed(self) -> None:
        """Compute batches of waiting questions until the batcher is closed."""
        while True:
            with self._change:
                while not self._waiting and not self._closed:
                    self._change.wait()
                if not self._waiting:
                    return
            with self._turn:  # others may come while the turn is another's
                batch, late = self._take_next()
                self._under_way = [*batch, *late]
                # A caller may give up at any moment; a future that runs can no longer be cancelled.
                self._compute([waiting for waiting in batch if _start(waiting)])
            for waiting in late:
                if _start(waiting):
                    _fail(waiting, TooLate("the deadline passed before this question was computed"))
            self._under_way = []

    def _take_next(self) -> tuple[list[_WaitingQuestion[Q, A]], list[_WaitingQuestion[Q, A]]]:
        """Take the questions to compute now, the most urgent first, and those that expired."""
        now = time.monotonic()
        with self._change:
            late = [waiting for waiting in self._waiting if waiting.until <= now]
            there = sorted(
                (waiting for waiting in self._waiting if waiting.until > now), key=lambda each: each.until
            )
            batch: list[_WaitingQuestion[Q, A]] = []
            total = 0.0
            for waiting in there:
                urgent = batch[0].until if batch else waiting.until
                affordable = self._seconds.invert(_SPENT * (urgent - now))
                if batch and (
                    len(batch) == self._most or total + waiting.cost > min(self._most_cost, affordable)
                ):
                    break
                batch.append(waiting)
                total += waiting.cost
            self._waiting = there[len(batch) :]
        self.measures.late += len(late)
        return batch, late

    def _compute(self, batch: list[_WaitingQuestion[Q, A]]) -> None:
        """Compute a batch; if it fails, compute both halves, so that only the failing question fails."""
        if not batch:
            return
        began, cost = time.perf_counter(), sum(waiting.cost for waiting in batch)
        try:
            answers = self._answer([waiting.question for waiting in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} questions got {len(answers)} answers")
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            half = len(batch) // 2  # the question that fails is found in few batches, and fails alone
            self._compute(batch[:half])
            self._compute(batch[half:])
            return
        seconds = time.perf_counter() - began
        self._seconds.add(cost, seconds)
        now = self.measures
        now.batches, now.questions = now.batches + 1, now.questions + len(batch)
        now.cost, now.seconds, now.newest = now.cost + cost, now.seconds + seconds, len(batch)
        for waiting, answer in zip(batch, answers, strict=True):
            waiting.future.set_result(answer)


class _DurationEstimate:
    """Model of a batch's seconds as a + b * cost: least squares over the batches so far, with decaying weights."""

    def __init__(self):
        self._sums = [0.0] * 5  # of 1, cost, seconds, cost^2, cost * seconds

    def add(self, cost: float, seconds: float) -> None:
        each = (1.0, cost, seconds, cost * cost, cost * seconds)
        self._sums = [_FORGET * old + new for old, new in zip(self._sums, each, strict=True)]

    def invert(self, seconds: float) -> float:
        """Return the cost that can be computed in `seconds`; infinite while there is too little data."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if n < 3 or spread <= 1e-9 * max(1.0, xx):
            return float("inf")
        b = (n * xy - x * y) / spread
        a = (y - b * x) / n
        return float("inf") if b <= 0 else (seconds - a) / b


def _start(waiting: _WaitingQuestion[Any, Any]) -> bool:
    """Mark a question as running, and return whether its caller still waits for the answer."""
    return waiting.future.set_running_or_notify_cancel()


def _fail(waiting: _WaitingQuestion[Any, Any], error: Exception) -> None:
    """Set an error on a question's future, unless it is done or cancelled."""
    with suppress(InvalidStateError):
        waiting.future.set_exception(error)


def _make_queue_died(error: BaseException) -> QueueDied:
    return QueueDied(f"the queue of this version has died: {type(error).__name__}: {error}")
