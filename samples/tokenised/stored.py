"""Stores the tokenised events of each user by user id in any writable store (`data.sequences`).

The tokenise stage writes them once, to a separate address for each data set and tokenizer, so that a resumed run finds them.
Training reads the events that existed when the run began; serving reads all events, including appended ones.
"""

# Shapes: U users, N events, n events of one user, I items, L levels of a semantic id.

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from nonet.errors import ConfigError, DataError
from nonet.options import StrictModel
from nonet.ranges import expand_ranges
from nonet.samples.sequences import FlatFiles, Sequences
from nonet.samples.stores import (
    Store,
    StoreNotFoundError,
    check_address,
    create_store,
    explain_creation_refusal,
    open_store,
)

_EVENT_FIELDS = {"item": pa.int32(), "time": pa.int64(), "event": pa.int32(), "split": pa.int8()}
_PART_EVENTS = 1 << 22  # number of events per read or write, so that memory is bounded
_COLUMN, _TARGET = "column:", "target:"  # prefixes of the store's column names


class StoredSequences(StrictModel):
    """The store to which the tokenise stage writes the sequences of users (`nonet.samples.tokenised`)."""

    use: Annotated[
        str,
        Field(
            description="a folder, lmdb:FOLDER or redis://HOST:PORT/NAME; the data's hash is added to it; passwords come from "
            "the environment"
        ),
    ]
    options: Annotated[
        dict[str, Any], Field(description="options of the store, see docs/how-to/stores.md")
    ] = {}

    @field_validator("use")
    @classmethod
    def _can_be_written(cls, use: str) -> str:
        """Check that Nonet can create a store at this address."""
        try:
            check_address(use)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if refusal := explain_creation_refusal(use):
            raise ValueError(f"{refusal}; use a folder, lmdb:FOLDER or redis://HOST:PORT/NAME")
        return use

    def make_address(self, folders: Mapping[str, str]) -> str:
        """Return the address for the sequences and semantic ids, if there are any, in these artifact folders."""
        kinds = [kind for kind in ("sequences", "sids") if kind in folders]
        hashes = [Path(folders[kind]).name.rpartition("-")[2] for kind in kinds]
        return "-".join([self.use.rstrip("/"), *hashes])

    def write(self, seq: Sequences, folders: Mapping[str, str]) -> str:
        """Write all users if the store has fewer users than the sequences, and return the address.

        Semantic ids are not written; a reader of events looks them up by item.
        """
        address = self.make_address(folders)
        try:
            store = open_store(address, **self.options)
        except StoreNotFoundError:
            key_type = pa.string() if seq.user_id.dtype == object else pa.int64()
            store = create_store(address, _make_schema(seq), key=key_type, **self.options)
        # There are fewer users if nothing was written, or if a process was killed while it was writing.
        if store.collect_stats()["keys"] < len(seq):
            for start, stop in _iterate_parts(seq):
                store.put(_get_ids(seq, start, stop), _make_rows(seq, start, stop))
        store.close()
        return address

    def open_events(self, folders: Mapping[str, str], seq: Sequences) -> UserEvents:
        """Open the stored events of the users of `seq`. Raises ConfigError if the tokenise stage has not written them."""
        return UserEvents(open_store(self.make_address(folders), **self.options), seq)


class UserEvents:
    """Access to the stored events of users by user id.

    Args:
        store: The opened store.
        seq: The sequences of the run, which define its users, columns and numbers of events.
    """

    def __init__(self, store: Store, seq: Sequences):
        self.store, self._seq = store, seq
        schema = _make_schema(seq)
        if missing := [name for name in schema.names if name not in store.schema.names]:
            raise DataError(
                f"{store.name}: it has no columns {', '.join(missing)}; it was written for another scenario"
            )
        self._columns = schema.names

    def load_sequences(self, folder: Path | None = None) -> Sequences:
        """Return the run's sequences with memory-mapped events that are read from the store.

        The events are copied to flat files, a few million at a time, so memory does not grow with the log. Events that were
        appended after the run began are left out.

        Args:
            folder: The folder of the files, which all processes of the run share; by default a temporary folder of this process.

        Raises:
            DataError: If a user is missing or has fewer events than the run's sequences.
        """
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="nonet-stored-") as name:
                self._copy_events(Path(name))
                return self._map_sequences(Path(name))  # Deleted files stay readable while they are mapped.
        if not folder.is_dir():
            staging_folder = folder.with_name(f"tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
            staging_folder.mkdir(parents=True)
            try:
                self._copy_events(staging_folder)
                with contextlib.suppress(OSError):  # fails if another process has created the folder
                    os.replace(staging_folder, folder)
            finally:
                shutil.rmtree(staging_folder, ignore_errors=True)
        return self._map_sequences(folder)

    def _copy_events(self, folder: Path) -> None:
        """Copy every user's events to one .npy file per column, named by its number in `_columns`."""
        seq = self._seq
        dtypes = {name: self._get_value_type(name).to_pandas_dtype() for name in self._columns}
        dtypes |= {name: np.bool_ for name in self._columns if name.startswith(_TARGET)}
        files = {name: str(number) for number, name in enumerate(self._columns)}
        flat = FlatFiles(folder, {files[name]: (dtypes[name], len(seq.item)) for name in self._columns})
        try:
            for start, stop in _iterate_parts(seq):
                for name, values in self._read_users(start, stop).items():
                    flat.write(files[name], int(seq.offsets[start]), values)
        finally:
            flat.close()

    def _map_sequences(self, folder: Path) -> Sequences:
        """Return the run's sequences with the copied files as memory-mapped events."""
        arrays = {
            name: np.load(folder / f"{number}.npy", mmap_mode="r")
            for number, name in enumerate(self._columns)
        }
        seq = copy.copy(self._seq)  # __dict__ is set since the class is frozen
        seq.__dict__.update({name: arrays[name] for name in _EVENT_FIELDS})
        seq.__dict__["columns"] = {name: arrays[_COLUMN + name] for name in self._seq.columns}
        seq.__dict__["targets"] = {name: arrays[_TARGET + name] for name in self._seq.targets}
        return seq

    def get_user_events(self, user: Any) -> dict[str, Any] | None:
        """Return a user's events as arrays [n] `item`, `time` and `event`, and `columns` by name; None for an unknown user."""
        try:
            values, offsets = self.store.multi_get([self._convert_user(user)], self._columns)
        except DataError:
            return None  # text that is not an integer, while user ids are integers
        if not offsets[-1]:
            return None
        arrays = {
            name: values.column(name).flatten().to_numpy(zero_copy_only=False) for name in self._columns
        }
        columns = {name: arrays[_COLUMN + name] for name in self._seq.columns}
        return {name: arrays[name] for name in ("item", "time", "event")} | {"columns": columns}

    def append(self, users: list[Any], events: Mapping[str, np.ndarray]) -> int:
        """Append events [N] to their users [N]. There must be only one writer at a time.

        Args:
            users: User id of each event [N].
            events: item, time, event, and columns by `column:` names, each [N].

        Returns:
            The number of rows written. Unknown users get a new row.

        Raises:
            DataError: If a user id has the wrong type.
            StoreError: If the store cannot be reached.
        """
        order = np.argsort(np.array([str(user) for user in users], object), kind="stable")
        sorted_users = [str(users[event]) for event in order]
        changes = (i for i in range(1, len(sorted_users)) if sorted_users[i] != sorted_users[i - 1])
        starts = [0, *changes, len(sorted_users)]  # where each distinct user begins in `order`, and the end
        columns: dict[str, list[Any]] = {name: [] for name in self.store.schema.names}
        keys = [self._convert_user(users[order[start]]) for start in starts[:-1]]
        stored, offsets = self.store.multi_get(keys)
        for row, (start, stop) in enumerate(pairwise(starts)):
            user_events = order[start:stop]
            new = {name: np.zeros(len(user_events), np.int64) for name in columns} | {
                name: values_N[user_events] for name, values_N in events.items()
            }
            is_stored = offsets[row + 1] > offsets[row]
            for name, lists in columns.items():
                old = stored.column(name)[int(offsets[row])].as_py() if is_stored else []
                lists.append([*old, *new[name].tolist()])
        schema = pa.schema([pa.field(name, pa.list_(self._get_value_type(name))) for name in columns])
        self.store.put(keys, pa.Table.from_pydict(columns, schema))
        return len(keys)

    def _get_value_type(self, name: str) -> pa.DataType:
        """Return the type of the values in the lists of a column of the store."""
        return self.store.schema.field(name).type.value_type

    def _convert_user(self, user: Any) -> Any:
        """Convert a user id to the type of the store's keys. Raises DataError if that is impossible."""
        if pa.types.is_string(self.store.key):
            return str(user)
        try:
            number = int(user)
        except ValueError:
            raise DataError(f"{self.store.name}: user ids must be integers, got {user!r}") from None
        if not -(1 << 63) <= number < 1 << 63:
            raise DataError(f"{self.store.name}: user ids must fit into 64 bits, got {str(user)[:40]}")
        return number

    def _read_users(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Read the concatenated events of users [start, stop) by column, without those that were appended after the run began.

        Raises:
            DataError: A user is missing or has fewer events than the run's sequences.
        """
        ids = _get_ids(self._seq, start, stop)
        values, offsets = self.store.multi_get(ids, self._columns)
        lengths = np.diff(self._seq.offsets[start : stop + 1])
        has_row = np.diff(offsets) > 0
        if not has_row.all():
            raise DataError(
                f"{self.store.name}: user {ids[int(np.argmin(has_row))]} is missing; run the tokenise stage again"
            )
        stored_offsets = values.column("item").offsets.to_numpy().astype(np.int64)
        stored_lengths = np.diff(stored_offsets)
        if (stored_lengths < lengths).any():
            user = int(np.argmax(stored_lengths < lengths))
            raise DataError(
                f"{self.store.name}: user {ids[user]} has {stored_lengths[user]} events, but the run's data has "
                f"{lengths[user]}; run the tokenise stage again"
            )
        kept_index = None
        if (stored_lengths > lengths).any():  # Events were appended after the run began.
            starts = stored_offsets[:-1] - stored_offsets[0]
            kept_index, _ = expand_ranges(starts, starts + lengths)
        events = {}
        for name in self._columns:
            flat = values.column(name).flatten().to_numpy(zero_copy_only=False)
            events[name] = flat if kept_index is None else flat[kept_index]
        return events


def _make_schema(seq: Sequences) -> pa.Schema:
    """Return the schema of the store for these sequences: one row per user, whose columns are lists over its events."""
    columns = {
        _COLUMN + name: pa.int64() if values.dtype.kind == "i" else pa.float32()
        for name, values in seq.columns.items()
    }
    value_types = {**_EVENT_FIELDS, **columns, **{_TARGET + name: pa.int8() for name in seq.targets}}
    return pa.schema([pa.field(name, pa.list_(value_type)) for name, value_type in value_types.items()])


def _make_rows(seq: Sequences, start: int, stop: int) -> pa.Table:
    """Return a table with one row per user of [start, stop), whose columns are lists over the user's events."""
    events = slice(int(seq.offsets[start]), int(seq.offsets[stop]))
    offsets = (np.asarray(seq.offsets[start : stop + 1]) - events.start).astype(np.int32)
    flat: dict[str, np.ndarray] = {name: np.asarray(getattr(seq, name)[events]) for name in _EVENT_FIELDS}
    flat |= {_COLUMN + name: np.asarray(values[events]) for name, values in seq.columns.items()}
    flat |= {
        _TARGET + name: np.asarray(values[events]).astype(np.int8) for name, values in seq.targets.items()
    }
    arrays = {
        column.name: pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(flat[column.name], column.type.value_type)
        )
        for column in _make_schema(seq)
    }
    return pa.table(arrays)


def _get_ids(seq: Sequences, start: int, stop: int) -> Any:
    """Return the ids of users [start, stop) as keys of the store."""
    ids = seq.user_id[start:stop]
    return (
        pa.array([str(user) for user in ids.tolist()], pa.string())
        if ids.dtype == object
        else np.asarray(ids)
    )


def _iterate_parts(seq: Sequences) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of users with about four million events each."""
    start, user_count = 0, len(seq)
    while start < user_count:
        stop = int(np.searchsorted(seq.offsets, seq.offsets[start] + _PART_EVENTS, "right")) - 1
        stop = min(user_count, max(start + 1, stop))
        yield start, stop
        start = stop
