"""Which rows and which prompts a global step consumes: a pure function of (seed, stage, step).

Each epoch is one seeded permutation, cut into consecutive steps. The last step of an epoch is short when the
division leaves a rest: a step never spans two epochs, so "each row once an epoch" holds exactly, and a
resumed run needs nothing but the step number. Ranks slice what a step returns; the order does not depend on
how many there are.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from nonet.errors import ConfigError
from nonet.random import rng
from nonet.samples.batches.prompt_rows import prompts_at, rl_events
from nonet.samples.sequences import Sequences


def steps_per_epoch(n_rows: int, rows_per_step: int) -> int:
    """Steps that cover n_rows once; the last one may be short."""
    if n_rows < 1 or rows_per_step < 1:
        raise ConfigError(f"{n_rows} rows in steps of {rows_per_step}: both must be at least 1.")
    return -(-n_rows // rows_per_step)


def step_rows(n_rows: int, rows_per_step: int, seed: int, stage: str, step: int) -> tuple[int, np.ndarray]:
    """The epoch of a global step (from 0) and the rows it consumes, [<= rows_per_step] int64."""
    epoch, place = divmod(step, steps_per_epoch(n_rows, rows_per_step))
    order = _order(n_rows, seed, stage, epoch)
    return epoch, order[place * rows_per_step : (place + 1) * rows_per_step]


def prompt_step(
    seq: Sequences, users_per_step: int, seed: int, stage: str, step: int, among: np.ndarray | None = None
) -> tuple[int, np.ndarray, np.ndarray]:
    """The epoch, users [P] and positions [P] of the RL prompts of a global step; each event that RL may be asked for
    once an epoch.

    among [N] bool: only these events are asked for (a `target:` mask, or `np.isin(seq.user, users)`).
    """
    events = rl_events(seq, among)
    if not len(events):
        condition = "" if among is None else " that are asked for"
        raise ConfigError(
            f"stage {stage!r} has no RL events{condition}: set split.rl, so that some events are held out of "
            "training."
        )
    epoch, picks = step_rows(len(events), users_per_step, seed, stage, step)
    users, positions = prompts_at(seq, events[picks])
    return epoch, users, positions


@lru_cache(maxsize=8)
def _order(n_rows: int, seed: int, stage: str, epoch: int) -> np.ndarray:
    order = rng(seed, stage, epoch, "order").permutation(n_rows)
    order.flags.writeable = False
    return order
