"""`nonet items add`: a new version of a run's catalogue with added and withdrawn items, without training.

Existing items keep their semantic ids and dense indices, so weights and rows keep their meaning. New items
get ids from the run's codebooks, as in a warm start, and dense indices behind the existing ones. Withdrawn
items leave the trie and keep their ids in case they return. The versions are in RUN/catalogues.json.
`RunFolder.find_artifacts` returns the newest one, which recommending and serving read; training and its resume
continue with the first one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from nonet.controller.record import RunFolder, find_run
from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_run_setup
from nonet.errors import ConfigError, DataError
from nonet.models.generation import Corpus, Trie
from nonet.models.tokenizer import KnownSids, compute_item_vectors
from nonet.samples.sequences import Transitions
from nonet.samples.tables import TableFormat, as_numbers, compute_keys, read_items
from nonet.workers.roles import store_artifact, write_sids

pc: Any = pyarrow.compute  # its functions are created at import time, which type checkers do not see

# Shapes: I items that are there, M with the new ones, L levels.


def add_items(run: str, items_path: str | None, withdrawn_ids: Sequence[str] = ()) -> dict[str, Any]:
    """Create a new version of a run's catalogue.

    Args:
        run: A folder, an id, a prefix, or `last`.
        items_path: A table of new items; None for none.
        withdrawn_ids: Ids of items that must no longer be recommended.

    Returns:
        The version's record in RUN/catalogues.json.

    Raises:
        ConfigError: The run has no catalogue or no codebooks, or an id is unknown. Nothing has changed
            then.
        DataError: The table is wrong. Nothing has changed then.
    """
    folder = find_run(run)
    scenario, beside = load_scenario(folder.scenario)
    if not scenario.model.spec.makes_lists:
        raise ConfigError(f"{folder.id} scores events and has no catalogue of items")
    if items_path is not None and not scenario.tokenizer.spec.adds_items:
        raise ConfigError(
            f"items add: the semantic ids of {folder.id} come from the tokenizer {scenario.tokenizer.use}, which has no "
            "codebooks for new items; give them ids there and start a run with init: {from: RUN}"
        )
    artifacts = folder.find_artifacts()
    corpus = make_run_setup(scenario).open_corpus(artifacts)
    known, ids = corpus.items, corpus.item_id
    there = np.asarray(corpus.trie.leaf_of_item) >= 0
    table = (
        _read_new_items(items_path, scenario.data.missing, known, ids, there)
        if items_path is not None
        else known.slice(0, 0)
    )
    back = np.isin(ids, _convert_ids(table, ids)) & ~there
    table = table.filter(pa.array(~np.isin(_convert_ids(table, ids), ids[back])))
    out = _find_withdrawn(withdrawn_ids, ids, there)
    if not (len(table) or back.any() or len(out)):
        raise ConfigError("items add: nothing changes; give a table of items, or --withdraw ID")
    items = pa.concat_tables([known, _number_items(table, len(known))]).combine_chunks()
    allowed = np.concatenate([there | back, np.ones(len(table), bool)])
    allowed[out] = False
    root, seq = folder.path / "artifacts", corpus.seq
    if len(table):
        key = np.concatenate(
            [seq.get_item_keys(np.arange(len(known))), compute_keys("item", as_numbers(table["item_id"]))]
        )
        tokens = KnownSids(key[: len(known)], corpus.sids, corpus.codes, f"run {folder.id}")
        options = scenario.tokenizer.get_options()
        vectors = compute_item_vectors(
            items, seq, options["vectors"], dim=options["dim"], seed=scenario.seed, folder=beside
        )
        sids = tokens.extend(vectors, key)
    else:
        key, sids = None, corpus.sids
    written_artifacts = _write_artifacts(root, artifacts, items, key, sids, corpus, np.flatnonzero(allowed))
    record = {
        "version": Trie.load(Path(written_artifacts["catalogue"]["path"])).version,
        "at": time.time(),
        "artifacts": written_artifacts,
        "items": int(allowed.sum()),
        "added": len(table),
        "put back": int(back.sum()),
        "withdrawn": len(out),
    }
    return _record_version(folder, record)


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
    key: np.ndarray | None,
    sids: np.ndarray,
    corpus: Corpus,
    allowed: np.ndarray,
) -> dict[str, dict[str, str]]:
    """Write the artifacts of a version; unchanged ones are those of the version before."""
    written_artifacts = {kind: {"kind": kind, "path": path, "sha256": ""} for kind, path in artifacts.items()}
    if key is not None:
        before = Path(artifacts["sequences"])
        written_artifacts["sequences"] = store_artifact(
            root, "sequences", lambda to: _copy_sequences(before, to, items, key)
        )
        written_artifacts["sids"] = store_artifact(root, "sids", lambda to: write_sids(to, sids))
        longer = _extend_transitions(corpus.transitions, len(items)) if "transitions" in artifacts else None
        if longer is not None:
            written_artifacts["transitions"] = store_artifact(root, "transitions", longer.save)
    trie = Trie.build(sids, corpus.codes, items=allowed)
    written_artifacts["catalogue"] = store_artifact(root, "catalogue", trie.save)
    return written_artifacts


def _copy_sequences(before: Path, to: Path, items: pa.Table, key: np.ndarray) -> None:
    """Copy sequences with more items; files are hard-linked if the file system can."""
    for path in sorted(each for each in before.rglob("*") if each.is_file()):
        place = to / path.relative_to(before)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.name in ("items.parquet", "item_keys.npy"):
            continue
        try:
            os.link(path, place)
        except OSError:
            shutil.copyfile(path, place)
    pq.write_table(items, to / "items.parquet")
    np.save(to / "item_keys.npy", key)


def _extend_transitions(transitions: Transitions, items: int) -> Transitions:
    """Return transitions with new items, to which nothing has led yet."""
    more = items - len(transitions)
    return Transitions(
        np.concatenate([transitions.row, np.full(more, transitions.row[-1])]),
        np.asarray(transitions.item),
        np.asarray(transitions.count),
        occurs=np.concatenate([transitions.occurs, np.zeros(more, np.float32)]),
        options=transitions.options,
        until=transitions.until,
    )


def _read_new_items(
    path: str, missing: Sequence[str] | None, known: pa.Table, ids: np.ndarray, there: np.ndarray
) -> pa.Table:
    """Read new items with the run's columns; missing columns are null. Raises DataError if an item exists already."""
    raw = read_items(path, TableFormat.from_options(None, missing))
    columns = []
    for field in known.schema:
        if field.name in raw.column_names:
            try:
                columns.append(raw[field.name].cast(field.type))
            except pa.ArrowException as error:
                raise DataError(
                    f"items {path}: {field.name} is {raw[field.name].type}, the run's is {field.type}: {error}"
                ) from None
        else:
            columns.append(pa.chunked_array([pa.nulls(len(raw), field.type)]))
    table = pa.table(columns, schema=known.schema)
    own = _convert_ids(table, ids)
    if len(same := own[np.isin(own, ids[there])]):
        raise DataError(
            f"items {path}: {len(same)} of {len(own)} items are in the catalogue already, the first is {same[0]}; "
            "remove them; existing items keep their ids"
        )
    return table


def _number_items(table: pa.Table, first: int) -> pa.Table:
    """Set dense indices and zero events on new rows; items without a title get their id as title."""
    for name, values in (
        ("item", np.arange(first, first + len(table))),
        ("events", np.zeros(len(table), np.int64)),
    ):
        at = table.schema.get_field_index(name)
        if at >= 0:
            table = table.set_column(
                at, table.schema.field(at), pa.array(values).cast(table.schema.field(at).type)
            )
    title = table.schema.get_field_index("title")
    if title >= 0:
        filled = pc.coalesce(table["title"], table["item_id"].cast(pa.string()))
        table = table.set_column(
            title, table.schema.field(title), filled.cast(table.schema.field(title).type)
        )
    return table


def _convert_ids(table: pa.Table, ids: np.ndarray) -> np.ndarray:
    """Return the ids of rows in the type of the run's ids."""
    return np.array(table["item_id"].to_pylist(), dtype=ids.dtype if ids.dtype.kind != "U" else np.str_)


def _find_withdrawn(withdraw: Sequence[str], ids: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the dense indices of items to withdraw. Raises ConfigError for one that is not in the catalogue."""
    names = ids.astype(str)
    order = np.argsort(names, kind="stable")
    at = np.minimum(np.searchsorted(names, np.array(withdraw, dtype=np.str_), sorter=order), len(names) - 1)
    places = order[at] if len(withdraw) else np.empty(0, np.int64)
    for name, place in zip(withdraw, places.tolist(), strict=True):
        if names[place] != name or not there[place]:
            raise ConfigError(f"items add --withdraw: {name!r} is not in the catalogue of this run")
    return np.unique(places)
