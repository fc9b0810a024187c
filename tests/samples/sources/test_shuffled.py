"""The shipped source: the ranks of a step share its rows, whatever the cut; what a model reads and no source has is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests_ring import make_ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.errors import ConfigError
from nonet.samples.sequences import TRAIN
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


@pytest.fixture
def continued(request_of_users):
    """A request of a continued run that trains on every third event, and these events."""
    seq = request_of_users.events()
    new_targets = (np.arange(len(seq.item)) % 3 == 0) & (seq.split == TRAIN) & (seq.user < 25)
    seq = replace(seq, new_targets=new_targets)
    return replace(request_of_users, events=lambda: seq), np.flatnonzero(new_targets)


def count_steps(source):
    return -(-source.rows // 10)


def test_an_epoch_of_a_continued_run_teaches_each_new_event_once(continued):
    request, events = continued
    seq, source = request.events(), open_source({}, request)
    taught = []
    for rank in (0, 1):
        samples = open_source({}, request)
        for step in range(count_steps(source)):
            for make in samples.batch(step, rank, 2):
                batch = make()
                where = np.flatnonzero(batch.loss_mask.values.numpy())
                rows = np.searchsorted(batch.loss_mask.offsets.numpy(), where, side="right") - 1
                users = batch.context["user"].numpy()[rows].tolist()
                taught += zip(users, batch.time.values.numpy()[where].tolist(), strict=True)
    users = seq.get_user_keys(seq.find_users(events)).tolist()
    assert sorted(taught) == sorted(zip(users, seq.time[events].tolist(), strict=True))
    assert source.rows == len(np.unique(seq.find_users(events))) < len(seq)
    assert source.ledger.manifest.rows == source.rows


def test_a_condition_and_new_events_are_both_required_of_a_target(continued):
    request, events = continued
    seq = request.events()
    seq.targets["liked"] = np.arange(len(seq.item)) % 2 == 0
    source = open_source({}, replace(request, target="liked"))
    makes = [make for step in range(count_steps(source)) for make in source.batch(step, 0, 1)]
    taught = sum(int(make().loss_mask.values.sum()) for make in makes)
    assert taught == int((events % 2 == 0).sum()) > 0
    del seq.targets["liked"]


def test_the_rows_of_a_continued_click_model_are_the_new_events(continued):
    request, events = continued
    request.events().targets["liked"] = np.arange(len(request.events().item)) % 2 == 0
    source = open_source({}, replace(request, unit="events", target="liked"))
    assert source.rows == len(events)
    del request.events().targets["liked"]
