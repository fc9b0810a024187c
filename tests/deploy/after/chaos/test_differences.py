"""The comparison of a disturbed run with an undisturbed one."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nonet.controller.record import RunFolder
from nonet.controller.record.journal import Journal
from nonet.deploy.after.chaos.differences import list_differences, list_free_stages
from nonet.deploy.run import api


def make_run(
    path: Path,
    *,
    steps: int = 4,
    content: bytes = b"a",
    ranks: bytes = b"1",
    groups: tuple[int, ...] = (0, 1),
    version: int = 5,
    damaged: bool = False,
    updates: int = 4,
) -> RunFolder:
    run = RunFolder(path)
    for step in (2, 4):
        folder = run.checkpoints / f"step-{step:06d}"
        (folder / "dense").mkdir(parents=True)
        (folder / "dense/x").write_bytes(b"?" if damaged else content)
        counts = np.array(2 if step == 2 else updates, np.float32)
        save_file({"1.first": np.zeros(2), "1.step": counts}, folder / "dense/optimizer.safetensors")
        manifest = {
            "run_id": run.id,
            "step": step,
            "stage": "rl",
            "stage_step": step,
            "last": step == 4,
            "version": step if step == 2 else version,
            "scenario": "s",
            "artifacts": {},
            "participants": {"trainer": 1},
            "journal": step,
            "files": {
                "dense/x": hashlib.sha256(content).hexdigest(),
                "dense/optimizer.safetensors": hashlib.sha256(
                    (folder / "dense/optimizer.safetensors").read_bytes()
                ).hexdigest(),
            },
            "format": 2,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
    run.results.mkdir()
    (run.results / "rl.npz").write_bytes(ranks)
    journal = Journal(run.journal)
    for step in range(steps):
        journal.write(applied=step, stage="rl")
    for number in groups:
        journal.write(group="committed", stage="rl", numbers=[number], step=number, of=1)
    journal.close()
    return run


def test_equal_runs_have_no_difference(tmp_path: Path):
    assert list_differences(make_run(tmp_path / "a"), make_run(tmp_path / "b")) == []


def test_runs_without_checkpoints_are_not_equal(tmp_path: Path):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for run in (calm, disturbed):
        shutil.rmtree(run.checkpoints)
    assert list_differences(calm, disturbed) == [
        "the undisturbed run has no checkpoint, so nothing can be compared",
        "the disturbed run has no checkpoint, so nothing can be compared",
    ]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"content": b"b"}, "checkpoint 2: dense/x differs"),
        ({"ranks": b"2"}, "ranks of rl differ"),
        ({"steps": 3}, "journal: 4 steps undisturbed, 3 disturbed, or in another order"),
        ({"groups": (0, 1, 1)}, "rl: prompt group 1 was trained 2 times in the disturbed run"),
        ({"groups": (0,)}, "rl: prompt group 1 was trained 0 times in the disturbed run"),
        ({"version": 1}, "versions of the disturbed run's checkpoints go back: [2, 1]"),
    ],
)
def test_a_comparison_finds_what_was_lost(tmp_path: Path, changes: dict, difference: str):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b", **changes)
    assert list_differences(calm, disturbed)[0] == difference


def test_validations_that_were_recorded_in_another_order_are_found(tmp_path: Path):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for run, steps in ((calm, [10, 20]), (disturbed, [20, 10])):
        run.write_json("results/rl.validation.json", {"history": [{"step": step} for step in steps]})
    assert list_differences(calm, disturbed) == ["validations of rl differ"]
    assert list_differences(calm, disturbed, ["rl"]) == []


def test_a_checkpoint_whose_files_are_not_those_of_its_manifest_is_found(tmp_path: Path):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b", damaged=True)
    differences = list_differences(calm, disturbed)
    assert [text.partition(":")[0] for text in differences] == [
        "checkpoint 2 of the disturbed run cannot be read",
        "checkpoint 4 of the disturbed run cannot be read",
    ]


def test_a_comparison_finds_a_step_that_was_applied_twice(tmp_path: Path):
    calm, disturbed = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    journal = Journal(disturbed.journal)
    journal.write(applied=3, stage="rl")
    journal.close()
    assert "step 3: applied 2 times in the disturbed run" in list_differences(calm, disturbed)


def test_of_stages_with_staleness_all_but_the_bits_is_compared(tmp_path: Path):
    calm = make_run(tmp_path / "a")
    other_bits = make_run(tmp_path / "b", content=b"b", ranks=b"2")
    assert list_differences(calm, other_bits, ["rl"]) == []
    doubled = make_run(tmp_path / "c", content=b"b", groups=(0, 0, 1))
    assert list_differences(calm, doubled, ["rl"]) == [
        "rl: prompt group 0 was trained 2 times in the disturbed run"
    ]
    twice = make_run(tmp_path / "d", content=b"b", updates=5)
    assert list_differences(calm, twice, ["rl"]) == [
        "checkpoint 4: 5 updates by its optimizer, 4 by its steps"
    ]
    (other_bits.results / "rl.npz").unlink()
    assert list_differences(calm, other_bits, ["rl"]) == ["ranks of rl are missing"]


def test_the_stages_from_the_first_with_staleness_on_cannot_be_reproduced(ring: Path):
    assert list_free_stages(api.scenario(ring / "ring.yaml").scenario) == []
    changes = ["stages.rl.rollout.staleness=1", "roles={rollout: {workers: 1}, embedding: {workers: 1}}"]
    assert list_free_stages(api.scenario(ring / "ring.yaml", changes).scenario) == ["rl"]
