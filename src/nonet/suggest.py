"""The closest known words, for errors that suggest what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_to(word: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words nearest to `word`, letters' case aside, best first; none where no word is near."""
    lowered = {str(name).lower(): str(name) for name in known}
    return [lowered[near] for near in difflib.get_close_matches(word.lower(), lowered, most, cutoff)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` with a leading space, or nothing when no known word is near."""
    return "".join(f" Did you mean {near!r}?" for near in close_to(word, known))


def suggestion(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the middle of a sentence, or nothing when no known word is near."""
    return "".join(f" (did you mean {near!r}?)" for near in close_to(word, known))


def listed(names: Iterable[object], limit: int = 12) -> str:
    """`a, b, c, ... (20 in all)`; `none` for nothing."""
    words = [str(name) for name in names]
    if not words:
        return "none"
    tail = f", ... ({len(words)} in all)" if len(words) > limit else ""
    return ", ".join(words[:limit]) + tail
