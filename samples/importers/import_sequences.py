"""Imports data in the format of sequential-recommendation papers: one user per line, `user item item ...`, oldest item first.

`src` is such a file, or a folder with the file `sequences.txt` and these optional files:

    timestamps.txt        `user time time ...` in unix seconds, -1 if unknown, with the same lines as sequences.txt
    item_text.tsv         columns item_id, text or title, and any others
    item2attributes.json  {item: [attribute, ...]}: added to the categories, after those of item_text.tsv

The order of the file takes precedence over the times: a time below the one before it, or an unknown one, is raised to that time.
Without timestamps, the position in the line is the time.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.importers.importers import (
    Counts,
    PathLike,
    parse_ids,
    parse_integers,
    read_csv,
    read_jagged_lines,
    write_tables,
)
from nonet.samples.importers.text_form import read_whole_text
from nonet.samples.tables import split_categories


def import_sequences(src: PathLike, dst: PathLike) -> Counts:
    """Import sequences to dst/interactions.parquet and dst/items.parquet.

    Returns:
        The number of users, items and events, and of times that were raised ("raised_times").
    """
    path = Path(src) / "sequences.txt" if Path(src).is_dir() else Path(src)
    users, lines = read_jagged_lines(path, "sequences")
    _check_lines(path, users, lines)
    lengths = np.array([len(line) for line in lines])
    time, raised = _read_times(path.parent / "timestamps.txt" if Path(src).is_dir() else None, users, lengths)
    interactions = pa.table(
        {
            "user_id": parse_ids(_to_text(np.repeat(np.array(users, object), lengths))),
            "item_id": parse_ids(_to_text([item for line in lines for item in line])),
            "timestamp": time,
        }
    )
    items = pa.table({"item_id": interactions["item_id"].combine_chunks().unique().sort()})
    if Path(src).is_dir():
        items = _add_attributes(
            _add_text(items, path.parent / "item_text.tsv"), path.parent / "item2attributes.json"
        )
    return write_tables(interactions, items, dst, f"sequences {src}") | {"raised_times": raised}


def _check_lines(path: Path, users: list[str], lines: list[list[str]]) -> None:
    """Raise DataError if the file has no lines, no items, or a user twice."""
    if not users:
        raise DataError(f"sequences {path}: the file has no line; wanted `user item item ...` a line.")
    if len(set(users)) < len(users):
        seen: set[str] = set()
        repeated = next(user for user in users if user in seen or seen.add(user))
        raise DataError(f"sequences {path}: user {repeated} has more than one line.")
    if not any(lines):
        raise DataError(f"sequences {path}: no line has an item; wanted `user item item ...` a line.")


def _read_times(path: Path | None, users: list[str], lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Return unix seconds [N] that never decrease within a user, and the number of times that were raised for that.

    Args:
        path: Path of timestamps.txt; None if there is none.
        users: The user of each line of sequences.txt.
        lengths: The number of items of each line.
    """
    starts = np.cumsum(lengths) - lengths
    if path is None or not path.is_file():
        return np.arange(lengths.sum()) - np.repeat(starts, lengths), 0
    time_users, lines = read_jagged_lines(path, "sequences")
    for number, (user, length) in enumerate(zip(users, lengths, strict=True)):
        exists = number < len(time_users)
        if not exists or time_users[number] != user or len(lines[number]) != length:
            got = f"user {time_users[number]} and {len(lines[number])} times" if exists else "nothing"
            raise DataError(
                f"sequences {path}: line {number + 1} has {got}, wanted user {user} and {length} times as "
                "in sequences.txt."
            )
    read_times = parse_integers([time for line in lines[: len(users)] for time in line], f"sequences {path}")
    row = np.repeat(np.arange(len(lengths)), lengths)
    # An unknown time becomes the user's earliest known time, or 0 if none is known; the running maximum then raises it.
    unknown = np.iinfo(np.int64).max
    earliest = np.full(len(lengths), unknown)
    np.minimum.at(earliest, row, np.where(read_times < 0, unknown, read_times))
    filled = np.where(read_times < 0, np.where(earliest == unknown, 0, earliest)[row], read_times)
    # Each user is shifted above the users before, so that one running maximum computes those of all users.
    span = int(filled.max(initial=0)) + 1
    time = np.maximum.accumulate(filled + row * span) - row * span
    return time, int((time != read_times).sum())


def _add_text(items: pa.Table, path: Path) -> pa.Table:
    """Return the items with the columns of item_text.tsv; `text` becomes the title if there is no column `title`."""
    if not path.is_file():
        return items
    text = read_csv(path, "sequences", types={"item_id": pa.string()})
    if "item_id" not in text.column_names:
        raise DataError(f"sequences {path}: no column 'item_id'; it has {', '.join(text.column_names)}.")
    names = [
        "title" if name == "text" and "title" not in text.column_names else name for name in text.column_names
    ]
    text = text.rename_columns(names)
    keys = items["item_id"].cast(pa.string()).to_pylist()
    row_by_key = {key: row for row, key in enumerate(text["item_id"].to_pylist())}
    rows = pa.array([row_by_key.get(key) for key in keys], pa.int64())  # null for an item without text
    for name in names:
        if name != "item_id":
            items = items.append_column(name, text[name].take(rows))
    return items


def _add_attributes(items: pa.Table, path: Path) -> pa.Table:
    """Return the items with the attributes of item2attributes.json added to their categories, each category once."""
    if not path.is_file():
        return items
    try:
        attributes = json.loads(read_whole_text(path, "sequences"))
        keys = items["item_id"].cast(pa.string()).to_pylist()
        categories = [list(map(str, attributes.get(key, []))) for key in keys]
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise DataError(f"sequences {path}: not a JSON object of item -> list of attributes.") from None
    if "categories" in items.column_names:
        own_categories = split_categories(items["categories"].cast(pa.string()))
        categories = [[*own, *added] for own, added in zip(own_categories, categories, strict=True)]
        items = items.drop_columns("categories")
    distinct = [list(dict.fromkeys(names)) for names in categories]
    return items.append_column("categories", pa.array(distinct, pa.list_(pa.string())))


def _to_text(values: list[str] | np.ndarray) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, pa.string())])
