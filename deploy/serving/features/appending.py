"""Append events of a table to their users' events in the store of a run's sequences, or in another store."""

# Shapes: N events.

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nonet.deploy.serving.features.open_run import ServedRun
from nonet.errors import ConfigError
from nonet.models.inference import find_default_values
from nonet.samples.tables import as_numbers, read_interactions


def append_events(run: str, events_path: str, store: str | None = None) -> dict[str, int]:
    """Append interactions to the store of a run.

    Events of items that the run does not know are left out.

    Args:
        run: A folder, an id, a prefix, or `last`.
        events_path: The table of interactions, with columns named as in the run's `data.columns`.
        store: The address of the store (that of `services.features.store`); None for the run's
            `data.sequences`.

    Returns:
        {"events", "users", "unknown_items"}: numbers of events.

    Raises:
        ConfigError: The run has no store, or no event has a known item.
        DataError: The table cannot be read.
    """
    opened = ServedRun.open(run)
    stored, seq = opened.events if store is None else opened.open_events(store), opened.corpus.seq
    if stored is None:
        raise ConfigError(
            f"{opened.folder.id} has its users' events in its folder; name a store for them: data.sequences: "
            "{use: lmdb:FOLDER}, or --store lmdb:FOLDER"
        )
    table = read_interactions(events_path, opened.scenario.data.table_format)
    items = as_numbers(table["item_id"])
    own = as_numbers(pa.array(opened.corpus.item_id.tolist()))
    order = np.argsort(own)
    place = np.minimum(np.searchsorted(own[order], items), len(own) - 1)
    known = own[order][place] == items
    table, dense = table.filter(pa.array(known)), order[place][known]
    if not len(table):
        raise ConfigError(f"{events_path}: none of its {len(known)} events has an item of {opened.folder.id}")
    new = {
        "item": dense.astype(np.int32),
        "time": table["timestamp"].to_numpy(),
        "event": _read_kinds(table, seq.event_names),
    }
    for name, usual in find_default_values(seq).items():
        new[f"column:{name}"] = _read_column(table, name, usual)
    users = stored.append(table["user_id"].to_pylist(), new, opened.corpus.sids)
    return {"events": len(table), "users": users, "unknown_items": int((~known).sum())}


def _read_kinds(table: pa.Table, names: tuple[str, ...]) -> np.ndarray:
    """Return each event's kind [N] as an index into the run's kinds; 0 for a missing or unknown one."""
    if "event" not in table.column_names:
        return np.zeros(len(table), np.int32)
    place = {name: at for at, name in enumerate(names)}
    return np.array([place.get(str(kind), 0) for kind in table["event"].to_pylist()], np.int32)


def _read_column(table: pa.Table, name: str, usual: np.generic) -> np.ndarray:
    """Return a column [N] in the run's type; the default value if the table lacks it."""
    if name not in table.column_names:
        return np.full(len(table), usual)
    if usual.dtype.kind == "i":
        return as_numbers(table[name])
    return table[name].cast(pa.float32()).to_numpy(zero_copy_only=False)
