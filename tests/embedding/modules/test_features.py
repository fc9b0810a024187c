"""Text keys: stable, distinct, the same for every way a text can arrive."""

from __future__ import annotations

import cProfile

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.embedding.modules.features import hash_text, read_jagged_keys
from nonet.embedding.slices import splitmix64
from nonet.errors import DataError

TEXTS = ["", "a", "ab", "exactly8", "exactly8!", "Łódź", "東京都", "x" * 100, "a\0", "\0"]


def slow_hash(text):
    """Hash by the definition, one text at a time."""
    data = text.encode()
    value = splitmix64(np.array([len(data)], np.uint64))
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little")
        value = splitmix64(value ^ np.uint64(word))
    return int(value.view(np.int64)[0])


def test_the_vectorised_hash_is_its_definition():
    assert hash_text(TEXTS).tolist() == [slow_hash(text) for text in TEXTS]


def test_keys_do_not_change_over_versions():
    # Rows in checkpoints are found by these: a change of them orphans every text row there is.
    assert hash_text(["", "a", "Toy Story (1995)"]).tolist() == GOLDEN


GOLDEN = [-2152535657050944081, 6774081908283191102, 9109315534608759058]


def test_lists_arrays_and_arrow_give_the_same_keys():
    expected = hash_text(TEXTS)
    for form in (
        np.array(TEXTS, object),
        pa.array(TEXTS),
        pa.array(TEXTS, pa.large_string()),
        pa.chunked_array([TEXTS[:3], TEXTS[3:]]),
        pa.array(["skipped", *TEXTS])[1:],
    ):
        assert np.array_equal(hash_text(form), expected)


def test_a_missing_text_has_a_key_of_its_own():
    keys = hash_text(["a", None, "", None])
    assert keys[1] == keys[3]
    assert len(set(keys.tolist())) == 3


def test_near_texts_have_distinct_keys():
    texts = [f"item-{n:06d}" for n in range(200_000)]
    assert len(np.unique(hash_text(texts))) == len(texts)


def test_every_bit_of_a_key_is_set_about_half_the_time():
    keys = hash_text([f"user {n}" for n in range(20_000)]).view(np.uint64)
    share = [float(((keys >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
    assert 0.47 < min(share) < max(share) < 0.53  # 8 standard deviations of 0.0035


def test_the_calls_for_texts_do_not_grow_with_their_number():
    calls = []
    for count in (1000, 50_000):
        texts = pa.array([f"a city with a name {n}" for n in range(count)])
        hash_text(texts)
        profile = cProfile.Profile()
        profile.enable()
        hash_text(texts)
        profile.disable()
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] <= 2 * calls[0]


def test_flat_ids_are_bags_of_one():
    keys, offsets = read_jagged_keys("item", np.array([5, 7]), text=False)
    assert keys.tolist() == [5, 7]
    assert offsets.tolist() == [0, 1, 2]


def test_numbers_in_a_text_feature_are_refused():
    with pytest.raises(DataError, match=r"'city'.*text"):
        read_jagged_keys("city", torch.tensor([1]), text=True)
    with pytest.raises(DataError, match="'city'"):
        read_jagged_keys("city", [1, 2], text=True)
