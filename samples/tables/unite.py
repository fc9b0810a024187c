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
    """Return the columns that all files together have, in the order in which they are first seen.

    Args:
        files: name, schema and rows of each file. A file without rows has no say in types that another file knows.
        label: opens the error's message.

    Raises:
        DataError: two files hold a column in types that cannot be united; it names both.
    """
    every = list(files)
    kinds: dict[str, tuple[pa.DataType, str, bool]] = {}
    for file, schema, rows in every:
        for field in schema:
            kind = simplify_type(field.type) if rows or not pa.types.is_null(field.type) else pa.null()
            if field.name not in kinds:
                kinds[field.name] = kind, file, rows > 0
                continue
            known, first, had_rows = kinds[field.name]
            if not rows and had_rows:
                continue
            if rows and not had_rows:
                kinds[field.name] = kind, file, True
                continue
            united = _unify_types(known, kind)
            if united is None and not rows:
                continue
            if united is None:
                raise DataError(
                    f"{label}: its {len(every)} files have unlike columns: {file}: column {field.name!r} is {kind}, in {first} "
                    f"it is {known}; write it alike in all files"
                )
            kinds[field.name] = united, first, had_rows or rows > 0
    return pa.schema([(name, kind) for name, (kind, _, _) in kinds.items()])


def simplify_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without what only says how it is stored: dictionaries, large offsets, views."""
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
    """Return the table with exactly these columns and types; a column that it lacks is missing in every row.

    Raises:
        DataError: a value does not fit the type; `label` opens the message.
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


def _unify_types(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both types, or None."""
    if one == other:
        return one
    if pa.uint64() in (one, other) and (pa.types.is_signed_integer(one) or pa.types.is_signed_integer(other)):
        return None  # Arrow would say int64, which does not hold ids above 2^63
    try:
        pair = [pa.schema([("c", kind)]) for kind in (one, other)]
        return simplify_type(pa.unify_schemas(pair, promote_options="permissive").field("c").type)
    except pa.ArrowException:
        return None
