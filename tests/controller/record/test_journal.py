from __future__ import annotations

import os

from nonet.controller.record.journal import Journal, cut_journal, read_journal


def test_records_come_back_in_order(tmp_path):
    journal = Journal(tmp_path / "j")
    for step in range(3):
        journal.write(applied=step)
    assert [record["applied"] for record in read_journal(tmp_path / "j")] == [0, 1, 2]
    journal.close()


def test_first_bad_line_ends_it(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path)
    for step in range(3):
        journal.write(applied=step)
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b'"applied":1', b'"applied":7') + lines[2])
    assert [record["applied"] for record in read_journal(path)] == [0]
    path.write_bytes(lines[0] + lines[1][:-9])
    assert [record["applied"] for record in read_journal(path)] == [0]


def test_cut_forgets_what_a_commit_does_not_know_of(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path)
    for step in range(5):
        journal.write(applied=step)
    journal.close()
    cut_journal(path, 2)
    journal = Journal(path)
    journal.write(applied="again")
    journal.close()
    assert [record["applied"] for record in read_journal(path)] == [0, 1, "again"]


def test_what_a_cut_keeps_is_on_disk_before_it_takes_the_place(tmp_path, monkeypatch):
    path, done = tmp_path / "j", []
    journal = Journal(path)
    journal.write(applied=0)
    journal.close()
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    cut_journal(path, 1)
    assert done == ["fsync", "replace", "fsync"]
