"""BisectedRows: finds the rows that make a call fail, by calling again with each half of a set of rows that failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class BisectedRows:
    """Iterates over sets of rows to call with: all rows, and then the halves of each set that `halve` is called with.

    Args:
        rows: All rows, as a list or an array.
    """

    def __init__(self, rows: Any):
        self._pending_sets = [rows]

    def __iter__(self) -> Iterator[Any]:
        while self._pending_sets:
            yield self._pending_sets.pop()

    def halve(self, rows: Any) -> None:
        """Return the halves of `rows` next, the first half first; a single row does not come again."""
        if len(rows) > 1:
            half = len(rows) // 2
            self._pending_sets += [rows[half:], rows[:half]]
