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

MOMENT = ("hour", "weekday", "recency")
FEATURES = ("user", "item", "categories", "year", "liked", "disliked", *MOMENT, "activity", "taste")
_ITEMS = ("item", "liked", "disliked")
_SPACE = 1 << 48  # keys of a feature start at a multiple of this in older checkpoints
_COLUMNS = 1 << 14


@dataclass(frozen=True)
class SparseKeys:
    """Sparse keys of users [U], items [I] and categories [C]; None in checkpoints of a version whose keys are indices."""

    user: np.ndarray
    item: np.ndarray
    category: np.ndarray

    def get_keys(self, feature: str, values: np.ndarray) -> np.ndarray:
        """Return the keys [N] of a feature's values [N], which are indices for users, items and categories."""
        if feature in _ITEMS:
            return self.item[values]
        if feature in ("user", "categories"):
            return (self.user if feature == "user" else self.category)[values]
        return compute_keys(feature, values)


@dataclass(frozen=True)
class ItemFacts:
    """Facts of the items: category indices, and the year at the end of the title (0 for none)."""

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
        lists = items["categories"].to_pylist()
        names = sorted({name for row in lists for name in row or ()})
        number = {name: place for place, name in enumerate(names)}
        values = np.array([number[name] for row in lists for name in row or ()], np.int64)
        offsets = np.cumsum([0, *(len(row or ()) for row in lists)])
        matches = [re.search(r"\((\d{4})\)\s*$", str(title)) for title in items["title"].to_pylist()]
        year = np.array([int(match[1]) if match else 0 for match in matches], np.int64)
        return cls(Jagged(values, offsets), year, tuple(names))


@dataclass(frozen=True, slots=True)
class ClickBatch:
    """A rank's share of a step: bags of ids by feature, labels [P] float32, and the rows of the step over all ranks."""

    bags: Mapping[str, Jagged]
    label: np.ndarray
    step_rows: int


@dataclass(frozen=True)
class ClickRows:
    """Events of the sequences as rows.

    Attributes:
        label: [N] float32, 1 where the stage's condition holds.
        known_from: [N] unix seconds from which on the label is known; None where each is known from its event on.
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
            history: Earlier events that a row uses.
            known_from: Unix seconds [N] from which on labels are known; None if that is the time of the event.
        """
        known = (*FEATURES, *seq.feature_columns)
        for name in features:
            if name not in known:
                raise ConfigError(
                    f"a click model has no feature {name!r}; there are {join_names(known)}.{suggest_sentence(name, known)}"
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
        """Return the names of all features."""
        return (*FEATURES, *self.seq.feature_columns)

    def find_rows(self, split: int) -> np.ndarray:
        """Return the indices [P] of the events of a split; for TRAIN only those whose label training may use."""
        mine = self.seq.split == split
        if split == TRAIN and self.known_from is not None:
            mine = mine & (self.known_from < NEVER)
        return np.flatnonzero(mine)

    def batch(self, index: np.ndarray, *, without_moment: np.ndarray | None = None) -> dict[str, Jagged]:
        """Build the bags of ids by feature for events [P]; time features are omitted where `without_moment` [P] is True."""
        seq = self.seq
        user, begin = seq.user[index], seq.offsets[seq.user[index]]
        past, cuts = expand_ranges(np.maximum(begin, index - self.history), index)
        first = index == begin
        known = np.ones(len(past), bool)
        if self.known_from is not None:
            known = self.known_from[past] <= np.repeat(seq.time[index], np.diff(cuts))
        columns = {name: values[index] for name, values in seq.columns.items()}
        if seq.folded is not None:  # a row must not see the repeats that came after it
            columns |= seq.folded.compute_columns(index, seq.time[index])
        questions = ClickQuestions(
            user=user,
            item=seq.item[index].astype(np.int64),
            liked=select_values(seq.item[past], cuts, known & (self.label[past] > 0)),
            disliked=select_values(seq.item[past], cuts, known & (self.label[past] == 0)),
            activity=index - begin,
            time=seq.time[index],
            since=np.where(first, -1, seq.time[index] - seq.time[np.maximum(index - 1, 0)]),
            timeless=np.zeros(len(index), bool) if without_moment is None else without_moment,
            columns=columns,
        )
        return make_bags(questions, self.items, self.features, self.keys)


@dataclass(frozen=True)
class ClickQuestions:
    """P inputs of a click model: user, item, history by label, and time (`since` the previous event; -1: none)."""

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
    click_questions: ClickQuestions, items: ItemFacts, features: Sequence[str], keys: SparseKeys | None
) -> dict[str, Jagged]:
    """Build each feature's bag of keys [P] as tensors."""
    makers: dict[str, Any] = {
        "user": lambda: _make_single_bags(click_questions.user, click_questions.user >= 0),
        "item": lambda: _make_single_bags(click_questions.item),
        "categories": lambda: _take_bags(items.categories, click_questions.item),
        "year": lambda: _make_single_bags(items.year[click_questions.item]),
        "liked": lambda: click_questions.liked,
        "disliked": lambda: click_questions.disliked,
        "hour": lambda: _make_single_bags(click_questions.time // 3600 % 24, ~click_questions.timeless),
        "weekday": lambda: _make_single_bags(click_questions.time // 86400 % 7, ~click_questions.timeless),
        "recency": lambda: _make_single_bags(_bucket_log2(click_questions.since), ~click_questions.timeless),
        "activity": lambda: _make_single_bags(_bucket_log2(click_questions.activity)),
        "taste": lambda: _make_single_bags(
            _share(np.diff(click_questions.liked.offsets), np.diff(click_questions.disliked.offsets))
        ),
    }
    bags = {}
    for name in features:
        bag = (
            makers[name]()
            if name in makers
            else _make_column_bags(click_questions.columns.get(name), len(click_questions.item))
        )
        values = np.asarray(bag.values, np.int64)
        key_N = values + _compute_key_offset(name) if keys is None else keys.get_keys(name, values)
        bags[name] = Jagged(torch.from_numpy(key_N), torch.from_numpy(bag.offsets))
    return bags


def select_values(values: np.ndarray, offsets: np.ndarray, keep: np.ndarray) -> Jagged:
    """Keep the values [N] of each bag where `keep` [N] is True."""
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    return Jagged(values[keep].astype(np.int64), kept_before[offsets].astype(np.int64))


def _make_single_bags(values: np.ndarray, there: np.ndarray | None = None) -> Jagged:
    there = np.ones(len(values), bool) if there is None else there
    return Jagged(values[there], np.concatenate([[0], np.cumsum(there)]).astype(np.int64))


def _take_bags(rows: Jagged, index: np.ndarray) -> Jagged:
    place, offsets = expand_ranges(rows.offsets[index], rows.offsets[index + 1])
    return Jagged(rows.values[place], offsets)


def _make_column_bags(values: np.ndarray | None, count: int) -> Jagged:
    """Build the bags of an interaction column; empty bags if there is no such column."""
    if values is None:
        return Jagged(np.empty(0, np.int64), np.zeros(count + 1, np.int64))
    if values.dtype.kind in "iu":
        return _make_single_bags(values, values != NONE)
    there = ~np.isnan(values)
    return _make_single_bags(np.rint(np.where(there, values, 0)).astype(np.int64), there)


def _bucket_log2(counts: np.ndarray) -> np.ndarray:
    """Map negative counts to 0, 0 to 1, and others to 1 plus their number of binary digits."""
    return np.where(counts < 0, 0, 1 + np.ceil(np.log2(np.maximum(counts, 0) + 1.0))).astype(np.int64)


def _share(yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    """Return the share of likes in twentieths, smoothed by one of each kind; 10 if nothing is known."""
    return np.rint(20 * (yes + 1) / (yes + no + 2)).astype(np.int64)


def _compute_key_offset(name: str) -> int:
    if name in _ITEMS:
        return 0
    if name in FEATURES:
        return (1 + FEATURES.index(name)) * _SPACE
    return (1 + len(FEATURES) + hash_words(0, "column", name) % _COLUMNS) * _SPACE
