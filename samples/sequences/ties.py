"""Shuffles a user's events of the same time with a seed, to evaluate a trained model without the order of the file.

Many data sets have timestamps of whole days: 44 % of Amazon Beauty's users have their validation and test event on one day, and
the order of the file then reveals the next item. Papers shuffle before the split and train on the result. Here, the model is
trained on the file's order, and the prompts have another order: TRAIN events are shuffled among the TRAIN events of the same
time, and VALID and TEST events together among those of the same time. A TRAIN event never becomes a target, since the model has
already been trained on it, which would favour a transition counter (Beauty, HR@10 0.102). With this way of shuffling, the
transition counter has an HR@10 of 0.076 and 0.075, as when everything is shuffled before the split (0.075 and 0.075), against
0.082 in the file's order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nonet.random import rng
from nonet.samples.sequences.sequences import Sequences
from nonet.samples.sequences.split import RL, VALID

# Shapes: N events.


def shuffle_ties(seq: Sequences, seed: int) -> Sequences:
    """Return the sequences with each user's events of the same time shuffled within training, RL and held-out events."""
    random_N = rng(seed, "ties in time").permutation(len(seq.item))
    part_N = np.searchsorted([RL, VALID], seq.split, side="right")  # 0: TRAIN, 1: RL, 2: VALID or TEST
    order_N = np.lexsort((random_N, part_N, seq.time, seq.user))
    return replace(
        seq,
        item=seq.item[order_N],
        time=seq.time[order_N],
        event=seq.event[order_N],
        columns={name: values[order_N] for name, values in seq.columns.items()},
        targets={name: values[order_N] for name, values in seq.targets.items()},
        folded=None if seq.folded is None else seq.folded.take(order_N),
    )
