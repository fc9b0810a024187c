"""Items: the ids that callers use, the columns that they filter by, and items that are never shown."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import ConfigError, NonetError
from nonet.models.generation import Catalogue
from nonet.models.inference import ItemFilter
from nonet.samples.tables import match_rows

pc: Any = pyarrow.compute  # its functions are created at import time, which type checkers do not see

# Shapes: I items.
_FILTER_BYTES = 64 << 20  # maximum size of cached filters
_LONGEST_FILTER = 1000


class Refused(ConfigError):
    """A request that cannot be answered as it is; `kind` names the mistake for programs."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return Refused, (self.kind, str(self))


class Away(NonetError):
    """A service that this request needs does not answer."""


class CatalogueItems:
    """The items of a run's catalogue.

    Args:
        corpus: The catalogue.
        before: The items of the version before.

    Attributes:
        gone: Dense indices of items that an earlier version of the catalogue had and this one lacks.
    """

    def __init__(self, corpus: Catalogue, before: CatalogueItems | None = None):
        self._table, self._ids, self._version = corpus.items, corpus.item_id, corpus.trie.version
        self._place = {str(item): place for place, item in enumerate(self._ids.tolist())}
        self._legal = np.asarray(corpus.trie.leaf_of_item) >= 0
        self._ever = self._legal.copy()
        if before is not None:
            self._ever[: len(before)] |= before._ever
        self.gone = np.flatnonzero(self._ever & ~self._legal)
        self._filters: OrderedDict[str, ItemFilter] = OrderedDict()
        self._lock = threading.Lock()  # filters are created in other threads than the event loop's

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def legal(self) -> int:
        """Number of items in the catalogue."""
        return int(self._legal.sum())

    def find_indices(self, ids: Sequence[int | str]) -> tuple[np.ndarray, list[int | str]]:
        """Return the dense indices of known ids in their order, and the unknown ids."""
        known = [(item, self._place.get(str(item))) for item in ids]
        return (
            np.array([place for _, place in known if place is not None], np.int64),
            [item for item, place in known if place is None],
        )

    def get_ids(self, places: np.ndarray) -> list[int | str]:
        """Return the original ids of dense indices."""
        return self._ids[places].tolist()

    def get_titles(self, places: np.ndarray) -> list[str]:
        """Return the titles of dense indices; ids if items have no titles."""
        name = "title" if "title" in self._table.column_names else "item_id"
        return [str(text) for text in self._table[name].take(places).to_pylist()]

    def make_filter(self, where: str) -> ItemFilter:
        """Return the filter of a condition over item columns; recent ones are cached. Raises Refused if it is not valid."""
        if len(where) > _LONGEST_FILTER:
            raise Refused(
                "bad_filter", f"where: {len(where)} characters; a filter has at most {_LONGEST_FILTER}"
            )
        with self._lock:
            if where in self._filters:
                self._filters.move_to_end(where)
                return self._filters[where]
        try:
            allowed = match_rows(where, self._table, name="where")
        except ConfigError as error:
            raise Refused("bad_filter", str(error)) from None
        item_filter = ItemFilter(where, self._version, allowed)
        with self._lock:
            self._filters[where] = item_filter
            while len(self._filters) > 1 and self.filter_bytes > _FILTER_BYTES:
                self._filters.popitem(last=False)
        return item_filter

    @property
    def filter_bytes(self) -> int:
        """Size of the cached filters in bytes."""
        return sum(each.allowed.nbytes for each in self._filters.values())

    def find_excluded(self, where: str) -> np.ndarray:
        """Return the dense indices of items that a condition over item columns excludes. Raises Refused if it is not valid."""
        return np.flatnonzero(~self.make_filter(where).allowed)

    def search(self, words: str, count: int) -> np.ndarray:
        """Return dense indices of catalogue items whose title contains these words, most popular first.

        Args:
            words: The text to search for, ignoring case.
            count: Maximum number of items.
        """
        name = "title" if "title" in self._table.column_names else "item_id"
        titles = pc.cast(self._table[name].combine_chunks(), pa.string())
        found = pc.fill_null(pc.match_substring(titles, words, ignore_case=True), False)
        places = np.flatnonzero(found.to_numpy(zero_copy_only=False) & self._legal)
        events = self._table["events"].to_numpy()[places]
        return places[np.argsort(-events, kind="stable")[:count]]

    def rank_by_popularity(self) -> np.ndarray:
        """Return the dense indices of catalogue items, most events first."""
        order = np.argsort(-self._table["events"].to_numpy(), kind="stable")
        return order[self._legal[order]]
