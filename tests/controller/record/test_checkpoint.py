from __future__ import annotations

import hashlib
import json

import pytest
from participant import written

from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.errors import CheckpointError


def manifest(step: int, *, stage: str = "pretrain", last: bool = False) -> Manifest:
    return Manifest("run", step, stage, step, last, 0, "s", {"sids": "a"}, {"trainer": 1}, 0)


def commit(checkpoints: Checkpoints, step: int, **kwargs) -> None:
    aside = checkpoints.create_staging_dir(step)
    (aside / "dense").mkdir()
    (aside / "dense" / "model.bin").write_bytes(bytes([step]) * 100)
    checkpoints.complete(aside, manifest(step, **kwargs), written(aside))


def test_newest_whole_commit_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 30):
        commit(checkpoints, step)
    path, found = checkpoints.find_newest()
    assert (path.name, found.step) == ("step-000030", 30)
    assert set(found.files) == {"dense/model.bin"}


def test_torn_commits_are_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3, 4):
        commit(checkpoints, step)
    (tmp_path / "step-000004" / "manifest.json").unlink()
    model = tmp_path / "step-000003" / "dense" / "model.bin"
    for size in (0, 50, 99):
        model.write_bytes(b"\x03" * size)
        assert checkpoints.find_newest()[1].step == 2
    aside = checkpoints.create_staging_dir(9)
    (aside / "half").write_text("x")
    assert checkpoints.find_newest()[1].step == 2


def test_pruning_keeps_the_newest_and_those_that_end_a_stage(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 1, last=True)
    for step in (2, 3, 4, 5):
        commit(checkpoints, step)
    checkpoints.create_staging_dir(6)
    checkpoints.prune(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000004", "step-000005"]
    assert checkpoints.find_stage_end("pretrain").name == "step-000001"
    with pytest.raises(CheckpointError, match="no checkpoint that ends the stage 'rl'"):
        checkpoints.find_stage_end("rl")


def test_another_format_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 1)
    file = tmp_path / "step-000001" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    assert checkpoints.find_newest() is None


def aside_of(checkpoints: Checkpoints, step: int = 1):
    aside = checkpoints.create_staging_dir(step)
    (aside / "dense").mkdir()
    (aside / "dense" / "model.bin").write_bytes(b"weights")
    return aside, written(aside)


def test_a_commit_holds_exactly_what_its_participants_say_they_wrote(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    aside, files = aside_of(checkpoints)
    (aside / "dense" / "other.bin").write_bytes(b"who wrote this?")
    with pytest.raises(CheckpointError, match=r"other.bin: 15 bytes, but its writer says no such file"):
        checkpoints.complete(aside, manifest(1), files)
    (aside / "dense" / "other.bin").unlink()
    (aside / "dense" / "model.bin").write_bytes(b"weight")
    with pytest.raises(CheckpointError, match=r"model.bin: 6 bytes, but its writer says 7 bytes"):
        checkpoints.complete(aside, manifest(1), files)
    (aside / "dense" / "model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"model.bin: no such file, but its writer says 7 bytes"):
        checkpoints.complete(aside, manifest(1), files)
    assert checkpoints.find_newest() is None


def test_the_controller_reads_no_byte_of_what_was_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    aside, files = aside_of(checkpoints)
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: pytest.fail("it reads a file"))
    path = checkpoints.complete(aside, manifest(1), files)
    monkeypatch.undo()
    sha256 = hashlib.sha256(b"weights").hexdigest()
    body = json.loads((path / "manifest.json").read_text())
    assert body["files"] == {"dense/model.bin": sha256}, "as commits of before have it"
    assert checkpoints.find_newest()[0] == path


def test_what_a_killed_run_left_half_written_goes_when_it_is_resumed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 1)
    aside_of(checkpoints, 2)
    assert checkpoints.find_newest()[1].step == 1
    checkpoints.delete_after(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
