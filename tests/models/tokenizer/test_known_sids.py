"""Semantic ids of items that a run starts with."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.errors import ConfigError, DataError
from nonet.models.tokenizer.known_sids import KnownSids

# Six items in three heaps along a line; two levels of codes and a number.
VECTORS = np.array([[0.0], [0.2], [10.0], [10.4], [20.0], [20.2]], np.float32)
SIDS = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [2, 0, 0], [2, 1, 0]], np.int32)
KEYS = np.array([50, 40, 30, 20, 10, 0])
KNOWN = KnownSids(KEYS, SIDS, (3, 2, 2), "run r")


def test_known_items_keep_their_ids_whatever_their_order():
    order = np.array([3, 0, 5])
    assert KNOWN.extend(VECTORS[order], KEYS[order]).tolist() == SIDS[order].tolist()


def test_a_new_item_gets_the_nearest_codes_and_the_next_number():
    new = np.array([[10.4], [19.9]], np.float32)
    sids = KNOWN.extend(np.concatenate([VECTORS, new]), np.append(KEYS, [7, 8]))
    assert sids[6:].tolist() == [[1, 1, 1], [2, 0, 1]]


def test_where_a_tuple_is_full_the_next_nearest_code_is_taken():
    new = np.array([[10.41], [10.42]], np.float32)
    sids = KNOWN.extend(np.concatenate([VECTORS, new]), np.append(KEYS, [7, 8]))
    assert sids[6:].tolist() == [[1, 1, 1], [1, 0, 1]]


def test_ids_of_items_that_are_not_in_this_data_stay_taken():
    data = np.array([0, 1, 2, 4])
    new = np.array([[10.4]], np.float32)
    sids = KNOWN.extend(np.concatenate([VECTORS[data], new]), np.append(KEYS[data], 7))
    assert sids[4].tolist() not in SIDS.tolist()


def test_no_room_and_nothing_known_are_said():
    new = np.full((9, 1), 10.0, np.float32)
    with pytest.raises(DataError, match=r"no semantic id is left below the codes \[1\]"):
        KNOWN.extend(np.concatenate([VECTORS, new]), np.append(KEYS, np.arange(100, 109)))
    with pytest.raises(DataError, match="none of the 2 items is known to run r"):
        KNOWN.extend(VECTORS[:2], np.array([100, 101]))


def test_a_file_of_ids_must_keep_those_of_known_items_and_the_codes():
    wider = np.concatenate([SIDS, [[2, 1, 1]]]).astype(np.int32)
    assert KNOWN.check(wider, (3, 2, 2), np.append(KEYS, 7)) == (3, 2, 2)
    with pytest.raises(ConfigError, match="not those that run r was trained with"):
        KNOWN.check(SIDS[::-1], (3, 2, 1), KEYS)
    with pytest.raises(ConfigError, match=r"codes by level \[3, 2, 2\]"):
        KNOWN.check(np.concatenate([SIDS, [[3, 0, 0]]]), (4, 2, 1), np.append(KEYS, 7))
