"""Guesses which column has which role (user, item, time, ...) by its name, or by its type if no name fits.

Names are normalised before they are compared: without case, blanks, underscores and RecBole's `:type` suffixes. `NAMES` has the
normalised names of each role in the order of preference, so `user_id` takes precedence over `session_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from nonet.samples.tables.table_format import ROLES
from nonet.samples.tables.times import convert_to_seconds, find_implausible
from nonet.samples.tables.word_lists import BrokenListError, are_lists, parse_word_lists

NAMES = {
    "user": "userid user uid memberid customerid visitorid accountid reviewerid userindex sessionid session "
    "customer member visitor",
    "item": "itemid item iid movieid productid asin sku articleid videoid trackid songid newsid product",
    "time": "timestamp time ts tsms unixtime datetime eventtime createdat date eventdate",
    "event": "event eventtype action actiontype behavior behaviour type",
    "rating": "rating score stars overall",
    "title": "title name movietitle producttitle productname itemname itemtitle text",
    "categories": "categories category genres genre tags",
}
OF_INTERACTIONS = ("user", "item", "time", "event", "rating")
OF_ITEMS = ("item", "title", "categories")


def guess_roles(
    roles: Sequence[str], names: Sequence[str], columns: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Guess by name which column has each role.

    Args:
        roles: Roles to assign.
        names: Names of the table's columns; of two that are equal when normalised, the first is used.
        columns: Columns that the user has assigned, by role or by Nonet's name; they take precedence over guesses.

    Returns:
        The name of the column by role; a role without a fitting column is missing.
    """
    source_by_role = {role: source for role, source in (columns or {}).items() if source in names}
    name_by_normalised = {normalise_name(name): name for name in reversed(names)}
    for role in roles:
        if role in source_by_role or ROLES.get(role, role) in source_by_role:
            continue
        candidates = [
            name_by_normalised[usual] for usual in NAMES[role].split() if usual in name_by_normalised
        ]
        free_names = [name for name in candidates if name not in source_by_role.values()]
        if free_names:
            source_by_role[role] = free_names[0]
    return source_by_role


def align_item_column(
    roles: Mapping[str, str],
    item_roles: Mapping[str, str],
    names: Sequence[str],
    columns: Mapping[str, str] | None,
) -> dict[str, str]:
    """Use the item column of the table of items for the interactions too, if they have a column of this name.

    For example, reviews have an `asin` and a `parent_asin`, and the table of products has only one of them.

    Args:
        roles: Columns of the interactions by role.
        item_roles: Columns of the items by role.
        names: Names of all columns of the interactions.
        columns: Columns that the user has assigned; if the item is among them, it stays.

    Returns:
        The columns of the interactions by role.
    """
    item_source = item_roles.get("item")
    if item_source in names and not {"item", "item_id"} & set(columns or {}):
        return {**roles, "item": str(item_source)}
    return dict(roles)


def choose_time_column(table: pa.Table, names: Sequence[str], preferred: str) -> str:
    """Choose the best of several columns of times: without nulls, with plausible dates, and with the most distinct seconds.

    Args:
        table: Rows of the columns, all or the first ones.
        names: Names of the candidates.
        preferred: Name of the candidate that is preferred by its name; it is returned if no other is better.
    """
    best_name, best_score = preferred, None
    for name in dict.fromkeys([preferred, *names]):
        score = _score_times(table[name], name)
        if score is not None and (best_score is None or score > best_score):
            best_name, best_score = name, score
    return best_name


def _score_times(column: pa.ChunkedArray, name: str) -> tuple[bool, bool, int] | None:
    """Rate a column of times.

    Returns:
        Whether it has no null, whether all times are plausible, and the number of distinct seconds; greater tuples are better.
        None if the column does not hold times.
    """
    present_times = column.drop_null()
    try:
        seconds, _ = convert_to_seconds(present_times, name)
    except (TypeError, ValueError):
        return None
    are_plausible = bool(len(seconds)) and not find_implausible(seconds).any()
    return len(present_times) == len(column), are_plausible, len(set(seconds.tolist()))


def list_time_candidates(names: Sequence[str]) -> list[str]:
    """Return the names among `names` that are usual for columns of times, in the order of preference."""
    name_by_normalised = {normalise_name(name): name for name in reversed(names)}
    return [name_by_normalised[usual] for usual in NAMES["time"].split() if usual in name_by_normalised]


def guess_by_type(chosen: Mapping[str, str], schema: pa.Schema) -> dict[str, str]:
    """Add the roles that the types of the columns determine.

    If there is only one column of timestamps or dates, it becomes the time. If exactly one of the roles user and item is missing
    and exactly one column of integers or text has no role, it gets this role.

    Args:
        chosen: Columns by role.
        schema: Schema of the table.

    Returns:
        `chosen` with the added roles.
    """
    source_by_role = dict(chosen)
    free_fields = [field for field in schema if field.name not in chosen.values()]
    time_names = [field.name for field in free_fields if _is_time_type(field.type)]
    if "time" not in source_by_role and len(time_names) == 1:
        source_by_role["time"] = time_names[0]
    missing_roles = [role for role in ("user", "item") if role not in source_by_role]
    id_names = [field.name for field in free_fields if _is_id_type(field.type)]
    if len(missing_roles) == 1 and len(id_names) == 1:
        source_by_role[missing_roles[0]] = id_names[0]
    return source_by_role


def guess_categories(roles: Mapping[str, str], rows: pa.Table) -> dict[str, str]:
    """Take the only column of lists of words for the categories of items, if no column has their name and words recur.

    Lists may be written as text.

    Args:
        roles: Columns of the items by role.
        rows: The items, or the first of them.

    Returns:
        `roles`, with `categories` if there is such a column, also if a list in it is broken, which its reader refuses.
    """
    if "categories" in roles:
        return dict(roles)
    free_fields = [field for field in rows.schema if field.name not in roles.values()]
    names = [
        field.name
        for field in free_fields
        if _is_text_list(field.type) or (_is_text(field.type) and are_lists(rows[field.name]))
    ]
    if len(names) != 1:
        return dict(roles)
    column = rows[names[0]].combine_chunks()
    try:
        words = (parse_word_lists(column, ()) if _is_text(column.type) else column).flatten()
    except BrokenListError:
        return {**roles, "categories": names[0]}
    except TypeError:
        return dict(roles)
    return {**roles, "categories": names[0]} if 2 * len(words.unique()) <= len(words) else dict(roles)


def _is_text_list(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(kind.value_type)


def strip_type_suffix(name: str) -> str:
    """Return a column's name without RecBole's type suffix, such as `:token`."""
    return re.sub(r":(token|token_seq|float|float_seq)$", "", name)


def normalise_name(name: str) -> str:
    """Return a column's name in the form in which names are compared; see the module."""
    return re.sub(r"[^a-z0-9]", "", strip_type_suffix(name).lower())


def _is_time_type(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _is_id_type(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
