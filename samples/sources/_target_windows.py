"""Windows that end in given target events, and the targets of RL stages as supervised ones.

A window consists of a few targets and the history before them, so each of them is a target exactly once per epoch and has the
same history as an RL prompt with this target.
"""

# Shapes: N events of all users, B windows. A user row is the index of a user in the sequences.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.samples.sources._prompts import select_held_out_users
from nonet.samples.sources.base import SampleRequest

if TYPE_CHECKING:
    from nonet.types import SampleBatch

# The targets of a window span at most history / 2 events, so at least half of it is history.
_TARGET_SPAN_DIVISOR = 2


class TargetWindows:
    """Supervised batches of some target events of users.

    Args:
        request: What the stage requests.
        target: Which events are targets, bool [N].
    """

    def __init__(self, request: SampleRequest, target: np.ndarray):
        self.request, self.target = request, target

    @cached_property
    def user_rows(self) -> np.ndarray:
        """The user rows of the users that have targets, ascending."""
        return np.flatnonzero(self.request.events().count_by_user(self.target))

    def cut_windows(self, users: np.ndarray) -> tuple[np.ndarray, ...]:
        """Cut windows of targets and the history before them, in the order of `users`.

        Args:
            users: User rows; those without targets have no window.

        Returns:
            Four arrays [B]: user row, first event, past-the-last event and first target of each window. All targets of a window
            are at or after the first one; earlier ones are targets of other windows and history in this one.
        """
        seq, max_span = self.request.events(), max(1, self.request.history // _TARGET_SPAN_DIVISOR)
        windows: list[tuple[int, int, int, int]] = []
        for user in users.tolist():
            start, stop = int(seq.offsets[user]), int(seq.offsets[user + 1])
            targets = start + np.flatnonzero(self.target[start:stop])
            if not len(targets):
                continue
            # Targets are in the same window if they are in the same span of `max_span` events from the first target on.
            cuts = np.flatnonzero(np.diff((targets - targets[0]) // max_span)) + 1
            for window_targets in np.split(targets, cuts):
                first_target, last_target = int(window_targets[0]), int(window_targets[-1])
                first_event = max(start, first_target - (self.request.history - max_span))
                windows.append((user, first_event, last_target + 1, first_target))
        return tuple(np.array(windows, np.int64).reshape(-1, 4).T)

    def make_batches(self, users: np.ndarray, epoch: int) -> Sequence[Callable[[], SampleBatch]]:
        """Return one function per batch of the targets of user rows `users`; each call of it builds the batch."""
        from nonet.samples.batches import count_window_positions, split_by_size

        windows = self.cut_windows(users)
        user_row, first_event, stop_event, _ = windows
        sizes = count_window_positions(self.request.events(), (user_row, first_event, stop_event))
        parts = split_by_size(sizes, self.request.chunk)
        return [partial(self._make_batch, epoch, *(column[part] for column in windows)) for part in parts]

    def _make_batch(
        self,
        epoch: int,
        user_row: np.ndarray,
        first_event: np.ndarray,
        stop_event: np.ndarray,
        first_target: np.ndarray,
    ) -> SampleBatch:
        """Build a batch of windows, given by the arrays [B] of `cut_windows`; only its own targets are trained on."""
        import torch

        from nonet.ranges import expand_ranges
        from nonet.samples.batches import make_window_batch

        request, seq = self.request, self.request.events()
        assert request.sids_IL is not None  # Every model that generates rollouts has semantic ids.
        windows = user_row, first_event, stop_event
        batch = make_window_batch(
            seq, request.sids_IL, windows, stage=request.stage, epoch=epoch, target=self.target
        )
        # The events of all windows; a window begins with the event before its first one if there is one.
        has_previous = first_event > seq.offsets[user_row]
        events, offsets = expand_ranges(first_event - has_previous, stop_event)
        is_own = events >= np.repeat(first_target, np.diff(offsets))
        batch.loss_mask.values.logical_and_(torch.from_numpy(is_own))
        return batch


class RlTargets:
    """The prompts of RL stages as supervised targets, with the interface of an opened source (`Samples`).

    The targets are the events that are held out for RL, of users that RL trains on. Finetuning on them uses the same events as RL
    and is therefore the control experiment for RL. A global step has the targets of `request.rows` users over all ranks. There is
    no state to save.

    Args:
        request: What the stage requests.
    """

    def __init__(self, request: SampleRequest):
        self.request = request

    @property
    def schema(self) -> Mapping[str, str]:
        """The meaning of the ids of each sparse feature, by name."""
        return {"item": "int64 an event", "user": "int64 a sequence"}

    @property
    def rows(self) -> int:
        """The number of rows in an epoch: the users that have targets."""
        return len(self.windows.user_rows)

    @cached_property
    def windows(self) -> TargetWindows:
        """The windows of the RL events of users that are not held out of RL."""
        from nonet.samples.batches import find_rl_events

        seq = self.request.events()
        is_target = np.zeros(len(seq.item), bool)
        events = find_rl_events(seq)
        is_target[
            events[~np.isin(seq.find_users(events), select_held_out_users(seq, self.request.seed, events))]
        ] = True
        return TargetWindows(self.request, is_target)

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        """Return one function per batch of this rank's share of a step; each call of it builds the batch.

        Args:
            step: The global step.
            rank: The data-parallel rank.
            world: The number of data-parallel ranks.
        """
        from nonet.samples.batches import select_step_rows

        step_rows = min(self.request.rows, self.rows)
        epoch, picks = select_step_rows(self.rows, step_rows, self.request.seed, self.request.stage, step)
        return self.windows.make_batches(self.windows.user_rows[picks[rank::world]], epoch)

    def state(self) -> Mapping[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing, because there is no state."""
