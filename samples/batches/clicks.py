"""Every event of the sequences as a row of a click model: user, item, time, and whether the item was liked.

The features of a row depend only on earlier events, and on labels that were known by then, so a held-out row never sees its
own label or a later one. Each feature has one bag of ids per row:

    user, item                   indices in the sequences and the item table
    categories, year             of the item; the year is the number at the end of its title, "Toy Story (1995)"
    liked, disliked              items of the last `history` events before this one, by their label, if it is known by now
    hour, weekday, recency       the time: hour and weekday (UTC), log2 of the seconds since the user's previous event
    activity                     log2 of the number of the user's events so far
    taste                        the share of liked items among liked and disliked ones, in twentieths
    <column>                     any column of the interactions: integers and text as ids, other numbers rounded

Keys are hashes of a feature's value in a space of its own (`samples/tables/keys.py`), so they mean the same in every data
set. Keys of different features never collide, except those of item, liked and disliked, so features may share a table.
"""

# Shapes: N events, P rows of a batch, C categories, I items.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nonet.errors import ConfigError
from nonet.random import hash_words
from nonet.ranges import expand_ranges
from nonet.samples.sequences import NEVER, TRAIN, Sequences
from nonet.samples.tables import NONE, as_numbers, compute_keys
from nonet.suggest import join_names, suggest_sentence
from nonet.types import Jagged

# Features of the time of a row, which are left out of a row without a time.
MOMENT = ("hour", "weekday", "recency")
FEATURES = ("user", "item", "categories", "year", "liked", "disliked", *MOMENT, "activity", "taste")
_ITEM_FEATURES = ("item", "liked", "disliked")  # their values are items
# In checkpoints of earlier versions, the keys of a feature start at a multiple of `_OLD_SPACE`, and those of a column of the
# interactions at one of `_OLD_COLUMN_SPACES` multiples, chosen by a hash of its name.
_OLD_SPACE, _OLD_COLUMN_SPACES = 1 << 48, 1 << 14


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
    """

    categories: Jagged
    year: np.ndarray
    names: tuple[str, ...]

    @property
    def category_key(self) -> np.ndarray:
        """The sparse key of each category name [C]."""
        return compute_keys("categories", as_numbers(pa.array(self.names, pa.string())))

    @classmethod
    def from_items(cls, items: pa.Table) -> ItemFacts:
        """Read the facts from an item table in index order."""
        names_by_item = items["categories"].to_pylist()
        names = sorted({name for item in names_by_item for name in item or ()})
        index = {name: position for position, name in enumerate(names)}
        values = np.array([index[name] for item in names_by_item for name in item or ()], np.int64)
        offsets = np.cumsum([0, *(len(item or ()) for item in names_by_item)])
        matches = [re.search(r"\((\d{4})\)\s*$", str(title)) for title in items["title"].to_pylist()]
        year = np.array([int(match[1]) if match else 0 for match in matches], np.int64)
        return cls(Jagged(values, offsets), year, tuple(names))


@dataclass(frozen=True, slots=True)
class ClickBatch:
    """A rank's share of a step: bags of keys by feature, labels [P] float32, and the number of rows of the step on all ranks."""

    bags: Mapping[str, Jagged]
    label: np.ndarray
    step_rows: int


@dataclass(frozen=True)
class ClickRows:
    """Events of the sequences as rows of a click model.

    Attributes:
        seq: The sequences.
        items: Attributes of the items.
        label: Label of each event [N] float32: 1 if the stage's condition holds, else 0.
        features: Names of the features.
        history: Maximum number of earlier events that a row uses.
        keys: Sparse keys; None for checkpoints of earlier versions, whose keys are indices.
        known_from: Unix seconds [N] from which on the label is known; None if each label is known at the time of its event.
    """

    seq: Sequences
    items: ItemFacts
    label: np.ndarray
    features: tuple[str, ...]
    history: int
    keys: SparseKeys | None
    known_from: np.ndarray | None = None

    @classmethod
    def from_labels(
        cls,
        seq: Sequences,
        items: pa.Table,
        label: np.ndarray,
        features: Sequence[str],
        history: int,
        known_from: np.ndarray | None = None,
    ) -> ClickRows:
        """Create the rows of a click model. Raises ConfigError for an unknown feature.

        Args:
            seq: The sequences.
            items: The item table in index order.
            label: Label of each event [N].
            features: Names of the features.
            history: Maximum number of earlier events that a row uses.
            known_from: Unix seconds [N] from which on labels are known; None if that is the time of the event.
        """
        allowed = (*FEATURES, *seq.feature_columns)
        for name in features:
            if name not in allowed:
                raise ConfigError(
                    f"a click model has no feature {name!r}; there are {join_names(allowed)}."
                    f"{suggest_sentence(name, allowed)}"
                )
        facts = ItemFacts.from_items(items)
        keys = None
        if seq.user_key is not None and seq.item_key is not None:
            keys = SparseKeys(seq.user_key, seq.item_key, facts.category_key)
        return cls(seq, facts, np.asarray(label, np.float32), tuple(features), history, keys, known_from)

    @classmethod
    def from_target(
        cls, seq: Sequences, items: pa.Table, target: str | None, features: Sequence[str], history: int
    ) -> ClickRows:
        """Create rows that are labelled by the condition of a target, by default the first one."""
        label = seq.targets[target or next(iter(seq.targets))].astype(np.float32)
        times = seq.get_label_times(target)
        return cls.from_labels(seq, items, label, features, history, None if times is seq.time else times)

    def list_features(self) -> tuple[str, ...]:
        """Return the names of all features that a model of these sequences may have."""
        return (*FEATURES, *self.seq.feature_columns)

    def find_rows(self, split: int) -> np.ndarray:
        """Return the indices [P] of the events of a split; for TRAIN only those whose label training may use."""
        selected = self.seq.split == split
        if split == TRAIN and self.known_from is not None:
            selected = selected & (self.known_from < NEVER)
        return np.flatnonzero(selected)

    def batch(self, index: np.ndarray, *, without_moment: np.ndarray | None = None) -> dict[str, Jagged]:
        """Build the bags of keys by feature for events [P].

        Args:
            index: Indices of the events [P].
            without_moment: Mask [P] of the rows whose time features are left empty; None for no row.
        """
        seq = self.seq
        user, begin = seq.user[index], seq.offsets[seq.user[index]]  # `begin` is the user's first event
        past, past_offsets = expand_ranges(np.maximum(begin, index - self.history), index)
        is_known = np.ones(
            len(past), bool
        )  # whether the label of each past event is known at the time of the row
        if self.known_from is not None:
            is_known = self.known_from[past] <= np.repeat(seq.time[index], np.diff(past_offsets))
        columns = {name: values[index] for name, values in seq.columns.items()}
        if seq.folded is not None:  # a row must not see the repeats that came after it
            columns |= seq.folded.compute_columns(index, seq.time[index])
        questions = ClickQuestions(
            user=user,
            item=seq.item[index].astype(np.int64),
            liked=select_values(seq.item[past], past_offsets, is_known & (self.label[past] > 0)),
            disliked=select_values(seq.item[past], past_offsets, is_known & (self.label[past] == 0)),
            activity=index - begin,
            time=seq.time[index],
            since=np.where(index == begin, -1, seq.time[index] - seq.time[np.maximum(index - 1, 0)]),
            timeless=np.zeros(len(index), bool) if without_moment is None else without_moment,
            columns=columns,
        )
        return make_bags(questions, self.items, self.features, self.keys)


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
        columns: Columns of the interactions by name, [P] each.
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


def make_bags(
    questions: ClickQuestions, items: ItemFacts, features: Sequence[str], keys: SparseKeys | None
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
    bags = {}
    for name in features:
        bag = (
            makers[name]()
            if name in makers
            else _make_column_bags(questions.columns.get(name), len(questions.item))
        )
        values = np.asarray(bag.values, np.int64)
        key_N = values + _compute_key_offset(name) if keys is None else keys.get_keys(name, values)
        bags[name] = Jagged(torch.from_numpy(key_N), torch.from_numpy(bag.offsets))
    return bags


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
    """Build the bags of an interaction column; empty bags if there is no such column."""
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


def _compute_key_offset(name: str) -> int:
    """Return the first key of a feature in checkpoints of earlier versions."""
    if name in _ITEM_FEATURES:
        return 0
    if name in FEATURES:
        return (1 + FEATURES.index(name)) * _OLD_SPACE
    return (1 + len(FEATURES) + hash_words(0, "column", name) % _OLD_COLUMN_SPACES) * _OLD_SPACE
