"""Reads profiles of tables: only the needed columns, and only once per process while the files do not change.

Above five million events, the profile is computed for a sample of the users, drawn by a hash of their ids, and counts are
scaled up; occurrences of items are counted over all events. Memory does not grow with the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError
from nonet.samples.preparation import EventLog, ItemIndex, collect_items
from nonet.samples.profiles.profile import DataProfile, ItemColumn, measure_profile, scale_profile
from nonet.samples.sequences import index_items, parse_min_events, select_events
from nonet.samples.tables import (
    Columns,
    as_numbers,
    compile_condition,
    compute_keys,
    count_rows,
    find_parquet,
    find_uncut_delimiter,
    read_interactions,
    read_items,
    read_parquet_schema,
    to_table_format,
)

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_ROLES = ("user_id", "item_id", "timestamp", "event", "rating")
MOST_EVENTS, SAMPLED_EVENTS = (
    5_000_000,
    2_000_000,
)  # largest log that is read completely; approximate events of a sample
_MANY = 100  # more distinct ratings than this are counted by quantiles
_cache: dict[Any, tuple[Any, ...]] = {}  # tables as arrays; only the newest is kept


def read_profile(
    interactions: str,
    items: str | None = None,
    columns: Columns = None,
    *,
    where: str | None = None,
    keep: Mapping[str, int] | None = None,
) -> DataProfile:
    """Read the profile of the data that a scenario names, after `where` and `keep`.

    Tables are cached by path and modification time, so another `keep` does not read them again.

    Args:
        interactions: Path of the interactions.
        items: Path of the items; None if there are none.
        columns: Column names, or the whole table format.
        where: Condition on the interactions.
        keep: Least `item_events` and `user_events`.

    Raises:
        DataError: If the data are not valid.
        ConfigError: If an option is not valid.
    """
    arrays = _get_arrays(interactions, items, columns, where)
    user, item, time, kind, rating, catalogue, item_columns, padded, every, occurs = arrays
    if occurs is None:
        events, kept = select_events(user, item, int(user.max()) + 1, catalogue, keep or {})
    else:
        events, kept = _keep_sample_events(user, item, occurs, keep or {})
    events = events[np.lexsort((time[events], user[events]))]
    lengths = np.bincount(user[events])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[lengths > 0])])
    place = np.cumsum(kept) - 1
    profile = measure_profile(
        offsets,
        place[item[events]],
        time[events],
        int(kept.sum()),
        kinds=_count_values(kind, events),
        ratings=_count_values(rating, events),
        columns=item_columns,
        zero_padded=padded,
    )
    return profile if occurs is None else scale_profile(profile, every, occurs[kept])


def _keep_sample_events(
    user: np.ndarray, item: np.ndarray, occurs: np.ndarray, keep: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Filter the events of a sample once, by the items' occurrences in all events, then by users."""
    item_least, user_least = parse_min_events(keep)
    kept = occurs >= item_least
    events = np.flatnonzero(kept[item])
    events = events[np.bincount(user[events], minlength=int(user.max()) + 1)[user[events]] >= user_least]
    if not len(events):
        raise DataError(f"keep {dict(keep)} leaves none of the events of a sample. Ask for fewer events.")
    return events, kept


def _get_arrays(interactions: str, items: str | None, columns: Columns, where: str | None) -> tuple[Any, ...]:
    """Return the arrays of the tables from the cache, or read them."""
    key = (_stamp_files(interactions, "interactions"), items and _stamp_files(items, "items"))
    table_format = to_table_format(columns)
    key = (*key, tuple(sorted(table_format.columns.items())), frozenset(table_format.missing), where)
    if key not in _cache:
        arrays = _read_arrays(interactions, items, columns, where)
        _cache.clear()
        _cache[key] = arrays
    return _cache[key]


def _stamp_files(path: str, what: str) -> tuple[Any, ...]:
    """Return path, size and modification time of the files behind a path, as a cache key."""
    system, files = find_parquet(path, what)
    return tuple((info.path, info.size, info.mtime_ns) for info in system.get_file_info(files))


def _read_arrays(
    interactions: str, items: str | None, columns: Columns, where: str | None
) -> tuple[Any, ...]:
    """Read the tables as arrays."""
    if count_rows(interactions, "interactions") > MOST_EVENTS:
        return _read_sample(interactions, items, columns, where)
    only = None if where else _ROLES
    table = read_interactions(interactions, columns, only)
    if where:
        table = table.filter(compile_condition(where, table.schema, name="data.where"))
        if not len(table):
            raise DataError(f"data.where: {where!r} matches no interaction.")
    if items is None:
        item, ids = _encode_values(table["item_id"])
        size, item_columns, item_ids = len(ids), (), table["item_id"]
    else:
        catalogue, item_columns = _read_item_columns(items, columns)
        item, size = index_items(table["item_id"], catalogue["item_id"]), len(catalogue)
        item_ids = catalogue["item_id"]
    padded = _find_zero_padded({"user": table["user_id"], "item": item_ids})
    return *_encode_events(table, item), size, item_columns, padded, 1, None


def _encode_events(table: pa.Table, item: np.ndarray) -> tuple[Any, ...]:
    """Return user codes, catalogue rows, times, and codes of kinds and ratings with their values."""
    user = _encode_values(table["user_id"])[0]
    kind = _encode_values(table["event"].cast(pa.string())) if "event" in table.column_names else None
    rating = _encode_ratings(table["rating"]) if "rating" in table.column_names else None
    return user, item, table["timestamp"].to_numpy(), kind, rating


def _read_sample(
    interactions: str, items: str | None, columns: Columns, where: str | None
) -> tuple[Any, ...]:
    """Read the events of one user in `every` as `_read_arrays`, and count the occurrences of each item over all events."""
    log = EventLog(interactions, columns)
    catalogue, item_columns = (
        (collect_items(log, where), ()) if items is None else _read_item_columns(items, columns)
    )
    index = ItemIndex(catalogue["item_id"].combine_chunks())
    occurs, every = np.zeros(len(catalogue), np.int64), -(-log.rows // SAMPLED_EVENTS)
    parts: list[Any] = []
    rows: list[np.ndarray] = []
    for part in log.slices:
        table, finer = log.read(part, log.select_columns(where))
        if finer is not None:
            table = table.take(pa.array(np.argsort(finer, kind="stable")))
        if where:
            table = table.filter(compile_condition(where, table.schema, name="data.where"))
        item = index.locate(table["item_id"], f"interactions {part.file}")
        occurs += np.bincount(item, minlength=len(occurs))
        mine = compute_keys("user", as_numbers(table["user_id"])).view(np.uint64) % np.uint64(every) == 0
        parts.append(
            table.select([name for name in _ROLES if name in table.column_names]).filter(pa.array(mine))
        )
        rows.append(item[mine])
    table = pa.concat_tables(parts)
    if not len(table):
        raise DataError(f"data.where: {where!r} matches no interaction.")
    padded = _find_zero_padded({"user": table["user_id"], "item": catalogue["item_id"]})
    return *_encode_events(table, np.concatenate(rows)), len(catalogue), item_columns, padded, every, occurs


def _find_zero_padded(ids: Mapping[str, pa.ChunkedArray]) -> Mapping[str, str]:
    """Return by name the first id with a zero in front, of columns of text that hold nothing but digits."""
    found: dict[str, str] = {}
    for name, column in ids.items():
        if not _is_text(column.type):
            continue
        distinct = column.unique()
        padded = pc.match_substring_regex(distinct, r"^0[0-9]+$")
        if pc.any(padded).as_py() and pc.all(pc.match_substring_regex(distinct, r"^[0-9]+$")).as_py():
            found[name] = distinct.filter(padded)[0].as_py()
    return found


def _encode_values(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """Return a code for each value [N] int64, and the values."""
    coded = column.combine_chunks().dictionary_encode()
    return coded.indices.fill_null(-1).to_numpy().astype(np.int64), coded.dictionary.to_pylist()


def _encode_ratings(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """Encode ratings as `_encode_values`; if there are many values, use the nearest quantile below."""
    codes, values = _encode_values(column)
    if len(values) <= _MANY:
        return codes, values
    numbers = column.to_numpy()
    steps = np.unique(np.nanquantile(numbers, np.linspace(0, 1, _MANY), method="lower"))
    place = np.searchsorted(steps, np.nan_to_num(numbers, nan=steps[0]), "right") - 1
    return np.where(np.isnan(numbers), -1, place), steps.tolist()


def _count_values(coded: tuple[np.ndarray, list[Any]] | None, events: np.ndarray) -> dict[Any, int]:
    """Count the events of each value, most frequent first; missing values are not counted."""
    if coded is None:
        return {}
    codes, values = coded
    counts = np.bincount(codes[events] + 1, minlength=len(values) + 1)[1:]
    order = np.argsort(-counts, kind="stable")
    return {values[i]: int(counts[i]) for i in order if counts[i] and values[i] is not None}


def _read_item_columns(path: str, columns: Columns) -> tuple[pa.Table, tuple[ItemColumn, ...]]:
    """Read the item ids, and describe every column that a tokenizer could read; number columns are described by name only."""
    schema = read_parquet_schema(path, "items")
    read = {field.name for field in schema if _get_kind(field.type) in ("text", "list")}
    named = to_table_format(columns).columns
    ids = {"item_id", *(source for role, source in named.items() if role in ("item", "item_id"))}
    table = read_items(path, columns, {*read, *ids})
    described = [_describe_column(name, table[name]) for name in table.column_names if name != "item_id"]
    rest = [field for field in schema if field.name not in read | ids]
    return table.select(["item_id"]), (
        *described,
        *(ItemColumn(field.name, _get_kind(field.type)) for field in rest),
    )


def _describe_column(name: str, column: pa.ChunkedArray) -> ItemColumn:
    """Describe one column of the items."""
    kind, rows = _get_kind(column.type), max(1, len(column))
    if kind == "list":
        sizes = pc.list_value_length(column).fill_null(0).to_numpy()
        words = len(pc.list_flatten(column).unique())
        single = sizes.max(initial=0) == 1 and pa.types.is_string(column.type.value_type)
        mark = find_uncut_delimiter(pc.list_flatten(column).to_pylist()) if single else None
        return ItemColumn(name, kind, float((sizes > 0).mean()) if len(sizes) else 0.0, words / rows, mark)
    if kind == "text":
        text = column.drop_null()
        empty = pc.sum(pc.equal(pc.utf8_length(text), 0)).as_py() or 0
        return ItemColumn(name, kind, (len(text) - empty) / rows, len(text.unique()) / rows)
    return ItemColumn(name, kind)


def _get_kind(kind: pa.DataType) -> str:
    """Return text, list, number or other."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if _is_text(value):
        return "text"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "list" if _is_text(kind.value_type) else "other"
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return "number" if number else "other"


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
