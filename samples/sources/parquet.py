"""Rows of the user's own files as training samples: one user sequence per row, of any size, never loaded completely.

    data:
      source: {use: parquet, path: "/data/sequences/dt=*/*.parquet", user: user_id, items: item_id}
      engine: local        # or ray; by default chosen by the size of the files

Items are those of the run's own catalogue (`data.items`), which provides semantic ids and keys. Every event of a row is
trained on, in windows of at most the run's history, unless the stage has a `target:`; its condition reads list columns with a
value for each item. Columns of stores are joined to events as for every source. Steps, ledger and checkpoints work as for every
source; a run can be resumed with another number of trainers.
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
    FileRunOptions,
    FileSourceOptions,
    add_end,
    add_needs,
    check_files,
    count_unknown,
    detect_time_unit,
    pin_files,
)
from nonet.samples.sources.base import SampleRequest, SampleSource

if TYPE_CHECKING:
    from nonet.samples.ledger import SampleLedger
    from nonet.samples.preparation import ItemIndex
    from nonet.samples.sequences import Sequences
    from nonet.samples.stores import StoreJoins
    from nonet.samples.streams import StreamBatch, StreamFeed
    from nonet.types import SampleBatch

_SLICE_ROWS = 4096  # Maximum number of rows of a slice.


def count_epoch_rows(options: Mapping[str, Any], rows: int) -> int:
    """Return the number of rows of an epoch: those of the files; `rows`, of the prepared sequences, is ignored."""
    return (
        FileRunOptions.parse(options).source.make_stream(seed=0).open().rows
    )  # The number does not depend on the order.


class FileWindows:
    """Windows of the sequences in files: the source `parquet`, opened on a rank.

    Args:
        request: What the stage requests.
        options: The options of the source (`FileSourceOptions`), with the engine and the end of training events.

    Raises:
        ConfigError: If the request is one that this source cannot serve.
    """

    def __init__(self, request: SampleRequest, options: Mapping[str, Any]):
        if request.unit != "users":
            raise ConfigError(
                "data.source: parquet gives sequences of users; models of single events read `shuffled`"
            )
        self.request = request
        self._options = FileRunOptions.parse(options)
        self._batches: Iterator[StreamBatch] | None = None  # Reads ahead of the requested steps.
        self._next_step = -1  # The step whose batches `_batches` yields next.

    @property
    def schema(self) -> Mapping[str, str]:
        """The meaning of the ids of each sparse feature, by name."""
        kinds = self.request.joins.get_kinds() if self.request.joins else {}
        kinds |= dict.fromkeys(self._columns, "int64")
        return {
            "item": "int64 an event",
            "user": "int64 a sequence",
            **{name: f"{kind} an event" for name, kind in kinds.items()},
        }

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns of events that samples get from the files."""
        return tuple(name for name in self._options.columns if name != "event")

    @cached_property
    def feed(self) -> StreamFeed:
        """The opened files."""
        from nonet.samples.sources._dense_rows import DenseRowConverter

        options, stage = self._options.source, self.request.target
        names = self._options.list_event_columns(stage or "")
        condition = None if stage is None else self._options.targets[stage]
        convert_rows = DenseRowConverter(
            options.user,
            options.items,
            options.time,
            index=self._index,
            unit=detect_time_unit(options),
            until=self._options.until,
            lists={name: options.get_list_column(name) for name in names},
            columns=self._columns,
            target=None
            if condition is None
            else (condition, f"stages.{stage}.target with data.source: parquet"),
            event_names=self.request.events().event_names if "event" in self._options.columns else None,
            gives_users=bool(self.request.joins),
            drops_unknown=self._options.drops_unknown,
        )
        stream = options.make_stream(self.request.seed, names).map(convert_rows, workers=options.workers)
        rows = min(self.request.rows, _SLICE_ROWS)
        return stream.open(
            rows=rows, step_rows=self.request.rows, engine=self._options.engine, name=self.request.stage
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

        request, seq = self.request, self._make_sequences(batches)
        target = None if request.target is None else _join_lists(batches, "target", np.bool_)
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
            target=target,
        )
        # The ids of samples name the step and the rank, because rows are numbered within a rank's share of a step.
        uid_stage = f"{request.stage}/{step}.{rank}"
        make_batch = partial(
            make_window_batch, seq, request.sids_IL, stage=uid_stage, epoch=epoch, target=target
        )
        user_row, first_event, stop_event = windows
        parts = split_by_size(count_window_positions(seq, windows), request.chunk)
        return [partial(make_batch, (user_row[part], first_event[part], stop_event[part])) for part in parts]

    def _make_sequences(self, batches: Sequence[StreamBatch]) -> Sequences:
        """Convert rows of batches that `DenseRowConverter` converted to sequences, one per row, of training events."""
        from nonet.samples.sequences import TRAIN, Sequences

        user_keys = np.concatenate([np.zeros(0, np.int64), *(batch["user_key"].numpy() for batch in batches)])
        event_counts = np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(batch["item"].offsets.numpy()) for batch in batches)]
        )
        item = _join_lists(batches, "item", np.int32)
        has_kinds = "event" in self._options.columns
        joins = self.request.joins or None
        return Sequences(
            user_id=user_keys if joins is None else _join_user_ids(batches),
            offsets=np.concatenate([[0], np.cumsum(event_counts)]).astype(np.int64),
            item=item,
            time=_join_lists(batches, "time"),
            event=_join_lists(batches, "event", np.int32) if has_kinds else np.zeros(len(item), np.int32),
            split=np.full(len(item), TRAIN, np.int8),
            columns={name: _join_lists(batches, name) for name in self._columns},
            user_key=user_keys,
            item_key=self._index.keys,
            joined=None if joins is None else partial(_read_joins, joins, self._item_ids),
        )

    @cached_property
    def _item_ids(self) -> np.ndarray:
        """The items' own ids [I]."""
        return self.request.items()["item_id"].to_numpy()


def _join_lists(batches: Sequence[StreamBatch], name: str, empty_dtype: Any = np.int64) -> np.ndarray:
    """Concatenate the values [N] of a list column of batches; without batches, they have the type `empty_dtype`."""
    parts = [batch[name].values.numpy() for batch in batches]
    return np.concatenate(parts) if parts else np.zeros(0, empty_dtype)


def _join_user_ids(batches: Sequence[StreamBatch]) -> np.ndarray:
    """Concatenate the users' own ids [B] of batches: int64, or object for text."""
    parts = [np.asarray(batch["user_id"]) for batch in batches]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _read_joins(
    joins: StoreJoins, item_ids: np.ndarray, item: np.ndarray, user_id: np.ndarray, time: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the joined columns [n] of events, given dense items [n], the users' own ids [n] and times [n]."""
    return joins.read_event_columns(item_ids[item], user_id, time)


def explain_files(options: Mapping[str, Any], seed: int, engine: str | None) -> list[str]:
    """Return lines that describe the stream that trainers read."""
    return FileRunOptions.parse(options).source.make_stream(seed).explain(engine).splitlines()


SPEC = SampleSource(
    FileWindows,
    FileSourceOptions,
    count_epoch_rows,
    units=("users",),
    engines=("local", "ray"),
    pin=pin_files,
    until=add_end,
    needs=add_needs,
    count_unknown=count_unknown,
    check=check_files,
    explain=explain_files,
)
