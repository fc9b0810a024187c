"""ClickData: the events, items and labels that a click model learns from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from nonet.models.clicks import ClickSetup
from nonet.models.generation import load_events
from nonet.samples.batches import ClickRows
from nonet.samples.batches.graphs import Graphs
from nonet.samples.sequences import Sequences
from nonet.samples.stores import Join, StoreJoins
from nonet.samples.tokenised import as_array, read_items
from nonet.workers.roles import RunSetup


def make_click_setup(run: RunSetup) -> ClickSetup:
    """Return the settings from which the click model of a run is built."""
    return ClickSetup(
        model=run.model,
        tables=run.tables,
        features=run.features,
        combiners=run.combiners,
        history=run.history,
        seed=run.seed,
    )


def select_joins(run: RunSetup) -> dict[str, Join]:
    """Return the joins of a run from which the click model reads features, by name."""
    return {name: join for name, join in run.joins.items() if set(join.sources) & set(run.features)}


class ClickData:
    """The artifacts of a run that a click model reads. The events are opened at first use."""

    def __init__(self, run: RunSetup, folders: Mapping[str, str]):
        self._run, self._folders = run, folders
        self.items: pa.Table = read_items(folders)
        joins = select_joins(run)
        self.joins = StoreJoins(joins) if joins else None
        self._clicks_by_target: dict[str | None, ClickRows] = {}

    @cached_property
    def seq(self) -> Sequences:
        """The events of all users, with the columns that are joined from stores, and the run's graphs."""
        seq = load_events(self._folders, self._run.stored, self.joins, as_array(self.items["item_id"]))
        if "graphs" not in self._folders:
            return seq
        return Graphs.load(Path(self._folders["graphs"]), seq, self._run.seed).attach_to(seq)

    def replace_events(self, seq: Sequences) -> ClickData:
        """Return the data with other events of the same items, and with graphs of them."""
        other = ClickData(self._run, self._folders)
        if self.seq.graphs is not None:
            seq = self.seq.graphs.replace_events(seq, self.seq.user_id).attach_to(seq)
        other.__dict__["seq"] = seq  # In place of the cached property.
        return other

    def label_events(self, target: str | None) -> ClickRows:
        """Return the events with the labels of a stage's target condition. The labels are computed once per condition."""
        if target not in self._clicks_by_target:
            features, history = list(self._run.features), self._run.history
            joined = list(self.joins.get_kinds()) if self.joins else []
            self._clicks_by_target[target] = ClickRows.from_target(
                self.seq, self.items, target, features, history, joined
            )
        return self._clicks_by_target[target]

    def release_pages(self) -> None:
        """Drop the process's resident pages of the memory-mapped log."""
        if "seq" in self.__dict__:  # The events have been opened.
            self.seq.release_pages()
