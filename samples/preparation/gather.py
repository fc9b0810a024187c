"""Gather: one partition of all runs, sorted by user and time, ties in the order of the log.

User, time and place are packed into one number where 63 bits hold them: numbers alone sort ten times as fast as an
argsort of two columns.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.samples.preparation.scatter import WORDS, Run

pc: Any = pyarrow.compute  # its functions are made at import time, unknown to type checkers

# Shapes: N events of a partition, U users of it.


@dataclass(frozen=True, slots=True)
class Layout:
    """What rows hold. text: whether ids of users are; finer: the dtype of what times are ordered by, "" for the seconds;
    event_names: kinds of events, ascending; columns, targets: dtypes by name, in the order of their files."""

    text: bool
    finer: str
    event_names: tuple[str, ...]
    columns: Mapping[str, str]
    targets: Sequence[str]

    def fields(self) -> dict[str, str]:
        """Columns of a sorted partition but for its users: name -> dtype."""
        kinds = {"event": "<i4"} if self.event_names else {}
        columns = {f"column-{i}": kind for i, kind in enumerate(self.columns.values())}
        targets = {f"target-{i}": "|b1" for i in range(len(self.targets))}
        return {"item": "<i4", "time": "<i8", **kinds, **columns, **targets}

    def row_bytes(self) -> int:
        """Bytes of an event in a run, at most."""
        each = sum(np.dtype(kind).itemsize for kind in self.fields().values())
        return each + 8 + (8 if self.finer else 0)


@dataclass(frozen=True, slots=True)
class Partition:
    """A sorted partition on disk: catalogue rows as items, no filter yet."""

    folder: Path

    def column(self, name: str, kind: str) -> np.ndarray:
        """One column [N], read into memory."""
        return np.fromfile(self.folder / f"{name}.bin", kind)

    def offsets(self) -> np.ndarray:
        """Where each user's events begin [U + 1]."""
        return self.column("offsets", "<i8")

    def users(self, text: bool) -> Any:
        """The ids of its users, ascending: int64 [U], or an Arrow array of texts."""
        if not text:
            return self.column("users", "<i8")
        with pa.memory_map(str(self.folder / WORDS)) as source:
            return pa.ipc.open_file(source).read_all()["id"].combine_chunks()


def gather(runs: Sequence[Run], number: int, layout: Layout, folder: Path) -> Partition:
    """Write the partition `number`, where it is not there: aside first, then under its name."""
    final = folder / f"part-{number:06}"
    if final.exists():
        return Partition(final)
    aside = folder / f".part-{number:06}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    ids, user = _users(runs, number, layout.text)
    by = _joined(runs, number, "finer", layout.finer) if layout.finer else None
    time = _joined(runs, number, "time", "<i8")
    order = sorted_places(user, time if by is None else by)
    ordered = user[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(order) else order
    np.append(first, len(order)).astype("<i8").tofile(aside / "offsets.bin")
    _write_users(ids, ordered[first], aside)
    for name, kind in layout.fields().items():
        values = time if name == "time" else _joined(runs, number, name, kind, layout.event_names)
        values[order].tofile(aside / f"{name}.bin")
    os.replace(aside, final)
    return Partition(final)


def sorted_places(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """The places [N] of events by user, then time, then place."""
    if not len(user):
        return np.empty(0, np.int64)
    low, code = _narrow(user)
    if time.dtype.kind != "f":
        early, late = int(time.min()), int(time.max())
        bits = (late - early).bit_length(), len(user).bit_length()
        if low.bit_length() + sum(bits) <= 63:
            place = np.arange(len(user), dtype=np.int64)
            packed = np.sort((code << bits[0] | (time - early)) << bits[1] | place)
            return packed & (1 << bits[1]) - 1
    return np.lexsort((time, code))


def _narrow(user: np.ndarray) -> tuple[int, np.ndarray]:
    """Users as small numbers from 0 in their order, and the largest."""
    low, high = int(user.min()), int(user.max())
    if high - low < 1 << 32:
        return high - low, user.astype(np.int64) - low
    ids, code = np.unique(user, return_inverse=True)
    return len(ids) - 1, code.astype(np.int64)


def _users(runs: Sequence[Run], number: int, text: bool) -> tuple[Any, np.ndarray]:
    """Texts of the partition, ascending (None for numbers), and its users [N]: ids, or places among the texts."""
    if not text:
        return None, _joined(runs, number, "user", "<i8")
    words = [run.texts(number) for run in runs]
    coded = pa.concat_arrays(words).dictionary_encode()
    order = pc.sort_indices(coded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    place = rank[coded.indices.to_numpy()] if len(order) else np.empty(0, np.int32)
    begins = np.cumsum([0, *(len(each) for each in words)])
    users = [
        place[run.column("user", number, "<i4") - run.words[number] + begin]
        for run, begin in zip(runs, begins[:-1], strict=True)
    ]
    return coded.dictionary.take(pa.array(order)), np.concatenate(users)


def _write_users(texts: Any, users: np.ndarray, folder: Path) -> None:
    if texts is None:
        users.astype("<i8").tofile(folder / "users.bin")
        return
    with pa.ipc.new_file(str(folder / WORDS), pa.schema({"id": pa.string()})) as out:
        out.write_table(pa.table({"id": texts.take(pa.array(users))}))


def _joined(
    runs: Sequence[Run], number: int, name: str, kind: str, event_names: Sequence[str] = ()
) -> np.ndarray:
    """A column of a partition in the order of the log; codes of events are those of all runs together."""
    parts = [run.column(name, number, kind) for run in runs]
    if name == "event":
        place = {kind: code for code, kind in enumerate(event_names)}
        codes = [np.array([place[kind] for kind in run.kinds], np.int32) for run in runs]
        parts = [code[part] if len(part) else part for code, part in zip(codes, parts, strict=True)]
    return np.concatenate([np.empty(0, kind), *parts])


def layout_of(runs: Sequence[Run], text: bool, columns: Mapping[str, str], targets: Sequence[str]) -> Layout:
    """What the rows of runs hold."""
    finer = json.loads((runs[0].folder / "meta.json").read_text())["finer"]
    names = sorted({kind for run in runs for kind in run.kinds})
    return Layout(text, finer, tuple(names), columns, targets)
