"""Reads the small part of a large data set that the driver checks: footers, one row group, and the items' schema."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.preparation.log import EventLog
from nonet.samples.sequences import select_carried_columns
from nonet.samples.tables import Columns, check_columns, check_items, match_rows, read_parquet_schema


def read_sample(
    interactions: str, items: str | None, columns: Columns, conditions: Sequence[str | None]
) -> tuple[pa.Table, pa.Schema]:
    """Read and check the first row group of the interactions, and return it with the schema that `build_sequences` gives items.

    Args:
        interactions: Path of the interactions.
        items: Path of the items; None if there are none.
        columns: Names of the columns, or the complete table format.
        conditions: Conditions that are evaluated on the sample to check them; None entries are ignored.

    Raises:
        DataError: If files are not Parquet or lack columns, if rows of the sample are invalid, or if the item ids of
            the two tables have different types.
        ConfigError: If a condition cannot be computed.
    """
    log = EventLog(interactions, columns, slice_rows=1)
    file_schema = pa.schema([]) if items is None else read_parquet_schema(items, "items")
    check_columns(columns, [*log.names, *file_schema.names])
    table, _ = log.read(log.slices[0], log.names)
    select_carried_columns(table.schema, None)
    for condition in conditions:
        if condition:
            match_rows(condition, table, name="a condition of the data")
    if items is None:
        return table, pa.schema([("item_id", table.schema.field("item_id").type)])
    item_schema = _derive_item_schema(file_schema, columns, items)
    kinds = [schema.field("item_id").type for schema in (table.schema, item_schema)]
    if pa.types.is_integer(kinds[0]) != pa.types.is_integer(kinds[1]):
        raise DataError(
            f"item_id is {kinds[0]} in the interactions and {kinds[1]} in the items table; they can never match. "
            "Write both as text or both as whole numbers."
        )
    return table, item_schema


def _derive_item_schema(given: pa.Schema, columns: Columns, items: str) -> pa.Schema:
    """Return the schema that the items table has after `check_items` and in sequences, computed from a table of one row."""
    example = pa.Table.from_arrays([_make_example(field.type) for field in given], schema=given)
    checked = check_items(example, columns, f"items {items}").schema
    always = [("item", pa.int64()), ("title", pa.string()), ("categories", pa.list_(pa.string()))]
    defaults = [*always, ("events", pa.int64())]
    fields = [pa.field(name, kind) for name, kind in defaults if name not in checked.names]
    return pa.schema([*checked, *fields])


def _make_example(kind: pa.DataType) -> pa.Array:
    """Return an array of one element: an id if the type can represent ids, and null otherwise."""
    if pa.types.is_dictionary(kind):
        return pa.array(["0"]).dictionary_encode().cast(kind)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return pa.array([0], kind)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return pa.array(["0"], kind) if text else pa.nulls(1, kind)
