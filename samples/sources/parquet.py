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
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from nonet.errors import ConfigError, DataError
from nonet.options import Count, Positive, StrictModel
from nonet.samples.sources.base import SampleRequest, SampleSource

if TYPE_CHECKING:
    from nonet.samples.ledger import SampleLedger
    from nonet.samples.preparation import ItemIndex
    from nonet.samples.sequences import Sequences
    from nonet.samples.streams import Stream, StreamBatch, StreamFeed
    from nonet.types import SampleBatch

_SLICE_ROWS = 4096  # most rows of a slice


class FileSourceOptions(StrictModel):
    """Options of the source; see the module.

    `where` filters rows. `map` lists functions of Arrow batches ("package.module:Name") that are applied in order,
    `workers` at once.
    """

    path: str | list[str]
    format: Literal["parquet", "csv", "lines"] | None = None
    user: str = "user_id"
    items: str = "item_id"
    time: Annotated[
        str | None, Field(description="a list column of times, as long as the items; else places are times")
    ] = None
    unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None,
        Field(description="of times that are plain numbers; by default what their name or their size says"),
    ] = None
    where: str | None = None
    map: list[str] = []
    workers: Positive = 1
    on_bad_rows: Literal["fail", "skip"] = "fail"
    in_group: Annotated[bool, Field(description="shuffle rows inside row groups too")] = True
    ahead: Annotated[Count, Field(description="slices made ahead of the trainer")] = 4

    @field_validator("path")
    @classmethod
    def _check_paths(cls, value: str | list[str]) -> str | list[str]:
        """Reject relative paths, because every trainer resolves the path itself."""
        for path in [value] if isinstance(value, str) else value:
            if "://" not in path and not path.startswith(("/", "builtin:")):
                raise ValueError(
                    f"{path!r} is relative; give a whole path or a URI, for every trainer reads it"
                )
        return value

    def make_stream(self, seed: int) -> Stream:
        """Return the stream of the rows in a seeded order, after the maps."""
        from nonet.samples.streams import read

        named = tuple(filter(None, (self.user, self.items, self.time)))
        columns = None if self.map else named  # a map may read any column
        stream = read(
            self.path, format=self.format, columns=columns, where=self.where, on_bad_rows=self.on_bad_rows
        )
        if stream.files is not None:
            stream = replace(stream, files=replace(stream.files, present_ids=named))
        for function in self.map:
            stream = stream.map(function, workers=self.workers)
        return stream.shuffle(seed, in_group=self.in_group).prefetch(self.ahead)


def count_epoch_rows(options: Mapping[str, Any], rows: int) -> int:
    """Return the rows of an epoch: those of the files."""
    made, *_ = _parse_options(options)
    return made.make_stream(0).open().rows


def pin_files(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with the files that the paths match now, so that files added later do not belong to the run."""
    paths = [options["path"]] if isinstance(options["path"], str) else options["path"]
    return {**options, "path": [file for path in paths for file in _find_matching(path)]}


def _find_matching(path: str) -> list[str]:
    """Return the files behind a path, as paths that can be opened again."""
    from nonet.samples.tables import find_parquet

    remote = "://" in path
    if path.startswith("builtin:") or (
        remote and "?" in path
    ):  # the paths of the files would lose the URI's options
        return [path]
    scheme = path.partition("://")[0] + "://" if remote else ""
    return [scheme + file for file in find_parquet(path, "data.source")[1]]


class FileWindows:
    """Windows of the sequences that files hold."""

    schema: Mapping[str, str] = {"item": "int64 an event", "user": "int64 a sequence"}

    def __init__(self, request: SampleRequest, options: Mapping[str, Any]):
        if request.unit != "users" or request.target is not None:
            raise ConfigError(
                "data.source: parquet gives sequences without a `target:`; click models read `shuffled`"
            )
        self.ask = request
        self._options, self._engine, self._until = _parse_options(options)
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


def _parse_options(options: Mapping[str, Any]) -> tuple[FileSourceOptions, str | None, int | None]:
    """Return the options, the engine of the scenario, and the time from which on its split holds events out."""
    own = {name: value for name, value in options.items() if name not in ("engine", "until")}
    return FileSourceOptions.model_validate(own), options.get("engine"), options.get("until")


def detect_time_unit(options: FileSourceOptions) -> str | None:
    """Return the unit of times that are plain numbers, from the first row group of the files; None where they have their own.

    Raises DataError where a map makes the times, so that nothing tells their unit before it runs.
    """
    from nonet.samples.sources.dense_rows import flatten_lists
    from nonet.samples.tables import get_unit_by_name, get_unit_by_size, is_plain

    if options.time is None or options.unit is not None:
        return options.unit
    if named := get_unit_by_name(options.time):
        return named
    if options.map:
        raise DataError(
            f"data.source: the unit of {options.time!r} cannot be told, since data.source.map may make it; say data.source.unit: "
            "s, ms, us or ns"
        )
    leaf = options.make_stream(0).open().leaves[0]
    field = leaf.schema.field(options.time).type
    inner = getattr(field, "value_type", field)
    if not is_plain(inner):
        return None
    rows = leaf.read(0).rows
    if rows is None:
        return None
    values = (
        flatten_lists(rows.column(options.time), options.time)[0].drop_null().cast(pa.float64()).to_numpy()
    )
    return get_unit_by_size(float(np.abs(values[np.isfinite(values)]).max(initial=0)))


def add_end(options: Mapping[str, Any], end: int | None) -> Mapping[str, Any]:
    """Return the options with the time from which on the run holds events out. Raises ConfigError where no column has times."""
    if end is None:
        return options
    if options.get("time") is None:
        raise ConfigError(
            "data.source: parquet has no `time`, so nothing keeps events after data.split.test out of training; name the list "
            "column of times, or use split: leave_last_out"
        )
    return {**options, "until": end}


def check_files(options: Mapping[str, Any]) -> None:
    """Look at columns and times before a run starts. Raises DataError with counts over all files."""
    from nonet.samples.sources.dense_rows import flatten_lists

    own, _, end = _parse_options(options)
    feed = own.make_stream(0).open()
    schema = feed.leaves[0].schema
    if own.map:
        return  # the output of a map is checked when it is produced
    for name in (own.items, own.time):
        if name is not None:
            flatten_lists(pa.array([], schema.field(name).type), name)
    kind = schema.field(own.user).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"data.source: column {own.user!r} is {kind}; it must hold whole numbers or text")
    unit = detect_time_unit(own)
    if own.time is not None and end is not None:
        _check_end(own, unit, end)


def _check_end(options: FileSourceOptions, unit: str | None, end: int) -> None:
    """Count the events of all files that are held out. Raises DataError where there are some."""
    from nonet.samples.sources.dense_rows import flatten_lists
    from nonet.samples.tables import convert_to_seconds

    assert options.time is not None
    leaf, late, events = options.make_stream(0).open().leaves[0], 0, 0
    for at in range(len(leaf.groups)):
        group = leaf.read(at)
        if group.rows is None:
            continue
        times = group.rows.column(options.time)
        times = times if group.keep is None else times.filter(pa.array(group.keep))
        values, _ = flatten_lists(times, options.time)
        seconds, _ = convert_to_seconds(pa.chunked_array([values.drop_null()]), options.time, unit)
        late, events = late + int((seconds >= end).sum()), events + len(seconds)
    if late:
        raise DataError(
            f"data.source: {late} of {events} events are of {end} unix seconds or later, where data.split begins to hold events "
            "out; write files that end before it, or give a later data.split.test"
        )


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
    own, *_ = _parse_options(options)
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
