"""The commands `nonet cache list` and `nonet cache prune`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nonet.deploy.verbs.questions import JsonOption
from nonet.errors import ConfigError

if TYPE_CHECKING:
    from nonet.cache import CacheEntry

cache = typer.Typer(
    no_args_is_help=True, help="What this node keeps for later runs: prepared data, fetched models."
)

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder", help="The folder of data.cache; by default the cache of this node, $NONET_CACHE."
    ),
]
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


@cache.command("list")
def show(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """List the entries of the cache, those used longest ago first; downloads of stored runs are one entry."""
    from nonet.cache import find_cache_root
    from nonet.deploy.verbs.listing import format_table
    from nonet.storage import list_cache_entries

    entries = list_cache_entries(folder)
    rows = [_make_row(entry) for entry in entries if entry.kind != "downloads"]
    if downloads := [entry for entry in entries if entry.kind == "downloads"]:
        total, newest = sum(entry.size for entry in downloads), max(entry.used for entry in downloads)
        content = f"{len(downloads)} files of stored runs"
        rows.append({"kind": "downloads", "content": content, "bytes": total, "used": newest, "key": ""})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    place = folder or find_cache_root()
    if not rows:
        print(f"{place} has no entries")
        return
    now = time.time()
    shown = [
        {
            "kind": row["kind"],
            "content": row["content"],
            "size": f"{row['bytes'] / 1e6:,.1f} MB",
            "used": f"{_format_age(now - row['used'])} ago",
            "key": row["key"][:8],
        }
        for row in rows
    ]
    print(format_table(shown))
    print(f"{sum(row['bytes'] for row in rows) / 1e9:,.3f} GB in {place}")


@cache.command()
def prune(
    unused_for: Annotated[
        str, typer.Option(metavar="TIME", help="Only what was not used for so long, such as 30d.")
    ] = "0s",
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete entries of the cache that no process uses. Runs keep the files that they have taken from it."""
    from nonet.storage import list_cache_entries
    from nonet.units import parse_seconds

    try:
        oldest = time.time() - parse_seconds(unused_for)
    except ValueError as error:
        raise ConfigError(f"--unused-for: {error}") from None
    old = [entry for entry in list_cache_entries(folder) if entry.used <= oldest]
    deleted = [entry for entry in old if entry.delete()]
    freed = sum(entry.size for entry in deleted)
    if as_json:
        print(json.dumps({"deleted": len(deleted), "bytes": freed, "in_use": len(old) - len(deleted)}))
        return
    in_use = f"; {len(old) - len(deleted)} in use" if len(deleted) < len(old) else ""
    print(f"deleted: {len(deleted)} of {len(old)}, {freed / 1e9:,.3f} GB{in_use}")


def _make_row(entry: CacheEntry) -> dict[str, Any]:
    """Return the columns of an entry in the list: kind, content, bytes, used in unix seconds, and key."""
    from nonet.workers.roles.artifacts import describe_entry

    files = sorted(path.name for path in entry.path.rglob("*") if path.is_file())
    content = f"{files[0]} and {len(files) - 1} more files" if len(files) > 1 else "".join(files)
    if entry.kind == "runs":
        content = f"run {entry.path.name}, which is in storage"
    if entry.kind == "artifacts":
        content = describe_entry(entry.path)
    return {
        "kind": entry.kind,
        "content": content,
        "bytes": entry.size,
        "used": entry.used,
        "key": entry.path.name,
    }


def _format_age(seconds: float) -> str:
    """Return a time in its largest unit."""
    return next(
        (f"{seconds / size:.0f} {unit}" for unit, size in _UNITS if seconds >= size), f"{seconds:.0f} s"
    )
