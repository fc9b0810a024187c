"""A batch with what it asks of the sparse tables: each table once, however many features read it."""

# Shapes: N keys of a feature, M distinct keys of a table, D width.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.embedding.training import ShardedTables
from nonet.errors import ConfigError
from nonet.models.generation import keys_of
from nonet.types import SampleBatch


@dataclass(frozen=True, slots=True)
class SparseBatch:
    """A batch, the keys of each table, and for each feature its table and where its rows are among the table's [N]."""

    batch: Any
    keys: Mapping[str, Tensor]
    places: Mapping[str, tuple[str, Tensor]]

    def spread(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows [M, D] by table as rows [N, D] by feature."""
        return {name: rows[table].index_select(0, at) for name, (table, at) in self.places.items()}


def build_sparse_batch(batch: SampleBatch, features: Mapping[str, str], device: str) -> SparseBatch:
    """The distinct keys that the features of each table have in a batch; places are on the device."""
    keys, places = {}, {}
    for table in dict.fromkeys(features.values()):
        names = [name for name, of in features.items() if of == table]
        each = [keys_of(batch, name) for name in names]
        keys[table], inverse = torch.unique(torch.cat(each), return_inverse=True)
        for name, at in zip(names, inverse.split([len(part) for part in each]), strict=True):
            places[name] = table, at.to(device)
    return SparseBatch(batch, keys, places)


class StepShare:
    """A rank's part of a step, in chunks: what it asks of the tables over all of them, and how many targets it has.

    A chunk is made when its turn comes, so that memory holds one at a time: once for its keys, and again to be computed. One
    chunk alone is made once. `also`: keys by table that are asked for besides, ascending.
    """

    def __init__(
        self,
        chunk_makers: Sequence[Callable[[], SampleBatch]],
        features: Mapping[str, str],
        device: str,
        extra_keys: Mapping[str, Tensor] | None = None,
    ):
        self._makes, self._features, self._device = list(chunk_makers), dict(features), device
        self.targets, self.also = 0, dict(extra_keys or {})
        parts: dict[str, list[Tensor]] = {table: [] for table in features.values()}
        for make in self._makes:
            part = build_sparse_batch(make(), features, device)
            self.targets += int(part.batch.loss_mask.values.sum())
            for table, keys in part.keys.items():
                parts[table].append(keys)
        self._only = part if len(self._makes) == 1 else None
        if self._only and not self.also:
            self.keys = self._only.keys
            return
        for table, keys in self.also.items():
            parts[table].append(keys)
        self.keys = {table: torch.cat(keys).unique() for table, keys in parts.items()}
        self._only = self._only and self._index_batch(self._only.batch)

    def __len__(self) -> int:
        return len(self._makes)

    def pull_frozen_rows(self, sparse: ShardedTables) -> dict[str, Tensor]:
        """Rows [M, D] by table of all chunks' keys, on the device, that nothing learns from; every rank asks at once."""
        return {
            table: sparse.pull(table, keys, train=False).to(self._device) for table, keys in self.keys.items()
        }

    def __iter__(self) -> Iterator[SparseBatch]:
        """The chunks; the places of each are among the keys of all."""
        if self._only is not None:
            yield self._only
            return
        for make in self._makes:
            yield self._index_batch(make())

    def select_extra_rows(self, table: str, rows: Mapping[str, Tensor]) -> Tensor:
        """The rows of the keys asked for besides [n, D], out of those of the table [M, D]."""
        place = torch.searchsorted(self.keys[table], self.also[table]).to(rows[table].device)
        return rows[table].index_select(0, place)

    def _index_batch(self, batch: SampleBatch) -> SparseBatch:
        """A batch whose places are among the keys of all."""
        places = {
            name: (table, torch.searchsorted(self.keys[table], keys_of(batch, name)).to(self._device))
            for name, table in self._features.items()
        }
        return SparseBatch(batch, self.keys, places)


class PrefetchedRows:
    """Rows that were fetched before, as a source of an embedding collection; gradients stay here by table."""

    def __init__(self, rows: Mapping[str, Tensor]):
        self._rows = dict(rows)
        self.grads = {table: torch.zeros(rows.shape) for table, rows in self._rows.items()}

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """The table's rows [N, D]; the keys are those that the batch was read with."""
        if len(keys) != len(self._rows[table]):
            raise ConfigError(
                f"{len(self._rows[table])} rows of table {table!r} were fetched, {len(keys)} asked"
            )
        return self._rows[table]

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Keep the gradients [N, D]; a batch that no loss reached has none."""
        if len(keys):
            self.grads[table] = grads
