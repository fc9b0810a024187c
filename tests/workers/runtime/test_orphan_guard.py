"""The OrphanGuard ends a host that hears nothing, and no other; without Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from nonet.workers.runtime import orphan_guard
from nonet.workers.runtime.orphan_guard import OrphanGuard

WAIT_S = 30.0  # far more than any machine needs


@pytest.fixture
def ended(monkeypatch):
    """Set when an orphan was ended."""
    event = threading.Event()
    monkeypatch.setattr(orphan_guard, "end_orphan", event.set)
    return event


def test_silence_ends_an_orphan(ended):
    OrphanGuard(0.05)
    assert ended.wait(WAIT_S)


def test_who_is_spoken_to_stays_and_ends_once_it_is_silent(ended, monkeypatch):
    now = [0.0]  # a clock that only the test moves: a busy machine is no silence
    pauses = threading.Semaphore(0)
    looked = threading.Semaphore(0)

    def sleep(_):
        looked.release()
        pauses.acquire(timeout=WAIT_S)

    # The module's `time` alone: other threads of this process sleep too.
    monkeypatch.setattr(orphan_guard, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    there = OrphanGuard(6.0)
    for _ in range(4):
        assert looked.acquire(timeout=WAIT_S)
        now[0] += 5.0
        there.record_heartbeat()
        pauses.release()
    assert looked.acquire(timeout=WAIT_S)
    assert not ended.is_set()
    now[0] += 6.5
    pauses.release()
    assert ended.wait(WAIT_S)


def test_a_group_whose_owner_ray_watches_waits_for_ever(ended):
    before = threading.active_count()
    OrphanGuard(0.0)
    assert threading.active_count() == before
    assert not ended.is_set()
