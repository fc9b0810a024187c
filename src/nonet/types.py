"""What passes between the parts.

No torch and no Ray import at module level, so that a reward or a CPU tool can read these without either.
Shapes: B sequences, N events, U users (prompts), W beams, L semantic-id levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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

    def __getitem__(self, column: str) -> np.ndarray:
        try:
            return self.columns[column]
        except KeyError:
            known = ", ".join(sorted(self.columns)) or "none"
            raise KeyError(f"no column {column!r} was joined to these rollouts; there are: {known}") from None
