"""Embedding modules over a sparse source: one row per position, or rows pooled per bag.

    bags = EmbeddingBagCollection({"item": TableConfig(TableSpec(16), ("item", "history"))}, world)
    pooled = bags({"item": ids_B, "history": Jagged(values, offsets)})      # {"item": [B, 16], "history": [B, 16]}
    loss(pooled).backward()
    bags.push(step)                                                         # one optimizer step on these rows

A forward pass reads each table once, for the ids of all its features together; the table or the world finds equal
ids. Gradients are those of the pulled rows, one per position, and go to the source by `push`: there is no dense
parameter, so `parameters()` is empty. Rows are created only in training mode with gradients enabled; `eval()` and
`no_grad` only read.

`EmbeddingBagCollection.pull` looks rows up and is excluded from `torch.compile`; `pool` and what follows are plain
tensor operations that compile as a whole (`fullgraph=True`). Compiled together, the only graph break is the
look-up.
"""

# Shapes: B bags, N ids of all features of a table, D width, F features of a table.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional

from nonet.embedding.modules.features import read_jagged_keys
from nonet.embedding.tables import TableSpec
from nonet.errors import ConfigError, DataError

_MAX_PENDING = (
    1024  # Forward passes of a table without a push; more of them are taken for an error of the caller.
)
_F = TypeVar("_F", bound=Callable[..., Any])


def _disable_compile(function: _F) -> _F:
    """Exclude a function from `torch.compile`: a look-up changes tables, which a traced graph would not see.

    `torch.compiler.disable` would import `torch._dynamo` here, two seconds in each process, compiled or not.
    """
    excluded_function = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (excluded_function if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class TableConfig:
    """A table of a collection.

    Attributes:
        spec: The table's spec.
        features: The features whose ids are keys of the table.
        combiner: How the rows of a bag are pooled: "sum" or "mean".
        text: Whether ids are text, which is hashed to keys.
    """

    spec: TableSpec
    features: tuple[str, ...]
    combiner: str = "sum"
    text: bool = False


class RowSource(Protocol):
    """A source of rows and sink of gradients: `ShardedTables`, `LocalRowSource` or `ReaderRowSource`."""

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """Read the rows [N, D] of keys [N]; `train` creates absent ones."""
        ...

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Apply one optimizer step with the gradients [N, D] of keys [N]."""
        ...


class LocalRowSource:
    """A source over sparse tables of this process, by name."""

    def __init__(self, tables: Mapping[str, Any]):
        self.tables = dict(tables)

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """Read the rows [N, D] of keys [N]; `train` creates absent ones."""
        return self.tables[table].lookup(keys, train=train)

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Apply one optimizer step with the gradients [N, D] of keys [N]."""
        self.tables[table].apply(keys, grads, step, lr)


class ReaderRowSource:
    """A read-only source over a `SparseReader`, for rollout, evaluation and serving."""

    def __init__(self, reader: Any):
        self.reader = reader

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """Read the rows [N, D] of keys [N]; in training mode raise ConfigError."""
        if train:
            raise ConfigError(f"table {table!r} is behind a reader, which makes no rows; call eval() first")
        return self.reader.read_rows(table, keys)

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Raise ConfigError, because a reader takes no gradients."""
        raise ConfigError(f"table {table!r} is behind a reader, which takes no gradients")


@dataclass(slots=True)
class PulledRows:
    """The rows of a batch by table.

    Attributes:
        rows: The rows [N, D] of all features of the table, one feature after another.
        offsets: The first row of each bag of each feature, and at the end N: int64 [F * B + 1].
        single: Tables of which every bag has exactly one row.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, Tensor] = field(default_factory=dict)
    single: set[str] = field(default_factory=set)


class _SparseCollection(nn.Module):
    """The common part of both collections: reading rows and sending gradients back."""

    def __init__(self, tables: Mapping[str, TableConfig], source: RowSource):
        super().__init__()
        self.tables, self.source = dict(tables), source
        self.features: dict[str, str] = {}
        for table, config in tables.items():
            for name in config.features:
                if other := self.features.get(name):
                    raise ConfigError(
                        f"feature {name!r} is listed by the tables {other!r} and {table!r}; a feature reads one table, "
                        "so name one of the two uses differently"
                    )
                self.features[name] = table
        self.dims = {name: tables[table].spec.dim for name, table in self.features.items()}
        # By table: the keys [N] and rows [N, D] of every forward pass since the last push.
        self._pending: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in tables}

    @_disable_compile
    def push(self, step: int, lr: float | Mapping[str, float] | None = None) -> None:
        """Send the gradients of every forward pass since the last push, as one optimizer step per table.

        Rows that no loss depends on are not changed. Every rank of a sparse world calls it, with or without
        gradients.

        Args:
            step: The step.
            lr: The learning rate, for all tables or by table; None: each table's own.
        """
        for name, config in self.tables.items():
            # Rows without a gradient are those that no loss depends on.
            keys_and_grads = [
                (keys, rows.grad) for keys, rows in self._pending[name] if rows.grad is not None
            ]
            self._pending[name] = []
            keys = torch.cat([torch.empty(0, dtype=torch.int64), *(keys for keys, _ in keys_and_grads)])
            grads = torch.cat([torch.empty(0, config.spec.dim), *(grad.cpu() for _, grad in keys_and_grads)])
            self.source.push(name, keys, grads, step, lr.get(name) if isinstance(lr, Mapping) else lr)

    def list_keys(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """List by table the keys [N] that a forward pass of this batch reads, in that order."""
        return {
            table: torch.cat([ids for ids, _ in self._read_features(batch, table, config).values()])
            for table, config in self.tables.items()
        }

    def drop_pending(self) -> None:
        """Discard the forward passes that were not pushed, for example after a skipped batch."""
        for keys_and_rows in self._pending.values():
            keys_and_rows.clear()

    def _pull_rows(
        self, batch: Mapping[str, Any], device: Any
    ) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Pull each table once; yield (table, rows [N, D] of all its features, offsets [B + 1] of each)."""
        creates_rows = self.training and torch.is_grad_enabled()
        features_by_table = {
            table: self._read_features(batch, table, config) for table, config in self.tables.items()
        }
        for table, features in features_by_table.items():
            keys = torch.cat([ids for ids, _ in features.values()])
            rows = self.source.pull(table, keys, train=creates_rows).to(device)
            if creates_rows:
                rows = rows.detach().requires_grad_()
                self._add_pending(table, keys, rows)
            yield table, rows, {name: offsets for name, (_, offsets) in features.items()}

    def _add_pending(self, table: str, keys: Tensor, rows: Tensor) -> None:
        """Store the keys and rows of a forward pass for the next `push`; raise ConfigError if too many are stored."""
        if len(self._pending[table]) >= _MAX_PENDING:
            raise ConfigError(
                f"{_MAX_PENDING} forwards in training mode and no push: call push(step) after backward(), "
                "drop_pending() to discard them, or eval() to read"
            )
        self._pending[table].append((keys, rows))

    def _read_features(
        self, batch: Mapping[str, Any], table: str, config: TableConfig
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (keys [N], offsets [B + 1]) of each of the table's features in a batch, by feature."""
        for name in config.features:
            if name not in batch:
                raise DataError(
                    f"the batch has no feature {name!r}, which table {table!r} reads; it has: "
                    f"{', '.join(batch) or 'nothing'}"
                )
        return {name: read_jagged_keys(name, batch[name], text=config.text) for name in config.features}


class EmbeddingBagCollection(_SparseCollection):
    """An embedding module that returns the sum or mean of the rows of each bag; an empty bag is zeros.

    Args:
        tables: The tables.
        source: The source of rows.
        sequences: By feature whose rows are not pooled, the number L of the newest (last) ids of a bag whose rows are returned.
    """

    def __init__(
        self,
        tables: Mapping[str, TableConfig],
        source: RowSource,
        sequences: Mapping[str, int] | None = None,
    ):
        super().__init__(tables, source)
        self.sequences = dict(sequences or {})

    def forward(self, batch: Mapping[str, Any], device: Any = "cpu") -> dict[str, Tensor]:
        """Return rows [B, D] by feature, for ids as int64 [B] or Jagged (or text, if configured).

        A sequence has rows [B, L, D], oldest first and zeros after the last, and under NAME_mask [B, L] ones where rows are.
        """
        return self.pool(self.pull(batch, device))

    @_disable_compile
    def pull(self, batch: Mapping[str, Any], device: Any = "cpu") -> PulledRows:
        """Read the rows of every feature.

        Raises:
            DataError: If the features have different numbers of bags.
        """
        pulled, bag_counts = PulledRows(), {}
        for table, rows, features in self._pull_rows(batch, device):
            bag_counts |= {name: len(offsets) - 1 for name, offsets in features.items()}
            offset_parts, row_count = [torch.zeros(1, dtype=torch.int64)], 0
            for offsets in features.values():
                offset_parts.append(offsets[1:] + row_count)
                row_count += int(offsets[-1])
            all_offsets = torch.cat(offset_parts)
            if len(rows) == len(all_offsets) - 1 and bool((all_offsets.diff() == 1).all()):
                pulled.single.add(table)
            pulled.rows[table], pulled.offsets[table] = rows, all_offsets.to(device)
        _check_bags(bag_counts)
        return pulled

    def pool(self, pulled: PulledRows) -> dict[str, Tensor]:
        """Pool the result of `pull` to rows [B, D] by feature, with plain tensor operations."""
        rows_by_feature: dict[str, Tensor] = {}
        for name, config in self.tables.items():
            pooled = pulled.rows[name]
            if name not in pulled.single:
                pooled = pool(pooled, pulled.offsets[name], config.combiner)
            rows_by_feature |= zip(config.features, pooled.chunk(len(config.features)), strict=True)
            n_bags = (len(pulled.offsets[name]) - 1) // len(config.features)
            for index, feature in enumerate(config.features):
                if (length := self.sequences.get(feature)) is not None:
                    offsets = pulled.offsets[name][index * n_bags : (index + 1) * n_bags + 1]
                    rows_by_feature |= pad_sequences(feature, pulled.rows[name], offsets, length)
        return rows_by_feature


def pool(rows_ND: Tensor, offsets_B1: Tensor, combiner: str) -> Tensor:
    """Compute the sum or mean [B, D] of each bag's rows in position order; zeros for an empty bag."""
    if not len(rows_ND):  # torch's kernel rejects a weight without rows.
        return rows_ND.new_zeros(len(offsets_B1) - 1, rows_ND.shape[1]) + rows_ND.sum()
    indices_N = torch.arange(len(rows_ND), device=rows_ND.device)
    return functional.embedding_bag(indices_N, rows_ND, offsets_B1, mode=combiner, include_last_offset=True)


def pad_sequences(name: str, rows_ND: Tensor, offsets_B1: Tensor, length: int) -> dict[str, Tensor]:
    """Return the rows [B, L, D] of the newest ids of each bag by the name of the feature, and their mask [B, L] by NAME_mask."""
    end_B1 = offsets_B1[1:, None]
    start_B1 = torch.maximum(offsets_B1[:-1, None], end_B1 - length)
    index_BL = start_B1 + torch.arange(length, device=rows_ND.device)
    mask_BL = index_BL < end_B1
    if not len(rows_ND):
        rows_BLD = rows_ND.new_zeros(*mask_BL.shape, rows_ND.shape[1]) + rows_ND.sum()
    else:
        rows_BLD = rows_ND[torch.where(mask_BL, index_BL, 0)] * mask_BL[..., None]
    return {name: rows_BLD, f"{name}_mask": mask_BL.to(rows_ND.dtype)}


def _check_bags(bag_counts: Mapping[str, int]) -> None:
    """Raise DataError unless all features of a batch have the same number of bags."""
    if len(set(bag_counts.values())) > 1:
        first, first_count = next(iter(bag_counts.items()))
        other, other_count = next((name, n) for name, n in bag_counts.items() if n != first_count)
        raise DataError(
            f"feature {other!r} has {other_count} bags and feature {first!r} has {first_count}; "
            "all features of a batch are of the same rows"
        )
