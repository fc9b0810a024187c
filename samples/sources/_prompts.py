"""The prompts of an RL stage: events that are held out for RL, each asked once an epoch; a fifth of the users is never asked."""

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
    """Of one stage, `users` a global step over all ranks."""

    def __init__(self, seq: Sequences, seed: int, stage: str, users: int):
        self._seq, self._seed, self._stage, self._users = seq, seed, stage, users

    def of_step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Users [U] and positions [U] of a step: a pure function of its number."""
        return prompt_step(self._seq, self._users, self._seed, self._stage, step, self._among)[1:]

    def applied(self, step: int, users: np.ndarray, positions: np.ndarray) -> None:
        """A step on these prompts, a rank's share, is over: all of its prompts are done. A loop's own prompts are not counted."""
        asked = event_at(self._seq, *self.of_step(step))
        if not np.isin(event_at(self._seq, users, positions), asked).all():
            return
        epoch, start, stop = self._steps.places(step)
        self.ledger.lease(Slice(step, 0, epoch, start, stop))
        self.ledger.apply_step(step)

    @cached_property
    def ledger(self) -> Ledger:
        """Which prompts were learned from."""
        rows = self._steps.rows
        order = row_order(rows, self._seed, self._stage)
        manifest = Manifest.of_rows("prompts", rows, self._seq.summary)
        return Ledger(manifest, order.digest_of_steps(self._users), rows, first_order=order.digest)

    @cached_property
    def _steps(self) -> Steps:
        events = len(rl_events(self._seq, self._among))
        return Steps(events, self._users, self._users)

    @cached_property
    def _among(self) -> np.ndarray:
        return ~np.isin(self._seq.user, kept_out(self._seq, self._seed))


def kept_out(seq: Sequences, seed: int) -> np.ndarray:
    """A fifth of the users that RL may ask, drawn by the seed; at least one stays in."""
    users = np.unique(seq.user[rl_events(seq)])
    return np.sort(rng(seed, "held-out users").permutation(users)[: len(users) // _KEPT_OUT])
