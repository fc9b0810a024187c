"""Packed batches for the model: windows of users' training events, and prompts.

Training cuts a user's TRAIN events into consecutive blocks of up to `history` events. A window is a block and the one event
before
it, so every target has its predecessor in its own window, and each TRAIN event is a target exactly once per epoch. The
first cut
is at a random place for every (seed, stage, epoch, user), so over epochs a target is seen after contexts of every length. A
batch
of 500 events takes under a millisecond because all events are gathered at once, without a loop.
"""

from __future__ import annotations

import numpy as np
import torch

from nonet.random import draw_first_integers
from nonet.renamed import keep_old_name
from nonet.samples.batches.chunks import split_by_size
from nonet.samples.batches.prompt_rows import count_visible_events, expand_ranges, locate_events
from nonet.samples.sequences import Sequences
from nonet.types import Jagged, SampleBatch

# Shapes: I items, L levels, R user rows, B sequences, N packed events.

# User row, first and past-the-last event of each window's block, [B] each.
Windows = tuple[np.ndarray, np.ndarray, np.ndarray]
_GATHERED = 1 << 16  # most events gathered at once


def make_training_batch(
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
    """Build a batch of the TRAIN events of user rows [R] as windows of up to history + 1 events.

    loss_mask[j] is True if event j is a target, so its loss is at position j - 1. A user's very first event is a target
    too, predicted
    from the user alone. The event that only precedes a window's block is not a target. uid: stage/epoch/row:position of the
    first
    event of the window's block.

    Args:
        seq: The sequences.
        sids_IL: Semantic ids.
        rows: User rows [R].
        history: Most events of a block.
        stage: Name of the stage.
        epoch: The epoch.
        seed: Seed of the cuts.
        target: Mask of all events (a stage's `target:` condition) that limits the loss but not the history; windows
            without a target
            are dropped. None for all events.
    """
    window_parts = cut_target_windows(
        seq, rows, history=history, stage=stage, epoch=epoch, seed=seed, target=target
    )
    return make_window_batch(seq, sids_IL, window_parts, stage=stage, epoch=epoch, target=target)


training_batch = keep_old_name("nonet.samples.batches.training_batch", make_training_batch)


def cut_target_windows(
    seq: Sequences,
    rows: np.ndarray,
    *,
    history: int,
    stage: str,
    epoch: int,
    seed: int,
    target: np.ndarray | None,
) -> Windows:
    """Return the windows of `make_training_batch`, without those that contain no target."""
    row, block, stop = cut_windows(seq, rows, history=history, stage=stage, epoch=epoch, seed=seed)
    if target is None:
        return row, block, stop
    parts = split_by_size(stop - block, _GATHERED)
    some = np.concatenate([_has_any(target, block[part], stop[part]) for part in parts])
    return row[some], block[some], stop[some]


def count_window_positions(seq: Sequences, window_parts: Windows) -> np.ndarray:
    """Return the number of model positions [B] of each window: its start, the preceding event, and its block."""
    row, block, stop = window_parts
    return 1 + (block > seq.offsets[row]) + stop - block


def make_window_batch(
    seq: Sequences,
    sids_IL: np.ndarray,
    window_parts: Windows,
    *,
    stage: str,
    epoch: int,
    target: np.ndarray | None,
) -> SampleBatch:
    """Build a batch of windows; see `make_training_batch`."""
    row, block, stop = window_parts
    led = block > seq.offsets[row]
    index, offsets = expand_ranges(block - led, stop)
    mask = np.ones(len(index), bool) if target is None else target[index]
    mask[offsets[:-1][led]] = False
    if seq.strict:  # otherwise an event would see earlier events of its own second
        mask &= seq.first_of_second[index] == index
    places = (block - seq.offsets[row]).tolist()
    uid = [f"{stage}/{epoch}/{r}:{p}" for r, p in zip(row.tolist(), places, strict=True)]
    return _make_batch(seq, sids_IL, row, index, offsets, mask, None, uid)


def make_prompt_batch(
    seq: Sequences,
    sids_IL: np.ndarray,
    users: np.ndarray,
    positions: np.ndarray,
    *,
    history: int,
    stage: str,
    epoch: int = 0,
) -> SampleBatch:
    """Build a batch of prompts: the last `history` events of users[i] before positions[i] that are `visible`.

    target[i] is the item at positions[i]. A position of 0 gives an empty sequence. loss_mask is False everywhere.
    """
    users, positions = np.asarray(users, np.int64), np.asarray(positions, np.int64)
    events = locate_events(seq, users, positions)
    known = count_visible_events(seq, users, positions)
    ends = seq.offsets[users] + known
    index, offsets = expand_ranges(ends - np.minimum(known, history), ends)
    uid = [f"{stage}/{epoch}/{u}:{p}" for u, p in zip(users.tolist(), positions.tolist(), strict=True)]
    target = torch.from_numpy(seq.item[events].astype(np.int64))
    as_of = np.repeat(seq.time[events], np.diff(offsets))
    return _make_batch(seq, sids_IL, users, index, offsets, np.zeros(len(index), bool), target, uid, as_of)


def cut_windows(
    seq: Sequences, rows: np.ndarray, *, history: int, stage: str, epoch: int, seed: int
) -> Windows:
    """Return user row, first and past-the-last event of each target block [B] int64; blocks of a user are consecutive.

    If a user has more than `history` TRAIN events, the first block has a random number of them (1 to history), the others
    have
    `history`, and the last one has the rest.
    """
    rows = np.asarray(rows, np.int64)
    total = seq.train_lengths[rows]
    first = np.minimum(total, history)
    long = np.flatnonzero(total > history)
    drawn = draw_first_integers(seed, (stage, "window", epoch), rows[long], history)
    first[long] = np.where(drawn > 0, drawn, history)
    count = np.where(total > 0, 1 + -(-(total - first) // history), 0)
    nth, _ = expand_ranges(np.zeros(len(rows), np.int64), count)
    lead, begin = np.repeat(first, count), np.repeat(seq.offsets[rows], count)
    block = np.where(nth == 0, 0, lead + (nth - 1) * history)
    stop = np.where(nth == 0, lead, np.minimum(block + history, np.repeat(total, count)))
    return np.repeat(rows, count), begin + block, begin + stop


def _has_any(mask_N: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return whether the mask is True anywhere in each (non-empty) range."""
    index, offsets = expand_ranges(start, stop)
    return np.logical_or.reduceat(mask_N[index], offsets[:-1]) if len(start) else np.zeros(0, bool)


def _make_batch(
    seq: Sequences,
    sids_IL: np.ndarray,
    user: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    mask: np.ndarray,
    target: torch.Tensor | None,
    uid: list[str],
    as_of: np.ndarray | None = None,
) -> SampleBatch:
    """Build a batch of the events `index` [N] that belong to users by `offsets` [B + 1]."""
    cuts = torch.from_numpy(offsets)
    item = seq.item[index].astype(np.int64)
    context: dict[str, torch.Tensor | Jagged] = {
        name: Jagged(torch.from_numpy(_replace_nan(values) if name in seq.columns else values), cuts)
        for name, values in seq.gather_columns(index, np.repeat(user, np.diff(offsets)), as_of).items()
    }
    context["item"] = Jagged(torch.from_numpy(seq.get_item_keys(item)), cuts)
    context["user"] = torch.from_numpy(seq.get_user_keys(user))
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


def _replace_nan(values_N: np.ndarray) -> np.ndarray:
    """Replace NaN by 0 in floats; return ids unchanged."""
    return np.nan_to_num(values_N, nan=0.0) if values_N.dtype.kind == "f" else values_N
