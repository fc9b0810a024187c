"""The prompts of RL stages as supervised targets: the events that are held out for RL, of users that RL trains on.

Finetuning on these targets uses the same events as RL and is therefore the control experiment for RL. A window consists of a few
of these events and the history before them, so each of them is a target exactly once per epoch and has the same history as its RL
prompt.
"""

# Shapes: N events, R user rows, B windows.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.samples.sources._prompts import select_held_out_users
from nonet.samples.sources.base import SampleRequest

if TYPE_CHECKING:
    from nonet.types import SampleBatch

_TAUGHT = 2  # The targets of a window span at most history / 2 events, so at least half of it is history.


class RlTargets:
    """Supervised batches of the RL targets, with the interface of a source of samples.

    A global step has `request.rows` users over all ranks. There is no state to save.
    """

    def __init__(self, request: SampleRequest):
        self.ask = request

    @property
    def schema(self) -> Mapping[str, str]:
        """The meaning of the ids of each sparse feature."""
        return {"item": "int64 an event", "user": "int64 a sequence"}

    @property
    def rows(self) -> int:
        """The number of rows in an epoch: the users that have targets."""
        return len(self._users)

    @cached_property
    def target(self) -> np.ndarray:
        """A mask of the events that are targets, bool [N]."""
        from nonet.samples.batches import find_rl_events

        seq = self.ask.events()
        target = np.zeros(len(seq.item), bool)
        events = find_rl_events(seq)
        target[
            events[~np.isin(seq.find_users(events), select_held_out_users(seq, self.ask.seed, events))]
        ] = True
        return target

    @cached_property
    def _users(self) -> np.ndarray:
        return np.unique(self.ask.events().find_users(np.flatnonzero(self.target)))

    def cut_windows(self, users: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the user row, first event, past-the-last event and first target of each window [B], in user order."""
        seq, max_span = self.ask.events(), max(1, self.ask.history // _TAUGHT)
        parts: list[tuple[int, int, int, int]] = []
        for user in users.tolist():
            begin, end = int(seq.offsets[user]), int(seq.offsets[user + 1])
            targets = begin + np.flatnonzero(self.target[begin:end])
            for events in np.split(targets, np.flatnonzero(np.diff((targets - targets[0]) // max_span)) + 1):
                first = int(events[0]) - (self.ask.history - max_span)
                parts.append((user, max(begin, first), int(events[-1]) + 1, int(events[0])))
        return tuple(np.array(parts, np.int64).reshape(-1, 4).T)

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        """Return one function per batch of this rank's share of a step; each call builds its batch.

        Args:
            step: The global step.
            rank: The data-parallel rank.
            world: The number of data-parallel ranks.
        """
        from nonet.samples.batches import count_window_positions, select_step_rows, split_by_size

        ask, seq = self.ask, self.ask.events()
        epoch, picks = select_step_rows(self.rows, min(ask.rows, self.rows), ask.seed, ask.stage, step)
        windows = self.cut_windows(self._users[picks[rank::world]])
        row, block, stop, _ = windows
        parts = split_by_size(count_window_positions(seq, (row, block, stop)), ask.chunk)
        return [partial(self._make_batch, epoch, *(column[part] for column in windows)) for part in parts]

    def _make_batch(
        self, epoch: int, row: np.ndarray, block: np.ndarray, stop: np.ndarray, first: np.ndarray
    ) -> SampleBatch:
        """Build a batch of windows; targets of the previous window are history in this one."""
        import torch

        from nonet.ranges import expand_ranges
        from nonet.samples.batches import make_window_batch

        ask, seq = self.ask, self.ask.events()
        assert ask.sids_IL is not None  # Every model that generates rollouts has semantic ids.
        windows = row, block, stop
        batch = make_window_batch(seq, ask.sids_IL, windows, stage=ask.stage, epoch=epoch, target=self.target)
        index, offsets = expand_ranges(block - (block > seq.offsets[row]), stop)
        batch.loss_mask.values.logical_and_(torch.from_numpy(index >= np.repeat(first, np.diff(offsets))))
        return batch

    def state(self) -> Mapping[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing, because there is no state."""
