"""Options of the source `parquet`, and what is checked and completed in them before a run starts."""

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


def parse_options(options: Mapping[str, Any]) -> tuple[FileSourceOptions, str | None, int | None]:
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

    own, _, end = parse_options(options)
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
