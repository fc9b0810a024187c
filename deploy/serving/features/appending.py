"""Events of a table, put behind those of their users in the store that a run's scenario names (`data.sequences`), or another."""

# Shapes: N events.

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nonet.deploy.serving.features.open_run import OpenRun
from nonet.errors import ConfigError
from nonet.models.inference import usual_columns
from nonet.samples.tables import as_numbers, read_interactions


def append_events(run: str, events: str, store: str | None = None) -> dict[str, int]:
    """Interactions, as the run's `data.columns` names theirs, into its store, or the one at an address (that of
    `services.features.store`): {"events", "users", "unknown_items"}.

    Events with items that the run does not know are left out. Raises ConfigError where the run has no store, DataError.
    """
    opened = OpenRun.of(run)
    stored, seq = opened.events if store is None else opened.events_in(store), opened.corpus.seq
    if stored is None:
        raise ConfigError(
            f"{opened.folder.id} keeps its users' events in its folder; name a store for them: data.sequences: "
            "{use: lmdb:FOLDER}, or say --store lmdb:FOLDER"
        )
    table = read_interactions(events, opened.scenario.data.table_format)
    items = as_numbers(table["item_id"])
    own = as_numbers(pa.array(opened.corpus.item_id.tolist()))
    order = np.argsort(own)
    place = np.minimum(np.searchsorted(own[order], items), len(own) - 1)
    known = own[order][place] == items
    table, dense = table.filter(pa.array(known)), order[place][known]
    if not len(table):
        raise ConfigError(f"{events}: none of its {len(known)} events has an item of {opened.folder.id}")
    new = {
        "item": dense.astype(np.int32),
        "time": table["timestamp"].to_numpy(),
        "event": _kinds(table, seq.event_names),
    }
    for name, usual in usual_columns(seq).items():
        new[f"column:{name}"] = _values(table, name, usual)
    users = stored.append(table["user_id"].to_pylist(), new, opened.corpus.sids)
    return {"events": len(table), "users": users, "unknown_items": int((~known).sum())}


def _kinds(table: pa.Table, names: tuple[str, ...]) -> np.ndarray:
    """Each event's kind [N] by its place among the run's; 0 for one that is not told or not known."""
    if "event" not in table.column_names:
        return np.zeros(len(table), np.int32)
    place = {name: at for at, name in enumerate(names)}
    return np.array([place.get(str(kind), 0) for kind in table["event"].to_pylist()], np.int32)


def _values(table: pa.Table, name: str, usual: np.generic) -> np.ndarray:
    """A column [N] of the run's type; what is usual where the table has none."""
    if name not in table.column_names:
        return np.full(len(table), usual)
    if usual.dtype.kind == "i":
        return as_numbers(table[name])
    return table[name].cast(pa.float32()).to_numpy(zero_copy_only=False)
