"""What `nonet sids` says of ids whose groups are known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from nonet.deploy.after import sids

# Two groups of two items; the last level numbers the items of a group.
SIDS = np.array([[0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 2, 0]], np.int32)
ITEMS = pa.table(
    {
        "item_id": [10, 11, 12, 13],
        "title": ["a", "b" * 90, "c d", "e"],
        "categories": [["x"], ["x", "y"], [], ["z"]],
    }
)


def make_corpus(codes=SIDS):
    """A corpus in which item 0 is followed 3 times by 1 and once by 2, and item 2 by itself and by 3."""
    counts = type("Counts", (SimpleNamespace,), {"__len__": lambda self: 4})
    transitions = counts(
        row=np.array([0, 2, 2, 4, 4]),
        item=np.array([1, 2, 2, 3]),
        count=np.array([3.0, 1.0, 5.0, 4.0]),
        occurs=np.array([4, 2, 3, 1]),
    )
    return SimpleNamespace(sids=codes, codes=(2, 3, 2), items=ITEMS, transitions=transitions)


def test_neighbours_are_pairs_of_different_items_by_their_counts():
    shares = list(sids._compare_prefixes(make_corpus()))
    assert [level["neighbours"] for level in shares] == [7 / 8, 3 / 8, 0]
    same_item = 0.4**2 + 0.2**2 + 0.3**2 + 0.1**2
    for level, groups in zip(shares, ([0.6, 0.4], [0.6, 0.3, 0.1], [0.4, 0.2, 0.3, 0.1]), strict=True):
        chance = (sum(share**2 for share in groups) - same_item) / (1 - same_item)
        assert level["random"] == pytest.approx(chance)


@pytest.mark.parametrize(
    ("codes", "numbers"),
    [(SIDS, True), (SIDS[:, :2], False), (SIDS[:, :1], False), (SIDS[[1, 0, 2, 3]], False)],
)
def test_a_level_that_has_collision_level_is_found(codes, numbers):
    assert sids._has_collision_level(codes) is numbers


def test_groups_are_by_size_and_show_their_most_frequent_items_with_short_titles():
    first, second = sids._describe_groups(make_corpus())
    assert (first["code"], first["items"], first["events"]) == (0, 2, 0.6)
    assert first["words"] == ["x", "y"]
    assert first["titles"][0] == "a"
    assert first["titles"][1] == "b" * 39 + "…"
    assert second["titles"] == ["c d", "e"]


def test_added_items_are_compared_with_the_first_ones():
    first = make_corpus()
    assert sids._describe_new_items(first, first, 2) is None
    newest = make_corpus(np.concatenate([SIDS, [[0, 1, 2], [0, 2, 0]]]).astype(np.int32))
    assert sids._describe_new_items(first, newest, 2) == {"items": 2, "shared": 0.5, "drift": 0.5}


def test_a_picture_has_a_part_for_each_prefix_with_its_codes():
    picture = sids.draw_prefixes(make_corpus())
    assert picture.count("<rect") == 2 + 3 + 4
    assert "<title>0 1: 2 items</title>" in picture
