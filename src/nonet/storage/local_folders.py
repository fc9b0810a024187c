"""Where the local copies of stored runs are: `$NONET_CACHE/<place>/<run>`, by default below ~/.cache/nonet.

All nodes of a run have its copy at the same path, because paths are sent between them. `<place>` is derived from the address
of the storage, so that runs of two storages never share a folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

from nonet.atomic import write_whole
from nonet.cache import count_bytes, find_cache_root, read_cache_bytes

ADDRESS_FILE = ".storage.json"  # in a local copy: the address of the run
USED_LOCK = ".used"  # in a local copy: locked, shared, by every process that has it open


def make_local_folder(storage_address: str, run_id: str) -> Path:
    """Return the path of the local copy of a run."""
    place = f"{os.environ.get('AWS_ENDPOINT_URL', '')}|{storage_address.rstrip('/')}"
    return find_cache_root() / hashlib.sha256(place.encode()).hexdigest()[:8] / run_id


def find_local_runs() -> list[Path]:
    """Return the local copies of stored runs."""
    return sorted(file.parent for file in find_cache_root().glob(f"*/*/{ADDRESS_FILE}"))


def write_address(folder: Path, address: str) -> None:
    """Write the address of a run into its local copy."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / ADDRESS_FILE, json.dumps({"address": address}).encode())


def read_address(folder: Path) -> str | None:
    """Return the address of the run of which a folder is the local copy; None if the folder is no such copy."""
    file = folder / ADDRESS_FILE
    return json.loads(file.read_text(encoding="utf-8"))["address"] if file.is_file() else None


def lock_used(folder: Path) -> None:
    """Mark a local copy as used until this process ends, so that it is not deleted to make room."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / USED_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.utime(folder / USED_LOCK)


def make_room(kept_folder: Path) -> None:
    """Delete local copies that no process uses, those used longest ago first, until all copies fit into the cache.

    Args:
        kept_folder: The copy that is about to be used.
    """
    limit = read_cache_bytes()
    sizes = {folder: count_bytes(folder) for folder in find_local_runs()}
    total = sum(sizes.values())
    unused = [folder for folder in sizes if folder != kept_folder]
    for folder in sorted(unused, key=_get_used_time):
        if total <= limit:
            return
        if _delete_unused(folder):
            total -= sizes[folder]


def _get_used_time(folder: Path) -> float:
    """Return when a copy was used last, in unix seconds."""
    file = folder / USED_LOCK
    return file.stat().st_mtime if file.exists() else 0.0


def _delete_unused(folder: Path) -> bool:
    """Delete a copy unless a process uses it, and return whether it was deleted."""
    descriptor = os.open(folder / USED_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
