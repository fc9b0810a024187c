"""What a run says of who is ranked, and how."""

from __future__ import annotations

import pytest

from nonet.controller.pipeline import evaluation_notes
from nonet.controller.scenario.scenario import load_scenario

SMALL = {"users": 900, "users_only_trained": 100, "items": 3500}
LARGE = {"users": 900_000, "users_only_trained": 100_000, "items": 60_000}


@pytest.mark.parametrize(
    ("changes", "data", "said"),
    [
        ([], SMALL, []),
        ([], LARGE, ["20,000 of 800,000 tested users", "beam alone among 60,000 items"]),
        (["evaluate.users=all", "evaluate.exhaustive='on'"], LARGE, []),
        (["evaluate.users=500", "evaluate.exhaustive='off'"], SMALL, ["500 of 800", "beam alone"]),
    ],
)
def test_drawn_users_and_beams_alone_are_told(changes, data, said):
    scenario, _ = load_scenario("quickstart", changes)
    notes = list(evaluation_notes(scenario, data))
    assert len(notes) == len(said)
    assert all(words in note for words, note in zip(said, notes, strict=True))
