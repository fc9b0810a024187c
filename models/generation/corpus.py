"""The artifacts of the tokenise stage: the catalogue of items, and the events of users, which are opened on first access.

All of it is read-only. The trie, the events and the counts of transitions are memory-mapped.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import VoteOptions, Voters, list_memory_files
from nonet.samples.batches import load_new_events
from nonet.samples.sequences import Sequences, Transitions
from nonet.samples.stores import StoreJoins
from nonet.samples.tokenised import StoredSequences, as_array, read_items

# Shapes: I items, L levels, n events.


@dataclass(frozen=True)
class Catalogue:
    """The items of a run and their semantic ids.

    Attributes:
        folders: Folder of each artifact by kind.
        items: The item table, in the order of dense item indices.
        sids: Semantic ids [I, L] int32.
        codes: Number of codes per level.
        trie: Trie of all items.
    """

    folders: Mapping[str, str]
    items: pa.Table
    sids: np.ndarray
    codes: tuple[int, ...]
    trie: Trie

    @classmethod
    def load(cls, folders: Mapping[str, str]) -> Self:
        """Open the artifacts.

        Args:
            folders: Folder of each artifact by kind: `sequences` (for the item table), `sids` and `catalogue` (the trie). Without
                `sids`, as in a run of a click model, an item's only code is its dense index.
        """
        if "sids" not in folders:
            items = read_items(folders)
            index_sids = np.arange(len(items), dtype=np.int32)[:, None]
            trie = Trie.build(index_sids, (len(items),))
            return cls(folders, items, index_sids, tuple(trie.codes), trie)
        sid_table = pq.read_table(Path(folders["sids"]) / "sids.parquet")
        levels = [sid_table[name].to_numpy() for name in sid_table.column_names if name != "item"]
        trie = Trie.load(Path(folders["catalogue"]))
        sids = np.stack(levels, axis=1).astype(np.int32)
        return cls(folders, read_items(folders), sids, tuple(trie.codes), trie)

    @cached_property
    def item_id(self) -> np.ndarray:
        """Original item ids [I], int64 or text."""
        return as_array(self.items["item_id"])


class Corpus(Catalogue):
    """A catalogue and the events of users with its items.

    Attributes:
        joins: Joins of event columns from stores; None for none.
        stored: The store that users' events are read from; None to read them from the artifact.
    """

    @cached_property
    def transitions(self) -> Transitions:
        """Counts of how often an item followed another one closely in training events."""
        return Transitions.load(Path(self.folders["transitions"]))

    def open_voters(self, options: VoteOptions) -> Voters:
        """Open the voters of a memory with these options."""
        files = list_memory_files(Path(self.folders["transitions"]))
        return Voters.open(files, self.trie, options, self.transitions)

    joins: StoreJoins | None = None
    stored: StoredSequences | None = None

    @cached_property
    def seq(self) -> Sequences:
        """The events with their joined columns; loaded on first access."""
        return load_events(self.folders, self.stored, self.joins, self.item_id)

    def attach_store(self, stored: StoredSequences | None) -> Corpus:
        """Return a copy that reads each user's events from a store; if `seq` has been accessed before, the copy keeps it."""
        other = copy.copy(self)
        other.__dict__["stored"] = stored
        return other

    def release_pages(self) -> None:
        """Drop the resident pages of the memory-mapped files (`madvise(DONTNEED)`); a later access reads them again."""
        for name in ("seq", "transitions"):
            if name in self.__dict__:
                getattr(self, name).release_pages()

    def attach_joins(self, joins: StoreJoins) -> Corpus:
        """Return a copy whose events have columns joined from stores; call it before `seq` is first accessed."""
        other = copy.copy(self)
        other.__dict__["joins"] = joins
        return other

    def replace_events(self, seq: Sequences) -> Corpus:
        """Return a copy with other events of the same items."""
        other = copy.copy(self)
        other.__dict__["seq"] = seq
        return other


@dataclass(frozen=True)
class JoinedEvents:
    """Reads the joined columns of events; `add_joins` sets an instance as `Sequences.joined`.

    Attributes:
        joins: The joins of the run.
        item_id: The items' own ids [I].
    """

    joins: StoreJoins
    item_id: np.ndarray

    def __call__(self, item: np.ndarray, user_id: np.ndarray, time: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns [n] of events, given dense items [n], the users' own ids [n] and times [n]."""
        return self.joins.read_event_columns(self.item_id[item], user_id, np.asarray(time))


def load_events(
    folders: Mapping[str, str], stored: StoredSequences | None, joins: StoreJoins | None, item_id: np.ndarray
) -> Sequences:
    """Load the events of a run.

    Args:
        folders: Folder of each artifact by kind.
        stored: The store that users' events are read from; None to read them from the artifact.
        joins: Joins of event columns from stores; None for none.
        item_id: The items' own ids [I].
    """
    folder = Path(folders["sequences"])
    seq = Sequences.load(folder)
    if stored:
        store_copy = folder.with_name(f"stored-{folder.name.rpartition('-')[2]}")
        seq = stored.open_events(folders, seq).load_sequences(store_copy)
    if "targets" in folders:
        seq = replace(seq, new_targets=load_new_events(folders["targets"]) > 0)
    return add_joins(seq, joins, item_id) if joins else seq


def add_joins(seq: Sequences, joins: StoreJoins, item_id: np.ndarray) -> Sequences:
    """Return a copy of the sequences whose batches also contain the joined columns."""
    other = copy.copy(seq)
    other.__dict__["joined"] = JoinedEvents(joins, item_id)
    return other
