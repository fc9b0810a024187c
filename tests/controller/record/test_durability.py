"""Commits and the journal on a disk that loses what was not synced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from losing_disk import MODES, LosingDisk
from participant import written

from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.journal import Journal, cut_journal, read_journal
from nonet.controller.record.run_folder import RunFolder


def run_folder(root: Path, monkeypatch) -> LosingDisk:
    """Make a run's folder that has been on the disk for long."""
    (root / "checkpoints").mkdir(parents=True)
    return LosingDisk(root, monkeypatch)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    disk = run_folder(tmp_path / "run", monkeypatch)
    yield disk
    disk.close()


@pytest.fixture
def losses(tmp_path, monkeypatch):
    """Yield what is left of a run when the power fails before each call, one run per call; the last one has no failure."""

    def each(mode, done_before, work):
        for number in range(99):
            disk = run_folder(tmp_path / f"run{number}", monkeypatch)
            done_before(disk)
            with disk.before(number) as lost:
                work(disk)
            yield disk.left(mode, tmp_path / f"left{number}")
            disk.close()
            if not lost:
                return

    return each


def commit(disk, step: int, version: int = 0) -> None:
    checkpoints = Checkpoints(disk.root / "checkpoints")
    aside = checkpoints.create_staging_dir(step)
    for name in ("model", "dense/optimizer", "sparse/item/0-0.seg"):
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(name.encode() * step)
    checkpoints.complete(
        aside, Manifest("run", step, "pretrain", step, False, version, "s", {}, {}, 0), written(aside)
    )


def newest(folder) -> int:
    """Return the step of the newest complete checkpoint, -1 without any."""
    found = Checkpoints(folder / "checkpoints").find_newest()
    return found[1].step if found else -1


def version_of(folder) -> int:
    """Return the version of the newest complete checkpoint, -1 without any."""
    found = Checkpoints(folder / "checkpoints").find_newest()
    return found[1].version if found else -1


# --- the disk itself ------------------------------------------------------------------------------------------------


def test_bytes_and_names_are_kept_when_they_are_synced_and_not_before(disk, tmp_path):
    file = disk.root / "file"
    file.write_bytes(b"old")
    left = [disk.left(mode, tmp_path / f"{mode}0") for mode in MODES]
    assert not (left[0] / "file").exists()
    assert (left[1] / "file").read_bytes() == b""
    for path in (file, disk.root):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    file.write_bytes(b"new")
    os.replace(file, disk.root / "moved")
    left = [disk.left(mode, tmp_path / f"{mode}1") for mode in MODES]
    assert (left[0] / "file").read_bytes() == b"old"
    assert (left[1] / "moved").read_bytes() == b"old"
    assert not (left[1] / "file").exists()


def test_work_stops_before_the_call_that_is_asked_for_and_no_change_follows(disk):
    for number in range(3):
        with disk.before(number) as lost:
            for name in ("a", "b", "c"):
                os.mkdir(disk.root / f"{name}{number}")
        assert lost
        assert len(list(disk.root.glob(f"?{number}"))) == number
    with disk.before(9) as lost:
        os.mkdir(disk.root / "last")
    assert not lost


# --- commits and the journal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_commit_that_was_made_is_whole_after_a_power_loss(disk, tmp_path, mode):
    commit(disk, 3)
    commit(disk, 6)
    left = disk.left(mode, tmp_path / "left")
    assert newest(left) == 6
    assert (left / "checkpoints" / "step-000006" / "model").read_bytes() == b"model" * 6
    assert (left / "checkpoints" / "step-000003" / "manifest.json").read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_power_loss_at_any_moment_of_a_commit_leaves_the_one_before_or_the_new_one(losses, mode):
    found = [
        newest(left) for left in losses(mode, lambda disk: commit(disk, 3), lambda disk: commit(disk, 6))
    ]
    assert len(found) > 8  # three files, two renames, manifest and folders at least
    assert set(found[:-1]) <= {3, 6}
    assert found[0] == 3
    assert found[-1] == 6


def test_every_record_of_the_journal_is_on_the_disk_when_it_was_written(disk, tmp_path):
    journal = Journal(disk.root / "journal.jsonl")
    for step in range(3):
        journal.write(applied=step)
        left = disk.left("named", tmp_path / f"left{step}")
        assert [record["applied"] for record in read_journal(left / "journal.jsonl")] == list(range(step + 1))
    journal.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_power_loss_while_a_step_is_committed_again_leaves_one_of_the_two(losses, mode):
    again = losses(mode, lambda disk: commit(disk, 3, version=1), lambda disk: commit(disk, 3, version=2))
    found = [(newest(left), version_of(left)) for left in again]
    assert set(found) <= {(3, 1), (3, 2)}
    assert found[-1] == (3, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_s_first_commit_is_found_in_a_folder_that_was_just_made(tmp_path, monkeypatch, mode):
    root = tmp_path / "run"
    root.mkdir()
    disk = LosingDisk(root, monkeypatch)
    commit(disk, 3)
    assert newest(disk.left(mode, tmp_path / "left")) == 3
    disk.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_journal_that_was_cut_keeps_its_records(disk, tmp_path, mode):
    path = disk.root / "journal.jsonl"
    journal = Journal(path)
    for step in range(5):
        journal.write(applied=step)
    journal.close()
    cut_journal(path, 3)
    left = disk.left(mode, tmp_path / "left") / "journal.jsonl"
    assert [record["applied"] for record in read_journal(left)][:3] == [0, 1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_result_is_whole_or_not_there(disk, tmp_path, mode):
    run = RunFolder(disk.root)
    run.write_json("results/pretrain.json", {"recall": 0.1})
    left = RunFolder(disk.left(mode, tmp_path / "left"))
    assert left.read_json("results/pretrain.json") in (None, {"recall": 0.1})
