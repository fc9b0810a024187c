"""Limits and the circuit breaker, on a clock of the test's own."""

from __future__ import annotations

from nonet.deploy.serving.access import CircuitBreaker, RateLimiter


def test_a_caller_beyond_its_limit_waits_and_others_do_not():
    limits = RateLimiter(rate=2.0, burst=3)
    assert [limits.take_token("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert limits.take_token("a", 0.0) == 0.5
    assert limits.take_token("b", 0.0) == 0.0
    assert limits.take_token("a", 0.5) == 0.0
    assert limits.take_token("a", 0.5) > 0
    assert [limits.take_token("a", 100.0) for _ in range(4)] == [
        0.0,
        0.0,
        0.0,
        0.5,
    ]  # a bucket holds no more than a burst


def test_ten_times_the_rate_is_let_through_at_the_rate():
    limits = RateLimiter(rate=10.0, burst=5)
    through = sum(limits.take_token("a", number / 100) == 0.0 for number in range(1000))
    assert 98 <= through <= 106  # a burst and ten a second for ten seconds


def test_without_a_rate_everybody_may():
    assert all(RateLimiter().take_token("a") == 0.0 for _ in range(1000))


def test_the_breaker_opens_after_failures_in_a_row_and_closes_when_one_goes_well():
    breaker = CircuitBreaker(failures=3, pause_s=2.0)
    for well in (False, False, True, False, False):
        assert breaker.allow_request(0.0)
        breaker.record_outcome(well, 0.0)
    assert breaker.state == "closed"
    breaker.record_outcome(False, 0.0)
    assert breaker.state == "open"
    assert not breaker.allow_request(1.9)
    assert breaker.allow_request(2.1)
    assert breaker.state == "half open"
    assert not breaker.allow_request(2.2)  # one tries, the others wait
    breaker.record_outcome(False, 2.3)
    assert not breaker.allow_request(4.0)
    assert breaker.allow_request(4.4)
    breaker.record_outcome(True, 4.5)
    assert breaker.state == "closed"
    assert breaker.allow_request(4.6)


def test_a_trial_that_never_says_how_it_went_is_tried_again():
    breaker = CircuitBreaker(failures=1, pause_s=1.0)
    breaker.record_outcome(False, 0.0)
    assert breaker.allow_request(1.1)
    assert not breaker.allow_request(1.5)
    assert breaker.allow_request(2.2)


def test_limits_forget_the_callers_that_asked_longest_ago(monkeypatch):
    monkeypatch.setattr("nonet.deploy.serving.access.limits._MAX_CALLERS", 2)
    limits = RateLimiter(rate=0.001, burst=1)
    assert [limits.take_token(name, now=0.0) for name in "abcd"] == [0.0] * 4
    assert all(limits.take_token(name, now=0.0) for name in "cd")
    assert not limits.take_token("a", now=0.0)
