"""Questions to a model and its answers.

Both are plain NumPy. A question is built by the feature service, sent to the engine, and names items by index. `pack_questions`
puts the histories of many questions into one `Sequences`, the type that offline prompts are built from too, so the features of
a prompt are the same bytes online and offline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nonet.models.inference.filters import ItemFilter
from nonet.samples.sequences import TEST, Sequences
from nonet.samples.tables import NONE
from nonet.types import Jagged

# Shapes: n events of a history, Q questions, N events of all, k items of an answer.


@dataclass(frozen=True, slots=True)
class EventHistory:
    """Events of one user, oldest first.

    Attributes:
        item: Dense item indices [n] int32.
        time: Unix seconds [n] int64.
        event: Index [n] int32 of the kind of each event.
        columns: Further columns [n] by name.
        start: Number of older events of the user that are left out.
    """

    item: np.ndarray
    time: np.ndarray
    event: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    start: int = 0

    def __len__(self) -> int:
        return len(self.item)

    def select_last(self, count: int) -> EventHistory:
        """Return the newest `count` events."""
        first = max(0, len(self) - count)
        columns = {name: values[first:] for name, values in self.columns.items()}
        return EventHistory(
            self.item[first:], self.time[first:], self.event[first:], columns, self.start + first
        )

    def filter_events(self, mask: np.ndarray) -> EventHistory:
        """Return the events that a mask [n] selects."""
        columns = {name: values[mask] for name, values in self.columns.items()}
        return EventHistory(self.item[mask], self.time[mask], self.event[mask], columns, self.start)


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the model.

    Attributes:
        events: History that the model reads.
        user_key: Sparse key of the user.
        user: Id of the user, by which state is cached between questions.
        top: Number of items to return.
        width: Number of beams, at least `top`.
        hidden: Dense items [h] that are never listed.
        asked: Items [m] to score instead of making a list; None for a list.
        explain: Whether to return also the scores of the model alone and the shares of the votes.
        traffic: Name of the caller or the request, which determines the version that answers if there is no user.
        within: Filter that the items of a list must pass; None for none.
        time: Unix seconds of the request; None if the model does not read it.
        values: Values of the request by column, for models that read them.
        asked_columns: Joined columns [m] of `asked` as of `time`, for models that read them; None for none.
    """

    events: EventHistory
    user_key: int
    user: str = ""
    top: int = 10
    width: int = 20
    hidden: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    asked: np.ndarray | None = None
    explain: bool = False
    traffic: str = ""
    within: ItemFilter | None = None
    time: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    asked_columns: Mapping[str, np.ndarray] | None = None

    @property
    def tokens(self) -> int:
        """Number of positions of the history, including the start position."""
        return len(self.events) + 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question.

    Attributes:
        item: Dense indices [k] int64 of a list, best first, or of `Question.asked` in its order.
        score: Scores [k] in nats, -inf for items that no list may contain.
        own: Scores [k] of the model without votes in nats, if requested.
        vote: Share [k] of the votes, if requested.
        tasks: Probabilities [k] of further tasks of a click model, by name; -inf for unknown items.
    """

    item: np.ndarray
    score: np.ndarray
    own: np.ndarray | None = None
    vote: np.ndarray | None = None
    tasks: Mapping[str, np.ndarray] = field(default_factory=dict)


def pack_questions(questions: Sequence[Question], template: Sequences) -> Sequences:
    """Pack the histories as sequences [N + Q] of Q users; each ends with a placeholder for the target, which is not read.

    Args:
        questions: The questions.
        template: Sequences whose items, kinds of events and columns are used. Its `joined` is not read: a question's events
            have their joined columns already.
    """
    counts = np.array([len(question.events) + 1 for question in questions], np.int64)
    columns = {
        name: _concatenate([question.events.columns[name] for question in questions], _make_filler(values))
        for name, values in template.columns.items()
    }
    return replace(
        template,
        user_id=np.arange(len(questions)),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        item=_concatenate([question.events.item for question in questions], np.int32(0)),
        time=_concatenate([question.events.time for question in questions], np.int64(0)),
        event=_concatenate([question.events.event for question in questions], np.int32(0)),
        split=np.full(int(counts.sum()), TEST, np.int8),
        columns=columns,
        targets={},
        folded=None,
        joined=None,
        user_key=np.array([question.user_key for question in questions], np.int64),
    )


def collect_hidden(questions: Sequence[Question]) -> Jagged:
    """Collect the dense indices of the items that each question excludes from its list."""
    counts = [len(question.hidden) for question in questions]
    values = [np.asarray(question.hidden, np.int64) for question in questions]
    return Jagged(np.concatenate(values), np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def choose_beam_width(min_width: int, top: int) -> int:
    """Return the number of beams for `top` items: `min_width` times a power of two, so that requests often have equal widths."""
    width = min_width
    while width < top:
        width *= 2
    return width


def make_empty_events(template: Sequences) -> EventHistory:
    """Return an empty history with the columns of `template`."""
    empty = np.empty(0, np.int32)
    columns = {name: np.empty(0, values.dtype) for name, values in template.columns.items()}
    return EventHistory(empty, np.empty(0, np.int64), empty, columns)


def find_default_values(seq: Sequences) -> dict[str, np.generic]:
    """Return the default value of an event by column: the largest number, as of a liked item, or NONE for ids."""
    return {name: _find_default(values) for name, values in seq.columns.items()}


def _find_default(values: np.ndarray) -> np.generic:
    """Return the largest number of a column, 0 if it has none, or NONE for a column of ids."""
    if values.dtype.kind != "f":
        return values.dtype.type(NONE)
    largest = np.nanmax(values) if len(values) and not np.isnan(values).all() else 0
    return np.float32(largest)


def _make_filler(values: np.ndarray) -> np.generic:
    """Return the zero of a column's dtype."""
    return values.dtype.type(0)


def _concatenate(parts: Sequence[np.ndarray], filler: np.generic) -> np.ndarray:
    """Concatenate the parts, each followed by `filler`."""
    filler_1 = np.array([filler])
    return np.concatenate([x for part in parts for x in (np.asarray(part, filler_1.dtype), filler_1)])
