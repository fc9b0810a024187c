"""The joined stores of an export: copies of their rows for the items of the catalogue, or their addresses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.deploy.opened import HistoryJoins
from nonet.errors import ConfigError
from nonet.samples.stores import Join, StoreJoin, check_address, create_store, is_in_files, split_address

pc: Any = pyarrow.compute  # its functions are created at import time, which type checkers do not see

STORES = "stores"
"""The subfolder of an export with the copied stores, each in a folder with the name of its join."""


def write_joins(
    joins: Mapping[str, Join], item_ids: np.ndarray, folder: Path
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Copy the rows of items from stores in files into packed stores in an export.

    Args:
        joins: Joins by name.
        item_ids: The items' own ids [I], whose rows are copied with all versions.
        folder: The folder of the export.

    Returns:
        The joins by name as plain data, and the names of the joins whose stores were copied. The others keep their address.

    Raises:
        ConfigError: A store in files does not exist, or lacks a column.
    """
    copied = [name for name, join in joins.items() if (join.on or name) == "item" and is_in_files(join.use)]
    for name in copied:
        _copy_rows(joins[name].open(name), item_ids, folder / STORES / name)
    own_address = {name: {"use": f"{STORES}/{name}", "options": {}} for name in copied}
    return {name: join.model_dump() | own_address.get(name, {}) for name, join in joins.items()}, copied


def _copy_rows(source: StoreJoin, item_ids: np.ndarray, folder: Path) -> None:
    """Copy all versions of the joined columns of items from a store into a new packed store."""
    store, names = source.store, list(dict.fromkeys(source.columns.values()))
    if clashing := sorted({"key", "time"} & {*names}):  # names of the columns that `Store.scan` adds
        raise ConfigError(
            f"{store.name}: its column {clashing[0]!r} cannot be copied into an export; write the store again with another name"
        )
    schema = pa.schema([store.schema.field(name) for name in names])
    copy = create_store(str(folder), schema, key=store.key, versions=store.versions)
    wanted_keys = pa.array(item_ids, store.key)
    batches = [batch.filter(pc.is_in(batch["key"], wanted_keys)) for batch in store.scan(names)]
    if sum(map(len, batches)):
        table = pa.Table.from_batches(batches)
        times = table["time"].to_numpy() if store.versions else None
        copy.put(table["key"].combine_chunks(), table.select(names), times)
    copy.close()


def open_joins(
    folder: Path,
    joins: Mapping[str, Mapping[str, Any]],
    copied: Collection[str],
    stores: Mapping[str, str],
    features: Collection[str],
) -> HistoryJoins:
    """Open the joined stores of an export. The columns of those that are not copied and not found are missing.

    Args:
        folder: The folder of the export.
        joins: The joins as `write_joins` returned them.
        copied: Names of the joins whose stores are in the folder.
        stores: Addresses of other stores by the name of their join.
        features: Names of the model's features.

    Raises:
        ConfigError: There is no join of this name, a given store does not exist, or a store lacks a column.
    """
    opened = {}
    for name, stored in joins.items():
        own_address = {"use": str(folder / STORES / name)} if name in copied else {}
        opened[name] = Join.model_validate({**stored, **own_address})
    for name, address in stores.items():
        if name not in opened:
            raise ConfigError(f"{folder} has no join {name!r}; its joins: {', '.join(opened) or 'none'}")
        check_address(address)
        join = opened[name]
        same_kind = split_address(address)[0] == split_address(join.use)[0]
        changes = {"use": address, "options": join.options if same_kind else {}}
        opened[name] = join.model_copy(update=changes)
    history_joins = HistoryJoins(opened, features, optional={*opened} - {*copied} - {*stores})
    history_joins.check()
    return history_joins
