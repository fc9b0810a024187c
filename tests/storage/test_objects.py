"""Conditional writes, and errors of one line."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store

from nonet.deploy.after.chaos.connections import place_proxy
from nonet.errors import ConfigError, StorageConflict, StorageError
from nonet.storage import (
    ObjectStorage,
    describe_pending_requests,
    get_request_counts,
    open_storage,
    request_log,
)
from nonet.storage.objects import Storage, read_clock, upload_file
from tests.s3 import BUCKET
from tests.storage.memory_storage import MemoryStorage


@pytest.fixture
def storage(s3: dict[str, str], request: pytest.FixtureRequest) -> ObjectStorage:
    return open_storage(f"{BUCKET}/{request.node.name}")


@pytest.fixture(params=["s3", "memory"])
def any_storage(request: pytest.FixtureRequest) -> Storage:
    return MemoryStorage() if request.param == "memory" else request.getfixturevalue("storage")


def test_an_object_is_created_once_and_replaced_only_by_who_has_seen_it(any_storage: Storage):
    storage = any_storage
    first = storage.put_if_absent("head", b"1")
    with pytest.raises(StorageConflict, match="written by another process"):
        storage.put_if_absent("head", b"2")
    second = storage.replace_if("head", b"2", first)
    with pytest.raises(StorageConflict):
        storage.replace_if("head", b"3", first)
    stored = storage.get("head")
    assert stored is not None
    assert (stored.content, stored.etag) == (b"2", second)


def test_a_repeated_write_whose_first_response_was_lost_is_no_conflict(any_storage: Storage):
    etag = any_storage.put_if_absent("head", b"1")
    assert any_storage.put_if_absent("head", b"1") == etag
    etag = any_storage.replace_if("head", b"2", etag)
    assert any_storage.replace_if("head", b"2", '"of-before"') == etag


def test_files_keep_their_bytes_and_keys_are_listed_and_deleted(any_storage: Storage, tmp_path: Path):
    storage = any_storage
    content = os.urandom(11 << 20)  # more than a part of a multipart upload
    (tmp_path / "sent").write_bytes(content)
    upload_file(storage, tmp_path / "sent", [("folder/a@1-2", 6 << 20), ("folder/b", 5 << 20)])
    storage.put("folders", b"more")
    for key, size in (("folder/a@1-2", 6 << 20), ("folder/b", 5 << 20), ("folders", 4)):
        storage.download(key, tmp_path / "received", size)
    assert (tmp_path / "received").read_bytes() == content + b"more"
    assert sorted(storage.list_objects("folder")) == ["folder/a@1-2", "folder/b"]
    storage.delete(["folder/b", "absent"])
    assert list(storage.list_objects("folder")) == ["folder/a@1-2"]
    assert storage.get("folder/b") is None
    with pytest.raises(StorageError, match="cannot read folder/b"):
        storage.download("folder/b", tmp_path / "received", 1)


def test_an_object_that_is_longer_than_its_entry_says_is_not_downloaded(any_storage: Storage, tmp_path: Path):
    any_storage.put("a", bytes(1000))
    with pytest.raises(StorageError, match="longer than the 999 bytes"):
        any_storage.download("a", tmp_path / "a", 999)


def test_times_are_those_of_the_storage(any_storage: Storage):
    any_storage.put("a", b"1")
    stored = any_storage.get("a")
    assert stored is not None
    assert any_storage.list_objects("") == {"a": stored.modified}
    assert stored.modified <= read_clock(any_storage) <= stored.modified + 60
    assert list(any_storage.list_objects("")) == ["a"]


def test_no_upload_has_parts_that_a_killed_process_would_leave(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
):
    import obstore

    uploads: list[bool] = []
    real_put = obstore.put

    def put(store: S3Store, key: str, content: bytes, **options: Any) -> Any:
        uploads.append(options["use_multipart"])
        return real_put(store, key, content, **options)

    monkeypatch.setattr(obstore, "put", put)
    storage.put("a", bytes(20 << 20))
    assert uploads == [False]


def test_a_storage_with_conditions_passes_the_check_and_keeps_nothing_of_it(storage: ObjectStorage):
    storage.check_conditions()
    assert not storage.list_objects("")


def test_names_are_the_first_parts_of_keys(storage: ObjectStorage):
    for key in ("b/head", "a/head", "a/x", "file"):
        storage.put(key, b"")
    assert storage.list_names() == ["a", "b"]


def test_a_storage_that_ignores_conditions_is_refused(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
):
    import obstore

    real_put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, key, content, **_: real_put(store, key, content))
    with pytest.raises(ConfigError, match="ignores the condition If-None-Match and If-Match"):
        storage.check_conditions()


def test_a_missing_bucket_and_a_silent_server_are_one_line_without_credentials(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(
        StorageError, match=r"^s3://no-such-bucket/x: cannot write a: there is no such bucket"
    ):
        open_storage("s3://no-such-bucket/x").put("a", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        StorageError, match="cannot read a: the server does not answer at http://127"
    ) as error:
        open_storage(BUCKET, retry_timeout_s=0.5).get("a")
    assert "\n" not in str(error.value)
    assert "test-" not in str(error.value)


def test_a_conditional_write_whose_connection_is_lost_is_repeated_and_no_conflict_with_itself(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
):
    import obstore
    from obstore.exceptions import GenericError

    real_put, lost = obstore.put, ["create", "replace"]

    def put(store: S3Store, key: str, content: bytes, mode: Any = None) -> Any:
        """Write, and lose the first two responses."""
        written = real_put(store, key, content, mode=mode)
        if lost:
            lost.pop()
            raise GenericError("error sending request for url")
        return written

    monkeypatch.setattr(obstore, "put", put)
    etag = storage.put_if_absent("head", b"1")
    storage.replace_if("head", b"2", etag)
    stored = storage.get("head")
    assert stored is not None
    assert stored.content == b"2"
    assert lost == []


def test_what_an_earlier_attempt_is_creating_is_no_object_of_another_process(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
):
    import obstore
    from obstore.exceptions import AlreadyExistsError

    real_put, refused = obstore.put, [1, 2]

    def put(store: S3Store, key: str, content: bytes, mode: Any = None) -> Any:
        """Refuse twice, as S3 does while a request of the same key is in progress, which then fails."""
        if refused:
            refused.pop()
            raise AlreadyExistsError("status code: 409: ConditionalRequestConflict")
        return real_put(store, key, content, mode=mode)

    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr("nonet.storage.objects._RETRY_PAUSE_S", 0.0)
    assert storage.put_if_absent("head", b"1")
    with pytest.raises(StorageConflict):
        storage.put_if_absent("head", b"2")
    assert refused == []


def test_requests_are_repeated_while_the_connections_to_the_server_are_cut_for_seconds(
    s3: dict[str, str], tmp_path: Path
):
    (tmp_path / "file").write_bytes(b"1" * 100_000)
    with place_proxy("127.0.0.1") as proxy, ThreadPoolExecutor(8) as threads:
        storage = open_storage(f"{BUCKET}/cut")
        storage.put("old", b"1")
        head = storage.put_if_absent("head", b"1")
        proxy.cut(4.0)
        calls = [
            threads.submit(storage.get, "old"),
            threads.submit(storage.put, "new", b"2"),
            threads.submit(storage.put_if_absent, "absent", b"3"),
            threads.submit(storage.replace_if, "head", b"4", head),
            threads.submit(upload_file, storage, tmp_path / "file", [("file", 100_000)]),
            threads.submit(storage.list_objects, "old"),
        ]
        for call in calls:
            call.result(timeout=60)
        assert set(storage.list_objects("")) == {"old", "head", "new", "absent", "file"}
        stored = storage.get("head")
        assert stored is not None
        assert stored.content == b"4"


@pytest.mark.parametrize("address", ["gs://bucket", "s3://", "s3://b?x=1", "s3://UPPER/x", "feed"])
def test_an_address_that_is_not_of_s3_is_refused(address: str):
    with pytest.raises(ConfigError, match="it must be s3://bucket or s3://bucket/folder"):
        open_storage(address)


def test_requests_are_counted_by_operation_and_conflicts_are_no_failures(storage: ObjectStorage):
    before = get_request_counts().get("write", {"requests": 0, "failures": 0, "seconds": 0.0})
    storage.put_if_absent("head", b"1")
    with pytest.raises(StorageConflict):
        storage.put_if_absent("head", b"2")
    after = get_request_counts()["write"]
    assert after["requests"] - before["requests"] == 2
    assert after["failures"] == before["failures"]
    assert after["seconds"] > before["seconds"]
    missing = open_storage("s3://no-such-bucket-of-this-server")
    with pytest.raises(StorageError):
        missing.put("a", b"1")
    assert get_request_counts()["write"]["failures"] == after["failures"] + 1


def test_a_request_that_does_not_return_is_described_as_a_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_log, "_SLOW_S", 0.0)
    with request_log.log_request("write", "write head in s3://feed/run"):
        assert describe_pending_requests() == [
            "the storage has not answered for 0 s: write head in s3://feed/run"
        ]
    assert describe_pending_requests() == []
