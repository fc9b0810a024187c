"""The options of the source `parquet`, and the functions that check and complete them before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from nonet.errors import ConfigError, DataError
from nonet.options import Count, Positive, StrictModel

if TYPE_CHECKING:
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

    def make_stream(self, seed: int) -> Stream:
        """Return the stream of the rows of the files in the random order of a seed, after the functions of `map`."""
        from nonet.samples.streams import read

        role_columns = tuple(filter(None, (self.user, self.items, self.time)))
        columns = None if self.map else role_columns  # A map may read any column.
        stream = read(
            self.path, format=self.format, columns=columns, where=self.where, on_bad_rows=self.on_bad_rows
        )
        if stream.files is not None:
            stream = replace(stream, files=replace(stream.files, present_ids=role_columns))
        for function in self.map:
            stream = stream.map(function, workers=self.workers)
        return stream.shuffle(seed, in_group=self.in_group).prefetch(self.ahead)


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
    scheme = path.partition("://")[0] + "://" if is_remote else ""
    return [scheme + file for file in find_parquet(path, "data.source")[1]]


def parse_options(options: Mapping[str, Any]) -> tuple[FileSourceOptions, str | None, int | None]:
    """Parse the options of a run.

    Returns:
        The options of the source; the engine of the scenario, or None; and the unix seconds from which on the scenario's split
        holds events out (`add_end`), or None.
    """
    source_options = {name: value for name, value in options.items() if name not in ("engine", "until")}
    return FileSourceOptions.model_validate(source_options), options.get("engine"), options.get("until")


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


def check_files(options: Mapping[str, Any]) -> None:
    """Check the columns of the files, and that all times are before the end. Raises DataError with counts over all files."""
    from nonet.samples.sources._dense_rows import flatten_lists

    file_options, _, end = parse_options(options)
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
    unit = detect_time_unit(file_options)
    if file_options.time is not None and end is not None:
        _check_end(file_options, unit, end)


def _check_end(options: FileSourceOptions, unit: str | None, end: int) -> None:
    """Raise DataError if events of the files are at or after `end`, with their number."""
    from nonet.samples.sources._dense_rows import flatten_lists
    from nonet.samples.tables import convert_to_seconds

    assert options.time is not None
    leaf, late_count, event_count = options.make_stream(seed=0).open().leaves[0], 0, 0
    for group_index in range(len(leaf.groups)):
        group = leaf.read(group_index)
        if group.rows is None:
            continue
        times = group.rows.column(options.time)
        times = times if group.keep is None else times.filter(pa.array(group.keep))
        values, _ = flatten_lists(times, options.time)
        seconds, _ = convert_to_seconds(pa.chunked_array([values.drop_null()]), options.time, unit)
        late_count, event_count = late_count + int((seconds >= end).sum()), event_count + len(seconds)
    if late_count:
        raise DataError(
            f"data.source: {late_count} of {event_count} events are of {end} unix seconds or later, where data.split begins to "
            "hold events out; write files that end before it, or give a later data.split.test"
        )
