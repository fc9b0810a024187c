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
        return prompt_step(self._seq, self._users, self._seed, self._stage, step, events=self._events)[1:]

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
        return Steps(len(self._events), self._users, self._users)

    @cached_property
    def _events(self) -> np.ndarray:
        """The events that are asked for: looked for once, because a step takes a few out of all."""
        events = rl_events(self._seq)
        return events[~np.isin(self._seq.user_of(events), kept_out(self._seq, self._seed, events))]


def kept_out(seq: Sequences, seed: int, events: np.ndarray | None = None) -> np.ndarray:
    """Draw by the seed a fifth of the users that RL may ask; at least one stays in. `events`: RL's, if they are known."""
    users = np.unique(seq.user_of(rl_events(seq) if events is None else events))
    return np.sort(rng(seed, "held-out users").permutation(users)[: len(users) // _KEPT_OUT])
