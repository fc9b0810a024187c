"""Folders at an address, such as `s3://models/Qwen3-0.6B`, fetched once per node into a bounded local cache.

An address is whatever Arrow opens by a URI: s3://, gs://, hdfs://, abfss://, file://. Credentials come from the environment. A
copy is identified by the address and the names, sizes and modification times of its files, so that a changed folder is fetched
again. It is an entry of the cache of the node (`nonet.cache`), `$NONET_CACHE/fetched`.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from nonet.cache import find_cache_root, read_cache_bytes
from nonet.errors import ConfigError, StorageError
from nonet.storage import CachedFolders, fetch_stored, is_storage_address

_PAUSES_S = (0.2, 1.0)  # before the second and third attempt to read
_CHUNK_BYTES = 16 << 20
# The characters that an address may have besides percent-encoded ones. `#` would cut the address off.
_ADDRESS_CHARACTERS = re.compile(r"(?:[A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*")
_Result = TypeVar("_Result")
_used_copies: dict[
    str, Callable[[], None]
] = {}  # what ends the use of the copies that this process uses, by key


def is_address(text: str) -> bool:
    """Return whether a text is the address of a store rather than a path on this machine."""
    return "://" in text


def find_password(address: str) -> str:
    """Return an address without its user if it has a password, or an access key and its secret; "" if it has none.

    Containers of Azure stand where other addresses have a user: `abfss://container@account.dfs.core.windows.net/folder`.
    """
    scheme, _, location = address.partition("://")
    is_bucket = scheme in ("s3", "gs")
    # A secret of S3 may have slashes.
    user, at, _ = (location if is_bucket else location.partition("/")[0]).rpartition("@")
    if not at or not (":" in user or (is_bucket and "/" not in user)):
        return ""
    return f"{scheme}://{location[len(user) + 1 :]}"


def open_filesystem(address: str) -> tuple[Any, str]:
    """Open the Arrow filesystem of an address, and return it with the path of the address in it, percent-decoded.

    Raises:
        pyarrow.ArrowInvalid: A character of the address must be percent-encoded; or another error of Arrow.
    """
    import pyarrow as pa
    from pyarrow import fs

    valid = _ADDRESS_CHARACTERS.match(address)
    end = valid.end() if valid else 0
    if end < len(address):
        character = address[end]
        raise pa.ArrowInvalid(
            f"an address is percent-encoded: write {character!r} as {quote(character, safe='')}, as in {encode_path(address)}"
        )
    return fs.FileSystem.from_uri(address)


def encode_path(path: str) -> str:
    """Percent-encode what an address must not contain as it is; what is encoded stays as it is."""
    parts = re.split(r"(%[0-9A-Fa-f]{2})", path)
    return "".join(
        part if index % 2 else quote(part, safe=":/?[]@!$&'()*+,;=~") for index, part in enumerate(parts)
    )


def fetch_folder(address: str, label: str) -> str:
    """Return the path of a local folder or file with the content of an address; a path is returned unchanged.

    The address of a run in object storage gives the local copy of the run, with its newest checkpoint.

    Args:
        address: A URI or a path.
        label: The key of the scenario that has the address, for messages.

    Raises:
        ConfigError: Nothing is there, it cannot be read, or it is larger than the cache.
    """
    if not is_address(address):
        return address
    if (stored := _fetch_stored(address)) is not None:
        return str(stored)
    listing = _list_files(address, label)
    if listing.system.type_name == "local":
        return listing.root
    key = hashlib.sha256(f"{address}\n{listing.files}".encode()).hexdigest()[:32]
    fetched = CachedFolders(find_cache_root() / "fetched")
    if key not in _used_copies:
        _used_copies[key] = fetched.pin(key)  # no other process deletes the copy from now on
    if not (copy := fetched.root / key).is_dir():
        with fetched.make(key):  # one process fetches, and others wait for it
            if not copy.is_dir():
                fetched.make_room_for(_measure(listing, address, label))
                fetched.add(key, lambda draft: _download(listing, draft, address, label))
    return str(copy if listing.is_folder else copy / listing.files[0][0])


def _fetch_stored(address: str) -> Path | None:
    """Return the local copy of a stored run, or of a part of it; None if the address belongs to no stored run."""
    if not is_storage_address(address) or find_spec("obstore") is None:
        return None
    try:
        return fetch_stored(address)
    except StorageError:  # Arrow reads it, for example without credentials, or says what is wrong
        return None


def check_readable(address: str, label: str) -> None:
    """Raise ConfigError if there is nothing to read at an address; a path is not checked."""
    if is_address(address):
        _list_files(address, label)


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files at an address.

    Attributes:
        system: Arrow's filesystem.
        root: The path of the folder or file in it.
        is_folder: Whether the root is a folder.
        files: (path below the root or name of the root, bytes, modification time) of each file, sorted.
    """

    system: Any
    root: str
    is_folder: bool
    files: tuple[tuple[str, int, str], ...]


def _list_files(address: str, label: str) -> _Listing:
    """List the files at an address. Raises ConfigError if there are none or they cannot be listed."""
    from pyarrow import fs

    def read() -> _Listing:
        system, root = open_filesystem(address)
        info = system.get_file_info(root)
        if info.type == fs.FileType.File:
            return _Listing(system, root, False, ((info.base_name, info.size, str(info.mtime)),))
        found = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        files = [item for item in found if item.type == fs.FileType.File]
        prefix = root.rstrip("/") + "/"
        rows = sorted((item.path.removeprefix(prefix), item.size, str(item.mtime)) for item in files)
        return _Listing(system, root, True, tuple(rows))

    listing = _read_with_retries(read, address, label)
    if not listing.files:
        raise ConfigError(f"{label}: {address}: there is no file; check the address")
    return listing


def _measure(listing: _Listing, address: str, label: str) -> int:
    """Return the bytes of the files of a listing. Raises ConfigError if the cache is smaller."""
    total_bytes = sum(size for _, size, _ in listing.files)
    if total_bytes > (limit := read_cache_bytes()):
        raise ConfigError(
            f"{label}: {address} has {total_bytes / 1e9:.3g} GB, and the cache takes {limit / 1e9:.3g} GB; "
            "raise NONET_CACHE_BYTES"
        )
    return total_bytes


def _download(listing: _Listing, folder: Path, address: str, label: str) -> None:
    """Copy the files of a listing into a folder."""
    for name, _, _ in listing.files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = f"{listing.root.rstrip('/')}/{name}" if listing.is_folder else listing.root

        def read(source: str = source, target: Path = target) -> None:
            with listing.system.open_input_stream(source) as stream, target.open("wb") as out:
                while chunk := stream.read(_CHUNK_BYTES):
                    out.write(chunk)

        _read_with_retries(read, address, label)


def _read_with_retries(read: Callable[[], _Result], address: str, label: str) -> _Result:
    """Return the result of a read, which is repeated while the store does not respond; raise ConfigError in the end."""
    import pyarrow as pa

    for wait_s in (*_PAUSES_S, None):
        try:
            return read()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise ConfigError(
                f"{label}: {address} is not an address that Arrow opens: {_shorten(error)}"
            ) from None
        except OSError as error:
            if wait_s is None or isinstance(error, (FileNotFoundError, PermissionError)):
                raise ConfigError(f"{label}: {address} cannot be read: {_shorten(error)}") from None
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _shorten(error: BaseException) -> str:
    """Return the message of an error in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
