"""The schedule of faults of `nonet chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest
from likes_world import make_likes
from tests_ring import make_ring

from nonet.deploy.after.chaos.faults import KINDS_BY_TARGET, check_targets, draw_faults, list_targets
from nonet.deploy.run import api
from nonet.errors import ConfigError

PROCESS_TARGETS = tuple(target for target in KINDS_BY_TARGET if target not in ("node", "storage"))


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


def test_more_faults_than_steps_are_refused():
    with pytest.raises(ConfigError, match="--times is 10, and the run has 10 steps"):
        draw_faults(PROCESS_TARGETS, 10, 7, 10, 0.1)


def test_only_roles_that_a_run_has_are_targets(tmp_path: Path):
    ring = make_ring(tmp_path)
    everything = list_targets(api.scenario(ring / "ring.yaml").scenario)
    assert everything == list(KINDS_BY_TARGET)
    text = (ring / "ring.yaml").read_text()
    start, end = text.split("  rl:\n")[0], text.split("evaluate:")[1]
    (ring / "ring.yaml").write_text(f"{start}evaluate:{end}")
    without_rl = list_targets(api.scenario(ring / "ring.yaml").scenario)
    assert set(everything) - set(without_rl) == {"reward"}
    click = list_targets(api.scenario(make_likes(tmp_path) / "likes.yaml").scenario)
    assert not {"reward", "rollout"} & set(click)
    assert {"trainer", "evaluator", "controller"} <= set(click)
    with pytest.raises(ConfigError, match="--kill names reward; of this scenario it takes"):
        check_targets(["trainer", "reward"], without_rl)
