"""Guesses which column has which role by its name, or by its type if no name fits.

Names are compared without case, blanks, underscores and RecBole's `:type` suffixes. `NAMES` is in the order of preference:
the first existing name is used, so `user_id` takes precedence over `session_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from nonet.samples.tables.table_format import ROLES
from nonet.samples.tables.times import convert_to_seconds, find_implausible

NAMES = {
    "user": "userid user uid memberid customerid visitorid accountid reviewerid userindex sessionid session",
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
    """Return the column that holds each role, guessed by name.

    Args:
        roles: Roles to assign.
        names: Columns of the table, in the order of preference.
        columns: Columns that the user has assigned; they take precedence over guesses.
    """
    chosen = {role: source for role, source in (columns or {}).items() if source in names}
    by_plain = {normalise_name(name): name for name in reversed(names)}
    for role in roles:
        if role in chosen or ROLES.get(role, role) in chosen:
            continue
        free = [plain for plain in NAMES[role].split() if plain in by_plain]
        free = [plain for plain in free if by_plain[plain] not in chosen.values()]
        if free:
            chosen[role] = by_plain[free[0]]
    return chosen


def align_item_column(
    roles: Mapping[str, str],
    item_roles: Mapping[str, str],
    names: Sequence[str],
    columns: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return the roles of interactions with the item column that the table of items has, where both have one of that name.

    A review has an `asin` and a `parent_asin`, and the table of products has one of them. A column that is given wins.
    """
    item = item_roles.get("item")
    if item in names and not {"item", "item_id"} & set(columns or {}):
        return {**roles, "item": str(item)}
    return dict(roles)


def choose_time_column(table: pa.Table, names: Sequence[str], chosen: str) -> str:
    """Return which of several columns of times to use: one without gaps, of plausible dates, that tells most moments apart.

    Args:
        table: rows of the columns, all or the first ones.
        names: candidates.
        chosen: the one that its name speaks for; it wins where none is better.
    """
    best, best_score = chosen, None
    for name in dict.fromkeys([chosen, *names]):
        score = _score_times(table[name], name)
        if score is not None and (best_score is None or score > best_score):
            best, best_score = name, score
    return best


def _score_times(column: pa.ChunkedArray, name: str) -> tuple[bool, bool, int] | None:
    """Rank a time column by completeness, plausibility and distinct seconds; None if it does not hold times."""
    there = column.drop_null()
    try:
        seconds, _ = convert_to_seconds(there, name)
    except (TypeError, ValueError):
        return None
    plausible = bool(len(seconds)) and not find_implausible(seconds).any()
    return len(there) == len(column), plausible, len(set(seconds.tolist()))


def list_time_candidates(names: Sequence[str]) -> list[str]:
    """Return the columns whose names say that they hold times, in the order of preference."""
    by_plain = {normalise_name(name): name for name in reversed(names)}
    return [by_plain[plain] for plain in NAMES["time"].split() if plain in by_plain]


def guess_by_type(chosen: Mapping[str, str], schema: pa.Schema) -> dict[str, str]:
    """Return `chosen` with roles added that types alone determine.

    The only column of timestamps becomes the time. If exactly one id role is missing and one id column is left, it takes
    that role.
    """
    full = dict(chosen)
    times = [field.name for field in schema if _is_time(field.type) and field.name not in full.values()]
    if "time" not in full and len(times) == 1:
        full["time"] = times[0]
    missing = [role for role in ("user", "item") if role not in full]
    free = [field.name for field in schema if _is_id(field.type) and field.name not in full.values()]
    if len(missing) == 1 and len(free) == 1:
        full[missing[0]] = free[0]
    return full


def strip_type_suffix(name: str) -> str:
    """Return a column's name without RecBole's type suffix."""
    return re.sub(r":(token|token_seq|float|float_seq)$", "", name)


def normalise_name(name: str) -> str:
    """Return a column's name as names are compared: without case, blanks, underscores and RecBole's type."""
    return re.sub(r"[^a-z0-9]", "", strip_type_suffix(name).lower())


def _is_time(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _is_id(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
