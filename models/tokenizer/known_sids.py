"""Semantic ids of a run whose weights another run starts from, and their extension to new items.

Known items keep their ids, because the decoder's codes would change their meaning otherwise. A new item is coded by codebooks
that are reconstructed from the known ids: the centre of a code is the mean of its items' residual vectors. It gets the next free
collision number of its tuple. If a tuple is full, the next nearest code of the last level before the collision level is used, so
every level keeps its number of codes.
"""

# Shapes: I items of the catalogue, J known items, n new ones, L levels (the last numbers collisions), D vector width, K codes.

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
        key: Sparse keys [J] int64 of the items.
        sids: Semantic ids [J, L] int32.
        codes: Number of codes K of every level.
        source: Description of the run that the ids are from, for errors.
    """

    key: np.ndarray
    sids: np.ndarray
    codes: tuple[int, ...]
    source: str

    @classmethod
    def load(cls, sequences: Path, sids: Path, codes: Sequence[int], source: str) -> KnownSids:
        """Load the ids from the artifacts of a run.

        Args:
            sequences: Folder of the run's sequences.
            sids: Folder of its semantic ids.
            codes: Number of codes K of every level.
            source: Description of the run, for errors.
        """
        table = pq.read_table(sids / "sids.parquet")
        levels = [table[name].to_numpy() for name in table.column_names if name != "item"]
        return cls(
            load_item_keys(sequences),
            np.stack(levels, 1).astype(np.int32),
            tuple(codes),
            source,
        )

    def locate_items(self, key_I: np.ndarray) -> np.ndarray:
        """Return the index of each item among the known ones, [I]; -1 for a new one.

        Raises:
            DataError: All items are new.
        """
        order_J = np.argsort(self.key, kind="stable")
        rank_I = np.minimum(np.searchsorted(self.key, key_I, sorter=order_J), max(len(self.key) - 1, 0))
        index_I = (
            np.where(self.key[order_J[rank_I]] == key_I, order_J[rank_I], -1) if len(self.key) else rank_I - 1
        )
        if not (index_I >= 0).any():
            raise DataError(
                f"init: none of the {len(key_I)} items is known to {self.source}, so there is nothing to start from. "
                "Set init to a run with these item ids, or remove init."
            )
        return index_I

    def extend(self, vectors_ID: np.ndarray, key_I: np.ndarray) -> np.ndarray:
        """Return the ids [I, L] int32 of all items: known items keep theirs, new ones are coded with the reconstructed codebooks.

        Args:
            vectors_ID: Vectors of all items.
            key_I: Sparse keys of all items.
        """
        index_I = self.locate_items(key_I)
        is_known_I = index_I >= 0
        sids_IL = np.empty((len(key_I), len(self.codes)), np.int32)
        sids_IL[is_known_I] = self.sids[index_I[is_known_I]]
        residual = vectors_ID.astype(np.float32, copy=True)
        numbers = _CollisionNumbers(self.sids, self.codes[-1])
        # The level before the collision level.
        last_level = len(self.codes) - 2
        for level in range(last_level + 1):
            centres = _compute_centres(residual[is_known_I], sids_IL[is_known_I, level], self.codes[level])
            distance_nK = _compute_distances(residual[~is_known_I], centres)
            if level < last_level:
                sids_IL[~is_known_I, level] = distance_nK.argmin(1)
                residual -= centres[sids_IL[:, level]]
                continue
            for item, codes in zip(
                np.flatnonzero(~is_known_I), np.argsort(distance_nK, 1, kind="stable"), strict=True
            ):
                sids_IL[item, last_level:] = numbers.reserve_next(sids_IL[item, :last_level], codes)
        return sids_IL

    def check(self, sids_IL: np.ndarray, codes: tuple[int, ...], key_I: np.ndarray) -> tuple[int, ...]:
        """Check semantic ids from a file of the user, and return the number of codes per level that the weights have.

        Raises:
            ConfigError: A known item has another id, or a code is beyond those that the weights were trained with.
        """
        index_I = self.locate_items(key_I)
        is_known_I = index_I >= 0
        is_unchanged = (
            len(codes) == len(self.codes) and (sids_IL[is_known_I] == self.sids[index_I[is_known_I]]).all()
        )
        if not is_unchanged or any(k > trained for k, trained in zip(codes, self.codes, strict=True)):
            raise ConfigError(
                f"init: the semantic ids of tokenizer.path are not those that {self.source} was trained with (codes by level "
                f"{list(self.codes)}); use a file that keeps the ids of known items and its codes below those numbers"
            )
        return self.codes


class _CollisionNumbers:
    """Assigns collision numbers that are free, by tuple of codes."""

    def __init__(self, sids_JL: np.ndarray, n_numbers: int):
        self._n_numbers = n_numbers
        self._used: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for *codes, number in sids_JL.tolist():
            self._used[tuple(codes)].add(number)

    def reserve_next(self, prefix: np.ndarray, nearest_K: np.ndarray) -> tuple[int, int]:
        """Reserve a free collision number of `prefix` and the nearest code that has one; return the code and the number."""
        for code in nearest_K.tolist():
            used = self._used[(*prefix.tolist(), code)]
            number = next((n for n in range(self._n_numbers) if n not in used), None)
            if number is not None:
                used.add(number)
                return code, number
        raise DataError(
            f"init: no semantic id is left below the codes {prefix.tolist()}: too many new items are similar. "
            "Train without init, with more codes or levels."
        )


def _compute_centres(residual_JD: np.ndarray, code_J: np.ndarray, n_codes: int) -> np.ndarray:
    """Compute the mean [K, D] of the residuals of each code's items; NaN for a code without items."""
    count = np.bincount(code_J, minlength=n_codes)[:, None]
    total = np.zeros((n_codes, residual_JD.shape[1]))
    np.add.at(total, code_J, residual_JD)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def _compute_distances(vectors_nD: np.ndarray, centres_KD: np.ndarray) -> np.ndarray:
    """Compute the squared distances [n, K] of vectors to centres; infinite for centres that are NaN."""
    distance_nK = (vectors_nD**2).sum(1)[:, None] - 2 * vectors_nD @ centres_KD.T + (centres_KD**2).sum(1)
    return np.where(np.isnan(distance_nK), np.inf, distance_nK)
