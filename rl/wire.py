"""Rollouts as plain NumPy arrays, and the joining of item and user columns.

Pools may run different torch versions, so no pickled torch object crosses a group: the wire form is a flat
dict of arrays without object dtype, which Ray, Arrow and safetensors all carry. Text becomes fixed-width
unicode.
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
_EMPTY = {"weights_version": -1, "catalogue_version": "", "step": -1}


def to_wire(rollouts: Rollouts) -> dict[str, Any]:
    """A dict whose every value has U rows, so that a group call can cut and join it: field -> array or Jagged of arrays.

    What is one value for all rollouts (versions, step) is repeated a row; "columns.<name>" are joined columns.
    """
    users = len(rollouts.uid)
    wire: dict[str, Any] = {}
    for field in (f.name for f in fields(Rollouts)):
        value = getattr(rollouts, field)
        if field == "columns":
            wire |= {f"columns.{key}": _plain(f"columns.{key}", column) for key, column in value.items()}
        elif field in _JAGGED:
            wire[field] = Jagged(_plain(field, value.values), _plain(field, value.offsets))
        else:
            wire[field] = (
                np.repeat(np.asarray(value)[None], users, 0) if field in _SCALARS else _plain(field, value)
            )
    return wire


def from_wire(wire: Mapping[str, Any]) -> Rollouts:
    """The Rollouts that `to_wire` wrote, or any rows of them; a missing field is a DataError."""
    try:
        values = {f.name: wire[f.name] for f in fields(Rollouts) if f.name != "columns"}
    except KeyError as error:
        raise DataError(
            f"rollouts on the wire have no {error.args[0]!r}: sender and reader differ in version."
        ) from None
    for field in _SCALARS:
        values[field] = values[field][0].item() if len(values[field]) else _EMPTY[field]
    columns = {key.removeprefix("columns."): wire[key] for key in wire if key.startswith("columns.")}
    return Rollouts(**values, columns=columns)


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
