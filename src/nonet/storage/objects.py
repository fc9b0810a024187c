"""Object storage with conditional writes, through obstore.

A conditional write either happens whole or fails because another writer was first, so that a small object can be moved from
one state to the next by compare-and-swap. Requests are repeated with growing pauses for at most a minute. An object is written
by one request, never as a multipart upload, so that a killed writer leaves no parts that only cost money. Credentials and
the endpoint come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
`AWS_ENDPOINT_URL`) or from the role of the machine, and are never stored.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nonet.atomic import replace_file
from nonet.errors import ConfigError, StorageConflict, StorageError
from nonet.storage.request_log import count_repetition, log_request

RETRY_TIMEOUT_S = 60.0  # from the first attempt of a request to the last
OPENING_TIMEOUT_S = 10.0  # the same for the first request to a storage, whose address may be wrong
# The time ends the attempts: pauses between them are random, so that ten attempts may take less than two seconds.
_MAX_RETRIES = 1000
_RETRY_PAUSE_S = 0.5  # before a request is repeated that obstore does not repeat
_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 120.0  # of one attempt
_CHUNK_BYTES = 8 << 20
_MAX_BYTES_IN_MEMORY = 256 << 20  # of an object that is read as a whole, such as a tree
_UPLOADS_AT_ONCE = 4  # of one file, each with its content in memory
_NO_ANSWER = "error sending request"  # in the text of errors of obstore without an answer of the server
# In the text of errors about a connection that was lost.
_NO_ANSWERS = (_NO_ANSWER, "error decoding response body", "request or response body error")
_Result = TypeVar("_Result")
_ADDRESS = re.compile(r"s3://[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9](/[^?#\s]+)*/?")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object.

    Attributes:
        content: The bytes of the object.
        etag: Identifies this content in a conditional write.
        modified: When the object was written, in unix seconds by the clock of the storage.
    """

    content: bytes
    etag: str
    modified: float


class Storage(Protocol):
    """Objects by key, with conditional writes.

    A key is a path with `/`. All methods raise StorageError if the storage cannot be used.
    """

    def get(self, key: str) -> StoredObject | None:
        """Return an object, or None if there is none."""
        ...

    def put(self, key: str, content: bytes) -> None:
        """Write an object, and replace an existing one."""
        ...

    def put_if_absent(self, key: str, content: bytes) -> str:
        """Write an object and return its ETag. Raises StorageConflict if the key has an object already."""
        ...

    def replace_if(self, key: str, content: bytes, etag: str) -> str:
        """Replace an object whose ETag is `etag`, and return the new ETag. Raises StorageConflict if it has another one."""
        ...

    def download(self, key: str, path: Path, size: int) -> None:
        """Append the content of an object to a file, which is written in parts.

        Args:
            key: The key of the object.
            path: The file.
            size: The expected number of bytes; a longer object is not read to its end.
        """
        ...

    def list_objects(self, prefix: str) -> dict[str, float]:
        """Return when each object was written, by key, for the objects below a prefix.

        Args:
            prefix: A whole path without a trailing slash.

        Returns:
            Unix seconds by the clock of the storage.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; keys without an object are ignored."""
        ...


class ObjectStorage:
    """A `Storage` below an address, or in any other store of obstore.

    Args:
        address: The address, for messages.
        store: The store of obstore.
        retry_timeout_s: Seconds from the first attempt of a request to the last.
    """

    def __init__(self, address: str, store: Any, retry_timeout_s: float = RETRY_TIMEOUT_S):
        self.address, self._store, self._retry_timeout_s = address, store, retry_timeout_s

    def get(self, key: str) -> StoredObject | None:
        """Return an object, or None if there is none."""
        import obstore

        with self._convert_errors(f"read {key}"):
            try:
                return self._repeat("read", lambda: _read_object(obstore.get(self._store, key)))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def put(self, key: str, content: bytes) -> None:
        """Write an object, and replace an existing one."""
        import obstore

        with self._convert_errors(f"write {key}"):
            self._repeat("write", lambda: obstore.put(self._store, key, content, use_multipart=False))

    def put_if_absent(self, key: str, content: bytes) -> str:
        """Write an object and return its ETag. Raises StorageConflict if the key has an object already."""
        return self._put_if(key, content, "create")

    def replace_if(self, key: str, content: bytes, etag: str) -> str:
        """Replace an object whose ETag is `etag`, and return the new ETag. Raises StorageConflict if it has another one."""
        return self._put_if(key, content, {"e_tag": etag})

    def _put_if(self, key: str, content: bytes, mode: Any) -> str:
        """Write an object under a condition, which obstore calls a mode, and return its ETag."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        end = time.monotonic() + self._retry_timeout_s
        with self._convert_errors(f"write {key}"):
            while True:
                try:
                    written = self._repeat("write", lambda: obstore.put(self._store, key, content, mode=mode))
                    return written["e_tag"] or ""
                except (AlreadyExistsError, PreconditionError):
                    # The response to an attempt that succeeded may have been lost, so that its repetition fails.
                    stored = self.get(key)
                    if stored is not None and stored.content == content:
                        return stored.etag
                    # S3 also refuses to create what an earlier attempt is creating, which may fail.
                    if stored is not None or mode != "create" or time.monotonic() > end:
                        raise StorageConflict(
                            f"{self.address}/{key} was written by another process"
                        ) from None
                time.sleep(_RETRY_PAUSE_S)

    def _repeat(self, operation: str, call: Callable[[], _Result]) -> _Result:
        """Send a request again while the server does not answer; obstore does not repeat one whose body was on its way.

        Args:
            operation: The name of the operation, for the count of repetitions.
            call: Sends the request, which may be sent several times.
        """
        from obstore.exceptions import BaseError

        end = time.monotonic() + self._retry_timeout_s
        while True:
            try:
                return call()
            except BaseError as error:
                if time.monotonic() > end or not any(text in str(error) for text in _NO_ANSWERS):
                    raise
            count_repetition(operation)
            time.sleep(_RETRY_PAUSE_S)

    def download(self, key: str, path: Path, size: int) -> None:
        """Append the content of an object to a file, which is written in parts; see `Storage`."""
        import obstore

        with self._convert_errors(f"read {key}"), path.open("ab") as file:
            start = file.tell()

            def append_object() -> None:
                """Append the content, in place of what an earlier attempt has written."""
                file.truncate(start)
                file.seek(start)
                for chunk in obstore.get(self._store, key).stream(min_chunk_size=_CHUNK_BYTES):
                    if file.write(chunk) and file.tell() - start > size:
                        raise StorageError(
                            f"{self.address}/{key} is longer than the {size} bytes of its entry"
                        )

            self._repeat("read", append_object)

    def list_objects(self, prefix: str) -> dict[str, float]:
        """Return when each object below a prefix was written, by key; see `Storage`."""
        import obstore

        with self._convert_errors(f"list {prefix}"):
            pages = self._repeat("list", lambda: list(obstore.list(self._store, prefix=prefix or None)))
        return {entry["path"]: entry["last_modified"].timestamp() for page in pages for entry in page}

    def list_names(self) -> list[str]:
        """Return the first parts of all keys, sorted, without reading all keys."""
        import obstore

        with self._convert_errors("list runs"):
            listed = self._repeat("list", lambda: obstore.list_with_delimiter(self._store))
            prefixes = listed["common_prefixes"]
            return sorted(prefix.rstrip("/") for prefix in prefixes)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; keys without an object are ignored."""
        import obstore

        listed = list(keys)
        with self._convert_errors("delete"):
            for start in range(0, len(listed), 1000):
                try:
                    self._repeat("delete", partial(obstore.delete, self._store, listed[start : start + 1000]))
                except FileNotFoundError:
                    for key in listed[start : start + 1000]:  # stores other than S3 report absent keys
                        self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        """Delete one object, if there is one."""
        import obstore

        try:
            obstore.delete(self._store, key)
        except FileNotFoundError:
            return

    def check_conditions(self) -> None:
        """Check that objects can be written and that conditional writes are refused as they should be.

        Raises:
            StorageError: Objects cannot be written.
            ConfigError: The storage ignores the conditions.
        """
        key = f".nonet-probe-{secrets.token_hex(8)}"
        try:
            ignored = []
            etag = self._put_if_refused(key, b"1", "create")
            if self._put_if_refused(key, b"2", "create"):
                ignored.append("If-None-Match")
            changed_etag = self._put_if_refused(key, b"3", {"e_tag": etag})
            if not changed_etag or self._put_if_refused(key, b"4", {"e_tag": etag}):
                ignored.append("If-Match")
        finally:
            self.delete([key])
        if ignored:
            raise ConfigError(
                f"storage: {self.address} ignores the condition {' and '.join(ignored)} of writes, so that two writers of a run "
                "would not notice each other; use a store with conditional writes, or, where only one process at a time ever "
                "opens a run, give storage: {url: ..., single_writer: true}"
            )

    def _put_if_refused(self, key: str, content: bytes, mode: Any) -> str:
        """Write an object under a condition; return its ETag, "" if the write was refused."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._convert_errors(f"write {key}"):
            try:
                return obstore.put(self._store, key, content, mode=mode)["e_tag"] or "?"
            except (AlreadyExistsError, PreconditionError):
                return ""

    @contextmanager
    def _convert_errors(self, action: str) -> Iterator[None]:
        """Count a request, and convert errors of obstore into a StorageError of one line, without the text of requests."""
        try:
            with log_request(action.partition(" ")[0], f"{action} in {self.address}"):
                yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{self.address}: cannot {action}: {_describe_error(error)}") from None


def _read_object(result: Any) -> StoredObject:
    """Return the object of an answer, after its content has arrived. Raises StorageError if it is too large for memory."""
    if result.meta["size"] > _MAX_BYTES_IN_MEMORY:
        raise StorageError(
            f"{result.meta['path']} has {result.meta['size']} bytes; it is no document of a run"
        )
    meta = result.meta
    return StoredObject(bytes(result.bytes()), meta["e_tag"] or "", meta["last_modified"].timestamp())


def read_clock(storage: Storage) -> float:
    """Return the time by the clock of a storage, in unix seconds, which is that of an object that is written and deleted.

    Raises:
        StorageError: The storage cannot be written.
    """
    key = f".nonet-clock-{secrets.token_hex(8)}"
    storage.put(key, b"")
    stored = storage.get(key)
    storage.delete([key])
    if stored is None:
        raise StorageError(f"the object {key}, which was just written, cannot be read")
    return stored.modified


def upload_file(storage: Storage, path: Path, object_sizes: Sequence[tuple[str, int]]) -> None:
    """Write the content of a file into objects, a few at a time.

    Args:
        storage: The storage.
        path: The file.
        object_sizes: The key and the number of bytes of each object, in the order of the file.
    """

    def put_range(key: str, start: int, size: int) -> None:
        with path.open("rb") as source:
            source.seek(start)
            content = source.read(size)
        if len(content) != size:
            raise StorageError(f"{path} became shorter while it was stored")
        storage.put(key, content)

    ends = accumulate(size for _, size in object_sizes)
    ranges = [(key, end - size, size) for (key, size), end in zip(object_sizes, ends, strict=True)]
    if len(ranges) == 1:
        put_range(*ranges[0])
        return
    with ThreadPoolExecutor(_UPLOADS_AT_ONCE) as executor:
        for future in [executor.submit(put_range, *item) for item in ranges]:
            future.result()


def is_storage_address(text: str) -> bool:
    """Return whether a text is an address in object storage, such as s3://bucket/folder."""
    return text.startswith("s3://")


def join_address(address: str, name: str) -> str:
    """Return the address of a name below another address."""
    return f"{address.rstrip('/')}/{name}"


def check_address(address: str) -> str:
    """Return an address without a trailing slash.

    Raises:
        ConfigError: The address is not one of S3.
    """
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(
            f"storage is {address!r}; it must be s3://bucket or s3://bucket/folder, without blanks, ? and # (a local or "
            "mounted folder is named by --run-dir or NONET_RUNS instead)"
        )
    return address.rstrip("/")


def open_storage(address: str, *, retry_timeout_s: float = RETRY_TIMEOUT_S) -> ObjectStorage:
    """Open the storage below an address, without sending a request.

    Args:
        address: The address.
        retry_timeout_s: Seconds from the first attempt of a request to the last.

    Raises:
        ConfigError: The address is not one of S3, or obstore is not installed.
    """
    address = check_address(address)
    try:
        from obstore.store import S3Store
    except ImportError:
        raise ConfigError(
            "storage: s3:// needs the package obstore; install it with pip install 'nonet[storage]'"
        ) from None
    uses_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: Any = {
        "connect_timeout": f"{_CONNECT_TIMEOUT_S:g}s",
        "timeout": f"{_REQUEST_TIMEOUT_S:g}s",
        "allow_http": uses_http,
    }
    retries: Any = {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=retry_timeout_s)}
    store = S3Store.from_url(address, client_options=options, retry_config=retries)
    return ObjectStorage(address, store, retry_timeout_s)


def download_file(storage: Storage, object_sizes: Iterable[tuple[str, int]], path: Path) -> None:
    """Write a file that consists of the contents of some objects of known sizes, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as draft:
        draft.touch()
        for key, size in object_sizes:
            storage.download(key, draft, size)


def _describe_error(error: Exception) -> str:
    """Return the kind of an error and, in a few words, its cause, without addresses of requests or signatures."""
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    status = re.search(r"status code: (\d{3}[^:<]*)", text)
    causes = {
        "PermissionDeniedError": "access is denied; check the credentials in the environment (AWS_ACCESS_KEY_ID, ...)",
        "UnauthenticatedError": "the credentials in the environment (AWS_ACCESS_KEY_ID, ...) are not accepted",
        "FileNotFoundError": "there is no such object",
    }
    if code and code[1] == "NoSuchBucket":
        return "there is no such bucket"
    kind = "PermissionDeniedError" if status and status[1].startswith("403") else type(error).__name__
    described = causes.get(kind)
    if described is None and _NO_ANSWER in text:
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        described = f"the server does not answer{f' at {endpoint}' if endpoint else ''}"
    if described is None:
        described = status[1].strip() if status else text.partition("\n")[0][:200]
    return f"{described}{f' ({code[1]})' if code else ''}"
