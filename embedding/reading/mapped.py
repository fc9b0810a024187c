"""A reader of one version of rows through memory-mapped files, which copies only the requested rows.

A table consists of layers of files: a full one and the changes after it. A layer has sorted keys, their rows and
deleted keys; the newest layer that has a key is used. Any number of processes share one copy in the page cache,
versions share what did not change, and an older version is read with fewer layers. A key that is in no layer reads
the default row.
"""

# Shapes: N requested keys, R rows of a layer, G deleted keys of a layer, D width.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables import TableSpec
from nonet.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class RowLayer:
    """A layer of rows: all rows of a table, or the changes from one version to a later one.

    Attributes:
        key: The keys of the rows, ascending, int64 [R].
        row: The rows, float32 [R, D].
        gone: The keys that the later version does not have any more, ascending, int64 [G].
    """

    key: np.ndarray
    row: np.ndarray
    gone: np.ndarray

    @classmethod
    def from_tables(cls, tables: Sequence[Any], dim: int) -> RowLayer:
        """Create a sorted layer from a full update's Arrow tables of key and row."""
        keys = [table["key"].to_numpy() for table in tables]
        flat = [table["row"].combine_chunks().flatten().to_numpy(zero_copy_only=False) for table in tables]
        key = np.concatenate([np.empty(0, np.int64), *keys])
        row = np.concatenate([np.empty((0, dim), np.float32), *(part.reshape(-1, dim) for part in flat)])
        order = np.argsort(key, kind="stable")
        return cls(key[order], np.ascontiguousarray(row[order], np.float32), np.empty(0, np.int64))

    def diff(self, base: RowLayer) -> RowLayer:
        """Compute the changes from `base` to this layer, both with all rows: new or changed rows, and deleted keys."""
        positions, is_found = _find_keys(base.key, self.key)
        unchanged = np.zeros(len(self.key), bool)
        bits, base_bits = self.row.view(np.uint32), np.ascontiguousarray(base.row).view(np.uint32)
        unchanged[is_found] = (bits[is_found] == base_bits[positions[is_found]]).all(1)
        _, stays = _find_keys(self.key, base.key)
        return RowLayer(self.key[~unchanged], self.row[~unchanged], np.asarray(base.key[~stays]))

    def apply_to(self, base: RowLayer) -> RowLayer:
        """Apply this layer's changes to a layer with all rows, and return the resulting layer with all rows."""
        stays = ~(_find_keys(self.key, base.key)[1] | _find_keys(self.gone, base.key)[1])
        key = np.concatenate([base.key[stays], self.key])
        order = np.argsort(key, kind="stable")
        row = np.concatenate([np.asarray(base.row)[stays], self.row])
        return RowLayer(key[order], row[order], np.empty(0, np.int64))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays to store by name; deleted keys only if there are any."""
        arrays = {"key": self.key, "row": self.row}
        return arrays | ({"gone": self.gone} if len(self.gone) else {})

    @classmethod
    def map_files(cls, files: Mapping[str, Path]) -> RowLayer:
        """Map a layer from its files (.npy), by the names of `to_arrays`.

        Raises:
            DataError: If a file is not an array.
        """
        try:
            arrays = {name: np.load(path, mmap_mode="r") for name, path in files.items()}
        except (OSError, ValueError) as error:
            raise DataError(f"rows of a published version cannot be read: {error}") from None
        return cls(arrays["key"], arrays["row"], arrays.get("gone", np.empty(0, np.int64)))


class MappedReader:
    """A SparseReader over the layers of each table; `layers` has the oldest one first."""

    def __init__(
        self, version: int, layers: Mapping[str, Sequence[RowLayer]], specs: Mapping[str, TableSpec]
    ):
        self.version, self.absent = version, 0
        self._specs = dict(specs)
        self._layers = {name: list(reversed(layers.get(name, ()))) for name in specs}

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Read the rows [N, D] of int64 keys [N]; an absent key reads the default row and is counted."""
        if table not in self._specs:
            raise ConfigError(f"there is no sparse table {table!r}; there are: {', '.join(self._specs)}")
        spec, key_array = self._specs[table], keys.numpy()
        out = np.full((len(key_array), spec.dim), spec.default, np.float32)
        unresolved = np.arange(len(key_array))  # The positions of keys that no layer has had so far.
        deleted_count = 0
        for layer in self._layers[table]:  # The newest first.
            positions, is_found = _find_keys(layer.key, key_array[unresolved])
            out[unresolved[is_found]] = layer.row[positions[is_found]]
            unresolved = unresolved[~is_found]
            _, is_deleted = _find_keys(layer.gone, key_array[unresolved])
            deleted_count, unresolved = deleted_count + int(is_deleted.sum()), unresolved[~is_deleted]
            if not len(unresolved):
                break
        self.absent += deleted_count + len(unresolved)
        return torch.from_numpy(out)


def merge_layers(layers: Sequence[RowLayer]) -> RowLayer:
    """Merge a full layer and the changes after it, oldest first, into one full layer."""
    merged, *others = layers
    for layer in others:
        merged = layer.apply_to(merged)
    return merged


def _find_keys(key_R: np.ndarray, requested_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each requested key among the ascending keys [N], and whether it is one of them, bool [N]."""
    if not len(key_R):
        return np.zeros(len(requested_N), np.int64), np.zeros(len(requested_N), bool)
    position_N = np.searchsorted(key_R, requested_N).clip(max=len(key_R) - 1)
    return position_N, key_R[position_N] == requested_N
