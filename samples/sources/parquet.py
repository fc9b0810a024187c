"""Rows of the user's own files as training samples: one user sequence per row, of any size, never loaded completely.

    data:
      source: {use: parquet, path: "/data/sequences/dt=*/*.parquet", user: user_id, items: item_id}
      engine: local        # or ray; by default chosen by the size of the files

Items are those of the run's own catalogue (`data.items`), which provides semantic ids and keys. Every event of a row is
trained on, in windows of at most the run's history. Steps, ledger and checkpoints work as for every source; a run can be
resumed with another number of trainers.
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

_SLICE_ROWS = 4096  # Maximum number of rows of a slice.


def count_epoch_rows(options: Mapping[str, Any], rows: int) -> int:
    """Return the number of rows of an epoch: those of the files; `rows`, of the prepared sequences, is ignored."""
    file_options, *_ = parse_options(options)
    return file_options.make_stream(seed=0).open().rows  # The number does not depend on the order.


class FileWindows:
    """Windows of the sequences in files: the source `parquet`, opened on a rank.

    Args:
        request: What the stage requests.
        options: The options of the source (`FileSourceOptions`), with the engine and the end of training events.

    Raises:
        ConfigError: If the request is one that this source cannot serve.
    """

    schema: Mapping[str, str] = {"item": "int64 an event", "user": "int64 a sequence"}

    def __init__(self, request: SampleRequest, options: Mapping[str, Any]):
        if request.unit != "users" or request.target is not None:
            raise ConfigError(
                "data.source: parquet gives sequences without a `target:`; click models read `shuffled`"
            )
        self.request = request
        self._options, self._engine, self._until = parse_options(options)
        self._batches: Iterator[StreamBatch] | None = None  # Reads ahead of the requested steps.
        self._next_step = -1  # The step whose batches `_batches` yields next.

    @cached_property
    def feed(self) -> StreamFeed:
        """The opened files."""
        from nonet.samples.sources._dense_rows import DenseRowConverter

        options = self._options
        convert_rows = DenseRowConverter(
            options.user,
            options.items,
            options.time,
            index=self._index,
            unit=detect_time_unit(options),
            until=self._until,
        )
        stream = options.make_stream(self.request.seed).map(convert_rows, workers=options.workers)
        rows = min(self.request.rows, _SLICE_ROWS)
        return stream.open(
            rows=rows, step_rows=self.request.rows, engine=self._engine, name=self.request.stage
        )

    @cached_property
    def _index(self) -> ItemIndex:
        """The catalogue of items, indexed once for all slices."""
        from nonet.samples.preparation import ItemIndex

        return ItemIndex(self.request.items()["item_id"].combine_chunks())

    @cached_property
    def ledger(self) -> SampleLedger:
        """The ledger of the rows that were used in training."""
        return self.feed.make_ledger()

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        """Lease a step, read a rank's share of it, and return functions that make its batches; see `Samples.batch`."""
        self._cut_steps(world)
        for order_slice in self.feed.get_slices(step):
            self.ledger.lease(order_slice)
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
        """Set the size of slices so that a step has one per trainer, because large slices cost less per row.

        The rows of a step stay the same.
        """
        slice_rows = min(-(-self.request.rows // world), _SLICE_ROWS)
        if slice_rows != self.feed.steps.slice_rows:
            self.feed.steps = replace(self.feed.steps, slice_rows=slice_rows)
            self._batches = None

    def _read_step(self, step: int, rank: int, world: int) -> list[StreamBatch]:
        """Return the batches of the rank's slices of a step; slices of later steps are read ahead."""
        if self._batches is None or step != self._next_step:
            slices = self.feed.iterate_steps(step, rank, world)
            self._batches = self.feed.iterate_batches(slices, shared=world > 1)
        self._next_step = step + 1
        batches, unfinished_slices = [], len(self.feed.get_slices(step, rank, world))
        while unfinished_slices:
            batches.append(next(self._batches))
            unfinished_slices -= batches[-1].last  # 1 for the last batch of a slice, else 0.
        return batches

    def _make_batches(
        self, step: int, rank: int, batches: Sequence[StreamBatch]
    ) -> Sequence[Callable[[], SampleBatch]]:
        """Return functions that make batches of windows, of at most `request.chunk` positions, from a step's rows."""
        from nonet.samples.batches import (
            count_window_positions,
            cut_target_windows,
            make_window_batch,
            split_by_size,
        )

        request, seq = self.request, _make_sequences(batches, self._index.keys)
        epoch = self.feed.steps.get_places(step)[0]
        assert request.sids_IL is not None
        rows = np.arange(len(seq))
        windows = cut_target_windows(
            seq,
            rows,
            history=request.history,
            stage=request.stage,
            epoch=epoch,
            seed=request.seed + step,  # Rows have other numbers in each step, so they draw anew.
            target=None,
        )
        # The ids of samples name the step and the rank, because rows are numbered within a rank's share of a step.
        uid_stage = f"{request.stage}/{step}.{rank}"
        make_batch = partial(
            make_window_batch, seq, request.sids_IL, stage=uid_stage, epoch=epoch, target=None
        )
        user_row, first_event, stop_event = windows
        parts = split_by_size(count_window_positions(seq, windows), request.chunk)
        return [partial(make_batch, (user_row[part], first_event[part], stop_event[part])) for part in parts]


def _make_sequences(batches: Sequence[StreamBatch], keys: np.ndarray) -> Sequences:
    """Convert rows of batches to sequences, one per row, in which every event is a training event.

    Args:
        batches: Batches of rows that `DenseRowConverter` converted.
        keys: Key of each item of the catalogue.
    """
    from nonet.samples.sequences import TRAIN, Sequences

    user_keys = np.concatenate([np.zeros(0, np.int64), *(batch["user_key"].numpy() for batch in batches)])
    event_counts = np.concatenate(
        [np.zeros(0, np.int64), *(np.diff(batch["item"].offsets.numpy()) for batch in batches)]
    )
    item, time = (
        np.concatenate([np.zeros(0, dtype), *(batch[name].values.numpy() for batch in batches)])
        for name, dtype in (("item", np.int32), ("time", np.int64))
    )
    return Sequences(
        user_id=user_keys,
        offsets=np.concatenate([[0], np.cumsum(event_counts)]).astype(np.int64),
        item=item,
        time=time,
        event=np.zeros(len(item), np.int32),
        split=np.full(len(item), TRAIN, np.int8),
        user_key=user_keys,
        item_key=keys,
    )


def explain_files(options: Mapping[str, Any], seed: int, engine: str | None) -> list[str]:
    """Return lines that describe the stream that trainers read."""
    file_options, *_ = parse_options(options)
    return file_options.make_stream(seed).explain(engine).splitlines()


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
