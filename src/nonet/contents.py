"""The identity of the content of a file, by which a run finds that its data have changed.

It covers all bytes of a local file. These are read once on a node: the cache of the node remembers the hash for as long as inode,
size and times stay the same. The identity of an object in object storage is the ETag that the store gives to its content. A
filesystem without ETags has sizes and times of modification only.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.cache import find_cache_root

_SETTLED_S = 2.0  # A later change may leave the times of a file that is younger as they are; its hash is not remembered.


def identify_content(system: Any, path: str) -> str:
    """Return the identity of the content of a file, such as "blake2b:..." or "etag:...".

    Args:
        system: Arrow's filesystem of the file.
        path: The path in it.

    Raises:
        OSError: The file cannot be read.
    """
    if system.type_name == "local":
        return f"blake2b:{_find_digest(path)}"
    with system.open_input_file(path) as source:
        metadata = {key.lower(): value for key, value in (source.metadata() or {}).items()}
    if etag := metadata.get(b"etag"):
        return f"etag:{etag.decode().strip(chr(34))}"
    info = system.get_file_info(path)
    return f"time:{info.size}:{info.mtime_ns}"


def _find_digest(path: str) -> str:
    """Return the hash of a local file, from the cache of the node if the file is the one that was hashed."""
    state = _read_state(path)
    record = find_cache_root() / "contents" / f"{state[0]:x}-{state[1]:x}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        remembered = json.loads(record.read_bytes())
        if remembered["state"] == state:
            return str(remembered["digest"])
    with open(path, "rb") as source:
        digest = hashlib.file_digest(source, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    newest_ns = max(state[-2:])
    if _read_state(path) == state and time.time_ns() - newest_ns >= _SETTLED_S * 1e9:
        with suppress(OSError):  # Without a cache, the file is hashed again.
            record.parent.mkdir(parents=True, exist_ok=True)
            write_whole(record, json.dumps({"state": state, "digest": digest}).encode())
    return digest


def _read_state(path: str) -> list[int]:
    """Return the device, inode, size, and times of modification and change in nanoseconds of a file."""
    stat = os.stat(Path(path))
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
