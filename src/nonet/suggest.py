"""The closest known word, for errors that suggest what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` with a leading space, or nothing when no known word is near."""
    lowered = {str(name).lower(): str(name) for name in known}
    near = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)
    return f" Did you mean {lowered[near[0]]!r}?" if near else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the middle of a sentence, or nothing when no known word is near."""
    near = did_you_mean(word, known).strip().removeprefix("Did ")
    return f" (did {near})" if near else ""


def listed(names: Iterable[object], limit: int = 12) -> str:
    """`a, b, c, ... (20 in all)`; `none` for nothing."""
    words = [str(name) for name in names]
    if not words:
        return "none"
    tail = f", ... ({len(words)} in all)" if len(words) > limit else ""
    return ", ".join(words[:limit]) + tail
