"""ClickScorer: answers questions about items for users with a trained click model, without Ray.

An event without a label is history (`activity`, `recency`), and neither liked nor disliked.
"""

# Shapes: m items of a request, n past events of a request, Q requests, P pairs of a request and an item, T tasks.

from __future__ import annotations

import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError
from nonet.models.clicks.model import ClickContexts, ClickModel
from nonet.samples.tables import NONE, as_numbers
from nonet.types import Jagged

_MAX_NUMBER = float(np.finfo(np.float32).max)  # models read columns as float32


@dataclass(frozen=True, slots=True)
class ClickRequest:
    """A question for the probabilities of clicks.

    Attributes:
        item: Indices [m] of the items that are asked about; -1 for unknown ones.
        user: The user's own id; None for an unknown user.
        time: Unix seconds of the request; None for no features of the time.
        past: Indices [n] of the items of the user's past events, oldest first; -1 for unknown ones.
        past_time: Unix seconds [n] of the past events.
        label: Label [n] of each past event: LIKED, NOT_LIKED or UNLABELLED.
        older: Number of older events that are left out.
        columns: Value of each column of the interactions that the request has. The model takes the newest training value of
            the user for the others.
        joined: Columns [m] of the items and the user that were joined from stores; None to read them.
    """

    item: np.ndarray
    user: Any = None
    time: int | None = None
    past: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    past_time: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    label: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    older: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    joined: Mapping[str, np.ndarray] | None = None


class ClickScorer:
    """Scores requests with one click model."""

    def __init__(self, model: ClickModel):
        self.model = model
        self._user_index = {str(user): index for index, user in enumerate(model.known.user_id.tolist())}

    def score(self, requests: Sequence[ClickRequest]) -> list[np.ndarray]:
        """Return the click probabilities [m] float32 of each request's items; NaN for unknown items."""
        return [probability_mT[:, 0] for probability_mT in self.score_tasks(requests)]

    def score_tasks(self, requests: Sequence[ClickRequest]) -> list[np.ndarray]:
        """Return the probabilities [m, T] float32 of each request's items, that of a click first, then those of the tasks."""
        if not requests:
            return []
        counts = [len(request.item) for request in requests]
        context_P = np.repeat(np.arange(len(requests)), counts)
        item_P = np.concatenate([np.asarray(request.item, np.int64) for request in requests])
        is_known_P = item_P >= 0
        joined_P = self._concatenate_joined(requests, is_known_P)
        probability_PT = np.full((len(item_P), len(self.model.setup.tasks)), np.nan, np.float32)
        probability_PT[is_known_P] = self.model.predict_pairs(
            self._make_contexts(requests), context_P[is_known_P], item_P[is_known_P], joined_P
        )
        return np.split(probability_PT, np.cumsum(counts)[:-1])

    def _make_contexts(self, requests: Sequence[ClickRequest]) -> ClickContexts:
        """Pack the users and histories of the requests."""
        user = np.array([self._user_index.get(str(request.user), -1) for request in requests], np.int64)
        columns = self.model.known.get_columns(user)
        for name, values in columns.items():
            for row, request in enumerate(requests):
                if name in request.columns:
                    values[row] = request.columns[name]
        lengths = [len(request.past) for request in requests]
        newest = [int(request.past_time[-1]) if len(request.past_time) else None for request in requests]
        present = int(clock.time())  # as of which stores are read for a request without a time
        time = np.array([present if request.time is None else request.time for request in requests], np.int64)
        return ClickContexts(
            user=user,
            user_id=self._make_user_ids(requests),
            past=Jagged(
                np.concatenate([np.asarray(request.past, np.int64) for request in requests]),
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            ),
            label=np.concatenate([np.asarray(request.label, np.int64) for request in requests]),
            older=np.array([request.older for request in requests], np.int64),
            time=time,
            since=np.array(
                [
                    -1 if last is None else max(0, now - last)
                    for now, last in zip(time.tolist(), newest, strict=True)
                ]
            ),
            timeless=np.array([request.time is None for request in requests], bool),
            columns=columns,
            past_time=np.concatenate([np.asarray(request.past_time, np.int64) for request in requests]),
        )

    def _make_user_ids(self, requests: Sequence[ClickRequest]) -> np.ndarray:
        """Return the users' own ids [Q] in the type of the run's ids; no id of the run has the value of an unknown user."""
        if self.model.known.user_id.dtype.kind == "U":
            return np.array([str(request.user or "") for request in requests], np.str_)
        return np.array([_parse_id(str(request.user)) for request in requests], np.int64)

    @staticmethod
    def _concatenate_joined(
        requests: Sequence[ClickRequest], is_known_P: np.ndarray
    ) -> dict[str, np.ndarray] | None:
        """Concatenate the joined columns of all requests, for known items; None if a request has none."""
        joined = [request.joined for request in requests if request.joined is not None]
        if len(joined) < len(requests):
            return None
        joined_P = {}
        for name in joined[0]:
            values = np.concatenate([columns[name] for columns in joined])[is_known_P]
            # A column whose store did not answer has NONE for every item, whatever the type of its values.
            joined_P[name] = np.where(values == NONE, np.nan, values) if values.dtype.kind == "f" else values
        return joined_P


def _parse_id(text: str) -> int:
    """Return the whole number that a text has; NONE if it has none of 64 bits."""
    try:
        number = int(text)
    except ValueError:
        return NONE
    return number if -(1 << 63) <= number < 1 << 63 else NONE


def convert_values(values: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Convert values to the type of their columns, text to its hash; values without a column are left out.

    Raises:
        ConfigError: A value does not fit its column.
    """
    converted = {}
    for name, known_values in columns.items():
        value, dtype = values.get(name), known_values.dtype
        if value is None or value != value:  # NaN is missing, as in a table
            continue
        is_number = dtype.kind == "f"
        kind = "a number" if is_number else "a whole number or text"
        try:
            number = float(value) if is_number else as_numbers(pa.array([value]))[0]
            if is_number and not abs(number) <= _MAX_NUMBER:
                kind = f"a number up to {_MAX_NUMBER:.1e}"
                raise OverflowError
            if isinstance(value, bool):
                raise TypeError
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name}: {repr(value)[:40]} is not {kind}") from None
        converted[name] = dtype.type(number)
    return converted
