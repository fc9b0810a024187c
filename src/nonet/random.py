"""Counter-based randomness: no generator whose state would need saving.

`rng(seed, *words)` keys a Philox generator by a hash of its words, so the same words give the same numbers in any
process, in any order, after any restart (docs/explanation/design.md, section 9). Philox: Salmon et al., SC 2011.
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


def first_integers(seed: int, words: tuple[str | int, ...], numbers: np.ndarray, high: int) -> np.ndarray:
    """Return for each number [N] what `rng(seed, *words, number).integers(0, high)` draws first, without N generators.

    Args:
        seed: the seed.
        words: what the generators' words begin with.
        numbers: [N] their last word, whole numbers.
        high: the exclusive upper bound, below 2^32.

    Returns:
        [N] int64, bit for bit those of NumPy's Philox 4x64-10 and of its bounded integers (Lemire's method).
    """
    prefix = hashlib.blake2b("".join(f"{word}\x1f" for word in (seed, *words)).encode(), digest_size=8)
    digests = bytearray()
    for number in numbers.tolist():
        digest = prefix.copy()
        digest.update(b"%d" % number)
        digests += digest.digest()
    draws = _first_philox_words(np.frombuffer(bytes(digests), "<u8")) & np.uint64(_UINT32)
    scaled = draws * np.uint64(high)
    values = (scaled >> np.uint64(32)).astype(np.int64)
    rejected = (scaled & np.uint64(_UINT32)) < np.uint64((1 << 32) % high)
    for at in np.flatnonzero(rejected).tolist():  # one in 2^32 / high: the generator draws again
        values[at] = rng(seed, *words, int(numbers[at])).integers(0, high)
    return values


_UINT32 = 0xFFFFFFFF
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def _first_philox_words(keys: np.ndarray) -> np.ndarray:
    """Return the first 64-bit word [N] of Philox 4x64-10 at counter 1 for keys (k, 0), k [N] uint64."""
    words = [np.full(len(keys), start, np.uint64) for start in (1, 0, 0, 0)]
    first, second = keys.astype(np.uint64), np.zeros(len(keys), np.uint64)
    for _ in range(10):
        high_0, low_0 = _multiply(words[0], _MULTIPLIERS[0])
        high_1, low_1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high_1 ^ words[1] ^ first, low_1, high_0 ^ words[3] ^ second, low_0]
        first, second = first + np.uint64(_WEYL[0]), second + np.uint64(_WEYL[1])
    return words[0]


def _multiply(values: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and the low 64 bits of products of 64-bit numbers [N]."""
    half, low = np.uint64(32), np.uint64(_UINT32)
    a1, a0 = values >> half, values & low
    b1, b0 = np.uint64(factor >> 32), np.uint64(factor & _UINT32)
    low_low, middle = a0 * b0, a1 * b0
    carry = (low_low >> half) + (middle & low) + a0 * b1
    return a1 * b1 + (middle >> half) + (carry >> half), values * np.uint64(factor)
