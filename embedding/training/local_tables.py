"""The tables of one rank of the sparse world: their rows are read and changed under the locks of their histories."""

# Shapes: M keys that one shard receives from all ranks, D width, B bytes per row.

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from nonet.embedding.tables import BaseTable, NativeTable, take_packed
from nonet.embedding.versions import TableHistory

# A read-only lookup reports its progress after these fractions of the keys. The receiver copies rows three times as fast as
# they are looked up, so with small last parts it ends soon after the lookup.
_PROGRESS_FRACTIONS = (0.75, 0.95, 1.0)
_MIN_SPLIT_KEYS = 256  # Up to this many keys are looked up in one part.


class LocalTables:
    """The tables of which this rank stores a shard, by name, and their histories.

    Args:
        tables: The tables by name.
        to_host: Whether lookups return rows in host memory; otherwise they are on the device of a tiered table.

    Attributes:
        tables: The tables by name.
        histories: The history of each table by name, which makes snapshots of it.
    """

    def __init__(self, tables: Mapping[str, BaseTable], *, to_host: bool):
        self.tables = dict(tables)
        self.histories = {name: TableHistory(table) for name, table in self.tables.items()}
        self._to_host = to_host

    def look_up(self, table: str, keys: np.ndarray, train: bool) -> Tensor:
        """Return the rows [M, D] of keys [M]; with `train`, absent keys get a row."""
        history = self.histories[table]
        with history.hold_for_insert(keys) if train else history.lock:
            rows = self.tables[table].lookup(keys, train=train)
        return rows.to("cpu") if self._to_host else rows

    def look_up_into(
        self,
        table: str,
        keys: np.ndarray,
        out: Tensor,
        train: bool,
        report_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Write the rows of keys to a tensor.

        A table remembers the positions of the keys of its last training lookup, so a training lookup is not split.

        Args:
            table: The name of the table.
            keys: Keys [M].
            out: The tensor [M, D].
            train: Whether to create rows.
            report_progress: Called with the number of complete rows; several times if rows are only read.
        """
        history, shard_table = self.histories[table], self.tables[table]
        with history.hold_for_insert(keys) if train else history.lock:
            if not isinstance(shard_table, NativeTable):
                out.copy_(shard_table.lookup(keys, train=train))
            elif train or report_progress is None or len(keys) <= _MIN_SPLIT_KEYS:
                shard_table.lookup(keys, train=train, out=out)
            else:
                _read_in_parts(shard_table, keys, out, report_progress)
        if report_progress is not None:
            report_progress(len(keys))

    def take_packed(self, table: str, keys: np.ndarray) -> Tensor:
        """Return rows with their optimizer state and steps, as bytes [M, B], after creating absent rows."""
        with self.histories[table].hold_for_insert(keys):
            return take_packed(self.tables[table], keys)

    def apply(self, table: str, keys: np.ndarray, grads: Tensor, step: int, lr: float | None) -> None:
        """Apply the gradients [M, D] of keys [M] as one optimizer step."""
        with self.histories[table].hold_for_update(keys, step):
            self.tables[table].apply(keys, grads, step, lr)


def _read_in_parts(
    table: NativeTable, keys: np.ndarray, out: Tensor, report_progress: Callable[[int], None]
) -> None:
    """Look up rows into `out` in parts, and report the number of complete rows after each."""
    start = 0
    for fraction in _PROGRESS_FRACTIONS:
        stop = int(fraction * len(keys))
        table.lookup(keys[start:stop], train=False, out=out[start:stop])
        report_progress(stop)
        start = stop
