"""The local copies of stored runs: where they are, and which are deleted to make room."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nonet.atomic import write_whole
from nonet.errors import ConfigError
from nonet.storage import find_local_runs, make_local_folder, read_address
from nonet.storage.local_folders import (
    USED_LOCK,
    FolderState,
    find_work_folders,
    lock_used,
    write_folder_state,
)
from nonet.storage.node_cache import make_room


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NONET_CACHE", str(tmp_path))
    monkeypatch.setenv("NONET_CACHE_BYTES", "250KB")
    return tmp_path


def make_copy(run_id: str, used_at: float) -> Path:
    """Make a copy of 100 kB that was used at a time in unix seconds."""
    folder = make_local_folder("s3://feed", run_id)
    write_folder_state(folder, FolderState(f"s3://feed/{run_id}"))
    (folder / "weights").write_bytes(bytes(100_000))
    (folder / USED_LOCK).touch()
    os.utime(folder / USED_LOCK, (used_at, used_at))
    return folder


def test_copies_of_runs_of_two_storages_are_apart_and_know_their_addresses(cache: Path):
    folders = [
        make_local_folder(address, "run-1") for address in ("s3://feed/a", "s3://feed/b", "s3://feed/a/")
    ]
    assert folders[0] == folders[2] != folders[1]
    assert folders[0].name == folders[1].name == "run-1"
    write_folder_state(folders[0], FolderState("s3://feed/a/run-1"))
    assert find_work_folders() == folders[:1]
    assert find_local_runs() == []  # it has nothing of the run yet
    (folders[0] / "scenario.yaml").touch()
    assert find_local_runs() == folders[:1]
    assert read_address(folders[0]) == "s3://feed/a/run-1"
    assert read_address(folders[1]) is None


def test_the_copies_that_were_used_longest_ago_make_room_unless_a_process_uses_them(cache: Path):
    used, oldest, newer, newest = (make_copy(f"run-{time}", time) for time in (1, 2, 3, 4))
    lock_used(used)
    make_room(newest)
    folders = (used, oldest, newer, newest)
    assert [(folder / "weights").exists() for folder in folders] == [True, False, False, True]
    assert read_address(oldest) == "s3://feed/run-2"  # by which its id is still found
    make_room(newest)
    assert (newest / "weights").exists()


def test_what_only_this_node_has_makes_no_room(cache: Path):
    served, unstored = (make_copy(f"run-{time}", time) for time in (1, 2))
    (served / "serving").mkdir()
    (served / "serving/events.jsonl").write_text("a post")
    write_folder_state(unstored, FolderState("s3://feed/run-2", 1, ("w",), is_stored=False))
    make_room(cache / "place/run", limit=0)
    assert (served / "serving/events.jsonl").read_text() == "a post"
    assert not (served / "weights").exists()
    assert (unstored / "weights").exists()


def test_a_wrong_size_of_the_cache_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NONET_CACHE_BYTES", "much")
    with pytest.raises(ConfigError, match="NONET_CACHE_BYTES: wanted a size such as 50GB, got 'much'"):
        make_room(cache)


def test_a_folder_that_is_deleted_while_it_makes_room_is_passed_over(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    deleted = make_copy("run-1", 1)

    def delete(folder: Path, state: FolderState) -> None:
        shutil.rmtree(folder)
        write_whole(folder / "state", b"")

    monkeypatch.setattr("nonet.storage.local_folders.write_folder_state", delete)
    make_room(cache / "place/run", limit=0)
    assert not deleted.exists()
