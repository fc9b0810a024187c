"""The item table of a corpus, for processes that need no torch: rewards and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.samples.tokenised.vectors import has_vectors, is_vector_type, read_vector_column


def read_items(folders: Mapping[str, str]) -> pa.Table:
    """Read the item table of an artifact folder, without the rest of the corpus."""
    return pq.read_table(Path(folders["sequences"]) / "items.parquet")


def as_array(column: pa.ChunkedArray) -> np.ndarray:
    """Convert an Arrow column [I] to NumPy: numbers stay, text becomes fixed-width unicode, and lists are joined by '|'.

    A column of vectors becomes float32 [I, D], with NaN for an item without one; [I, 0] if no item has one.
    """
    if is_vector_type(column.type):
        if not has_vectors(column):
            return np.empty((len(column), 0), np.float32)
        values_nD, has_vector = read_vector_column(column, "column")
        array = np.full((len(column), values_nD.shape[1]), np.nan, np.float32)
        array[has_vector] = values_nD
        return array
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return np.array(["|".join(map(str, row or ())) for row in column.to_pylist()], dtype=np.str_)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.array([text or "" for text in column.to_pylist()], dtype=np.str_)
    return column.to_numpy()
