"""Merging: by cost and deadline, each question answered once, errors to those that caused them."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future

import pytest

from nonet.models.inference.tensor_batch import Closed, QueueDied, TensorBatch, TooLate


class Held:
    """An engine that computes when it is let."""

    def __init__(self):
        self.go, self.batches = threading.Event(), []

    def __call__(self, questions):
        self.go.wait(5)
        self.batches.append(list(questions))
        if "bad" in questions:
            raise ValueError("bad")
        return [question * 2 for question in questions]


@pytest.fixture
def held():
    return Held()


def waiting_for(queue, count):
    while len(queue) != count:
        time.sleep(0.001)


def blocked(held, **options):
    """Make a queue whose first batch, of one question, is being computed."""
    queue = TensorBatch(held, lambda question: 1.0, **options)
    first = queue.submit("first", 5)
    waiting_for(queue, 0)
    return queue, first


def test_what_waits_is_one_batch_and_everybody_gets_their_own_answer(held):
    queue, first = blocked(held)
    others = [queue.submit(str(number), 5) for number in range(20)]
    held.go.set()
    assert [future.result(5) for future in (first, *others)] == [
        "firstfirst",
        *(str(n) * 2 for n in range(20)),
    ]
    assert [len(batch) for batch in held.batches] == [1, 20]
    assert (queue.measures.questions, queue.measures.batches, queue.measures.newest) == (21, 2, 20)
    queue.close()


def test_batches_are_bounded_by_cost_and_by_number(held):
    queue = TensorBatch(held, lambda question: float(question), most_cost=10, most=3)
    first = queue.submit(1, 5)
    waiting_for(queue, 0)
    futures = [queue.submit(cost, 5) for cost in (6, 3, 4, 99, 1, 1, 1, 1)]
    held.go.set()
    for future in (first, *futures):
        future.result(5)
    assert held.batches == [[1], [6, 3], [4], [99], [1, 1, 1], [1]]
    queue.close()


def test_the_nearest_deadline_goes_first(held):
    queue, first = blocked(held, most=1)
    futures = [queue.submit(name, within) for name, within in (("late", 5), ("soon", 2), ("middle", 3))]
    held.go.set()
    for future in (first, *futures):
        future.result(5)
    assert held.batches == [["first"], ["soon"], ["middle"], ["late"]]
    queue.close()


def test_a_question_that_is_too_late_is_not_computed(held):
    queue, first = blocked(held)
    late = queue.submit("late", 0.01)
    good = queue.submit("good", 5)
    time.sleep(0.05)
    held.go.set()
    assert good.result(5) == "goodgood"
    with pytest.raises(TooLate):
        late.result(5)
    assert first.result(5) == "firstfirst"
    assert "late" not in [question for batch in held.batches for question in batch]
    assert queue.measures.late == 1
    queue.close()


def test_a_bad_question_spoils_no_other(held):
    queue, first = blocked(held)
    good, bad = queue.submit("good", 5), queue.submit("bad", 5)
    held.go.set()
    assert good.result(5) == "goodgood"
    with pytest.raises(ValueError, match="bad"):
        bad.result(5)
    assert first.result(5) == "firstfirst"
    queue.close()


def test_a_closed_queue_answers_what_waits_and_takes_no_more(held):
    queue, first = blocked(held)
    second = queue.submit("second", 5)
    held.go.set()
    queue.close()
    assert second.result(0) == "secondsecond"
    assert first.done()
    with pytest.raises(Closed):
        queue.submit("third", 5)


def test_a_batch_is_cut_to_what_the_most_urgent_can_afford():
    slept = []

    def answer(questions):
        slept.append(len(questions))
        time.sleep(0.002 * len(questions))
        return questions

    queue = TensorBatch(answer, lambda question: 1.0)
    for count in (1, 4, 8, 2, 6):  # learns what a question costs
        for future in [queue.submit(number, 5) for number in range(count)]:
            future.result(5)
    slept.clear()
    gate = queue.submit(-1, 5)
    futures = [queue.submit(number, 0.15) for number in range(200)]
    answered = 0
    for future in futures:
        try:
            future.result(5)
            answered += 1
        except TooLate:
            pass
    gate.result(5)
    assert max(slept) < 200  # 200 at once take 0.4 s, and nobody would be in time
    assert answered > 0
    queue.close()


def test_callers_who_give_up_at_any_moment_never_end_the_queue():
    """A cancellation between a look at a future and its result used to end the thread for good."""

    class Awkward(Future):
        """A future whose caller gives up right after the queue has looked whether it did."""

        def cancelled(self):
            gone = super().cancelled()
            self.cancel()
            return gone

    queue = TensorBatch(lambda questions: [0] * len(questions), lambda question: 1.0)
    for _ in range(50):
        futures = [queue.submit(0, 5) for _ in range(16)]
        for future in futures:
            future.cancel()
    for waits in (5, -1):  # in time, and too late
        awkward = TensorBatch(lambda questions: [0] * len(questions), lambda question: 1.0)
        with awkward._condition:  # nothing is taken before the future is in its place
            future = awkward.submit(0, waits)
            awkward._pending[-1].future = future = Awkward()
        with contextlib.suppress(TooLate):
            assert future.result(5) == 0
        assert awkward.submit(1, 5).result(5) == 0
        assert awkward.alive
        awkward.close()
    assert queue.submit(1, 5).result(5) == 0
    assert queue.alive
    queue.close()


def test_one_bad_question_of_many_costs_few_batches_and_fails_alone():
    batches = []
    gate = threading.Event()

    def answer(questions):
        gate.wait(5)
        batches.append(len(questions))
        if -7 in questions:
            raise ValueError("bad")
        return questions

    queue = TensorBatch(answer, lambda question: 1.0)
    first = queue.submit(0, 5)
    time.sleep(0.05)
    futures = [queue.submit(-7 if number == 40 else number, 5) for number in range(64)]
    gate.set()
    failed = [number for number, future in enumerate(futures) if future.exception(5) is not None]
    assert failed == [40]
    assert first.result(5) == 0
    assert len(batches) <= 1 + 2 * 6 + 1  # halves of halves, not one after the other
    queue.close()


def test_an_answer_too_few_is_an_error_of_these_questions_alone():
    queue = TensorBatch(lambda questions: [], lambda question: 1.0)
    with pytest.raises(RuntimeError, match="1 questions got 0 answers"):
        queue.submit(0, 5).result(5)
    assert queue.alive
    queue.close()


def test_a_queue_whose_thread_ends_says_so_to_everybody():
    gate = threading.Event()

    def answer(questions):
        gate.wait(5)
        raise SystemExit("the process is told to end")

    queue = TensorBatch(answer, lambda question: 1.0, most=1)
    futures = [queue.submit(number, 5) for number in range(3)]
    gate.set()
    for future in futures:
        with pytest.raises(QueueDied, match="has died: SystemExit"):
            future.result(5)
    assert not queue.alive
    with pytest.raises(QueueDied):
        queue.submit(1, 5)
