"""`nonet chaos`: the schedule of faults, what a comparison finds, and a run that loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nonet.controller.record import RunFolder
from nonet.controller.record.journal import Journal
from nonet.deploy.after.chaos import format_chaos, list_differences, run_chaos
from nonet.deploy.after.faults import ROLES, count_applied_steps, draw_faults
from nonet.deploy.run import api
from nonet.errors import ConfigError


def make_run(path: Path, *, steps: int = 4, sha256: str = "a", ranks: bytes = b"1") -> RunFolder:
    run = RunFolder(path)
    folder = run.checkpoints / "step-000004"
    folder.mkdir(parents=True)
    manifest = {"step": 4, "stage": "rl", "stage_step": 4, "last": True, "artifacts": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": {"dense/x": sha256}}))
    run.results.mkdir()
    (run.results / "rl.npz").write_bytes(ranks)
    journal = Journal(run.journal)
    for step in range(steps):
        journal.write(applied=step, stage="rl")
    journal.close()
    return run


def test_a_schedule_is_a_function_of_its_seed_and_hits_every_role_equally_often():
    faults = draw_faults(ROLES, 12, 7, 100, 0.5)
    assert faults == draw_faults(ROLES, 12, 7, 100, 0.5)
    assert faults != draw_faults(ROLES, 12, 8, 100, 0.5)
    assert sorted(fault.role for fault in faults) == sorted([*ROLES, *ROLES])
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps))
    assert steps[0] > 0
    assert steps[-1] < 100
    assert {fault.kind for fault in faults} == {"kill", "hang"}
    assert all(0 <= fault.delay_s < 0.5 for fault in faults)


def test_an_unknown_role_and_more_faults_than_steps_are_refused():
    with pytest.raises(ConfigError, match="--kill names router; it takes rollout, trainer"):
        draw_faults(["router"], 1, 7, 10, 0.1)
    with pytest.raises(ConfigError, match="--times is 10, and the run has 10 steps"):
        draw_faults(ROLES, 10, 7, 10, 0.1)


def test_equal_runs_have_no_difference(tmp_path: Path):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert list_differences(calm, disturbed) == []
    assert count_applied_steps(calm) == 4
    text = format_chaos({"faults": [], "times": 2, "lost": [], "recovery_s": {}})
    assert "nothing was lost, doubled or computed otherwise" in text
    assert "the run ended before 2 of 2 faults" in text


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"sha256": "b"}, "checkpoint 4: dense/x differs"),
        ({"ranks": b"2"}, "ranks of rl differ"),
        ({"steps": 3}, "journal: 4 steps undisturbed, 3 disturbed, or in another order"),
    ],
)
def test_a_comparison_finds_what_was_lost(tmp_path: Path, changes: dict, difference: str):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b", **changes)
    assert list_differences(calm, disturbed) == [difference]


def test_a_comparison_finds_a_step_that_was_applied_twice(tmp_path: Path):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    journal = Journal(disturbed.journal)
    journal.write(applied=3, stage="rl")
    journal.close()
    assert "step 3: applied 2 times in the disturbed run" in list_differences(calm, disturbed)


def test_a_run_in_object_storage_is_refused_before_anything_runs(ring: Path):
    scenario_file = api.scenario(ring / "ring.yaml", ["storage=s3://feed/x"])
    with pytest.raises(ConfigError, match="both runs are compared in folders"):
        run_chaos(scenario_file, roles=ROLES, times=1, seed=7)


@pytest.mark.slow
def test_a_run_of_kills_and_hangs_has_the_bits_of_an_undisturbed_one(ring: Path, no_ray: None):
    changes = [
        "checkpoint.every=2",
        "stages.rl.steps=40",
        "roles={rollout: {workers: 1}, embedding: {workers: 1}}",
    ]
    lines: list[str] = []
    result = run_chaos(
        api.scenario(ring / "ring.yaml", changes),
        roles=ROLES,
        times=6,
        seed=7,
        run_dir=ring / "chaos",
        report=lines.append,
    )
    assert result["lost"] == []
    assert len(result["faults"]) == len(lines) == 6
    assert sum(bool(fault["process"]) for fault in result["faults"]) >= 5
    assert json.loads((ring / "chaos/chaos.json").read_text()) == result
