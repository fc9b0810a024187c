"""The shipped source: the ranks of a step share its rows, whatever the cut; what a model reads and no source has is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests_ring import make_ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.errors import ConfigError
from nonet.samples.sources.base import SampleRequest, open_source


@pytest.fixture(scope="module")
def request_of_users(tmp_path_factory):
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    scenario, beside = load_scenario(folder / "ring.yaml")
    seq, items = make_data_setup(scenario, beside).build()
    sids = np.arange(2 * len(items), dtype=np.int32).reshape(-1, 2)
    return SampleRequest(
        stage="pretrain",
        seed=5,
        unit="users",
        rows=10,
        history=8,
        target=None,
        chunk=1 << 14,
        features=("item", "user"),
        events=lambda: seq,
        items=lambda: items,
        sids_IL=sids,
    )


def windows(makes):
    return [uid for make in makes for uid in make().uid]


def test_ranks_share_a_step_and_chunks_cut_it_without_a_loss(request_of_users):
    whole = windows(open_source({}, request_of_users).batch(3, 0, 1))
    parts = [windows(open_source({}, request_of_users).batch(3, rank, 3)) for rank in range(3)]
    assert sorted(uid for part in parts for uid in part) == sorted(whole)
    small = open_source({"use": "shuffled"}, replace(request_of_users, chunk=12)).batch(3, 0, 1)
    assert len(small) > 1
    assert windows(small) == whole


def test_a_step_is_the_same_whatever_was_asked_before(request_of_users):
    one, other = open_source({}, request_of_users), open_source({}, request_of_users)
    one.batch(0, 0, 1)
    assert windows(one.batch(4, 0, 1)) == windows(other.batch(4, 0, 1))
    assert one.state() == {}


def test_its_schema_is_the_columns_and_the_two_ids(request_of_users):
    assert open_source({}, request_of_users).schema == {
        "item": "int64 an event",
        "user": "int64 a sequence",
        "rating": "float32 an event",
    }


def test_a_feature_that_it_lacks_is_named(request_of_users):
    with pytest.raises(
        ConfigError, match=r"has no feature 'itm'; it has item, user, rating. Did you mean 'item'"
    ):
        open_source({}, replace(request_of_users, features=("itm",)))
