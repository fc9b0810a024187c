"""The events that a continued run trains on: those that the run before it had not, and a share of those that it had.

An event is known if the earlier run had a TRAIN event of the same user, item and second, and has kept what it learned from it. So
it does not matter whether a new event is the newest of its user, came late, or was held out before. An event whose label was not
known is new when a label arrives. As long as no event leaves the log, each is new in one run of a line of continued runs.
"""

# Shapes: U users, N events.

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.random import rng
from nonet.ranges import expand_ranges
from nonet.samples.sequences import TRAIN, Sequences, is_task

NEW_EVENTS = "targets.npy"
"""Name of the file of an artifact with the events that a continued run trains on, as codes."""
NEW, REPLAYED = 1, 2
"""Codes of events that a continued run trains on: not known to the run before it, or known."""


@dataclass(frozen=True, slots=True)
class NewEventCounts:
    """The numbers of events that a continued run trains on.

    Attributes:
        new: Number of TRAIN events that the earlier run had not trained on.
        replayed: Number of TRAIN events that it had, and that are trained on again.
        users: Number of users with at least one of these events.
        labelled: Number of these events that each target labels, by stage.
    """

    new: int
    replayed: int
    users: int
    labelled: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name, with the number of all "events"."""
        return {**asdict(self), "events": self.new + self.replayed}


def find_new_events(seq: Sequences, earlier: Sequences, rejected: np.ndarray | None = None) -> np.ndarray:
    """Return which events [N] bool are TRAIN events that are no TRAIN events of an earlier run's sequences.

    Of equal events, as many are known as the earlier run had.

    Args:
        seq: The sequences.
        earlier: The sequences of the earlier run.
        rejected: Which of its events [M] bool were new to it, if it has rejected what it learned from them; else None.
    """
    order = np.argsort(earlier.user_key, kind="stable")
    sorted_keys = np.asarray(earlier.user_key)[order]
    is_new = np.zeros(len(seq.item), bool)
    start = 0
    for part in seq.iterate_parts():
        stop = start + len(part.item)
        is_train = np.asarray(part.split) == TRAIN
        place = np.searchsorted(sorted_keys, part.user_key)
        place[place == len(sorted_keys)] = 0
        is_known_user = sorted_keys[place] == part.user_key if len(sorted_keys) else np.zeros(len(part), bool)
        rows = order[place[is_known_user]]
        first = np.asarray(earlier.offsets)[rows]
        events, offsets = expand_ranges(first, first + earlier.train_lengths[rows])
        known_users = np.repeat(np.flatnonzero(is_known_user), np.diff(offsets))
        if rejected is not None:
            is_kept = ~rejected[events]
            events, known_users = events[is_kept], known_users[is_kept]
        known = known_users, earlier.get_item_keys(earlier.item[events]), earlier.time[events]
        users = np.repeat(np.arange(len(part)), np.diff(part.offsets))[is_train]
        own = users, part.get_item_keys(part.item[is_train]), part.time[is_train]
        is_known = _match_events(known, own)
        if part.targets:  # a known event is new if none of its labels was known, and one is now
            had_label = _find_any_label(earlier, events)
            had_no_label = ~_match_events(tuple(column[had_label] for column in known), own)
            is_known &= ~(had_no_label & _find_any_label(part, np.flatnonzero(is_train)))
        is_new[start:stop][is_train] = ~is_known
        earlier.release_pages()
        start = stop
    return is_new


def _find_any_label(seq: Sequences, events: np.ndarray) -> np.ndarray:
    """Return for which events [n] bool the label of some target is known."""
    labelled = [seq.find_labelled(name, events) for name in seq.targets]
    return np.logical_or.reduce(labelled) if labelled else np.zeros(len(events), bool)


def _match_events(known: tuple[np.ndarray, ...], events: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return which events [n] bool have a partner among the known ones [k], each of which is the partner of one event.

    Args:
        known: Equally long arrays [k], whose values together identify an event.
        events: The same arrays [n] of the events.
    """
    n_known = len(known[0])
    columns = [np.concatenate(pair) for pair in zip(known, events, strict=True)]
    order = np.lexsort(columns[::-1])  # equal events stay in their order, so that known ones come first
    is_first = np.ones(len(order), bool)
    is_first[1:] = np.logical_or.reduce([column[order][1:] != column[order][:-1] for column in columns])
    group = np.cumsum(is_first) - 1
    is_known = order < n_known
    known_counts = np.bincount(group, weights=is_known, minlength=len(order)).astype(np.int64)
    position = np.arange(len(order)) - np.flatnonzero(is_first)[group]  # in the group
    is_matched = np.empty(len(order), bool)
    is_matched[order] = position < 2 * known_counts[group]
    return is_matched[n_known:]


def choose_new_targets(
    seq: Sequences,
    earlier: Sequences,
    replay: float,
    seed: int,
    run: str,
    rejected: np.ndarray | None = None,
) -> tuple[np.ndarray, NewEventCounts]:
    """Choose the events that a continued run trains on.

    Args:
        seq: The sequences of the continued run.
        earlier: The sequences of the run that it continues.
        replay: Share of events that the earlier run had trained on, below 1. Whole users are drawn until it is reached.
        seed: Seed of the draw.
        run: The id of the earlier run, so that each continued run draws other users.
        rejected: As for `find_new_events`.

    Returns:
        Codes [N] int8 of the events (NEW, REPLAYED, or 0 for those that are not trained on), and their numbers.

    Raises:
        DataError: No event is new, or none that is trained on is a target of a stage.
    """
    target = find_new_events(seq, earlier, rejected)
    codes, new_count = target.astype(np.int8), int(target.sum())
    is_train = np.asarray(seq.split) == TRAIN
    if not new_count:
        raise DataError(
            f"init.train: new: run {run} has trained on all {int(is_train.sum()):,} training events; add newer ones to "
            "data.interactions, or leave init.train out"
        )
    old_counts = seq.count_by_user(is_train & ~target)
    wanted_count = round(replay / (1 - replay) * new_count)
    drawn = rng(seed, "replay", run).permutation(len(seq))
    drawn = drawn[old_counts[drawn] > 0]
    before = np.cumsum(old_counts[drawn]) - old_counts[drawn]  # events of the users drawn before
    is_replayed = np.zeros(len(seq), bool)
    is_replayed[drawn[before < wanted_count]] = True
    target |= np.repeat(is_replayed, seq.lengths) & is_train
    codes[target & (codes != NEW)] = REPLAYED
    users = int((seq.count_by_user(target) > 0).sum())
    for stage in seq.targets:
        if not is_task(stage) and not (seq.find_targets(stage) & target).any():
            raise DataError(
                f"stages.{stage}.target: it holds for none of the {int(target.sum()):,} events that are new since run {run} or "
                "replayed: the stage would train on nothing. Wait for more events, or replay more of them (init.replay)"
            )
    labelled = {stage: int((seq.find_labelled(stage) & target).sum()) for stage in seq.targets}
    return codes, NewEventCounts(new_count, int(target.sum()) - new_count, users, labelled)


def write_new_events(folder: Path, codes: np.ndarray) -> None:
    """Write the codes [N] of events that `choose_new_targets` returned to the folder of an artifact."""
    np.save(folder / NEW_EVENTS, codes)


def load_new_events(folder: str | Path) -> np.ndarray:
    """Map the codes [N] int8 that `write_new_events` wrote."""
    return np.load(Path(folder) / NEW_EVENTS, mmap_mode="r")
