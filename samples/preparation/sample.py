"""Reads the part of large data that a driver looks at: footers, one row group, and the columns of the items."""

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
    """Read checked interactions of the first row group, and the columns of the items as `build_sequences` gives them.

    Args:
        interactions: Path of the interactions.
        items: Path of the items; None if there are none.
        columns: Column names, or the whole table format.
        conditions: Conditions that are evaluated on the sample; None entries are ignored.

    Raises:
        DataError: If files are not Parquet or lack columns, if rows of the sample are invalid, or if the ids of both
            tables have
            different types.
        ConfigError: If a condition cannot be computed.
    """
    log = EventLog(interactions, columns, slice_rows=1)
    given = pa.schema([]) if items is None else read_parquet_schema(items, "items")
    check_columns(columns, [*log.names, *given.names])
    table, _ = log.read(log.slices[0], log.names)
    select_carried_columns(table.schema, None)
    for condition in conditions:
        if condition:
            match_rows(condition, table, name="a condition of the data")
    if items is None:
        return table, pa.schema([("item_id", table.schema.field("item_id").type)])
    there = _derive_item_schema(given, columns, items)
    kinds = [schema.field("item_id").type for schema in (table.schema, there)]
    if pa.types.is_integer(kinds[0]) != pa.types.is_integer(kinds[1]):
        raise DataError(
            f"item_id is {kinds[0]} in the interactions and {kinds[1]} in the items table; they can never match. "
            "Write both as text or both as whole numbers."
        )
    return table, there


def _derive_item_schema(given: pa.Schema, columns: Columns, items: str) -> pa.Schema:
    """Return the schema of the items as sequences hold them, found by checking a table of one empty row."""
    one = pa.Table.from_arrays([_make_example(field.type) for field in given], schema=given)
    there = check_items(one, columns, f"items {items}").schema
    always = [("item", pa.int64()), ("title", pa.string()), ("categories", pa.list_(pa.string()))]
    more = [*always, ("events", pa.int64())]
    fields = [pa.field(name, kind) for name, kind in more if name not in there.names]
    return pa.schema([*there, *fields])


def _make_example(kind: pa.DataType) -> pa.Array:
    """Return an array of one value that is not null if the type can hold ids, and null otherwise."""
    if pa.types.is_dictionary(kind):
        return pa.array(["0"]).dictionary_encode().cast(kind)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return pa.array([0], kind)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return pa.array(["0"], kind) if text else pa.nulls(1, kind)
