"""Sparse keys: hashes of ids that mean the same everywhere."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nonet.samples.tables.keys import NONE, as_numbers, compute_keys


def test_whole_numbers_are_themselves_and_missing_ids_are_none():
    assert as_numbers(pa.array([5, None, -(1 << 62)])).tolist() == [5, NONE, -(1 << 62)]
    assert as_numbers(pa.array([True, False])).tolist() == [1, 0]
    assert len(set(as_numbers(pa.array([1 << 63, (1 << 63) + 1], pa.uint64())).tolist())) == 2


def test_text_that_is_written_like_a_number_is_that_number_and_no_other_is():
    texts = ["42", "-7", "0", "042", "4 2", "", "9" * 18, "9" * 19, "1e3", None]
    numbers = as_numbers(pa.array(texts)).tolist()
    assert numbers[:3] == [42, -7, 0]
    assert numbers[6] == 10**18 - 1
    assert numbers[9] == NONE
    assert len(set(numbers)) == len(texts)
    assert not {42, 0, 1000} & {numbers[i] for i in (3, 4, 5, 7, 8)}


def test_numpy_arrow_and_chunked_ids_have_the_same_numbers():
    texts = ["b", "a", "b", None]
    wanted = as_numbers(pa.array(texts)).tolist()
    assert as_numbers(pa.chunked_array([texts[:1], texts[1:]])).tolist() == wanted
    assert as_numbers(np.array(texts, object)).tolist() == wanted
    assert as_numbers(np.array(texts[:3])).tolist() == wanted[:3]


def test_keys_of_a_space_never_collide_for_whole_numbers_and_differ_between_spaces():
    numbers = np.arange(-5000, 5000)
    item, user = compute_keys("item", numbers), compute_keys("user", numbers)
    assert len(np.unique(np.concatenate([item, user]))) == 20000


def test_a_key_is_the_same_in_every_version():
    """Tables outlive a version: whoever changes these numbers makes every commit's rows strangers."""
    assert compute_keys("item", as_numbers(pa.array([1, 2]))).tolist() == [
        -5583067502916006833,
        -7352770723760553921,
    ]
    assert compute_keys("user", as_numbers(pa.array(["ann", None]))).tolist() == [
        4134988139485342199,
        -2566259245848750797,
    ]
