"""Tables of edges (`data.graph.<name>.table`): checked, with ids replaced by indices."""

# Shapes: E edges, n nodes.

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError
from nonet.samples.batches.graphs.adjacency import WEIGHT_1, Edges
from nonet.samples.batches.graphs.options import EDGE_COLUMNS, Graph
from nonet.samples.tables import convert_to_seconds, read_parquet
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them
_SHOWN_IDS = 3


def read_edges(name: str, options: Graph, ids: dict[str, np.ndarray] | None) -> Edges:
    """Read the table of edges of a graph.

    Args:
        name: Name of the graph.
        options: Its options.
        ids: The ids of the items and of the users of the log, by kind; None to check the table without its ids.

    Returns:
        The edges; without `ids`, none.

    Raises:
        DataError: The table cannot be read, lacks a column, has wrong values, or has ids that the log lacks.
    """
    label = f"data.graph.{name}.table"
    table = read_parquet(str(options.table), label)
    columns = {column: options.columns.get(column, column) for column in EDGE_COLUMNS}
    for column, own_name in columns.items():
        if own_name not in table.column_names and (column != "weight" or column in options.columns):
            raise DataError(
                f"{label}: {options.table} has no column {own_name!r}; it has {join_names(table.column_names)}."
                f"{suggest_sentence(own_name, table.column_names)} Name it: "
                f"data.graph.{name}.columns: {{{column}: NAME}}"
            )
    for own_name in columns.values():
        if own_name in table.column_names and (nulls := table[own_name].null_count):
            raise DataError(
                f"{label}: column {own_name!r} lacks {nulls} of {len(table)} values; remove these rows"
            )
    if not len(table):
        raise DataError(f"{label}: {options.table} has no edges; add some, or remove the graph")
    time, weight = (
        _read_times(table[columns["time"]], columns["time"], label),
        _read_weights(table, columns, label),
    )
    if ids is None:
        return Edges(*(np.empty(0, np.int64) for _ in EDGE_COLUMNS))
    source, target = (
        _find_indices(table[columns[column]], ids[kind])
        for column, kind in zip(EDGE_COLUMNS, options.kinds, strict=False)
    )
    is_known = (source >= 0) & (target >= 0)
    if not is_known.all():
        _check_unknown(table, options, label, {columns["source"]: source, columns["target"]: target})
    return Edges(source, target, time, weight).select(is_known)


def _check_unknown(
    table: pa.Table, options: Graph, label: str, index_by_column: dict[str, np.ndarray]
) -> None:
    """Raise DataError for edges with unknown ids, unless they are to be dropped and others are left."""
    for (column, index), kind in zip(index_by_column.items(), options.kinds, strict=True):
        unknown = np.flatnonzero(index < 0)
        if len(unknown) and (options.unknown_ids == "refuse" or len(unknown) == len(table)):
            shown = ", ".join(repr(table[column][int(row)].as_py()) for row in unknown[:_SHOWN_IDS])
            advice = "" if len(unknown) == len(table) else ", or set unknown_ids: drop"
            raise DataError(
                f"{label}: {len(unknown)} of {len(table)} edges have a {column} that is no {kind} of the log, such as {shown}; "
                f"remove them{advice}"
            )
    if not np.logical_and.reduce([index >= 0 for index in index_by_column.values()]).any():
        raise DataError(
            f"{label}: no edge leads from a known {options.kinds[0]} to a known {options.kinds[1]}"
        )


def _read_times(column: pa.ChunkedArray, name: str, label: str) -> np.ndarray:
    """Return the times of edges as unix seconds [E]."""
    try:
        return convert_to_seconds(column, name)[0]
    except (TypeError, ValueError) as error:
        raise DataError(f"{label}: column {name!r} has no times: {error}") from None


def _read_weights(table: pa.Table, columns: dict[str, str], label: str) -> np.ndarray:
    """Return the weights of edges as whole numbers [E], of which the largest is `WEIGHT_1`."""
    if columns["weight"] not in table.column_names:
        return np.full(len(table), WEIGHT_1, np.int64)
    try:
        weight = table[columns["weight"]].cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        raise DataError(f"{label}: column {columns['weight']!r} has no numbers") from None
    if not (np.isfinite(weight) & (weight > 0)).all():
        raise DataError(
            f"{label}: column {columns['weight']!r} has weights from {weight.min():g} to {weight.max():g}; they must be above 0"
        )
    return np.maximum(1, np.rint(weight / weight.max() * WEIGHT_1)).astype(np.int64)


def _find_indices(column: pa.ChunkedArray, ids: np.ndarray) -> np.ndarray:
    """Return the index of each id [E] among ids [n]; -1 for an unknown one. The text "42" and the integer 42 are the same id."""
    known = pa.array(ids.tolist()).cast(pa.string())
    index = pc.index_in(column.cast(pa.string()), value_set=known)
    return index.fill_null(-1).combine_chunks().to_numpy(zero_copy_only=False).astype(np.int64)
