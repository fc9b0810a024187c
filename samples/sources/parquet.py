"""Rows of one's own files as training samples: a user's whole sequence a row, of any size, never loaded whole.

    data:
      source: {use: parquet, path: "/data/sequences/dt=*/*.parquet", user: user_id, items: item_id}
      engine: local        # or ray; by default what the size of the files says

Items are those of the run's own catalogue (`data.items`): it gives semantic ids and keys. Every event of a row is learned
from, in windows of the run's history. Steps, ledger and commits are those of every source; any number of trainers may go on
from a commit.
"""

# Shapes: B rows, N events.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from nonet.errors import ConfigError, DataError
from nonet.options import Count, Positive, StrictModel
from nonet.samples.sources.base import SampleRequest, SampleSource

if TYPE_CHECKING:
    from nonet.samples.ledger import Ledger
    from nonet.samples.sequences import Sequences
    from nonet.samples.streams import Batch, Feed, Stream
    from nonet.types import SampleBatch

_SLICES = 16  # of a step at most: so many trainers share it at best


class FileOptions(StrictModel):
    """See the module. `where` keeps rows; `map`: functions of Arrow batches, "package.module:Name", in turn, `workers` at
    once."""

    path: str | list[str]
    format: Literal["parquet", "csv", "lines"] | None = None
    user: str = "user_id"
    items: str = "item_id"
    time: Annotated[str | None, Field(description="a list column of unix seconds; else places are times")] = (
        None
    )
    where: str | None = None
    map: list[str] = []
    workers: Positive = 1
    on_bad_rows: Literal["fail", "skip"] = "fail"
    in_group: Annotated[bool, Field(description="shuffle rows inside row groups too")] = True
    ahead: Annotated[Count, Field(description="slices made ahead of the trainer")] = 4

    @field_validator("path")
    @classmethod
    def _whole(cls, value: str | list[str]) -> str | list[str]:
        for path in [value] if isinstance(value, str) else value:
            if "://" not in path and not path.startswith(("/", "builtin:")):
                raise ValueError(
                    f"{path!r} is relative; give a whole path or a URI, for every trainer reads it"
                )
        return value

    def stream(self, seed: int) -> Stream:
        """The rows in a seeded order, after the maps."""
        from nonet.samples.streams import read

        stream = read(self.path, format=self.format, where=self.where, on_bad_rows=self.on_bad_rows)
        for function in self.map:
            stream = stream.map(function, workers=self.workers)
        return stream.shuffle(seed, in_group=self.in_group).prefetch(self.ahead)


def rows_of(options: Mapping[str, Any], rows: int) -> int:
    """Rows of an epoch: those of the files."""
    made, _ = _of(options)
    return made.stream(0).open().rows


def pinned(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with the files that its paths match now: those of a folder that grows later are another run's."""
    paths = [options["path"]] if isinstance(options["path"], str) else options["path"]
    return {**options, "path": [file for path in paths for file in _matching(path)]}


def _matching(path: str) -> list[str]:
    """The files behind a path, as paths that find them again."""
    from nonet.samples.tables import find_parquet

    remote = "://" in path
    if path.startswith("builtin:") or (
        remote and "?" in path
    ):  # options of a URI, which its files would lose
        return [path]
    scheme = path.partition("://")[0] + "://" if remote else ""
    return [scheme + file for file in find_parquet(path, "data.source")[1]]


@dataclass(frozen=True)
class Dense:
    """Rows as arrays of the run's own numbers: user_key [B] int64, item [N] int32 dense, time [N] int64."""

    user: str
    items: str
    time: str | None
    item_id: pa.Array

    def __call__(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """Raises DataError for a column that is not there, or an item that the catalogue does not hold."""
        import pyarrow.compute as pc

        from nonet.samples.tables import as_numbers, keys_in

        for name in filter(None, (self.user, self.items, self.time)):
            if name not in rows.schema.names:
                raise DataError(f"data.source: no column {name!r}; there are {', '.join(rows.schema.names)}")
        lists = rows.column(self.items)
        values = lists.flatten()
        index: Any = getattr(pc, "index_in")(values, value_set=self.item_id.cast(values.type))  # noqa: B009  made at import
        if index.null_count:
            absent = values.filter(index.is_null())
            raise DataError(
                f"data.source: {index.null_count} events are of items that data.items does not hold, "
                f"the first: {absent[0].as_py()!r}"
            )
        offsets = lists.offsets.to_numpy().astype(np.int32)
        cuts = pa.array(offsets - offsets[0])
        times = np.arange(len(values)) if self.time is None else rows.column(self.time).flatten().to_numpy()
        return {
            "user_key": pa.array(keys_in("user", as_numbers(rows.column(self.user)))),
            "item": pa.ListArray.from_arrays(cuts, index.cast(pa.int32())),
            "time": pa.ListArray.from_arrays(cuts, pa.array(np.asarray(times, np.int64))),
        }


class FileWindows:
    """Windows of the sequences that files hold."""

    schema: Mapping[str, str] = {"item": "int64 an event", "user": "int64 a sequence"}

    def __init__(self, request: SampleRequest, options: Mapping[str, Any]):
        if request.unit != "users" or request.target is not None:
            raise ConfigError(
                "data.source: parquet gives sequences without a `target:`; click models read `shuffled`"
            )
        self.ask = request
        self._options, self._engine = _of(options)
        self._batches: Iterator[Batch] | None = None
        self._next = -1
        self._skips: dict[int, list[Batch]] = {}

    @cached_property
    def feed(self) -> Feed:
        """The opened files."""
        item_id = self.ask.items()["item_id"].combine_chunks()
        dense = Dense(self._options.user, self._options.items, self._options.time, item_id)
        stream = self._options.stream(self.ask.seed).map(dense, workers=self._options.workers)
        rows = max(1, -(-self.ask.rows // _SLICES))
        return stream.open(rows=min(rows, 4096), step_rows=self.ask.rows, engine=self._engine)

    @cached_property
    def ledger(self) -> Ledger:
        """Which rows were learned from."""
        return self.feed.ledger()

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        for part in self.feed.slices(step):
            self.ledger.lease(part)
        batches = self._of_step(step, rank, world)
        for batch in batches:
            self.ledger.note(batch.slice, batch.filtered, batch.skipped)
        return self._windows(step, rank, batches)

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def _of_step(self, step: int, rank: int, world: int) -> list[Batch]:
        """What the rank's slices of a step became; later ones are being made meanwhile."""
        if self._batches is None or step != self._next:
            self._batches = self.feed.batches(self.feed.endless(step, rank, world))
        self._next = step + 1
        batches, due = [], len(self.feed.slices(step, rank, world))
        while due:
            batches.append(next(self._batches))
            due -= batches[-1].last
        return batches

    def _windows(self, step: int, rank: int, batches: Sequence[Batch]) -> Sequence[Callable[[], SampleBatch]]:
        from nonet.samples.batches import bounded, taught_windows, window_batch, window_positions

        ask, seq, epoch = self.ask, _sequences(batches, self.ask.items), self.feed.steps.places(step)[0]
        assert ask.sids_IL is not None
        rows = np.arange(len(seq))
        windows = taught_windows(
            seq, rows, history=ask.history, stage=ask.stage, epoch=epoch, seed=ask.seed + step, target=None
        )
        stage = f"{ask.stage}/{step}.{rank}"  # rows are numbered within a rank's share of a step
        make = partial(window_batch, seq, ask.sids_IL, stage=stage, epoch=epoch, target=None)
        row, block, stop = windows
        parts = bounded(window_positions(seq, windows), ask.chunk)
        return [partial(make, (row[part], block[part], stop[part])) for part in parts]


def _of(options: Mapping[str, Any]) -> tuple[FileOptions, str | None]:
    """The options, and the engine that the scenario names."""
    own = {name: value for name, value in options.items() if name != "engine"}
    return FileOptions.model_validate(own), options.get("engine")


def _sequences(batches: Sequence[Batch], items: Callable[[], pa.Table]) -> Sequences:
    """Rows of some batches as sequences of which every event is learned from."""
    from nonet.samples.sequences import TRAIN, Sequences
    from nonet.samples.tables import as_numbers, keys_in

    users = np.concatenate([np.zeros(0, np.int64), *(batch["user_key"].numpy() for batch in batches)])
    lengths = np.concatenate(
        [np.zeros(0, np.int64), *(np.diff(batch["item"].offsets.numpy()) for batch in batches)]
    )
    item, time = (
        np.concatenate([np.zeros(0, kind), *(batch[name].values.numpy() for batch in batches)])
        for name, kind in (("item", np.int32), ("time", np.int64))
    )
    keys = keys_in("item", as_numbers(items()["item_id"]))
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


def explained(options: Mapping[str, Any], seed: int, engine: str | None) -> list[str]:
    """The plan of the stream that trainers read."""
    own, _ = _of(options)
    return own.stream(seed).explain(engine).splitlines()


SPEC = SampleSource(
    FileWindows, FileOptions, rows_of, engines=("local", "ray"), targets=False, pin=pinned, explain=explained
)
