"""Schedule: learning rates to exact numbers."""

from __future__ import annotations

import pytest

from nonet.workers.roles.settings import Schedule


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        # 10 steps, 2 of them warm; then 8 steps down from the peak
        ("cosine", [1, 2, 2, 1.9238795, 1.7071068, 1.3826834, 1, 0.6173166, 0.2928932, 0.0761205]),
        ("linear", [1, 2, 2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25]),
        ("none", [1, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_rates_warm_up_to_the_peak_and_then_decay(decay, expected):
    rate = Schedule(peak=2.0, warmup=0.2, decay=decay)
    assert [rate.compute_rate(step, 10) for step in range(10)] == pytest.approx(expected, rel=1e-6)


def test_a_stage_has_at_least_one_warm_step_and_5_percent_by_default():
    assert Schedule(peak=3e-3, warmup=0.0).compute_rate(0, 10) == 3e-3
    assert Schedule(peak=3e-3, warmup=0.0).compute_rate(1, 10) < 3e-3 * 1.0001
    rate = Schedule(peak=3e-3)
    assert [rate.compute_rate(step, 100) for step in (0, 3, 4)] == pytest.approx(
        [3e-3 / 5, 3e-3 * 4 / 5, 3e-3]
    )
    assert rate.compute_rate(5, 100) == pytest.approx(3e-3)
    assert 0 < rate.compute_rate(99, 100) < 1e-5
