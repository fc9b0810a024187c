"""ClickQuestions: the inputs of a click model for rows, and the bags of keys that are made of them.

Each feature has one bag of ids per row:

    user, item                   indices in the sequences and the item table
    categories, year             of the item; the year is the number at the end of its title, "Toy Story (1995)"
    liked, disliked              items of the last `history` events before this one, by their label, if it is known by now
    hour, weekday, recency       the time: hour and weekday (UTC), log2 of the seconds since the user's previous event
    activity                     log2 of the number of the user's events so far
    taste                        the share of liked items among liked and disliked ones, in twentieths
    <graph>                      neighbours of the item or user in a graph of `data.graph`, drawn as of the row's time
    <graph>_1hop, <graph>_2hop   log2 of the number of edges of the node, and of its drawn neighbours together, by then
    <column>                     any column of the interactions, of the items, or joined from a store as of the row's time:
                                 integers and text as ids, other numbers rounded

Keys are hashes of a feature's value in a space of its own (`samples/tables/keys.py`), so they mean the same in every data
set. Keys of different features never collide, except those of items (item, liked, disliked, neighbours) and those of users (user,
neighbours), so features may share a table.
"""

# Shapes: P rows, C categories, I items.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nonet.ranges import expand_ranges
from nonet.samples.batches.graphs import ONE_HOP, TWO_HOPS, Neighbours
from nonet.samples.sequences import convert_column, select_carried_columns
from nonet.samples.tables import NONE, as_numbers, compute_keys
from nonet.types import Jagged

# Features of the time of a row, which are left out of a row without a time.
MOMENT = ("hour", "weekday", "recency")
CLICK_FEATURES = ("user", "item", "categories", "year", "liked", "disliked", *MOMENT, "activity", "taste")
_ITEM_TABLE_COLUMNS = ("item", "item_id", "title", "categories", "events")  # of every item table
_ITEM_FEATURES = ("item", "liked", "disliked")  # their values are items


@dataclass(frozen=True)
class SparseKeys:
    """Sparse keys of users [U], items [I] and categories [C], int64 each; `user` and `item` are in the order of the sequences."""

    user: np.ndarray
    item: np.ndarray
    category: np.ndarray

    def get_keys(self, feature: str, values: np.ndarray) -> np.ndarray:
        """Return the keys [N] of a feature's values [N], which are indices for users, items and categories."""
        if feature in _ITEM_FEATURES:
            return self.item[values]
        if feature in ("user", "categories"):
            return (self.user if feature == "user" else self.category)[values]
        return compute_keys(feature, values)


@dataclass(frozen=True)
class ItemFacts:
    """Attributes of the items that are features.

    Attributes:
        categories: Category indices of each item [I].
        year: Year at the end of each item's title [I] int64; 0 for none.
        names: Names of the categories [C], sorted.
        columns: Columns of the item table that are features, by name: values [I] as `Sequences.columns` has them.
    """

    categories: Jagged
    year: np.ndarray
    names: tuple[str, ...]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def category_key(self) -> np.ndarray:
        """The sparse key of each category name [C]."""
        return compute_keys("categories", as_numbers(pa.array(self.names, pa.string())))

    @staticmethod
    def list_columns(schema: pa.Schema) -> list[str]:
        """Return the names of the columns of an item table that can be features: those of numbers or text that a user added."""
        return [name for name in select_carried_columns(schema, None)[0] if name not in _ITEM_TABLE_COLUMNS]

    @classmethod
    def from_items(cls, items: pa.Table, columns: Sequence[str] = ()) -> ItemFacts:
        """Read the facts from an item table in index order.

        Args:
            items: The item table.
            columns: Names of its columns that are features.
        """
        names_by_item = items["categories"].to_pylist()
        names = sorted({name for item in names_by_item for name in item or ()})
        index = {name: position for position, name in enumerate(names)}
        values = np.array([index[name] for item in names_by_item for name in item or ()], np.int64)
        offsets = np.cumsum([0, *(len(item or ()) for item in names_by_item)])
        matches = [re.search(r"\((\d{4})\)\s*$", str(title)) for title in items["title"].to_pylist()]
        year = np.array([int(match[1]) if match else 0 for match in matches], np.int64)
        values_by_column = {name: convert_column(items[name]) for name in columns}
        return cls(Jagged(values, offsets), year, tuple(names), values_by_column)


@dataclass(frozen=True)
class ClickQuestions:
    """The inputs of a click model for P rows, before they are hashed to keys.

    Attributes:
        user: Index of each row's user [P]; -1 if unknown.
        item: Dense index of each row's item [P] int64.
        liked: Past items with the label 1, one bag per row.
        disliked: Past items with the label 0, one bag per row.
        activity: Number of the user's earlier events [P].
        time: Unix seconds [P].
        since: Seconds since the user's previous event [P]; -1 if there is none.
        timeless: Mask [P] of the rows without time features.
        columns: Columns of the interactions and joined columns by name, [P] each.
        neighbours: Neighbours of the rows by graph.
    """

    user: np.ndarray
    item: np.ndarray
    liked: Jagged
    disliked: Jagged
    activity: np.ndarray
    time: np.ndarray
    since: np.ndarray
    timeless: np.ndarray
    columns: Mapping[str, np.ndarray]
    neighbours: Mapping[str, Neighbours] = field(default_factory=dict)


def make_bags(
    questions: ClickQuestions, items: ItemFacts, features: Sequence[str], keys: SparseKeys
) -> dict[str, Jagged]:
    """Build the bags of keys by feature, one bag per row [P], as tensors."""
    makers: dict[str, Any] = {
        "user": lambda: _make_single_bags(questions.user, questions.user >= 0),
        "item": lambda: _make_single_bags(questions.item),
        "categories": lambda: _take_bags(items.categories, questions.item),
        "year": lambda: _make_single_bags(items.year[questions.item]),
        "liked": lambda: questions.liked,
        "disliked": lambda: questions.disliked,
        "hour": lambda: _make_single_bags(questions.time // 3600 % 24, ~questions.timeless),
        "weekday": lambda: _make_single_bags(questions.time // 86400 % 7, ~questions.timeless),
        "recency": lambda: _make_single_bags(_bucket_log2(questions.since), ~questions.timeless),
        "activity": lambda: _make_single_bags(_bucket_log2(questions.activity)),
        "taste": lambda: _make_single_bags(
            _compute_liked_share(np.diff(questions.liked.offsets), np.diff(questions.disliked.offsets))
        ),
    }
    spaces: dict[str, str] = {}  # The feature whose keys a feature has, by name.
    for name, neighbours in questions.neighbours.items():
        makers |= _make_neighbour_bags(name, neighbours)
        spaces[name] = neighbours.kind
    columns = {name: values[questions.item] for name, values in items.columns.items()} | dict(
        questions.columns
    )
    bags = {}
    for name in features:
        bag = makers[name]() if name in makers else _make_column_bags(columns.get(name), len(questions.item))
        key_N = keys.get_keys(spaces.get(name, name), np.asarray(bag.values, np.int64))
        bags[name] = Jagged(torch.from_numpy(key_N), torch.from_numpy(bag.offsets))
    return bags


def _make_neighbour_bags(name: str, neighbours: Neighbours) -> dict[str, Any]:
    """Return functions that make the bags of a graph's features, by the names of the features."""
    makers: dict[str, Any] = {
        name: lambda: neighbours.drawn,
        name + ONE_HOP: lambda: _make_single_bags(_bucket_log2(neighbours.one_hop)),
    }
    if (two_hops := neighbours.two_hops) is not None:
        makers[name + TWO_HOPS] = lambda: _make_single_bags(_bucket_log2(two_hops))
    return makers


def select_values(values: np.ndarray, offsets: np.ndarray, keep: np.ndarray) -> Jagged:
    """Keep the values [N] of each bag where `keep` [N] is True."""
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    return Jagged(values[keep].astype(np.int64), kept_before[offsets].astype(np.int64))


def _make_single_bags(values: np.ndarray, has_value: np.ndarray | None = None) -> Jagged:
    """Build bags of one value each; they are empty where `has_value` is False."""
    has_value = np.ones(len(values), bool) if has_value is None else has_value
    return Jagged(values[has_value], np.concatenate([[0], np.cumsum(has_value)]).astype(np.int64))


def _take_bags(bags: Jagged, index: np.ndarray) -> Jagged:
    """Return the bags with these indices."""
    value_index, offsets = expand_ranges(bags.offsets[index], bags.offsets[index + 1])
    return Jagged(bags.values[value_index], offsets)


def _make_column_bags(values: np.ndarray | None, count: int) -> Jagged:
    """Build the bags of a column; empty bags if there is no such column."""
    if values is None:
        return Jagged(np.empty(0, np.int64), np.zeros(count + 1, np.int64))
    if values.dtype.kind in "iu":
        return _make_single_bags(values, values != NONE)
    has_value = ~np.isnan(values)
    return _make_single_bags(np.rint(np.where(has_value, values, 0)).astype(np.int64), has_value)


def _bucket_log2(counts: np.ndarray) -> np.ndarray:
    """Map negative counts to 0, 0 to 1, and other counts c to 1 + ceil(log2(c + 1)), 1 plus their number of binary digits."""
    return np.where(counts < 0, 0, 1 + np.ceil(np.log2(np.maximum(counts, 0) + 1.0))).astype(np.int64)


def _compute_liked_share(liked: np.ndarray, disliked: np.ndarray) -> np.ndarray:
    """Return the share of liked items in twentieths, smoothed by one more item of each label; 10 if both counts are 0."""
    return np.rint(20 * (liked + 1) / (liked + disliked + 2)).astype(np.int64)
