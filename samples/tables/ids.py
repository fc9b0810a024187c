"""Checks that a value which a user gives can be an id of a run, and converts it to the type of the run's ids."""

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
