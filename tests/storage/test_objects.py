"""Conditional writes, and errors of one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nonet.errors import ConfigError, StorageConflict, StorageError
from nonet.storage import ObjectStorage, open_storage
from tests.s3 import BUCKET


@pytest.fixture
def storage(s3: dict[str, str], request: pytest.FixtureRequest) -> ObjectStorage:
    return open_storage(f"{BUCKET}/{request.node.name}")


def test_an_object_is_created_once_and_replaced_only_by_who_has_seen_it(storage: ObjectStorage):
    first = storage.put_if_absent("head", b"1")
    with pytest.raises(StorageConflict, match="written by another process"):
        storage.put_if_absent("head", b"2")
    second = storage.replace_if("head", b"2", first)
    with pytest.raises(StorageConflict):
        storage.replace_if("head", b"3", first)
    stored = storage.get("head")
    assert stored is not None
    assert (stored.content, stored.etag) == (b"2", second)


def test_a_repeated_write_whose_first_response_was_lost_is_no_conflict(storage: ObjectStorage):
    etag = storage.put_if_absent("head", b"1")
    assert storage.put_if_absent("head", b"1") == etag


def test_files_keep_their_bytes_and_keys_are_listed_and_deleted(storage: ObjectStorage, tmp_path: Path):
    content = os.urandom(11 << 20)  # more than one part of an upload
    (tmp_path / "sent").write_bytes(content)
    storage.upload("folder/a@1-2", tmp_path / "sent")
    storage.put("folder/b", b"more")
    storage.put("other", b"")
    for key in ("folder/a@1-2", "folder/b"):
        storage.download(key, tmp_path / "received")
    assert (tmp_path / "received").read_bytes() == content + b"more"
    assert sorted(storage.list_keys("folder")) == ["folder/a@1-2", "folder/b"]
    assert storage.list_names() == ["folder"]
    storage.delete(["folder/b", "absent"])
    assert list(storage.list_keys("folder")) == ["folder/a@1-2"]
    assert storage.get("folder/b") is None


def test_a_storage_with_conditions_passes_the_check_and_keeps_nothing_of_it(storage: ObjectStorage):
    storage.check_conditions()
    assert not list(storage.list_keys(""))


def test_a_storage_that_ignores_conditions_is_refused(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
):
    import obstore

    real_put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, key, content, mode=None: real_put(store, key, content))
    with pytest.raises(ConfigError, match="ignores the condition If-None-Match and If-Match"):
        storage.check_conditions()


def test_a_missing_bucket_and_a_silent_server_are_one_line_without_credentials(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(
        StorageError, match=r"^s3://no-such-bucket/x: cannot write a: there is no such bucket"
    ):
        open_storage("s3://no-such-bucket/x").put("a", b"1")
    monkeypatch.setattr("nonet.storage.objects._MAX_RETRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        StorageError, match="cannot read a: the server does not answer at http://127"
    ) as error:
        open_storage(BUCKET).get("a")
    assert "\n" not in str(error.value)
    assert "test-" not in str(error.value)


@pytest.mark.parametrize("address", ["gs://bucket", "s3://", "s3://b?x=1", "s3://UPPER/x", "feed"])
def test_an_address_that_is_not_of_s3_is_refused(address: str):
    with pytest.raises(ConfigError, match="it must be s3://bucket or s3://bucket/folder"):
        open_storage(address)
