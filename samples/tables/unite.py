"""Unifies the schemas of a table's files: harmless differences between writers are reconciled, others are errors.

Files of one table differ in types for harmless reasons: a part without rows has whatever type its writer guessed, pandas
writes categories as dictionaries, one writer uses large_string and another string, and a later day needs a wider number. A
column that a file lacks is missing in its rows. Any other difference is an error that names both files.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from nonet.errors import DataError


def unify_schemas(files: Iterable[tuple[str, pa.Schema, int]], label: str) -> pa.Schema:
    """Return the columns that all files together have, in the order in which they first occur.

    Args:
        files: Path, schema and row count of each file. The types in a file without rows are used only where no file with rows has
            the column.
        label: Prefix of the error message.

    Raises:
        DataError: If two files have a column in types without a common type; the message names both files.
    """
    all_files = list(files)
    # By name of the column: its type so far, the file that it is from, and whether a file with rows has the column.
    columns: dict[str, tuple[pa.DataType, str, bool]] = {}
    for file, schema, rows in all_files:
        for field in schema:
            kind = simplify_type(field.type) if rows or not pa.types.is_null(field.type) else pa.null()
            if field.name not in columns:
                columns[field.name] = kind, file, rows > 0
                continue
            earlier_type, earlier_file, earlier_has_rows = columns[field.name]
            if not rows and earlier_has_rows:
                continue
            if rows and not earlier_has_rows:
                columns[field.name] = kind, file, True
                continue
            unified_type = _find_common_type(earlier_type, kind)
            if unified_type is None and not rows:
                continue
            if unified_type is None:
                raise DataError(
                    f"{label}: its {len(all_files)} files have unlike columns: {file}: column {field.name!r} is {kind}, "
                    f"in {earlier_file} it is {earlier_type}; write it alike in all files"
                )
            columns[field.name] = unified_type, earlier_file, earlier_has_rows or rows > 0
    return pa.schema([(name, kind) for name, (kind, _, _) in columns.items()])


def simplify_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain form of a type, which has the same values: without dictionaries, large offsets and views."""
    if pa.types.is_dictionary(kind):
        return simplify_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(simplify_type(kind.value_type))
    return kind


def conform(table: pa.Table, schema: pa.Schema, label: str) -> pa.Table:
    """Return the table with exactly the columns and types of `schema`; a column that it lacks is null in every row.

    Raises:
        DataError: If a value does not fit the type. The message starts with `label`.
    """
    arrays = []
    for field in schema:
        if field.name not in table.column_names:
            arrays.append(pa.chunked_array([pa.nulls(len(table), field.type)]))
            continue
        column = table[field.name]
        try:
            arrays.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise DataError(
                f"{label}: column {field.name!r} is {column.type} and does not fit {field.type}, the type of the other files: "
                f"{str(error).splitlines()[0]}"
            ) from None
    return pa.Table.from_arrays(arrays, schema=schema)


def _find_common_type(first_type: pa.DataType, second_type: pa.DataType) -> pa.DataType | None:
    """Return the type that can hold the values of both types, or None."""
    if first_type == second_type:
        return first_type
    if pa.uint64() in (first_type, second_type) and (
        pa.types.is_signed_integer(first_type) or pa.types.is_signed_integer(second_type)
    ):
        return None  # Arrow would choose int64, which cannot hold ids above 2^63 - 1.
    try:
        schemas = [pa.schema([("c", kind)]) for kind in (first_type, second_type)]
        return simplify_type(pa.unify_schemas(schemas, promote_options="permissive").field("c").type)
    except pa.ArrowException:
        return None
