"""Append the events of a table to the events of their users in a run's store, or in another store."""

# Shapes: N events.

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nonet.deploy.opened import OpenedRun, read_run_interactions
from nonet.errors import ConfigError
from nonet.models.inference import find_default_values
from nonet.samples.tables import as_numbers


def append_events(run: str, events_path: str, store: str | None = None) -> dict[str, int]:
    """Append interactions to the store of a run.

    Events of items that the run does not know are left out.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        events_path: The table of interactions, with columns named as in the run's `data.columns`.
        store: The address of the store (that of `services.features.store`); None for the run's
            `data.sequences`.

    Returns:
        {"events": number of appended events, "users": number of users that have new events, "unknown_items": number of
        events that were left out}.

    Raises:
        ConfigError: The run has no store, or no event has a known item.
        DataError: The table cannot be read.
    """
    served_run = OpenedRun.open(run, verb="store append")
    stored, seq = served_run.events if store is None else served_run.open_events(store), served_run.corpus.seq
    if stored is None:
        raise ConfigError(
            f"{served_run.folder.id} keeps the events of users in its folder, where none can be appended; name a store: "
            "data.sequences: {use: lmdb:FOLDER}, or --store lmdb:FOLDER"
        )
    table = read_run_interactions(events_path, served_run.vocabulary)
    item_ids = as_numbers(table["item_id"])
    catalogue_ids = as_numbers(pa.array(served_run.corpus.item_id.tolist()))
    order = np.argsort(catalogue_ids)
    positions = np.minimum(np.searchsorted(catalogue_ids[order], item_ids), len(catalogue_ids) - 1)
    is_known = catalogue_ids[order][positions] == item_ids
    table, item_indices = table.filter(pa.array(is_known)), order[positions][is_known]
    if not len(table):
        raise ConfigError(
            f"{events_path}: none of its {len(is_known)} events has an item of {served_run.folder.id}"
        )
    new_columns = {
        "item": item_indices.astype(np.int32),
        "time": table["timestamp"].to_numpy(),
        "event": _read_kinds(table, seq.event_names),
    }
    for name, default in find_default_values(seq).items():
        new_columns[f"column:{name}"] = _read_column(table, name, default)
    user_count = stored.append(table["user_id"].to_pylist(), new_columns)
    return {"events": len(table), "users": user_count, "unknown_items": int((~is_known).sum())}


def _read_kinds(table: pa.Table, names: tuple[str, ...]) -> np.ndarray:
    """Return each event's kind [N] as an index into `names`; 0 for a missing or unknown kind."""
    if "event" not in table.column_names:
        return np.zeros(len(table), np.int32)
    index_of = {name: index for index, name in enumerate(names)}
    return np.array([index_of.get(str(kind), 0) for kind in table["event"].to_pylist()], np.int32)


def _read_column(table: pa.Table, name: str, default: np.generic) -> np.ndarray:
    """Return a column [N] of the table in the run's type, filled with the default value if the table lacks it."""
    if name not in table.column_names:
        return np.full(len(table), default)
    if default.dtype.kind == "i":
        return as_numbers(table[name])
    return table[name].cast(pa.float32()).to_numpy(zero_copy_only=False)
