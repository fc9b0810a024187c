"""A commit of a step that has one already, killed at each call that changes the disk."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
from participant import written

from nonet.controller.record.checkpoint import Checkpoints, Manifest

CHANGES = ("replace", "rename", "fsync", "open", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """Not an Exception: nothing that goes on after errors goes on after this."""


def save(checkpoints: Checkpoints, step: int, content: bytes):
    aside = checkpoints.create_staging_dir(step)
    (aside / "dense").mkdir()
    (aside / "dense" / "model.bin").write_bytes(content)
    manifest = Manifest("run", step, "pretrain", step, False, 0, "s", {}, {"trainer": 1}, 0)
    return aside, manifest, written(aside)


def killed_at(monkeypatch, nth: int, work) -> bool:
    """Do `work` until the nth call that changes the disk, before (even) or after (odd) it. Whether it was killed.

    The changes of other threads are neither counted nor killed.
    """
    count, here = 0, threading.get_ident()
    with monkeypatch.context() as patched:
        for name in CHANGES:
            real = getattr(os, name)

            def call(*args, _real=real, **kwargs):
                nonlocal count
                if threading.get_ident() != here:  # of another test's thread, whose work goes on
                    return _real(*args, **kwargs)
                count += 1
                if count == nth // 2 + 1 and nth % 2 == 0:
                    raise Killed
                answer = _real(*args, **kwargs)
                if count == nth // 2 + 1:
                    raise Killed
                return answer

            patched.setattr(os, name, call)
        try:
            work()
        except Killed:
            return True
    return False


def test_a_commit_killed_anywhere_leaves_the_old_or_the_new_one(tmp_path, monkeypatch):
    nth, seen = 0, set()
    while True:
        root = tmp_path / str(nth)
        checkpoints = Checkpoints(root)
        checkpoints.complete(*save(checkpoints, 3, b"old"))
        aside, manifest, files = save(checkpoints, 3, b"new")
        if not killed_at(monkeypatch, nth, lambda: checkpoints.complete(aside, manifest, files)):  # noqa: B023
            break
        found = Checkpoints(root).find_newest()
        assert found is not None, f"killed at call {nth // 2} the run has no commit"
        seen.add((found[0] / "dense" / "model.bin").read_bytes())
        assert Checkpoints(root).find_newest()[1].step == 3
        Checkpoints(root).prune(1)
        assert Checkpoints(root).find_newest() is not None, (
            f"killed at call {nth // 2} prune removes the only commit"
        )
        shutil.rmtree(root)
        nth += 1
    assert nth > 20, "the kill points were not met"
    assert seen == {b"old", b"new"}
    assert [path.name for path in root.iterdir()] == ["step-000003"], "nothing is left aside"


def test_a_commit_goes_on_where_a_killed_one_left_the_old_one_aside(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.complete(*save(checkpoints, 2, b"before"))
    checkpoints.complete(*save(checkpoints, 3, b"old"))
    aside, manifest, files = save(checkpoints, 3, b"new")
    nth = 0
    while checkpoints.find_newest()[0].name == "step-000003":
        assert killed_at(monkeypatch, nth, lambda: checkpoints.complete(aside, manifest, files))
        nth += 1
    path, found = checkpoints.find_newest()
    assert path.name.startswith("step-000003.old-")
    assert checkpoints.find_at_step(3)[0] == path
    assert (path / "dense" / "model.bin").read_bytes() == b"old"
    assert found.step == 3
    checkpoints.delete_after(3)
    assert checkpoints.find_newest()[0] == path, "it is of the step to go on from"
    checkpoints.complete(*save(checkpoints, 3, b"again"))
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]
    assert (checkpoints.find_newest()[0] / "dense" / "model.bin").read_bytes() == b"again"


def test_of_two_complete_checkpoints_of_a_step_the_one_that_replaces_the_other_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.complete(*save(checkpoints, 3, b"new"))
    shutil.copytree(tmp_path / "step-000003", tmp_path / "step-000003.old-0123abcd")
    assert checkpoints.find_at_step(3)[0] == checkpoints.find_newest()[0] == tmp_path / "step-000003"


def test_what_was_put_aside_and_has_no_successor_counts_when_pruning(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.complete(*save(checkpoints, step, b"x"))
    os.replace(tmp_path / "step-000002", tmp_path / "step-000002.old-0123abcd")
    checkpoints.prune(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002.old-0123abcd"]
    checkpoints.delete_after(1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["dense", "sparse", "sparse/x", "."])
def test_every_folder_of_a_commit_is_synced_before_its_name_is_given(tmp_path, monkeypatch, folder):
    checkpoints, synced = Checkpoints(tmp_path), []
    aside, manifest, _ = save(checkpoints, 1, b"x")
    (aside / "sparse" / "x").mkdir(parents=True)
    (aside / "sparse" / "x" / "0.seg").write_bytes(b"x")
    files = written(aside)
    wanted = (aside / folder).resolve()
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), real_fsync(handle)),
    )

    def replace(source, target):
        if target == tmp_path / "step-000001":
            assert str(wanted) in synced
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    checkpoints.complete(aside, manifest, files)
    assert str(tmp_path) in synced
