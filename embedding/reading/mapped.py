"""A reader of one version of rows through memory-mapped files, which copies only the requested rows.

A table consists of layers of files: a full one and the changes after it. A layer has sorted keys, their rows and
deleted keys; the newest layer that has a key is used. Any number of processes share one copy in the page cache,
versions share what did not change, and an older version is read with fewer layers. A key that is in no layer reads
the default row.
"""

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

# Shapes: N requested keys, R rows of a layer, G keys gone, D width.


@dataclass(frozen=True, slots=True)
class RowLayer:
    """A layer of rows: key [R] int64 ascending, row [R, D] float32, gone [G] int64 ascending."""

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
        """Compute the changes from `base` to this whole table: new or changed rows, and deleted keys."""
        place, there = _find_keys(base.key, self.key)
        same = np.zeros(len(self.key), bool)
        bits, other = self.row.view(np.uint32), np.ascontiguousarray(base.row).view(np.uint32)
        same[there] = (bits[there] == other[place[there]]).all(1)
        gone = base.key[~_find_keys(self.key, base.key)[1]]
        return RowLayer(self.key[~same], self.row[~same], np.asarray(gone))

    def apply_to(self, base: RowLayer) -> RowLayer:
        """Apply this layer's changes to a whole table and return the result."""
        kept = ~(_find_keys(self.key, base.key)[1] | _find_keys(self.gone, base.key)[1])
        key = np.concatenate([base.key[kept], self.key])
        order = np.argsort(key, kind="stable")
        row = np.concatenate([np.asarray(base.row)[kept], self.row])
        return RowLayer(key[order], row[order], np.empty(0, np.int64))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays to store by name; deleted keys only if there are any."""
        named = {"key": self.key, "row": self.row}
        return named | ({"gone": self.gone} if len(self.gone) else {})

    @classmethod
    def map_files(cls, files: Mapping[str, Path]) -> RowLayer:
        """Map layers from files that are named as in `to_arrays`.

        Raises:
            DataError: If a file is not an array.
        """
        try:
            arrays = {name: np.load(path, mmap_mode="r") for name, path in files.items()}
        except (OSError, ValueError) as error:
            raise DataError(f"rows of a published version cannot be read: {error}") from None
        return cls(arrays["key"], arrays["row"], arrays.get("gone", np.empty(0, np.int64)))


class MappedReader:
    """A SparseReader over the layers of each table, oldest first."""

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
        spec, wanted = self._specs[table], keys.numpy()
        out = np.full((len(wanted), spec.dim), spec.default, np.float32)
        left = np.arange(len(wanted))
        absent = 0
        for layer in self._layers[table]:
            place, there = _find_keys(layer.key, wanted[left])
            out[left[there]] = layer.row[place[there]]
            left = left[~there]
            gone = _find_keys(layer.gone, wanted[left])[1]
            absent, left = absent + int(gone.sum()), left[~gone]
            if not len(left):
                break
        self.absent += absent + len(left)
        return torch.from_numpy(out)


def merge_layers(layers: Sequence[RowLayer]) -> RowLayer:
    """Merge a full layer and the changes after it."""
    first, *others = layers
    for layer in others:
        first = layer.apply_to(first)
    return first


def _find_keys(key_R: np.ndarray, wanted_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each wanted key among ascending keys, and whether it is there."""
    if not len(key_R):
        return np.zeros(len(wanted_N), np.int64), np.zeros(len(wanted_N), bool)
    place = np.searchsorted(key_R, wanted_N).clip(max=len(key_R) - 1)
    return place, key_R[place] == wanted_N
