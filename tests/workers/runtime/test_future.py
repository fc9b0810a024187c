"""Every wait has a deadline, and the future knows which. No Ray: `ray.get` and `ray.wait` are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from nonet.deadlines import BARE, Deadline
from nonet.errors import DeadlineExceeded, NotAdmitted, WorkerLost
from nonet.workers.runtime import future as futures
from nonet.workers.runtime.future import GroupFuture


@pytest.fixture
def waits(monkeypatch):
    """Seconds of every wait; none is ever over before its time."""
    seen = []

    def get(refs, timeout=None):
        seen.append(timeout)
        raise GetTimeoutError("late")

    def wait(refs, num_returns=1, timeout=None, fetch_local=True):
        if timeout:
            seen.append(timeout)
        return [], list(refs)

    monkeypatch.setattr(futures.ray, "get", get)
    monkeypatch.setattr(futures.ray, "wait", wait)
    return seen


def pending(timeout_s=None):
    hosts = SimpleNamespace(actors=[None, None])
    return GroupFuture(["a", "b"], hosts, "rollout", "generate", "concat", timeout_s)  # type: ignore[arg-type]


def test_a_bare_get_waits_a_day_and_says_how_to_give_it_another_deadline(waits):
    with pytest.raises(
        DeadlineExceeded,
        match=r"rollout\.generate: no answer within 86400 s .* timeout_s of the call or of get",
    ):
        pending().get()
    with pytest.raises(DeadlineExceeded):
        pending().settle()
    with pytest.raises(DeadlineExceeded):
        list(pending())
    assert waits == [BARE] * 3


def test_the_calls_own_deadline_counts_from_submission_and_that_of_get_from_get(waits):
    with pytest.raises(DeadlineExceeded, match="within 9 s from rank 0, 1 of 2"):
        pending(9.0).get()
    assert 8.0 < waits.pop() <= 9.0
    with pytest.raises(DeadlineExceeded, match=r"within 5 s .* raise deadlines\.step"):
        pending(9.0).get(Deadline(5.0, "deadlines.step"))
    assert waits.pop() == 5.0


def test_a_deadline_given_later_counts_from_then(waits, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(futures.time, "monotonic", lambda: clock.now)
    future = pending(2.0)
    clock.now += 50.0  # whatever it waited for has taken long
    with pytest.raises(DeadlineExceeded, match=r"within 1\.5 s"):
        future.set_deadline(1.5).settle()
    assert waits == [1.5]


class Workers:
    """Ranks that answer what a script says, one word a call: an answer, "lost", "refused", or an error of another group."""

    def __init__(self, monkeypatch, *scripts):
        self.actors, self.hurt = [None] * len(scripts), {}
        self.calls, self._scripts, self._answers = [0] * len(scripts), scripts, {}
        monkeypatch.setattr(futures.ray, "get", self._get)
        monkeypatch.setattr(futures.ray, "wait", lambda refs, **_: (list(refs), []))

    def send(self, message, rank):
        word = self._scripts[rank][self.calls[rank]]
        self.calls[rank] += 1
        ref = f"{rank}.{self.calls[rank]}"
        self._answers[ref] = word, rank
        return ref

    def revive(self, rank, cause):
        pass

    def _get(self, refs, timeout=None):
        if isinstance(refs, str):
            return self._answer(refs)
        return [self._answer(ref) for ref in refs]

    def _answer(self, ref):
        word, rank = self._answers[ref]
        causes = {
            "lost": WorkerLost("it died", role="rollout", rank=rank),
            "refused": NotAdmitted("it did not run", role="rollout", rank=rank),
            "another refused": NotAdmitted("it did not run", role="trainer", rank=rank),
            "another rank refused": NotAdmitted("it did not run", role="rollout", rank=rank + 1),
        }
        if word in causes:
            raise RayTaskError("generate", "", causes[word])
        return word

    def ask(self, retries=0):
        message = object()
        refs = [self.send(message, rank) for rank in range(len(self.actors))]
        return GroupFuture(refs, self, "rollout", "generate", "list", None, retries, message)  # type: ignore[arg-type]


def test_a_rank_that_died_is_called_once_before_and_once_after(monkeypatch):
    workers = Workers(monkeypatch, ["a"], ["lost", "b"], ["c"])
    assert workers.ask(retries=1).get() == ["a", "b", "c"]
    assert workers.calls == [1, 2, 1]


def test_a_call_that_may_have_run_is_repeated_no_more_than_it_may(monkeypatch):
    workers = Workers(monkeypatch, ["a"], ["lost", "b"])
    with pytest.raises(WorkerLost, match="it died"):
        workers.ask().get()
    assert workers.calls == [1, 1]
    workers = Workers(monkeypatch, ["a"], ["lost", "lost", "b"])
    with pytest.raises(WorkerLost):
        workers.ask(retries=1).get()
    assert workers.calls == [1, 2]


def test_a_refused_call_runs_exactly_once_and_costs_no_retry(monkeypatch):
    workers = Workers(monkeypatch, ["a"], ["refused", "b"])
    assert workers.ask().get() == ["a", "b"]
    assert workers.calls == [1, 2], "the first did not run"


@pytest.mark.parametrize("word", ["another refused", "another rank refused"])
def test_an_error_of_another_group_repeats_nothing(monkeypatch, word):
    """The method ran, and met somebody who refused: it may have changed things, and it would for ever."""
    workers = Workers(monkeypatch, ["a"], [word, "b"])
    with pytest.raises(NotAdmitted):
        workers.ask(retries=1).get()
    assert workers.calls == [1, 1]
