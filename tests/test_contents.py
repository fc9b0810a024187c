"""The identity of the content of a file, and the memory of the node for it."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from contextlib import nullcontext

import pyarrow.fs as pafs
import pytest

from nonet import contents
from nonet.contents import describe_difference, identify_content
from nonet.errors import DataError
from tests.s3 import serve_s3

LOCAL = pafs.LocalFileSystem()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "_SETTLED_S", 0.0)
    return tmp_path / "cache" / "contents"


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that are read to be hashed."""
    names, file_digest = [], contents.hashlib.file_digest

    def count(source, digest):
        names.append(os.path.basename(source.name))
        return file_digest(source, digest)

    monkeypatch.setattr(contents.hashlib, "file_digest", count)
    return names


def test_equal_bytes_have_one_identity_wherever_they_are_and_every_byte_counts(tmp_path, cache):
    content = bytes(range(256)) * 400
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(content)
    (tmp_path / "c").write_bytes(content[:50_000] + b"?" + content[50_001:])
    a, b, c = (identify_content(LOCAL, str(tmp_path / name)) for name in "abc")
    assert a == b != c


def test_a_file_is_hashed_once_on_a_node_until_it_changes(tmp_path, cache, hashed):
    path = tmp_path / "log"
    path.write_bytes(b"one")
    first = identify_content(LOCAL, str(path))
    assert identify_content(LOCAL, str(path)) == first
    os.rename(path, tmp_path / "moved")
    identify_content(LOCAL, str(tmp_path / "moved"))
    before = (tmp_path / "moved").stat()
    (tmp_path / "moved").write_bytes(b"two")
    os.utime(tmp_path / "moved", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert identify_content(LOCAL, str(tmp_path / "moved")) != first
    assert hashed in (
        ["log", "moved"],
        ["log", "moved", "moved"],
    )  # a rename changes the ctime on some filesystems


@pytest.mark.parametrize("has_old_time", [False, True])
def test_the_hash_of_a_file_that_was_just_written_is_not_remembered(
    tmp_path, cache, hashed, monkeypatch, has_old_time
):
    monkeypatch.setattr(contents, "_SETTLED_S", 3600.0)
    (tmp_path / "log").write_bytes(b"one")
    if has_old_time:  # as a copy that keeps times
        os.utime(tmp_path / "log", (0, 0))
    for _ in range(2):
        identify_content(LOCAL, str(tmp_path / "log"))
    assert hashed == ["log", "log"]
    assert not cache.exists()


def replace_while_hashed(monkeypatch, path, contents_after: list[bytes]) -> None:
    """Let another process replace a file after each time that it is hashed, as long as there are contents."""
    hash_file = contents._hash_file

    def hash_and_replace(hashed_path):
        digest = hash_file(hashed_path)
        if contents_after:
            draft = path.with_name("draft")
            draft.write_bytes(contents_after.pop(0))
            os.replace(draft, path)
        return digest

    monkeypatch.setattr(contents, "_hash_file", hash_and_replace)


@pytest.mark.parametrize("settled_s", [0.0, 3600.0])
def test_a_file_that_is_replaced_while_it_is_hashed_has_the_identity_of_its_new_content(
    tmp_path, cache, monkeypatch, settled_s
):
    monkeypatch.setattr(contents, "_SETTLED_S", settled_s)
    (tmp_path / "new").write_bytes(b"two")
    expected = identify_content(LOCAL, str(tmp_path / "new"))
    (tmp_path / "log").write_bytes(b"one")
    replace_while_hashed(monkeypatch, tmp_path / "log", [b"six", b"two"])
    assert identify_content(LOCAL, str(tmp_path / "log")) == expected
    assert identify_content(LOCAL, str(tmp_path / "log")) == expected


def test_a_file_that_never_stays_the_same_is_an_error_of_the_storage(tmp_path, cache, monkeypatch):
    (tmp_path / "log").write_bytes(b"one")
    replace_while_hashed(monkeypatch, tmp_path / "log", [b"two"] * 9)
    with pytest.raises(OSError, match=r"log changed each time while it was read; wait until nothing writes"):
        identify_content(LOCAL, str(tmp_path / "log"))


def test_what_cannot_be_read_again_is_refused_in_one_line(tmp_path, cache):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(DataError, match="is no regular file but a folder, pipe or device; name a file"):
            identify_content(LOCAL, str(path))


@pytest.mark.parametrize("digest", [None, [1], "", "../../etc", "0" * 31, "0" * 32 + "\n"])
def test_a_record_with_anything_else_than_a_hash_is_written_again(tmp_path, cache, digest):
    (tmp_path / "log").write_bytes(b"one")
    first = identify_content(LOCAL, str(tmp_path / "log"))
    (record,) = cache.glob("*.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "digest": digest}))
    assert identify_content(LOCAL, str(tmp_path / "log")) == first
    assert first.endswith(json.loads(record.read_text())["digest"])


def test_links_and_pipes_in_place_of_a_record_and_its_lock_cost_another_hash_only(tmp_path, cache, hashed):
    (tmp_path / "log").write_bytes(b"one")
    first = identify_content(LOCAL, str(tmp_path / "log"))
    (record,) = cache.glob("*.json")
    record.rename(tmp_path / "record")
    lock = record.with_suffix(".lock")
    for path in (record, lock):
        path.unlink(missing_ok=True)
    record.symlink_to(tmp_path / "record")
    lock.symlink_to(tmp_path / "made")
    assert identify_content(LOCAL, str(tmp_path / "log")) == first
    assert not (tmp_path / "made").exists()
    for path in (record, lock):
        path.unlink()
        os.mkfifo(path)
    assert identify_content(LOCAL, str(tmp_path / "log")) == first
    assert hashed == ["log"] * 3


def test_a_user_without_a_home_has_no_cache(tmp_path, cache, hashed, monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NONET_CACHE")
    monkeypatch.setattr(contents.Path, "home", fail)
    (tmp_path / "log").write_bytes(b"one")
    assert identify_content(LOCAL, str(tmp_path / "log")) == identify_content(LOCAL, str(tmp_path / "log"))
    assert len(hashed) == 2


def test_a_lock_is_waited_for_as_long_as_a_slow_process_hashes_the_file(tmp_path, cache, monkeypatch):
    waits = []
    monkeypatch.setattr(contents, "_HASHED_BYTES_PER_S", 2.0)
    monkeypatch.setattr(contents, "_lock_record", lambda _, wait_s: waits.append(wait_s) or nullcontext())
    (tmp_path / "log").write_bytes(b"x" * 10)
    identify_content(LOCAL, str(tmp_path / "log"))
    assert waits == [contents._POLL_S + 5.0]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"state": 1}', b"[" * 200_000])
def test_a_damaged_memory_or_none_costs_another_hash_only(tmp_path, cache, hashed, damage):
    (tmp_path / "log").write_bytes(b"one")
    first = identify_content(LOCAL, str(tmp_path / "log"))
    (record,) = cache.glob("*.json")
    record.write_bytes(damage)
    assert identify_content(LOCAL, str(tmp_path / "log")) == first
    assert identify_content(LOCAL, str(tmp_path / "log")) == first
    assert hashed == ["log", "log"]


def test_a_cache_that_cannot_be_written_costs_the_hash_each_time(tmp_path, cache, hashed):
    cache.parent.write_text("a file where the folder would be")
    (tmp_path / "log").write_bytes(b"one")
    assert identify_content(LOCAL, str(tmp_path / "log")) == identify_content(LOCAL, str(tmp_path / "log"))
    assert len(hashed) == 2


def test_an_object_is_identified_by_its_etag():
    with serve_s3() as variables:
        system = pafs.S3FileSystem(
            endpoint_override=variables["AWS_ENDPOINT_URL"],
            access_key=variables["AWS_ACCESS_KEY_ID"],
            secret_key=variables["AWS_SECRET_ACCESS_KEY"],
            region=variables["AWS_REGION"],
        )
        identities = []
        for name, content in (("x", b"one"), ("x", b"two"), ("y", b"one")):
            with system.open_output_stream(f"feed-runs/{name}") as out:
                out.write(content)
            identities.append(identify_content(system, f"feed-runs/{name}"))
    assert all(identity.startswith("etag:") for identity in identities)
    assert identities[0] == identities[2] != identities[1]


def test_a_filesystem_without_etags_has_sizes_and_times(tmp_path):
    (tmp_path / "log").write_bytes(b"one")
    system = pafs.SubTreeFileSystem(str(tmp_path), LOCAL)
    assert identify_content(system, "log") == f"time:3:{(tmp_path / 'log').stat().st_mtime_ns}"


def test_processes_of_a_node_hash_a_file_one_after_the_other(tmp_path, cache, hashed, monkeypatch):
    (tmp_path / "log").write_bytes(b"one")
    hash_file, waiting = contents._hash_file, []

    def hash_beside_others(path):
        if not waiting:
            waiting.extend(threading.Thread(target=identify_content, args=(LOCAL, path)) for _ in range(3))
            for thread in waiting:
                thread.start()
        return hash_file(path)

    monkeypatch.setattr(contents, "_hash_file", hash_beside_others)
    identify_content(LOCAL, str(tmp_path / "log"))
    for thread in waiting:
        thread.join(60)
    assert hashed == ["log"]


def test_a_filesystem_without_locks_costs_another_hash_at_most(tmp_path, cache, hashed, monkeypatch):
    def fail(*_):
        raise OSError(38, "Function not implemented")

    (tmp_path / "log").write_bytes(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(contents.fcntl, "flock", fail)
        first = identify_content(LOCAL, str(tmp_path / "log"))
    assert identify_content(LOCAL, str(tmp_path / "log")) == first
    assert hashed == ["log"]


def test_a_process_that_hangs_with_the_lock_is_not_waited_for(tmp_path, cache, hashed, monkeypatch):
    monkeypatch.setattr(contents, "_POLL_S", 0.01)
    (tmp_path / "log").write_bytes(b"one")
    first = identify_content(LOCAL, str(tmp_path / "log"))
    (record,) = cache.glob("*.json")
    record.unlink()
    with open(record.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert identify_content(LOCAL, str(tmp_path / "log")) == first
    assert hashed == ["log", "log"]


def test_hashes_that_nothing_asks_for_are_removed_after_a_while(tmp_path, cache):
    for name in ("used", "unused", "new"):
        (tmp_path / name).write_bytes(name.encode())
    records = {}
    for name in ("used", "unused"):
        identify_content(LOCAL, str(tmp_path / name))
        (records[name],) = set(cache.glob("*.json")) - set(records.values())
    long_ago = time.time() - contents._KEPT_S - 1
    for path in cache.iterdir():
        os.utime(path, (long_ago, long_ago))
    identify_content(LOCAL, str(tmp_path / "used"))
    identify_content(LOCAL, str(tmp_path / "new"))
    assert records["used"] in set(cache.glob("*.json"))
    assert records["unused"] not in set(cache.glob("*.json"))
    assert len(list(cache.iterdir())) == 3


def test_data_that_were_moved_are_said_to_be_of_unknown_content_and_not_other_content():
    moved = describe_difference("blake2b:00", "etag:11")
    assert "identified by the bytes of a file, and is now by the ETag of an object" in moved
    assert "if the data were moved, use them at their earlier address" in moved
    assert describe_difference("blake2b:00", "blake2b:11") == "other content of the same size"
    assert "or a copy that was uploaded in other parts" in describe_difference("etag:00", "etag:11")
