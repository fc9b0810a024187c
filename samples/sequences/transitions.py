"""Transitions: how often one item came soon after another, the best neighbours of each item, memory-mapped.

c(x, y) sums 1 / distance over the pairs of a user's fitted events up to `reach` apart, n(x) is how often x occurs. One
artifact serves the transition counter and the memory of models. 100 neighbours an item lose nothing that can be measured
(quickstart: recall@10 0.1362 against 0.1368). Counts are float32 and rows int64: 8 bytes a neighbour.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from nonet.atomic import write_whole
from nonet.errors import ConfigError, DataError
from nonet.samples.sequences.sequences import Sequences
from nonet.samples.sequences.split import TRAIN
from nonet.suggest import did_you_mean, listed

# Shapes: I items, E neighbours kept, N events, F of them fitted.

_ARRAYS = ("row", "item", "count", "occurs")


@dataclass(frozen=True, slots=True)
class CountOptions:
    """reach: events apart that a pair may be; neighbours: kept an item; events: kinds that count, all where empty;
    half_life_s: seconds after which a pair counts half as much as one at the end of the fitted events, None for never."""

    reach: int = 3
    neighbours: int = 100
    events: tuple[str, ...] = ()
    half_life_s: float | None = None


@dataclass(frozen=True, eq=False)
class Transitions:
    """Neighbours of item x are item[row[x]:row[x + 1]], ascending, with their counts; occurs [I] is n.

    row [I + 1] int64 · item [E] int32 · count [E] float32 · occurs [I] float32 · until: unix seconds of the newest event
    """

    row: np.ndarray
    item: np.ndarray
    count: np.ndarray
    occurs: np.ndarray
    options: CountOptions = field(default_factory=CountOptions)
    until: int = 0

    @classmethod
    def fit(
        cls,
        seq: Sequences,
        n_items: int,
        options: CountOptions | None = None,
        splits: Sequence[int] = (TRAIN,),
    ) -> Transitions:
        """Count the events of the given splits. Raises ConfigError for a kind of event that is not there."""
        options = options or CountOptions()
        chosen = np.flatnonzero(np.isin(seq.split, splits) & of_kinds(seq, options))
        until = int(seq.time[chosen].max(initial=0))
        item, user = seq.item[chosen].astype(np.int64), seq.user[chosen]
        weight = faded(seq.time[chosen], until, options)
        keys, weights = [], []
        for step in range(1, options.reach + 1):
            same = user[step:] == user[:-step]
            keys.append(item[:-step][same] * n_items + item[step:][same])
            weights.append(weight[step:][same] / step)
        key, place = np.unique(np.concatenate(keys), return_inverse=True)
        count = np.bincount(place, weights=np.concatenate(weights), minlength=len(key))
        key, count = _best(key, count, n_items, options.neighbours)
        return cls(
            row=np.searchsorted(key // n_items, np.arange(n_items + 1)),
            item=(key % n_items).astype(np.int32),
            count=count.astype(np.float32),
            occurs=np.bincount(item, weights=weight, minlength=n_items).astype(np.float32),
            options=options,
            until=until,
        )

    def __len__(self) -> int:
        """Items."""
        return len(self.occurs)

    def save(self, folder: str | Path) -> None:
        """Write .npy arrays, then meta.json: a folder without it holds no transitions."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        meta = {"until": self.until, **asdict(self.options)}
        write_whole(folder / "meta.json", f"{json.dumps(meta, indent=1)}\n".encode())

    @classmethod
    def load(cls, folder: str | Path) -> Transitions:
        """Map the arrays of a folder. Raises DataError where it holds none."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / "meta.json").read_text())
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        except (OSError, ValueError) as error:
            raise DataError(
                f"transitions {folder}: not readable ({error}). Run the tokenise stage again."
            ) from None
        until = meta.pop("until")
        return cls(**arrays, options=CountOptions(**{**meta, "events": tuple(meta["events"])}), until=until)


def of_kinds(seq: Sequences, options: CountOptions) -> np.ndarray:
    """Which events are of the kinds that count, [N] bool. Raises ConfigError for a kind that is not there."""
    if not options.events:
        return np.ones(len(seq.item), bool)
    for kind in options.events:
        if kind not in seq.event_names:
            known = (
                f"its kinds are {listed(seq.event_names)}" if seq.event_names else "it has no kinds of events"
            )
            raise ConfigError(
                f"model.memory.events: the data has no event {kind!r}; {known}.{did_you_mean(kind, seq.event_names)}"
            )
    return np.isin(seq.event, [seq.event_names.index(kind) for kind in options.events])


def faded(time_F: np.ndarray, until: int, options: CountOptions) -> np.ndarray:
    """What an event counts by its age, [F] float64; 1 without a half-life."""
    if options.half_life_s is None:
        return np.ones(len(time_F))
    return np.exp2(-np.maximum(until - time_F, 0) / options.half_life_s)


def _best(key: np.ndarray, count: np.ndarray, n_items: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The `most` largest counts of each source, ties to the lower item; in order of source, then item."""
    source = key // n_items
    first = np.searchsorted(source, np.arange(n_items + 1))
    if np.diff(first).max(initial=0) <= most:
        return key, count
    order = np.lexsort((key, -count, source))
    chosen = np.sort(order[np.arange(len(key)) - first[source] < most])
    return key[chosen], count[chosen]
