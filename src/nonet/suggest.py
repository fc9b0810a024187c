"""Suggestions of similar words for error messages."""

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
        cutoff: The smallest similarity, from 0 to 1.

    Returns:
        The matches; empty if no word is similar enough.
    """
    lowered = {str(name).lower(): str(name) for name in known}
    return [lowered[near] for near in difflib.get_close_matches(word.lower(), lowered, max_matches, cutoff)]


def suggest_sentence(word: str, known: Iterable[str]) -> str:
    """Return the sentence `" Did you mean 'x'?"` with a leading space, or an empty string if no word is close."""
    return "".join(f" Did you mean {near!r}?" for near in find_close_matches(word, known))


def suggest_inline(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for use inside a sentence, or an empty string if no word is close."""
    return "".join(f" (did you mean {near!r}?)" for near in find_close_matches(word, known))


def join_names(names: Iterable[object], limit: int = 12) -> str:
    """Join names as `a, b, c, ... (20 in all)`; return `none` if there are no names."""
    words = [str(name) for name in names]
    if not words:
        return "none"
    tail = f", ... ({len(words)} in all)" if len(words) > limit else ""
    return ", ".join(words[:limit]) + tail
