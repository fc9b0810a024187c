"""Sparse keys: 64-bit hashes of ids that name a row of an embedding table in every data set.

An id is first converted to an integer: an integer stays as it is, a text such as "42" becomes that integer, and any other
text becomes its hash (`nonet.embedding.modules.features.hash_text`). The key mixes this integer with the *space* of the id
(item, user, or the name of a column), so two features may share a table. Within a space, integers never collide because the
mixing is a bijection. Texts collide with the probability of 64-bit hashes: 3e-6 for any pair among 10 million.
"""

# Shapes: N ids.

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.embedding import splitmix64
from nonet.random import hash_words

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

NONE = np.iinfo(np.int64).min
"""What `as_numbers` gives for an id that is missing."""

_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"


def as_numbers(ids: pa.ChunkedArray | pa.Array | np.ndarray) -> np.ndarray:
    """Convert ids [N] to int64: integers and booleans unchanged, text by the rule above, missing ids to NONE.

    Unsigned integers above 2^63 keep their bits. Other types raise Arrow's TypeError.
    """
    array = _to_arrow(ids)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        coded = array.dictionary_encode()
        numbers = _hash_texts(coded.dictionary)
        places = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        numbers_read = numbers[places] if len(numbers) else np.zeros(len(array), np.int64)
    elif array.type == pa.uint64():
        numbers_read = array.fill_null(0).to_numpy(zero_copy_only=False).view(np.int64).copy()
    else:
        whole = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
        numbers_read = whole.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=False).copy()
    if array.null_count:
        numbers_read[array.is_null().to_numpy(zero_copy_only=False)] = NONE
    return numbers_read


def compute_keys(space: str, numbers: np.ndarray) -> np.ndarray:
    """Return the keys [N] int64 of integers [N] int64 as ids of a space; the same in every process, version and data set."""
    salt = np.uint64(hash_words(0, "sparse keys", space))
    return splitmix64(np.asarray(numbers, np.int64).view(np.uint64) ^ salt).view(np.int64)


def _to_arrow(ids: Any) -> Any:
    if isinstance(ids, pa.ChunkedArray):
        return ids.combine_chunks()
    if isinstance(ids, np.ndarray):
        return pa.array(ids.tolist() if ids.dtype.kind in "OU" else ids)
    return ids


def _hash_texts(texts: pa.Array) -> np.ndarray:
    """Convert texts to int64: canonical integers to their value, other texts to their hash."""
    from nonet.embedding.modules import hash_text  # imports torch, which profiles of tables do without

    numbers = hash_text(texts)
    whole = pc.fill_null(pc.match_substring_regex(texts, _WHOLE), False)
    at = np.flatnonzero(whole.to_numpy(zero_copy_only=False))
    numbers[at] = texts.take(pa.array(at)).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return numbers
