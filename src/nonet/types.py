"""What passes between the parts.

No torch and no Ray import at module level, so that a reward or a CPU tool can read these without either.
Shapes: B sequences, N events, U users (prompts), W beams, L semantic-id levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class RowRange:
    """Physical rows [start, stop) of one file of a stage's table, in one epoch. Row id = file << 40 | row."""

    epoch: int
    file: int
    start: int
    stop: int


@dataclass(slots=True)
class Jagged:
    """Ragged data: `values [N, ...]` cut by `offsets [B + 1]` int64, offsets[0] == 0. NumPy or torch."""

    values: Any
    offsets: Any

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Any:
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]


@dataclass(slots=True)
class SampleBatch:
    """Tokenised events, packed: B sequences, N events, all tensors torch CPU unless moved.

    item    values [N] int64 dense item index (position in artifacts/items.parquet)
    sid     [N, L] int64 semantic id of each event's item
    time    values [N] int64 unix seconds
    event   values [N] int64 event type index (0 when the data has no event column)
    context by column name: [B] or Jagged [N]; sparse keys and ids int64 (always has "user": [B] and
            "item": [N], the keys of their rows), dense float32
    loss_mask values [N] bool: True where the event counts as a *target*
    target  [B] int64 dense item index asked for after the last event, or None while pretraining
    uid     one string a sequence
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
    """What a reward sees: NumPy only, read-only by convention. A group is one user's beam set.

    uid [U] str · user_id [U] · item_id [U, W] original item ids (-1 or "" where no legal beam was left)
    item [U, W] int64 dense item index, -1 for none · sid [U, W, L] int32 · logp [U, W, L] float32 constrained, nats
    valid [U, W] bool · target Jagged of original item ids · history Jagged of original item ids · scene [U]
    columns: item columns joined to [U, W] and user columns [U]; `r["price"]` reads them
    weight, chance [U, W] float32: of beams that were drawn, with what weights a group's sum is the policy's expectation, and
             the chance with which each is in its group (`nonet.rl.Draws`); None of plain beams
    sampling_logp [U, W, L] float32: what they were drawn with, where that is not logp
    added [U, W] bool: beams that were put into their group because the user took them next (`with_target`); None without
    The beams of a group are ordered by their log-probability, the likeliest first, however they were drawn.
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
        return self._changed(lambda value: _rows_of(value, rows))

    @classmethod
    def concat(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Return the rollouts of all parts, one after the other; what a step has once is that of the first."""
        return parts[0]._changed(lambda *values: _end_to_end(values), *parts[1:])

    def _changed(self, change: Callable[..., Any], *others: Rollouts) -> Rollouts:
        """Return rollouts whose values with a row for each prompt are changed, with the same values of others."""
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


def _rows_of(value: Any, rows: np.ndarray) -> Any:
    """Return some rows of an array or of ragged data."""
    import numpy as np

    if not isinstance(value, Jagged):
        return value[rows]
    lists = [value[int(row)] for row in rows]
    return Jagged(np.concatenate([value.values[:0], *lists]), np.cumsum([0, *map(len, lists)]))


def _end_to_end(values: Sequence[Any]) -> Any:
    """Return arrays or ragged data one after the other."""
    import numpy as np

    if not isinstance(values[0], Jagged):
        return np.concatenate(values)
    lengths = np.concatenate([np.diff(value.offsets) for value in values])
    return Jagged(np.concatenate([value.values for value in values]), np.concatenate([[0], lengths.cumsum()]))
