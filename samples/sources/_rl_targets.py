"""The prompts of RL stages as supervised targets: events held out for RL of the users that RL trains on.

Finetuning on these targets sees the same events as RL and is therefore its control. A window consists of a few such events
and
the history before them, so each one is a target exactly once per epoch and sees what its RL prompt sees.
"""

# Shapes: N events, R user rows, B windows.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.samples.sources._prompts import kept_out
from nonet.samples.sources.base import SampleRequest

if TYPE_CHECKING:
    from nonet.types import SampleBatch

_TAUGHT = 2  # at least half of a window is history


class RlTargets:
    """The targets of one stage, `rows` users per global step over all ranks. It is used like a source and has no state."""

    def __init__(self, request: SampleRequest):
        self.ask = request

    @property
    def schema(self) -> Mapping[str, str]:
        """Sparse feature -> meaning of its ids."""
        return {"item": "int64 an event", "user": "int64 a sequence"}

    @property
    def rows(self) -> int:
        """Rows of an epoch: users that have such events."""
        return len(self._users)

    @cached_property
    def target(self) -> np.ndarray:
        """Which of all events [N] are targets, bool."""
        from nonet.samples.batches import rl_events

        seq = self.ask.events()
        target = np.zeros(len(seq.item), bool)
        events = rl_events(seq)
        target[events[~np.isin(seq.user_of(events), kept_out(seq, self.ask.seed, events))]] = True
        return target

    @cached_property
    def _users(self) -> np.ndarray:
        return np.unique(self.ask.events().user_of(np.flatnonzero(self.target)))

    def windows(self, users: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return user row, first and past-the-last event, and first target of each window [B], in the order of the users."""
        seq, most = self.ask.events(), max(1, self.ask.history // _TAUGHT)
        parts: list[tuple[int, int, int, int]] = []
        for user in users.tolist():
            begin, end = int(seq.offsets[user]), int(seq.offsets[user + 1])
            taught = begin + np.flatnonzero(self.target[begin:end])
            for events in np.split(taught, np.flatnonzero(np.diff((taught - taught[0]) // most)) + 1):
                first = int(events[0]) - (self.ask.history - most)
                parts.append((user, max(begin, first), int(events[-1]) + 1, int(events[0])))
        return tuple(np.array(parts, np.int64).reshape(-1, 4).T)

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        """Return functions that make the batches of a rank's share of a step."""
        from nonet.samples.batches import bounded, step_rows, window_positions

        ask, seq = self.ask, self.ask.events()
        epoch, picks = step_rows(self.rows, min(ask.rows, self.rows), ask.seed, ask.stage, step)
        windows = self.windows(self._users[picks[rank::world]])
        row, block, stop, _ = windows
        parts = bounded(window_positions(seq, (row, block, stop)), ask.chunk)
        return [partial(self._made, epoch, *(each[part] for each in windows)) for part in parts]

    def _made(
        self, epoch: int, row: np.ndarray, block: np.ndarray, stop: np.ndarray, first: np.ndarray
    ) -> SampleBatch:
        """Build a batch of windows; targets of the previous window are history in this one."""
        import torch

        from nonet.samples.batches import ranges, window_batch

        ask, seq = self.ask, self.ask.events()
        assert ask.sids_IL is not None  # models that roll out have semantic ids
        windows = row, block, stop
        batch = window_batch(seq, ask.sids_IL, windows, stage=ask.stage, epoch=epoch, target=self.target)
        index, offsets = ranges(block - (block > seq.offsets[row]), stop)
        batch.loss_mask.values.logical_and_(torch.from_numpy(index >= np.repeat(first, np.diff(offsets))))
        return batch

    def state(self) -> Mapping[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Ignore the state, because there is none."""
