"""A stream of one's own: it says when it begins, its state is in every commit, and no trainer opens the events for it."""

from __future__ import annotations

import pytest
from ring_world import Ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.worker_setup import make_stage_setups
from nonet.errors import CheckpointError, ConfigError

STREAM = '''
from functools import partial
import numpy as np
import torch
from nonet.samples.sources import SampleSource
from nonet.types import Jagged, SampleBatch

SEEN = []

class Walk:
    """Users who walk the ring for ever, eight items a time."""

    schema = {"item": "int64 an event", "user": "int64 a sequence"}

    def __init__(self, request, options):
        self.sids, self.place = request.sids_IL, 0

    def batch(self, step, rank, world):
        first, self.place = self.place, self.place + 1
        SEEN.append(first)
        return [partial(self.walk, first)]

    def walk(self, first):
        item = torch.arange(first, first + 8) % len(self.sids)
        cuts = torch.tensor([0, 8])
        return SampleBatch(
            item=Jagged(item, cuts), sid=torch.from_numpy(self.sids[item].astype(np.int64)),
            time=Jagged(torch.arange(8) * 3600, cuts), event=Jagged(torch.zeros(8, dtype=torch.int64), cuts),
            context={"item": Jagged(item, cuts), "user": torch.zeros(1, dtype=torch.int64)},
            loss_mask=Jagged(torch.ones(8, dtype=torch.bool), cuts), target=None, uid=[f"walk/{first}"],
        )

    def state(self):
        return {"place": self.place}

    def restore(self, state):
        self.place = state["place"]

SPEC = SampleSource(Walk, epoch=lambda options, rows: None)
'''
OWN = "data.source={use: stream.py:SPEC}"
STEPS = "stages={pretrain: {steps: 6, batch: {users: 10}, lr: 3e-3}}"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    made = Ring(tmp_path_factory.mktemp("ring"))
    (made.scenario.parent / "stream.py").write_text(STREAM)
    return made


def seen(world):
    return world.trainer.get_learner(world.stages["pretrain"]).samples.batch.__globals__["SEEN"]


def test_a_trainer_learns_from_a_stream_and_never_opens_the_events(ring):
    world = ring.world(OWN, STEPS)
    records = world.train("pretrain")
    assert len(records) == 6
    assert records[-1]["loss"] < records[0]["loss"]
    assert seen(world)[-6:] == list(range(6))
    assert "seq" not in vars(world.trainer.corpus)


def test_a_commit_has_the_place_in_the_stream(ring, tmp_path):
    one = ring.world(OWN, STEPS)
    one.train("pretrain", 0, 4)
    one.trainer.save(str(tmp_path))
    one.shard.save(str(tmp_path))
    left = one.train("pretrain", 4, 6)
    other = ring.world(OWN, STEPS)
    other.trainer.load(str(tmp_path), other.stages["pretrain"])
    other.shard.load(str(tmp_path))
    assert other.train("pretrain", 4, 6) == left
    assert seen(other)[-2:] == [4, 5]


def test_another_number_of_trainers_cannot_go_on_from_it(ring, tmp_path):
    world = ring.world(OWN, STEPS)
    world.train("pretrain", 0, 1)
    world.trainer.save(str(tmp_path))
    (tmp_path / "samples" / "0-of-1.json").rename(tmp_path / "samples" / "0-of-2.json")
    with pytest.raises(
        CheckpointError, match="other trainers than 0-of-1: their samples are those of 0-of-2"
    ):
        world.trainer.load(str(tmp_path), world.stages["pretrain"])


def test_a_stream_without_an_end_wants_steps(ring):
    scenario, _ = load_scenario(ring.scenario, [OWN])
    with pytest.raises(
        ConfigError, match=r"stages.pretrain: the source stream.py:SPEC has no end: set steps"
    ):
        make_stage_setups(scenario, 60, 700)
