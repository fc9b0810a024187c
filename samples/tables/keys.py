"""Sparse keys: 64-bit hashes of ids that name a row of an embedding table in every data set.

An id is first converted to an integer: an integer stays as it is, a text such as "42" becomes that integer, and any other
text becomes its hash (`nonet.embedding.modules.features.hash_text`). The key mixes this integer with the *space* of the id
(item, user, or the name of a column), so two features may share a table. Within a space, integers never collide because the
mixing is a bijection. Texts collide with the probability of 64-bit hashes: among 10 million texts, the probability that any two
collide is 3e-6.
"""

# Shapes: N ids.

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.embedding import splitmix64
from nonet.random import hash_words
from nonet.samples.tables.ids import CANONICAL_INTEGER

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

NONE = np.iinfo(np.int64).min
"""The integer of a missing id."""


def as_numbers(ids: pa.ChunkedArray | pa.Array | np.ndarray) -> np.ndarray:
    """Convert ids [N] to integers [N] int64 by the rule of the module; missing ids become NONE.

    Booleans become 0 and 1; unsigned integers above 2^63 - 1 keep their bits. For other types, Arrow's error is raised.
    """
    array = _to_arrow(ids)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        encoded = array.dictionary_encode()
        distinct_numbers = _hash_texts(encoded.dictionary)
        distinct_index = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        numbers = (
            distinct_numbers[distinct_index] if len(distinct_numbers) else np.zeros(len(array), np.int64)
        )
    elif array.type == pa.uint64():
        numbers = array.fill_null(0).to_numpy(zero_copy_only=False).view(np.int64).copy()
    else:
        integers = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
        numbers = integers.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=False).copy()
    if array.null_count:
        numbers[array.is_null().to_numpy(zero_copy_only=False)] = NONE
    return numbers


def compute_keys(space: str, numbers: np.ndarray) -> np.ndarray:
    """Compute the keys of ids of a space; they are the same in every process, version and data set.

    Args:
        space: "item", "user", or the name of a column.
        numbers: Ids as integers [N] int64 (`as_numbers`).

    Returns:
        Keys [N] int64.
    """
    salt = np.uint64(hash_words(0, "sparse keys", space))
    return splitmix64(np.asarray(numbers, np.int64).view(np.uint64) ^ salt).view(np.int64)


def _to_arrow(ids: Any) -> Any:
    if isinstance(ids, pa.ChunkedArray):
        return ids.combine_chunks()
    if isinstance(ids, np.ndarray):
        return pa.array(ids.tolist() if ids.dtype.kind in "OU" else ids)
    return ids


def _hash_texts(texts: pa.Array) -> np.ndarray:
    """Convert texts [N] to int64: integers in their usual form to their value, other texts to their hash."""
    # This imports torch, which is not needed to profile tables.
    from nonet.embedding.modules import hash_text

    numbers = hash_text(texts)
    is_integer = pc.fill_null(pc.match_substring_regex(texts, CANONICAL_INTEGER), False)
    index = np.flatnonzero(is_integer.to_numpy(zero_copy_only=False))
    numbers[index] = texts.take(pa.array(index)).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return numbers
