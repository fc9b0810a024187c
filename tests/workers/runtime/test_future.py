"""Every wait has a deadline, and the future knows which. No Ray: `ray.get` and `ray.wait` are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from nonet.deadlines import BARE, Deadline
from nonet.errors import DeadlineExceeded
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
        future.within(1.5).settle()
    assert waits == [1.5]
