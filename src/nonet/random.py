"""Counter-based random numbers: no generator has state that would have to be saved.

`rng(seed, *words)` returns a Philox generator whose key is a hash of the seed and the words. The same words give the same
numbers in any process, in any order and after any restart (docs/explanation/design.md, section 6). Philox: Salmon et al.,
SC 2011.
"""

from __future__ import annotations

import hashlib

import numpy as np


def hash_words(seed: int, *words: str | int) -> int:
    """Hash a seed and words to a 64-bit integer that is the same in every process and version.

    Args:
        seed: The seed of the run.
        words: Words that name the purpose, for example `"pretrain", 12, uid, "beam"`.
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
    """Return the first integer of each of N generators, without creating the generators.

    Entry i equals `rng(seed, *words, numbers[i]).integers(0, high)`.

    Args:
        seed: The seed of the run.
        words: The leading words of all generators.
        numbers: The last word of each generator, integers [N].
        high: The exclusive upper bound, below 2^32.

    Returns:
        The integers, int64 [N]; bit for bit those of NumPy's Philox 4x64-10 and its bounded integers (Lemire's method).
    """
    prefix = hashlib.blake2b("".join(f"{word}\x1f" for word in (seed, *words)).encode(), digest_size=8)
    digests = bytearray()
    for number in numbers.tolist():
        digest = prefix.copy()
        digest.update(b"%d" % number)
        digests += digest.digest()
    # NumPy uses the low 32 bits of the first word, and scales them to the range by a multiplication.
    draws = _compute_first_philox_words(np.frombuffer(bytes(digests), "<u8")) & np.uint64(_UINT32)
    scaled = draws * np.uint64(high)
    values = (scaled >> np.uint64(32)).astype(np.int64)
    is_rejected = (scaled & np.uint64(_UINT32)) < np.uint64((1 << 32) % high)
    # A rejected draw is repeated with further words of its generator; the probability is below high / 2^32.
    for index in np.flatnonzero(is_rejected).tolist():
        values[index] = rng(seed, *words, int(numbers[index])).integers(0, high)
    return values


def draw_numbers(
    seed: int, words: tuple[str | int, ...], first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """Return a random 64-bit integer for each of N pairs of integers, without creating generators.

    Args:
        seed: The seed of the run.
        words: Words that name the purpose; with the seed, they are the key of Philox.
        first: First integers of the pairs [N] int64.
        second: Second integers of the pairs [N] int64; each pair is a counter of Philox.

    Returns:
        The random integers [N] uint64, which depend only on the seed, the words and the pair.
    """
    counters = [np.asarray(values, np.int64).view(np.uint64) for values in (first, second)]
    key = np.full(len(first), hash_words(seed, *words), np.uint64)
    return _compute_first_philox_words(key, *counters)


_UINT32 = 0xFFFFFFFF
# Constants of Philox 4x64: the multipliers of a round, and the increments of the key after a round.
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def _compute_first_philox_words(
    keys: np.ndarray, first: np.ndarray | int = 1, second: np.ndarray | int = 0
) -> np.ndarray:
    """Return the first word [N] uint64 of Philox 4x64-10 at counters (first, second, 0, 0), for keys (k, 0), k in `keys` [N]."""
    words = [np.broadcast_to(np.asarray(start, np.uint64), keys.shape) for start in (first, second, 0, 0)]
    key_0, key_1 = keys.astype(np.uint64), np.zeros(len(keys), np.uint64)
    for _ in range(10):  # rounds
        high_0, low_0 = _multiply(words[0], _MULTIPLIERS[0])
        high_1, low_1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high_1 ^ words[1] ^ key_0, low_1, high_0 ^ words[3] ^ key_1, low_0]
        key_0, key_1 = key_0 + np.uint64(_KEY_INCREMENTS[0]), key_1 + np.uint64(_KEY_INCREMENTS[1])
    return words[0]


def _multiply(values: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and the low 64 bits of the 128-bit products of `values` [N] and a factor, each [N] uint64.

    NumPy has no 128-bit integers, so the high bits are computed from products of 32-bit halves: a1, a0 and b1, b0.
    """
    shift, mask = np.uint64(32), np.uint64(_UINT32)
    a1, a0 = values >> shift, values & mask
    b1, b0 = np.uint64(factor >> 32), np.uint64(factor & _UINT32)
    a0_b0, a1_b0 = a0 * b0, a1 * b0
    middle = (
        (a0_b0 >> shift) + (a1_b0 & mask) + a0 * b1
    )  # bits 32 to 95 of the product, without the rest of a1_b0
    return a1 * b1 + (a1_b0 >> shift) + (middle >> shift), values * np.uint64(factor)
