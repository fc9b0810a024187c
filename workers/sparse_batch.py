"""Batches together with the keys that they look up in the sparse tables: each table once, however many features read it."""

# Shapes: N keys of a feature, M distinct keys of a table, D width.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.embedding.training import ShardedTables
from nonet.errors import ConfigError
from nonet.models.generation import get_keys
from nonet.types import SampleBatch


@dataclass(frozen=True, slots=True)
class SparseBatch:
    """A batch and its distinct keys by table.

    Attributes:
        batch: The batch.
        keys: By table, the distinct keys [M].
        places: By feature, its table and the positions [N] of its rows among the table's keys.
    """

    batch: Any
    keys: Mapping[str, Tensor]
    places: Mapping[str, tuple[str, Tensor]]

    def spread(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows [N, D] by feature from rows [M, D] by table."""
        return {name: rows[table].index_select(0, at) for name, (table, at) in self.places.items()}


def build_sparse_batch(batch: SampleBatch, features: Mapping[str, str], device: str) -> SparseBatch:
    """Build a sparse batch from the distinct keys that the features of each table have in a batch.

    Args:
        batch: A batch of samples.
        features: By feature, the name of its table.
        device: Where the positions of rows are put.
    """
    keys, places = {}, {}
    for table in dict.fromkeys(features.values()):
        names = [name for name, of in features.items() if of == table]
        each = [get_keys(batch, name) for name in names]
        keys[table], inverse = torch.unique(torch.cat(each), return_inverse=True)
        for name, at in zip(names, inverse.split([len(part) for part in each]), strict=True):
            places[name] = table, at.to(device)
    return SparseBatch(batch, keys, places)


class StepShare:
    """The chunks of a step that one rank computes, with the keys of all of them and the number of their targets.

    Chunks are built one at a time to bound memory: each is built once for its keys and once more to be computed. A
    single chunk is built only once.

    Attributes:
        targets: Number of targets in all chunks.
        keys: By table, the distinct keys [M] of all chunks and of `also`.
        also: By table, further keys that are looked up, ascending.
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
        """Pull the rows [M, D] of all keys by table to the device, without training them; all ranks must call it together."""
        return {
            table: sparse.pull(table, keys, train=False).to(self._device) for table, keys in self.keys.items()
        }

    def __iter__(self) -> Iterator[SparseBatch]:
        """Yield the chunks; their positions refer to the keys of all chunks."""
        if self._only is not None:
            yield self._only
            return
        for make in self._makes:
            yield self._index_batch(make())

    def select_extra_rows(self, table: str, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the rows [n, D] of the further keys of a table from the rows [M, D] of all of its keys."""
        place = torch.searchsorted(self.keys[table], self.also[table]).to(rows[table].device)
        return rows[table].index_select(0, place)

    def _index_batch(self, batch: SampleBatch) -> SparseBatch:
        """Return a batch whose positions refer to the keys of all chunks."""
        places = {
            name: (table, torch.searchsorted(self.keys[table], get_keys(batch, name)).to(self._device))
            for name, table in self._features.items()
        }
        return SparseBatch(batch, self.keys, places)


class PrefetchedRows:
    """Rows that were pulled before, as a source for an embedding collection; gradients are kept by table."""

    def __init__(self, rows: Mapping[str, Tensor]):
        self._rows = dict(rows)
        self.grads = {table: torch.zeros(rows.shape) for table, rows in self._rows.items()}

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """Return the rows [N, D] of a table; the keys must be those that the batch was built with."""
        if len(keys) != len(self._rows[table]):
            raise ConfigError(
                f"{len(self._rows[table])} rows of table {table!r} were fetched, {len(keys)} asked"
            )
        return self._rows[table]

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Keep the gradients [N, D] of a table; a batch that no loss reached has none."""
        if len(keys):
            self.grads[table] = grads
