"""The prompts of an RL stage: events of the RL split, each used once per epoch. A fifth of the users is held out of RL.

An event is the prompt that consists of its user's history before it. A user row is the index of a user in the sequences.
"""

# Shapes: U prompts of a step.

from __future__ import annotations

from functools import cached_property

import numpy as np

from nonet.random import rng
from nonet.samples.batches import find_rl_events, locate_events, make_row_order, select_step_prompts
from nonet.samples.ledger import DataManifest, EpochSteps, OrderSlice, SampleLedger
from nonet.samples.sequences import Sequences

_HELD_OUT_DIVISOR = 5  # One of so many users is held out of RL.


class RlPrompts:
    """The prompts of one stage.

    Args:
        seq: The sequences of all users.
        seed: Seed of the order of prompts.
        stage: Name of the stage, which the order depends on, too.
        prompts_per_step: Number of prompts of a step over all ranks.
    """

    def __init__(self, seq: Sequences, seed: int, stage: str, prompts_per_step: int):
        self._seq, self._seed, self._stage, self._prompts_per_step = seq, seed, stage, prompts_per_step

    def get_step_prompts(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Select the prompts of a step, which depend only on the step's number.

        Returns:
            User rows [U], and the positions [U] of the prompts' events in the histories of these users.
        """
        return select_step_prompts(
            self._seq, self._prompts_per_step, self._seed, self._stage, step, events=self._events
        )[1:]

    def record_step(self, step: int, users: np.ndarray, positions: np.ndarray) -> None:
        """Record in the ledger that the prompts of a step were used.

        Args:
            step: The step.
            users: User rows of the prompts that a rank used.
            positions: Positions of the prompts' events. If one is no prompt of this step, as in a custom loop, nothing is
                recorded.
        """
        step_events = locate_events(self._seq, *self.get_step_prompts(step))
        if not np.isin(locate_events(self._seq, users, positions), step_events).all():
            return
        epoch, start, stop = self._steps.get_places(step)
        self.ledger.lease(OrderSlice(step, part=0, epoch=epoch, start=start, stop=stop))
        self.ledger.apply_step(step)

    @cached_property
    def ledger(self) -> SampleLedger:
        """The ledger of the prompts that were used in training."""
        prompt_count = self._steps.rows
        order = make_row_order(prompt_count, self._seed, self._stage)
        manifest = DataManifest.from_rows("prompts", prompt_count, self._seq.summary)
        return SampleLedger(manifest, order.hash_steps(self._prompts_per_step), prompt_count)

    @cached_property
    def _steps(self) -> EpochSteps:
        """The global steps of an epoch, each with one slice."""
        return EpochSteps(len(self._events), self._prompts_per_step, self._prompts_per_step)

    @cached_property
    def _events(self) -> np.ndarray:
        """The indices of the events that are prompts, computed once for all steps."""
        events = find_rl_events(self._seq)
        return events[
            ~np.isin(self._seq.find_users(events), select_held_out_users(self._seq, self._seed, events))
        ]


def select_held_out_users(seq: Sequences, seed: int, rl_event_ids: np.ndarray | None = None) -> np.ndarray:
    """Sample the users that are held out of RL: a fifth of the users that have RL events, rounded down.

    Args:
        seq: The sequences of all users.
        seed: Seed of the sample.
        rl_event_ids: Indices of the RL events; None to find them.

    Returns:
        User rows, ascending.
    """
    rl_users = np.unique(seq.find_users(find_rl_events(seq) if rl_event_ids is None else rl_event_ids))
    return np.sort(rng(seed, "held-out users").permutation(rl_users)[: len(rl_users) // _HELD_OUT_DIVISOR])
