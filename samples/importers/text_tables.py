"""Reads tables from delimited text or JSON lines, from one file or from the parts in a folder; `text_form` detects the format.

In the functions below, `label` opens every error message, and `types` are the Arrow types of columns whose type is given.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pacsv
import pyarrow.json as pajson

from nonet.errors import DataError
from nonet.samples.importers.text_form import (
    TextForm,
    decode_text,
    detect_text_form,
    is_parquet_file,
    read_bytes,
    split_lines,
)
from nonet.samples.tables import MISSING, FolderColumns, conform, find_files, replace_column, unify_schemas

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

ENDINGS = (
    ".csv",
    ".tsv",
    ".csv.gz",
    ".tsv.gz",
    ".inter",
    ".item",
    ".jsonl",
    ".ndjson",
    ".json",
    ".jsonl.gz",
    ".json.gz",
    ".txt",
    ".dat",
)
"""The endings of text files in a folder. The format is detected from the content and not from the ending."""
# A number with a decimal comma, and one with a comma that may also separate thousands.
_DECIMAL_COMMA = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?\s*$"
_THOUSANDS_COMMA = r"^\s*[+-]?\d{1,3}(,\d{3})?\s*$"
_LEADING_ZERO = r"^[+-]?0\d"  # of a code such as 007, after the point that separates thousands is removed
_MAX_DIGITS = 15  # significant decimal digits that float64 keeps
_JSON_BLOCK_BYTES = 1 << 24  # Arrow infers the types of JSON columns from the first block
_SAMPLE_LINES = 2000  # number of lines of JSON from which a schema or the first rows are read


def list_data_files(folder: Path) -> list[Path]:
    """Return the data files in a folder at any depth, sorted, without hidden files."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
        and (
            path.name.lower().endswith((*ENDINGS, ".parquet"))
            or ("." not in path.name and is_parquet_file(path))
        )
    ]


def is_parquet_table(path: Path) -> bool:
    """Return whether a table is Parquet and not text, by the content of its file, or of the first file of its folder."""
    files = list_data_files(path) if path.is_dir() else [path]
    return any(file.suffix == ".parquet" or (file.is_file() and is_parquet_file(file)) for file in files[:1])


def find_text_files(path: str | os.PathLike[str], label: str) -> list[str]:
    """Return the path itself if it is a file, else the sorted text files of the folder, except _* and .* files."""
    if Path(path).is_dir():
        return find_files(path, label, ENDINGS).files
    return [os.fspath(path)]


def read_text_schema(
    path: str | os.PathLike[str],
    label: str,
    texts: Collection[str] = (),
    missing: tuple[str, ...] = MISSING,
) -> tuple[pa.Schema, TextForm]:
    """Read the schema of a text table from the first block of its first file.

    Args:
        path: A file, or a folder whose files are the parts of one table.
        label: Opens every error message.
        texts: Columns that are read as text.
        missing: Texts that stand for a missing value.

    Returns:
        The schema, and the format of the first file.
    """
    files = find_text_files(path, label)
    form = replace(detect_text_form(files[0], label), missing=missing)
    if form.kind == "json":
        schema = _read_json(files[0], form, label, max_lines=_SAMPLE_LINES).schema
    else:
        schema = _read_first_block(files[0], form, label, {name: pa.string() for name in texts}).schema
    return FolderColumns.from_files(files).extend_schema(schema), form


def read_first_text_rows(
    path: str | os.PathLike[str], label: str, missing: tuple[str, ...] = MISSING
) -> pa.Table:
    """Read the first block, or the first `_SAMPLE_LINES` lines of JSON, of a text table's first file."""
    file = find_text_files(path, label)[0]
    form = replace(detect_text_form(file, label), missing=missing)
    if form.kind == "json":
        return _read_json(file, form, label, max_lines=_SAMPLE_LINES)
    return _read_first_block(file, form, label, {})


def _read_first_block(file: str, form: TextForm, label: str, types: Mapping[str, Any]) -> pa.Table:
    """Read the first block of a delimited file."""
    table = read_delimited(file, form, label, types, first_block=True)
    if may_have_decimal_commas(form):
        [table] = parse_decimal_commas([table], form, types, file, [])
    return table


def read_text(
    path: str | os.PathLike[str],
    label: str,
    texts: Collection[str] = (),
    notes: list[str] | None = None,
    missing: tuple[str, ...] = MISSING,
    numbers: Collection[str] = (),
) -> pa.Table:
    """Read a complete text table.

    Args:
        path: A file, or a folder whose files are the parts of one table.
        label: Opens every error message.
        texts: Columns that are read as text, such as ids, which may have zeros in front.
        notes: Receives a sentence about each decision, such as another encoding.
        missing: Texts that stand for a missing value in columns of numbers.
        numbers: Columns that must be numbers, such as ratings. Their decimal commas are converted even if other texts would be
            kept because they may be codes.

    Raises:
        DataError: A file cannot be read, or the files of a folder are not parts of one table.
    """
    notes = [] if notes is None else notes
    files = find_text_files(path, label)
    forms = [replace(detect_text_form(file, label), missing=missing) for file in files]
    types = {name: pa.string() for name in texts}
    tables = _read_parts(files, forms, label, types, notes, numbers)
    if len(tables) > 1:
        tables = _unify_tables(files, forms, tables, label, types, numbers)
    parts = FolderColumns.from_files(files)
    return pa.concat_tables(
        [parts.add_to_table(table, file) for file, table in zip(files, tables, strict=True)]
    )


def _read_parts(
    files: Sequence[str],
    forms: Sequence[TextForm],
    label: str,
    types: Mapping[str, Any],
    notes: list[str],
    numbers: Collection[str],
) -> list[pa.Table]:
    """Read the parts of a table; whether a comma is a decimal comma follows from all parts in which it separates no columns."""
    tables = [_read_file(file, form, label, types, notes) for file, form in zip(files, forms, strict=True)]
    places = [place for place, form in enumerate(forms) if may_have_decimal_commas(form)]
    kinds: defaultdict[str, set[bool]] = defaultdict(set)  # of each column, whether it is text in a part
    for place in places:
        for field in tables[place].schema:
            kinds[field.name].add(pa.types.is_string(field.type))
    mixed = {name: pa.string() for name, are_texts in kinds.items() if len(are_texts) > 1}
    if mixed:  # A part may have 1.234 and another 1.234,5.
        for place in places:
            tables[place] = _read_file(files[place], forms[place], label, {**types, **mixed}, notes=[])
    if places:
        converted = parse_decimal_commas(
            [tables[place] for place in places],
            forms[places[0]],
            types,
            files[places[0]],
            notes,
            numbers,
        )
        for place, table in zip(places, converted, strict=True):
            tables[place] = table
    return tables


def may_have_decimal_commas(form: TextForm) -> bool:
    """Return whether a file is delimited text in which a comma separates no columns."""
    return form.kind != "json" and form.delimiter != ","


def _read_file(file: str, form: TextForm, label: str, types: Mapping[str, Any], notes: list[str]) -> pa.Table:
    """Read one file of either format; `notes` receives the decisions."""
    if form.kind == "json":
        return _cast_to_text(_read_json(file, form, label, notes), types)
    if not form.has_header:
        notes.append(f"{file} has no line of names; its columns are {form.names[0]} to {form.names[-1]}")
    return read_delimited(file, form, label, types, notes)


def _unify_tables(
    files: Sequence[str],
    forms: Sequence[TextForm],
    tables: list[pa.Table],
    label: str,
    types: Mapping[str, Any],
    numbers: Collection[str],
) -> list[pa.Table]:
    """Return the parts with the same columns and types.

    A column that is a number in one part and text in another is read again as text.

    Raises:
        DataError: The parts have different columns.
    """
    names = tables[0].column_names
    for file, table in zip(files, tables, strict=True):
        if set(table.column_names) != set(names):
            raise DataError(
                f"{label}: {file} has other columns than {files[0]}, so they are no parts of one table; put the "
                f"parts of a table in a "
                "folder of their own"
            )
    mixed = {
        name
        for name in names
        if any(pa.types.is_string(table.schema.field(name).type) for table in tables)
        and not all(pa.types.is_string(table.schema.field(name).type) for table in tables)
    }
    if mixed:
        types = {**types, **dict.fromkeys(mixed, pa.string())}
        # The notes of a second reading would repeat those of the first.
        tables = _read_parts(files, forms, label, types, [], numbers)
    parts = [(file, table.schema, len(table)) for file, table in zip(files, tables, strict=True)]
    schema = unify_schemas(parts, label)
    return [conform(table, schema, file) for file, table in zip(files, tables, strict=True)]


def read_delimited(
    file: str,
    form: TextForm,
    label: str,
    types: Mapping[str, Any],
    notes: list[str] | None = None,
    first_block: bool = False,
) -> pa.Table:
    """Read one delimited file, or only its first block; if it is not valid UTF-8, use another encoding and add a note.

    Raises:
        DataError: The file cannot be read or parsed.
    """
    last_error: BaseException | None = None
    for encoding in form.list_encodings():
        try:
            table = _parse_delimited(file, form, types, encoding, first_block)
            if any(pa.types.is_binary(field.type) for field in table.schema):
                raise pa.ArrowInvalid(
                    "a text is not UTF8"
                )  # Arrow infers bytes for columns without a given type.
        except (UnicodeDecodeError, pa.ArrowInvalid) as error:
            if isinstance(error, pa.ArrowInvalid) and "UTF8" not in str(error):
                reason = _locate_error(error, file, form, types, encoding)
                raise DataError(f"{label} {file}: not a readable CSV: {reason}") from None
            last_error = error
            continue
        except (pa.ArrowException, OSError, EOFError) as error:
            raise DataError(f"{label} {file}: not a readable CSV: {_get_first_line(error)}") from None
        if encoding != "utf-8" and notes is not None:
            notes.append(f"{file} is not UTF-8; it is read as {encoding}")
        return table
    raise DataError(f"{label} {file}: not UTF-8 text: {_get_first_line(last_error)}; save the file as UTF-8")


def _parse_delimited(
    file: str,
    form: TextForm,
    types: Mapping[str, Any],
    encoding: str,
    first_block: bool,
    use_threads: bool = True,
) -> pa.Table:
    """Read a delimited file, or its first block, in one encoding."""
    options = {
        "read_options": pacsv.ReadOptions(
            column_names=None if form.has_header else list(form.names),
            encoding=encoding,
            skip_rows=form.skipped_lines,
            use_threads=use_threads,
        ),
        "parse_options": pacsv.ParseOptions(
            delimiter=form.delimiter, newlines_in_values=not first_block, quote_char='"'
        ),
        "convert_options": pacsv.ConvertOptions(
            column_types=dict(types), strings_can_be_null=False, null_values=["", *form.missing]
        ),
    }
    with read_bytes(file, form) as source:
        if not first_block:
            return pacsv.read_csv(source, **options)
        with pacsv.open_csv(source, **options) as reader:
            first_batches = [batch for batch, _ in zip(reader, range(1), strict=False)]
            return pa.Table.from_batches(first_batches, reader.schema)


def _locate_error(
    error: BaseException, file: str, form: TextForm, types: Mapping[str, Any], encoding: str
) -> str:
    """Return the message of an error with the number of the row, which Arrow knows only if one thread reads the file."""
    try:
        _parse_delimited(file, form, types, encoding, first_block=False, use_threads=False)
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as located_error:
        return _get_first_line(located_error)
    return _get_first_line(error)


def parse_decimal_commas(
    tables: Sequence[pa.Table],
    form: TextForm,
    types: Mapping[str, Any],
    file: str,
    notes: list[str],
    numbers: Collection[str] = (),
) -> list[pa.Table]:
    """Convert columns of texts that are all numbers, some with a decimal comma, to float64.

    A column whose commas may all separate thousands stays text, because `1,234` may be either. So does one whose texts may be
    codes or pairs of integers, see `_find_loss`, unless it is in `numbers`.

    Args:
        tables: The parts of a table; a column is converted in all parts or in none.
        form: Format of the first part.
        types: Columns whose type is given, which are not converted.
        file: The first part, which notes name.
        notes: Receives the names of the columns that were converted, and why others were not.
        numbers: Columns that must be numbers.
    """
    results, converted = list(tables), list[str]()
    where = file if len(tables) == 1 else f"{file} and the other parts"
    for name in tables[0].column_names:
        if name in types or not all(
            table.column_names.count(name) == 1 and pa.types.is_string(table.schema.field(name).type)
            for table in tables
        ):
            continue
        chunks = [chunk for table in tables for chunk in table[name].chunks]
        column = pa.chunked_array(chunks, pa.string())
        is_missing = pc.is_in(column, value_set=pa.array(["", *form.missing]))
        texts = column.filter(pc.invert(is_missing)).drop_null()
        has_comma = pc.any(pc.match_substring(texts, ",")).as_py()
        if not (has_comma and pc.all(pc.match_substring_regex(texts, _DECIMAL_COMMA)).as_py()):
            continue
        if pc.all(pc.match_substring_regex(texts, _THOUSANDS_COMMA)).as_py():
            notes.append(
                f"{where}: column {name} is read as text: {texts[0].as_py()!r} may have a comma of decimals or of thousands; "
                "write numbers with a point"
            )
            continue
        if name not in numbers and (loss := _find_loss(pc.utf8_trim_whitespace(texts).unique())):
            notes.append(
                f"{where}: column {name} is read as text: it looks like numbers with a decimal comma, but {loss}; write "
                "numbers with a point"
            )
            continue
        for place, table in enumerate(results):
            values = table[name]
            is_missing = pc.is_in(values, value_set=pa.array(["", *form.missing]))
            points = pc.if_else(is_missing, pa.scalar(None, pa.string()), _replace_comma(values))
            results[place] = replace_column(table, name, points.cast(pa.float64()))
        converted.append(name)
    if converted:
        notes.append(f"{where}: {', '.join(converted)} is read as numbers with a decimal comma")
    return results


def _replace_comma(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return numbers with a decimal comma as texts with a decimal point, without points that separate thousands."""
    return pc.replace_substring(pc.replace_substring(pc.utf8_trim_whitespace(texts), ".", ""), ",", ".")


def _find_loss(texts: pa.Array | pa.ChunkedArray) -> str:
    """Return a clause with the reason why texts of numbers with a decimal comma may be codes or pairs of integers, or "".

    As numbers, such texts would lose leading zeros, digits, or the difference between `12,5` and `12,50`.

    Args:
        texts: The distinct texts, without blanks around them.
    """
    points = _replace_comma(texts)
    digits = pc.utf8_ltrim(pc.replace_substring_regex(points, r"\D", ""), "0")
    reasons = (
        ("has a leading zero", pc.match_substring_regex(points, _LEADING_ZERO)),
        (f"has more than {_MAX_DIGITS} digits", pc.greater(pc.utf8_length(digits), _MAX_DIGITS)),
    )
    for reason, is_lossy in reasons:
        if (row := pc.index(is_lossy, True).as_py()) >= 0:
            return f"{texts[row].as_py()!r} {reason}"
    values = points.cast(pa.float64()).value_counts()
    repeated = values.field(0).filter(pc.greater(values.field(1), 1))
    if len(repeated):
        first, second = texts.filter(pc.equal(points.cast(pa.float64()), repeated[0])).slice(0, 2).to_pylist()
        return f"{first!r} and {second!r} would be the same number"
    has_comma = pc.match_substring(points, ".")
    decimals = pc.replace_substring_regex(points.filter(has_comma), r"^.*\.", "")
    if len(pc.utf8_length(decimals).unique()) == 1:
        return ""
    if pc.all(has_comma).as_py():
        return f"{texts[0].as_py()!r} and the others may be pairs of integers"
    row = pc.index(pc.and_(has_comma, pc.ends_with(points, "0")), True).as_py()
    return f"{texts[row].as_py()!r} ends with a zero that others lack" if row >= 0 else ""


def _read_json(
    file: str, form: TextForm, label: str, notes: list[str] | None = None, max_lines: int | None = None
) -> pa.Table:
    """Read one JSON object per line; a column that is a number in one line and text in another becomes text.

    Arrow reads the file if it can. Otherwise, for example for mixed types or another encoding, the lines are parsed one by one.

    Raises:
        DataError: The file cannot be read, or a line is no JSON object.
    """
    try:
        with read_bytes(file, form) as source:
            if max_lines is not None:
                first_lines = (line for line, _ in zip(source, range(max_lines), strict=False))
                content = io.BytesIO(b"".join(first_lines))
            else:
                content = source
            table = pajson.read_json(content, read_options=pajson.ReadOptions(block_size=_JSON_BLOCK_BYTES))
            table.validate(full=True)  # Arrow's reader accepts texts that are not UTF-8.
            return table
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    except (OSError, EOFError) as error:
        raise DataError(f"{label} {file}: not readable JSON lines: {_get_first_line(error)}") from None
    rows = []
    with read_bytes(file, form) as source:
        text, encoding = decode_text(source.read())
    for number, line in enumerate(split_lines(text), 1):
        if max_lines is not None and number > max_lines:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{label} {file}: line {number} is no JSON object: {_get_first_line(error)}"
            ) from None
        if not isinstance(row, dict):
            raise DataError(f"{label} {file}: line {number} is no JSON object, which each line must be")
        rows.append(row)
    if encoding != "utf-8" and notes is not None:
        notes.append(f"{file} is not UTF-8; it is read as {encoding}")
    return _make_table(rows)


def _make_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build a table from rows; columns of mixed types become text."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError):
            texts = [
                value if value is None or isinstance(value, str) else json.dumps(value) for value in values
            ]
            columns[name] = pa.array(texts, pa.string())
    return pa.table(columns)


def _cast_to_text(table: pa.Table, types: Mapping[str, Any]) -> pa.Table:
    """Convert those columns of `types` that are integers to text, as in delimited files; float ids are rejected later."""
    for name in types:
        if name in table.column_names and pa.types.is_integer(table.schema.field(name).type):
            column_index = table.column_names.index(name)
            table = table.set_column(column_index, name, table[name].cast(pa.string()))
    return table


def _get_first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
