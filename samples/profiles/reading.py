"""Reads profiles of tables: only the needed columns, and only once per process while the files do not change.

Above five million events, the profile is computed for a sample of the users, drawn by a hash of their ids, and counts are
scaled up. Occurrences of items are counted over all events; how many of them compression and `keep` leave is estimated from the
sample. Memory does not grow with the events.
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
from nonet.samples.sequences import (
    Compress,
    drop_unknown_events,
    encode_categories,
    index_items,
    parse_min_events,
    select_events,
)
from nonet.samples.tables import (
    Columns,
    are_lists,
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

_COLUMNS = ("user_id", "item_id", "timestamp", "event", "rating")  # of the interactions that a profile reads
# The number of events of the largest log that is read completely, and the approximate number of events of a sample.
MOST_EVENTS, SAMPLED_EVENTS = 5_000_000, 2_000_000
# The weight, in events, of the mean share of items with similarly many events in that of an item.
_PRIOR_EVENTS = 20
_MAX_RATINGS = 100  # if there are more distinct ratings, they are rounded down to this many quantiles
_cache: dict[
    Any, tuple[Any, ...]
] = {}  # results of `_read_arrays` by `_get_arrays`'s key; only the newest is kept

# Shapes: N events, I items of the catalogue, n kept events.


def read_profile(
    interactions: str,
    items: str | None = None,
    columns: Columns = None,
    *,
    where: str | None = None,
    drop_unknown_items: bool = False,
    keep: Mapping[str, int] | None = None,
    compress: Compress | None = None,
) -> DataProfile:
    """Read the profile of the data that a scenario names, after `where`, compression and `keep`.

    Tables are cached by path and modification time, so another `keep` does not read them again.

    Args:
        interactions: Path of the interactions.
        items: Path of the items; None if there are none.
        columns: Column names by role, or the whole table format.
        where: Condition on the interactions; None for all.
        drop_unknown_items: Whether interactions are left out whose item the items table lacks; otherwise they are an error.
        keep: Minimum `item_events` and `user_events`.
        compress: How repeated events become one; None for no compression.

    Raises:
        DataError: If the data are not valid.
        ConfigError: If an option is not valid.
    """
    arrays = _get_arrays(interactions, items, columns, where, drop_unknown_items)
    (
        user,
        item,
        time,
        kind,
        rating,
        item_count,
        item_columns,
        padded,
        unit,
        users_per_sampled_user,
        occurrences,
    ) = arrays
    if compress is not None:
        group = item if compress.by == "item" else _encode_groups(items, columns)[item]
        is_first = _find_first_of_periods(user, group, time, int(compress.compress))
        if occurrences is not None:
            occurrences = _estimate_kept_events(occurrences, item, item[is_first])
        user, item, time = user[is_first], item[is_first], time[is_first]
        kind, rating = (
            None if encoded is None else (encoded[0][is_first], encoded[1]) for encoded in (kind, rating)
        )
    if occurrences is not None:
        events, is_kept_item, occurrences = _select_sample_events(user, item, occurrences, keep or {})
    else:
        events, is_kept_item = select_events(user, item, int(user.max()) + 1, item_count, keep or {})
    events = events[np.lexsort((time[events], user[events]))]
    lengths = np.bincount(user[events])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[lengths > 0])])
    dense_index = np.cumsum(is_kept_item) - 1  # by catalogue row
    profile = measure_profile(
        offsets,
        dense_index[item[events]],
        time[events],
        int(is_kept_item.sum()),
        kinds=_count_values(kind, events),
        ratings=_count_values(rating, events),
        columns=item_columns,
        zero_padded=padded,
        time_unit=unit,
    )
    if occurrences is None:
        return profile
    return scale_profile(profile, users_per_sampled_user, occurrences[is_kept_item])


def _encode_groups(items: str | None, columns: Columns) -> np.ndarray:
    """Return a code for the categories of each item [I] int64. Raises DataError if there are none."""
    return encode_categories(read_items(items, columns, ("item_id", "categories")) if items else None)


def _find_first_of_periods(
    user: np.ndarray, group: np.ndarray, time: np.ndarray, period_s: int
) -> np.ndarray:
    """Return which events [N] are a user's first ones with their group of items in a period."""
    keys = user, time // period_s, group
    order = np.lexsort((time, *keys))
    is_first = np.ones(len(user), bool)
    is_first[order[1:]] = np.logical_or.reduce([key[order[1:]] != key[order[:-1]] for key in keys])
    return is_first


def _select_sample_events(
    user: np.ndarray, item: np.ndarray, occurrences: np.ndarray, keep: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply the k-core filter to the events of a sample, with estimates of the items' events over all users.

    Returns:
        The indices of the kept events [n], which items are kept [I] bool, and the estimated events of each item [I] int64.
    """
    min_item_events, min_user_events = parse_min_events(keep)
    events, item_events = np.arange(len(user)), occurrences
    while True:
        item_ok = item_events >= min_item_events
        user_ok = np.bincount(user[events], minlength=int(user.max()) + 1) >= min_user_events
        remaining = events[item_ok[item[events]] & user_ok[user[events]]]
        if len(remaining) == len(events):
            break
        events = remaining
        item_events = _estimate_kept_events(occurrences * item_ok, item[item_ok[item]], item[events])
    if not len(events):
        raise DataError(f"keep {dict(keep)} leaves none of the events of a sample. Ask for fewer events.")
    return events, item_ok, item_events


def _estimate_kept_events(occurrences: np.ndarray, item: np.ndarray, kept_item: np.ndarray) -> np.ndarray:
    """Estimate how many events of each item over all users a filter leaves, from those that it leaves of the sample.

    Where the sample has few events of an item, its share is close to that of the items with similarly many occurrences.

    Args:
        occurrences: Number of events of each item over all users [I].
        item: Item of each event of the sample.
        kept_item: Item of each event of the sample that the filter leaves.
    """
    size_I = np.frexp(occurrences)[1]  # floor(log2) + 1
    sampled_I, kept_I = (np.bincount(index, minlength=len(occurrences)) for index in (item, kept_item))
    sampled, kept = (np.bincount(size_I, weights=counts) for counts in (sampled_I, kept_I))
    mean_I = ((kept + 1) / (sampled + 1))[size_I]  # 1 without events
    share_I = (kept_I + _PRIOR_EVENTS * mean_I) / (sampled_I + _PRIOR_EVENTS)
    return np.rint(kept_I + (occurrences - sampled_I) * share_I).astype(np.int64)


def _get_arrays(
    interactions: str, items: str | None, columns: Columns, where: str | None, drop_unknown_items: bool
) -> tuple[Any, ...]:
    """Return the arrays of the tables from the cache, or read them."""
    files = (_stamp_files(interactions, "interactions"), items and _stamp_files(items, "items"))
    table_format = to_table_format(columns)
    key = (
        *files,
        tuple(sorted(table_format.columns.items())),
        frozenset(table_format.missing),
        where,
        drop_unknown_items,
    )
    if key not in _cache:
        arrays = _read_arrays(interactions, items, columns, where, drop_unknown_items)
        _cache.clear()
        _cache[key] = arrays
    return _cache[key]


def _stamp_files(path: str, table_name: str) -> tuple[Any, ...]:
    """Return path, size and modification time of each file of a table, as a cache key; `table_name` is for errors."""
    system, files = find_parquet(path, table_name)
    return tuple((info.path, info.size, info.mtime_ns) for info in system.get_file_info(files))


def _read_arrays(
    interactions: str, items: str | None, columns: Columns, where: str | None, drop_unknown_items: bool
) -> tuple[Any, ...]:
    """Read the tables as arrays.

    Returns:
        The five values of `_encode_events`, then the number of items, the descriptions of the items' columns, the first
        zero-padded id of "user" and "item", the unit of the numbers in the column of times, and for a sample: one user in how
        many it has, and the occurrences of each item in all events [I]. For a complete log, the last two are 1 and None.
    """
    if count_rows(interactions, "interactions") > MOST_EVENTS:
        return _read_sample(interactions, items, columns, where, drop_unknown_items)
    only = None if where else _COLUMNS  # the condition may read any column
    table = read_interactions(interactions, columns, only)
    if where:
        table = table.filter(compile_condition(where, table.schema, name="data.where"))
        if not len(table):
            raise DataError(f"data.where: {where!r} matches no interaction.")
    if items is None:
        item, ids = _encode_values(table["item_id"])
        item_count, item_columns, item_ids = len(ids), (), table["item_id"]
    else:
        catalogue, item_columns = _read_item_columns(items, columns)
        if drop_unknown_items:
            table, unknown = drop_unknown_events(table, catalogue["item_id"])
            unknown.check()
        item, item_count = index_items(table["item_id"], catalogue["item_id"]), len(catalogue)
        item_ids = catalogue["item_id"]
    padded = _find_zero_padded({"user": table["user_id"], "item": item_ids})
    unit = EventLog(interactions, columns).find_time_unit()
    return *_encode_events(table, item), item_count, item_columns, padded, unit, 1, None


def _encode_events(table: pa.Table, item: np.ndarray) -> tuple[Any, ...]:
    """Return five values: user codes [N], catalogue rows `item` [N], unix seconds [N], and the encoded kinds and ratings.

    Kinds and ratings are codes [N] with the list of their values; None if there is no such column.
    """
    user = _encode_values(table["user_id"])[0]
    kind = _encode_values(table["event"].cast(pa.string())) if "event" in table.column_names else None
    rating = _encode_ratings(table["rating"]) if "rating" in table.column_names else None
    return user, item, table["timestamp"].to_numpy(), kind, rating


def _read_sample(
    interactions: str, items: str | None, columns: Columns, where: str | None, drop_unknown_items: bool
) -> tuple[Any, ...]:
    """Read the events of one user in n, chosen by a hash of the id, and count the occurrences of each item in all events.

    Returns:
        The same values as `_read_arrays`.
    """
    log = EventLog(interactions, columns)
    catalogue, item_columns = (
        (collect_items(log, where), ()) if items is None else _read_item_columns(items, columns)
    )
    index = ItemIndex(catalogue["item_id"].combine_chunks())
    occurrences = np.zeros(len(catalogue), np.int64)
    users_per_sampled_user = -(-log.rows // SAMPLED_EVENTS)
    sampled_tables: list[Any] = []
    sampled_items: list[np.ndarray] = []
    for log_slice in log.slices:
        table, fine_time = log.read(log_slice, log.select_columns(where))
        if fine_time is not None:
            table = table.take(pa.array(np.argsort(fine_time, kind="stable")))
        if where:
            table = table.filter(compile_condition(where, table.schema, name="data.where"))
        if drop_unknown_items:
            table, _ = drop_unknown_events(table, catalogue["item_id"])
        item = index.locate(table["item_id"], f"interactions {log_slice.file}")
        occurrences += np.bincount(item, minlength=len(occurrences))
        user_hash = compute_keys("user", as_numbers(table["user_id"])).view(np.uint64)
        is_sampled = user_hash % np.uint64(users_per_sampled_user) == 0
        names = [name for name in _COLUMNS if name in table.column_names]
        sampled_tables.append(table.select(names).filter(pa.array(is_sampled)))
        sampled_items.append(item[is_sampled])
    table = pa.concat_tables(sampled_tables)
    if not len(table):
        raise DataError(f"data.where: {where!r} matches no interaction.")
    padded = _find_zero_padded({"user": table["user_id"], "item": catalogue["item_id"]})
    encoded = _encode_events(table, np.concatenate(sampled_items))
    unit = log.find_time_unit()
    return *encoded, len(catalogue), item_columns, padded, unit, users_per_sampled_user, occurrences


def _find_zero_padded(ids: Mapping[str, pa.ChunkedArray]) -> Mapping[str, str]:
    """Return the first id with a leading zero of each column, by name; only of columns of text with nothing but digits."""
    padded_ids: dict[str, str] = {}
    for name, column in ids.items():
        if not _is_text(column.type):
            continue
        distinct = column.unique()
        is_padded = pc.match_substring_regex(distinct, r"^0[0-9]+$")
        if pc.any(is_padded).as_py() and pc.all(pc.match_substring_regex(distinct, r"^[0-9]+$")).as_py():
            padded_ids[name] = distinct.filter(is_padded)[0].as_py()
    return padded_ids


def _encode_values(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """Return a code for each row [N] int64, -1 for null, and the distinct values, at the positions that the codes name."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.fill_null(-1).to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _encode_ratings(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """Encode ratings as `_encode_values`; if there are more than `_MAX_RATINGS` values, round down to quantiles first."""
    codes, values = _encode_values(column)
    if len(values) <= _MAX_RATINGS:
        return codes, values
    ratings = column.to_numpy()
    quantiles = np.unique(np.nanquantile(ratings, np.linspace(0, 1, _MAX_RATINGS), method="lower"))
    codes = np.searchsorted(quantiles, np.nan_to_num(ratings, nan=quantiles[0]), "right") - 1
    return np.where(np.isnan(ratings), -1, codes), quantiles.tolist()


def _count_values(encoded: tuple[np.ndarray, list[Any]] | None, events: np.ndarray) -> dict[Any, int]:
    """Count the events of each value, most frequent first; missing values are not counted."""
    if encoded is None:
        return {}
    codes, values = encoded
    counts = np.bincount(codes[events] + 1, minlength=len(values) + 1)[1:]
    order = np.argsort(-counts, kind="stable")
    return {values[i]: int(counts[i]) for i in order if counts[i] and values[i] is not None}


def _read_item_columns(path: str, columns: Columns) -> tuple[pa.Table, tuple[ItemColumn, ...]]:
    """Return a table with the item ids, and a description of every other column of the items.

    Columns that a tokenizer can read, texts and lists of texts, are read and described; other columns only get name and kind.
    """
    schema = read_parquet_schema(path, "items")
    text_columns = {field.name for field in schema if _get_kind(field.type) in ("text", "list")}
    source_by_role = to_table_format(columns).columns
    id_columns = {
        "item_id",
        *(source for role, source in source_by_role.items() if role in ("item", "item_id")),
    }
    table = read_items(path, columns, {*text_columns, *id_columns})
    described = [_describe_column(name, table[name]) for name in table.column_names if name != "item_id"]
    others = [field for field in schema if field.name not in text_columns | id_columns]
    return table.select(["item_id"]), (
        *described,
        *(ItemColumn(field.name, _get_kind(field.type)) for field in others),
    )


def describe_lists(items: pa.Table) -> tuple[ItemColumn, ...]:
    """Describe the columns of a table of items that are lists of texts."""
    names = [field.name for field in items.schema if _get_kind(field.type) == "list"]
    return tuple(_describe_column(name, items[name]) for name in names)


def _describe_column(name: str, column: pa.ChunkedArray) -> ItemColumn:
    """Describe one column of the items: see `ItemColumn`."""
    kind, row_count = _get_kind(column.type), max(1, len(column))
    if kind == "list":
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        distinct_count = len(pc.list_flatten(column).unique())
        # Lists of one text each may be texts that should have been split at a delimiter.
        are_single_texts = lengths.max(initial=0) == 1 and pa.types.is_string(column.type.value_type)
        delimiter = find_uncut_delimiter(pc.list_flatten(column).to_pylist()) if are_single_texts else None
        filled = float((lengths > 0).mean()) if len(lengths) else 0.0
        return ItemColumn(name, kind, filled, distinct_count / row_count, delimiter)
    if kind == "text":
        texts = column.drop_null()
        empty_count = pc.sum(pc.equal(pc.utf8_length(texts), 0)).as_py() or 0
        filled = (len(texts) - empty_count) / row_count
        kind = "list" if are_lists(texts) else "text"
        return ItemColumn(name, kind, filled, len(texts.unique()) / row_count)
    return ItemColumn(name, kind)


def _get_kind(type_: pa.DataType) -> str:
    """Return the kind of a column: "text", "list" (of texts), "number" or "other"."""
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    if _is_text(value_type):
        return "text"
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return "list" if _is_text(type_.value_type) else "other"
    is_number = pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_)
    return "number" if is_number else "other"


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)
