"""A run on other data goes on from weights and rows: those who were known keep theirs, the others are new."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ring_world import Ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup import data_checks, preflight
from nonet.errors import DataError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Pretrain the ring: itself, its world and its checkpoint."""
    ring = Ring(tmp_path_factory.mktemp("source"))
    world = ring.world()
    world.train("pretrain")
    return ring, world, world.save(tmp_path_factory.mktemp("commit"))


@pytest.fixture(scope="module")
def grown(trained, tmp_path_factory):
    """Make a ring of more users and items that starts from it."""
    ring, _, commit = trained
    other = Ring(tmp_path_factory.mktemp("grown"), ring.known(), users=75, items=46)
    world = other.world()
    world.load(commit)
    return other, world


def test_known_items_keep_their_semantic_ids_and_new_ones_get_free_ones_of_the_same_codes(trained, grown):
    before, after = trained[0].corpus(), grown[0].corpus()
    place = {item: row for row, item in enumerate(before.items["item_id"].to_pylist())}
    items = after.items["item_id"].to_pylist()
    known = [row for row, item in enumerate(items) if item in place]
    assert 0 < len(known) < len(items)
    assert (after.sids[known] == before.sids[[place[items[row]] for row in known]]).all()
    assert after.codes == before.codes
    assert len({tuple(codes) for codes in after.sids.tolist()}) == len(items)
    new = [tuple(after.sids[row].tolist()) for row in range(len(items)) if items[row] not in place]
    assert not set(new) & {tuple(codes) for codes in before.sids.tolist()}


def test_users_and_items_that_were_known_keep_their_rows_and_others_have_none_yet(trained, grown):
    _, source, _ = trained
    other, world = grown
    for table in ("user", "item"):
        keys, rows = source.rows(table)
        found, same = world.rows(table)
        assert found.tolist() == keys.tolist()
        assert np.array_equal(rows, same)
    seq = other.corpus().seq
    known = np.isin(seq.user_key, source.rows("user")[0])
    assert known[seq.user_id < 160].all()
    assert not known[seq.user_id >= 160].any()
    counts = other.facts["init"]
    assert (counts["known_users"], counts["users"]) == (60, 75)
    assert counts["known_items"] < counts["items"]


def test_it_starts_where_the_source_ended_and_not_afresh(grown, tmp_path):
    world = grown[1]
    cold = Ring(tmp_path, users=75, items=46).world()
    warm, fresh = (there.train("finetune", 0, 1)[0]["loss"] for there in (world, cold))
    assert warm < fresh - 0.3


def test_steps_go_on_from_those_of_the_rows(trained):
    """Rows remember the step that trained them last; a step before it would be refused or look old."""
    from nonet.controller.scenario.scenario import load_scenario
    from nonet.controller.setup.worker_setup import make_stage_setups

    ring, _, _ = trained
    scenario, _ = load_scenario(ring.scenario)
    stages = make_stage_setups(scenario, 60, 720, first_step=500)
    assert [stages[name].first for name in stages] == [500, 518, 524]


def test_a_stage_continues_with_the_optimizer_of_a_checkpoint_or_with_a_new_one(trained):
    ring, source, commit = trained
    world = ring.world()
    stage = world.stages["pretrain"]
    world.trainer.begin(replace(stage, continues=str(commit)))
    kept, expected = (_list_moments(each.trainer) for each in (world, source))
    assert kept.keys() == expected.keys()
    assert all(np.array_equal(kept[place], expected[place]) for place in kept)
    assert any(moment.any() for moment in kept.values())
    world.trainer.begin(stage)
    assert not any(moment.any() for moment in _list_moments(world.trainer).values())


def test_a_run_without_new_events_is_refused_by_the_check_of_its_data(trained, monkeypatch):
    scenario, folder = load_scenario(trained[0].scenario, ["init={from: ring, train: new}"])
    known = replace(trained[0].known(), replay=0.2)
    monkeypatch.setattr(data_checks, "find_warm_start", lambda _: SimpleNamespace(known=known))
    with pytest.raises(DataError, match=r"init.train: new: run ring has trained on all"):
        preflight.check(scenario, folder)


def _list_moments(trainer):
    """Return the tensors of the state of a trainer's dense optimizer that are no counts of steps, by parameter and name."""
    state = trainer.dense.optimizer.state_dict()["state"]
    return {
        (index, name): value.numpy().copy()
        for index, slots in state.items()
        for name, value in slots.items()
        if name != "step" and hasattr(value, "numpy")
    }
