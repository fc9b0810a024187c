"""RunData: the items of a run, for rewards that need more than columns. Each artifact is read at its first use, without torch.

    class SharedPrefix(nonet.Reward):
        def open(self, run):                 # once in each actor, before the first beams
            self.sid = run.sid               # [I, L]

The rows of all arrays and tables are dense item indices, as in `Rollouts.item`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.errors import ConfigError
from nonet.samples.sequences import Transitions
from nonet.samples.tokenised import as_array, read_items

# Shapes: I items, L levels.


class RunData:
    """The items of a run, read from its artifacts.

    Args:
        folders: Folder of each artifact by its kind.
    """

    def __init__(self, folders: Mapping[str, str]):
        self.folders = dict(folders)

    @cached_property
    def items(self) -> pa.Table:
        """The item table, one row per item."""
        return read_items(self.folders)

    @cached_property
    def item_id(self) -> np.ndarray:
        """Original item ids [I]."""
        return self.column("item_id")

    @cached_property
    def sid(self) -> np.ndarray:
        """Semantic ids [I, L] int32."""
        table = pq.read_table(Path(self.folders["sids"]) / "sids.parquet")
        return np.stack(
            [table[name].to_numpy() for name in table.column_names if name != "item"], axis=1
        ).astype(np.int32)

    @cached_property
    def transitions(self) -> Transitions:
        """Counts of how often one item came shortly after another one in the training events."""
        return Transitions.load(Path(self.folders["transitions"]))

    def column(self, name: str) -> np.ndarray:
        """Return a column of the items [I]; text as fixed-width unicode, lists joined by "|".

        Vectors are float32 [I, D], with NaN for an item without one.

        Raises:
            ConfigError: There is no such column.
        """
        if name not in self.items.column_names:
            raise ConfigError(
                f"items have no column {name!r}; their columns are {', '.join(self.items.column_names)}"
            )
        return as_array(self.items[name])

    def index(self, ids: np.ndarray) -> np.ndarray:
        """Return the dense indices of original item ids, of any shape; -1 for an unknown id."""
        return locate_ids(self.item_id, ids)


def locate_ids(known_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the index in `known_ids` of each id; -1 for ids that are not in `known_ids` or have another type."""
    ids = np.asarray(ids)
    if (known_ids.dtype.kind == "U") != (ids.dtype.kind in "UO") or not len(known_ids):
        return np.full(ids.shape, -1, np.int64)
    ids = ids.astype(np.str_) if ids.dtype == object else ids
    order = np.argsort(known_ids, kind="stable")
    sorted_index = np.minimum(np.searchsorted(known_ids, ids, sorter=order), len(known_ids) - 1)
    return np.where(known_ids[order[sorted_index]] == ids, order[sorted_index], -1)
