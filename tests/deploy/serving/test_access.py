"""Limits and the circuit breaker, on a clock of the test's own."""

from __future__ import annotations

from nonet.deploy.serving.access import Breaker, Limits


def test_a_caller_beyond_its_limit_waits_and_others_do_not():
    limits = Limits(rate=2.0, burst=3)
    assert [limits.take("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert limits.take("a", 0.0) == 0.5
    assert limits.take("b", 0.0) == 0.0
    assert limits.take("a", 0.5) == 0.0
    assert limits.take("a", 0.5) > 0
    assert [limits.take("a", 100.0) for _ in range(4)] == [
        0.0,
        0.0,
        0.0,
        0.5,
    ]  # a bucket holds no more than a burst


def test_ten_times_the_rate_is_let_through_at_the_rate():
    limits = Limits(rate=10.0, burst=5)
    through = sum(limits.take("a", number / 100) == 0.0 for number in range(1000))
    assert 98 <= through <= 106  # a burst and ten a second for ten seconds


def test_without_a_rate_everybody_may():
    assert all(Limits().take("a") == 0.0 for _ in range(1000))


def test_the_breaker_opens_after_failures_in_a_row_and_closes_when_one_goes_well():
    breaker = Breaker(failures=3, pause_s=2.0)
    for well in (False, False, True, False, False):
        assert breaker.allows(0.0)
        breaker.went(well, 0.0)
    assert breaker.state == "closed"
    breaker.went(False, 0.0)
    assert breaker.state == "open"
    assert not breaker.allows(1.9)
    assert breaker.allows(2.1)
    assert breaker.state == "half open"
    assert not breaker.allows(2.2)  # one tries, the others wait
    breaker.went(False, 2.3)
    assert not breaker.allows(4.0)
    assert breaker.allows(4.4)
    breaker.went(True, 4.5)
    assert breaker.state == "closed"
    assert breaker.allows(4.6)


def test_a_trial_that_never_says_how_it_went_is_tried_again():
    breaker = Breaker(failures=1, pause_s=1.0)
    breaker.went(False, 0.0)
    assert breaker.allows(1.1)
    assert not breaker.allows(1.5)
    assert breaker.allows(2.2)
