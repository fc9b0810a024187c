"""Rows of the user's own files as training samples: one user sequence per row, of any size, never loaded completely.

    data:
      source: {use: parquet, path: "/data/sequences/dt=*/*.parquet", user: user_id, items: item_id}
      engine: local        # or ray; by default chosen by the size of the files

Items are those of the run's own catalogue (`data.items`), which provides semantic ids and keys. Every event of a row is
trained on, in windows of the run's history. Steps, ledger and checkpoints work as for every source; any number of trainers
may continue from a checkpoint.
"""

# Shapes: B rows, N events.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.errors import ConfigError
from nonet.samples.sources._parquet_options import (
    FileSourceOptions,
    add_end,
    check_files,
    detect_time_unit,
    parse_options,
    pin_files,
)
from nonet.samples.sources.base import SampleRequest, SampleSource

if TYPE_CHECKING:
    from nonet.samples.ledger import SampleLedger
    from nonet.samples.preparation import ItemIndex
    from nonet.samples.sequences import Sequences
    from nonet.samples.streams import StreamBatch, StreamFeed
    from nonet.types import SampleBatch

_SLICE_ROWS = 4096  # most rows of a slice


def count_epoch_rows(options: Mapping[str, Any], rows: int) -> int:
    """Return the rows of an epoch: those of the files."""
    made, *_ = parse_options(options)
    return made.make_stream(0).open().rows


class FileWindows:
    """Windows of the sequences that files hold."""

    schema: Mapping[str, str] = {"item": "int64 an event", "user": "int64 a sequence"}

    def __init__(self, request: SampleRequest, options: Mapping[str, Any]):
        if request.unit != "users" or request.target is not None:
            raise ConfigError(
                "data.source: parquet gives sequences without a `target:`; click models read `shuffled`"
            )
        self.ask = request
        self._options, self._engine, self._until = parse_options(options)
        self._batches: Iterator[StreamBatch] | None = None
        self._next = -1
        self._skips: dict[int, list[StreamBatch]] = {}

    @cached_property
    def feed(self) -> StreamFeed:
        """The opened files."""
        from nonet.samples.sources.dense_rows import DenseRowConverter

        options = self._options
        dense = DenseRowConverter(
            options.user, options.items, options.time, self._index, detect_time_unit(options), self._until
        )
        stream = options.make_stream(self.ask.seed).map(dense, workers=options.workers)
        rows = min(self.ask.rows, _SLICE_ROWS)
        return stream.open(rows=rows, step_rows=self.ask.rows, engine=self._engine, name=self.ask.stage)

    @cached_property
    def _index(self) -> ItemIndex:
        """The catalogue, hashed once for all slices."""
        from nonet.samples.preparation import ItemIndex

        return ItemIndex(self.ask.items()["item_id"].combine_chunks())

    @cached_property
    def ledger(self) -> SampleLedger:
        """The ledger of the rows that were used."""
        return self.feed.make_ledger()

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        """Lease a step and return functions that make the batches of a rank's share."""
        self._cut_steps(world)
        for part in self.feed.get_slices(step):
            self.ledger.lease(part)
        batches = self._read_step(step, rank, world)
        for batch in batches:
            self.ledger.note(batch.slice, batch.filtered, batch.skipped)
        return self._make_batches(step, rank, batches)

    def state(self) -> Mapping[str, Any]:
        """Return an empty state; the ledger holds all of it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Ignore the state, because there is none."""

    def _cut_steps(self, world: int) -> None:
        """Cut steps in one slice per trainer, because large slices cost less; the rows of a step stay the same."""
        rows = min(-(-self.ask.rows // world), _SLICE_ROWS)
        if rows != self.feed.steps.slice_rows:
            self.feed.steps = replace(self.feed.steps, slice_rows=rows)
            self._batches = None

    def _read_step(self, step: int, rank: int, world: int) -> list[StreamBatch]:
        """Return the batches of the rank's slices of a step; later slices are prepared meanwhile."""
        if self._batches is None or step != self._next:
            slices = self.feed.iterate_steps(step, rank, world)
            self._batches = self.feed.iterate_batches(slices, shared=world > 1)
        self._next = step + 1
        batches, due = [], len(self.feed.get_slices(step, rank, world))
        while due:
            batches.append(next(self._batches))
            due -= batches[-1].last
        return batches

    def _make_batches(
        self, step: int, rank: int, batches: Sequence[StreamBatch]
    ) -> Sequence[Callable[[], SampleBatch]]:
        """Return functions that make batches of windows of bounded size."""
        from nonet.samples.batches import (
            count_window_positions,
            cut_target_windows,
            make_window_batch,
            split_by_size,
        )

        ask, seq, epoch = (
            self.ask,
            _make_sequences(batches, self._index.keys),
            self.feed.steps.get_places(step)[0],
        )
        assert ask.sids_IL is not None
        rows = np.arange(len(seq))
        windows = cut_target_windows(
            seq, rows, history=ask.history, stage=ask.stage, epoch=epoch, seed=ask.seed + step, target=None
        )
        stage = f"{ask.stage}/{step}.{rank}"  # rows are numbered within a rank's share of a step
        make = partial(make_window_batch, seq, ask.sids_IL, stage=stage, epoch=epoch, target=None)
        row, block, stop = windows
        parts = split_by_size(count_window_positions(seq, windows), ask.chunk)
        return [partial(make, (row[part], block[part], stop[part])) for part in parts]


def _make_sequences(batches: Sequence[StreamBatch], keys: np.ndarray) -> Sequences:
    """Convert rows of batches to sequences in which every event is a training event."""
    from nonet.samples.sequences import TRAIN, Sequences

    users = np.concatenate([np.zeros(0, np.int64), *(batch["user_key"].numpy() for batch in batches)])
    lengths = np.concatenate(
        [np.zeros(0, np.int64), *(np.diff(batch["item"].offsets.numpy()) for batch in batches)]
    )
    item, time = (
        np.concatenate([np.zeros(0, kind), *(batch[name].values.numpy() for batch in batches)])
        for name, kind in (("item", np.int32), ("time", np.int64))
    )
    return Sequences(
        user_id=users,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        item=item,
        time=time,
        event=np.zeros(len(item), np.int32),
        split=np.full(len(item), TRAIN, np.int8),
        user_key=users,
        item_key=keys,
    )


def explain_files(options: Mapping[str, Any], seed: int, engine: str | None) -> list[str]:
    """Describe the stream that trainers read."""
    own, *_ = parse_options(options)
    return own.make_stream(seed).explain(engine).splitlines()


SPEC = SampleSource(
    FileWindows,
    FileSourceOptions,
    count_epoch_rows,
    engines=("local", "ray"),
    targets=False,
    weights=False,
    pin=pin_files,
    until=add_end,
    check=check_files,
    explain=explain_files,
)
