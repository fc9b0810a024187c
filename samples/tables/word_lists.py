"""Converts categories of any usual form to a list of words per item.

Lists may be lists, lists of lists or of structs, or text: split at `|`, written as JSON or Python, or split at commas. Text
is
only taken for a list if that is certain; if it is merely possible, `find_uncut_delimiter` reports it and a warning is shown.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from typing import Any

import pyarrow as pa

_NAMES = ("name", "title", "label", "value", "category", "genre", "tag")
_COMMAS = (", ", ",", ";", "/")
_SHARE = 0.5
"""The share of the filled texts that must have a delimiter before the column is looked at as one of lists."""
_PER_WORD = 2.0
"""In how many different texts a word must be found on average before a comma is taken for a delimiter."""


def parse_word_lists(column: pa.Array, missing: tuple[str, ...]) -> pa.Array:
    """Return a list of words for each row; nothing is an empty list.

    Raises:
        TypeError: the type holds no words; its message says what there is.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return pa.array([[]] * len(column), pa.list_(pa.string()))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        rows = _cut_texts(column.to_pylist())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _check_value_type(kind.value_type)
        rows = [list(_flatten_words(row)) for row in column.to_pylist()]
    else:
        raise TypeError(str(kind))
    gone = set(missing)
    return pa.array([[word for word in row if word not in gone] for row in rows], pa.list_(pa.string()))


def find_uncut_delimiter(texts: list[str | None]) -> str | None:
    """Return the delimiter at which texts might be lists, although each is taken as one word; None if there is no doubt."""
    filled = [text for text in texts if text]
    if not filled or _parse_literal_lists(filled) is not None or any("|" in text for text in filled):
        return None
    for mark in _COMMAS:
        if sum(mark in text for text in filled) >= _SHARE * len(filled):
            return None if _are_lists(filled, mark) else mark
    return None


def _cut_texts(texts: list[str | None]) -> list[list[str]]:
    """Split texts into words as JSON or Python lists, at `|`, or at commas if these are certain to be delimiters."""
    filled = [text for text in texts if text]
    if (lists := _parse_literal_lists(filled)) is not None:
        found = iter(lists)
        return [next(found) if text else [] for text in texts]
    mark = "|"
    if not any("|" in text for text in filled):
        mark = next((mark for mark in _COMMAS if _are_lists(filled, mark)), "|")
    if mark == "|":
        return [[part for part in (text or "").split("|") if part] for text in texts]
    return [[part.strip() for part in (text or "").split(mark) if part.strip()] for text in texts]


def _parse_literal_lists(texts: list[str]) -> list[list[str]] | None:
    """Parse texts that are written as JSON or Python lists; None if one of them is not such a list."""
    found = []
    for text in texts:
        bare = text.strip()
        if not (bare.startswith("[") and bare.endswith("]")):
            return None
        try:
            value = json.loads(bare)
        except ValueError:
            try:
                value = ast.literal_eval(bare)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
        try:
            found.append(list(_flatten_words(value)))
        except TypeError:
            return None
    return found or None


def _are_lists(texts: list[str], mark: str) -> bool:
    """Return whether texts are lists with this delimiter: most contain it, and words occur in several texts."""
    if not texts or sum(mark in text for text in texts) < _SHARE * len(texts):
        return False
    distinct = set(texts)
    counts = Counter(word.strip() for text in distinct for word in text.split(mark) if word.strip())
    return bool(counts) and counts.total() / len(counts) >= _PER_WORD


def _check_value_type(kind: pa.DataType) -> None:
    """Raise TypeError if elements of a list of this type hold no words."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind) and _find_name_field(kind) is None:
        raise TypeError(f"a list of {kind}")
    plain = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
    if not (plain or pa.types.is_struct(kind) or pa.types.is_null(kind) or pa.types.is_floating(kind)):
        raise TypeError(f"a list of {kind}")


def _find_name_field(kind: pa.DataType) -> str | None:
    """Return the field of a struct that holds a word: one of the usual names, or the only text field; None otherwise."""
    texts = [
        field.name for field in kind if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    ]
    return next((name for name in _NAMES if name in texts), texts[0] if len(texts) == 1 else None)


def _flatten_words(value: Any) -> list[str]:
    """Return the words of a value of any depth in order; words of nested lists are made unique."""
    if value is None:
        return []
    if isinstance(value, (list, tuple, set)):
        words = [word for part in value for word in _flatten_words(part)]
        nested = any(isinstance(part, (list, tuple, set)) for part in value)
        return list(dict.fromkeys(words)) if nested else words
    if isinstance(value, dict):
        texts = [name for name, each in value.items() if isinstance(each, str)]
        name = next((name for name in _NAMES if name in texts), texts[0] if len(texts) == 1 else None)
        if name is None:
            raise TypeError("a list of objects without a name")
        return [value[name]]
    return [value] if isinstance(value, str) else [str(value)]
