"""The options of the source `parquet`, and the functions that check and complete them before a run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from nonet.errors import ConfigError, DataError
from nonet.options import Count, Positive, StrictModel
from nonet.samples.tables import compile_condition, list_names
from nonet.suggest import join_names, suggest_sentence

if TYPE_CHECKING:
    from nonet.samples.sequences import UnknownItems
    from nonet.samples.sources.base import EventNeeds
    from nonet.samples.streams import Stream


class FileSourceOptions(StrictModel):
    """Options of the source `parquet`.

    `user`, `items` and `time` are names of columns. `where` is a condition on rows. `map` lists functions of Arrow batches
    ("package.module:Name") that are applied in order, by up to `workers` threads or actors at the same time.
    """

    path: str | list[str]
    format: Literal["parquet", "csv", "lines"] | None = None
    user: str = "user_id"
    items: str = "item_id"
    time: Annotated[
        str | None,
        Field(
            description="list column with a time for each item; without it, positions in the list are times"
        ),
    ] = None
    unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None,
        Field(
            description="unit of times that are plain numbers; by default determined by their name or size"
        ),
    ] = None
    columns: Annotated[
        dict[str, str],
        Field(
            description="list columns with a value for each item, by the name that conditions and features use; by default they "
            "have that name"
        ),
    ] = {}
    where: str | None = None
    map: list[str] = []
    workers: Positive = 1
    on_bad_rows: Literal["fail", "skip"] = "fail"
    in_group: Annotated[bool, Field(description="also shuffle the rows within each row group")] = True
    ahead: Annotated[Count, Field(description="number of slices that are prepared ahead of the trainer")] = 4

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

    def make_stream(self, seed: int, event_columns: Sequence[str] = ()) -> Stream:
        """Return the stream of the rows of the files in the random order of a seed, after the functions of `map`.

        Args:
            seed: Seed of the order.
            event_columns: Columns of events that are read besides items and times, by the names that conditions use.
        """
        from nonet.samples.streams import read

        role_columns = tuple(filter(None, (self.user, self.items, self.time)))
        lists = [self.get_list_column(name) for name in event_columns]
        # A map may read any column.
        columns = None if self.map else tuple(dict.fromkeys([*role_columns, *lists]))
        stream = read(
            self.path, format=self.format, columns=columns, where=self.where, on_bad_rows=self.on_bad_rows
        )
        if stream.files is not None:
            stream = replace(stream, files=replace(stream.files, present_ids=role_columns))
        for function in self.map:
            stream = stream.map(function, workers=self.workers)
        return stream.shuffle(seed, in_group=self.in_group).prefetch(self.ahead)

    def get_list_column(self, name: str) -> str:
        """Return the list column in the files of a column of events."""
        return self.columns.get(name, name)


@dataclass(frozen=True, slots=True)
class FileRunOptions:
    """The options of a source of files in a run.

    Attributes:
        source: The options of the source.
        engine: The engine of the scenario; None for the default.
        until: Unix seconds from which on the scenario's split holds events out; None for no end (`add_end`).
        targets: Condition on target events by stage (`add_needs`).
        columns: Columns of events that the model and weights read (`add_needs`).
        drops_unknown: Whether events are left out whose item the run does not have (`add_needs`).
    """

    source: FileSourceOptions
    engine: str | None = None
    until: int | None = None
    targets: Mapping[str, str] = field(default_factory=dict[str, str])
    columns: tuple[str, ...] = ()
    drops_unknown: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> FileRunOptions:
        """Parse the options of a run, which are those of the source and the other fields of this class."""
        own = {name: value for name, value in options.items() if name in _RUN_KEYS}
        source = {name: value for name, value in options.items() if name not in _RUN_KEYS}
        own["columns"] = tuple(own.pop("event_columns", ()))
        return cls(FileSourceOptions.model_validate(source), **own)

    def list_event_columns(self, stage: str | None = None) -> list[str]:
        """Return the list columns that the events of a stage need, by the names that conditions use; None for all stages."""
        conditions = [condition for name, condition in self.targets.items() if stage in (None, name)]
        named = sorted(set().union(*map(list_names, conditions)) - {*_ROLE_COLUMNS, "true", "false"})
        return list(dict.fromkeys([*self.columns, *named]))


_RUN_KEYS = ("engine", "until", "targets", "event_columns", "drops_unknown")
_ROLE_COLUMNS = ("user_id", "item_id", "timestamp")


def pin_files(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the paths in the options by the files that match them now, so that files added later do not belong to the run."""
    paths = [options["path"]] if isinstance(options["path"], str) else options["path"]
    return {**options, "path": [file for path in paths for file in _find_matching(path)]}


def _find_matching(path: str) -> list[str]:
    """Return the files behind a path as paths or URIs that can be opened; a path that cannot be resolved stays as it is."""
    from nonet.samples.tables import find_parquet

    is_remote = "://" in path
    if path.startswith("builtin:") or (is_remote and "?" in path):
        return [path]  # The URIs of single files would lose the options after the `?`.
    files = find_parquet(path, "data.source")[1]
    scheme = path.partition("://")[0]
    return [f"{scheme}://{quote(file)}" for file in files] if is_remote else files


def detect_time_unit(options: FileSourceOptions) -> str | None:
    """Determine the unit of times that are plain numbers, from the first row group of the files if necessary.

    Returns:
        "s", "ms", "us" or "ns"; None if there are no times, or they are timestamps, which have their own unit.

    Raises:
        DataError: If a `map` may make the times, so that their unit is not known before it runs.
    """
    from nonet.samples.sources._dense_rows import flatten_lists
    from nonet.samples.tables import get_unit_by_name, get_unit_by_size, is_plain

    if options.time is None or options.unit is not None:
        return options.unit
    if unit_of_name := get_unit_by_name(options.time):
        return unit_of_name
    if options.map:
        raise DataError(
            f"data.source: the unit of {options.time!r} cannot be told, since data.source.map may make it; say data.source.unit: "
            "s, ms, us or ns"
        )
    leaf = options.make_stream(seed=0).open().leaves[0]
    column_type = leaf.schema.field(options.time).type
    value_type = getattr(column_type, "value_type", column_type)
    if not is_plain(value_type):
        return None
    rows = leaf.read(0).rows
    if rows is None:
        return None
    values = (
        flatten_lists(rows.column(options.time), options.time)[0].drop_null().cast(pa.float64()).to_numpy()
    )
    return get_unit_by_size(float(np.abs(values[np.isfinite(values)]).max(initial=0)))


def add_end(options: Mapping[str, Any], end: int | None) -> Mapping[str, Any]:
    """Add to the options the unix seconds `end` from which on the run holds events out; None for none.

    Raises:
        ConfigError: If there is an end but no column of times.
    """
    if end is None:
        return options
    if options.get("time") is None:
        raise ConfigError(
            "data.source: parquet has no `time`, so nothing keeps events after data.split.test out of training; name the list "
            "column of times, or use split: leave_last_out"
        )
    return {**options, "until": end}


def add_needs(options: Mapping[str, Any], needs: EventNeeds) -> Mapping[str, Any]:
    """Add to the options the conditions on target events and the columns of events that the stages of a run read.

    Raises:
        ConfigError: If stores are read as of each event's time, and there is no column of times; or if events of unknown items
            are to be left out of rows that a `map` makes, which cannot be counted.
    """
    if needs.drops_unknown and options.get("map"):
        raise ConfigError(
            "data.unknown_items: drop does not count what data.source.map makes; leave these events out in the map, and remove "
            "the key"
        )
    if needs.timed_joins and options.get("time") is None:
        name = needs.timed_joins[0]
        raise ConfigError(
            f"data.join.{name} reads its store as of each event's time, and data.source: parquet has no `time`; name the list "
            f"column of times, or say data.join.{name}.as_of: newest"
        )
    own = {
        "targets": dict(needs.targets),
        "event_columns": list(needs.columns),
        "drops_unknown": needs.drops_unknown,
    }
    return {**options, **{name: value for name, value in own.items() if value}}


def count_unknown(options: Mapping[str, Any], item_ids: pa.ChunkedArray) -> UnknownItems:
    """Count the events of the files that are left out because the run does not have their item.

    Args:
        options: The options of the run.
        item_ids: The ids of the run's items [I].
    """
    from nonet.samples.sequences import UnknownItems, drop_unknown_events
    from nonet.samples.sources._dense_rows import flatten_lists

    source, unknown = FileRunOptions.parse(options).source, UnknownItems(0, 0, frozenset())
    for values in _read_column(source, source.items):
        items, _ = flatten_lists(values, source.items)
        unknown += drop_unknown_events(pa.table({"item_id": items}), item_ids)[1]
    return unknown


def _read_column(options: FileSourceOptions, name: str) -> Iterator[pa.Array]:
    """Yield a column of the rows that the condition on rows keeps, for each row group of the files."""
    leaf = options.make_stream(seed=0).open().leaves[0]
    for group_index in range(len(leaf.groups)):
        group = leaf.read(group_index)
        if group.rows is not None:
            values = group.rows.column(name)
            yield values if group.keep is None else values.filter(pa.array(group.keep))


def check_files(options: Mapping[str, Any]) -> None:
    """Check the columns of the files, and that all times are before the end. Raises DataError with counts over all files."""
    from nonet.samples.sources._dense_rows import flatten_lists

    run_options = FileRunOptions.parse(options)
    file_options, end = run_options.source, run_options.until
    feed = file_options.make_stream(seed=0).open()
    schema = feed.leaves[0].schema
    if file_options.map:
        return  # The output of a map is checked when it is produced.
    for name in (file_options.items, file_options.time):
        if name is not None:
            # Raises DataError if it is no list column.
            flatten_lists(pa.array([], schema.field(name).type), name)
    kind = schema.field(file_options.user).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"data.source: column {file_options.user!r} is {kind}; it must hold whole numbers or text"
        )
    _check_targets(run_options, schema)
    unit = detect_time_unit(file_options)
    if file_options.time is not None and end is not None:
        _check_end(file_options, unit, end)


def _check_targets(options: FileRunOptions, schema: pa.Schema) -> None:
    """Check the columns of events that stages read, and their conditions, against the schema of the files.

    Raises:
        DataError: A column is missing or is no list column.
        ConfigError: A condition is not valid.
    """
    from nonet.samples.sources._dense_rows import flatten_lists, make_event_table

    lists = {}
    for name in options.list_event_columns():
        column = options.source.get_list_column(name)
        if column not in schema.names:
            raise DataError(
                f"data.source: no list column {column!r} for {name!r}, which the run reads of each event; the files have "
                f"{join_names(schema.names)}.{suggest_sentence(column, schema.names)} Write it, or name another: "
                f"data.source.columns: {{{name}: <column>}}"
            )
        lists[name] = flatten_lists(pa.array([], schema.field(column).type), column)[0]
    user_type = schema.field(options.source.user).type
    item_ids, _ = flatten_lists(pa.array([], schema.field(options.source.items).type), options.source.items)
    times = None if options.source.time is None else np.zeros(0, np.int64)
    events = make_event_table(pa.array([], user_type), item_ids, times, lists)
    for stage, condition in options.targets.items():
        compile_condition(condition, events.schema, name=f"stages.{stage}.target with data.source: parquet")


def _check_end(options: FileSourceOptions, unit: str | None, end: int) -> None:
    """Raise DataError if events of the files are at or after `end`, with their number."""
    from nonet.samples.sources._dense_rows import flatten_lists
    from nonet.samples.tables import convert_to_seconds

    assert options.time is not None
    late_count, event_count = 0, 0
    for times in _read_column(options, options.time):
        values, _ = flatten_lists(times, options.time)
        seconds, _ = convert_to_seconds(pa.chunked_array([values.drop_null()]), options.time, unit)
        late_count, event_count = late_count + int((seconds >= end).sum()), event_count + len(seconds)
    if late_count:
        raise DataError(
            f"data.source: {late_count} of {event_count} events are of {end} unix seconds or later, where data.split begins to "
            "hold events out; write files that end before it, or give a later data.split.test"
        )
