"""Semantic ids from a file of the user: a JSON object or a Parquet table, put in the order of the items.

JSON: {item id: [codes...]}, the form in which LETTER, TIGER's reimplementations and UniGenRec publish theirs. Parquet: item_id
and l0, l1, ... Items of the file that the catalogue lacks are ignored; items without an id are an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.addresses import fetch_folder, is_address
from nonet.errors import DataError
from nonet.models.tokenizer.kinds import TokenisedItems, TokenizeRequest
from nonet.models.tokenizer.semantic_ids import add_collision_level, check_known

_MAX_CODES = 1 << 20  # Larger numbers are probably item numbers, not codes.

# Shapes: I items, L levels.


def encode_items(request: TokenizeRequest, options: Mapping[str, Any]) -> TokenisedItems:
    """Return the ids of the file; if items share an id, a collision level is added to all."""
    codes_IL, sizes = read_sids(_locate(options, request.folder), request.items["item_id"].to_pylist())
    return check_known(request, add_collision_level(codes_IL, sizes, always=False))


def check_file(items: pa.Table, options: Mapping[str, Any], folder: Path) -> None:
    """Raise DataError if the file does not exist or lacks an item; it is not read if `items` has no rows."""
    if len(items):
        read_sids(_locate(options, folder), items["item_id"].to_pylist())


def resolve_path(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options with the absolute path of the file."""
    path = options["path"]
    return {**options, "path": path if is_address(path) else str(folder / path)}


def _locate(options: Mapping[str, Any], folder: Path) -> Path:
    """Return the path of the file on this machine; a file at an address is fetched."""
    return folder / fetch_folder(options["path"], "tokenizer.path")


def read_sids(path: Path, item_ids: list[Any]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the codes [I, L] int32 of these items, in their order, and the number of codes K of each level (largest code + 1).

    Args:
        path: The file.
        item_ids: Ids of the items.

    Raises:
        DataError: The file cannot be read, lacks items, or has invalid ids.
    """
    if not path.is_file():
        raise DataError(f"tokenizer.path: {path} does not exist. It is relative to the scenario.")
    table = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
    missing = [item for item in item_ids if str(item) not in table]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(item_ids)} items have no semantic id, first {_format_items(missing)}. "
            "Add them, or drop these items with data.keep or data.where."
        )
    rows = [table[str(item)] for item in item_ids]
    levels = len(rows[0])
    _require_none(
        path, "a semantic id of another length than the first", item_ids, (len(row) != levels for row in rows)
    )
    _require_none(
        path,
        "a code that is not a whole number from 0 to 1,048,575",
        item_ids,
        (not _are_codes(row) for row in rows),
    )
    if not levels:
        raise DataError(f"{path}: the semantic ids are empty; each needs at least one code.")
    codes_IL = np.array(rows, np.int32)
    return codes_IL, tuple(int(k) + 1 for k in codes_IL.max(0))


def _read_json(path: Path) -> dict[str, list[Any]]:
    """Read semantic ids by item id from a JSON file."""
    try:
        table = json.loads(path.read_bytes())  # with or without a byte order mark
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: not JSON ({error}). It must be {{item id: [codes...]}}.") from None
    if not isinstance(table, dict) or not all(isinstance(value, list) for value in table.values()):
        raise DataError(f"{path}: must be one JSON object, {{item id: [codes...]}}.")
    return table


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    """Read semantic ids by item id from a Parquet file."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file ({str(error).splitlines()[0]}).") from None
    levels = [f"l{level}" for level in range(len(table.column_names)) if f"l{level}" in table.column_names]
    if "item_id" not in table.column_names or levels != [f"l{i}" for i in range(len(levels))] or not levels:
        raise DataError(f"{path}: has columns {', '.join(table.column_names)}; it needs item_id, l0, l1, ...")
    rows = zip(*(table[level].to_pylist() for level in levels), strict=True)
    return {str(item): list(row) for item, row in zip(table["item_id"].to_pylist(), rows, strict=True)}


def _are_codes(values: list[Any]) -> bool:
    """Return whether all values are whole numbers that can be codes."""
    return all(
        isinstance(code, int) and not isinstance(code, bool) and 0 <= code < _MAX_CODES for code in values
    )


def _require_none(path: Path, problem: str, item_ids: list[Any], flags: Iterable[bool]) -> None:
    """Raise DataError, which names the `problem`, if it is flagged for an item."""
    bad_items = [item for item, flag in zip(item_ids, flags, strict=True) if flag]
    if bad_items:
        raise DataError(
            f"{path}: {len(bad_items)} of {len(item_ids)} items have {problem}, "
            f"first {_format_items(bad_items)}. Correct the file."
        )


def _format_items(items: list[Any]) -> str:
    """Return the first five items as text."""
    return ", ".join(map(str, items[:5]))
