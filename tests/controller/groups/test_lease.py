"""Leases and pulses, by a clock that only the test moves."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from nonet.controller.groups import lifetimes as life
from nonet.controller.groups.lifetimes import Heartbeat, Lease, keep_alive, read_orphan_timeout_s
from nonet.errors import ConfigError

WAIT_S = 30.0  # far more than any machine needs


def test_a_lease_ends_with_silence_and_a_detached_one_never(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(life.time, "monotonic", lambda: now[0])
    lease, detached = Lease(60.0), Lease(60.0, detached=True)
    now[0] += 59
    assert not lease.is_expired
    lease.renew()
    now[0] += 59
    assert not lease.is_expired
    now[0] += 2
    assert lease.is_expired
    assert not detached.is_expired
    lease.renew()
    assert not lease.is_expired


def test_a_pulse_beats_on_after_an_error_and_stops_when_told():
    beats, enough = [], threading.Event()

    def beat():
        beats.append(1)
        if len(beats) >= 3:
            enough.set()
        raise RuntimeError("a worker did not answer")

    heartbeat = Heartbeat(beat, 0.001)
    assert enough.wait(WAIT_S)
    heartbeat.stop()
    for thread in threading.enumerate():
        if thread.name == "heartbeat":
            thread.join(WAIT_S)
    after = len(beats)
    assert heartbeat.pop_warning() == (
        f"warning: {after} failed heartbeats: RuntimeError: a worker did not answer ({after})"
    )
    assert heartbeat.pop_warning() == "", "told once"
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    assert len(beats) == after


def test_workers_that_did_not_answer_are_counted_by_name():
    beats, enough = iter([["trainer-0"], [], ["rollout-1", "trainer-0"]]), threading.Event()

    def beat():
        silent = next(beats, None)
        if silent is None:
            enough.set()
        return silent or []

    heartbeat = keep_alive({"trainer": SimpleNamespace(send_heartbeats=beat)}, 0.006)
    assert enough.wait(WAIT_S)
    heartbeat.stop()
    said = heartbeat.pop_warning()
    assert said == "warning: 3 failed heartbeats: trainer-0 did not answer (2), rollout-1 did not answer (1)"


@pytest.mark.parametrize("text", ["soon", "0", "-3"])
def test_silence_is_a_number_of_seconds_above_0(monkeypatch, text):
    monkeypatch.setenv("NONET_ORPHAN_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match="not a number of seconds above 0"):
        read_orphan_timeout_s()
    monkeypatch.setenv("NONET_ORPHAN_TIMEOUT_S", "7.5")
    assert read_orphan_timeout_s() == 7.5
    monkeypatch.delenv("NONET_ORPHAN_TIMEOUT_S")
    assert read_orphan_timeout_s() == 60.0
