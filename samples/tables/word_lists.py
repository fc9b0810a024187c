"""Converts a column of categories to a list of words per item.

A column may have a list type (of text, integers, lists or structs) or contain text. Text may be delimited by `|`, by commas,
semicolons or slashes, or be a list of JSON, Python, NumPy or Postgres. Text is split at commas, semicolons or slashes only if it
is certain to be a list: words recur in several texts, at different positions. The parts of other texts, such as `Seattle, WA`,
`Oct 07, 2017` and `Woolf, Virginia`, keep their position. If text may be a list, `find_uncut_delimiter` returns the delimiter so
that the caller can warn. The name of a column plays no part.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa

_NAMES = ("name", "title", "label", "value", "category", "genre", "tag")
"""The usual names of the field that holds the word, in a list of structs or JSON objects, in the order of preference."""
_OTHER_DELIMITERS = (", ", ",", ";", "/")
"""The delimiters other than `|`, in the order in which they are tried."""
_MIN_SHARE = 0.5
"""The minimum share of non-empty texts that contain a delimiter, for a column that may contain lists."""
_MIN_TEXTS_PER_WORD = 1.25
"""The minimum number of distinct texts that contain a word, averaged over the words, for a column that is certain to contain
lists."""
_MIN_TEXTS_PER_BAR_WORD = 2.0
"""The same minimum for words that are delimited by `|` and keep their position."""
_MIN_MOVING_SHARE = 1 / 3
"""The minimum share of words that occur at different positions, among those in several texts, for such a column."""
_MIN_ELSEWHERE = 0.1
"""The minimum share of a word's occurrences outside its most frequent position, for a word that changes its position."""
_NUMBER = re.compile(r"[+-]?\d+")
_GROUPED_NUMBER = re.compile(r"[+-]?\d{1,3}(,\d{3})*")
_BRACKETS = ("[]", "()", "{}")
_NUMPY_LIST = re.compile(r"""\[\s*('[^']*'|"[^"]*")(\s+('[^']*'|"[^"]*"))+\s*\]""")
_PLAIN_WORD = re.compile(r"""\s*+("(?:[^"\\]|\\.)*+"|'[^']*+'|[^,"\[\]{}]*+)\s*+(,|$)""")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")
_EXAMINED_TEXTS = 20_000
"""The number of texts from which `are_lists` decides."""


class BrokenListError(TypeError):
    """Raised for a text that begins or ends as a list of JSON or Python, and is none, in a column of such lists."""


def parse_word_lists(column: pa.Array, missing: tuple[str, ...]) -> pa.Array:
    """Convert a column to a list of words per row.

    Args:
        column: The column; a null gives an empty list.
        missing: Words that stand for a missing value and are removed.

    Raises:
        TypeError: If the type of the column contains no words. The message is the type.
        BrokenListError: If a text is a broken list. The message has the row, from 0.
    """
    kind, ignored = column.type, set(missing)
    if pa.types.is_null(kind):
        return pa.array([[]] * len(column), pa.list_(pa.string()))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        rows = _split_texts([None if text in ignored else text for text in column.to_pylist()])
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _check_value_type(kind.value_type)
        rows = [list(_flatten_words(row)) for row in column.to_pylist()]
    else:
        raise TypeError(str(kind))
    return pa.array([[word for word in row if word not in ignored] for row in rows], pa.list_(pa.string()))


def find_uncut_delimiter(texts: list[str | None]) -> str | None:
    """Return the delimiter of texts that may be lists but are not split, because they are not certain to be; None otherwise."""
    filled = [text for text in texts if text]
    if not filled or _have_literal_lists(filled) or any("|" in text for text in filled):
        return None
    for delimiter in _OTHER_DELIMITERS:
        if sum(delimiter in text for text in filled) >= _MIN_SHARE * len(filled):
            return None if _are_cut_by(filled, delimiter) else delimiter
    return None


def describe_split(column: pa.Array | pa.ChunkedArray, name: str) -> str | None:
    """Return a sentence that a column of texts is read as categories, and how its texts are split; None if they are not.

    Args:
        column: The column that `parse_word_lists` will convert; other types than text are never split.
        name: Name of the column.
    """
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return None
    filled = [text for text in column.to_pylist() if text]
    if _have_literal_lists(filled):
        return f"categories = {name}, whose texts are read as lists, such as {_shorten(filled[0])}"
    delimiter = _choose_delimiter(filled)
    example = next((text for text in filled if delimiter in text), None)
    if example is None:
        return None
    return (
        f"categories = {name}, whose texts are split at {delimiter!r} into words, such as {_shorten(example)}"
    )


def _shorten(text: str) -> str:
    """Return a text in quotes, without what exceeds 60 characters."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def are_lists(column: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether the texts of a column are certain to be lists: JSON, Python, or words cut by bars, commas or semicolons.

    Texts with slashes are not, because they may also be paths or dates.
    """
    filled = [text for text in column.slice(0, _EXAMINED_TEXTS).to_pylist() if text]
    delimiters = ("|", *(delimiter for delimiter in _OTHER_DELIMITERS if delimiter != "/"))
    return bool(filled) and (
        _have_literal_lists(filled) or any(_are_cut_by(filled, delimiter) for delimiter in delimiters)
    )


def _split_texts(texts: list[str | None]) -> list[list[str]]:
    """Split texts into words: as JSON or Python lists, at `|`, or at another delimiter if they are certain to be lists.

    Raises:
        TypeError: If the texts are lists of objects without a name.
        BrokenListError: If a text is a broken list.
    """
    filled = [text for text in texts if text]
    if (lists := _parse_literal_lists(filled)) is not None:
        next_list = iter(lists)
        rows = [next(next_list) if text else [] for text in texts]
        for row, (text, words) in enumerate(zip(texts, rows, strict=True)):
            if text and words == [text] and _is_broken_list(text.strip()):
                raise BrokenListError(
                    f"text with lists, of which that in row {row} is broken: {_shorten(text)}"
                )
        return rows
    delimiter = _choose_delimiter(filled)
    if delimiter == "|":
        return [[part for part in (text or "").split("|") if part] for text in texts]
    return [[part.strip() for part in (text or "").split(delimiter) if part.strip()] for text in texts]


def _choose_delimiter(texts: list[str]) -> str:
    """Return the delimiter at which texts that are no lists of JSON or Python are split."""
    if any("|" in text for text in texts):
        return "|"
    return next((delimiter for delimiter in _OTHER_DELIMITERS if _are_cut_by(texts, delimiter)), "|")


def _have_literal_lists(texts: list[str]) -> bool:
    """Return whether texts are lists of JSON or Python, with or without words."""
    try:
        return _parse_literal_lists(texts) is not None
    except TypeError:
        return True


def _parse_literal_lists(texts: list[str]) -> list[list[str]] | None:
    """Parse texts of which at least half are lists of JSON or Python to lists of words; any other text is one word.

    Returns:
        The words of each text; None if fewer texts are lists, or there is none.

    Raises:
        TypeError: If the texts are lists of objects without a name.
    """
    lists: list[list[str] | None] = []
    for number, text in enumerate(texts, 1):
        lists.append(_parse_literal_list(text.strip()))
        if number == 1000 and lists.count(None) == number:  # the others are not worth the time
            return None
    if not lists or lists.count(None) > (1 - _MIN_SHARE) * len(lists):
        return None
    return [[text] if words is None else words for text, words in zip(texts, lists, strict=True)]


def _is_broken_list(text: str) -> bool:
    """Return whether a text that is no list begins and ends as one, or does one of both and lacks a bracket."""
    begins, ends = text[:1] in ("[", "{"), text[-1:] in ("]", "}")
    lacks_bracket = any(text.count(opening) != text.count(closing) for opening, closing in ("[]", "{}"))
    return (begins and ends) or ((begins or ends) and lacks_bracket)


def _parse_literal_list(text: str) -> list[str] | None:
    """Parse a text that is a list of JSON, Python (also a tuple or a set), NumPy or Postgres; None if it is no list.

    A text that is nested too deeply to be parsed is none.
    """
    if text[:1] + text[-1:] not in _BRACKETS or len(text) < 2:
        return None
    if _NUMPY_LIST.fullmatch(text):  # Python would join the words.
        return [first or second for first, second in _QUOTED.findall(text)]
    try:
        value = json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except RecursionError:
            return None
        except (ValueError, SyntaxError, MemoryError, TypeError):  # {[1]} is a TypeError
            if text[0] == "(":
                return None
            return _split_plain_list(text[1:-1])
    if not isinstance(value, list | tuple | set | dict):  # a text or a number in parentheses
        return None
    try:
        if isinstance(value, set):
            is_mixed = len({type(word) for word in value}) > 1
            value = sorted(value, key=repr if is_mixed else None)
        return _flatten_words(value)
    except RecursionError:
        return None


def _split_plain_list(content: str) -> list[str] | None:
    """Split what is in the brackets of a list of Postgres or of words without quotes; None if a quote or bracket is left over."""
    words: list[str] = []
    start = 0
    while found := _PLAIN_WORD.match(content, start):
        words.append(found[1].strip().strip("'\""))
        if not found[2]:
            return [word for word in words if word]
        start = found.end()
    return None


def _are_cut_by(texts: list[str], delimiter: str) -> bool:
    """Return whether texts are certain to be lists of words with this delimiter between them.

    At least half of the texts contain it, words occur in several texts, and enough of these words change their position. For
    `|`, which is rare in other texts, texts with different numbers of words suffice in place of a change of position.
    """
    if not texts or sum(delimiter in text for text in texts) < _MIN_SHARE * len(texts):
        return False
    rows = [[word.strip() for word in text.split(delimiter) if word.strip()] for text in set(texts)]
    if _are_numbers(rows, delimiter):
        return False
    counts: Counter[str] = Counter()  # in how many distinct texts each word occurs
    # How often each word occurs at each position.
    positions: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for words in rows:
        counts.update(set(words))
        for position, word in enumerate(words):
            positions[word][position] += 1
    if not counts or counts.total() < _MIN_TEXTS_PER_WORD * len(counts):
        return False
    if delimiter == "|" and len({len(words) for words in rows}) > 1:
        return counts.total() >= _MIN_TEXTS_PER_BAR_WORD * len(counts)
    recurring = [word for word, count in counts.items() if count > 1]
    moving_count = sum(_is_moving(positions[word]) for word in recurring)
    return 0 < moving_count >= _MIN_MOVING_SHARE * len(recurring)


def _is_moving(positions: Counter[int]) -> bool:
    """Return whether a word changes its position: a share of `_MIN_ELSEWHERE` is not at the most frequent one."""
    total = positions.total()
    return total - max(positions.values()) >= _MIN_ELSEWHERE * total


def _are_numbers(rows: list[list[str]], delimiter: str) -> bool:
    """Return whether all words are integers that may be parts of a number or a date, such as `12,5`, `1,234,567` or `5/7/2017`.

    They may if all texts have equally many of them or, without `|`, if none has more than two, or all but the first have three
    digits.
    """
    if not all(_NUMBER.fullmatch(word) for words in rows for word in words):
        return False
    lengths = {len(words) for words in rows}
    if len(lengths) == 1 or delimiter == "|":
        return len(lengths) == 1
    return max(lengths) <= 2 or all(_GROUPED_NUMBER.fullmatch(",".join(words)) for words in rows)


def _check_value_type(kind: pa.DataType) -> None:
    """Raise TypeError if a list with elements of this type contains no words."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind) and _find_name_field(kind) is None:
        raise TypeError(f"a list of {kind}")
    is_plain = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
    if not (is_plain or pa.types.is_struct(kind) or pa.types.is_null(kind) or pa.types.is_floating(kind)):
        raise TypeError(f"a list of {kind}")


def _find_name_field(kind: pa.DataType) -> str | None:
    """Return the name of a struct's text field: one with a usual name, or else the only text field; None otherwise."""
    fields = [
        field.name for field in kind if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    ]
    return next((name for name in _NAMES if name in fields), fields[0] if len(fields) == 1 else None)


def _flatten_words(value: Any) -> list[str]:
    """Flatten a value of any depth to its words, in order; if lists are nested, each word is kept once.

    Raises:
        TypeError: If an object has no text field that is its name.
    """
    if value is None:
        return []
    if isinstance(value, (list, tuple, set)):
        words = [word for element in value for word in _flatten_words(element)]
        is_nested = any(isinstance(element, (list, tuple, set)) for element in value)
        return list(dict.fromkeys(words)) if is_nested else words
    if isinstance(value, dict):
        keys = [key for key, content in value.items() if isinstance(content, str)]
        key = next((key for key in _NAMES if key in keys), keys[0] if len(keys) == 1 else None)
        if key is None:
            raise TypeError("a list of objects without a name")
        return [value[key]]
    return [value] if isinstance(value, str) else [str(value)]
