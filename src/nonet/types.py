"""Data types that the packages exchange.

The module imports neither torch nor Ray, so that a reward or a tool on a CPU can use it without them.

Shapes: B sequences, N events of all sequences, U users (prompts), W beams of a user, L semantic-id levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class RowRange:
    """The physical rows [start, stop) of one file of a stage's table, in one epoch. A row's id is file << 40 | row."""

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

    Tensors are torch tensors, on the CPU unless they were moved.

    Attributes:
        item: Values [N] int64, dense item indices (row numbers of artifacts/items.parquet).
        sid: [N, L] int64, the semantic id of the item of each event.
        time: Values [N] int64, unix seconds.
        event: Values [N] int64, event type indices (0 if the data have no event column).
        context: Tensors [B] or Jagged [N] by column name. Dense features are float32. Keys of sparse rows are int64; "user"
            [B] and "item" [N] are always among them.
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

    A group is the set of beams of one user. The beams of a group are ordered by log-probability, most likely first, also if
    they were sampled.

    Attributes:
        uid: [U] str.
        user_id: [U] original user ids.
        item_id: [U, W] original item ids; -1 or "" where no legal beam was left.
        item: [U, W] int64 dense item indices; -1 where no legal beam was left.
        sid: [U, W, L] int32 semantic ids.
        logp: [U, W, L] float32 log-probabilities under the trie constraint, in nats.
        valid: [U, W] bool, False where no legal beam was left.
        target: Jagged by user, the original ids of the items that the user chose next.
        history: Jagged by user, the original ids of the items before the prompt.
        scene: [U], the scene of each prompt.
        weights_version: The version of the weights that generated the beams.
        catalogue_version: The version of the catalogue, whose trie constrained the beams.
        step: The training step.
        columns: Item columns joined to [U, W] and user columns [U], by name; `r["price"]` reads one.
        weight: [U, W] float32 for sampled beams: importance weights, with which a weighted sum over a group estimates the
            expectation under the policy (`nonet.rl.Draws`); None for plain beam search.
        chance: [U, W] float32 for sampled beams: the inclusion probability of a beam in its group; None for plain beam
            search.
        sampling_logp: [U, W, L] float32 log-probabilities that beams were sampled with, if they differ from logp.
        added: [U, W] bool, True for beams that were added to their group because the user chose them next (`with_target`);
            None if there are no such beams.
        time: [U] unix seconds of each prompt, as of which stores are read; None if it is not known.
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
    time: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Rollouts:
        """Return the rollouts of some prompts.

        Args:
            rows: The indices of the prompts [n], in the order of the result.
        """
        return self._map_rows(lambda value: _take_rows(value, rows))

    @classmethod
    def concat(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Concatenate the rollouts of all parts; values that exist once per step are taken from the first part."""
        return parts[0]._map_rows(lambda *values: _concat_values(values), *parts[1:])

    def as_read_only(self) -> Rollouts:
        """Return the rollouts with read-only views of their arrays."""
        return self._map_rows(_view_read_only)

    def _map_rows(self, change: Callable[..., Any], *others: Rollouts) -> Rollouts:
        """Return a copy in which each value with a row per prompt is `change(value, *values of the others)`."""
        names = [attribute.name for attribute in fields(self)]
        values = {name: [getattr(rollouts, name) for rollouts in (self, *others)] for name in names}
        columns = [part for part in values.pop("columns") if part is not None]
        changed = {
            name: change(*parts)
            for name, parts in values.items()
            if parts[0] is not None and not isinstance(parts[0], int | str)  # those exist once per step
        }
        changed_columns = {name: change(*(part[name] for part in columns)) for name in columns[0]}
        return replace(self, **changed, columns=changed_columns)

    def __getitem__(self, column: str) -> np.ndarray:
        try:
            return self.columns[column]
        except KeyError:
            if column in self.__slots__:
                raise KeyError(f"{column!r} is a field of rollouts, not a column: read r.{column}") from None
            names = ", ".join(sorted(self.columns)) or "none"
            raise KeyError(f"no column {column!r} was joined to these rollouts; there are: {names}") from None


def _take_rows(value: Any, rows: np.ndarray) -> Any:
    """Return the selected rows of an array or of ragged data."""
    import numpy as np

    if not isinstance(value, Jagged):
        return value[rows]
    lists = [value[int(row)] for row in rows]
    # The empty slice keeps the dtype if there are no rows.
    return Jagged(np.concatenate([value.values[:0], *lists]), np.cumsum([0, *map(len, lists)]))


def _view_read_only(value: Any) -> Any:
    """Return a read-only view of an array or of ragged data."""
    import numpy as np

    if isinstance(value, Jagged):
        return Jagged(_view_read_only(value.values), _view_read_only(value.offsets))
    view = np.asarray(value).view()
    view.flags.writeable = False
    return view


def _concat_values(values: Sequence[Any]) -> Any:
    """Concatenate arrays or ragged data along their first dimension."""
    import numpy as np

    if not isinstance(values[0], Jagged):
        return np.concatenate(values)
    lengths = np.concatenate([np.diff(value.offsets) for value in values])
    return Jagged(np.concatenate([value.values for value in values]), np.concatenate([[0], lengths.cumsum()]))
