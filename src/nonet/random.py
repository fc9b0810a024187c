"""Counter-based randomness: no generator whose state would need saving.

`rng(seed, *words)` keys a Philox generator by a hash of its words, so the same words give the same numbers in any
process, in any order, after any restart (docs/design.md, section 9). Philox: Salmon et al., SC 2011.
"""

from __future__ import annotations

import hashlib

import numpy as np


def key(seed: int, *words: str | int) -> int:
    """A 64-bit key for these words; stable over processes and versions."""
    text = "\x1f".join([str(seed), *map(str, words)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def rng(seed: int, *words: str | int) -> np.random.Generator:
    """A NumPy generator that depends on `seed` and `words` alone, e.g. rng(7, "pretrain", 12, uid, "beam")."""
    return np.random.Generator(np.random.Philox(key=key(seed, *words)))
