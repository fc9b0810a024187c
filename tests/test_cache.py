"""The cache of a node: entries are complete or absent, and make room unless a process reads them."""

from __future__ import annotations

import json
import os
import time

import pytest

from nonet.errors import DeadlineExceeded
from nonet.storage import node_cache as module
from nonet.storage.local_folders import USED_LOCK, FolderState, write_folder_state
from nonet.storage.node_cache import CachedFolders, list_cache_entries, make_room

KEYS = [f"{number:032x}" for number in range(4)]


@pytest.fixture
def entries(tmp_path, monkeypatch):
    monkeypatch.setenv("NONET_CACHE", str(tmp_path))
    return CachedFolders(tmp_path / "artifacts")


def add(entries: CachedFolders, key: str, used: float | None = None, content: bytes = b"x" * 1000):
    entries.make_room_for(len(content))
    folder = entries.add(key, lambda draft: (draft / "file").write_bytes(content) and None)
    entries.pin(key)()
    if used is not None:
        os.utime(entries.root / f"{key}.lock", (used, used))
    return folder


def list_keys(entries: CachedFolders) -> list[str]:
    return [entry.path.name for entry in entries.list_entries()]


def test_entries_of_all_kinds_share_one_bound_and_the_longest_unused_goes_first(
    entries, tmp_path, monkeypatch
):
    fetched = CachedFolders(tmp_path / "fetched")
    add(entries, KEYS[0], used=200)
    add(fetched, KEYS[1], used=100)
    add(entries, KEYS[2], used=300)
    monkeypatch.setenv("NONET_CACHE_BYTES", "3KB")
    add(entries, KEYS[3])
    assert (list_keys(entries), list_keys(fetched)) == ([KEYS[0], KEYS[2], KEYS[3]], [])


def test_downloads_and_work_folders_of_stored_runs_share_the_bound(entries, tmp_path, monkeypatch):
    add(entries, KEYS[0], used=300)
    download = tmp_path / "objects" / "ab" / "abcd"
    download.parent.mkdir(parents=True)
    download.write_bytes(b"x" * 1000)
    os.utime(download, (100, 100))
    run = tmp_path / "place" / "run-1"
    write_folder_state(run, FolderState("s3://feed/run-1"))
    (run / "weights").write_bytes(b"x" * 1000)
    (run / "serving").mkdir()
    (run / "serving" / "posts").write_bytes(b"x" * 5000)
    (run / USED_LOCK).touch()
    os.utime(run / USED_LOCK, (200, 200))
    assert [entry.kind for entry in list_cache_entries()] == ["downloads", "runs", "artifacts"]
    monkeypatch.setenv("NONET_CACHE_BYTES", "2500B")
    make_room()
    assert (download.exists(), (run / "weights").exists(), len(list_keys(entries))) == (False, True, 1)
    make_room(run, limit=0)
    assert ((run / "weights").exists(), list_keys(entries)) == (True, [])
    make_room(limit=0)
    assert {path.name for path in run.iterdir()} == {".storage.json", "serving", USED_LOCK}
    assert (run / "serving" / "posts").is_file()


def test_an_entry_that_is_read_stays(entries):
    add(entries, KEYS[0])
    with entries.read(KEYS[0]) as folder:
        assert folder == entries.root / KEYS[0]
        assert not entries.remove(KEYS[0])
        make_room(limit=0)
        assert list_keys(entries) == [KEYS[0]]
    assert entries.remove(KEYS[0])
    assert entries.remove(KEYS[0])  # which is gone
    with entries.read(KEYS[0]) as folder:
        assert folder is None


def test_an_entry_that_two_processes_make_is_that_of_the_first(entries):
    add(entries, KEYS[0], content=b"one")
    with entries._hold_draft() as draft:
        draft.mkdir()
    folder = add(entries, KEYS[0], content=b"two")
    assert (folder / "file").read_bytes() == b"one"

    def write(draft):
        add(entries, KEYS[1], content=b"faster")
        (draft / "file").write_bytes(b"slower")

    assert (entries.add(KEYS[1], write) / "file").read_bytes() == b"faster"
    assert not list(entries.root.glob(".draft-*"))


def test_what_a_killed_process_was_making_or_deleting_goes_and_that_of_a_living_one_stays(entries):
    add(entries, KEYS[0])
    dead = entries.root / ".draft-dead"
    dead.mkdir()
    (dead / "file").write_text("half")
    (entries.root / ".draft-dead.lock").write_text("")
    with entries._hold_draft() as living:
        living.mkdir()
        make_room(limit=10**6)
        assert living.is_dir()
    assert {path.name for path in entries.root.iterdir()} == {KEYS[0], f"{KEYS[0]}.lock"}


def test_a_process_that_dies_amid_a_deletion_leaves_no_half_of_an_entry(entries, monkeypatch):
    add(entries, KEYS[0])
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            entries.remove(KEYS[0])
    with entries.read(KEYS[0]) as folder:
        assert folder is None


def test_a_maker_shows_that_it_lives_and_the_next_one_can_make(entries, monkeypatch):
    monkeypatch.setattr(module, "_ALIVE_POLL_S", 0.01)
    file = entries.root / f"{KEYS[0]}.make"
    with entries.make(KEYS[0]) as is_only:
        assert is_only
        os.utime(file, (1, 1))
        until = time.monotonic() + 60
        while file.stat().st_mtime == 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert file.stat().st_mtime > 1
    assert not file.exists()
    with entries.make(KEYS[0]) as is_only:
        assert is_only


def test_the_command_lists_and_prunes(entries, tmp_path, command):
    add(entries, KEYS[0], used=time.time() - 40 * 86_400)
    add(CachedFolders(tmp_path / "fetched"), KEYS[1])
    code, out, _ = command("cache", "list")
    assert code == 0
    assert "artifacts  damaged  0.0 MB  40 d ago" in out
    assert "fetched    file" in out
    assert [row["bytes"] for row in json.loads(command("cache", "list", "--json")[1])] == [1000, 1000]
    assert command("cache", "prune", "--unused-for", "30d")[1] == "deleted: 1 of 1, 0.000 GB\n"
    with CachedFolders(tmp_path / "fetched").read(KEYS[1]):
        pruned = json.loads(command("cache", "prune", "--json")[1])
    assert pruned == {"deleted": 0, "bytes": 0, "in_use": 1}
    assert command("cache", "prune")[1] == "deleted: 1 of 1, 0.000 GB\n"
    assert command("cache", "list")[1] == f"{tmp_path} has no entries\n"
    assert "--unused-for" in command("cache", "prune", "--unused-for", "soon")[2]


def test_two_processes_read_an_entry_and_a_suspended_deleter_is_not_waited_for(entries, monkeypatch):
    add(entries, KEYS[0])
    with entries.read(KEYS[0]) as first, entries.read(KEYS[0]) as second:
        assert first == second is not None
    monkeypatch.setattr(module, "_MAKER_PATIENCE_S", 0.05)
    lock = entries.root / f"{KEYS[0]}.lock"
    with module.FILE_LOCKS.hold(lock), pytest.raises(DeadlineExceeded, match="it may be suspended"):
        entries.pin(KEYS[0])


def test_an_entry_that_cannot_be_moved_to_its_place_is_an_error(entries, monkeypatch):
    monkeypatch.setattr(
        module.os, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "the disk is full"))
    )
    with pytest.raises(OSError, match="disk is full"):
        add(entries, KEYS[0])


def test_a_link_in_place_of_a_lock_is_refused(entries, tmp_path):
    entries.root.mkdir()
    (entries.root / f"{KEYS[0]}.lock").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        entries.pin(KEYS[0])
    assert not (tmp_path / "outside").exists()


def test_there_is_no_room_beside_what_processes_read(entries, monkeypatch):
    add(entries, KEYS[0])
    monkeypatch.setenv("NONET_CACHE_BYTES", "1500B")
    with entries.read(KEYS[0]):
        assert not entries.make_room_for(1000)
    assert entries.make_room_for(1000)
