"""Conversion of rollouts to plain NumPy arrays, and joining of item and user columns.

Pools of workers may run different torch versions, so no pickled torch object is sent between worker groups. The wire form is a
flat dict of arrays without object dtype (text becomes fixed-width unicode) and of `Jagged`. Every value, also versions and step,
has U rows, so a worker group can slice and concatenate the wire form, and groups of different sizes can exchange it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.types import Jagged, Rollouts

# Shapes: U users, W beams, I items of the dense index.

# Names of the fields of Rollouts by kind.
_JAGGED_FIELDS = ("target", "history")
_SCALAR_FIELDS = ("weights_version", "catalogue_version", "step")
_OPTIONAL_FIELDS = ("weight", "chance", "sampling_logp", "added", "time")  # may be None
_REQUIRED_FIELDS = tuple(
    field.name for field in fields(Rollouts) if field.name not in ("columns", *_OPTIONAL_FIELDS)
)


def to_wire(rollouts: Rollouts) -> dict[str, Any]:
    """Convert rollouts to a flat dict with U rows in every value: fields by name, and "columns.<name>"."""
    wire: dict[str, Any] = {}
    for field in _REQUIRED_FIELDS:
        value = getattr(rollouts, field)
        if field in _SCALAR_FIELDS:
            wire[field] = np.full(len(rollouts.uid), value)
        elif field in _JAGGED_FIELDS:
            wire[field] = Jagged(_to_plain_array(field, value.values), _to_plain_array(field, value.offsets))
        else:
            wire[field] = _to_plain_array(field, value)
    wire |= {name: value for name in _OPTIONAL_FIELDS if (value := getattr(rollouts, name)) is not None}
    return wire | {
        f"columns.{key}": _to_plain_array(f"columns.{key}", column)
        for key, column in rollouts.columns.items()
    }


def from_wire(wire: Mapping[str, Any]) -> Rollouts:
    """Build Rollouts from the wire form, which may have been sliced and concatenated.

    Raises:
        DataError: A field is missing, or the rows have different versions or steps.
    """
    missing = [field for field in _REQUIRED_FIELDS if field not in wire]
    if missing:
        raise DataError(f"rollouts on the wire have no {missing[0]!r}: sender and reader differ in version.")
    values: dict[str, Any] = {
        field: _get_common_value(field, wire[field]) if field in _SCALAR_FIELDS else wire[field]
        for field in _REQUIRED_FIELDS
    }
    values |= {name: wire[name] for name in _OPTIONAL_FIELDS if name in wire}
    columns = {key.removeprefix("columns."): wire[key] for key in wire if key.startswith("columns.")}
    return Rollouts(**values, columns=columns)


def _get_common_value(field: str, value_U: np.ndarray) -> int | str:
    """Return the value of a field that all rows share; 0 or "" if there are no rows.

    Raises:
        DataError: The rows have different values.
    """
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
    item_UW, user_count = rollouts.item, rollouts.item.shape[0]
    columns = dict(rollouts.columns)
    for name, column in item_columns.items():
        if item_UW.max(initial=-1) >= len(column):
            raise DataError(
                f"item column {name!r} has {len(column)} rows, but item {item_UW.max()} was recommended."
            )
        columns[name] = _gather(np.asarray(column), item_UW)
    for name, column in (user_columns or {}).items():
        if len(column) != user_count:
            raise DataError(f"user column {name!r} has {len(column)} rows for {user_count} users.")
        columns[name] = np.asarray(column)
    return replace(rollouts, columns=columns)


def _gather(column_I: np.ndarray, item_UW: np.ndarray) -> np.ndarray:
    """Return column[item], [U, W] and the column's further axes, with the empty value of its dtype where the item is -1."""
    empty_value = {"f": np.nan, "O": "", "U": ""}.get(column_I.dtype.kind, column_I.dtype.type())
    no_item_UW = item_UW < 0
    if not len(column_I):
        return np.full((*item_UW.shape, *column_I.shape[1:]), empty_value, dtype=column_I.dtype)
    gathered = column_I[np.where(no_item_UW, 0, item_UW)]
    gathered[no_item_UW] = empty_value
    return gathered


def _to_plain_array(name: str, value: Any) -> np.ndarray:
    """Convert a value to an array without object dtype; None becomes empty text.

    Raises:
        DataError: An array of objects holds anything but text alone or integers alone; the message names `name`.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "OT":  # objects, or NumPy's variable-width text
        return array
    elements = ["" if x is None else x for x in array.ravel().tolist()]
    if all(isinstance(x, str) for x in elements):
        return np.array(elements, dtype=np.str_).reshape(array.shape)
    if all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in elements):
        return np.array(elements, dtype=np.int64).reshape(array.shape)
    first_other = next(x for x in elements if not isinstance(x, str))
    raise DataError(
        f"rollouts: {name} mixes types ({type(first_other).__name__} among {type(elements[0]).__name__}); "
        "only numbers or text cross between groups."
    )
