"""ClickData: the events, items and labels that a click model learns from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import pyarrow as pa

from nonet.models.deepfm import ClickSetup
from nonet.models.generation import read_items
from nonet.samples.batches import ClickRows
from nonet.samples.sequences import Sequences
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


class ClickData:
    """The artifacts of a run that a click model reads. The events are opened at first use."""

    def __init__(self, run: RunSetup, folders: Mapping[str, str]):
        self._run, self._folders = run, folders
        self.items: pa.Table = read_items(folders)
        self.joins = None  # As in `Corpus`; a click model joins no stores.
        self._clicks_by_target: dict[str | None, ClickRows] = {}

    @cached_property
    def seq(self) -> Sequences:
        """The events of all users."""
        return Sequences.load(self._folders["sequences"])

    def replace_events(self, seq: Sequences) -> ClickData:
        """Return the data with other events of the same items."""
        other = ClickData(self._run, self._folders)
        other.__dict__["seq"] = seq  # In place of the cached property.
        return other

    def label_events(self, target: str | None) -> ClickRows:
        """Return the events with the labels of a stage's target condition. The labels are computed once per condition."""
        if target not in self._clicks_by_target:
            features, history = list(self._run.features), self._run.history
            self._clicks_by_target[target] = ClickRows.from_target(
                self.seq, self.items, target, features, history
            )
        return self._clicks_by_target[target]

    def release_pages(self) -> None:
        """Drop the process's resident pages of the memory-mapped log."""
        if "seq" in self.__dict__:  # The events have been opened.
            self.seq.release_pages()
