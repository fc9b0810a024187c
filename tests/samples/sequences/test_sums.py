"""Sums over sequences."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.sequences import EventTotals, build_sequences, count_duplicates, index_items


def test_copies_are_counted_by_user_item_and_second_however_ties_are_ordered():
    user = np.array([0, 0, 0, 0, 1, 1, 1])
    item = np.array([5, 6, 5, 5, 5, 5, 6])
    time = np.array([1, 1, 1, 2, 2, 2, 2])
    assert (
        count_duplicates(user, item, time) == 2
    )  # item 5 of user 0 at second 1, item 5 of user 1 at second 2
    assert count_duplicates(user[:1], item[:1], time[:1]) == 0
    assert count_duplicates(user[:0], item[:0], time[:0]) == 0


def test_sums_of_sequences_count_copies_of_all_parts():
    rows = [(user, user + place, 1_600_000_000 + place) for user in range(30) for place in range(6)]
    columns = [list(column) for column in zip(*(rows + rows[:40]), strict=True)]
    table = pa.table(dict(zip(("user_id", "item_id", "timestamp"), columns, strict=True)))
    split = {"use": "leave_last_out", "test": 1, "valid": 1, "rl": 0}
    assert EventTotals.from_sequences(build_sequences(table, None, split=split)[0]).duplicates == 40


@pytest.mark.parametrize(
    ("mine", "there", "said"),
    [
        (
            ["0007", "0010"],
            ["7", "10"],
            "2 of them differ .* only in zeros in front: '0007' here, '7' there.*as text",
        ),
        (["7.0", "10.0"], ["7", "10"], r"only in a fraction of \.0: '7\.0' here.*floats"),
        (["7", "10"], ["7.0", "10.00"], r"only in a fraction of \.0"),
        (["a", "b"], ["7", "10"], "Add those items"),
        (["0007", "b", "c"], ["7", "10"], "Add those items"),
    ],
)
def test_ids_that_are_only_written_otherwise_are_named_so(mine, there, said):
    with pytest.raises(DataError, match=said) as raised:
        index_items(pa.chunked_array([mine]), pa.chunked_array([there]))
    assert "\n" not in str(raised.value)
