"""Folders of the sequential-recommendation papers: one user a line, `user item item ...`, oldest first.

src is such a file, or a folder with `sequences.txt` and perhaps `timestamps.txt` (user and unix seconds, -1
unknown, line by line alike), `item_text.tsv` (item_id, text or title, ...) and `item2attributes.json` ({item:
[attribute, ...]}: categories, after those of the text). The order of the file is the truth: a time below one
before it, or an unknown one, is raised to it (and counted); without timestamps the position in the line is
the time.
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
from nonet.samples.tables import split_categories


def import_sequences(src: PathLike, dst: PathLike) -> Counts:
    """Import sequences to dst/interactions.parquet and dst/items.parquet; the counts include the times that were raised."""
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
        again = next(user for user in users if user in seen or seen.add(user))
        raise DataError(f"sequences {path}: user {again} has more than one line.")
    if not any(lines):
        raise DataError(f"sequences {path}: no line has an item; wanted `user item item ...` a line.")


def _read_times(path: Path | None, users: list[str], lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Return non-decreasing unix seconds [N] per user, and how many had to be raised for that."""
    starts = np.cumsum(lengths) - lengths
    if path is None or not path.is_file():
        return np.arange(lengths.sum()) - np.repeat(starts, lengths), 0
    who, lines = read_jagged_lines(path, "sequences")
    for number, (user, length) in enumerate(zip(users, lengths, strict=True)):
        if number >= len(who) or who[number] != user or len(lines[number]) != length:
            got = f"user {who[number]} and {len(lines[number])} times" if number < len(who) else "nothing"
            raise DataError(
                f"sequences {path}: line {number + 1} has {got}, wanted user {user} and {length} times as "
                "in sequences.txt."
            )
    read_times = parse_integers([time for line in lines[: len(users)] for time in line], f"sequences {path}")
    row = np.repeat(np.arange(len(lengths)), lengths)
    late = np.iinfo(np.int64).max
    earliest = np.full(len(lengths), late)
    np.minimum.at(earliest, row, np.where(read_times < 0, late, read_times))
    known = np.where(read_times < 0, np.where(earliest == late, 0, earliest)[row], read_times)
    span = (
        int(known.max(initial=0)) + 1
    )  # offsets each user above the one before it, so that one running maximum serves all
    time = np.maximum.accumulate(known + row * span) - row * span
    return time, int((time != read_times).sum())


def _add_text(items: pa.Table, path: Path) -> pa.Table:
    """Join the columns of item_text.tsv; `text` becomes the title if there is no `title`."""
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
    row = {key: i for i, key in enumerate(text["item_id"].to_pylist())}
    place = pa.array([row.get(key) for key in keys], pa.int64())
    for name in names:
        if name != "item_id":
            items = items.append_column(name, text[name].take(place))
    return items


def _add_attributes(items: pa.Table, path: Path) -> pa.Table:
    """Add attributes as categories, in the order of the file, after those of the text; each occurs once."""
    if not path.is_file():
        return items
    try:
        attributes = json.loads(path.read_text(encoding="utf-8"))
        keys = items["item_id"].cast(pa.string()).to_pylist()
        of_item = [list(map(str, attributes.get(key, []))) for key in keys]
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise DataError(f"sequences {path}: not a JSON object of item -> list of attributes.") from None
    if "categories" in items.column_names:
        of_text = split_categories(items["categories"].cast(pa.string()))
        of_item = [[*text, *more] for text, more in zip(of_text, of_item, strict=True)]
        items = items.drop_columns("categories")
    once = [list(dict.fromkeys(every)) for every in of_item]
    return items.append_column("categories", pa.array(once, pa.list_(pa.string())))


def _to_text(values: list[str] | np.ndarray) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, pa.string())])
