"""The categories of items in CSR form, for metrics of recommended lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.ranges import expand_ranges

pc: Any = pyarrow.compute  # Its functions are generated at import time, so type checkers do not know them.

_MAX_CATEGORIES = 256  # Maximum number of categories; the most frequent ones are kept.


@dataclass(frozen=True, slots=True)
class ItemCategories:
    """The categories of items: those of item i are code[first[i]:first[i + 1]].

    Attributes:
        first: Offset of each item's categories in `code` [I + 1].
        code: Categories of the items, each in [0, count).
        count: Number C of distinct categories.
    """

    first: np.ndarray
    code: np.ndarray
    count: int

    @classmethod
    def from_column(cls, column: Any) -> ItemCategories | None:
        """Build from an Arrow column of lists of names [I], with the 256 most frequent names; a null is an item without any.

        Returns None if there are no names.
        """
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        encoded = pc.list_flatten(column).dictionary_encode()
        names = encoded.dictionary.to_pylist()
        if not names:
            return None
        name_index = encoded.indices.to_numpy()
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        counts = np.bincount(name_index)
        frequent = sorted(range(len(names)), key=lambda code: (-counts[code], names[code]))[:_MAX_CATEGORIES]
        new_code = np.full(len(names), -1, np.int16)
        new_code[frequent] = np.arange(len(frequent))
        code, row = new_code[name_index], np.repeat(np.arange(len(lengths)), lengths)
        is_kept = code >= 0
        item_and_code = np.unique(row[is_kept] * len(frequent) + code[is_kept])
        first = np.searchsorted(item_and_code // len(frequent), np.arange(len(lengths) + 1))
        return cls(first, (item_and_code % len(frequent)).astype(np.int16), len(frequent))

    def compute_shares(self, items: np.ndarray) -> np.ndarray:
        """Return the share of each category in items [...] as float32 [..., C]; an item's shares are equal and sum to 1.

        The shares of an item without categories are 0.
        """
        flat = items.reshape(-1)
        entry, offsets = expand_ranges(self.first[flat], self.first[flat + 1])
        row = np.repeat(np.arange(len(flat)), np.diff(offsets))
        share = np.zeros((len(flat), self.count), np.float32)
        share[row, self.code[entry]] = 1
        share /= np.maximum(share.sum(1, keepdims=True), 1)
        return share.reshape(*items.shape, self.count)
