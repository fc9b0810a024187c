"""Counter-based random numbers: no generator has state that would have to be saved.

`rng(seed, *words)` keys a Philox generator by a hash of its words. The same words give the same numbers in any
process, in any order and after any restart (docs/explanation/design.md, section 6). Philox: Salmon et al., SC 2011.
"""

from __future__ import annotations

import hashlib

import numpy as np


def hash_words(seed: int, *words: str | int) -> int:
    """Hash a seed and words to a 64-bit key that is the same in every process and version.

    Args:
        seed: The seed of the run.
        words: Words that name the purpose, for example "pretrain", a step and a user id.
    """
    text = "\x1f".join([str(seed), *map(str, words)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def rng(seed: int, *words: str | int) -> np.random.Generator:
    """Return a NumPy generator that depends only on `seed` and `words`.

    Args:
        seed: The seed of the run.
        words: Words that name the purpose, for example `"pretrain", 12, uid, "beam"`.
    """
    return np.random.Generator(np.random.Philox(key=hash_words(seed, *words)))


def draw_first_integers(
    seed: int, words: tuple[str | int, ...], numbers: np.ndarray, high: int
) -> np.ndarray:
    """Draw the first integer of N generators without creating the generators.

    Entry i equals `rng(seed, *words, numbers[i])` followed by one draw `.integers(0, high)`.

    Args:
        seed: The seed of the run.
        words: The leading words of all generators.
        numbers: The last word of each generator, integers [N].
        high: The exclusive upper bound, below 2^32.

    Returns:
        The draws, int64 [N]; bit for bit those of NumPy's Philox 4x64-10 and its bounded integers (Lemire's
            method).
    """
    prefix = hashlib.blake2b("".join(f"{word}\x1f" for word in (seed, *words)).encode(), digest_size=8)
    digests = bytearray()
    for number in numbers.tolist():
        digest = prefix.copy()
        digest.update(b"%d" % number)
        digests += digest.digest()
    draws = _compute_first_philox_words(np.frombuffer(bytes(digests), "<u8")) & np.uint64(_UINT32)
    scaled = draws * np.uint64(high)
    values = (scaled >> np.uint64(32)).astype(np.int64)
    rejected = (scaled & np.uint64(_UINT32)) < np.uint64((1 << 32) % high)
    for at in np.flatnonzero(
        rejected
    ).tolist():  # probability high / 2^32: the generator rejects and draws again
        values[at] = rng(seed, *words, int(numbers[at])).integers(0, high)
    return values


_UINT32 = 0xFFFFFFFF
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def _compute_first_philox_words(keys: np.ndarray) -> np.ndarray:
    """Return the first 64-bit word [N] of Philox 4x64-10 at counter 1 for keys (k, 0), with k uint64 [N]."""
    words = [np.full(len(keys), start, np.uint64) for start in (1, 0, 0, 0)]
    first, second = keys.astype(np.uint64), np.zeros(len(keys), np.uint64)
    for _ in range(10):
        high_0, low_0 = _multiply(words[0], _MULTIPLIERS[0])
        high_1, low_1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high_1 ^ words[1] ^ first, low_1, high_0 ^ words[3] ^ second, low_0]
        first, second = first + np.uint64(_WEYL[0]), second + np.uint64(_WEYL[1])
    return words[0]


def _multiply(values: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and the low 64 bits of the products of 64-bit numbers [N]."""
    half, low = np.uint64(32), np.uint64(_UINT32)
    a1, a0 = values >> half, values & low
    b1, b0 = np.uint64(factor >> 32), np.uint64(factor & _UINT32)
    low_low, middle = a0 * b0, a1 * b0
    carry = (low_low >> half) + (middle & low) + a0 * b1
    return a1 * b1 + (middle >> half) + (carry >> half), values * np.uint64(factor)
