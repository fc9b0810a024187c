"""Checks of ids: whether a value that a user gives can be an id of a run, and whether ids have lost digits in a spreadsheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

CANONICAL_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
"""Pattern of a text that is the same id as the integer that it spells."""
_SCIENTIFIC = r"^-?(\d{1,3}([.,]\d+)?[eE]\+|\d[.,]\d+[eE])\d{1,3}$|^-?\d{16,}\.0+$"
"""Pattern of an id that was a number of floating point: `9.78014E+12`, `9,78E+12`, `9.78014E12`, `12345678901234568.0`."""
_LONG, _ROUNDED = r"^-?\d{16,}$", r"^-?\d{15}0+$"
"""Patterns of an integer of more than 15 digits, which spreadsheets do not keep, and of one that they have rounded."""
_MIN_ROUNDED = 10
"""The minimum number of distinct long ids that must all be rounded for a message; a few may end in 0 by chance."""


@dataclass(frozen=True, slots=True)
class IdKind:
    """The kind of a run's ids of users or items.

    Attributes:
        text: Whether the ids are text; otherwise they are integers.
        numeric: Whether an integer may be one of them: they are integers, or a text spells an integer, as "42" does.
        example: One of the ids, for messages; None if there is none.
    """

    text: bool
    numeric: bool
    example: int | str | None = None

    @classmethod
    def from_ids(cls, ids: pa.Array | pa.ChunkedArray | np.ndarray) -> IdKind:
        """Return the kind of ids [N] int64 or text; object arrays hold text. Without ids, every integer and text is accepted."""
        array: Any = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(ids)
        if not len(array):  # nothing is known of the ids, as in an export, which has no users
            return cls(True, True)
        example = array[0].as_py()
        if pa.types.is_integer(array.type):
            return cls(False, True, example)
        spells_integer = pc.any(pc.match_substring_regex(array, CANONICAL_INTEGER)).as_py()
        return cls(True, bool(spells_integer), example)


def convert_ids(values: Sequence[Any], kind: IdKind, label: str = "id") -> list[int | str]:
    """Return values [N] as ids of a kind: integers, or text. The text "42" and the integer 42 are the same id.

    An id that the run does not know is returned as well; only a value that can be no id of the run is an error.

    Args:
        values: The values, as a request or a file has them.
        kind: The kind of the run's ids.
        label: Prefix of error messages, such as "user".

    Raises:
        DataError: A value is neither an integer nor text, is an integer where ids are text of which none spells an integer, or is
            text where ids are integers that it does not spell.
    """
    return [_convert_id(value, kind, label) for value in values]


def _convert_id(value: Any, kind: IdKind, label: str) -> int | str:
    """Convert one id; see `convert_ids`."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if isinstance(value, str) and kind.text and value:
        return str(value)
    if is_integer and kind.numeric and -(2**63) <= int(value) < 2**63:
        return str(int(value)) if kind.text else int(value)
    if (
        isinstance(value, str)
        and not kind.text
        and pc.match_substring_regex(value, CANONICAL_INTEGER).as_py()
    ):
        return int(value)
    expected = "text" if kind.text else "whole numbers"
    example = "" if kind.example is None else f", such as {kind.example!r}"
    raise DataError(f"{label}: {value!r} can be no id of this run, whose ids are {expected}{example}")


def describe_rewritten_ids(ids: pa.Array | pa.ChunkedArray | np.ndarray, name: str) -> str | None:
    """Return a sentence about ids whose last digits a spreadsheet has removed, so that different ids are equal; None otherwise.

    Args:
        ids: The ids [N], text or integers.
        name: What they are ids of, such as "item".
    """
    array: Any = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(ids)
    distinct = array.unique().drop_null().cast(pa.string())
    rewritten = distinct.filter(pc.match_substring_regex(distinct, _SCIENTIFIC))
    if not len(rewritten):
        long_ids = distinct.filter(pc.match_substring_regex(distinct, _LONG))
        if len(long_ids) < _MIN_ROUNDED or not pc.all(pc.match_substring_regex(long_ids, _ROUNDED)).as_py():
            return None
        rewritten = long_ids
    return (
        f"{len(rewritten):,} of {len(distinct):,} distinct {name} ids are written as a spreadsheet writes long numbers, such as "
        f"{rewritten[0].as_py()}: their last digits are lost, and different {name}s may have become one; export the ids again, "
        "as text, from where the table comes from"
    )
