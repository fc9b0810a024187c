"""`nonet items add`: a new version of a run's catalogue with added and withdrawn items, without training.

Existing items keep their semantic ids and dense indices, so weights and rows keep their meaning. New items
get ids from the run's codebooks, as in a warm start, and dense indices behind the existing ones. Withdrawn
items leave the trie and keep their ids, so a later version can put them back. The versions are in RUN/catalogues.json.
`RunFolder.find_artifacts` returns the newest one, which recommending and serving read; training and its resume
continue with the first one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from nonet.controller.record import RunFolder, find_run, open_for_writing
from nonet.controller.setup import get_scenario_folder
from nonet.deploy.opened import OpenedRun, Vocabulary, read_run_items
from nonet.errors import ConfigError, DataError
from nonet.models.generation import (
    COOCCURRENCE_PREFIX,
    Corpus,
    ItemSignals,
    Trie,
    list_memory_files,
    open_cooccurrence,
)
from nonet.models.tokenizer import KnownSids, compute_item_vectors, extend_signals
from nonet.samples.sequences import Transitions
from nonet.samples.tables import as_numbers, compute_keys
from nonet.storage import FILE_LOCKS, change_run, find_copy
from nonet.workers.roles.artifacts import store_artifact, write_sids

pc: Any = pyarrow.compute  # its functions are created at import time, which type checkers do not see

_LOCK = ".catalogues"  # in the folder of a run: locked by the process that changes its catalogue

# Shapes: I items of the catalogue before, including withdrawn ones, M with the new ones, L levels.


def add_items(run: str, items_path: str | None, withdrawn_ids: Sequence[str] = ()) -> dict[str, Any]:
    """Create a new version of a run's catalogue.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        items_path: A table of new or withdrawn items to add; None for none.
        withdrawn_ids: Ids of items that must no longer be recommended.

    Returns:
        The version's record in RUN/catalogues.json.

    Raises:
        ConfigError: The run has no catalogue or no codebooks, or an id is unknown. Nothing has changed
            then.
        DataError: The table is wrong. Nothing has changed then.
    """
    verb = "items add" if items_path is not None else "items add --withdraw"
    folder = find_run(run)
    if find_copy(folder.path) is not None and not folder.report.exists():
        raise ConfigError(
            f"{verb}: {folder.id} is in object storage and not finished; its process alone may change it. Wait for its end"
        )
    folder = open_for_writing(folder)
    # The newest version is read under the lock, so that no version of another process is undone.
    with _lock_catalogue(folder, verb), change_run(folder.path):
        return _add_version(OpenedRun.open(folder.path, verb=verb), items_path, withdrawn_ids)


@contextmanager
def _lock_catalogue(folder: RunFolder, verb: str) -> Iterator[None]:
    """Let one process of this node change the catalogue of a run. Raises ConfigError if another one does."""
    release = FILE_LOCKS.take(folder.path / _LOCK) if folder.path.is_dir() else None
    if release is None:
        raise ConfigError(
            f"{verb}: another process changes the catalogue of {folder.id}; try again when it has ended"
        )
    try:
        yield
    finally:
        release()


def _add_version(opened: OpenedRun, items_path: str | None, withdrawn_ids: Sequence[str]) -> dict[str, Any]:
    """Write a new version of the newest catalogue of a run, and return its record."""
    folder, scenario, corpus = opened.folder, opened.scenario, opened.catalogues.get_newest()
    artifacts = dict(corpus.folders)
    known_items, known_ids = corpus.items, corpus.item_id
    is_listed_I = np.asarray(corpus.trie.leaf_of_item) >= 0
    new_items = (
        _read_new_items(items_path, opened.vocabulary, known_items, known_ids, is_listed_I)
        if items_path is not None
        else known_items.slice(0, 0)
    )
    is_put_back_I = np.isin(known_ids, _convert_ids(new_items, known_ids)) & ~is_listed_I
    is_row_put_back = np.isin(_convert_ids(new_items, known_ids), known_ids[is_put_back_I])
    new_items = new_items.filter(pa.array(~is_row_put_back))
    withdrawn_indices = _find_withdrawn(withdrawn_ids, known_ids, is_listed_I)
    if not (len(new_items) or is_put_back_I.any() or len(withdrawn_indices)):
        raise ConfigError("items add: nothing changes; give a table of items, or --withdraw ID")
    numbered_items = _number_items(new_items, len(known_items))
    items = pa.concat_tables([known_items, numbered_items]).combine_chunks()
    is_allowed_M = np.concatenate([is_listed_I | is_put_back_I, np.ones(len(new_items), bool)])
    is_allowed_M[withdrawn_indices] = False
    seq = corpus.seq
    if len(new_items):
        known_keys = seq.get_item_keys(np.arange(len(known_items)))
        keys_M = np.concatenate([known_keys, compute_keys("item", as_numbers(new_items["item_id"]))])
        known_sids = KnownSids(keys_M[: len(known_items)], corpus.sids, corpus.codes, f"run {folder.id}")
        options = scenario.tokenizer.get_options()
        vectors = compute_item_vectors(
            items,
            seq,
            options["vectors"],
            dim=options["dim"],
            seed=scenario.seed,
            folder=get_scenario_folder(folder),
        )
        sids_ML = known_sids.extend(vectors, keys_M)
    else:
        keys_M, sids_ML = None, corpus.sids
    written_artifacts = _write_artifacts(
        folder.path / "artifacts", artifacts, items, keys_M, sids_ML, corpus, np.flatnonzero(is_allowed_M)
    )
    record = {
        "version": Trie.load(Path(written_artifacts["catalogue"]["path"])).version,
        "at": time.time(),
        "artifacts": written_artifacts,
        "items": int(is_allowed_M.sum()),
        "added": len(new_items),
        "put back": int(is_put_back_I.sum()),
        "withdrawn": len(withdrawn_indices),
        "without": _list_missing_columns(new_items, known_items),
    }
    return _record_version(folder, record)


def _list_missing_columns(new_items: pa.Table, known_items: pa.Table) -> list[str]:
    """Return the columns that no new item has a value in, and some known item does."""
    if not len(new_items):
        return []
    return [
        name
        for name in known_items.column_names
        if name not in ("item", "events")
        and new_items[name].null_count == len(new_items)
        and known_items[name].null_count < len(known_items)
    ]


def _record_version(folder: RunFolder, record: dict[str, Any]) -> dict[str, Any]:
    """Add a version's record to RUN/catalogues.json and return it with its number."""
    versions = folder.read_catalogues()
    record = {"number": len(versions) + 1, **record}
    folder.write_catalogues([*versions, record])
    return record


def _write_artifacts(
    root: Path,
    artifacts: dict[str, str],
    items: pa.Table,
    keys_M: np.ndarray | None,
    sids_ML: np.ndarray,
    corpus: Corpus,
    allowed_indices: np.ndarray,
) -> dict[str, dict[str, str]]:
    """Write the artifacts of a version that differ from those of the version before.

    Args:
        root: The folder of the run's artifacts.
        artifacts: The paths of the artifacts before, by kind.
        items: The table [M] of all items.
        keys_M: Sparse keys of all items; None if there are no new items.
        sids_ML: Semantic ids of all items.
        corpus: The corpus of the version before.
        allowed_indices: Dense indices of the items that may be recommended.

    Returns:
        All artifacts of the version by kind, also the unchanged ones.
    """
    written_artifacts = {kind: {"kind": kind, "path": path, "sha256": ""} for kind, path in artifacts.items()}
    if keys_M is not None:
        old_sequences = Path(artifacts["sequences"])
        written_artifacts["sequences"] = store_artifact(
            root, "sequences", lambda target: _copy_sequences(old_sequences, target, items, keys_M)
        )
        written_artifacts["sids"] = store_artifact(root, "sids", lambda target: write_sids(target, sids_ML))
        if "transitions" in artifacts:
            written_artifacts["transitions"] = store_artifact(
                root, "transitions", lambda target: _write_memory(target, corpus, items)
            )
    trie = Trie.build(sids_ML, corpus.codes, items=allowed_indices)
    written_artifacts["catalogue"] = store_artifact(root, "catalogue", trie.save)
    return written_artifacts


def _copy_sequences(source: Path, target: Path, items: pa.Table, keys_M: np.ndarray) -> None:
    """Copy a folder of sequences with other items and item keys; files are hard-linked if the file system can."""
    for path in sorted(file for file in source.rglob("*") if file.is_file()):
        copy_path = target / path.relative_to(source)
        copy_path.parent.mkdir(parents=True, exist_ok=True)
        if path.name in ("items.parquet", "item_keys.npy"):
            continue
        try:
            os.link(path, copy_path)
        except OSError:
            shutil.copyfile(path, copy_path)
    pq.write_table(items, target / "items.parquet")
    np.save(target / "item_keys.npy", keys_M)


def _write_memory(target: Path, corpus: Corpus, items: pa.Table) -> None:
    """Write the files of the memory with the new items of a table."""
    _extend_transitions(corpus.transitions, len(items)).save(target)
    files = list_memory_files(Path(corpus.folders["transitions"]))
    if (cooccurrence := open_cooccurrence(files, len(corpus.transitions))) is not None:
        _extend_transitions(cooccurrence, len(items)).save(target, COOCCURRENCE_PREFIX)
    if "signal_words" in files:
        signals = ItemSignals.map(files)
        extend_signals(signals, items.slice(len(signals))).save(target)


def _extend_transitions(transitions: Transitions, item_count: int) -> Transitions:
    """Return transitions of `item_count` items, in which no transition was counted from or to the new ones."""
    new_count = item_count - len(transitions)
    return replace(
        transitions,
        row=np.concatenate([transitions.row, np.full(new_count, transitions.row[-1])]),
        occurs=np.concatenate([transitions.occurs, np.zeros(new_count, np.float32)]),
    )


def _read_new_items(
    path: str,
    vocabulary: Vocabulary,
    known_items: pa.Table,
    known_ids: np.ndarray,
    is_listed_I: np.ndarray,
) -> pa.Table:
    """Read new items with the run's columns; missing columns are null. Raises DataError if an item is listed already.

    Args:
        path: The table of new items.
        vocabulary: The run's names.
        known_items: The table [I] of the run's items.
        known_ids: The ids [I] of the run's items.
        is_listed_I: Whether each of the run's items is in the catalogue and not withdrawn.
    """
    raw = read_run_items(path, vocabulary)
    columns = []
    for field in known_items.schema:
        if field.name in raw.column_names:
            column = raw[field.name]
            if pa.types.is_list(field.type) and pa.types.is_string(column.type):  # of delimited text
                column = pc.split_pattern(column, "|")
            try:
                columns.append(column.cast(field.type))
            except pa.ArrowException as error:
                raise DataError(
                    f"items {path}: {field.name} is {raw[field.name].type}, the run's is {field.type}: "
                    f"{str(error).splitlines()[0]}; write the column as in the items table of the run"
                ) from None
        else:
            columns.append(pa.chunked_array([pa.nulls(len(raw), field.type)]))
    table = pa.table(columns, schema=known_items.schema)
    new_ids = _convert_ids(table, known_ids)
    if len(listed_ids := new_ids[np.isin(new_ids, known_ids[is_listed_I])]):
        raise DataError(
            f"items {path}: {len(listed_ids)} of {len(new_ids)} items are in the catalogue already, "
            f"the first is {listed_ids[0]}; remove them; existing items keep their ids"
        )
    return table


def _number_items(table: pa.Table, first_index: int) -> pa.Table:
    """Return new items with dense indices from `first_index` on, no events, and the id as title if there is none."""
    new_columns = {
        "item": np.arange(first_index, first_index + len(table)),
        "events": np.zeros(len(table), np.int64),
    }
    for name, values in new_columns.items():
        column = table.schema.get_field_index(name)
        if column >= 0:
            field = table.schema.field(column)
            table = table.set_column(column, field, pa.array(values).cast(field.type))
    column = table.schema.get_field_index("title")
    if column >= 0:
        titles = pc.coalesce(table["title"], table["item_id"].cast(pa.string()))
        field = table.schema.field(column)
        table = table.set_column(column, field, titles.cast(field.type))
    return table


def _convert_ids(table: pa.Table, known_ids: np.ndarray) -> np.ndarray:
    """Return the item ids of a table in the type of the run's ids."""
    dtype = known_ids.dtype if known_ids.dtype.kind != "U" else np.str_
    return np.array(table["item_id"].to_pylist(), dtype=dtype)


def _find_withdrawn(
    withdrawn_ids: Sequence[str], known_ids: np.ndarray, is_listed_I: np.ndarray
) -> np.ndarray:
    """Return the sorted dense indices of items to withdraw. Raises ConfigError for an item that is not listed."""
    names = known_ids.astype(str)
    order = np.argsort(names, kind="stable")
    positions = np.searchsorted(names, np.array(withdrawn_ids, dtype=np.str_), sorter=order)
    positions = np.minimum(positions, len(names) - 1)
    indices = order[positions] if len(withdrawn_ids) else np.empty(0, np.int64)
    for withdrawn_id, index in zip(withdrawn_ids, indices.tolist(), strict=True):
        if names[index] != withdrawn_id or not is_listed_I[index]:
            raise ConfigError(f"items add --withdraw: {withdrawn_id!r} is not in the catalogue of this run")
    return np.unique(indices)
