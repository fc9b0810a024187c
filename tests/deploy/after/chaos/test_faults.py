"""The schedule of faults of `nonet chaos`."""

from __future__ import annotations

import pytest

from nonet.deploy.after.chaos.faults import KINDS_BY_TARGET, PROCESS_TARGETS, draw_faults
from nonet.errors import ConfigError


def test_a_schedule_is_a_function_of_its_seed_and_hits_every_target_equally_often():
    faults = draw_faults(PROCESS_TARGETS, 12, 7, 100, 0.5)
    assert faults == draw_faults(PROCESS_TARGETS, 12, 7, 100, 0.5)
    assert faults != draw_faults(PROCESS_TARGETS, 12, 8, 100, 0.5)
    assert sorted(fault.target for fault in faults) == sorted([*PROCESS_TARGETS, *PROCESS_TARGETS])
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps))
    assert steps[0] > 0
    assert steps[-1] <= 75
    assert all(0 <= fault.delay_s < 0.5 for fault in faults)


def test_enough_faults_have_every_kind_of_every_target_and_every_moment():
    faults = draw_faults(tuple(KINDS_BY_TARGET), 64, 7, 200, 0.5, range(100, 201))
    kinds = {(fault.target, fault.kind) for fault in faults}
    assert kinds == {(target, kind) for target, kinds in KINDS_BY_TARGET.items() for kind in kinds}
    assert {fault.moment for fault in faults} == {"step", "save", "publish"}
    assert all(fault.step >= 100 for fault in faults if fault.moment == "publish")
    lasting = {fault.name for fault in faults if fault.duration_s}
    assert "slow trainer" in lasting
    assert "cut storage" in lasting
    assert not lasting & {"kill trainer", "hang trainer", "cut trainer"}


def test_an_unknown_target_and_more_faults_than_steps_are_refused():
    with pytest.raises(ConfigError, match="--kill names router; it takes rollout, trainer"):
        draw_faults(["router"], 1, 7, 10, 0.1)
    with pytest.raises(ConfigError, match="--times is 10, and the run has 10 steps"):
        draw_faults(PROCESS_TARGETS, 10, 7, 10, 0.1)
