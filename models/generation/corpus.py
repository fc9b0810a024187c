"""What the tokenise stage left behind: the catalogue of items, and with it the events of users, which open when first read.

Read-only; the trie is memory-mapped.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.models.generation.corpus_items import as_array, read_items
from nonet.models.generation.trie import Trie
from nonet.samples.sequences import Sequences, Transitions, joined_to
from nonet.samples.stores import Joins
from nonet.samples.tokenised import StoredSequences

# Shapes: I items, L levels.


@dataclass(frozen=True)
class Catalogue:
    """The items: a row each in dense order, their semantic ids [I, L] int32, codes per level, and the trie of them all."""

    folders: Mapping[str, str]
    items: pa.Table
    sids: np.ndarray
    codes: tuple[int, ...]
    trie: Trie

    @classmethod
    def load(cls, folders: Mapping[str, str]) -> Self:
        """Open the artifacts by kind: sequences (of them the item table), sids, catalogue."""
        table = pq.read_table(Path(folders["sids"]) / "sids.parquet")
        levels = [table[name].to_numpy() for name in table.column_names if name != "item"]
        trie = Trie.load(Path(folders["catalogue"]))
        codes = np.stack(levels, axis=1).astype(np.int32)
        return cls(folders, read_items(folders), codes, tuple(trie.codes), trie)

    @cached_property
    def item_id(self) -> np.ndarray:
        """Original item ids [I], int64 or text."""
        return as_array(self.items["item_id"])


class Corpus(Catalogue):
    """A catalogue and the events of users over it."""

    @cached_property
    def transitions(self) -> Transitions:
        """How often items came soon after others in training."""
        return Transitions.load(Path(self.folders["transitions"]))

    joins: Joins | None = None
    stored: StoredSequences | None = None

    @cached_property
    def seq(self) -> Sequences:
        """The events, with what is joined to them; a process that never asks for them never loads them."""
        seq = Sequences.load(Path(self.folders["sequences"]))
        if self.stored:
            folder = Path(self.folders["sequences"])
            copied = folder.with_name(f"stored-{folder.name.rpartition('-')[2]}")
            seq = self.stored.opened(self.folders, seq).sequences(copied)
        return joined_to(seq, self.joins, self.item_id) if self.joins else seq

    def events_in_store(self, user: str) -> Mapping[str, Any] | None:
        """All events of a user by the store, appended ones last (`UserEvents.of`); None without a store, or such a user."""
        return None if self.stored is None else self.stored.opened(self.folders, self.seq).of(user)

    def stored_in(self, stored: StoredSequences | None) -> Corpus:
        """The same, its events read out of a store by user; before they are first read."""
        other = copy.copy(self)
        other.__dict__["stored"] = stored
        return other

    def release_pages(self) -> None:
        """Drop the resident pages of the memory-mapped files (`madvise(DONTNEED)`); a later access reads them again."""
        for name in ("seq", "transitions"):
            if name in self.__dict__:
                getattr(self, name).release_pages()

    def with_joins(self, joins: Joins) -> Corpus:
        """The same, its events with columns out of stores; before they are first read."""
        other = copy.copy(self)
        other.__dict__["joins"] = joins
        return other

    def with_events(self, seq: Sequences) -> Corpus:
        """The same items with other events."""
        other = copy.copy(self)
        other.__dict__["seq"] = seq
        return other
