"""Texts for terminals: suggestions of similar words, and texts of a run without control characters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def find_close_matches(
    word: str, known: Iterable[str], max_matches: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return the known words that are closest to `word`, ignoring case, best match first.

    Args:
        word: The misspelled word.
        known: The valid words.
        max_matches: The largest number of matches.
        cutoff: The smallest similarity, from 0 to 1 (the `ratio` of `difflib.SequenceMatcher`).

    Returns:
        The matches; empty if no word is similar enough.
    """
    known_by_lower = {str(name).lower(): str(name) for name in known}
    matches = difflib.get_close_matches(word.lower(), known_by_lower, max_matches, cutoff)
    return [known_by_lower[match] for match in matches]


def suggest_sentence(word: str, known: Iterable[str]) -> str:
    """Return the sentence `" Did you mean 'x'?"` with a leading space, or an empty string if no word is close."""
    return "".join(f" Did you mean {match!r}?" for match in find_close_matches(word, known))


def suggest_inline(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for use inside a sentence, or an empty string if no word is close."""
    return "".join(f" (did you mean {match!r}?)" for match in find_close_matches(word, known))


def join_names(names: Iterable[object], limit: int = 12) -> str:
    """Return names as `a, b, c`, or `none` if there are no names; above `limit`, as `a, b, ... (20 in all)`."""
    words = [str(name) for name in names]
    if not words:
        return "none"
    tail = f", ... ({len(words)} in all)" if len(words) > limit else ""
    return ", ".join(words[:limit]) + tail


def make_printable(text: str) -> str:
    """Return a text from a run for a terminal: without control characters, which could steer it, apart from line breaks."""
    return "".join(
        mark if mark == "\n" or mark.isprintable() else " " if mark.isspace() else "" for mark in text
    )


def truncate(text: str, width: int) -> str:
    """Shorten a text to a number of characters; "…" marks the end of a shortened text."""
    return text if len(text) <= width else text[: width - 1] + "…"
