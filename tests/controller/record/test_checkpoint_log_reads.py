from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from participant import written

from nonet.controller.record import checkpoint, journal
from nonet.controller.record.checkpoint import Checkpoints
from nonet.controller.record.checkpoint_log import CheckpointLog
from nonet.controller.record.run_folder import RunFolder
from nonet.workers.roles.settings import Schedule, StageSetup

STAGE = StageSetup(name="pretrain", first=0, steps=100, users=1, lr=Schedule(peak=1e-3), base=1e-3)


def commit(log: CheckpointLog, done: int) -> None:
    log.record_applied_step(STAGE, done - 1)
    aside = log.begin_checkpoint(STAGE, done, 0, {}, {"trainer": 1})
    (aside / "model.bin").write_bytes(b"x" * 10)
    log.complete_checkpoint(written(aside))


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def test_commits_count_the_journal_s_records_without_reading_it_again(run, monkeypatch):
    read, real = [], journal.read_journal
    monkeypatch.setattr(journal, "read_journal", lambda path: (read.append(path), real(path))[1])
    log = CheckpointLog(run, "s", 9)
    for done in range(1, 5):
        commit(log, done)
    assert len(read) == 1, "once, when it was opened"
    counted = [manifest.journal for _, manifest in map(_read, sorted(run.checkpoints.glob("step-*")))]
    assert counted == [1, 3, 5, 7]
    log.close()


def _read(path: Path):
    return path, checkpoint.read_manifest(path)


def test_after_a_resume_the_count_goes_on_where_the_commit_stood(run):
    log = CheckpointLog(run, "s", 9)
    for done in (1, 2):
        commit(log, done)
    log.record_applied_step(STAGE, 2)
    log.close()
    log = CheckpointLog(run, "s", 9)
    log.truncate_to(log.find_resume_checkpoint()[1], ["pretrain"])
    commit(log, 3)
    assert log.find_resume_checkpoint()[1].journal == 4, (
        "applied, committed, applied; the step without a commit is forgotten"
    )
    log.close()


def test_a_resume_reads_the_files_of_the_newest_commit_once(run, monkeypatch):
    log = CheckpointLog(run, "s", 9)
    commit(log, 1)
    log.close()
    monkeypatch.setattr(checkpoint, "_SETTLED_S", -1.0)
    read, real = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: (read.append(args), real(*args))[1])
    for _ in range(3):
        assert Checkpoints(run.checkpoints).find_newest()[1].step == 1
    assert len(read) == 1
    (run.checkpoints / "step-000001" / "model.bin").write_bytes(b"y" * 10)
    assert Checkpoints(run.checkpoints).find_newest() is None, "a file that changed is read again"


def test_a_file_that_is_too_young_to_tell_is_read_every_time(run, monkeypatch):
    log = CheckpointLog(run, "s", 9)
    commit(log, 1)
    log.close()
    monkeypatch.setattr(checkpoint, "_SETTLED_S", 1e9)
    assert Checkpoints(run.checkpoints).find_newest() is not None
    (run.checkpoints / "step-000001" / "model.bin").write_bytes(b"y" * 10)
    assert Checkpoints(run.checkpoints).find_newest() is None
