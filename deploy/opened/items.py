"""The items of a catalogue as requests name them: ids, titles, filters over columns, and items that are gone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import ConfigError, NonetError
from nonet.models.generation import Catalogue
from nonet.models.inference import ItemFilter
from nonet.samples.tables import match_rows
from nonet.suggest import find_close_matches

pc: Any = pyarrow.compute  # its functions are created at import time, which type checkers do not see

# Shapes: I items.
_MAX_FILTER_BYTES = 64 << 20  # maximum size of cached filters
_MAX_FILTERS = 4096
_MAX_FILTER_CHARS = 1000
_MAX_COMPARED = 200_000  # number of titles, the most popular ones, among which those close to a misspelt one are looked for
_MAX_SIMILAR = 100  # number of titles that are compared letter by letter
_MAX_NAMED_ITEMS = 5  # number of items that the message about an ambiguous title lists


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
    """The items of one version of a run's catalogue.

    Args:
        corpus: The version of the catalogue.
        before: The items of an earlier version, whose dense indices are the same; None for the first one.

    Attributes:
        gone: Dense indices of items that an earlier version of the catalogue had and this one lacks.
    """

    def __init__(self, corpus: Catalogue, before: CatalogueItems | None = None):
        self._table, self._ids, self._version = corpus.items, corpus.item_id, corpus.trie.version
        self._index_of = {str(item): index for index, item in enumerate(self._ids.tolist())}
        self._is_listed_I = np.asarray(corpus.trie.leaf_of_item) >= 0
        self._was_listed_I = self._is_listed_I.copy()  # in this or an earlier version
        if before is not None:
            self._was_listed_I[: len(before)] |= before._was_listed_I
        self.gone = np.flatnonzero(self._was_listed_I & ~self._is_listed_I)
        self._filters: OrderedDict[str, ItemFilter] = OrderedDict()
        self._lock = threading.Lock()  # filters are created in other threads than the event loop's

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def legal(self) -> int:
        """Number of items that this version lists, without those that are gone."""
        return int(self._is_listed_I.sum())

    def find_indices(self, ids: Sequence[int | str]) -> tuple[np.ndarray, list[int | str]]:
        """Return the dense indices of known ids in their order, and the unknown ids."""
        indices = [(item, self._index_of.get(str(item))) for item in ids]
        return (
            np.array([index for _, index in indices if index is not None], np.int64),
            [item for item, index in indices if index is None],
        )

    def get_ids(self, item_indices: np.ndarray) -> list[int | str]:
        """Return the original ids of dense indices."""
        return self._ids[item_indices].tolist()

    def get_id_array(self, item_indices: np.ndarray) -> np.ndarray:
        """Return the original ids of dense indices as an array, int64 or text."""
        return self._ids[item_indices]

    def get_titles(self, item_indices: np.ndarray) -> list[str]:
        """Return the titles of dense indices; ids if items have no titles."""
        column = "title" if "title" in self._table.column_names else "item_id"
        return [str(text) for text in self._table[column].take(item_indices).to_pylist()]

    def make_filter(self, where: str) -> ItemFilter:
        """Return the filter of a condition over item columns, from a cache of recent ones. Raises Refused for a wrong one."""
        if len(where) > _MAX_FILTER_CHARS:
            raise Refused(
                "bad_filter", f"where: {len(where)} characters; a filter has at most {_MAX_FILTER_CHARS}"
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
            least = max(1, min(_MAX_FILTERS, _MAX_FILTER_BYTES // max(1, allowed.nbytes)))
            while len(self._filters) > least:
                self._filters.popitem(last=False)  # the one that was used least recently
        return item_filter

    def find_excluded(self, where: str) -> np.ndarray:
        """Return the dense indices of items for which a condition over item columns is false. Raises Refused for a wrong one."""
        return np.flatnonzero(~self.make_filter(where).allowed)

    def search(self, words: str, count: int) -> np.ndarray:
        """Return dense indices of listed items whose title contains a text, most popular first.

        Args:
            words: The text to search for, ignoring case.
            count: Maximum number of items.
        """
        column = "title" if "title" in self._table.column_names else "item_id"
        titles = pc.cast(self._table[column].combine_chunks(), pa.string())
        matches = pc.fill_null(pc.match_substring(titles, words, ignore_case=True), False)
        item_indices = np.flatnonzero(matches.to_numpy(zero_copy_only=False) & self._is_listed_I)
        event_counts = self._table["events"].to_numpy()[item_indices]
        return item_indices[np.argsort(-event_counts, kind="stable")[:count]]

    def find_title(self, title: str) -> int:
        """Return the dense index of the listed item whose title equals or, if there is none, contains `title`, ignoring case.

        A year in parentheses at the end of a title may be left out.

        Raises:
            Refused: There is no such item, or several; the message lists the ids of some.
        """
        wanted = title.casefold().strip()
        folded, without_year = self._folded_titles
        for matches in (
            [item for item, text in folded.items() if wanted in (text, without_year[item])],
            [item for item, text in folded.items() if wanted in text],
        ):
            if len(matches) == 1:
                return matches[0]
            if matches:
                shown = matches[:_MAX_NAMED_ITEMS]
                named = [
                    f"{self._ids[item]} ({text})"
                    for item, text in zip(shown, self.get_titles(np.array(shown)), strict=True)
                ]
                more = f" and {len(matches) - len(named)} more" if len(matches) > len(named) else ""
                raise Refused(
                    "ambiguous_title",
                    f"{len(matches)} items are called {title!r}: {', '.join(named)}{more}; give the id of one",
                )
        similar = [without_year[item] for item in self._find_similar(wanted)]
        close_titles = find_close_matches(wanted, similar, max_matches=3, cutoff=0.5)
        item_of = {text: item for item, text in without_year.items()}
        close_items = np.array([item_of[text] for text in close_titles], np.int64)
        close = ", ".join(self.get_titles(close_items))
        hint = f"; close: {close}" if close else ""
        if title in self._index_of:
            hint = "; it is the id of an item, which --items takes, or `history` of a request"
        raise Refused("unknown_title", f"no item is called {title!r} in this run{hint}")

    def _find_similar(self, text: str) -> list[int]:
        """Return the dense indices of the listed items whose titles have most groups of three letters in common with a text."""
        items, places_by_group = self._titles_by_group
        groups = [places_by_group[group] for group in _list_groups(text) if group in places_by_group]
        if not groups:
            return []
        counts = np.bincount(np.concatenate(groups), minlength=len(items))
        best = np.argsort(-counts, kind="stable")[:_MAX_SIMILAR]
        return items[best[counts[best] > 0]].tolist()

    @cached_property
    def _titles_by_group(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The most popular listed items, and by group of three letters the places of those whose title has it."""
        titles = list(self._folded_titles[1].items())[:_MAX_COMPARED]
        places: dict[str, list[int]] = {}
        for place, (_, title) in enumerate(titles):
            for group in _list_groups(title):
                places.setdefault(group, []).append(place)
        items = np.array([item for item, _ in titles], np.int64)
        return items, {group: np.array(found, np.int32) for group, found in places.items()}

    @cached_property
    def _folded_titles(self) -> tuple[dict[int, str], dict[int, str]]:
        """The titles of listed items in lower case by dense index, most popular first, and the same without a year."""
        popular_items = self.rank_by_popularity()
        titles = self.get_titles(popular_items)
        folded = {item: text.casefold() for item, text in zip(popular_items.tolist(), titles, strict=True)}
        return folded, {item: text.rsplit(" (", 1)[0] for item, text in folded.items()}

    def rank_by_popularity(self) -> np.ndarray:
        """Return the dense indices of listed items, most events first."""
        order = np.argsort(-self._table["events"].to_numpy(), kind="stable")
        return order[self._is_listed_I[order]]


def _list_groups(text: str) -> set[str]:
    """Return the groups of three letters of a text, which begins and ends with a blank."""
    padded = f" {text} "
    return {padded[start : start + 3] for start in range(len(padded) - 2)}
