"""Sparse keys: what a row of a table is called in every data set: 64-bit hashes of ids, never places in one tokenise.

An id is first a number: a whole number as it is, a text that is written like one ("42") as that number, any other text by
its hash (`nonet.embedding.modules.features.hash_text`). The key mixes that number with the *space* it is an id in (item, user, a
column's name), so two features may share a table. Within a space whole numbers never collide (the mixing is one to one);
texts do with the chance of 64-bit hashes: 3e-6 that any two of 10 million meet.
"""

# Shapes: N ids.

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.embedding import splitmix64
from nonet.random import hash_words

pc: Any = pyarrow.compute  # its functions are made at import time, unknown to type checkers

NONE = np.iinfo(np.int64).min
"""What `as_numbers` gives for an id that is missing."""

_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"


def as_numbers(ids: pa.ChunkedArray | pa.Array | np.ndarray) -> np.ndarray:
    """Ids [N] as int64: whole numbers and booleans as they are, text by the rule above, missing ones as NONE.

    Unsigned numbers above 2^63 keep their bits. Raises ConfigError through Arrow's TypeError for other types.
    """
    array = _arrow(ids)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        coded = array.dictionary_encode()
        numbers = _of_texts(coded.dictionary)
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


def keys_in(space: str, numbers: np.ndarray) -> np.ndarray:
    """The keys [N] int64 of numbers [N] int64 as ids of a space; the same in every process, version and data set."""
    salt = np.uint64(hash_words(0, "sparse keys", space))
    return splitmix64(np.asarray(numbers, np.int64).view(np.uint64) ^ salt).view(np.int64)


def _arrow(ids: Any) -> Any:
    if isinstance(ids, pa.ChunkedArray):
        return ids.combine_chunks()
    if isinstance(ids, np.ndarray):
        return pa.array(ids.tolist() if ids.dtype.kind in "OU" else ids)
    return ids


def _of_texts(texts: pa.Array) -> np.ndarray:
    from nonet.embedding.modules import hash_text  # imports torch, which profiles of tables do without

    numbers = hash_text(texts)
    whole = pc.fill_null(pc.match_substring_regex(texts, _WHOLE), False)
    at = np.flatnonzero(whole.to_numpy(zero_copy_only=False))
    numbers[at] = texts.take(pa.array(at)).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return numbers
