"""StoredSequences: each user's tokenised events under the user's id, in any store that can be written (`data.sequences`).

The tokenise stage writes them once, under an address of its own for each data set and tokenizer, so that a resumed run finds
what it needs. Who trains reads the events that the run was made of; who recommends reads all, those that were appended too.
"""

# Shapes: U users, N events, L levels of a semantic id.

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.sequences import Sequences
from nonet.samples.stores import NoStore, Store, create_store, open_store

_EVENTS = {"item": pa.int32(), "time": pa.int64(), "event": pa.int32(), "split": pa.int8()}
_PART = 1 << 22  # events that are written or read at once
_COLUMN, _TARGET = "column:", "target:"


@dataclass(frozen=True, slots=True)
class StoredSequences:
    """Where they lie: `use`, an address to which the data's own hash is added, and the store's options."""

    use: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def address(self, folders: Mapping[str, str]) -> str:
        """Of the sequences and semantic ids in these artifacts' folders."""
        marks = [Path(folders[kind]).name.rpartition("-")[2] for kind in ("sequences", "sids")]
        return "-".join([self.use.rstrip("/"), *marks])

    def write(self, seq: Sequences, sids: np.ndarray, folders: Mapping[str, str]) -> str:
        """Write every user that is not there whole; sids [I, L]. The address."""
        use = self.address(folders)
        try:
            store = open_store(use, **self.options)
        except NoStore:
            key = pa.string() if seq.user_id.dtype == object else pa.int64()
            store = create_store(use, _schema(seq), key=key, **self.options)
        if store.stats()["keys"] < len(seq):  # nothing yet, or a process was killed while it wrote
            for start, stop in _parts(seq):
                store.put(_ids(seq, start, stop), _rows(seq, sids, start, stop))
        store.close()
        return use

    def opened(self, folders: Mapping[str, str], seq: Sequences) -> UserEvents:
        """The store, for reading. Raises ConfigError where the tokenise stage has not written it."""
        return UserEvents(open_store(self.address(folders), **self.options), seq)


class UserEvents:
    """Events of users by id; seq: the run's own sequences, whose users and columns these are."""

    def __init__(self, store: Store, seq: Sequences):
        self.store, self._seq = store, seq
        wanted = _schema(seq)
        if missing := [name for name in wanted.names if name not in store.schema.names]:
            raise DataError(
                f"{store.name}: it has no {', '.join(missing)}; it holds sequences of another scenario"
            )
        self._columns = [name for name in wanted.names if name != "sid"]

    def sequences(self) -> Sequences:
        """The run's sequences [U users, N events], every event read by its user's key; what was appended since is left out.

        Raises DataError for a user who is not there, or has lost events.
        """
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self._columns}
        for start, stop in _parts(self._seq):
            for name, values in self._part(start, stop).items():
                parts[name].append(values)
        whole = {name: np.concatenate(values) if values else np.empty(0) for name, values in parts.items()}
        seq = copy.copy(self._seq)
        seq.__dict__.update({name: whole[name] for name in _EVENTS})
        seq.__dict__["columns"] = {name: whole[_COLUMN + name] for name in self._seq.columns}
        seq.__dict__["targets"] = {name: whole[_TARGET + name].astype(bool) for name in self._seq.targets}
        return seq

    def of(self, user: Any) -> dict[str, Any] | None:
        """All events of a user, appended ones last: item, time, event [n], columns name -> [n]; None where there is none."""
        try:
            values, offsets = self.store.multi_get([self._typed(user)], self._columns)
        except DataError:
            return None  # text that is no number, among users that are numbers
        if not offsets[-1]:
            return None
        found = {name: values.column(name).flatten().to_numpy(zero_copy_only=False) for name in self._columns}
        columns = {name: found[_COLUMN + name] for name in self._seq.columns}
        return {name: found[name] for name in ("item", "time", "event")} | {"columns": columns}

    def append(self, users: list[Any], events: Mapping[str, np.ndarray], sids: np.ndarray) -> int:
        """Add events [N] behind those that their users [N] have; item, time, event, and columns by `column:` names; sids [I, L].

        Users who are not there get a row. One writer at a time. How many rows were written. Raises DataError, StoreError.
        """
        order = np.argsort(np.array([str(user) for user in users], object), kind="stable")
        names = [str(users[at]) for at in order]
        cuts = [0, *(at for at in range(1, len(names)) if names[at] != names[at - 1]), len(names)]
        rows: dict[str, list[Any]] = {name: [] for name in self.store.schema.names}
        keys = [self._typed(users[order[cut]]) for cut in cuts[:-1]]
        values, offsets = self.store.multi_get(keys)
        for at, (start, stop) in enumerate(pairwise(cuts)):
            mine = order[start:stop]
            new = {name: np.zeros(len(mine), np.int64) for name in rows} | {
                name: each[mine] for name, each in events.items()
            }
            new["sid"] = sids[new["item"]].reshape(-1)
            for name in rows:
                old = values.column(name)[int(offsets[at])].as_py() if offsets[at + 1] > offsets[at] else []
                rows[name].append([*old, *new[name].tolist()])
        schema = pa.schema([pa.field(name, pa.list_(self._kind(name))) for name in rows])
        self.store.put(keys, pa.Table.from_pydict(rows, schema))
        return len(keys)

    def _kind(self, name: str) -> pa.DataType:
        return self.store.schema.field(name).type.value_type

    def _typed(self, user: Any) -> Any:
        if pa.types.is_string(self.store.key):
            return str(user)
        try:
            number = int(user)
        except ValueError:
            raise DataError(f"{self.store.name}: users are whole numbers, got {user!r}") from None
        if not -(1 << 63) <= number < 1 << 63:
            raise DataError(f"{self.store.name}: users are numbers of 64 bits, got {str(user)[:40]}")
        return number

    def _part(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Events of users [start, stop), those that the run was made of, one after the other."""
        ids = _ids(self._seq, start, stop)
        values, offsets = self.store.multi_get(ids, self._columns)
        lengths = np.diff(self._seq.offsets[start : stop + 1])
        there = np.diff(offsets) > 0
        if not there.all():
            raise DataError(
                f"{self.store.name}: user {ids[int(np.argmin(there))]} is not there; run the tokenise stage again"
            )
        first = values.column("item")
        bounds = first.offsets.to_numpy().astype(np.int64)
        sizes = np.diff(bounds)
        if (sizes < lengths).any():
            at = int(np.argmax(sizes < lengths))
            raise DataError(
                f"{self.store.name}: user {ids[at]} has {sizes[at]} events, the run was made of {lengths[at]}; run the tokenise "
                "stage again"
            )
        keep = None
        if (sizes > lengths).any():  # appended since
            ends = np.cumsum(lengths)
            keep = np.arange(ends[-1]) + np.repeat(bounds[:-1] - bounds[0] - ends + lengths, lengths)
        found = {}
        for name in self._columns:
            flat = values.column(name).flatten().to_numpy(zero_copy_only=False)
            found[name] = flat if keep is None else flat[keep]
        return found


def _schema(seq: Sequences) -> pa.Schema:
    columns = {
        _COLUMN + name: pa.int64() if values.dtype.kind == "i" else pa.float32()
        for name, values in seq.columns.items()
    }
    kinds = {**_EVENTS, "sid": pa.int32(), **columns, **{_TARGET + name: pa.int8() for name in seq.targets}}
    return pa.schema([pa.field(name, pa.list_(kind)) for name, kind in kinds.items()])


def _rows(seq: Sequences, sids: np.ndarray, start: int, stop: int) -> pa.Table:
    """A row of lists for each of users [start, stop)."""
    first, last = int(seq.offsets[start]), int(seq.offsets[stop])
    cut = slice(first, last)
    bounds = (np.asarray(seq.offsets[start : stop + 1]) - first).astype(np.int32)
    flat: dict[str, np.ndarray] = {name: np.asarray(getattr(seq, name)[cut]) for name in _EVENTS}
    flat |= {_COLUMN + name: np.asarray(values[cut]) for name, values in seq.columns.items()}
    flat |= {_TARGET + name: np.asarray(values[cut]).astype(np.int8) for name, values in seq.targets.items()}
    codes = sids[flat["item"]].astype(np.int32)
    arrays = {}
    for field_ in _schema(seq):
        if field_.name == "sid":
            lists = pa.ListArray.from_arrays(pa.array(bounds * codes.shape[1]), pa.array(codes.reshape(-1)))
        else:
            lists = pa.ListArray.from_arrays(
                pa.array(bounds), pa.array(flat[field_.name], field_.type.value_type)
            )
        arrays[field_.name] = lists
    return pa.table(arrays)


def _ids(seq: Sequences, start: int, stop: int) -> Any:
    ids = seq.user_id[start:stop]
    return (
        pa.array([str(user) for user in ids.tolist()], pa.string())
        if ids.dtype == object
        else np.asarray(ids)
    )


def _parts(seq: Sequences) -> Iterator[tuple[int, int]]:
    """Ranges of users of about four million events."""
    start, users = 0, len(seq)
    while start < users:
        stop = int(np.searchsorted(seq.offsets, seq.offsets[start] + _PART, "right")) - 1
        stop = min(users, max(start + 1, stop))
        yield start, stop
        start = stop
