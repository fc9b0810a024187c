"""Reads the small part of a large data set that the driver checks: footers, one row group, and the items' schema."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.preparation.changes import LogChanges
from nonet.samples.preparation.log import EventLog
from nonet.samples.sequences import select_carried_columns
from nonet.samples.tables import (
    Columns,
    check_columns,
    check_items,
    count_rows,
    list_id_names,
    match_rows,
    read_parquet_schema,
    to_table_format,
)
from nonet.samples.tokenised import add_vector_fields


def read_sample(
    interactions: str,
    items: str | None,
    columns: Columns,
    conditions: Mapping[str, str | None],
    changes: LogChanges | None = None,
    vectors: Mapping[str, str] | None = None,
) -> tuple[pa.Table, pa.Schema]:
    """Read and check the first row group of the interactions, and derive the schema of the items.

    Args:
        interactions: Path of the interactions.
        items: Path of the items; None if there are none.
        columns: Names of the columns, or the complete table format.
        conditions: Conditions that are evaluated on the sample to check them, by their keys; None entries are ignored.
        changes: Labels and compression of the log; None for none.
        vectors: Path of the file of each column of vectors that the items get, by name.

    Returns:
        The rows, and the schema of the items table that `build_sequences` would return.

    Raises:
        DataError: If files are not Parquet or lack columns, if rows of the sample are invalid, or if the item ids of
            the two tables have different types.
        ConfigError: If a condition cannot be computed.
    """
    log = EventLog(interactions, columns, slice_rows=1)  # a slice has at least one row group
    file_schema = pa.schema([]) if items is None else read_parquet_schema(items, "items")
    check_columns(columns, [*log.names, *file_schema.names])
    table, _ = log.read(log.slices[0], log.names)
    example = None if items is None else _make_item_example(file_schema, columns, items)
    table = table if changes is None else changes.apply_to_sample(table, example, to_table_format(columns))
    select_carried_columns(table.schema, None)
    for key, condition in conditions.items():
        if condition:
            match_rows(condition, table, name=key)
    if example is None:
        return table, pa.schema([("item_id", table.schema.field("item_id").type)])
    item_schema = _derive_item_schema(example)
    if vectors and items is not None:
        item_schema = add_vector_fields(
            item_schema, vectors, count_rows(items, "items"), list_id_names(columns)
        )
    event_type, item_type = (schema.field("item_id").type for schema in (table.schema, item_schema))
    if pa.types.is_integer(event_type) != pa.types.is_integer(item_type):
        raise DataError(
            f"item_id is {event_type} in the interactions and {item_type} in the items table; they can never match. "
            "Write both as text or both as whole numbers."
        )
    return table, item_schema


def _make_item_example(file_schema: pa.Schema, columns: Columns, items: str) -> pa.Table:
    """Return a table of one checked item."""
    example = pa.Table.from_arrays([_make_example(field.type) for field in file_schema], schema=file_schema)
    return check_items(example, columns, f"items {items}")


def _derive_item_schema(example: pa.Table) -> pa.Schema:
    """Return the schema of the items table after `make_item_table`, from a table of one checked item."""
    checked = example.schema
    added = [
        ("item", pa.int64()),
        ("title", pa.string()),
        ("categories", pa.list_(pa.string())),
        ("events", pa.int64()),
    ]
    fields = [pa.field(name, type_) for name, type_ in added if name not in checked.names]
    return pa.schema([*checked, *fields])


def _make_example(type_: pa.DataType) -> pa.Array:
    """Return an array of one element: an id if the type can represent ids, and null otherwise."""
    if pa.types.is_dictionary(type_):
        return pa.array(["0"]).dictionary_encode().cast(type_)
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return pa.array([0], type_)
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    return pa.array(["0"], type_) if is_text else pa.nulls(1, type_)
