"""The prompts of an RL stage: events of the RL split, each used once per epoch. A fifth of the users is held out."""

# Shapes: U prompts, N events.

from __future__ import annotations

from functools import cached_property

import numpy as np

from nonet.random import rng
from nonet.samples.batches import find_rl_events, locate_events, make_row_order, select_step_prompts
from nonet.samples.ledger import DataManifest, EpochSteps, OrderSlice, SampleLedger
from nonet.samples.sequences import Sequences

_HELD_OUT_DIVISOR = 5


class RlPrompts:
    """The prompts of one stage; a step uses `users` prompts over all ranks."""

    def __init__(self, seq: Sequences, seed: int, stage: str, users: int):
        self._seq, self._seed, self._stage, self._users = seq, seed, stage, users

    def get_step_prompts(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the user rows [U] and positions [U] of the prompts of a step; they depend only on the step's number."""
        return select_step_prompts(
            self._seq, self._users, self._seed, self._stage, step, events=self._events
        )[1:]

    def record_step(self, step: int, users: np.ndarray, positions: np.ndarray) -> None:
        """Record in the ledger that the prompts of a step were used.

        Args:
            step: The step.
            users: User rows of the prompts that a rank used.
            positions: Their positions. If they are not prompts of this step, as in a custom loop, nothing is recorded.
        """
        step_events = locate_events(self._seq, *self.get_step_prompts(step))
        if not np.isin(locate_events(self._seq, users, positions), step_events).all():
            return
        epoch, start, stop = self._steps.get_places(step)
        self.ledger.lease(OrderSlice(step, 0, epoch, start, stop))
        self.ledger.apply_step(step)

    @cached_property
    def ledger(self) -> SampleLedger:
        """The ledger of the prompts that were used."""
        rows = self._steps.rows
        order = make_row_order(rows, self._seed, self._stage)
        manifest = DataManifest.from_rows("prompts", rows, self._seq.summary)
        return SampleLedger(manifest, order.hash_steps(self._users), rows, first_order=order.digest)

    @cached_property
    def _steps(self) -> EpochSteps:
        return EpochSteps(len(self._events), self._users, self._users)

    @cached_property
    def _events(self) -> np.ndarray:
        """The indices of the events of all prompts; computed once for all steps."""
        events = find_rl_events(self._seq)
        return events[
            ~np.isin(self._seq.find_users(events), select_held_out_users(self._seq, self._seed, events))
        ]


def select_held_out_users(seq: Sequences, seed: int, rl_event_ids: np.ndarray | None = None) -> np.ndarray:
    """Sample a fifth of the users that have RL events, rounded down; they are held out of RL.

    Args:
        seq: The sequences.
        seed: Seed of the sample.
        rl_event_ids: Indices of the RL events, if they are known.
    """
    users = np.unique(seq.find_users(find_rl_events(seq) if rl_event_ids is None else rl_event_ids))
    return np.sort(rng(seed, "held-out users").permutation(users)[: len(users) // _HELD_OUT_DIVISOR])
