"""Columns that are joined from stores to the events of requests, each as of its event's own time, as in training."""

# Shapes: n events of a history, N events of all histories.

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from nonet.errors import StoreError
from nonet.models.inference import EventHistory, TensorBatch
from nonet.samples.stores import Join, StoreJoins, StoreNotFoundError
from nonet.samples.tables import NONE


@dataclass(frozen=True, slots=True)
class HistoryToJoin:
    """A history whose events get joined columns.

    Attributes:
        events: The events [n].
        item_ids: The items' own ids [n].
        user_id: The user's own id in the type of the run's ids; None for no user.
    """

    events: EventHistory
    item_ids: np.ndarray
    user_id: int | str | None


class HistoryJoins:
    """Reads the joined columns that a model has as features, for the events of many requests at once.

    Args:
        joins: The joins of the run, by name.
        features: Names of the model's features. Joins without one of them are not read.
        optional: Names of joins whose columns are missing if `check` finds no store.

    Attributes:
        names: Names of the joins that are read.
    """

    def __init__(self, joins: Mapping[str, Join], features: Collection[str], optional: Collection[str] = ()):
        selected = select_joins(joins, features)
        self._columns_by_join = {name: list(join.sources) for name, join in selected.items()}
        self._stores = StoreJoins(selected)
        self._optional, self._absent = frozenset(optional), set[str]()
        self.names = tuple(selected)
        self._queue: TensorBatch[HistoryToJoin, tuple[EventHistory, tuple[str, ...]]] | None = None
        self._queue_lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self.names)

    def check(self) -> None:
        """Open every store, so that a wrong one is reported before anything is answered.

        Raises:
            ConfigError: A store does not exist, unless it is optional, or lacks a column. A store that does not answer is no
                error here.
        """
        for name in self.names:
            try:
                self._stores.open_join(name)
            except StoreNotFoundError:
                if name not in self._optional:
                    raise
                self._absent.add(name)
            except StoreError:
                continue  # its columns are missing until it answers

    def add_columns(self, histories: Sequence[HistoryToJoin]) -> list[EventHistory]:
        """Return the histories with the joined columns, read by one look-up per join.

        Raises:
            StoreError: A store does not answer.
        """
        return self._read(histories, missing=None)

    def add_available_columns(
        self, histories: Sequence[HistoryToJoin]
    ) -> list[tuple[EventHistory, tuple[str, ...]]]:
        """Return the histories with the joined columns, and the names of the joins whose store did not answer.

        The columns of these joins have missing values.
        """
        missing: list[str] = []
        joined = self._read(histories, missing)
        return [(events, tuple(missing)) for events in joined]

    def submit(self, history: HistoryToJoin, within_s: float) -> Future[tuple[EventHistory, tuple[str, ...]]]:
        """Read the joined columns of a history on a thread, together with those of other callers.

        Returns:
            A future of the history with the joined columns, and the names of the joins whose store did not answer: their
            columns have missing values.
        """
        with self._queue_lock:
            if self._queue is None:
                self._queue = TensorBatch(self.add_available_columns, lambda each: 1.0 + len(each.events))
        return self._queue.submit(history, within_s)

    def fill_missing(self, events: EventHistory) -> EventHistory:
        """Return a history whose joined columns are all missing."""
        columns = {
            name: self._make_missing(len(events))
            for names in self._columns_by_join.values()
            for name in names
        }
        return replace(events, columns=events.columns | columns)

    def _read(self, histories: Sequence[HistoryToJoin], missing: list[str] | None) -> list[EventHistory]:
        """Read the columns of histories.

        Args:
            histories: The histories.
            missing: Receives the names of joins whose store does not answer; None raises the error of the store.
        """
        counts = [len(each.events) for each in histories]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        times_N = np.concatenate([np.empty(0, np.int64), *(each.events.time for each in histories)])
        item_ids_N = np.concatenate([each.item_ids for each in histories])
        user_ids_N = [
            each.user_id for each, count in zip(histories, counts, strict=True) for _ in range(count)
        ]
        columns_N: dict[str, np.ndarray] = {}
        for name, columns in self._columns_by_join.items():
            if not len(times_N):
                columns_N |= {column: self._make_missing(0) for column in columns}
                continue
            try:
                if name in self._absent:
                    raise StoreError(f"data.join.{name}: there is no store")
                columns_N |= self._stores.read_join_columns(name, item_ids_N, user_ids_N, times_N)
            except StoreError:
                if missing is None:
                    raise
                missing.append(name)
                columns_N |= {column: self._make_missing(len(times_N)) for column in columns}
        return [
            replace(
                each.events,
                columns=each.events.columns
                | {column: values[offsets[row] : offsets[row + 1]] for column, values in columns_N.items()},
            )
            for row, each in enumerate(histories)
        ]

    @staticmethod
    def _make_missing(count: int) -> np.ndarray:
        """Return a joined column [count] of missing values; features are ids (`controller/setup/preflight.py` checks it)."""
        return np.full(count, NONE, np.int64)

    def close(self) -> None:
        """Stop the thread, and close the stores."""
        if self._queue is not None:
            self._queue.close()
        self._stores.close()


def select_joins(joins: Mapping[str, Join], features: Collection[str]) -> dict[str, Join]:
    """Return the joins with a column that is a feature of the model, by name, with only these columns."""
    selected = {}
    for name, join in joins.items():
        sources = {column: source for column, source in join.sources.items() if column in features}
        if sources:
            selected[name] = join.model_copy(update={"columns": sources})
    return selected
