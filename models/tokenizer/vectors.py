"""Item vectors that the tokenizer clusters: from item columns, co-occurrence, text encoders, or a file of the user.

Text and list columns are factored by an SVD of their TF-IDF, co-occurrence by an SVD of its PPMI (`sparse_matrix.py`). The
vectors of every source are centred, scaled to mean square norm 1 and multiplied by the weight of the source, then concatenated.
So weights are comparable whatever the widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from nonet.errors import ConfigError, DataError
from nonet.models.tokenizer.signals import has_words, is_vector_type, split_words
from nonet.models.tokenizer.sparse_matrix import compute_ppmi, compute_svd, compute_tfidf
from nonet.models.tokenizer.text_sources import format_encoder, join_texts, list_encoders
from nonet.samples.sequences import Sequences
from nonet.suggest import suggest_sentence

pc: Any = pyarrow.compute  # Its functions are created at import time, so type checkers do not know them.

# Shapes: I items, D width of the vectors of a source (a block) or of all.
# Default weights of sources; all others have weight 1, so that co-occurrence counts more than words.
WEIGHTS = {"title": 0.3, "categories": 0.5}
# Columns that are no features, because they identify an item or count its events.
_NON_FEATURES = ("item", "item_id", "events")
_FILE_ENDINGS = (".npy", ".parquet")
_CHUNK_TEXTS = 1 << 16  # Texts per chunk.

# A source or a list of sources, as in a scenario.
Spec = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def compute_item_vectors(
    items: pa.Table, seq: Sequences, spec: Spec, *, dim: int, seed: int, folder: Path
) -> np.ndarray:
    """Compute the vectors [I, D] float32 of all items by concatenating the sources.

    Args:
        items: The item table.
        seq: The sequences.
        spec: Names or {name: weight}, one or a list. A name is `cooccurrence`, a column of the item table, or a .npy or .parquet
            file relative to the scenario; {use: hf, path, columns} is a text encoder.
        dim: Maximum width of an SVD.
        seed: Seed of the run.
        folder: Folder of the scenario.
    """
    blocks = []
    for name, weight in parse_weights(spec).items():
        if name in (encoders := list_encoders(spec)):
            from nonet.models.hf import encode  # imports torch

            block_ID = encode(encoders[name], join_texts(items, encoders[name]["columns"]), folder)
        else:
            block_ID = _compute_source(name, items, seq, dim=dim, seed=seed, folder=folder)
        _check_finite(name, block_ID)
        blocks.append(weight * _standardise(block_ID))
    return np.ascontiguousarray(np.concatenate(blocks, 1), dtype=np.float32)


def check_sources(spec: Spec, items: pa.Table, folder: Path) -> None:
    """Check that the sources of the item vectors exist, before anything is computed.

    Raises:
        ConfigError: An option is not valid.
        DataError: A source does not exist.
    """
    encoders = list_encoders(spec)
    for name in parse_weights(spec):
        if name in encoders:
            from nonet.models.hf import check_encoder  # imports torch

            check_encoder(encoders[name], folder)
            for column in encoders[name]["columns"]:
                _classify_source(column, items, folder)
        # `items` has no rows for prepared data, whose items are not read here.
        elif _classify_source(name, items, folder) == "file" and len(items):
            _check_finite(name, _read_file(folder / name, items))


def resolve_sources(spec: Spec, folder: Path) -> list[str | dict[str, Any]]:
    """Return the sources with absolute paths of files and encoders; a name is a file if it ends in .npy or .parquet.

    Args:
        spec: The sources, as for `compute_item_vectors`.
        folder: Folder of the scenario.
    """
    resolved: list[str | dict[str, Any]] = []
    for entry in [spec] if isinstance(spec, str | Mapping) else spec:
        if isinstance(entry, str):
            resolved.append(_resolve_name(entry, folder))
        elif "use" in entry:
            resolved.append({**entry, "path": str(folder / entry["path"])})
        else:
            resolved.append({_resolve_name(name, folder): weight for name, weight in entry.items()})
    return resolved


def _resolve_name(name: str, folder: Path) -> str:
    """Return the absolute path if the name of a source is that of a file, else the name."""
    return str(folder / name) if Path(name).suffix in _FILE_ENDINGS else name


def _check_finite(name: str, block_ID: np.ndarray) -> None:
    """Raise DataError if the vectors of the source `name` have a NaN or infinite value."""
    if not np.isfinite(block_ID).all():
        n_bad_rows = int((~np.isfinite(block_ID).all(1)).sum())
        raise DataError(
            f"tokenizer.vectors: {name!r} has NaN or infinite values in {n_bad_rows} rows. Clean the file."
        )


def parse_weights(spec: Spec) -> dict[str, float]:
    """Return the weight of each source by name, in the order of `spec`.

    Raises:
        ConfigError: There is no source, or one occurs twice, or a weight is not positive.
    """
    weights: dict[str, float] = {}
    for entry in [spec] if isinstance(spec, str | Mapping) else spec:
        named = {entry: WEIGHTS.get(entry, 1.0)} if isinstance(entry, str) else entry
        if "use" in named:
            named = {format_encoder(named): named.get("weight", 1.0)}
        for name, weight in named.items():
            if not weight > 0:
                raise ConfigError(
                    f"tokenizer.vectors: the weight of {name!r} is {weight}; it must be above 0."
                )
            if name in weights:
                raise ConfigError(
                    f"tokenizer.vectors: {name!r} is named twice. Name it once, with one weight."
                )
            weights[name] = float(weight)
    if not weights:
        raise ConfigError("tokenizer.vectors is empty; name at least one source, e.g. [title, cooccurrence].")
    return weights


def _compute_source(
    name: str, items: pa.Table, seq: Sequences, *, dim: int, seed: int, folder: Path
) -> np.ndarray:
    """Compute the item vectors of one source."""
    match _classify_source(name, items, folder):
        case "cooccurrence":
            return _normalise_rows(compute_svd(compute_ppmi(seq, len(items)), dim, seed, name, power=0.5))
        case "column":
            return _compute_column_vectors(name, items[name], dim, seed)
    return _read_file(folder / name, items)


def _normalise_rows(block_ID: np.ndarray) -> np.ndarray:
    """Scale rows to length 1 and keep zero rows, so that rare items differ from others by direction, not by length."""
    return block_ID / np.maximum(np.linalg.norm(block_ID, axis=1, keepdims=True), 1e-9)


def _classify_source(name: str, items: pa.Table, folder: Path) -> Literal["cooccurrence", "column", "file"]:
    """Return the kind of a vector source: co-occurrence, an item column, or a file."""
    if name == "cooccurrence":
        return "cooccurrence"
    if name in items.column_names:
        return "column"
    if Path(name).suffix in _FILE_ENDINGS:
        if not (folder / name).is_file():
            raise DataError(
                f"tokenizer.vectors: {folder / name} does not exist. Paths are relative to the scenario."
            )
        return "file"
    available = ["cooccurrence", *(column for column in items.column_names if column not in _NON_FEATURES)]
    raise DataError(
        f"tokenizer.vectors names {name!r}, which is neither a column of the items nor a .npy or .parquet file; "
        f"there are: {', '.join(available)}.{suggest_sentence(name, available)}"
    )


def _compute_column_vectors(name: str, column: pa.ChunkedArray, dim: int, seed: int) -> np.ndarray:
    """Compute item vectors from a column of numbers, vectors, texts or lists of texts."""
    column_type = column.type
    if pa.types.is_floating(column_type) or pa.types.is_integer(column_type):
        return np.nan_to_num(column.cast(pa.float64()).to_numpy().astype(np.float32), nan=0.0)[:, None]
    if is_vector_type(column_type):
        return _read_vectors(name, column)
    chunks = (column.slice(start, _CHUNK_TEXTS).to_pylist() for start in range(0, len(column), _CHUNK_TEXTS))
    values = (value for chunk in chunks for value in chunk)
    if has_words(column_type):
        return compute_svd(compute_tfidf(map(split_words, values)), dim, seed, name)
    raise DataError(
        f"tokenizer.vectors: column {name!r} is {column_type}; it must be text, a list of text, a vector (list of floats), "
        "or a number."
    )


def _is_integer_list(dtype: pa.DataType) -> bool:
    """Return whether a column holds lists of integers, which are vectors in a file, but words in the item table."""
    return (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)) and pa.types.is_integer(
        dtype.value_type
    )


def _read_vectors(name: str, column: pa.ChunkedArray) -> np.ndarray:
    """Return the vectors [I, D] of a column of lists; an item without a vector gets the mean of the others.

    Raises:
        DataError: No row has a vector, or vectors differ in length.
    """
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    has_vector = np.isfinite(lengths) & (lengths > 0)
    if not has_vector.any():
        raise DataError(f"tokenizer.vectors: column {name!r} has no vector in any row.")
    widths = np.unique(lengths[has_vector]).astype(int)
    if len(widths) != 1:
        raise DataError(
            f"tokenizer.vectors: column {name!r} has vectors of {widths[0]} to {widths[-1]} numbers; they must be equally long."
        )
    flat_values = pc.list_flatten(column.filter(pa.array(has_vector))).cast(pa.float32())
    block_ID = np.empty((len(column), widths[0]), np.float32)
    block_ID[has_vector] = flat_values.to_numpy(zero_copy_only=False).reshape(-1, widths[0])
    block_ID[~has_vector] = block_ID[has_vector].mean(0)
    return block_ID


def _read_file(path: Path, items: pa.Table) -> np.ndarray:
    """Read vectors [I, D] from a .npy file in the order of the item table, or from a Parquet file.

    A Parquet file has `item_id` and either one column of lists, such as `vector`, or only columns of numbers.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, items)
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise DataError(
            f"tokenizer.vectors: {path} is not a .npy array ({str(error).splitlines()[0]})."
        ) from None
    if array.ndim != 2 or len(array) != len(items) or array.dtype.kind not in "fiu":
        raise DataError(
            f"tokenizer.vectors: {path} is {array.dtype} {list(array.shape)}; it must be numbers [{len(items)}, width],"
            " a row for each item that is kept, in the order of item_id. A Parquet file with item_id needs no order."
        )
    return array.astype(np.float32)


def _read_parquet(path: Path, items: pa.Table) -> np.ndarray:
    """Read the vectors [I, D] of the items, in their order, from a Parquet file (see `_read_file`)."""
    title = f"tokenizer.vectors: {path}"
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{title} is not a Parquet file ({str(error).splitlines()[0]}).") from None
    names = ", ".join(table.column_names)
    if "item_id" not in table.column_names:
        raise DataError(f"{title} has no column item_id; it has {names}.")
    row_of_item: dict[Any, int] = {}
    for row, item in enumerate(table["item_id"].to_pylist()):
        if item is None:
            raise DataError(f"{title} has no item_id in row {row}. Name the item, or drop the row.")
        if row_of_item.setdefault(item, row) != row:
            raise DataError(
                f"{title} has item {item!r} twice, in rows {row_of_item[item]} and {row}. Keep one vector of each item."
            )
    item_ids = items["item_id"].to_pylist()
    missing = [item for item in item_ids if item not in row_of_item]
    if missing:
        raise DataError(
            f"{title} lacks {len(missing)} of {len(item_ids)} items, first {missing[:5]}. Add their vectors."
        )
    pandas_index = [name for name in table.column_names if name.startswith("__index_level_")]
    table = table.drop_columns(pandas_index).take([row_of_item[item] for item in item_ids])
    list_columns = [
        field.name for field in table.schema if is_vector_type(field.type) or _is_integer_list(field.type)
    ]
    if "vector" in list_columns or len(list_columns) == 1:
        name = "vector" if "vector" in list_columns else list_columns[0]
        is_empty = pc.fill_null(pc.list_value_length(table[name]), 0).to_numpy() == 0
        if is_empty.any():
            first_empty = item_ids[int(is_empty.argmax())]
            raise DataError(
                f"{title} has no {name} for {int(is_empty.sum())} of {len(item_ids)} items, "
                f"first {first_empty!r}. Add their vectors."
            )
        return _read_vectors(name, table[name])
    number_columns = [
        field.name
        for field in table.schema
        if field.name != "item_id" and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type))
    ]
    if len(list_columns) > 1 or not number_columns or len(number_columns) + 1 < len(table.column_names):
        raise DataError(
            f"{title} has {names}; besides item_id it must have one column of lists of numbers, such as vector, or "
            "only numeric columns. Remove the others."
        )
    return np.stack([table[name].cast(pa.float32()).to_numpy() for name in number_columns], 1)


def _standardise(block_ID: np.ndarray) -> np.ndarray:
    """Centre a block and scale it to mean square norm 1; a constant block becomes zeros."""
    centred = block_ID - block_ID.mean(0)
    return centred / max(float(np.sqrt((centred**2).sum(1).mean())), 1e-12)
