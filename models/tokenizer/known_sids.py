"""Semantic ids of a run whose weights another run starts from, and their extension to new items.

Known items keep their ids, because the decoder's codes would change their meaning otherwise. A new item is coded by codebooks
that are reconstructed from the known ids: the centre of a code is the mean of its items' residual vectors. It gets the next free
collision number of its tuple. If a tuple is full, the next nearest code of the last level is used, so every level keeps its
number of codes.
"""

# Shapes: I items of the catalogue, J known items, L levels (the last one numbers collisions), D vector width, K codes.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from nonet.errors import ConfigError, DataError
from nonet.samples.sequences import load_item_keys


@dataclass(frozen=True, slots=True)
class KnownSids:
    """Semantic ids by sparse key.

    Attributes:
        key: Sparse keys [J] int64.
        sids: Semantic ids [J, L] int32.
        codes: Number of codes K of every level.
        source: Where the ids are from, for errors.
    """

    key: np.ndarray
    sids: np.ndarray
    codes: tuple[int, ...]
    source: str

    @classmethod
    def load(cls, sequences: Path, sids: Path, codes: Sequence[int], source: str) -> KnownSids:
        """Load the ids from the artifacts of a run whose sparse keys are hashed ids.

        Args:
            sequences: Folder of the run's sequences.
            sids: Folder of its semantic ids.
            codes: Number of codes K of every level.
            source: Where the ids are from, for errors.
        """
        key = load_item_keys(sequences)
        assert key is not None  # Checked when the scenario was read.
        table = pq.read_table(sids / "sids.parquet")
        levels = [table[name].to_numpy() for name in table.column_names if name != "item"]
        return cls(
            key,
            np.stack(levels, 1).astype(np.int32),
            tuple(codes),
            source,
        )

    def locate_items(self, key_I: np.ndarray) -> np.ndarray:
        """Return the index of each item among the known ones, [I]; -1 for a new one.

        Raises:
            DataError: All items are new.
        """
        order = np.argsort(self.key, kind="stable")
        at = np.minimum(np.searchsorted(self.key, key_I, sorter=order), max(len(self.key) - 1, 0))
        place = np.where(self.key[order[at]] == key_I, order[at], -1) if len(self.key) else at - 1
        if not (place >= 0).any():
            raise DataError(
                f"init: none of the {len(key_I)} items is known to {self.source}, so there is nothing to start from. "
                "Set init to a run with these item ids, or remove init."
            )
        return place

    def extend(self, vectors_ID: np.ndarray, key_I: np.ndarray) -> np.ndarray:
        """Return the ids [I, L] int32 of all items: known items keep theirs, new ones are coded with the reconstructed codebooks.

        Args:
            vectors_ID: Vectors of all items.
            key_I: Sparse keys of all items.
        """
        place = self.locate_items(key_I)
        known = place >= 0
        out = np.empty((len(key_I), len(self.codes)), np.int32)
        out[known] = self.sids[place[known]]
        residual = vectors_ID.astype(np.float32, copy=True)
        free = _FreeNumbers(self.sids, self.codes[-1])
        last = len(self.codes) - 2
        for level in range(last + 1):
            centres = _compute_centres(residual[known], out[known, level], self.codes[level])
            far = _compute_distances(residual[~known], centres)
            if level < last:
                out[~known, level] = far.argmin(1)
                residual -= centres[out[:, level]]
                continue
            for row, nearest in zip(np.flatnonzero(~known), np.argsort(far, 1, kind="stable"), strict=True):
                out[row, last:] = free.take(out[row, :last], nearest)
        return out

    def check(self, sids_IL: np.ndarray, codes: tuple[int, ...], key_I: np.ndarray) -> tuple[int, ...]:
        """Check semantic ids from a file of the user, and return the number of codes K of every level.

        Raises:
            ConfigError: A known item has another id, or a code is beyond those that the weights were trained with.
        """
        place = self.locate_items(key_I)
        known = place >= 0
        same = len(codes) == len(self.codes) and (sids_IL[known] == self.sids[place[known]]).all()
        if not same or any(k > had for k, had in zip(codes, self.codes, strict=True)):
            raise ConfigError(
                f"init: the semantic ids of tokenizer.path are not those that {self.source} was trained with (codes by level "
                f"{list(self.codes)}); use a file that keeps the ids of known items and its codes below those numbers"
            )
        return self.codes


class _FreeNumbers:
    """Free collision numbers by tuple of codes."""

    def __init__(self, sids_JL: np.ndarray, numbers: int):
        self._numbers = numbers
        self._taken: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for *codes, number in sids_JL.tolist():
            self._taken[tuple(codes)].add(number)

    def take(self, prefix: np.ndarray, nearest_K: np.ndarray) -> tuple[int, int]:
        """Take a free number below the first of these codes that has one, and return the code and the number."""
        for code in nearest_K.tolist():
            taken = self._taken[(*prefix.tolist(), code)]
            number = next((n for n in range(self._numbers) if n not in taken), None)
            if number is not None:
                taken.add(number)
                return code, number
        raise DataError(
            f"init: no semantic id is left below the codes {prefix.tolist()}: too many new items are similar. "
            "Train without init, with more codes or levels."
        )


def _compute_centres(residual_JD: np.ndarray, code_J: np.ndarray, codes: int) -> np.ndarray:
    """Compute the mean of each code's vectors [K, D]; NaN for a code without known items in this data."""
    count = np.bincount(code_J, minlength=codes)[:, None]
    total = np.zeros((codes, residual_JD.shape[1]))
    np.add.at(total, code_J, residual_JD)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def _compute_distances(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Compute squared distances [n, K]; infinite for codes without a centre."""
    far = (vectors**2).sum(1)[:, None] - 2 * vectors @ centres.T + (centres**2).sum(1)
    return np.where(np.isnan(far), np.inf, far)
