"""Data types that the packages exchange.

The module imports neither torch nor Ray, so a reward or a CPU tool can use it without either. Shapes: B sequences,
N events, U users (prompts), W beams, L semantic-id levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class RowRange:
    """Physical rows [start, stop) of one file of the table of a stage, in one epoch. The row id is file << 40 | row."""

    epoch: int
    file: int
    start: int
    stop: int


@dataclass(slots=True)
class Jagged:
    """Ragged data: `values [N, ...]` split by `offsets [B + 1]` (int64, offsets[0] == 0), in NumPy or torch."""

    values: Any
    offsets: Any

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Any:
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]


@dataclass(slots=True)
class SampleBatch:
    """A packed batch of tokenised events: B sequences with N events in all.

    Tensors are torch CPU tensors unless they have been moved.

    Attributes:
        item: Values [N] int64, dense item indices (row numbers of artifacts/items.parquet).
        sid: [N, L] int64, the semantic id of the item of each event.
        time: Values [N] int64, unix seconds.
        event: Values [N] int64, event type indices (0 if the data have no event column).
        context: Tensors [B] or Jagged [N] by column name. Sparse keys and ids are int64 and always include "user"
            [B] and
            "item" [N], the keys of their table rows; dense features are float32.
        loss_mask: Values [N] bool, True where the event counts as a target.
        target: [B] int64, the dense index of the item to predict after the last event, or None during pretraining.
        uid: One string per sequence.
    """

    item: Jagged
    sid: Any
    time: Jagged
    event: Jagged
    context: dict[str, Any]
    loss_mask: Jagged
    target: Any | None
    uid: list[str]


@dataclass(slots=True)
class Rollouts:
    """The input of a reward: read-only NumPy arrays of users and beams.

    A group is the set of beams of one user.
    The beams of a group are ordered by log-probability, most likely first, however they were drawn.

    Attributes:
        uid: [U] str.
        user_id: [U] original user ids.
        item_id: [U, W] original item ids; -1 or "" where no legal beam was left.
        item: [U, W] int64 dense item indices; -1 where no legal beam was left.
        sid: [U, W, L] int32 semantic ids.
        logp: [U, W, L] float32 log-probabilities under the trie constraint, in nats.
        valid: [U, W] bool.
        target: Jagged, original item ids.
        history: Jagged, original item ids.
        scene: [U].
        weights_version: The version of the weights that generated the beams.
        catalogue_version: The version of the trie.
        step: The training step.
        columns: Item columns joined to [U, W] and user columns [U], by name; `r["price"]` reads one.
        weight: [U, W] float32 for sampled beams: the weights with which the sum over a group is the expectation
            under the policy (`nonet.rl.Draws`); None for plain beam search.
        chance: [U, W] float32 for sampled beams: the probability that a beam is in its group; None for plain beam
            search.
        sampling_logp: [U, W, L] float32 log-probabilities that beams were sampled with, if they differ from logp.
        added: [U, W] bool, beams that were added to their group because the user chose them next (`with_target`);
            None if there are none.
    """

    uid: np.ndarray
    user_id: np.ndarray
    item_id: np.ndarray
    item: np.ndarray
    sid: np.ndarray
    logp: np.ndarray
    valid: np.ndarray
    target: Jagged
    history: Jagged
    scene: np.ndarray
    weights_version: int
    catalogue_version: str
    step: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    weight: np.ndarray | None = None
    chance: np.ndarray | None = None
    sampling_logp: np.ndarray | None = None
    added: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Rollouts:
        """Return the rollouts of some prompts, in the order of `rows` [n]."""
        return self._map_rows(lambda value: _take_rows(value, rows))

    @classmethod
    def concat(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Concatenate the rollouts of all parts; values that exist once per step are taken from the first part."""
        return parts[0]._map_rows(lambda *values: _concat_values(values), *parts[1:])

    def _map_rows(self, change: Callable[..., Any], *others: Rollouts) -> Rollouts:
        """Apply `change` to each value that has a row per prompt, together with the same values of `others`."""
        values = {each.name: [getattr(part, each.name) for part in (self, *others)] for each in fields(self)}
        columns = [part for part in values.pop("columns") if part is not None]
        found = {
            name: change(*parts)
            for name, parts in values.items()
            if parts[0] is not None and not isinstance(parts[0], int | str)
        }
        return replace(
            self, **found, columns={name: change(*(part[name] for part in columns)) for name in columns[0]}
        )

    def __getitem__(self, column: str) -> np.ndarray:
        try:
            return self.columns[column]
        except KeyError:
            known = ", ".join(sorted(self.columns)) or "none"
            raise KeyError(f"no column {column!r} was joined to these rollouts; there are: {known}") from None


def _take_rows(value: Any, rows: np.ndarray) -> Any:
    """Return the selected rows of an array or of ragged data."""
    import numpy as np

    if not isinstance(value, Jagged):
        return value[rows]
    lists = [value[int(row)] for row in rows]
    return Jagged(np.concatenate([value.values[:0], *lists]), np.cumsum([0, *map(len, lists)]))


def _concat_values(values: Sequence[Any]) -> Any:
    """Concatenate arrays or ragged data."""
    import numpy as np

    if not isinstance(values[0], Jagged):
        return np.concatenate(values)
    lengths = np.concatenate([np.diff(value.offsets) for value in values])
    return Jagged(np.concatenate([value.values for value in values]), np.concatenate([[0], lengths.cumsum()]))
