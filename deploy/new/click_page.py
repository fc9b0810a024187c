"""The scenario of a click model that `nonet new FILE --data DIR --target CONDITION` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.samples.batches import CLICK_FEATURES, ItemFacts
from nonet.samples.profiles import DataProfile
from nonet.samples.sequences import convert_column

_MAX_TEST_EVENTS = 10  # of a user
_HELD_OUT_SHARE = 0.15  # of the events of the median user, that are tested
_MIN_USER_EVENTS = 25  # of the median user, below which a row per user memorises the user
_STEPS_AN_EPOCH = 60
_MIN_STEP_EVENTS, _MAX_STEP_EVENTS = 64, 1024


@dataclass(frozen=True)
class SelectedItemFeatures:
    """The features that a click scenario reads from the table of items.

    Attributes:
        has_categories: Whether there is a column of categories.
        has_years: Whether most titles end with a year.
        columns: Other columns that are features.
        omitted: Columns that are none, by the reason.
    """

    has_categories: bool = False
    has_years: bool = False
    columns: tuple[str, ...] = ()
    omitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def describe_omitted(self) -> list[str]:
        """Return a line of text per reason, with the columns that it is about."""
        return [f"{', '.join(columns)} ({reason})" for reason, columns in self.omitted.items()]


def select_item_features(items: pa.Table | None, log_columns: Sequence[str]) -> SelectedItemFeatures:
    """Select the columns of the items that are features: those whose values several items share on average.

    Args:
        items: The item table; None without one.
        log_columns: Names of the columns of the interactions, which a click model reads before those of the items.
    """
    if items is None:
        return SelectedItemFeatures()
    readable = ItemFacts.list_columns(items.schema)
    columns: list[str] = []
    has_years, omitted = _has_years(items), dict[str, list[str]]()
    for name in items.column_names:
        if name in ("item_id", "title", "categories") or (name == "year" and has_years):
            continue
        if name in CLICK_FEATURES or name in log_columns:
            reason = "a feature or a column of the interactions has the name"
        elif name not in readable:
            reason = "a click model reads numbers, text and the list `categories`"
        elif 2 * _count_keys(items[name]) > len(items):
            reason = "most items have a value of their own"
        else:
            columns.append(name)
            continue
        omitted.setdefault(reason, []).append(name)
    return SelectedItemFeatures(
        "categories" in items.column_names,
        has_years,
        tuple(columns),
        {reason: tuple(names) for reason, names in omitted.items()},
    )


def _count_keys(column: pa.ChunkedArray) -> int:
    """Count the distinct values of a column as a click model reads them: it rounds numbers."""
    values = convert_column(column)
    return len(np.unique(np.rint(values) if values.dtype.kind == "f" else values))


def render_click_scenario(
    name: str,
    title: str,
    data: Mapping[str, Any],
    profile: DataProfile,
    items: SelectedItemFeatures,
    target: str,
) -> str:
    """Render the scenario of a click model as YAML.

    Args:
        name: The scenario's name.
        title: The title in the first comment.
        data: The `data` section: `interactions`, `items`, `columns`.
        profile: Figures of the data.
        items: The features of the items.
        target: The condition that says which events are clicks.
    """
    return "\n".join(_iterate_lines(name, title, data, profile, items, target)) + "\n"


def _iterate_lines(
    name: str,
    title: str,
    data: Mapping[str, Any],
    profile: DataProfile,
    items: SelectedItemFeatures,
    target: str,
) -> Iterator[str]:
    """Yield the lines of `render_click_scenario`."""
    counts = f"{profile.users:,} users, {profile.items:,} items, {profile.events:,} events"
    test = max(1, min(_MAX_TEST_EVENTS, int(_HELD_OUT_SHARE * _compute_median_events(profile))))
    yield f"# {title}: {counts} -> the probability that an event is a click."
    yield f"name: {name}"
    yield "seed: 7"
    yield "data:"
    for key, value in data.items():
        yield f"  {key}: {json.dumps(value, ensure_ascii=False)}"
    yield "  history: 20       # liked and disliked items among a user's last 20 events"
    yield f"  split: {{use: leave_last_out, test: {test}, valid: {max(1, test // 2)}}}   # events of each user, the newest"
    yield "model: {use: deepfm, hidden: [64, 32], dropout: 0.3}"
    yield "sparse:"
    yield "  defaults: {dim: 9, optimizer: adagrad, lr: 0.03, weight_decay: 0.2, init_scale: 0.01}"
    yield "  tables:"
    if _compute_median_events(profile) >= _MIN_USER_EVENTS:
        yield "    user: {}"
    yield "    item: {features: [item, liked]}   # one table for the item and for items liked before"
    yield "    disliked: {}"
    if items.has_categories:
        yield "    categories: {}"
    if items.has_years:
        yield "    year: {}"
    yield "    moment: {features: [hour, weekday, recency, activity, taste]}"
    if items.columns:
        yield f"    facts: {{features: {json.dumps(items.columns)}}}   # columns of the items; remove those not known in time"
    yield from (f"    # not used: {line}" for line in items.describe_omitted())
    yield "    # context: {features: [page]}     # columns of the interactions that are known before the click"
    yield "stages:"
    yield f"  train: {{epochs: 2, batch: {{tokens: {_choose_step_events(profile)}}}, lr: 3e-3, target: {json.dumps(target)}}}"
    yield "evaluate: {metrics: [auc, log_loss]}"


def _compute_median_events(profile: DataProfile) -> float:
    """Return the median number of events of a user."""
    cumulative = np.cumsum(profile.users_of)
    return float(np.searchsorted(cumulative, cumulative[-1] / 2))


def _choose_step_events(profile: DataProfile) -> int:
    """Return the number of events of a step: a power of two that gives an epoch about `_STEPS_AN_EPOCH` steps."""
    power = int(np.log2(max(1, profile.events / _STEPS_AN_EPOCH)))
    return int(np.clip(2**power, _MIN_STEP_EVENTS, _MAX_STEP_EVENTS))


def _has_years(items: pa.Table) -> bool:
    """Return whether most titles end with a year in parentheses."""
    titles: Sequence[Any] = items["title"].to_pylist() if "title" in items.column_names else []
    with_year = sum(bool(re.search(r"\(\d{4}\)\s*$", str(title))) for title in titles)
    return 2 * with_year > len(titles)
