"""Rollouts as plain NumPy arrays, and the joining of item and user columns.

Pools may run different torch versions, so no pickled torch object crosses a group: the wire form is a flat
dict of arrays without object dtype (text becomes fixed-width unicode) and of `Jagged`. Every value has U
rows, version and step too, so a worker group can cut and join it, and groups of unequal size can pass it on.
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
    """A flat dict with U rows in every value: fields by name, and "columns.<name>"."""
    wire: dict[str, Any] = {}
    for field in _FIELDS:
        value = getattr(rollouts, field)
        if field in _SCALARS:
            wire[field] = np.full(len(rollouts.uid), value)
        elif field in _JAGGED:
            wire[field] = Jagged(_plain(field, value.values), _plain(field, value.offsets))
        else:
            wire[field] = _plain(field, value)
    wire |= {name: value for name in _DRAWN if (value := getattr(rollouts, name)) is not None}
    return wire | {
        f"columns.{key}": _plain(f"columns.{key}", column) for key, column in rollouts.columns.items()
    }


def from_wire(wire: Mapping[str, Any]) -> Rollouts:
    """The Rollouts that `to_wire` wrote, cut or joined since. Rows of two versions or steps are a
    DataError.
    """
    missing = [field for field in _FIELDS if field not in wire]
    if missing:
        raise DataError(f"rollouts on the wire have no {missing[0]!r}: sender and reader differ in version.")
    values: dict[str, Any] = {
        field: _only(field, wire[field]) if field in _SCALARS else wire[field] for field in _FIELDS
    }
    columns = {key.removeprefix("columns."): wire[key] for key in wire if key.startswith("columns.")}
    drawn = {name: wire[name] for name in _DRAWN if name in wire}
    return Rollouts(**values, columns=columns, **drawn)


def _only(field: str, value_U: np.ndarray) -> int | str:
    """The one value of a field that all rows share; 0 or "" without rows."""
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
    """Rollouts with item columns [I] gathered to [U, W] and user columns [U] as they are.

    Where there is no beam (item -1) a float reads NaN, an integer 0, a bool False and text "".
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
    """column[item], with the empty value of its kind where item is -1."""
    empty = {"f": np.nan, "O": "", "U": ""}.get(column_I.dtype.kind, column_I.dtype.type())
    none = item_UW < 0
    if not len(column_I):
        return np.full((*item_UW.shape, *column_I.shape[1:]), empty, dtype=column_I.dtype)
    out = column_I[np.where(none, 0, item_UW)]
    out[none] = empty
    return out


def _plain(name: str, value: Any) -> np.ndarray:
    """An array without object dtype; None reads as empty text."""
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
