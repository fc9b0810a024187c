"""Counts how often one item follows another, and keeps the most frequent successors of each item, memory-mapped.

The count c(x, y) is the sum of 1 / distance over the pairs of a user's counted events (x, then y) that are at most `reach` events
apart, and of `reverse` / distance over those of (y, then x); n(x) is the number of occurrences of x. One artifact serves the
transition counter and the memory of models. Keeping only 100 neighbours per item loses nothing measurable (quickstart: recall@10
0.1362 against 0.1368). A neighbour takes 8 bytes, an int32 item and a float32 count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import write_whole
from nonet.errors import ConfigError, DataError
from nonet.samples.sequences.flat import GrowingFile, release_pages
from nonet.samples.sequences.pairs import PairCounter, find_top_neighbours
from nonet.samples.sequences.sequences import Sequences
from nonet.samples.sequences.split import TRAIN
from nonet.suggest import join_names, suggest_sentence

# Shapes: I items, E kept neighbours of all items, N events, F counted events.

_ARRAYS = ("row", "item", "count", "occurs")
_CHOSEN = {"decay": 10.0, "cooccurrence": 1.0}  # the largest values of options that validation chooses


@dataclass(frozen=True, slots=True)
class CountOptions:
    """Options of transition counts.

    Attributes:
        reach: Largest distance of a pair in counted events of the user.
        neighbours: Number of neighbours that are kept per item.
        events: Names of the kinds of events that are counted; empty for all.
        half_life_s: Age in seconds at which a pair counts half; None for no decay.
        reverse: Weight of a pair whose items follow each other in reverse order, relative to one in order.
        cosine: Whether a pair weighs 1 at any distance, and the neighbours with the largest c(x, y) / sqrt(n(x) n(y)) are kept.
    """

    reach: int = 3
    neighbours: int = 100
    events: tuple[str, ...] = ()
    half_life_s: float | None = None
    reverse: float = 0.0
    cosine: bool = False

    def weigh_distances(self) -> np.ndarray:
        """Return the weight of a pair by its distance 1, 2, ... [reach]."""
        return np.ones(self.reach) if self.cosine else 1 / np.arange(1, self.reach + 1)


@dataclass(frozen=True, eq=False)
class Transitions:
    """The neighbours of each item, those that follow it, with their counts.

    The neighbours of item x are item[row[x]:row[x + 1]], ascending, and their counts are at the same indices.

    Attributes:
        row: Index of the first neighbour of each item [I + 1] int64.
        item: Neighbours [E] int32.
        count: Weighted count of each neighbour [E] float32.
        occurs: Weighted number of occurrences n of each item [I] float32.
        options: Options of the counts.
        until: Unix seconds of the newest counted event, relative to which events decay.
        chosen: Options of the votes that validation chose, by name (`nonet.models.generation.VoteOptions`).
    """

    row: np.ndarray
    item: np.ndarray
    count: np.ndarray
    occurs: np.ndarray
    options: CountOptions = field(default_factory=CountOptions)
    until: int = 0
    chosen: Mapping[str, float] = field(default_factory=dict)

    def release_pages(self) -> None:
        """Drop the resident pages of the memory-mapped files (`madvise(DONTNEED)`); a later access reads them again."""
        release_pages(self.row, self.item, self.count, self.occurs)

    @classmethod
    def fit(
        cls,
        seq: Sequences,
        n_items: int,
        options: CountOptions | None = None,
        splits: Sequence[int] = (TRAIN,),
    ) -> Transitions:
        """Count the events of the given splits.

        Args:
            seq: The sequences.
            n_items: Number of items I.
            options: Options of the counts; None for the defaults.
            splits: Codes of the splits whose events are counted.

        Raises:
            ConfigError: The data have no kind of event that `options` names.
        """
        options = options or CountOptions()
        rows, items, counts = [np.zeros(1, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        until, occurs = _count_occurrences(seq, n_items, options, splits)
        for row, item, count in _count_by_range(seq, options, splits, until, occurs):
            rows.append(row + rows[-1][-1])
            items.append(item)
            counts.append(count)
        arrays = (np.concatenate(parts) for parts in (rows, items, counts))
        return cls(*arrays, occurs=occurs.astype(np.float32), options=options, until=until)

    @classmethod
    def write(
        cls,
        folder: str | Path,
        seq: Sequences,
        n_items: int,
        options: CountOptions | None = None,
        splits: Sequence[int] = (TRAIN,),
        prefix: str = "",
    ) -> Transitions:
        """Count as `fit` does, and write the result directly to the files of a folder, which are then memory-mapped.

        Only one count per item and the pairs of one range of items are in memory at a time. The names of the files begin with
        `prefix`.
        """
        folder, options = Path(folder), options or CountOptions()
        folder.mkdir(parents=True, exist_ok=True)
        until, occurs = _count_occurrences(seq, n_items, options, splits)
        neighbour_count = 0
        with (
            GrowingFile(folder / f"{prefix}row.npy", np.int64) as rows,
            GrowingFile(folder / f"{prefix}item.npy", np.int32) as items,
            GrowingFile(folder / f"{prefix}count.npy", np.float32) as counts,
        ):
            rows.append_values(np.zeros(1, np.int64))
            for row, item, count in _count_by_range(seq, options, splits, until, occurs, folder):
                rows.append_values(row + neighbour_count)
                neighbour_count += len(item)
                items.append_values(item)
                counts.append_values(count)
        np.save(folder / f"{prefix}occurs.npy", occurs.astype(np.float32))
        _write_meta(folder / f"{prefix}meta.json", until, options)
        return cls.load(folder, prefix)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.occurs)

    def save(self, folder: str | Path, prefix: str = "") -> None:
        """Write .npy arrays, then meta.json: a folder without it holds no transitions. The names begin with `prefix`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            np.save(folder / f"{prefix}{name}.npy", getattr(self, name))
        self.save_meta(folder, prefix)

    def save_meta(self, folder: str | Path, prefix: str = "") -> None:
        """Write meta.json alone, beside arrays that `save` or `write` has written. The names begin with `prefix`."""
        _write_meta(Path(folder) / f"{prefix}meta.json", self.until, self.options, self.chosen)

    @classmethod
    def load(cls, folder: str | Path, prefix: str = "") -> Transitions:
        """Memory-map the arrays of a folder. Raises DataError if a file is missing or not readable."""
        return cls.map({name: Path(folder) / file for name, file in list_count_names(prefix).items()})

    @classmethod
    def map(cls, files: Mapping[str, Path]) -> Transitions:
        """Memory-map the arrays in these files.

        Args:
            files: Path of each array's file by name, and of meta.json as "meta".

        Raises:
            DataError: A file cannot be read.
        """
        try:
            meta = json.loads(files["meta"].read_text())
            arrays = {name: np.load(files[name], mmap_mode="r") for name in _ARRAYS}
            until, chosen = meta.pop("until"), _check_chosen(meta.pop("chosen", {}))
            options = CountOptions(**{**meta, "events": tuple(meta["events"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"transitions {files['meta'].parent}: not readable ({error}). Run the tokenise stage again."
            ) from None
        return cls(**arrays, options=options, until=until, chosen=chosen)


def _check_chosen(chosen: Mapping[str, Any]) -> dict[str, float]:
    """Return the options of votes that validation chose. Raises ValueError for other names, or values that are out of range."""
    for name, value in chosen.items():
        if name not in _CHOSEN or not 0 <= value <= _CHOSEN[name]:
            raise ValueError(f"chosen: {name} is {value!r}")
    return {name: float(value) for name, value in chosen.items()}


def list_count_names(prefix: str = "") -> dict[str, str]:
    """Return the names of the files of `Transitions` by their content: each array, and the metadata as "meta"."""
    return {name: f"{prefix}{name}.npy" for name in _ARRAYS} | {"meta": f"{prefix}meta.json"}


def _write_meta(
    file: Path, until: int, options: CountOptions, chosen: Mapping[str, float] | None = None
) -> None:
    """Write meta.json, which completes the files of transitions."""
    new_keys = ("reverse", "cosine")  # Without these options, the bits are those of earlier versions.
    values = {key: value for key, value in asdict(options).items() if value or key not in new_keys}
    meta = {"until": until, **values} | ({"chosen": dict(chosen)} if chosen else {})
    write_whole(file, f"{json.dumps(meta, indent=1)}\n".encode())


def _count_by_range(
    seq: Sequences,
    options: CountOptions,
    splits: Sequence[int],
    until: int,
    occurs: np.ndarray,
    folder: Path | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the neighbours of consecutive ranges of items.

    Yields:
        The end of each item's neighbours within the range's, the neighbours (int32), and their counts (float32).
    """
    n_items = len(occurs)
    pairs = PairCounter(
        n_items,
        options.reach,
        options.weigh_distances(),
        reverse=options.reverse,
        compute_decay=None
        if options.half_life_s is None
        else lambda time: compute_decay(time, until, options),
    )
    select_events = partial(_select_events, options=options, splits=splits)
    # A key is x * n_items + y for the pair of items (x, y).
    for items, key, count in pairs.count_ranges(seq, select_events, folder=folder):
        # For the cosine, n(x) is the same for all y.
        score = count / np.sqrt(occurs[key % n_items]) if options.cosine else count
        kept = find_top_neighbours(
            key - items.start * n_items, score, n_items, options.neighbours, len(items)
        )
        key, count = key[kept] - items.start * n_items, count[kept]
        ends = np.searchsorted(key // n_items, np.arange(1, len(items) + 1))
        yield ends, (key % n_items).astype(np.int32), count.astype(np.float32)


def _select_events(seq: Sequences, options: CountOptions, splits: Sequence[int]) -> np.ndarray:
    """Return which events are counted [N] bool."""
    return np.isin(seq.split, splits) & select_kinds(seq, options)


def _count_occurrences(
    seq: Sequences, n_items: int, options: CountOptions, splits: Sequence[int]
) -> tuple[int, np.ndarray]:
    """Return the unix seconds of the newest counted event, and the weighted occurrences of each item [I]."""
    until = max(
        int(part.time[_select_events(part, options, splits)].max(initial=0)) for part in seq.iterate_parts()
    )
    occurs = np.zeros(n_items)
    for part in seq.iterate_parts():
        is_counted = _select_events(part, options, splits)
        weight = compute_decay(part.time[is_counted], until, options)
        occurs += np.bincount(part.item[is_counted], weights=weight, minlength=n_items)
    return until, occurs


def select_kinds(seq: Sequences, options: CountOptions) -> np.ndarray:
    """Return which events have a kind that counts [N] bool. Raises ConfigError for an unknown kind."""
    if not options.events:
        return np.ones(len(seq.item), bool)
    check_kinds(seq, options.events)
    return np.isin(seq.event, [seq.event_names.index(kind) for kind in options.events])


def check_kinds(seq: Sequences, kinds: Sequence[str]) -> None:
    """Raise ConfigError if a kind of event that a memory counts does not exist."""
    for kind in kinds:
        if kind not in seq.event_names:
            known = (
                f"its kinds are {join_names(seq.event_names)}"
                if seq.event_names
                else "it has no kinds of events"
            )
            raise ConfigError(
                f"model.memory.events: the data has no event {kind!r}; {known}.{suggest_sentence(kind, seq.event_names)}"
            )


def compute_decay(time_F: np.ndarray, until: int, options: CountOptions) -> np.ndarray:
    """Return the weight of events by age [F] float64; 1 without a half-life."""
    if options.half_life_s is None:
        return np.ones(len(time_F))
    return np.exp2(-np.maximum(until - time_F, 0) / options.half_life_s)
