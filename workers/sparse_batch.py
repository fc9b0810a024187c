"""Batches together with the distinct keys that they look up in each sparse table, which several features may read."""

# Shapes: N keys of a feature, M distinct keys of a table, D width.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nonet.embedding.modules import RowSource
from nonet.errors import ConfigError
from nonet.models.generation import get_keys
from nonet.types import Jagged, SampleBatch

_BATCH_FIELDS = ("item", "sid", "time", "event", "loss_mask", "target", "uid")


@dataclass(frozen=True, slots=True)
class SparseBatch:
    """A batch and its distinct keys by table.

    Attributes:
        batch: The batch.
        keys: For each table, the distinct keys [M].
        places: For each feature, its table and the index [N] of each of its keys among the table's keys.
    """

    batch: Any
    keys: Mapping[str, Tensor]
    places: Mapping[str, tuple[str, Tensor]]

    def spread(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows [N, D] by feature from rows [M, D] by table."""
        return {name: rows[table].index_select(0, index_N) for name, (table, index_N) in self.places.items()}


def build_sparse_batch(batch: SampleBatch, features: Mapping[str, str], device: str) -> SparseBatch:
    """Build a sparse batch from the distinct keys that the features of each table have in a batch.

    Args:
        batch: A batch of samples.
        features: The name of the table of each feature.
        device: Device of the indices in `places`.
    """
    keys, places = {}, {}
    for table in dict.fromkeys(features.values()):
        names = [name for name, feature_table in features.items() if feature_table == table]
        feature_keys = [get_keys(batch, name) for name in names]
        keys[table], inverse = torch.unique(torch.cat(feature_keys), return_inverse=True)
        for name, index_N in zip(names, inverse.split([len(k) for k in feature_keys]), strict=True):
            places[name] = table, index_N.to(device)
    return SparseBatch(batch, keys, places)


class StepShare:
    """The chunks of a step that one rank computes, with the keys of all of them and the number of their targets.

    Chunks are built one at a time to bound memory: each is built once for its keys and once more to be computed. A
    single chunk is built only once.

    Args:
        chunk_makers: For each chunk, a function that builds its batch.
        features: The name of the table of each feature.
        device: Device of the indices in `SparseBatch.places`.
        extra_keys: For each table, further keys that are looked up, ascending.

    Attributes:
        targets: Number of targets in all chunks.
        keys: For each table, the distinct keys [M] of all chunks and of `also`.
        also: The extra keys of each table.
    """

    def __init__(
        self,
        chunk_makers: Sequence[Callable[[], SampleBatch]],
        features: Mapping[str, str],
        device: str,
        extra_keys: Mapping[str, Tensor] | None = None,
    ):
        self._chunk_makers, self._features, self._device = list(chunk_makers), dict(features), device
        self.targets, self.also = 0, dict(extra_keys or {})
        keys_by_table: dict[str, list[Tensor]] = {table: [] for table in features.values()}
        for make in self._chunk_makers:
            chunk = build_sparse_batch(make(), features, device)
            self.targets += int(chunk.batch.loss_mask.values.sum())
            for table, keys in chunk.keys.items():
                keys_by_table[table].append(keys)
        self._single_chunk = chunk if len(self._chunk_makers) == 1 else None
        if self._single_chunk and not self.also:
            self.keys = self._single_chunk.keys
            return
        for table, keys in self.also.items():
            keys_by_table[table].append(keys)
        self.keys = {table: torch.cat(keys).unique() for table, keys in keys_by_table.items()}
        self._single_chunk = self._single_chunk and self._index_batch(self._single_chunk.batch)

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._chunk_makers)

    def pull_frozen_rows(self, tables: RowSource) -> dict[str, Tensor]:
        """Pull the rows [M, D] of all keys by table to the device, without training them; all ranks must call it together."""
        return {
            table: tables.pull(table, keys, train=False).to(self._device) for table, keys in self.keys.items()
        }

    def __iter__(self) -> Iterator[SparseBatch]:
        """Yield the chunks; their `places` refer to the keys of all chunks."""
        return self.iterate(len(self))

    def iterate(self, n_chunks: int) -> Iterator[SparseBatch]:
        """Yield the chunks, then chunks without sequences until there are `n_chunks`."""
        if self._single_chunk is not None:
            yield self._single_chunk
        else:
            for make in self._chunk_makers:
                yield self._index_batch(make())
        if n_chunks > len(self):
            empty = self._index_batch(_drop_sequences(self._chunk_makers[0]()))
            for _ in range(n_chunks - len(self)):
                yield empty

    def select_extra_rows(self, table: str, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the rows [n, D] of the extra keys of a table from the rows [M, D] of all of its keys."""
        index_n = torch.searchsorted(self.keys[table], self.also[table]).to(rows[table].device)
        return rows[table].index_select(0, index_n)

    def _index_batch(self, batch: SampleBatch) -> SparseBatch:
        """Return a sparse batch whose `places` refer to the keys of all chunks."""
        places = {
            name: (table, torch.searchsorted(self.keys[table], get_keys(batch, name)).to(self._device))
            for name, table in self._features.items()
        }
        return SparseBatch(batch, self.keys, places)


def _drop_sequences(batch: SampleBatch) -> SampleBatch:
    """Return a batch of the same columns without sequences."""

    def drop(value: Any) -> Any:
        if isinstance(value, Jagged):
            return Jagged(value.values[:0], value.offsets[:1])
        return None if value is None else value[:0]

    values = {name: drop(getattr(batch, name)) for name in _BATCH_FIELDS}
    return replace(batch, context={name: drop(value) for name, value in batch.context.items()}, **values)


class PrefetchedRows:
    """Rows that were pulled earlier, as the source of an embedding collection.

    Attributes:
        grads: For each table, the gradients [N, D] that the collection has pushed; zeros before.
    """

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
        """Store the gradients [N, D] of a table in `grads`; a batch without keys pushes none."""
        if len(keys):
            self.grads[table] = grads
