"""Conversion of rollouts to plain NumPy arrays, and joining of item and user columns.

Pools may run different torch versions, so no pickled torch object crosses a group: the wire form is a flat dict of arrays
without object dtype (text becomes fixed-width unicode) and of `Jagged`. Every value, also version and step, has U rows, so a
worker group can slice and concatenate it, and groups of different sizes can pass it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.types import Jagged, Rollouts

# Shapes: U users, W beams, I items of the dense index.

_JAGGED = ("target", "history")
_SCALARS = ("weights_version", "catalogue_version", "step")
_DRAWN = ("weight", "chance", "sampling_logp", "added")  # there only where beams were drawn
_FIELDS = tuple(field.name for field in fields(Rollouts) if field.name not in ("columns", *_DRAWN))
_EMPTY = {"weights_version": -1, "catalogue_version": "", "step": -1}


def to_wire(rollouts: Rollouts) -> dict[str, Any]:
    """Convert rollouts to a flat dict with U rows in every value: fields by name, and "columns.<name>"."""
    wire: dict[str, Any] = {}
    for field in _FIELDS:
        value = getattr(rollouts, field)
        if field in _SCALARS:
            wire[field] = np.full(len(rollouts.uid), value)
        elif field in _JAGGED:
            wire[field] = Jagged(_to_plain_array(field, value.values), _to_plain_array(field, value.offsets))
        else:
            wire[field] = _to_plain_array(field, value)
    wire |= {name: value for name in _DRAWN if (value := getattr(rollouts, name)) is not None}
    return wire | {
        f"columns.{key}": _to_plain_array(f"columns.{key}", column)
        for key, column in rollouts.columns.items()
    }


def from_wire(wire: Mapping[str, Any]) -> Rollouts:
    """Build Rollouts from the wire form, which may have been sliced and concatenated.

    Raises:
        DataError: A field is missing, or the rows have different versions or steps.
    """
    missing = [field for field in _FIELDS if field not in wire]
    if missing:
        raise DataError(f"rollouts on the wire have no {missing[0]!r}: sender and reader differ in version.")
    values: dict[str, Any] = {
        field: _get_common_value(field, wire[field]) if field in _SCALARS else wire[field]
        for field in _FIELDS
    }
    columns = {key.removeprefix("columns."): wire[key] for key in wire if key.startswith("columns.")}
    drawn = {name: wire[name] for name in _DRAWN if name in wire}
    return Rollouts(**values, columns=columns, **drawn)


def _get_common_value(field: str, value_U: np.ndarray) -> int | str:
    """Return the value of a field that all rows share; 0 or "" if there are no rows."""
    if not len(value_U):
        return value_U.dtype.type().item()
    if (value_U != value_U[0]).any():
        raise DataError(f"rollouts of different {field} are mixed: {value_U.min()} and {value_U.max()}.")
    return value_U[0].item()


def join(
    rollouts: Rollouts,
    item_columns: Mapping[str, np.ndarray],
    user_columns: Mapping[str, np.ndarray] | None = None,
) -> Rollouts:
    """Return rollouts with item columns [I] gathered to [U, W] and user columns [U] added unchanged.

    Where there is no beam (item -1), a float column has NaN, an integer column 0, a bool column False and a text column "".

    Raises:
        DataError: A column has too few rows.
    """
    users, items = rollouts.item.shape[0], rollouts.item
    columns = dict(rollouts.columns)
    for name, column in item_columns.items():
        if items.max(initial=-1) >= len(column):
            raise DataError(
                f"item column {name!r} has {len(column)} rows, but item {items.max()} was recommended."
            )
        columns[name] = _gather(np.asarray(column), items)
    for name, column in (user_columns or {}).items():
        if len(column) != users:
            raise DataError(f"user column {name!r} has {len(column)} rows for {users} users.")
        columns[name] = np.asarray(column)
    return replace(rollouts, columns=columns)


def _gather(column_I: np.ndarray, item_UW: np.ndarray) -> np.ndarray:
    """Gather column[item], with the empty value of the dtype where the item is -1."""
    empty = {"f": np.nan, "O": "", "U": ""}.get(column_I.dtype.kind, column_I.dtype.type())
    none = item_UW < 0
    if not len(column_I):
        return np.full((*item_UW.shape, *column_I.shape[1:]), empty, dtype=column_I.dtype)
    out = column_I[np.where(none, 0, item_UW)]
    out[none] = empty
    return out


def _to_plain_array(name: str, value: Any) -> np.ndarray:
    """Convert a value to an array without object dtype; None becomes empty text."""
    array = np.asarray(value)
    if array.dtype.kind not in "OT":
        return array
    texts = ["" if x is None else x for x in array.ravel().tolist()]
    if all(isinstance(x, str) for x in texts):
        return np.array(texts, dtype=np.str_).reshape(array.shape)
    if all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in texts):
        return np.array(texts, dtype=np.int64).reshape(array.shape)
    odd = next(x for x in texts if not isinstance(x, str))
    raise DataError(
        f"rollouts: {name} mixes types ({type(odd).__name__} among {type(texts[0]).__name__}); "
        "only numbers or text cross between groups."
    )
