"""Corpus: everything the tokenise stage left behind, opened once per process.

Sequences of users, items in dense-index order, their semantic ids, and the catalogue trie (memory-mapped). Read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.models.generation.corpus_items import as_array, read_items
from nonet.models.generation.trie import Trie
from nonet.samples.sequences import Sequences

# Shapes: I items, L levels.

KINDS = ("sequences", "sids", "catalogue")


@dataclass(frozen=True)
class Corpus:
    """seq; items (a row an item, dense order); sids [I, L] int32; codes per level; trie of the catalogue."""

    seq: Sequences
    items: pa.Table
    sids: np.ndarray
    codes: tuple[int, ...]
    trie: Trie

    @classmethod
    def load(cls, folders: Mapping[str, str]) -> Corpus:
        """Open the artifacts named by kind: sequences, sids, catalogue."""
        sequences, sids, catalogue = (Path(folders[kind]) for kind in KINDS)
        table = pq.read_table(sids / "sids.parquet")
        levels = [table[name].to_numpy() for name in table.column_names if name != "item"]
        trie = Trie.load(catalogue)
        codes = np.stack(levels, axis=1).astype(np.int32)
        return cls(Sequences.load(sequences), read_items(folders), codes, tuple(trie.codes), trie)

    @cached_property
    def item_id(self) -> np.ndarray:
        """Original item ids [I], int64 or text."""
        return as_array(self.items["item_id"])
