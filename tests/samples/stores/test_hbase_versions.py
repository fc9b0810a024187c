"""The search for versions as of a time, without a server: what is counted are the calls that it asks for."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.samples.stores.hbase_versions import VersionSearch


def search(versions: list[np.ndarray], slots: np.ndarray, before: np.ndarray) -> tuple[VersionSearch, int]:
    """Answer every request from `versions`, the times of each slot; the search and how many groups it called for."""
    made, calls = VersionSearch(slots, before, len(versions)), 0
    while groups := list(made.iterate_groups()):
        calls += len(groups)
        for time, mine in groups:
            older = [versions[slot][versions[slot] < time] for slot in mine.tolist()]
            made.add_versions(
                mine, [(b"%d" % times[-1], int(times[-1])) if len(times) else None for times in older]
            )
    return made, calls


@pytest.mark.parametrize("items", [200, 2000])
def test_items_whose_version_is_older_than_all_times_take_one_call_whatever_their_number(items):
    slots = np.random.default_rng(0).integers(0, items, 4 * items)
    made, calls = search([np.array([1000])] * items, slots, np.full(4 * items, 5000))
    assert calls == 1
    assert (made.answer >= 0).all()


def test_items_that_were_written_together_take_a_call_per_version_and_one_more_at_most():
    rng, nights = np.random.default_rng(1), np.array([100, 200, 300, 400])
    slots, before = rng.integers(0, 500, 4000), rng.integers(50, 500, 4000)
    made, calls = search([nights] * 500, slots, before)
    assert calls <= len(nights) + 1
    told = [int(made.cells[at]) if at >= 0 else -1 for at in made.answer.tolist()]
    assert told == [
        max((night for night in nights.tolist() if night < time), default=-1) for time in before.tolist()
    ]
