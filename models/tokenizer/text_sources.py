"""Text encoders among the sources of item vectors: their options, names and input texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa


def list_encoders(spec: Any) -> dict[str, Mapping[str, Any]]:
    """Return the text encoders among the sources, by the name that `parse_weights` gives them."""
    entries = [spec] if isinstance(spec, str | Mapping) else spec
    return {
        name_of(each): {"columns": ["title"], **each}
        for each in entries
        if isinstance(each, Mapping) and "use" in each
    }


def name_of(encoder: Mapping[str, Any]) -> str:
    """Return the name of an encoder and its columns in reports."""
    return f"{encoder['use']} {encoder['path']} of {', '.join(encoder.get('columns', ['title']))}"


def join_texts(items: pa.Table, columns: Sequence[str]) -> list[str]:
    """Join the texts of each item in these columns."""
    parts = [
        [
            " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
            for value in items[column].to_pylist()
        ]
        for column in columns
    ]
    return [" ".join(filter(None, each)) for each in zip(*parts, strict=True)]
