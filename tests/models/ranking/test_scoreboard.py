import numpy as np

from nonet.models.ranking.kinds import MISSED, ListCatalogue
from nonet.models.ranking.scoreboard import Scoreboard


def test_groups_are_summed_up_alone_and_chunks_change_nothing():
    ranks = np.array([0, 3, MISSED, 1, 0])
    lists = np.array([[0, 1], [2, 3], [0, 1], [0, 2], [4, -1]])
    groups = {"all": np.ones(5, bool), "target": np.array([True, False, False, True, False])}
    for size in (1, 2, 5):
        board = Scoreboard(["recall@2", "coverage@1", "coverage"], ListCatalogue(np.zeros(10)), groups)
        for start in range(0, 5, size):
            board.add(ranks[start : start + size], lists[start : start + size])
        assert board.ranks.tolist() == ranks.tolist()
        assert board.summarise() == {
            "all": {"recall@2": 0.6, "coverage@1": 0.3, "coverage": 0.5},
            "target": {"recall@2": 1.0, "coverage@1": 0.1, "coverage": 0.3},
        }


def test_a_group_without_events_is_left_out():
    board = Scoreboard(
        ["recall@1"], ListCatalogue(np.zeros(3)), {"all": np.ones(1, bool), "target": np.zeros(1, bool)}
    )
    board.add(np.array([0]))
    assert board.summarise() == {"all": {"recall@1": 1.0}}
