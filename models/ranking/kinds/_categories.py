"""The categories of items, which metrics of lists compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are made at import time, unknown to type checkers

_MOST = 256  # categories that count


@dataclass(frozen=True, slots=True)
class ItemCategories:
    """The categories of items: those of item i are code[first[i]:first[i + 1]], C of all together."""

    first: np.ndarray
    code: np.ndarray
    count: int

    @classmethod
    def from_names(cls, names: Iterable[Sequence[str]]) -> ItemCategories | None:
        """Build from the category names of each item, with the 256 most frequent ones; None if there are none."""
        return cls.from_column(pa.array([list(row) for row in names], pa.list_(pa.string())))

    @classmethod
    def from_column(cls, column: Any) -> ItemCategories | None:
        """Build from an Arrow column of lists of names [I]; a null is an item without categories."""
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        coded = pc.list_flatten(column).dictionary_encode()
        names = coded.dictionary.to_pylist()
        if not names:
            return None
        met = coded.indices.to_numpy()
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        often = np.bincount(met)
        chosen = sorted(range(len(names)), key=lambda code: (-often[code], names[code]))[:_MOST]
        place = np.full(len(names), -1, np.int16)
        place[chosen] = np.arange(len(chosen))
        code, row = place[met], np.repeat(np.arange(len(lengths)), lengths)
        there = code >= 0
        cell = np.unique(row[there] * len(chosen) + code[there])
        first = np.searchsorted(cell // len(chosen), np.arange(len(lengths) + 1))
        return cls(first, (cell % len(chosen)).astype(np.int16), len(chosen))

    def compute_shares(self, items: np.ndarray) -> np.ndarray:
        """Return the categories of items [...] as shares [..., C] float32; each row sums to 1, or to 0 without categories."""
        flat = items.reshape(-1)
        lengths = self.first[flat + 1] - self.first[flat]
        row = np.repeat(np.arange(len(flat)), lengths)
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(flat) else lengths
        place = np.arange(len(row)) - begins[row] + self.first[flat][row]
        share = np.zeros((len(flat), self.count), np.float32)
        share[row, self.code[place]] = 1
        share /= np.maximum(share.sum(1, keepdims=True), 1)
        return share.reshape(*items.shape, self.count)
