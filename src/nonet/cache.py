"""The cache of this node, below `$NONET_CACHE`, by default `~/.cache/nonet`: what is fetched or made once and used again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nonet.errors import ConfigError
from nonet.units import parse_bytes

_DEFAULT_BYTES = "50GB"


def find_cache_root() -> Path:
    """Return the folder of the cache. Raises ConfigError for a user without a home, unless $NONET_CACHE is set."""
    try:
        return Path(os.environ.get("NONET_CACHE") or Path.home() / ".cache" / "nonet").absolute()
    except RuntimeError:
        raise ConfigError("this user has no home for the cache; set NONET_CACHE to a folder") from None


def read_cache_bytes() -> int:
    """Return $NONET_CACHE_BYTES: how many bytes the cache may take.

    Raises:
        ConfigError: The variable is not a size.
    """
    text = os.environ.get("NONET_CACHE_BYTES") or _DEFAULT_BYTES
    try:
        return parse_bytes(text)
    except ValueError:
        raise ConfigError(
            f"NONET_CACHE_BYTES: wanted a size such as {_DEFAULT_BYTES}, got {text!r}"
        ) from None


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, from which other processes may delete; 0 if there is no folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """What a cache holds and can get again.

    Attributes:
        kind: Its kind: fetched, artifacts, downloads or runs (`nonet.storage.node_cache`).
        path: Its folder or file.
        size: Its bytes.
        used: When it was used last, in unix seconds.
        delete: Deletes it unless a process uses it, and returns whether it is gone.
    """

    kind: str
    path: Path
    size: int
    used: float
    delete: Callable[[], bool]
