"""Packed batches for the model: windows of users' training events, and prompts.

Training cuts a user's TRAIN events into consecutive windows of up to history + 1 events that overlap by one,
so every target has its predecessor in the same window and each event is a target once an epoch. The first cut
is at a random place for every (seed, stage, epoch, user): over epochs a target is seen behind contexts of
every length. All events are gathered with NumPy, no loop over events; a batch of 500 events takes under a
millisecond.
"""

from __future__ import annotations

import numpy as np
import torch

from nonet.random import rng
from nonet.samples.prompts import event_at, ranges
from nonet.samples.sequences import Sequences
from nonet.types import Jagged, SampleBatch

# Shapes: I items, L levels, R user rows, B sequences, N packed events.


def training_batch(
    seq: Sequences,
    sids_IL: np.ndarray,
    rows: np.ndarray,
    *,
    history: int,
    stage: str,
    epoch: int,
    seed: int,
    target: np.ndarray | None,
) -> SampleBatch:
    """The TRAIN events of user rows [R] as windows of up to history + 1 events.

    loss_mask[j] is True where event j is a target, so its loss sits on position j - 1. `target` [all events]
    bool masks the loss (a stage's `target:` condition) and leaves the history whole. A user's first event has
    nothing before it and is no target; users with fewer than two TRAIN events give no window.
    """
    row, start, stop = windows(seq, rows, history=history, stage=stage, epoch=epoch, seed=seed)
    index, offsets = ranges(start, stop)
    mask = np.ones(len(index), bool) if target is None else target[index]
    mask[offsets[:-1]] = False
    uid = [
        f"{stage}/{epoch}/{r}:{p}"
        for r, p in zip(row.tolist(), (start - seq.offsets[row]).tolist(), strict=True)
    ]
    return _batch(seq, sids_IL, row, index, offsets, mask, None, uid)


def prompt_batch(
    seq: Sequences,
    sids_IL: np.ndarray,
    users: np.ndarray,
    positions: np.ndarray,
    *,
    history: int,
    stage: str,
    epoch: int = 0,
) -> SampleBatch:
    """Prompt i: the last `history` events of users[i] before positions[i]; target[i] is the item there.

    A position of 0 gives an empty sequence. Nothing counts in loss_mask.
    """
    users, positions = np.asarray(users, np.int64), np.asarray(positions, np.int64)
    asked = event_at(seq, users, positions)
    index, offsets = ranges(asked - np.minimum(positions, history), asked)
    uid = [f"{stage}/{epoch}/{u}:{p}" for u, p in zip(users.tolist(), positions.tolist(), strict=True)]
    target = torch.from_numpy(seq.item[asked].astype(np.int64))
    return _batch(seq, sids_IL, users, index, offsets, np.zeros(len(index), bool), target, uid)


def windows(
    seq: Sequences, rows: np.ndarray, *, history: int, stage: str, epoch: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User row, first and past-the-last event of each window [B] int64; windows of a user follow each other.

    The first window of a user holds 1 + d events, d uniform in 1..history; all others history + 1, but for
    the last.
    """
    rows = np.asarray(rows, np.int64)
    first = np.array(
        [rng(seed, stage, epoch, int(row), "window").integers(1, history + 1) for row in rows], np.int64
    )
    targets = np.maximum(seq.train_lengths[rows] - 1, 0)
    count = np.where(targets > 0, 1 + -(-np.maximum(targets - first, 0) // history), 0)
    nth, _ = ranges(np.zeros(len(rows), np.int64), count)
    start = np.repeat(first, count) + (nth - 1) * history
    stop = np.minimum(start + history, np.repeat(targets, count))
    begin = np.repeat(seq.offsets[rows], count)
    return np.repeat(rows, count), begin + np.maximum(start, 0), begin + stop + 1


def _batch(
    seq: Sequences,
    sids_IL: np.ndarray,
    user: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    mask: np.ndarray,
    target: torch.Tensor | None,
    uid: list[str],
) -> SampleBatch:
    cuts = torch.from_numpy(offsets)
    item = seq.item[index].astype(np.int64)
    context: dict[str, torch.Tensor | Jagged] = {"user": torch.from_numpy(user.astype(np.int64))}
    for name, values in seq.columns.items():
        context[name] = Jagged(torch.from_numpy(np.nan_to_num(values[index], nan=0.0)), cuts)
    return SampleBatch(
        item=Jagged(torch.from_numpy(item), cuts),
        sid=torch.from_numpy(sids_IL[item].astype(np.int64)),
        time=Jagged(torch.from_numpy(seq.time[index]), cuts),
        event=Jagged(torch.from_numpy(seq.event[index].astype(np.int64)), cuts),
        context=context,
        loss_mask=Jagged(torch.from_numpy(mask), cuts),
        target=target,
        uid=uid,
    )
