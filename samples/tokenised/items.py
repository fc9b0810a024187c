"""The item table of a corpus, for processes that need no torch: rewards and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def read_items(folders: Mapping[str, str]) -> pa.Table:
    """Read the item table of an artifact folder, without the rest of the corpus."""
    return pq.read_table(Path(folders["sequences"]) / "items.parquet")


def as_array(column: pa.ChunkedArray) -> np.ndarray:
    """Convert an Arrow column to NumPy: numbers stay, text becomes fixed-width unicode, and lists are joined by '|'."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return np.array(["|".join(map(str, row or ())) for row in column.to_pylist()], dtype=np.str_)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.array([text or "" for text in column.to_pylist()], dtype=np.str_)
    return column.to_numpy()
