"""A reward's worker in this process: the columns it asks for, its options, and the beams it is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ring_world import Ring

from nonet.errors import ConfigError
from nonet.workers.roles.reward import RewardWorker

OWN = """
import nonet


@nonet.reward
def often(events, valid, *, scale: float = 1.0):
    return events * scale


@nonet.reward
def missing(price):
    return price
"""


AT_ONCE = """
import asyncio
import threading
import time

import numpy as np

import nonet

met, inside, most = threading.Barrier(2), 0, 0


@nonet.reward
async def meeting(valid):
    # answers once another call is under way too
    await asyncio.get_running_loop().run_in_executor(None, met.wait, 30)
    return np.ones(valid.shape)


class Alone(nonet.Reward):
    def score(self, r):
        global inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        inside -= 1
        return np.full(r.valid.shape, most)
"""


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    ring = Ring(tmp_path_factory.mktemp("ring"))
    (ring.scenario.parent / "own.py").write_text(OWN)
    (ring.scenario.parent / "at_once.py").write_text(AT_ONCE)
    return ring


def worker(ring, use, **options):
    made = RewardWorker("own", use, str(ring.scenario.parent), options)
    made.setup()
    made.open(ring.folders)
    return made


def on_wire(beams):
    return {name: values for name, values in beams.items() if name not in ("user", "position")}


def test_a_reward_sees_its_item_s_column_and_its_options(ring):
    world = ring.world()
    beams = world.beams(width=30)
    scores = worker(ring, "own.py:often", scale=2.0).score(on_wire(beams))
    events = world.trainer.corpus.items["events"].to_numpy()
    expected = np.where(beams["valid"], 2.0 * events[np.maximum(beams["item"], 0)], 0.0)
    assert (~beams["valid"]).any()
    assert np.array_equal(scores, expected.astype(np.float32))


def test_hit_is_1_for_the_item_that_came_next(ring):
    world = ring.world()
    beams = world.beams(width=30)
    scores = worker(ring, "hit").score(on_wire(beams))
    seq = world.trainer.corpus.seq
    target = seq.item[seq.offsets[beams["user"]] + beams["position"]]
    assert np.array_equal(scores, (beams["item"] == target[:, None]).astype(np.float32))
    assert scores.sum() > 0


def test_a_column_that_items_do_not_have_is_named_before_anything_is_scored(ring):
    with pytest.raises(ConfigError, match="reward 'own' asks for the column 'price'; items have"):
        worker(ring, "own.py:missing")


def test_an_async_reward_scores_several_groups_at_once(ring):
    beams = on_wire(ring.world().beams(width=4))
    meeting = worker(ring, "at_once.py:meeting")
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(meeting.score, [beams, beams]))
    assert all(np.array_equal(scores, beams["valid"].astype(np.float32)) for scores in found)


def test_a_reward_that_is_not_async_scores_one_group_after_another(ring):
    beams = on_wire(ring.world().beams(width=4))
    alone = worker(ring, "at_once.py:Alone")
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(alone.score, [beams] * 3))
    assert max(scores.max() for scores in found) == 1
