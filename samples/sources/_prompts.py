"""The prompts of an RL stage: events held out for RL, each used once per epoch; a fifth of the users is never used."""

# Shapes: U prompts, N events.

from __future__ import annotations

from functools import cached_property

import numpy as np

from nonet.random import rng
from nonet.samples.batches import event_at, prompt_step, rl_events, row_order
from nonet.samples.ledger import Ledger, Manifest, Slice, Steps
from nonet.samples.sequences import Sequences

_KEPT_OUT = 5


class RlPrompts:
    """The prompts of one stage; a global step has `users` of them over all ranks."""

    def __init__(self, seq: Sequences, seed: int, stage: str, users: int):
        self._seq, self._seed, self._stage, self._users = seq, seed, stage, users

    def of_step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return users [U] and positions [U] of a step, which depend only on its number."""
        return prompt_step(self._seq, self._users, self._seed, self._stage, step, events=self._events)[1:]

    def applied(self, step: int, users: np.ndarray, positions: np.ndarray) -> None:
        """Mark all prompts of a step as done after a rank's share was used; a loop's own prompts are not counted."""
        asked = event_at(self._seq, *self.of_step(step))
        if not np.isin(event_at(self._seq, users, positions), asked).all():
            return
        epoch, start, stop = self._steps.places(step)
        self.ledger.lease(Slice(step, 0, epoch, start, stop))
        self.ledger.apply_step(step)

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the prompts that were used."""
        rows = self._steps.rows
        order = row_order(rows, self._seed, self._stage)
        manifest = Manifest.of_rows("prompts", rows, self._seq.summary)
        return Ledger(manifest, order.digest_of_steps(self._users), rows, first_order=order.digest)

    @cached_property
    def _steps(self) -> Steps:
        return Steps(len(self._events), self._users, self._users)

    @cached_property
    def _events(self) -> np.ndarray:
        """The events of all prompts, found once because a step uses few of them."""
        events = rl_events(self._seq)
        return events[~np.isin(self._seq.user_of(events), kept_out(self._seq, self._seed, events))]


def kept_out(seq: Sequences, seed: int, events: np.ndarray | None = None) -> np.ndarray:
    """Sample a fifth of the users that have RL events, to keep out of RL; at least one user remains.

    Args:
        seq: The sequences.
        seed: Seed of the sample.
        events: Indices of the RL events, if they are known.
    """
    users = np.unique(seq.user_of(rl_events(seq) if events is None else events))
    return np.sort(rng(seed, "held-out users").permutation(users)[: len(users) // _KEPT_OUT])
