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

from nonet.errors import ConfigError, DataError
from nonet.models.tokenizer.signals import has_words, split_words
from nonet.models.tokenizer.sparse_matrix import compute_ppmi, compute_svd, compute_tfidf
from nonet.models.tokenizer.text_sources import format_encoder, join_texts, list_encoders
from nonet.samples.sequences import Sequences
from nonet.samples.tokenised import (
    VECTOR_FILES,
    check_finite,
    is_vector_type,
    read_vector_column,
    read_vector_file,
)
from nonet.suggest import suggest_sentence

# Shapes: I items, D width of the vectors of a source (a block) or of all.
# Default weights of sources; all others have weight 1, so that co-occurrence counts more than words.
WEIGHTS = {"title": 0.3, "categories": 0.5}
# Columns that are no features, because they identify an item or count its events.
_NON_FEATURES = ("item", "item_id", "events")
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
        check_finite(block_ID, f"tokenizer.vectors: {name!r}", "Clean the file")
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
            check_finite(_read_file(folder / name, items), f"tokenizer.vectors: {name!r}", "Clean the file")


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
    return str(folder / name) if Path(name).suffix in VECTOR_FILES else name


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
    if Path(name).suffix in VECTOR_FILES:
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
        values, has_vector = read_vector_column(column, f"tokenizer.vectors: column {name!r}")
        block_ID = np.empty((len(column), values.shape[1]), np.float32)
        block_ID[has_vector], block_ID[~has_vector] = values, values.mean(0)  # others are in the middle
        return block_ID
    chunks = (column.slice(start, _CHUNK_TEXTS).to_pylist() for start in range(0, len(column), _CHUNK_TEXTS))
    values = (value for chunk in chunks for value in chunk)
    if has_words(column_type):
        return compute_svd(compute_tfidf(map(split_words, values)), dim, seed, name)
    raise DataError(
        f"tokenizer.vectors: column {name!r} is {column_type}; it must be text, a list of text, a vector (list of floats), "
        "or a number."
    )


def _read_file(path: Path, items: pa.Table) -> np.ndarray:
    """Read the vectors [I, D] of all items from a file. Raises DataError if it lacks an item."""
    title = f"tokenizer.vectors: {path}"
    row, block_ID = read_vector_file(
        str(path), items["item_id"], title, "a row for each item that is kept, in the order of item_id"
    )
    if len(row) < len(items):
        missing = items["item_id"].filter(np.isin(np.arange(len(items)), row, invert=True)).to_pylist()
        raise DataError(
            f"{title} lacks {len(missing)} of {len(items)} items, first {missing[:5]}. Add their vectors."
        )
    return block_ID


def _standardise(block_ID: np.ndarray) -> np.ndarray:
    """Centre a block and scale it to mean square norm 1; a constant block becomes zeros."""
    centred = block_ID - block_ID.mean(0)
    return centred / max(float(np.sqrt((centred**2).sum(1).mean())), 1e-12)
