"""Selects the rows and prompts of a global step as a pure function of (seed, stage, step).

Each epoch is one seeded order (`nonet.samples.ledger`) that is cut into consecutive steps. The last step of an epoch may be
short: a step never spans two epochs, so each row is read exactly once per epoch. Each rank takes a slice of the rows of a step,
so the order does not depend on the number of ranks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from nonet.errors import ConfigError
from nonet.samples.batches.prompt_rows import find_rl_events, locate_prompts
from nonet.samples.ledger import EpochSteps, RowOrder
from nonet.samples.sequences import Sequences


def select_step_rows(
    n_rows: int, rows_per_step: int, seed: int, stage: str, step: int
) -> tuple[int, np.ndarray]:
    """Return the epoch of a global step, and the rows that the step reads, [at most rows_per_step] int64.

    Args:
        n_rows: Number of rows of an epoch.
        rows_per_step: Number of rows of a full step.
        seed: Seed of the order.
        stage: Name of the stage whose order it is.
        step: The global step, from 0.
    """
    epoch, start, stop = EpochSteps(n_rows, rows_per_step, rows_per_step).get_places(step)
    return epoch, make_row_order(n_rows, seed, stage).get_rows(epoch, start, stop)


@lru_cache(maxsize=8)
def make_row_order(n_rows: int, seed: int, stage: str) -> RowOrder:
    """Return the order in which a stage reads rows that are not in files."""
    return RowOrder.from_rows(n_rows, seed, stage)


def select_step_prompts(
    seq: Sequences,
    users_per_step: int,
    seed: int,
    stage: str,
    step: int,
    event_mask: np.ndarray | None = None,
    events: np.ndarray | None = None,
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the epoch, user rows [P] and positions [P] of the RL prompts of a global step.

    Each RL event is the target of one prompt per epoch.

    Args:
        seq: The sequences.
        users_per_step: Number of prompts of a full step.
        seed: Seed of the order.
        stage: Name of the stage whose order it is.
        step: The global step, from 0.
        event_mask: Mask of the events [N] that may be targets, such as that of a `target:` condition; None for all RL events.
        events: Ascending indices of the RL events that may be targets; None to find them with `event_mask`.
    """
    if events is None:
        events = find_rl_events(seq, event_mask)
    if not len(events):
        condition = "" if event_mask is None else " that are asked for"
        raise ConfigError(
            f"stage {stage!r} has no RL events{condition}: set split.rl, so that some events are held out of "
            "training."
        )
    epoch, rows = select_step_rows(len(events), users_per_step, seed, stage, step)
    users, positions = locate_prompts(seq, events[rows])
    return epoch, users, positions
