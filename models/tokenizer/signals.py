"""Signals of a memory from columns of the item table: words weighted by IDF, or the numbers of vectors, rows of norm 1.

The weight of a word that n of N items have is log(N / n) (Sparck Jones, 1972), once per item. A word of one item is like no other
item's, so it counts in the norm and is not stored. Of a long text, the first 128 distinct words count. A number of a vector is a
word that each item with a vector has, with the number less its mean over the items as its weight: embeddings of texts share a
direction, which says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.models.generation import ItemSignals
from nonet.samples.tokenised import check_finite, has_vectors, is_vector_type, read_vector_column
from nonet.suggest import join_names, suggest_sentence

# Shapes: I items, K signals, F stored words, E (item, word) pairs, n items with a vector, D numbers of a vector.

_CHUNK_ITEMS = 1 << 12
_MAX_WORDS = (
    128  # Distinct words of an item in a signal that are read, the first ones, so that long texts stay cheap.
)
_MAX_NUMBERS = 1024  # Numbers of a vector: each takes the memory and the time of a word.
_CHUNK_NUMBERS = 1 << 22  # Numbers of vectors that are converted at once.
_VECTOR_TEXT = re.compile(
    r"\s*[\[(]?\s*-?\d+\.\d+(e[+-]?\d+)?([\s,;|]+-?\d+(\.\d+)?(e[+-]?\d+)?){2,}\s*[\])]?\s*", re.IGNORECASE
)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?", re.UNICODE)


def check_signals(names: Sequence[str], items: pa.Table, key: str = "model.memory.signals") -> None:
    """Raise DataError if a signal, which a key of the scenario names, is no column of words or vectors of the item table."""
    _check_columns(names, items, key)
    for name in names if len(items) else ():
        if is_vector_type(items.schema.field(name).type):
            _read_numbers(items[name], f"{key}: {name!r}")


def _check_columns(names: Sequence[str], items: pa.Table, key: str) -> None:
    """Raise DataError if a signal is no column of words or vectors; the numbers of vectors are not read."""
    columns = {field.name: field.type for field in items.schema}
    usable = [*list_word_columns(items), *(name for name, dtype in columns.items() if is_vector_type(dtype))]
    for name in names:
        if name not in usable:
            problem = f"is {columns[name]}" if name in columns else "is no column of the items"
            raise DataError(
                f"{key}: {name!r} {problem}; a signal is a column of text, lists of text or vectors, and there "
                f"{'are ' + join_names(usable) if usable else 'is none'}.{suggest_sentence(name, usable)}"
            )
        if has_words(columns[name]) and _has_vector_texts(items[name]):
            raise DataError(
                f"{key}: {name!r} holds vectors as text, such as {_find_text(items[name])[:40]!r}; write the column as lists of "
                "floats"
            )


def list_word_columns(items: pa.Table) -> list[str]:
    """Return the columns of an item table that hold text or lists of words."""
    return [field.name for field in items.schema if field.name != "item_id" and has_words(field.type)]


def compute_signals(items: pa.Table, names: Sequence[str]) -> ItemSignals:
    """Compute the signals of all items.

    Args:
        items: The item table [I].
        names: Columns of text, lists of text or vectors, the signals [K].

    Raises:
        DataError: A signal is no such column, or has vectors that cannot be compared.
    """
    key = "model.memory.signals"
    _check_columns(names, items, key)
    index_by_word: dict[tuple[int, str], int] = {}
    item, word = _index_words(items, names, index_by_word, is_fixed=False)
    keys = list(index_by_word)
    n_items_with_word = np.bincount(word, minlength=len(keys))
    idf = np.log(max(len(items), 1) / np.maximum(n_items_with_word, 1))
    # Words are numbered by signal and text, which does not depend on the order of the items.
    stored = sorted((key, index) for index, key in enumerate(keys) if n_items_with_word[index] > 1)
    number = np.full(len(keys), -1, np.int64)
    number[[index for _, index in stored]] = np.arange(len(stored))
    words = pa.table(
        {
            "word": pa.array([text for (_, text), _ in stored], pa.string()),
            "signal": pa.array([k for (k, _), _ in stored], pa.int32()),
            "idf": pa.array(idf[[index for _, index in stored]], pa.float64()),
        }
    )
    signal = np.array([k for k, _ in keys], np.int64)
    signals = _build(tuple(names), words, len(items), item, number[word], signal[word], idf[word])
    for k, name in enumerate(names):
        if not is_vector_type(items[name].type):
            continue
        row, values_nD = _read_numbers(items[name], f"{key}: {name!r}")
        mean_D, width, words = values_nD.mean(0, dtype=np.float64), values_nD.shape[1], signals.words
        if "mean" not in words.column_names:
            words = words.append_column("mean", pa.array(np.zeros(len(words))))
        texts = pa.array([str(d) for d in range(width)], pa.string())
        columns = [texts, pa.array([k] * width, pa.int32()), pa.array(np.ones(width)), pa.array(mean_D)]
        all_words = pa.concat_tables([words, pa.table(columns, words.schema)]).combine_chunks()
        signals = _append_numbers(replace(signals, words=all_words), row, values_nD, mean_D, len(words))
    return signals


def extend_signals(signals: ItemSignals, new_items: pa.Table) -> ItemSignals:
    """Return the signals with new items appended, whose words are weighted as those of the first items were.

    Args:
        signals: The signals [I].
        new_items: The table of the new items, with the same columns.

    Raises:
        DataError: Their vectors have another length, or cannot be compared.
    """
    words = signals.words
    keys = zip(words["signal"].to_pylist(), words["word"].to_pylist(), strict=True)
    index_by_word = {key: index for index, key in enumerate(keys)}
    item, word = _index_words(new_items, signals.names, index_by_word, is_fixed=True)
    n_words, n_signals = len(words), len(signals.names)
    # The index of a word that is not stored is n_words + its signal; such a word is like that of one item.
    idf = np.concatenate([words["idf"].to_numpy(), np.full(n_signals, np.log(signals.n_first))])
    signal = np.concatenate([words["signal"].to_numpy(), np.arange(n_signals)]).astype(np.int64)
    number = np.where(word < n_words, word, -1)
    added = _build(signals.names, words, len(new_items), item, number, signal[word], idf[word])
    for k, name in enumerate(signals.names):
        column = new_items[name]
        if is_vector_type(column.type) and has_vectors(column):
            is_number = words["signal"].to_numpy() == k
            mean_D = words["mean"].to_numpy()[is_number]
            row, values_nD = _read_numbers(column, f"items: {name!r}", len(mean_D))
            added = _append_numbers(added, row, values_nD, mean_D, int(np.argmax(is_number)))
    return replace(
        signals,
        row=np.concatenate([signals.row, added.row[1:] + signals.row[-1]]),
        word=np.concatenate([signals.word, added.word]),
        value=np.concatenate([signals.value, added.value]),
    )


def _build(
    names: tuple[str, ...],
    words: pa.Table,
    n_items: int,
    item: np.ndarray,
    word: np.ndarray,
    signal: np.ndarray,
    weight: np.ndarray,
) -> ItemSignals:
    """Normalise the words of each item by signal, and leave out those of number -1, which are not stored.

    Args:
        names: Names of the signals [K].
        words: The stored words [F].
        n_items: Number of items I.
        item: Item of each pair [E].
        word: Number of the word of each pair [E]; -1 for a word that is not stored.
        signal: Signal of each pair [E].
        weight: Weight of each pair's word [E]: its IDF, or a number of a vector.
    """
    cell = item * len(names) + signal
    norm = np.sqrt(np.bincount(cell, weights=weight**2, minlength=n_items * len(names)))
    value = weight / np.maximum(norm[cell], 1e-12)
    order = np.lexsort((word, item))
    kept = order[(word[order] >= 0) & (value[order] != 0)]
    row = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(item[kept], minlength=n_items))])
    return ItemSignals(
        names, row, word[kept].astype(np.int32), value[kept].astype(np.float32), words, max(n_items, 1)
    )


def _index_words(
    items: pa.Table, names: Sequence[str], index_by_word: dict[tuple[int, str], int], *, is_fixed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct (item, word) pairs: items [E] and indices of words [E].

    Args:
        items: The item table.
        names: Names of the signals [K].
        index_by_word: Index of each word by (signal, text); new words are added.
        is_fixed: Whether new words are not added, but have the index `len(index_by_word)` + signal.
    """
    n_known = len(index_by_word)
    pairs = [np.empty((2, 0), np.int64)]
    for k, name in enumerate(names):
        for start, texts in _iterate_words(items[name]) if has_words(items[name].type) else ():
            entries = [
                (start + offset, index_by_word.get((k, text), n_known + k))
                if is_fixed
                else (start + offset, index_by_word.setdefault((k, text), len(index_by_word)))
                for offset, words in enumerate(texts)
                for text in islice(dict.fromkeys(words), _MAX_WORDS)
            ]
            pairs.append(np.array(entries, np.int64).reshape(-1, 2).T)
    item, word = np.concatenate(pairs, 1)
    return item, word


def _read_numbers(
    column: pa.ChunkedArray, title: str, width: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items [n] that have a vector, and their vectors [n, D] float32.

    Args:
        column: The column of vectors.
        title: The start of error messages.
        width: The number D that the vectors must have; None for any up to 1,024.

    Raises:
        DataError: No item has a vector, or vectors differ in length, are too long, or have a value that is no number.
    """
    values_nD, has_vector = read_vector_column(column, title)
    got = values_nD.shape[1]
    if got > _MAX_NUMBERS or width not in (None, got):
        limit = f"up to {_MAX_NUMBERS} can be compared, and longer ones reduced by PCA"
        wanted = f"all vectors must have {width} numbers" if width else limit
        raise DataError(f"{title} has vectors of {got} numbers; {wanted}.")
    check_finite(values_nD, title, "Clean the table")
    return np.flatnonzero(has_vector), values_nD


def _append_numbers(
    signals: ItemSignals, row: np.ndarray, values_nD: np.ndarray, mean_D: np.ndarray, first: int
) -> ItemSignals:
    """Return the signals with the numbers of vectors less their mean, scaled to norm 1, as the last words of their items.

    Args:
        signals: The signals, of whose items none has a word from `first` on.
        row: The items with a vector [n], ascending.
        values_nD: The vectors.
        mean_D: The mean of the vectors.
        first: Number of the word that is the first number of a vector.
    """
    n_items, width = values_nD.shape
    n_new = np.zeros(len(signals), np.int64)
    n_new[row] = width
    shift = np.cumsum(n_new) - n_new  # of an item's earlier words
    start = np.concatenate([signals.row[:1], signals.row[1:] + np.cumsum(n_new)])
    place = np.arange(len(signals.word)) + np.repeat(shift, np.diff(signals.row))
    word, value = np.empty(start[-1], np.int32), np.empty(start[-1], np.float32)
    word[place], value[place] = signals.word, signals.value
    size = max(1, _CHUNK_NUMBERS // width)
    for n in range(0, n_items, size):
        centred = values_nD[n : n + size] - mean_D
        centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
        place = (start[row[n : n + size] + 1] - width)[:, None] + np.arange(width)
        word[place], value[place] = np.arange(first, first + width), centred
    return replace(signals, row=start, word=word, value=value)


def _iterate_words(column: pa.ChunkedArray) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield the words of items in lower case, in chunks, with the index of the first item of each."""
    for start in range(0, len(column), _CHUNK_ITEMS):
        values = column.slice(start, _CHUNK_ITEMS).to_pylist()
        yield start, [split_words(value) for value in values]


def split_words(value: str | Sequence[object] | None) -> list[str]:
    """Return the words of a text, or the values of a list as they are, in lower case; none for a missing value."""
    if isinstance(value, str):
        return _WORD.findall(value.lower())
    return [str(word).lower() for word in value or () if word is not None]


def _find_text(column: pa.ChunkedArray) -> str:
    """Return the first value of a column of text that is not missing; "" without any, and for another column."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return ""
    return next((value for value in column.slice(0, _CHUNK_ITEMS).to_pylist() if value), "")


def _has_vector_texts(column: pa.ChunkedArray) -> bool:
    """Return whether a column of text holds lists of several numbers with fractions, as CSV files have vectors."""
    return bool(_VECTOR_TEXT.fullmatch(_find_text(column)))


def has_words(dtype: pa.DataType) -> bool:
    """Return whether a column holds texts or lists of words; a list of floating-point numbers is a vector."""
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return not pa.types.is_floating(dtype.value_type)
    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype)
