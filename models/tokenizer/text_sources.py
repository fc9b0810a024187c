"""The text encoders in the `sources` of item vectors: their options, their names in reports, and their input texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa


def list_encoders(spec: Any) -> dict[str, Mapping[str, Any]]:
    """Return the options of the text encoders in the sources, by the names that `parse_weights` returns.

    Args:
        spec: One source or a list of sources; mappings with a key `use` are encoders.
    """
    entries = [spec] if isinstance(spec, str | Mapping) else spec
    return {
        format_encoder(entry): {"columns": ["title"], **entry}
        for entry in entries
        if isinstance(entry, Mapping) and "use" in entry
    }


def format_encoder(encoder: Mapping[str, Any]) -> str:
    """Return the name of an encoder in reports, which contains its path and its columns."""
    return f"{encoder['use']} {encoder['path']} of {', '.join(encoder.get('columns', ['title']))}"


def join_texts(items: pa.Table, columns: Sequence[str]) -> list[str]:
    """Join the texts of these columns into one text per item; words of a list are joined too."""
    parts = [
        [
            " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
            for value in items[column].to_pylist()
        ]
        for column in columns
    ]
    return [" ".join(filter(None, texts)) for texts in zip(*parts, strict=True)]
